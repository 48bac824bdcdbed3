"""Methods that vLLM's workers get, for `--worker-extension-cls`: they read the record out of another process."""

from __future__ import annotations

from typing import Any, final

from blocksparse.integrations.vllm.engine import Engine


@final
class RecordReader:
    """`llm.collective_rpc("blocksparse_table")` gives the table of each worker."""

    vllm_config: Any  # of the worker

    def blocksparse_table(self) -> str:
        """A line per layer: sparse calls, their density, and dense calls by reason."""
        recorder = Engine.of(self.vllm_config).recorder
        if recorder is None:
            return """nothing is recorded: add "record": true to the configuration of blocksparse"""
        return recorder.table()

    def blocksparse_clear(self) -> None:
        """Begin a new record."""
        if (recorder := Engine.of(self.vllm_config).recorder) is not None:
            recorder.clear()
