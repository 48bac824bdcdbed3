"""Shows the API reference what attrs makes of a class, and what stands beside its fields in the source."""

from __future__ import annotations

import io
import re
import tokenize
from typing import Any

from griffe import (
    Attribute,
    Class,
    Docstring,
    Expr,
    ExprCall,
    ExprKeyword,
    Extension,
    Function,
    Module,
    Parameter,
    ParameterKind,
    Parameters,
)

SHAPE = re.compile(r"(\[[^\[\]]*\])")  # a tensor's, such as [B, H, M, N]


class AttrsClasses(Extension):  # type: ignore[misc]  # griffe is not installed where mypy runs
    """Gives attrs classes an `__init__`, and fields the comment that ends their line as a docstring."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        _visit(pkg)


def _visit(parent: Module | Class) -> None:
    for member in list(parent.members.values()):
        if isinstance(member, Class):
            _describe_fields(member)
            if _is_attrs(member) and "__init__" not in member.members:
                member.set_member("__init__", _init(member))
        if isinstance(member, Module | Class):
            _visit(member)


def _is_attrs(cls: Class) -> bool:
    return any(decorator.callable_path in ("attrs.frozen", "attrs.define") for decorator in cls.decorators)


def _fields(cls: Class) -> list[Attribute]:
    return [
        member
        for member in cls.members.values()
        if isinstance(member, Attribute) and member.annotation is not None and "property" not in member.labels
    ]


def _init(cls: Class) -> Function:
    """What attrs makes: fields of the base classes first, those with `kw_only` last."""
    parameters: dict[str, Parameter] = {}
    for each in (*reversed(cls.mro()), cls):
        for field in _fields(each) if _is_attrs(each) else ():
            said = _arguments(field.value)
            if str(said.get("init")) == "False":
                continue
            keyword = str(said.get("kw_only")) == "True"
            parameters[field.name] = Parameter(
                field.name.lstrip("_"),
                annotation=field.annotation,
                kind=ParameterKind.keyword_only if keyword else ParameterKind.positional_or_keyword,
                default=said.get("default", said.get("factory")),
            )
    by_place = sorted(parameters.values(), key=lambda x: x.kind is ParameterKind.keyword_only)
    this = Parameter("self", kind=ParameterKind.positional_or_keyword)
    return Function("__init__", parent=cls, parameters=Parameters(this, *by_place), returns="None")


def _arguments(value: str | Expr | None) -> dict[str, str | Expr | None]:
    """What a field says of itself: the arguments of `field(...)`, or its default alone."""
    if isinstance(value, ExprCall) and value.canonical_path == "attrs.field":
        return {x.name: x.value for x in value.arguments if isinstance(x, ExprKeyword)}
    return {"default": value}


def _describe_fields(cls: Class) -> None:
    for field in _fields(cls):
        if field.docstring is None and not field.name.startswith("_") and field.lineno:
            source = io.StringIO("\n".join(field.lines).strip() + "\n")
            comments = [x.string for x in tokenize.generate_tokens(source.readline) if x.type == tokenize.COMMENT]
            if comments:
                field.docstring = Docstring(SHAPE.sub(r"`\1`", comments[-1].lstrip("# ")), parent=field)
