"""What a patched model does: a wrapper of its forward calls, and inside them an override of its attention.

ComfyUI calls `wrapper(executor, *args, **kwargs)` around each forward call of a model
(`WrappersMP.DIFFUSION_MODEL`), and every function of attention calls
`transformer_options["optimized_attention_override"]`, if that is there. The override is there only while the
forward call runs, on top of what other nodes put there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, final

import torch
from attrs import define, field, frozen
from torch import Tensor

from blocksparse import Pipeline
from blocksparse.hosts.token_layout import TokenLayout, check_orders, placed

from .layout import Latents, token_layout

OVERRIDE = "optimized_attention_override"
_MAX_LAYOUTS = 16  # sizes for which pipelines are kept
_HARMLESS = ("transformer_options", "_inside_attn_wrapper", "scale", "enable_gqa")  # options of attention
_FLAGS = ("causal", "is_causal")  # change nothing where they are off


@final
@define(eq=False)
class SparsePatch:
    """A pipeline for the attention of a model, and when it attends.

    Args:
        pipeline: what attends; its order gets the grid of each call.
        dense_steps: how many of the first steps of a run stay dense.
        dense_blocks: the blocks of the model that stay dense.
        min_tokens: attention over fewer tokens stays dense.
        verbose: whether to log, once each, what is sparse and why calls are dense.
    """

    pipeline: Pipeline[Any, Any, Any]
    dense_steps: int
    dense_blocks: frozenset[int]
    min_tokens: int
    verbose: bool = False
    _placed: dict[Any, Any] = field(init=False, factory=dict)
    _said: set[str] = field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        check_orders(self.pipeline)

    def wrapper(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a forward call of the model with sparse attention."""
        given = arguments(executor.original, args, kwargs)
        options = given.get("transformer_options")
        if options is None:
            self.say("dense: the model is not told its options")
            return executor(*args, **kwargs)
        found = options.get(OVERRIDE)
        # Of two of these patches the inner one decides, also on what is dense.
        before = found.before if isinstance(found, Override) else found
        dense = self.dense_step(options)
        put(options, before if dense else Override(self, before, Latents.of(executor.class_obj, given)))
        try:
            return executor(*args, **kwargs)
        finally:
            put(options, found)

    def dense_step(self, options: Mapping[str, Any]) -> bool:
        """Whether all attention of a forward call with these options is dense."""
        if not self.dense_steps:
            return False
        step = step_of(options)
        if step is None:
            self.say("dense: the sampler does not tell its steps, so each may be the first")
        elif step < self.dense_steps:
            self.say("dense: first steps")
        return step is None or step < self.dense_steps

    def attend(self, layout: TokenLayout, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Attend `q` `[B, Hq, N, D]` to `k` and `v` `[B, Hkv, N, D]` as `layout` says."""

        def attend(text: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
            kept = layout.grids, text, q.device
            if kept not in self._placed:
                while len(self._placed) >= _MAX_LAYOUTS:
                    self._placed.pop(next(iter(self._placed)))
                self._placed[kept] = placed(self.pipeline, layout.grids, text, q.device)
            pipeline = self._placed[kept]
            return lambda q, k, v: pipeline(q, k, v, causal=False, scale=scale)

        return layout.attend(attend, q, k, v, padded=False)

    def say(self, message: str) -> None:
        """Log a message if `verbose`, the first time that it is said."""
        if self.verbose and message not in self._said:
            self._said.add(message)
            logging.info("blocksparse: %s", message)

    def warn(self, message: str) -> None:
        """Log a warning, the first time that it is said."""
        if message not in self._said:
            self._said.add(message)
            logging.warning("blocksparse: %s", message)


@final
@frozen(eq=False)
class Override:
    """The attention of one forward call."""

    patch: SparsePatch
    before: Callable[..., Tensor] | None  # the override of another node
    latents: Latents

    def __call__(
        self,
        func: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Attend as `func` would: `q`, `k`, `v` are `[B, N, H * D]`, or `[B, H, N, D]` with `skip_reshape`.

        The output is `[B, N, H * D]`, or `[B, H, N, D]` with `skip_output_reshape`.
        """
        options = kwargs.get("transformer_options") or {}
        tokens = q.shape[-2]
        layout = token_layout(self.latents, options, tokens)
        if reason := self.dense_because(q, k, v, mask, options, layout) or unknown_option(kwargs):
            self.patch.say(f"{tokens} tokens dense: {reason}")
            same = {
                "mask": mask,
                "attn_precision": attn_precision,
                "skip_reshape": skip_reshape,
                "skip_output_reshape": skip_output_reshape,
                **kwargs,
            }
            if self.before is None:
                return func(q, k, v, heads, **same)
            return self.before(func, q, k, v, heads, **same)
        assert layout is not None
        if self.patch.dense_blocks and "block_index" not in options:
            self.patch.warn("'dense_blocks' leaves nothing dense here: this model does not number its blocks")
        if not skip_reshape:
            q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        self.patch.say(f"{tokens} tokens sparse, grid {' and '.join(map(str, layout.grids))}, {layout.text} kept")
        out = self.patch.attend(layout, q, k, v, kwargs.get("scale"))
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    def dense_because(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
        layout: TokenLayout | None,
    ) -> str | None:
        """The first reason why this call must be dense, or None."""
        if options.get("block_index") in self.patch.dense_blocks:
            return "dense block"
        if q.shape != k.shape or q.shape != v.shape:
            return "cross attention"
        if mask is not None:
            return "mask"
        if q.shape[-2] < self.patch.min_tokens:
            return "fewer than min_tokens"
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return "gradients"
        return "where pictures and text stand is not known of this model" if layout is None else None


def arguments(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward call by name, in the order of its signature."""
    expected = signature(forward)
    given = dict(expected.bind_partial(*args, **kwargs).arguments)
    for name, parameter in expected.parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def put(options: dict[str, Any], override: Callable[..., Tensor] | None) -> None:
    """Let the attention of a forward call go to `override`, or to the host's own."""
    if override is None:
        options.pop(OVERRIDE, None)
    else:
        options[OVERRIDE] = override


def unknown_option(kwargs: Mapping[str, Any]) -> str | None:
    """The first option of a call of attention that may change its meaning, as a reason to be dense; or None."""
    for name, value in kwargs.items():
        if name not in _HARMLESS and value is not None and not (name in _FLAGS and value is False):
            return f"the option {name}"
    return None


def step_of(options: Mapping[str, Any]) -> int | None:
    """The step of a run that a forward call belongs to, from 0 on; None if the sampler does not tell.

    Steps count in the order in which they come, with sigmas that fall or, in an inversion, rise. A sampler may
    call the model between two steps; that counts as the step that has begun. The host waits once per forward call.
    """
    sigmas, now = options.get("sample_sigmas"), options.get("sigmas")
    if sigmas is None or now is None:
        return None
    sigmas, now = sigmas.to(now.device), now.max()
    passed = torch.where(sigmas[0] < sigmas[-1], sigmas < now * (1 - 1e-5), sigmas > now * (1 + 1e-5))
    return int(passed.sum())
