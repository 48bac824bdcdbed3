"""How diffusers' transformers lay out their tokens, and which models are left out, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from blocksparse.hosts.diffusers import family, joint
from blocksparse.hosts.diffusers.family import Arguments as Arguments
from blocksparse.hosts.diffusers.family import Family as Family


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


FAMILIES: Mapping[str, Family] = {
    "AnyFlowTransformer3DModel": family.ANY_FLOW,
    "BriaTransformer2DModel": joint.FLUX,
    "ChromaTransformer2DModel": joint.CHROMA,
    "ChronoEditTransformer3DModel": family.WAN,
    "CogVideoXTransformer3DModel": joint.COGVIDEOX,
    "CogView4Transformer2DModel": joint.COGVIEW_4,
    "ConsisIDTransformer3DModel": joint.COGVIDEOX,
    "Cosmos3OmniTransformer": joint.COSMOS_3,
    "CosmosTransformer3DModel": family.COSMOS,
    "ErnieImageTransformer2DModel": joint.ERNIE_IMAGE,
    "Flux2Transformer2DModel": joint.FLUX_2,
    "Flux3Transformer2DModel": joint.FLUX_3,
    "FluxTransformer2DModel": joint.FLUX,
    "HeliosTransformer3DModel": joint.HELIOS,
    "HunyuanImageTransformer2DModel": joint.HUNYUAN_IMAGE,
    "HunyuanVideo15Transformer3DModel": joint.HUNYUAN_VIDEO_15,
    "HunyuanVideoFramepackTransformer3DModel": joint.HUNYUAN_VIDEO_FRAMEPACK,
    "HunyuanVideoTransformer3DModel": joint.HUNYUAN_VIDEO,
    "Kandinsky5Transformer3DModel": family.KANDINSKY_5,
    "Kandinsky6Transformer3DModel": family.KANDINSKY_6,
    "Krea2Transformer2DModel": joint.KREA_2,
    "LTX2VideoTransformer3DModel": family.LTX_2,
    "LTXVideoTransformer3DModel": family.LTX,
    "LongCatImageTransformer2DModel": joint.FLUX,
    "MiniMaxH3Transformer3DModel": joint.MINIMAX_H3,
    "MochiTransformer3DModel": joint.MOCHI,
    "MotifVideoTransformer3DModel": joint.MOTIF_VIDEO,
    "OvisImageTransformer2DModel": joint.FLUX,
    "QwenImage21Transformer2DModel": joint.QWEN_IMAGE_21,
    "QwenImageTransformer2DModel": joint.QWEN_IMAGE,
    "SD3Transformer2DModel": joint.SD_3,
    "SkyReelsV2Transformer3DModel": family.WAN,
    "WanAnimateTransformer3DModel": family.WAN,
    "WanTransformer3DModel": family.WAN,
    "WanVACETransformer3DModel": family.WAN_VACE,
    "ZImageTransformer2DModel": joint.Z_IMAGE,
}
"""The transformers that are known, by the names of their classes."""
