"""Packages of others that an executor calls: whether they can be imported, and if not, why."""

from __future__ import annotations

from importlib import import_module


def not_importable(module: str, title: str, extra: str) -> list[str]:
    """The reason why `module`, of what is called `title`, cannot be imported; empty if it can.

    It is imported for that, since a package that is found may still lack what it needs itself.
    """
    install = f"pip install -e '.[{extra}]' in a checkout"
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return [f"{title} is not installed ({install})"]
        return [f"{title} cannot be imported ({error}; {install})"]
    except Exception as error:  # a library that is not found, or a version that does not fit
        return [f"{title} cannot be imported ({type(error).__name__}: {error}; {install})"]
    return []
