"""A name in transformers' registries that ends with its attachment: a copy of it is the name that it replaced."""

from __future__ import annotations

from copy import deepcopy
from enum import StrEnum
from typing import Any, Final, TypeAlias, cast, final

import torch


class _Ending:
    before: str | None  # the name that it replaced
    owner: str  # the key of its attachment

    def __copy__(self) -> Any:
        return self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.before, memo)

    def __reduce_ex__(self, proto: object) -> tuple[Any, ...]:
        return deepcopy, (self.before,)


@final
class _Text(_Ending, str):
    pass


class _Member(_Ending, StrEnum):  # each name is the one member of an enumeration of its own
    def startswith(self, *asked: Any) -> bool:  # which PyTorch 2.11 compiles if it is written in Python
        return self.value.startswith(*asked)


EndingName: TypeAlias = _Text | _Member

# torch.compile must take the name for a constant. Of strings with attributes, PyTorch 2.11 does so with members of
# enumerations alone, and later releases with all others.
_ENUMERATED: Final = torch.__version__.startswith("2.11.")


def ending_name(name: str, before: str | None, owner: str) -> EndingName:
    """`name`, which the attachment `owner` put in the place of `before`."""
    made: EndingName = cast("Any", _Member)("Name", {"ONLY": name})["ONLY"] if _ENUMERATED else _Text(name)
    made.before, made.owner = before, owner
    return made
