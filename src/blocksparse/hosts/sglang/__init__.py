"""Sparse prefill inside SGLang (0.5.23): `--prefill-attention-backend blocksparse`.

SGLang finds `register` by itself once this package is installed. Nothing here needs SGLang before it is called.
"""

from __future__ import annotations

from typing import Any

from blocksparse.hosts.serving.settings import KEY as NAME
from blocksparse.hosts.serving.settings import ConfigurationError as ConfigurationError
from blocksparse.hosts.serving.settings import Settings as Settings
from blocksparse.hosts.sglang.batch import PROMPTS
from blocksparse.observe.density_recorder import DensityRecorder as DensityRecorder


def register() -> None:
    """Make the backend known to SGLang, and add the record of an engine to what the engine tells of itself."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_backend)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", _tell, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", _note_prompts, HookType.AFTER
    )


def _backend(runner: Any) -> Any:
    from blocksparse.hosts.sglang.backend import backend  # which only processes with a model need

    return backend(runner)


def _note_prompts(output: Any, _: type, batch: Any, *__: Any, **___: Any) -> Any:
    """Note how long the prompts of a ForwardBatch are; one that was retracted ends with its answer so far."""
    setattr(output, PROMPTS, [len(request.full_untruncated_fill_ids) for request in batch.reqs])
    return output


def _tell(output: Any, scheduler: Any, *_: Any) -> Any:
    """Add the table of the record, if there is one."""
    prefill = getattr(scheduler.tp_worker.model_runner, NAME, None)
    if prefill is not None and prefill.recorder is not None:
        output.internal_state[NAME] = prefill.recorder.table()
    return output
