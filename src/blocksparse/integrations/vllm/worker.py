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
        engine = Engine.there(self.vllm_config)
        if engine is None:
            return "no layer has a pipeline: select --attention-backend BLOCKSPARSE"
        if engine.recorder is None:
            return """nothing is recorded: add "record": true to the configuration of blocksparse"""
        return engine.recorder.table()

    def blocksparse_counters(self) -> str:
        """How many prompts were sparse, and why others were not, since the engine began."""
        engine = Engine.there(self.vllm_config)
        return "no layer has a pipeline" if engine is None else str(engine.counters)

    def blocksparse_audit(self) -> str:
        """A line per layer: audited calls, covered mass and error."""
        engine = Engine.there(self.vllm_config)
        if engine is None or engine.estimates is None:
            return """nothing is audited: add "audit": {} to the configuration of blocksparse"""
        return engine.estimates.audit.table()

    def blocksparse_clear(self) -> None:
        """Begin a new record."""
        engine = Engine.there(self.vllm_config)
        if engine is not None and engine.recorder is not None:
            engine.recorder.clear()
