"""`Attachment`: a pipeline that a model uses until it is detached."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from enum import StrEnum
from typing import Any, Final, TypeAlias, cast, final
from uuid import uuid4
from weakref import finalize

import torch
from attrs import field, frozen
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from blocksparse.check.validators import size, whole
from blocksparse.hosts.transformers.adapter import SDPA, SdpaInPlace, TransformersAdapter
from blocksparse.hosts.transformers.layer import Outcomes
from blocksparse.hosts.transformers.prompt_mask import KnownPrompt, PrefillInPlace


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


class _Member(_Ending, StrEnum):  # each name is the only member of its own enumeration
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
    _prompt: KnownPrompt = field(repr=False)

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        configs: Sequence[Any],
        adapter: TransformersAdapter,
        *,
        continuous_batching: bool,
    ) -> Attachment:
        """Register the functions of `adapter` and let all `configs` name them, until the end."""
        key = _PREFIX + uuid4().hex
        before = tuple((config, config._attn_implementation) for config in configs)
        places: list[SdpaInPlace | PrefillInPlace] = []
        end = finalize(model, _restore, key, before, places, adapter.outcomes)
        end.atexit = False
        try:
            if continuous_batching:
                places.append(SdpaInPlace.put(adapter))
            else:
                AttentionInterface.register(key, adapter.attend)
                AttentionMaskInterface.register(key, adapter.mask)
                places.append(PrefillInPlace.put(adapter.modules, adapter.prompt))
            for config, name in before:
                # The public setter would also set sub-configs.
                config._attn_implementation_internal = ending_name(SDPA if continuous_batching else key, name, key)
        except BaseException:
            end()
            raise
        return cls(key, before, end, adapter.prompt)

    def prompt(self, tokens: int) -> AbstractContextManager[None]:
        """Tell in a `with` block how many tokens the prompt has that calls of the model read in chunks.

            with attachment.prompt(len(tokens)):
                for chunk in tokens.split(2048):
                    model(chunk, past_key_values=cache)

        `LastQueries`, and with it `auto`, then means the last queries of the prompt; elsewhere those of each call.
        `generate(prefill_chunk_size=...)` needs no such block. Calls inside torch.compile do not see it.

        Args:
            tokens: the tokens of the prompt, padding and what the cache holds before it included.

        Raises:
            TypeError, ValueError: `tokens` is not a whole number, at least 1.
        """
        size.check(tokens=tokens)
        return self._prompt.of(whole(tokens))

    def detach(self) -> None:
        """Give the model its previous attention back and delete the name. A second call does nothing.

        A config that was set to something else in the meantime is left as it is. No call of the model may be
        running, because its later layers would use another attention function than its earlier ones.

        Raises:
            RuntimeError: the same model still has a later attachment.
        """
        for config, _ in self._before if self._end.alive else ():
            if (owner := _owner(config)) not in (None, self.key):
                raise RuntimeError(f"{self.key} lies below a later attachment. Detach that one ({owner}) first.")
        self._end()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _owner(config: Any) -> str | None:
    """The key of the attachment whose name a config has, or None."""
    return getattr(config._attn_implementation, "owner", None)


def _restore(
    key: str,
    before: Sequence[tuple[Any, str | None]],
    places: Sequence[SdpaInPlace | PrefillInPlace],
    outcomes: Outcomes,
) -> None:
    for config, name in before:
        if _owner(config) == key:
            config._attn_implementation_internal = name
    for place in places:
        place.end()
    # transformers can register a name for the class, but can delete it only from an instance.
    AttentionInterface._global_mapping.pop(key, None)
    AttentionMaskInterface._global_mapping.pop(key, None)
    outcomes.tell()
