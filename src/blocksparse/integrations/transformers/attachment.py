"""`Attachment`: a pipeline that a transformers model uses until it is detached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from types import TracebackType
from typing import Any, final
from uuid import uuid4
from weakref import finalize

from attrs import field, frozen
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

_PREFIX = "blocksparse-"


@final
@frozen(eq=False)
class Attachment:
    """A pipeline in a model, under its own name in transformers' registries, until `detach()`.

    A model may have several attachments. The latest one is in use, and they must be detached in reverse order. A
    deep copy or a pickle of the model has no pipeline; it attends as the model did before. When the model is
    garbage-collected, its attachments end too.
    """

    key: str
    _before: tuple[tuple[Any, str | None], ...] = field(repr=False)  # every config and the name that it had before
    _end: finalize[..., Any] = field(repr=False)

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        configs: Sequence[Any],
        *,
        attend: Callable[..., Any],
        mask: Callable[..., Any],
        ended: Callable[[], None],
    ) -> Attachment:
        """Register these two functions and let all `configs` name them, until the end; then call `ended`."""
        key = _PREFIX + uuid4().hex
        before = tuple((config, config._attn_implementation) for config in configs)
        end = finalize(model, _restore, key, before, ended)
        end.atexit = False
        try:
            AttentionInterface.register(key, attend)
            AttentionMaskInterface.register(key, mask)
            for config, name in before:
                config._attn_implementation_internal = _Name(key, name)  # the public setter sets sub-configs too
        except BaseException:
            end()
            raise
        return cls(key, before, end)

    def detach(self) -> None:
        """Give the model its previous attention back and delete the name. A second call does nothing.

        A config that was set to something else in the meantime is left as it is. No call of the model may be
        running, because its later layers would use another attention function than its earlier ones.

        Raises:
            RuntimeError: the same model still has a later attachment.
        """
        for config, _ in self._before if self._end.alive else ():
            if (current := config._attn_implementation or "") != self.key and current.startswith(_PREFIX):
                raise RuntimeError(f"{self.key} lies below a later attachment: detach that one ({current}) first")
        self._end()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()


@final
class _Name(str):
    """A name in transformers' registries. It ends with its attachment, so a copy of it is the previous name."""

    before: str | None

    def __new__(cls, name: str, before: str | None) -> _Name:
        self = super().__new__(cls, name)
        self.before = before
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> str | None:
        return deepcopy(self.before, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return deepcopy, (self.before,)


def _restore(key: str, before: Sequence[tuple[Any, str | None]], ended: Callable[[], None]) -> None:
    for config, name in before:
        if config._attn_implementation == key:
            config._attn_implementation_internal = name
    # transformers can register a name for the class, but can delete it only from an instance.
    AttentionInterface._global_mapping.pop(key, None)
    AttentionMaskInterface._global_mapping.pop(key, None)
    ended()
