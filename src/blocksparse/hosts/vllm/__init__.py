"""Sparse prefill inside vLLM (0.30 to 0.33): `--attention-backend BLOCKSPARSE`.

vLLM finds `register` by itself once this package is installed. Nothing here needs vLLM before it is called.
"""

from __future__ import annotations

import logging

from blocksparse.hosts.serving.settings import ConfigurationError as ConfigurationError
from blocksparse.hosts.serving.settings import Settings as Settings
from blocksparse.observe.density_recorder import DensityRecorder as DensityRecorder

NAME = "BLOCKSPARSE"
_ON_A_GPU, _ON_A_CPU = (f"blocksparse.hosts.vllm.{device}.Backend" for device in ("cuda", "cpu"))
_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say


def register() -> None:
    """Make the backends known to vLLM. A second call changes nothing.

    vLLM has one place for a backend from elsewhere, CUSTOM, and BLOCKSPARSE becomes another name of it. Since
    0.32 vLLM also takes new names, but a process that is spawned reads its configuration before it loads plugins,
    and fails on them.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    place = AttentionBackendEnum.CUSTOM
    if place.is_overridden() and place.get_path() != _ON_A_GPU:
        _log.warning(
            "blocksparse: backend %s is not registered, because another plugin uses vLLM's slot for backends: %s",
            NAME,
            place.get_path(),
        )
    else:
        register_backend(place, _ON_A_GPU)
        AttentionBackendEnum._member_map_[NAME] = place  # the enumeration has no public way to add a name
    register_backend(AttentionBackendEnum.CPU_ATTN, _ON_A_CPU)
