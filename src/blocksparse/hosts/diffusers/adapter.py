"""What attends in each layer of a model while one of its forward calls runs, and which denoising step that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from threading import get_ident
from typing import Any, final
from weakref import ref

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from blocksparse.hosts.diffusers.families import Arguments, Family
from blocksparse.hosts.token_layout import TokenLayout, placed
from blocksparse.launch.torch_private import under_a_function_mode
from blocksparse.layers.head_groups import Attention
from blocksparse.layers.reused_mask import MaskCache, ReusedMask
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.observe.audit import Audit, AuditedAttention
from blocksparse.observe.density_recorder import DensityRecorder, RecordedAttention
from blocksparse.pipeline import Pipeline

_Prompts = list[ref[Tensor]]


@final
@define(eq=False)
class StepCounter:
    """Counts denoising steps by the timesteps and the prompts that a model is called with.

    Calls with one timestep, as for the two halves of classifier-free guidance, are one step. A timestep nearer to
    noise than the last one begins another run at step 0. After a run that was interrupted, another one may begin
    nearer to the picture. It is known by its prompt, a tensor that the last run did not have, if this pipeline has
    passed one tensor in several steps. That can be a mistake, as for a half of guidance that begins late and comes
    first. Then the run's own prompts come back, or each step has another prompt. The count goes on, and prompts
    are ignored from there on.

    Three cases are counted wrongly. A run is not noticed if it begins where the last one was stopped, or nearer to
    the picture, with the very same tensor as its prompt. The same holds after a run that was stopped in its first
    step. A prompt that a callback replaces once in the middle begins a run. In an inversion, from picture to
    noise, every step begins one.

    Args:
        rising: whether the model's timesteps rise from noise to picture. Most fall.
    """

    rising: bool = False
    _step: int = 0
    _last: float | None = None
    _prompts: _Prompts = field(factory=list)  # of this run
    _lasting: bool | None = None  # whether prompts tell runs apart; None while it is not known
    _before: tuple[int, _Prompts] | None = None  # the step and the prompts of the run that a prompt ended
    _latents: ref[Tensor] | None = None  # of the last call

    def at(self, timestep: float, prompt: Tensor | None = None, latents: Tensor | None = None) -> int:
        """The step that a call with this timestep belongs to, from 0 on.

        Args:
            prompt: a tensor that the host passes in every step of one run, or of one half of its guidance.
            latents: the tensor that both halves of a step share. Another one, with a prompt that is not known,
                begins a run even at the timestep at which the last one ended.
        """
        now, known = -timestep if self.rising else timestep, _holds(self._prompts, prompt)
        others = latents is not None and self._latents is not None and self._latents() is not latents
        self._latents = None if latents is None else ref(latents)
        later = self._last is not None and (now < self._last or (now == self._last and others and self._step > 0))
        if self._last is None or now > self._last:
            self._begin(None)
        elif self._before is not None and _holds(self._before[1], prompt):
            self._go_on(nearer=now < self._last)
        elif later and self._lasting and prompt is not None and not known:
            if self._before is not None and self._step == 0:  # a run of one step: prompts are made again in each
                self._go_on(nearer=True)
            else:
                self._begin((self._step, self._prompts))
        elif now < self._last:
            self._step += 1
            if known and self._lasting is None:
                self._lasting = True
        if prompt is not None and not _holds(self._prompts, prompt):
            self._prompts = [each for each in self._prompts if each() is not None] + [ref(prompt)]
        self._last = now
        return self._step

    def _go_on(self, *, nearer: bool) -> None:
        """Take note that the run before goes on, and that prompts do not tell runs apart."""
        assert self._before is not None
        self._step += self._before[0] + 1 + nearer
        self._prompts += self._before[1]
        self._lasting, self._before = False, None

    def _begin(self, before: tuple[int, _Prompts] | None) -> None:
        self._step, self._prompts, self._before = 0, [], before


def _holds(prompts: _Prompts, prompt: Tensor | None) -> bool:
    """Whether a tensor is one of these, or a view of one."""
    mine = [x for x in (prompt, None if prompt is None else prompt._base) if x is not None]
    return any(each() is x for each in prompts for x in mine)


_MAX_LAYOUTS = 32  # sizes of pictures and lengths of text for which pipelines are kept

Placed = Mapping[tuple[int, int], Attention]
"""What attends, by the layer and the number of tokens of text."""


@final
@frozen(eq=False)
class StepSchedule:
    """The pipeline of each layer from the denoising step `first` on, and the layer that chooses its blocks."""

    first: int
    layers: tuple[LayerPipeline | None, ...]
    choosers: tuple[int, ...]


@final
@define(eq=False)
class ForwardCall:
    """One forward call of a model: its tokens, and what attends to them. Compiled code reads it."""

    layout: TokenLayout
    placed: Placed
    dense: str | None  # why all attention of the call is dense
    thread: int | None  # None for no call


_NO_CALL = ForwardCall(TokenLayout(()), {}, "outside a forward call", None)


@final
@define(eq=False)
class DiffusersAdapter:
    """The state of an attached model: what attends in each layer, and the forward call that runs now, if one does.

    Args:
        schedules: what attends, in the order of steps.
        dense_steps: denoising steps that are dense.
        min_tokens: calls with fewer tokens are dense.
        cache: keeps masks for several steps. None if each call chooses.
        masking: layers whose processors are not of diffusers, so that their masks may hide more than padding.
    """

    family: Family
    config: Any
    schedules: tuple[StepSchedule, ...]
    dense_steps: frozenset[int]
    min_tokens: int
    recorder: DensityRecorder | None
    audit: Audit | None = None
    cache: MaskCache | None = None
    masking: set[int] = field(factory=set)
    now: ForwardCall = _NO_CALL
    schedule: StepSchedule = field(init=False)  # of the step of the last forward call
    _steps: StepCounter = field(init=False)
    _kept: dict[Any, Placed] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.schedule = self.schedules[0]
        self._steps = StepCounter(self.family.rising)

    def begin(self, given: Arguments, *, trains: str | None = None) -> None:
        """Take note of the arguments of a forward call that begins.

        Args:
            trains: why all attention of the call is dense, if it belongs to a training step.
        """
        if self.elsewhere:
            raise RuntimeError(
                "a forward call of this model still runs in another thread. An attached model runs one at a time."
            )
        if self.dense_steps or self.cache is not None or len(self.schedules) > 1:
            # Per frame or token in some models, which may not all be at one timestep. Exact if they are.
            timestep = float(
                torch.as_tensor(self.family.timestep(given), dtype=torch.float64, device="cpu").mean()
            )
            prompt = self.family.prompt(given)
            latents = next((x for x in given.values() if isinstance(x, Tensor)), None)
            step = self._steps.at(timestep, prompt, latents)
            self.schedule = [each for each in self.schedules if each.first <= step][-1]
            if self.cache is not None:
                self.cache.begin(step, prompt)
            if step in self.dense_steps:
                self.now = ForwardCall(TokenLayout(()), {}, "dense step", get_ident())
                return
        if trains is not None:
            self.now = ForwardCall(TokenLayout(()), {}, trains, get_ident())
            return
        layout = self.family.layout(self.config, given)
        if layout is None:
            self.now = ForwardCall(TokenLayout(()), {}, "tokens of no whole grid", get_ident())
        else:
            # Not the model's device, which may be offloaded.
            device = next(x.device for x in given.values() if isinstance(x, Tensor))
            self.now = ForwardCall(layout, self._placed(layout, device), None, get_ident())

    def end(self) -> None:
        """Take note that the forward call of this thread has ended, by an exception or not."""
        if not self.elsewhere:
            self.now = _NO_CALL

    @property
    def elsewhere(self) -> bool:
        """Whether a forward call runs in another thread.

        One of this thread has ended, even if that was not noted: PyTorch calls no hook after an interrupt from the
        keyboard.
        """
        return self.now.thread not in (None, get_ident())

    def _placed(self, layout: TokenLayout, device: torch.device) -> Placed:
        kept = layout.grids, layout.texts, device, self.schedule.first
        if kept not in self._kept:
            while len(self._kept) >= _MAX_LAYOUTS:
                self._kept.pop(next(iter(self._kept)))
            layers = [(i, attention) for i, attention in enumerate(self.schedule.layers) if attention is not None]
            once = {
                (same, text): placed(attention, layout.grids, text, device)
                for same, attention in {id(attention): attention for _, attention in layers}.items()
                for text in layout.texts
            }
            self._kept[kept] = {
                (layer, text): self._wrapped(once[id(attention), text], layer)
                for layer, attention in layers
                for text in layout.texts
            }
        return self._kept[kept]

    def _wrapped(self, attention: Attention, layer: int) -> Attention:
        """`attention`, whose masks are reused and whose calls are audited and recorded as asked for."""
        fallen_back = None
        if self.cache is not None and isinstance(attention, Pipeline):
            crossings = int if self.audit is None else partial(self.audit.crossed, layer)
            attention = ReusedMask(attention, layer, self.schedule.choosers[layer], self.cache, crossings)
            fallen_back = "it fell back, as an audit crossed a bound"
        if self.audit is not None:
            attention = AuditedAttention(attention, layer, self.audit, fallen_back)
        return attention if self.recorder is None else RecordedAttention(attention, layer, self.recorder)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        *,
        ranks: int = 1,
        dense: Callable[[], Tensor],
    ) -> Tensor:
        """Attend `q` `[B, Hq, N, D]` to `k` and `v` `[B, Hkv, N, D]` by the pipeline of `layer`, or by `dense()`.

        `q` may lack tokens of text at the front.

        Args:
            ranks: over how many ranks of Ulysses the tokens were spread, each with its own part of the text.
        """
        if reason := self._dense_because(layer, q, k, v, attn_mask, dropout_p, is_causal):
            self.saw_dense(layer, reason)
            return dense()
        layout, here = self.now.layout, self.now.placed

        def attend(text: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
            attention = here[layer, text]
            return lambda q, k, v: attention(q, k, v, causal=False, scale=scale)

        if ranks > 1:
            q, k, v = (layout.gathered(x, ranks) for x in (q, k, v))
        out = layout.attend(attend, q, k, v, padded=attn_mask is not None)
        return layout.scattered(out, ranks) if ranks > 1 else out

    def saw_dense(self, layer: int, reason: str) -> None:
        """Record a dense call."""
        # Inside torch.compile this would run only when the graph is traced, so nothing is recorded there.
        if self.recorder is not None and not torch.compiler.is_compiling():
            self.recorder.saw_dense(layer, reason)

    def dense_before_gathering(
        self, layer: int, q: Tensor, attn_mask: Tensor | None, *, ranks: int, ring: bool
    ) -> str | None:
        """The first reason for dense attention that is known before ranks exchange tokens and heads, or None."""
        if reason := self._dense_anyway(layer):
            return reason
        if ring:
            return "ring attention"
        layout = self.now.layout
        if layout.text and not layout.together and (layout.text % ranks or layout.cells % ranks):
            return "uneven parts of ranks"
        if attn_mask is not None:
            return "mask"
        return "gradients" if torch.is_grad_enabled() and q.requires_grad else None

    def _dense_anyway(self, layer: int) -> str | None:
        """The reason for dense attention that does not depend on the tensors, or None."""
        if self.schedule.layers[layer] is None:
            return "no pipeline for this layer"
        # Such as that of perturbed-attention guidance, which puts the values in the place of attention.
        return "function mode" if under_a_function_mode() else self.now.dense

    def _dense_because(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
    ) -> str | None:
        """The first reason why this call must be dense, or None."""
        if reason := self._dense_anyway(layer):
            return reason
        layout = self.now.layout
        text, lacking = k.shape[2] - layout.cells, k.shape[2] - q.shape[2]
        if lacking and not (text == layout.text and 0 < lacking <= layout.lengths(text)[0]):
            return "cross attention"
        if text not in layout.texts:
            return "other tokens"
        if attn_mask is not None:
            # Numbers are added to the logits, also 1 for tokens that are real; FlexAttention has masks of its own.
            if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool or layer in self.masking:
                return "mask"
            if not (layout.real and len(layout.real) == q.shape[0] and text == layout.text):
                return "mask"
        if is_causal:
            return "causal"
        if dropout_p:
            return "dropout"
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return "gradients"
        return "fewer than min_tokens" if q.shape[2] < self.min_tokens else None


def layer_names(model: nn.Module, family: Family) -> list[list[str]]:
    """The names of the attention modules over pictures in each block of the model, in the order of its blocks."""
    parts = {name: part for name, part in model.named_children() if isinstance(part, nn.ModuleList)}
    blocks = [
        (f"{name}.{i}", block)
        for name in (parts if family.parts is None else family.parts)
        for i, block in enumerate(parts.get(name, ()))
    ]
    found = [
        [f"{name}.{attention}" for attention in family.attention if _has(block, attention)]
        for name, block in blocks
    ]
    return [names for names in found if names]


def _has(block: nn.Module, attention: str) -> bool:
    """Whether a block has a module of this name, which may be inside another one."""
    *path, name = attention.split(".")
    for part in path:
        block = getattr(block, part, None)  # type: ignore[assignment]
    return getattr(block, name, None) is not None
