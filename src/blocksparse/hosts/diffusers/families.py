"""How diffusers' transformers lay out their tokens, and which models are left out, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from blocksparse.hosts.diffusers import family, joint
from blocksparse.hosts.diffusers.family import Arguments as Arguments
from blocksparse.hosts.diffusers.family import Family as Family

_AUDIO = "its tokens are sound, which has no grid and is short"
_NO_PICTURE = "it decodes or encodes, and makes no picture step by step"
_LINEAR = "its attention over pictures is linear and has no blocks to leave out"
_OWN_BLOCKS = "it makes block-sparse masks of its own for FlexAttention"
_ALL_PAIRS = "it makes a mask of all pairs of tokens, so that its own attention is what must change"
_NOT_READ = "nobody has read yet where its tokens stand"

DENSE_BY_CHOICE: Mapping[str, str] = {
    "AceStepTransformer1DModel": _AUDIO,
    "AnimaTextConditioner": "its tokens are text",
    "AnyFlowFARTransformer3DModel": _OWN_BLOCKS,
    "AutoencoderKLKVAEAudio": _NO_PICTURE,
    "AutoencoderKLMiniMaxH3": _NO_PICTURE,
    "AutoencoderKLMiniMaxH3Audio": _NO_PICTURE,
    "AutoencoderSAME": _NO_PICTURE,
    "DreamLiteUNetModel": "a U-Net, whose largest grids have no attention",
    "Kandinsky6SRTransformer3DModel": _OWN_BLOCKS,
    "LTX2VideoDiffusionDecoderModel": _NO_PICTURE,
    "LatteTransformer3DModel": "it attends inside frames and along time apart, a few thousand tokens at most",
    "LongCatAudioDiTTransformer": _AUDIO,
    "MMAudioVAE": _NO_PICTURE,
    "MiniMaxMusic3RVQDepthDecoder": _AUDIO,
    "MiniMaxMusic3Transformer1DModel": _AUDIO,
    "PriorTransformer": "its tokens are text, less than a hundred",
    "RFD4ProteinaAutoencoder": _NO_PICTURE,
    "RFD4ProteinaTransformer": "its attention has a bias for each pair of tokens",
    "SanaTransformer2DModel": _LINEAR,
    "SanaVideoTransformer3DModel": _LINEAR,
    "SanaWMTransformer3DModel": _LINEAR,
    "StableAudio3DiTModel": _AUDIO,
    "StableAudioDiTModel": _AUDIO,
    "T5FilmDecoder": _AUDIO,
    "TransformerTemporalModel": "it attends along time alone, tens of tokens",
    "WanAnimate2Transformer3DModel": _OWN_BLOCKS,
}
"""Transformers whose attention stays dense on purpose."""

UNKNOWN: Mapping[str, str] = {
    "AllegroTransformer3DModel": _NOT_READ,
    "AuraFlowTransformer2DModel": _NOT_READ,
    "BriaFibo2Transformer2DModel": _NOT_READ,
    "BriaFiboTransformer2DModel": _ALL_PAIRS,
    "CogView3PlusTransformer2DModel": _NOT_READ,
    "DiTTransformer2DModel": _NOT_READ,
    "DreamLiteTransformer2DModel": _NOT_READ,
    "EasyAnimateTransformer3DModel": _NOT_READ,
    "GlmImageTransformer2DModel": "it may keep keys of references from an earlier call",
    "HiDreamImageTransformer2DModel": "its experts and its text, which differs from block to block, were not read",
    "HunyuanDiT2DModel": _NOT_READ,
    "Ideogram4Transformer2DModel": _ALL_PAIRS,
    "JoyImageEditPlusTransformer3DModel": _NOT_READ,
    "JoyImageEditTransformer3DModel": _NOT_READ,
    "Lumina2Transformer2DModel": _NOT_READ,
    "LuminaNextDiT2DModel": _NOT_READ,
    "NucleusMoEImageTransformer2DModel": _NOT_READ,
    "OmniGenTransformer2DModel": _ALL_PAIRS,
    "PRXTransformer2DModel": _NOT_READ,
    "PixArtTransformer2DModel": _NOT_READ,
    "SanaWMLTX2RefinerTransformer3DModel": _NOT_READ,
    "Transformer2DModel": _NOT_READ,
    "ZImageControlNetModel": "a control net runs beside a transformer, and `attach` knows transformers alone",
}
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
