"""A small stand-in for ComfyUI: what it calls of a patched model and in which order, read from its source.

Of September 2026: `WrapperExecutor` in `comfy/patcher_extension.py`, `ModelPatcher` in `comfy/model_patcher.py`,
`wrap_attn` in `comfy/ldm/modules/attention.py`, and the models in `comfy/ldm/wan` and `comfy/ldm/minimax`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """What models call: the override in their options, if there is one, gets the function that would attend."""
    override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
    if override is None or "_inside_attn_wrapper" in kwargs:
        return plain_attention(*args, **kwargs)
    out: Tensor = override(plain_attention, *args, **kwargs, _inside_attn_wrapper=True)
    return out


def plain_attention(
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
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


class Executor:
    """Calls the wrappers of a forward call from the outermost on, then the forward call itself."""

    def __init__(self, original: Callable[..., Any], class_obj: Any, wrappers: list[Any]) -> None:
        self.original, self.class_obj, self.wrappers = original, class_obj, wrappers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.wrappers:
            return self.original(*args, **kwargs)
        inner = Executor(self.original, self.class_obj, self.wrappers[1:])
        return self.wrappers[0](inner, *args, **kwargs)


class Patcher:
    """A model, and the options and wrappers that nodes add to clones of it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[str, dict[str, list[Any]]] = {}

    def clone(self) -> Patcher:
        other = Patcher(self.model)
        other.model_options = deepcopy(self.model_options)
        other.wrappers = {
            kind: {key: [*added] for key, added in by_key.items()} for kind, by_key in self.wrappers.items()
        }
        return other

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Callable[..., Any]) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def sample(self, x: Any, sigmas: Tensor, **conditions: Any) -> list[Any]:
        """What the model gives in each step, for the same latents."""
        given = []
        for sigma in sigmas[:-1]:
            options = {**self.model_options["transformer_options"], "sample_sigmas": sigmas, "sigmas": sigma[None]}
            wrappers = [w for added in self.wrappers.get("diffusion_model", {}).values() for w in added]
            run = Executor(self.model.run, self.model, wrappers)
            given.append(run(x, sigma[None], transformer_options=options, **conditions))
            assert set(options) - {"block_index", "grid_sizes", "minimax_h3_layout"} == {
                *self.model_options["transformer_options"], "sample_sigmas", "sigmas",
            }  # fmt: skip
        return given


class Wan(nn.Module):
    """Two blocks of attention over a video, then of attention to text."""

    patch_size = (1, 2, 2)

    def __init__(self, channels: int = 4, heads: int = 2, dim: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.patch = nn.Conv3d(channels, dim, self.patch_size, self.patch_size)
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(dim, dim) for _ in range(6)) for _ in range(2))

    def run(self, x: Tensor, timestep: Tensor, context: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        x = self.patch(x)
        transformer_options["grid_sizes"] = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        block: Any
        for i, block in enumerate(self.blocks):
            transformer_options["block_index"] = i
            q, k, v, to_q, to_k, to_v = block
            x = x + attention(3 * q(x), 3 * k(x), v(x), self.heads, transformer_options=transformer_options)
            x = x + attention(
                to_q(x), to_k(context), to_v(context), heads=self.heads, transformer_options=transformer_options
            )
        return x


class MiniMaxH3(nn.Module):
    """One block of attention over text, sound and a video in one sequence, without a batch."""

    patch_size = (1, 2, 2)

    def __init__(self, heads: int = 2, dim: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.block = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def run(
        self, x: list[Tensor], timestep: Tensor, context: Tensor, transformer_options: dict[str, Any]
    ) -> Tensor:
        """`x` is the video `[1, C, T, H, W]` and the sound `[1, n, dim]`, which become tokens as they are."""
        (_, _, T, H, W), sound = x[0].shape, x[1][0]
        video = x[0][0].flatten(1).T.reshape(T * (H // 2) * (W // 2), -1)
        ends = [len(context[0]), len(context[0]) + len(sound)]
        tokens = ends[1] + len(video)
        transformer_options["minimax_h3_layout"] = SimpleNamespace(
            seq_len=tokens,
            signature=(ends[0], T, H, W, len(sound) // 2),
            segments=[(0, ends[0], "text"), (ends[0], ends[1], "audio"), (ends[1], tokens, "video")],
        )
        transformer_options["block_index"] = 0
        h = torch.cat((context[0], sound, video))
        q, k, v = (
            w(x).unflatten(-1, (self.heads, -1)).transpose(0, 1)[None]
            for w, x in zip(self.block, (3 * h, 3 * h, h), strict=True)
        )
        return attention(
            q, k, v, self.heads, mask=None, skip_reshape=True, transformer_options=transformer_options
        )[0]
