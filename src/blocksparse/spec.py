"""`AttentionSpec`: the options of a layer's softmax attention, as one value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypedDict, final

import torch
from attrs import converters, evolve, field, frozen
from torch import Tensor

from blocksparse.check.per_head import (
    HeadValues,
    PerHead,
    by_head,
    is_plain,
    may_be_numbers,
    numbers,
    over_blocks,
    per_head,
    read,
    wrong_heads,
)
from blocksparse.check.validators import Rule, count, flag, is_real, maybe_whole, optional, shown, size, whole
from blocksparse.kernels.masks.arguments import LogitChange

# Kernels multiply the scale by log2(e) and by their own scales in fp32; these bounds leave room for that.
LEAST_SCALE, MOST_SCALE = 2.0**-64, 2.0**64


def checked_scale(scale: float) -> float:
    """The scale as a float. Any `numbers.Real` is accepted, including numpy's scalars."""
    if not is_real(scale):
        raise TypeError(f"'scale' must be a number: {type(scale).__name__}. Convert it with float().")
    try:
        value = float(scale)
    except OverflowError:  # an integer that is too large for a float
        value = math.inf
    if not (value == 0 or LEAST_SCALE <= abs(value) <= MOST_SCALE):
        raise ValueError(
            f"'scale' must be 0 or of a magnitude from 2**-64 to 2**64: {value}. None is 1 / sqrt(D)."
        )
    return value


def _as_python(value: float | None) -> float | None:
    """Converter: a real number of another library becomes a `float`; what is none stays, for a rule to refuse."""
    return float(value) if type(value) not in (int, float) and is_real(value) else value  # type: ignore[arg-type]


_softcap = Rule(
    "a number from 1e-30 to 1e30",
    is_real,
    lambda x: 1e-30 <= x <= 1e30,  # fp32, in which logits are divided by it, rounds less than 1e-45 to 0
)
_softcap_or_none = optional(_softcap)
_window = optional(size)
_MOST_SINK = 2.0**100  # which kernels can multiply by log2(e) in fp32; no dtype rounds 1e30 beyond it
_sink = numbers("a number up to 2**100, or -inf for no sink", lambda x: x <= _MOST_SINK)


class AttentionOptions(TypedDict, total=False):
    """The arguments of a call of attention that become its `AttentionSpec`."""

    causal: bool
    scale: float | None
    window: int | None
    softcap: float | None
    sinks: Any  # a number, a sequence or a tensor [Hq] of numbers, or None
    remaining: int


def check_options(options: AttentionOptions) -> None:
    """Check the arguments that a node of a graph cannot check, since it gets numbers and a tensor.

    torch.compile traces this. The node itself checks the numbers in sinks, and for how many heads they are.
    """
    _refuse_unknown(options)
    flag.check(causal=options.get("causal", True))
    _window.check(window=options.get("window"))
    _softcap_or_none.check(softcap=options.get("softcap"))
    count.check(remaining=options.get("remaining", 0))
    if not may_be_numbers(sinks := options.get("sinks")):
        raise TypeError(f"'sinks' must be {_sink.what}: {shown(sinks)}")


def _refuse_unknown(options: Mapping[str, object]) -> None:
    if unknown := options.keys() - AttentionOptions.__annotations__.keys():
        more = ", ".join(sorted(unknown))
        raise TypeError(
            f"this call takes causal, scale, window, softcap, sinks and remaining, but no {more}. Leave it out."
        )


def _as_sinks(value: Any) -> PerHead:
    """Converter: as of any option per head. A sink below -2**100, as a dtype's lowest number is, becomes -inf."""
    found = per_head(value)
    if isinstance(found, HeadValues) and min(found.numbers) < -_MOST_SINK:
        return HeadValues(found.values.masked_fill(found.values < -_MOST_SINK, float("-inf")))
    return float("-inf") if isinstance(found, float) and found < -_MOST_SINK else found


@final
@frozen(kw_only=True, cache_hash=True)
class AttentionSpec:
    """Options of exact attention: what a layer computes if every block is kept.

        AttentionSpec(scale=D**-0.5, window=4096)

    Equal specs are equal values. Users of a pipeline pass these fields to its call; a stage gets them as one.

    Args:
        scale: factor of the logits.
        causal: query `i` sees only the keys up to position `N - M + i`.
        window: a sliding window in tokens. A query at position `p` sees the keys at `p - window < k <= p`, as with
            Hugging Face's `sliding_window`. None for no window.
        softcap: a logit `x`, after the scale, becomes `softcap * tanh(x / softcap)` (Gemma 2). None caps nothing.
        sinks: one more logit without a value, which enters the softmax denominator alone (GPT-OSS). One for all
            query heads or one for each, up to 2**100. It is neither scaled nor capped. None is a plain softmax. A
            head with -inf, or less than -2**100, has no sink.
        remaining: tokens of the prompt after the last query of the call. 0 if the call ends the prompt. Attention
            is the same for any number. Selectors that treat the end of a prompt apart need it.

    Raises:
        TypeError, ValueError: a field is not of its kind or out of its range, or a window is not causal.
    """

    scale: float = field(converter=checked_scale)
    causal: bool = field(default=True, validator=flag)
    window: int | None = field(default=None, converter=maybe_whole, validator=_window)
    softcap: float | None = field(default=None, converter=_as_python, validator=_softcap_or_none)
    sinks: PerHead | None = field(
        default=None, converter=converters.optional(_as_sinks), validator=optional(_sink)
    )
    remaining: int = field(default=0, converter=whole, validator=count)

    @window.validator
    def _is_causal(self, _: object, window: int | None) -> None:
        if window is not None and not self.causal:
            raise ValueError(
                f"a sliding window is causal, a query sees the window={shown(window)} tokens that end with its "
                "own. Call with causal=True, or without a window."
            )

    @staticmethod
    def of(heads: int, scale: float, options: AttentionOptions) -> AttentionSpec:
        """The spec of a call of `heads` query heads, with a known scale.

        Objects are cached, since every call of a layer needs one.

        Raises:
            TypeError, ValueError: as in the class; or sinks are for another number of heads.
        """
        given: dict[str, Any] = {**options, "scale": scale}
        sinks = given.get("sinks")
        if isinstance(sinks, Tensor) and sinks.ndim == 1 and sinks.device.type != "cpu" and is_plain(sinks):
            sinks = given["sinks"] = read(sinks)
        spec = None
        if sinks is None or isinstance(sinks, float | HeadValues):
            try:
                spec = _remembered(**given)
            except TypeError:  # of a value that cannot be looked up, which the class refuses in its own words
                spec = None
        if spec is None:
            _refuse_unknown(given)
            spec = AttentionSpec(**given)
        spec.check_heads(heads)
        return spec

    def arguments(self) -> AttentionOptions:
        """The fields as arguments of a pipeline's call."""
        # `AttentionOptions(...)` would make the same, but torch.compile cannot trace it.
        return {
            "causal": self.causal,
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "remaining": self.remaining,
        }

    def with_remaining(self, remaining: int) -> AttentionSpec:
        """The same spec with another `remaining`. Objects are cached, as in `of`."""
        return self if remaining == self.remaining else _placed(self, remaining)

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain softmax, without softcap and sinks."""
        return self.softcap is None and self.sinks is None

    def check_heads(self, heads: int) -> None:
        """Refuse sinks that are not one for each of these query heads.

        Raises:
            ValueError: they are for another number of heads.
        """
        for reason in wrong_heads("sinks", self.sinks, heads):
            raise ValueError(reason)

    def of_heads(self, heads: Sequence[int], kv_heads: int) -> AttentionSpec:
        """The spec of some of the `kv_heads` KV heads of a layer, with the sinks of their query heads.

        Raises:
            ValueError: the sinks are not as many for each KV head.
        """
        if not isinstance(self.sinks, HeadValues):
            return self
        values = self.sinks.values
        if len(values) % kv_heads:
            raise ValueError(f"'sinks' must have as many entries for each of {kv_heads} KV heads: {len(values)}")
        by_kv_head = values.view(kv_heads, -1)
        return evolve(self, sinks=torch.cat([by_kv_head[head] for head in heads]))

    def for_kernel(self, q: Tensor) -> LogitChange:
        """The arguments of the portable kernel for `q` `[B, Hq, M, D]`."""
        return LogitChange(self.softcap, None if self.sinks is None else by_head(self.sinks, q))

    def capped(self, logits: Tensor) -> Tensor:
        """The logits after the cap; they are overwritten."""
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def with_sinks(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Add the sinks to attention `out` `[B, Hq, M, Dv]` and its lse `[B, Hq, M]`, both computed without them.

        A query without a kept key keeps its output of 0, and has the sink as its lse; -inf where there is none.
        """
        if self.sinks is None:
            return out, lse
        sinks = over_blocks(self.sinks, lse.unsqueeze(3)).squeeze(3).to(lse.dtype)
        # Share of the softmax that is not the sink's. Where there is no sink, lse may be -inf as well.
        share = torch.sigmoid(lse - sinks).masked_fill_(sinks == float("-inf"), 1.0)
        return out * share.unsqueeze(3), torch.logaddexp(lse, sinks)


_remembered = lru_cache(maxsize=1024, typed=True)(AttentionSpec)


@lru_cache(maxsize=1024)
def _placed(spec: AttentionSpec, remaining: int) -> AttentionSpec:
    return evolve(spec, remaining=remaining)
