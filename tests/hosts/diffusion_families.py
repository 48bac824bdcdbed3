"""More tiny random transformers of diffusers, which `test_diffusers_families` tries, and their arguments."""

from __future__ import annotations

from math import prod
from typing import Any

import diffusers
import torch
from tests.hosts.diffusion_models import TEXT, Case, at, drawn, flux_given, padded, positions, wan_given

Grid = tuple[int, int, int]
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}
WAN: dict[str, Any] = {
    **HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2,
    "rope_max_seq_len": 32,
}  # fmt: skip
FLUX: dict[str, Any] = {
    **HEADS, "in_channels": 4, "num_layers": 1, "num_single_layers": 2, "joint_attention_dim": 16,
    "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
HUNYUAN: dict[str, Any] = {
    **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 2, "text_embed_dim": 16,
}  # fmt: skip


def wan_vace_given(grid: Grid, batch: int) -> dict[str, Any]:
    T, H, W = grid
    return {**wan_given(grid, batch), "control_hidden_states": drawn(batch, 8, T, 2 * H, 2 * W)}


def wan_animate() -> Any:
    channels = {str(size): 4 for size in (4, 8, 16)}
    return diffusers.WanAnimateTransformer3DModel(
        **{**WAN, "in_channels": 12}, latent_channels=4, image_dim=4, motion_encoder_channel_sizes=channels,
        motion_encoder_size=16, motion_style_dim=8, motion_dim=4, motion_encoder_dim=8, face_encoder_hidden_dim=8,
        face_encoder_num_heads=2, inject_face_latents_blocks=2,
    )  # fmt: skip


def wan_animate_given(grid: Grid, batch: int) -> dict[str, Any]:
    T, H, W = grid
    return {
        **wan_given(grid, batch),
        "hidden_states": drawn(batch, 12, T, 2 * H, 2 * W),
        "pose_hidden_states": drawn(batch, 4, T - 1, 2 * H, 2 * W),
        "face_pixel_values": drawn(batch, 3, 4 * (T - 1), 16, 16),
    }


def any_flow_given(grid: Grid, batch: int) -> dict[str, Any]:
    T, H, W = grid
    return {
        "hidden_states": drawn(batch, T, 4, 2 * H, 2 * W),
        "timestep": at(batch, 900.0)[:, None].expand(-1, T),
        "r_timestep": at(batch, 800.0)[:, None].expand(-1, T),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
    }


def cosmos() -> Any:
    return diffusers.CosmosTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, num_layers=2, mlp_ratio=2, text_embed_dim=16, adaln_lora_dim=4,
        max_size=(4, 32, 32), concat_padding_mask=False,
    )  # fmt: skip


def cosmos_given(grid: Grid, batch: int) -> dict[str, Any]:
    return {**wan_given(grid, batch), "fps": 16}


def ltx_2() -> Any:
    return diffusers.LTX2VideoTransformer3DModel(
        **HEADS, in_channels=8, out_channels=8, cross_attention_dim=32, audio_in_channels=4, audio_out_channels=4,
        audio_num_attention_heads=2, audio_attention_head_dim=8, audio_cross_attention_dim=16, num_layers=2,
        caption_channels=16,
    )  # fmt: skip


def ltx_2_given(grid: Grid, batch: int) -> dict[str, Any]:
    """The frame behind the video is given."""
    T, H, W = grid
    places = (
        torch.stack(torch.meshgrid(*(torch.arange(n) for n in (T + 1, H, W)), indexing="ij")).flatten(1).float()
    )
    return {
        "hidden_states": drawn(batch, (T + 1) * H * W, 8),
        "audio_hidden_states": drawn(batch, 5, 4),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "audio_encoder_hidden_states": drawn(batch, TEXT, 16),
        "timestep": at(batch, 900.0)[:, None],
        "encoder_attention_mask": padded(batch),
        "audio_encoder_attention_mask": padded(batch),
        "num_frames": T,
        "height": H,
        "width": W,
        "audio_num_frames": 5,
        "video_coords": torch.stack((places, places + 1), -1).expand(batch, -1, -1, -1),
    }


def kandinsky_5() -> Any:
    return diffusers.Kandinsky5Transformer3DModel(
        in_text_dim=16, in_text_dim2=8, time_dim=8, model_dim=32, ff_dim=32, num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(4, 4, 8),
    )  # fmt: skip


def kandinsky_5_given(grid: Grid, batch: int) -> dict[str, Any]:
    T, H, W = grid
    return {
        "hidden_states": drawn(batch, T, 2 * H, 2 * W, 4),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "timestep": at(batch, 900.0),
        "pooled_projections": drawn(batch, 8),
        "visual_rope_pos": [torch.arange(n) for n in grid],
        "text_rope_pos": torch.arange(TEXT),
        "return_dict": True,
    }


def kandinsky_6() -> Any:
    return diffusers.Kandinsky6Transformer3DModel(
        in_visual_dim=4, out_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=8, model_dim=32, ff_dim=32,
        num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 4, 8), visual_cond=False, in_audio_dim=4,
        out_audio_dim=4,
    )  # fmt: skip


def kandinsky_6_given(grid: Grid, batch: int) -> dict[str, Any]:
    T, H, W = grid
    return {
        "hidden_states": drawn(batch, T, 2 * H, 2 * W, 4),
        "audio_hidden_states": drawn(batch, 5, 4),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "timestep": at(batch, 900.0),
        "pooled_projections": drawn(batch, 8),
    }


def framepack() -> Any:
    return diffusers.HunyuanVideoFramepackTransformer3DModel(
        **HUNYUAN, num_refiner_layers=1, pooled_projection_dim=8, rope_axes_dim=(4, 4, 8), has_image_proj=True,
        image_proj_dim=8, has_clean_x_embedder=True,
    )  # fmt: skip


def framepack_given(grid: Grid, batch: int) -> dict[str, Any]:
    """2 clean frames, and 2 and 16 earlier ones at half and a quarter of the size."""
    T, H, W = grid
    size = 2 * H, 2 * W
    given: dict[str, Any] = {
        "hidden_states": drawn(batch, 4, T, *size),
        "timestep": at(batch, 900.0),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "encoder_attention_mask": padded(batch),
        "pooled_projections": drawn(batch, 8),
        "guidance": at(batch, 6000.0),
        "image_embeds": drawn(batch, 3, 8),
        "indices_latents": torch.arange(20, 20 + T),
    }
    first = 0
    for name, frames in (("history_4x", 16), ("history_2x", 2), ("clean", 2)):
        given[f"latents_{name}"] = drawn(batch, 4, frames, *size)
        given[f"indices_latents_{name}"] = torch.arange(first, first + frames)
        first += frames
    return given


def helios() -> Any:
    wan = {name: value for name, value in WAN.items() if name != "rope_max_seq_len"}
    return diffusers.HeliosTransformer3DModel(**wan, rope_dim=(4, 6, 6))


def helios_given(grid: Grid, batch: int) -> dict[str, Any]:
    T, H, W = grid
    given, first = wan_given(grid, batch), 0
    for name, frames in (("long", 16), ("mid", 2), ("short", 2)):
        given[f"latents_history_{name}"] = drawn(batch, 4, frames, 2 * H, 2 * W)
        given[f"indices_latents_history_{name}"] = torch.arange(first, first + frames).expand(batch, -1)
        first += frames
    return {**given, "indices_hidden_states": torch.arange(first, first + T).expand(batch, -1)}


def motif_video_given(grid: Grid, batch: int) -> dict[str, Any]:
    return {**wan_given(grid, batch), "encoder_attention_mask": padded(batch), "image_embeds": drawn(batch, 3, 8)}


def consis_id() -> Any:
    return diffusers.ConsisIDTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16, num_layers=2, patch_size=2,
        max_text_seq_length=TEXT, use_rotary_positional_embeddings=True,
    )  # fmt: skip


def consis_id_given(grid: Grid, batch: int) -> dict[str, Any]:
    T, H, W = grid
    return {
        "hidden_states": drawn(batch, T, 4, 2 * H, 2 * W),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "timestep": at(batch, 900.0),
        "image_rotary_emb": (drawn(T * H * W, 16), drawn(T * H * W, 16)),
    }


def minimax_h3() -> Any:
    return diffusers.MiniMaxH3Transformer3DModel(
        **HEADS, hidden_size=32, num_layers=2, num_refiner_layers=1, ffn_dim=32, in_channels=4,
        audio_in_channels=4,
        text_dim=16, freq_dim=8, time_embed_hidden_dim=8, time_embed_dim=8, rope_freq_dim=2,
    )  # fmt: skip


def minimax_h3_given(grid: Grid, batch: int) -> dict[str, Any]:
    """`[text | a frame that is given | audio | video]`, as the pipelines of diffusers pack them."""
    T, H, W = grid
    frame, audio = H * W, 6
    lengths = [TEXT, frame, audio, T * frame]
    text, condition, sound, video = torch.arange(sum(lengths)).split(lengths)
    tags = torch.tensor([1, 0, 2, 0]).repeat_interleave(torch.tensor(lengths))
    places = torch.cartesian_prod(torch.arange(H), torch.arange(W)).double()
    ids = torch.zeros(sum(lengths), 3, dtype=torch.float64)
    ids[text, 0] = text.double()
    ids[condition, 0], ids[condition, 1:] = float(TEXT), places
    ids[sound, 0] = TEXT + torch.arange(audio).double()
    ids[video, 0] = (TEXT + torch.arange(T).double() * 5 / 3).repeat_interleave(frame)
    ids[video, 1:] = places.repeat(T, 1)
    return {
        "hidden_states": drawn(batch, (T + 1) * frame, 16),
        "audio_hidden_states": drawn(batch, audio, 4),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "timestep": torch.tensor([0.1, 0.2, 0.99]),  # of video, audio, and the frame that is given
        "timestep_indices": torch.tensor([0, 2, 1, 0]).repeat_interleave(torch.tensor(lengths)),
        "token_tags": tags,
        "position_ids": ids,
        "video_indices": torch.cat((condition, video)),
        "audio_indices": sound,
        "text_indices": text,
    }


def cosmos_3() -> Any:
    return diffusers.Cosmos3OmniTransformer(
        head_dim=16, hidden_size=32, intermediate_size=32, latent_channel=4, num_attention_heads=2,
        num_hidden_layers=2, num_key_value_heads=1, patch_latent_dim=16, vocab_size=16, sound_dim=4,
        sound_gen=True,
        dtype="float32", rope_axes_dim=[4, 2, 2],
    )  # fmt: skip


def cosmos_3_given(grid: Grid, batch: int) -> dict[str, Any]:
    """Text, then the video, then its sound. Two halves of guidance are two calls."""
    T, H, W = grid
    cells, sound = prod(grid), 4
    vision = torch.arange(TEXT, TEXT + cells)
    tokens = TEXT + cells + sound
    return {
        "input_ids": torch.arange(TEXT),
        "text_indexes": torch.arange(TEXT),
        "position_ids": torch.arange(tokens).expand(3, -1) + batch,
        "und_len": TEXT,
        "sequence_length": tokens,
        "vision_tokens": [drawn(1, 4, T, 2 * H, 2 * W)],
        "vision_token_shapes": [grid],
        "vision_sequence_indexes": vision,
        "vision_mse_loss_indexes": vision,
        "vision_timesteps": at(cells, 900.0),
        "vision_noisy_frame_indexes": [torch.arange(T)],
        "sound_tokens": [drawn(4, sound)],
        "sound_token_shapes": [(sound, 1, 1)],
        "sound_sequence_indexes": torch.arange(tokens - sound, tokens),
        "sound_mse_loss_indexes": torch.arange(tokens - sound, tokens),
        "sound_timesteps": at(sound, 900.0),
        "sound_noisy_frame_indexes": [torch.arange(sound)],
    }


def bria_given(grid: Grid, batch: int) -> dict[str, Any]:
    given = flux_given(grid, batch)
    return {name: given[name] for name in given if name not in ("pooled_projections", "guidance")}


def chroma() -> Any:
    return diffusers.ChromaTransformer2DModel(
        **FLUX, approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1
    )


def chroma_given(grid: Grid, batch: int) -> dict[str, Any]:
    given = bria_given(grid, batch)
    of_pictures = torch.ones(batch, given["hidden_states"].shape[1], dtype=torch.bool)
    return {**given, "attention_mask": torch.cat((padded(batch).bool(), of_pictures), dim=1)}


def flux_3() -> Any:
    return diffusers.Flux3Transformer2DModel(
        **{**FLUX, "axes_dims_rope": (4, 4, 4, 4)}, cond_in_channels=4, timestep_channels=16
    )


def flux_3_given(grid: Grid, batch: int) -> dict[str, Any]:
    """One picture as large as that which is made, and one reference."""
    ids = positions(grid, 4)
    reference = positions((1, 3, 5), 4) + torch.tensor([1.0, 0.0, 0.0, 0.0])
    return {
        "hidden_states": drawn(batch, len(ids), 4),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "timestep": at(batch, 0.9),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT, 4),
        "image_cond_hidden_states": drawn(batch, 15, 4),
        "image_cond_ids": reference,
    }


def qwen_image_21() -> Any:
    return diffusers.QwenImage21Transformer2DModel(
        **HEADS, in_channels=4, out_channels=4, num_layers=2, context_in_dim=16, axes_dims_rope=(4, 6, 6)
    )


def qwen_image_21_given(grid: Grid, batch: int) -> dict[str, Any]:
    """Text, a reference of 8 tokens, text; then the picture. A slot of an image is four tokens."""
    _, H, W = grid
    H += H % 2
    is_image = torch.tensor([False] * 3 + [True] * 2 + [False] * 3 + [True] * (H * W // 4))
    mask = torch.ones(batch, 8, dtype=torch.bool)
    mask[-1, 6:] = False
    return {
        "hidden_states": drawn(batch, 8 + H * W, 4),
        "encoder_hidden_states": drawn(batch, 8, 16),
        "encoder_hidden_states_mask": mask,
        "timestep": at(batch, 0.9),
        "img_shapes": [[(1, 2, 4), (1, H, W)]] * batch,
        "img_mask": is_image.expand(batch, -1),
    }


def z_image() -> Any:
    return diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
        axes_dims=[4, 6, 6], axes_lens=[256, 128, 128],
    )  # fmt: skip


def z_image_given(grid: Grid, batch: int) -> dict[str, Any]:
    """Texts of 7 and of 40 tokens are 32 and 64 in the model."""
    _, H, W = grid
    return {
        "x": [drawn(4, 1, 2 * H, 2 * W) for _ in range(batch)],
        "t": at(batch, 0.1),
        "cap_feats": [drawn(length, 16) for length in (TEXT, 40)[:batch]],
    }


def hunyuan_image() -> Any:
    return diffusers.HunyuanImageTransformer2DModel(
        **HUNYUAN, num_refiner_layers=1, text_embed_2_dim=8, rope_axes_dim=(8, 8)
    )


def hunyuan_image_given(grid: Grid, batch: int) -> dict[str, Any]:
    _, H, W = grid
    return {
        "hidden_states": drawn(batch, 4, H, W),
        "timestep": at(batch, 900.0),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "encoder_attention_mask": padded(batch),
        "encoder_hidden_states_2": drawn(batch, TEXT, 8),
        "encoder_attention_mask_2": padded(batch, real=3),
    }


def cogview_4() -> Any:
    return diffusers.CogView4Transformer2DModel(
        **HEADS, in_channels=4, out_channels=4, num_layers=2, text_embed_dim=16, time_embed_dim=8, condition_dim=4,
        pos_embed_max_size=8, rope_axes_dim=(32, 32),
    )  # fmt: skip


def cogview_4_given(grid: Grid, batch: int) -> dict[str, Any]:
    _, H, W = grid
    size = torch.tensor([[64.0, 64.0]]).expand(batch, -1)
    return {
        "hidden_states": drawn(batch, 4, 2 * H, 2 * W),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "timestep": at(batch, 900.0),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros(batch, 2),
    }


def krea_2() -> Any:
    return diffusers.Krea2Transformer2DModel(
        **HEADS, in_channels=4, num_layers=2, num_key_value_heads=1, intermediate_size=32, timestep_embed_dim=8,
        text_hidden_dim=16, num_text_layers=2, text_num_attention_heads=2, text_num_key_value_heads=2,
        text_intermediate_size=16, num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 6,
        6),
    )  # fmt: skip


def krea_2_given(grid: Grid, batch: int) -> dict[str, Any]:
    ids = positions(grid, 3)
    return {
        "hidden_states": drawn(batch, len(ids), 4),
        "encoder_hidden_states": drawn(batch, TEXT, 2, 16),
        "timestep": at(batch, 0.9),
        "position_ids": torch.cat((torch.zeros(TEXT, 3), ids)),
        "encoder_attention_mask": padded(batch).bool(),
    }


def ernie_image() -> Any:
    return diffusers.ErnieImageTransformer2DModel(
        hidden_size=32, num_attention_heads=2, num_layers=2, ffn_hidden_size=32, in_channels=4, out_channels=4,
        text_in_dim=16, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip


def ernie_image_given(grid: Grid, batch: int) -> dict[str, Any]:
    _, H, W = grid
    return {
        "hidden_states": drawn(batch, 4, H, W),
        "timestep": at(batch, 900.0),
        "text_bth": drawn(batch, TEXT, 16),
        "text_lens": padded(batch).sum(1),
    }


MORE = {
    "any_flow": Case(lambda: diffusers.AnyFlowTransformer3DModel(**WAN), any_flow_given, 2),
    "bria": Case(lambda: diffusers.BriaTransformer2DModel(**FLUX), bria_given, 3, image=True),
    "chroma": Case(chroma, chroma_given, 3, image=True),
    "chrono_edit": Case(lambda: diffusers.ChronoEditTransformer3DModel(**WAN), wan_given, 2),
    "cogview_4": Case(cogview_4, cogview_4_given, 2, image=True),
    "consis_id": Case(consis_id, consis_id_given, 2),
    "cosmos": Case(cosmos, cosmos_given, 2),
    "cosmos_3": Case(cosmos_3, cosmos_3_given, 2),
    "ernie_image": Case(ernie_image, ernie_image_given, 2, image=True),
    "flux_3": Case(flux_3, flux_3_given, 2, image=True),
    "framepack": Case(framepack, framepack_given, 3),
    "helios": Case(helios, helios_given, 2),
    "hunyuan_image": Case(hunyuan_image, hunyuan_image_given, 3, image=True),
    "kandinsky_5": Case(kandinsky_5, kandinsky_5_given, 1),  # between its blocks it rounds to bfloat16
    "kandinsky_6": Case(kandinsky_6, kandinsky_6_given, 2),
    "krea_2": Case(krea_2, krea_2_given, 2, image=True),
    "longcat_image": Case(lambda: diffusers.LongCatImageTransformer2DModel(**FLUX), bria_given, 3, image=True),
    "ltx_2": Case(ltx_2, ltx_2_given, 2),
    "minimax_h3": Case(minimax_h3, minimax_h3_given, 2),
    "motif_video": Case(
        lambda: diffusers.MotifVideoTransformer3DModel(**HUNYUAN, image_embed_dim=8, rope_axes_dim=(4, 4, 8)),
        motif_video_given,
        3,
    ),
    "ovis_image": Case(
        lambda: diffusers.OvisImageTransformer2DModel(**{**FLUX, "axes_dims_rope": (4, 4, 8)}),
        bria_given,
        3,
        image=True,
    ),
    "qwen_image_21": Case(qwen_image_21, qwen_image_21_given, 2, image=True),
    "skyreels": Case(lambda: diffusers.SkyReelsV2Transformer3DModel(**WAN), wan_given, 2),
    "wan_animate": Case(wan_animate, wan_animate_given, 2),
    "wan_vace": Case(
        lambda: diffusers.WanVACETransformer3DModel(**WAN, vace_layers=[0], vace_in_channels=8), wan_vace_given, 3
    ),
    "z_image": Case(z_image, z_image_given, 2, image=True),
}
