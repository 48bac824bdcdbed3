"""How diffusers' transformers lay out their tokens, and which models are left out, each with the reason.

Where text and a picture or a video are in one sequence, all but the picture or the video that is made counts as
text: it is always kept, as queries and as keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, final

import torch
from attrs import evolve, field, frozen
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
        parts: names of the lists of blocks that count. In the order in which they run. None means all, in the
            model's order.
        timestep: gives the timestep from the arguments of a forward call. It tells denoising steps apart. The mean
            of a tensor counts.
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


def padding_ends(mask: Tensor | None) -> bool:
    """Whether all padding of a mask `[B, text]` stands behind the real tokens, or there is no mask."""
    if mask is None:
        return True
    place = torch.arange(mask.shape[1], device=mask.device)
    return torch.equal(place < mask.bool().sum(dim=1, keepdim=True), mask.bool())


def picture(config: Any, given: Arguments) -> Sizes:
    """The grid of tokens of a picture, in patches of the size that the config names."""
    H, W = given["hidden_states"].shape[-2:]
    return 1, H // config.patch_size, W // config.patch_size


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


def _by_reason(reasons: Mapping[str, str]) -> dict[str, str]:
    """The reason of each model, from the names of models by reason."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}


DENSE_BY_CHOICE: Mapping[str, str] = _by_reason(
    {
        "its tokens are sound, which has no grid and is short": (
            "AceStepTransformer1DModel LongCatAudioDiTTransformer MiniMaxMusic3RVQDepthDecoder "
            "MiniMaxMusic3Transformer1DModel StableAudio3DiTModel StableAudioDiTModel T5FilmDecoder"
        ),
        "its tokens are text": "AnimaTextConditioner",
        "it makes block-sparse masks of its own for FlexAttention": (
            "AnyFlowFARTransformer3DModel Kandinsky6SRTransformer3DModel WanAnimate2Transformer3DModel"
        ),
        "it decodes or encodes, and makes no picture step by step": (
            "AutoencoderKLKVAEAudio AutoencoderKLMiniMaxH3 AutoencoderKLMiniMaxH3Audio AutoencoderSAME "
            "LTX2VideoDiffusionDecoderModel MMAudioVAE RFD4ProteinaAutoencoder"
        ),
        "a U-Net, whose largest grids have no attention": "DreamLiteUNetModel",
        "it attends inside frames and along time apart, a few thousand tokens at most": "LatteTransformer3DModel",
        "its tokens are text, less than a hundred": "PriorTransformer",
        "its attention has a bias for each pair of tokens": "RFD4ProteinaTransformer",
        "its attention over pictures is linear and has no blocks to leave out": (
            "SanaTransformer2DModel SanaVideoTransformer3DModel SanaWMTransformer3DModel"
        ),
        "it attends along time alone, tens of tokens": "TransformerTemporalModel",
    }
)
"""Transformers whose attention stays dense on purpose."""

UNKNOWN: Mapping[str, str] = _by_reason(
    {
        "nobody has read yet where its tokens stand": (
            "AllegroTransformer3DModel AuraFlowTransformer2DModel BriaFibo2Transformer2DModel "
            "CogView3PlusTransformer2DModel DiTTransformer2DModel DreamLiteTransformer2DModel "
            "EasyAnimateTransformer3DModel HunyuanDiT2DModel JoyImageEditPlusTransformer3DModel "
            "JoyImageEditTransformer3DModel Lumina2Transformer2DModel LuminaNextDiT2DModel "
            "NucleusMoEImageTransformer2DModel PRXTransformer2DModel PixArtTransformer2DModel "
            "SanaWMLTX2RefinerTransformer3DModel Transformer2DModel"
        ),
        "it makes a mask of all pairs of tokens, so that its own attention is what must change": (
            "BriaFiboTransformer2DModel Ideogram4Transformer2DModel OmniGenTransformer2DModel"
        ),
        "it may keep keys of references from an earlier call": "GlmImageTransformer2DModel",
        "its experts and its text, which differs from block to block, were not read": (
            "HiDreamImageTransformer2DModel"
        ),
        "a control net runs beside a transformer, and `attach` knows transformers alone": "ZImageControlNetModel",
    }
)
"""Transformers that a `Family` might make sparse, and what stands in the way."""

LEFT_OUT: Mapping[str, str] = {
    **{name: f"dense by choice: {reason}" for name, reason in DENSE_BY_CHOICE.items()},
    **{name: f"unknown: {reason}" for name, reason in UNKNOWN.items()},
}
"""Both, each with what it is and why."""


def _flux(_: Any, given: Arguments) -> TokenLayout | None:
    """Pictures are known by the position of each token, `[N, 3]` or `[N, 4]`."""
    ids = given["img_ids"]
    grids = grids_of(ids[0] if ids.ndim == 3 else ids)
    text = given["encoder_hidden_states"].shape[1]
    return None if grids is None else checked(grids, given["hidden_states"].shape[1], text=text, before=text)


def _flux_2(config: Any, given: Arguments) -> TokenLayout | None:
    # With a cache, tokens of reference pictures are keys only, or attend among themselves.
    return None if given["kv_cache_mode"] is not None else _flux(config, given)


def _flux_3(config: Any, given: Arguments) -> TokenLayout | None:
    """References stand behind the picture, with their own positions."""
    if given["image_cond_ids"] is None:
        return _flux(config, given)
    both = torch.cat([ids[0] if ids.ndim == 3 else ids for ids in (given["img_ids"], given["image_cond_ids"])])
    states = torch.cat((given["hidden_states"][:, :, :1], given["image_cond_hidden_states"][:, :, :1]), dim=1)
    return _flux(config, {**given, "img_ids": both, "hidden_states": states})


def _chroma(config: Any, given: Arguments) -> TokenLayout | None:
    """Padding of the text is masked, of queries as well as of keys."""
    layout, mask = _flux(config, given), given["attention_mask"]
    if layout is None or mask is None:
        return layout
    of_text, of_pictures = mask[:, : layout.text].bool(), mask[:, layout.text :].bool()
    if not (of_pictures.all() and padding_ends(of_text)):
        return None
    return evolve(layout, real=counts(of_text))


def _qwen_image(_: Any, given: Arguments) -> TokenLayout | None:
    shapes, text, mask = given["img_shapes"], given["encoder_hidden_states"], given["encoder_hidden_states_mask"]
    if not shapes:
        return None
    first, *others = ([shape] if isinstance(shape[0], int) else shape for shape in shapes)
    if any(list(other) != list(first) for other in others):
        return None
    # Padding inside the text is left to the model's own mask.
    if not padding_ends(mask):
        return None
    real, tokens = None if mask is None else counts(mask.bool()), text.shape[1]
    return checked(tuple(first), given["hidden_states"].shape[1], text=tokens, before=tokens, real=real)


def _krea_2(_: Any, given: Arguments) -> TokenLayout | None:
    text, mask = given["encoder_hidden_states"].shape[1], given["encoder_attention_mask"]
    grids = grids_of(given["position_ids"][text:])
    if grids is None or not padding_ends(mask):
        return None
    real = None if mask is None else counts(mask.bool())
    return checked(grids, given["hidden_states"].shape[1], text=text, before=text, real=real)


def _cogview_4(config: Any, given: Arguments) -> TokenLayout | None:
    text = given["encoder_hidden_states"].shape[1]
    return TokenLayout((picture(config, given),), text=text, before=text)


def _z_image(_: Any, given: Arguments) -> TokenLayout | None:
    """Pictures are filled up to a multiple of 32 tokens, and the text behind them too. All is attended to."""
    pictures, texts, p = given["x"], given["cap_feats"], given["patch_size"]
    if isinstance(pictures[0], list) or len({picture.shape for picture in pictures}) > 1:
        return None  # several pictures in each entry, or entries of several sizes
    grid = patches(pictures[0].shape[1:], (given["f_patch_size"], p, p))
    cells = grid[0] * grid[1] * grid[2]
    real = tuple(-cells % 32 + len(text) + -len(text) % 32 for text in texts)
    return TokenLayout((grid,), text=max(real), real=real)


def _ernie_image(config: Any, given: Arguments) -> TokenLayout:
    real = tuple(given["text_lens"].tolist())
    return TokenLayout((picture(config, given),), text=given["text_bth"].shape[1], real=real)


def _hunyuan_image(config: Any, given: Arguments) -> TokenLayout:
    """Glyphs stand before the text; the padding of both stands at the end."""
    *frames, H, W = given["hidden_states"].shape[2:]
    grid = patches((*(frames or (1,)), H, W), (1, *config.patch_size)[-3:])
    masks = [given["encoder_attention_mask"], given["encoder_attention_mask_2"]]
    masks = [mask for mask in masks if mask is not None]
    real = tuple(sum(each) for each in zip(*(counts(mask.bool()) for mask in masks), strict=True))
    return TokenLayout((grid,), text=sum(mask.shape[1] for mask in masks), real=real)


def _hunyuan_grid(config: Any, given: Arguments) -> Sizes:
    return patches(given["hidden_states"].shape[2:], (config.patch_size_t, config.patch_size, config.patch_size))


def _hunyuan_video(config: Any, given: Arguments) -> TokenLayout:
    grid = _hunyuan_grid(config, given)
    mask = given["encoder_attention_mask"]
    return TokenLayout((grid,), text=given["encoder_hidden_states"].shape[1], real=counts(mask))


def _hunyuan_video_15(config: Any, given: Arguments) -> TokenLayout:
    """Text, glyphs and picture embeddings stand behind the video, the padding of all of them at the end."""
    grid = _hunyuan_grid(config, given)
    masks = given["encoder_attention_mask"].bool(), given["encoder_attention_mask_2"].bool()
    image = given["image_embeds"]
    seen = 0 if bool((image == 0).all()) else image.shape[1]
    return TokenLayout(
        (grid,),
        text=masks[0].shape[1] + masks[1].shape[1] + image.shape[1],
        real=tuple(one + two + seen for one, two in zip(*map(counts, masks), strict=True)),
    )


def _motif_video(config: Any, given: Arguments) -> TokenLayout | None:
    """The picture embedding stands before the text, whose padding is masked."""
    grid = _hunyuan_grid(config, given)
    image, mask = given["image_embeds"], given["encoder_attention_mask"]
    seen = 0 if image is None else image.shape[1]
    if not padding_ends(mask):
        return None
    real = None if mask is None else tuple(seen + n for n in counts(mask.bool()))
    return TokenLayout((grid,), text=seen + given["encoder_hidden_states"].shape[1], real=real)


def _cogvideox(config: Any, given: Arguments) -> TokenLayout:
    T, _, H, W = given["hidden_states"].shape[1:]
    p, p_t = config.patch_size, config.get("patch_size_t")
    frames = T if p_t is None else (T + p_t - 1) // p_t
    text = given["encoder_hidden_states"].shape[1]
    return TokenLayout(((frames, H // p, W // p),), text=text, before=text)


def _mochi(config: Any, given: Arguments) -> TokenLayout:
    T, H, W = given["hidden_states"].shape[2:]
    p, mask = config.patch_size, given["encoder_attention_mask"]
    # The model drops padding by itself and attends entry by entry of the batch.
    return TokenLayout(((T, H // p, W // p),), text=mask.shape[1], real=counts(mask))


def _sd3(config: Any, given: Arguments) -> TokenLayout:
    return TokenLayout((picture(config, given),), text=given["encoder_hidden_states"].shape[1])


def _minimax_h3(_: Any, given: Arguments) -> TokenLayout | None:
    """`[text | frames that are given, references | audio | video]`: the video is the last run of video rows."""
    rows, tokens = given["video_indices"].cpu(), given["token_tags"].shape[0]
    step = given["timestep_indices"].cpu()[rows]
    others = ((rows[1:] != rows[:-1] + 1) | (step[1:] != step[:-1])).nonzero()
    video = rows[int(others[-1]) + 1 :] if len(others) else rows
    grid = _grid_of(given["position_ids"].cpu()[video])
    return grid and TokenLayout((grid,), text=tokens - len(video), before=int(video[0]), together=True)


def _of_the_video(given: Arguments) -> Any:
    """References and audio have their own timesteps."""
    last = given["timestep_indices"][given["video_indices"][-1]]
    return given["timestep"][last]


def _grid_of(places: Tensor) -> Sizes | None:
    """The grid whose cells have these times, rows and columns `[N, 3]`; None if they are not one whole grid."""
    frames = len(places[:, 0].unique_consecutive())
    cells, uneven = divmod(len(places), frames)
    rows, columns = (places[:cells, axis].unique() for axis in (1, 2))
    if uneven or not torch.equal(places[:, 1:], torch.cartesian_prod(rows, columns).repeat(frames, 1)):
        return None
    return frames, len(rows), len(columns)


def _cosmos_3(_: Any, given: Arguments) -> TokenLayout | None:
    """Text attends to itself; all else to text, which stands first, and to one another. One video is a grid."""
    rows, grids = given["vision_sequence_indexes"].cpu(), given["vision_token_shapes"]
    first, tokens = int(rows[0]), given["sequence_length"]
    if len(grids) > 1 or not torch.equal(rows, torch.arange(first, first + len(rows), device="cpu")):
        return None
    T, H, W = map(int, grids[0])
    return TokenLayout(((T, H, W),), text=tokens - len(rows), before=first) if len(rows) == T * H * W else None


def _qwen_image_21(_: Any, given: Arguments) -> TokenLayout | None:
    """Text and references attend to what stands before them, the picture behind them to everything."""
    first, *others = given["img_shapes"]
    if any(list(other) != list(first) for other in others):
        return None
    grid, is_image, mask = tuple(map(int, first[-1])), given["img_mask"][0], given["encoder_hidden_states_mask"]
    T, H, W = grid
    lengths = torch.where(is_image, 4, 1)  # a slot of an image stands for four tokens
    text = int(lengths.sum()) - prod(grid)
    real = None
    if mask is not None:
        slots = mask.bool() | is_image[: mask.shape[1]]
        if not padding_ends(slots):
            return None
        real = counts(slots * lengths[: mask.shape[1]])
    return TokenLayout(((T, H, W),), text=text, before=text, real=real, together=True)


def _hunyuan_video_framepack(config: Any, given: Arguments) -> TokenLayout:
    """Earlier frames, coarser the longer they are past, stand before the video, a picture and text behind it."""
    grid = _hunyuan_grid(config, given)
    past = _earlier(given, latents_clean=(1, 2, 2), latents_history_2x=(2, 4, 4), latents_history_4x=(4, 8, 8))
    kept = past + given["image_embeds"].shape[1]
    text, mask = given["encoder_hidden_states"].shape[1], given["encoder_attention_mask"]
    return TokenLayout(
        (grid,), text=kept + text, before=past, real=tuple(kept + n for n in counts(mask)), together=True
    )


def _helios(config: Any, given: Arguments) -> TokenLayout:
    """Earlier frames, coarser the longer they are past, stand before the video."""
    patch = config.patch_size
    twice, four_times = (tuple(n * p for p in patch) for n in (2, 4))
    past = _earlier(given, latents_history_short=patch, latents_history_mid=twice, latents_history_long=four_times)
    grid = patches(given["hidden_states"].shape[2:], patch)
    return TokenLayout((grid,), text=past, before=past, together=True)


def _earlier(given: Arguments, **patch: Any) -> int:
    """The tokens of earlier frames, by the names of their latents and the patches of each, which are filled up."""
    frames = {
        name: given[name] for name in patch if given[name] is not None and given[f"indices_{name}"] is not None
    }
    return sum(
        prod(-(-size // step) for size, step in zip(x.shape[2:], patch[name], strict=True))
        for name, x in frames.items()
    )


_WAN = Family(_channels_first, ("attn1",))  # as of these three, of what was made from it
_FLUX = Family(_flux, ("attn",))
_COGVIDEOX = Family(_cogvideox, ("attn1",))

FAMILIES: Mapping[str, Family] = {
    "AnyFlowTransformer3DModel": Family(_frames_first, ("attn1",)),
    "BriaTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": Family(_chroma, ("attn",)),
    "ChronoEditTransformer3DModel": _WAN,
    "CogVideoXTransformer3DModel": _COGVIDEOX,
    "CogView4Transformer2DModel": Family(_cogview_4, ("attn1",)),
    "ConsisIDTransformer3DModel": _COGVIDEOX,
    "Cosmos3OmniTransformer": Family(_cosmos_3, ("self_attn",), timestep=lambda given: given["vision_timesteps"]),
    "CosmosTransformer3DModel": Family(_channels_first, ("attn1",)),
    "ErnieImageTransformer2DModel": Family(_ernie_image, ("self_attention",)),
    "Flux2Transformer2DModel": Family(_flux_2, ("attn",)),
    # The blocks before attend to one kind of tokens each.
    "Flux3Transformer2DModel": Family(_flux_3, ("attn",), parts=("single_transformer_blocks",)),
    "FluxTransformer2DModel": _FLUX,
    "HeliosTransformer3DModel": Family(_helios, ("attn1",)),
    "HunyuanImageTransformer2DModel": Family(_hunyuan_image, ("attn",)),
    "HunyuanVideo15Transformer3DModel": Family(_hunyuan_video_15, ("attn",)),
    "HunyuanVideoFramepackTransformer3DModel": Family(_hunyuan_video_framepack, ("attn",)),
    "HunyuanVideoTransformer3DModel": Family(_hunyuan_video, ("attn",)),
    "Kandinsky5Transformer3DModel": Family(
        _channels_last, ("self_attention",), parts=("visual_transformer_blocks",)
    ),
    "Kandinsky6Transformer3DModel": Family(
        _channels_last, ("video_dec_block.self_attention",), parts=("visual_transformer_blocks",)
    ),
    "Krea2Transformer2DModel": Family(_krea_2, ("attn",)),
    "LTX2VideoTransformer3DModel": Family(_ltx_2, ("attn1",)),
    "LTXVideoTransformer3DModel": Family(_ltx, ("attn1",)),
    "LongCatImageTransformer2DModel": _FLUX,
    "MiniMaxH3Transformer3DModel": Family(_minimax_h3, ("attn",), rising=True, timestep=_of_the_video),
    "MochiTransformer3DModel": Family(_mochi, ("attn1",), rising=True),
    "MotifVideoTransformer3DModel": Family(_motif_video, ("attn",)),
    "OvisImageTransformer2DModel": _FLUX,
    "QwenImage21Transformer2DModel": Family(_qwen_image_21, ("attn",), redirected=True),
    "QwenImageTransformer2DModel": Family(_qwen_image, ("attn",)),
    "SD3Transformer2DModel": Family(_sd3, ("attn", "attn2")),
    "SkyReelsV2Transformer3DModel": _WAN,
    "WanAnimateTransformer3DModel": _WAN,
    "WanTransformer3DModel": _WAN,
    # Controls run first.
    "WanVACETransformer3DModel": Family(_channels_first, ("attn1",), parts=("vace_blocks", "blocks")),
    "ZImageTransformer2DModel": Family(
        _z_image, ("attention",), rising=True, parts=("layers",), timestep=lambda given: given["t"]
    ),
}
"""The transformers that are known, by the names of their classes."""
