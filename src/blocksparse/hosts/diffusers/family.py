"""What must be known of a transformer to make its attention sparse, and those that attend over a video alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.validators import a, flag, optional
from blocksparse.hosts.token_layout import Sizes, TokenLayout

Arguments = Mapping[str, Any]
"""The arguments of a forward call by name, those with defaults included."""


def the_timestep(given: Arguments) -> Any:
    """The argument that most models call `timestep`."""
    return given["timestep"]


def the_prompt(given: Arguments) -> Tensor | None:
    """The tensor of the prompt, by the names that models have for it; of several the first."""
    for name in ("encoder_hidden_states", "cap_feats", "text_bth", "input_ids"):
        prompt = given.get(name)
        while isinstance(prompt, list | tuple) and prompt:
            prompt = prompt[0]
        if isinstance(prompt, Tensor):
            return prompt
    return None


@final
@frozen(eq=False)
class Family:
    """A description of a transformer that lets its attention become sparse.

        Family(lambda config, given: TokenLayout((given["hidden_states"].shape[2:],)), attention=("attn1",))

    Args:
        layout: a function of the model's config and of the arguments of a forward call by name, which gives the
            `TokenLayout`. It gives None where the arguments do not determine it. All attention of the call is then
            dense.
        attention: the names, inside a block of the model, of its attention over pictures: alone, or joined with
            text. Other attention, as over text alone, stays as it is. A name may have dots.
        rising: whether timesteps rise from noise to picture.
        parts: the names of the model's lists of blocks that count, in the order in which they run. None means all
            of them, in the order in which the model names them.
        timestep: a function of the arguments of a forward call, which gives the timestep, by which denoising steps
            are told apart. The mean of a tensor counts.
        prompt: a function of the arguments of a forward call, which gives a tensor that identifies a run.
            Pipelines pass it in every step of the run, or of one half of its guidance, and in no other run. None
            means that there is none. Only the identity of the tensor counts.
        redirected: whether its processors ask diffusers' dispatcher for another backend than the one that is set
            on them. PyTorch's function, which diffusers' native backends call, is then redirected instead.
    """

    layout: Callable[[Any, Arguments], TokenLayout | None]
    attention: tuple[str, ...] = field(validator=a(tuple))
    rising: bool = field(default=False, validator=flag)
    parts: tuple[str, ...] | None = field(default=None, validator=optional(a(tuple)))
    timestep: Callable[[Arguments], Any] = the_timestep
    prompt: Callable[[Arguments], Tensor | None] = the_prompt
    redirected: bool = field(default=False, validator=flag)


def patches(sizes: Any, patch: Any) -> Sizes:
    """The grid of tokens of a video of these frames, rows and columns, in patches of so many."""
    T, H, W = (int(size) // int(step) for size, step in zip(sizes, patch, strict=True))
    return T, H, W


def counts(mask: Tensor) -> tuple[int, ...]:
    """The number of real tokens in each entry of a batch, from a mask `[B, text]`. The host waits for it."""
    numbers: list[int] = mask.sum(dim=1, dtype=torch.int64).tolist()
    return tuple(numbers)


def padding_ends(mask: Tensor) -> bool:
    """Whether all padding of a mask `[B, text]` bool stands behind the real tokens."""
    place = torch.arange(mask.shape[1], device=mask.device)
    return torch.equal(place < mask.sum(dim=1, keepdim=True), mask)


def checked(grids: tuple[Any, ...], tokens: int, **more: Any) -> TokenLayout | None:
    """The layout, if the grids have as many cells as there are tokens."""
    layout = TokenLayout(tuple(tuple(map(int, grid)) for grid in grids), **more)  # type: ignore[misc]
    return layout if layout.cells == tokens else None


def with_conditions_behind(grid: Any, tokens: int) -> TokenLayout | None:
    """One video, and behind it, as text that is always kept, what else `tokens` hold."""
    others = tokens - prod(map(int, grid))
    return checked((grid,), tokens - others, text=others, together=True) if others >= 0 else None


def grids_of(ids: Tensor) -> tuple[Sizes, ...] | None:
    """The grids whose cells have these coordinates `[N, 3 or more]`: picture (or frame), row, column.

    None if the tokens are not one whole grid after the other, row by row. The host waits for the coordinates.
    """
    places, grids = ids[:, :3].float().cpu(), []
    _, lengths = places[:, 0].unique_consecutive(return_counts=True)
    for picture in places[:, 1:].split(lengths.tolist()):
        rows, columns = picture[:, 0].unique(), picture[:, 1].unique()
        if not torch.equal(picture, torch.cartesian_prod(rows, columns)):
            return None
        grids.append((1, len(rows), len(columns)))
    return tuple(grids)


def _channels_first(config: Any, given: Arguments) -> TokenLayout:
    return TokenLayout((patches(given["hidden_states"].shape[2:], config.patch_size),))


def _frames_first(config: Any, given: Arguments) -> TokenLayout:
    T, _, H, W = given["hidden_states"].shape[1:]
    return TokenLayout((patches((T, H, W), config.patch_size),))


def _channels_last(config: Any, given: Arguments) -> TokenLayout:
    return TokenLayout((patches(given["hidden_states"].shape[1:4], config.patch_size),))


def _ltx(_: Any, given: Arguments) -> TokenLayout | None:
    grid = given["num_frames"], given["height"], given["width"]
    return checked((grid,), given["hidden_states"].shape[1]) if None not in grid else None


def _ltx_2(_: Any, given: Arguments) -> TokenLayout | None:
    """Tokens of given frames and of references stand behind those of the video."""
    grid = given["num_frames"], given["height"], given["width"]
    return with_conditions_behind(grid, given["hidden_states"].shape[1]) if None not in grid else None


WAN = Family(_channels_first, ("attn1",))  # and what was made from it
WAN_VACE = Family(_channels_first, ("attn1",), parts=("vace_blocks", "blocks"))  # controls run first
COSMOS = Family(_channels_first, ("attn1",))
ANY_FLOW = Family(_frames_first, ("attn1",))
LTX = Family(_ltx, ("attn1",))
LTX_2 = Family(_ltx_2, ("attn1",))
KANDINSKY_5 = Family(_channels_last, ("self_attention",), parts=("visual_transformer_blocks",))
KANDINSKY_6 = Family(_channels_last, ("video_dec_block.self_attention",), parts=("visual_transformer_blocks",))
