"""`Reading` is a prompt that a model has read densely once, to be read again with sparse attention somewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor, nn

from blocksparse.layers.schedule import text_config
from blocksparse.presets.candidate import TuneError
from blocksparse.tools.demo.watch import QKV, OwnAttention, watch
from blocksparse.tools.tune.prompts import TunePrompt


@final
@frozen
class Loss:
    """KL and accuracy drop of a prompt against dense attention."""

    text: float  # KL of next-token distributions in nats, mean over positions of the text
    answers: float  # the same over the tokens of answers; 0 if there are none
    found: int  # answers of which every token is the likeliest one

    def less(self, noise: Loss) -> tuple[float, float]:
        """Both KLs less those of another kernel that keeps everything; the result is at least 0."""
        return max(0.0, self.text - noise.text), max(0.0, self.answers - noise.answers)


@final
@frozen(eq=False)
class Reading:
    """A prompt, what dense attention predicts in it, and the outputs of the model's layers if they were kept."""

    network: Any
    prompt: TunePrompt
    at: Tensor  # [P] int64, positions at which predictions are compared: those of answers first
    dense: Tensor  # [P, V] fp32, log-probabilities of the next token
    outputs: tuple[Any, ...]  # of each decoder layer; empty if they were not kept
    found: int  # answers that dense attention finds

    @classmethod
    @torch.inference_mode()
    def of(cls, network: Any, prompt: TunePrompt, *, positions: int, keep_outputs: bool) -> Reading:
        """Read `prompt` densely.

        Args:
            positions: how many positions of the text to compare.
            keep_outputs: also keep the output of each layer, so that `losses` may start from any layer.
        """
        if "logits_to_keep" not in inspect.signature(network.forward).parameters:
            raise TuneError(
                f"{type(network).__name__} gives no logits of single positions (logits_to_keep). `tune` takes "
                "causal language models of transformers."
            )
        device = network.device
        prompt = TunePrompt(prompt.ids.to(device), prompt.answers)
        at = torch.cat((prompt.answers_at(), prompt.text_at(positions))).to(device)
        outputs: list[Any] = []
        hooks = [
            layer.register_forward_hook(lambda _, __, out: outputs.append(out))
            for layer in (decoder_layers(network) if keep_outputs else ())
        ]
        try:
            logits = _logits(network, prompt, at)
        finally:
            for hook in hooks:
                hook.remove()
        dense = logits.log_softmax(-1)
        found = _found(dense, prompt)
        # Of prompts that are read again and again, one is held at a time; of others, many are.
        return cls(network, prompt, at, dense if keep_outputs else dense.cpu(), tuple(outputs), found)

    @torch.inference_mode()
    def losses(self, first: int = 0) -> Loss:
        """Read again with what is attached to the model now, from layer `first` on; what is before is dense."""
        with self._from(first):
            again = _logits(self.network, self.prompt, self.at).log_softmax(-1)
        dense = self.dense.to(again.device)
        # Where dense attention rules a token out, it adds nothing: 0 times infinity would be NaN.
        terms = dense.exp() * (dense - again)
        each = terms.masked_fill_(dense == float("-inf"), 0.0).sum(-1).double()
        answers = len(self.prompt.answers_at())
        if not bool(each.isfinite().all()):
            raise TuneError("the model gives numbers that are not finite with sparse attention or without it")
        return Loss(
            text=float(each[answers:].mean()),
            answers=float(each[:answers].mean()) if answers else 0.0,
            found=_found(again, self.prompt),
        )

    @contextmanager
    def _from(self, first: int) -> Iterator[None]:
        """Layers before `first` give what they gave before, without any work."""
        before = decoder_layers(self.network)[:first]
        own = [vars(layer).get("forward") for layer in before]  # None where it is the method of the class
        for layer, output in zip(before, self.outputs, strict=False):
            layer.forward = partial(_again, output)
        try:
            yield
        finally:
            for layer, forward in zip(before, own, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward


@final
@frozen(eq=False)
class Call:
    """A call of attention by a model."""

    layer: int
    q: Tensor  # [B, Hq, M, D], with RoPE applied
    k: Tensor  # [B, Hkv, N, D]
    v: Tensor  # [B, Hkv, N, Dv]
    scale: float
    own: OwnAttention  # the model's own function, of q, k and v
    plain: bool  # whether it has neither a softcap nor attention sinks


def decoder_layers(network: Any) -> list[nn.Module]:
    """The decoder layers of a transformers model, in order."""
    count = int(text_config(network).num_hidden_layers)
    for module in (network.get_decoder() or network).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise TuneError(
        f"{type(network).__name__} does not keep its {count} layers in a list, so single layers cannot be tuned"
    )


@contextmanager
def on_attention(network: Any, see: Callable[[Call], None]) -> Iterator[None]:
    """Show `see` each call of the attention function that `network` uses now, before it is made."""

    def on_qkv(layer: int, qkv: QKV, options: dict[str, Any], own: OwnAttention) -> None:
        scale = options.get("scaling")
        plain = all(options.get(name) is None for name in ("softcap", "s_aux", "sinks"))
        see(Call(layer, *qkv, qkv[0].shape[-1] ** -0.5 if scale is None else scale, own, plain))

    with watch(network, on_qkv=on_qkv):
        yield


def _again(output: Any, *_: Any, **__: Any) -> Any:
    # Copied, because the next layer may add to it in place.
    if isinstance(output, Tensor):
        return output.clone()
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in output)


def _logits(network: Any, prompt: TunePrompt, at: Tensor) -> Tensor:
    """`[P, V]` fp32. No cache is used, because layers that are left out would not write to it."""
    logits: Tensor = network(prompt.ids, use_cache=False, logits_to_keep=at).logits
    return logits[0].float()


def _found(predicted: Tensor, prompt: TunePrompt) -> int:
    likeliest, found, at = predicted.argmax(-1), 0, 0
    for start, stop in prompt.answers:
        found += bool((likeliest[at : at + stop - start] == prompt.ids[0, start:stop]).all())
        at += stop - start
    return found
