"""What came of the calls of an attached model: a record, and a line in the log if nothing was sparse."""

from __future__ import annotations

import logging
from collections import Counter
from threading import Lock
from typing import final

from attrs import define, field

from blocksparse.integrations.density_recorder import DensityRecorder
from blocksparse.layers.head_groups import AnyTrace, HeadGroupsTrace

_log = logging.getLogger(__name__)
_COUNTING = Lock()  # several threads may run one model
_WAY_OUT = {
    "gradients": " (call the model under torch.no_grad())",
    "training": " (call model.eval() for inference)",
    "fewer than min_tokens": " (longer prompts are sparse; attach takes min_tokens)",
    "fewer than min_queries": " (larger chunks are sparse; attach takes min_queries)",
    "mask": " (masks that are no padding, packing or window stay dense)",
}


@final
@define(eq=False)
class Outcomes:
    """Counts why calls were dense until one is sparse, and hands everything to the recorder, if there is one."""

    model: str
    recorder: DensityRecorder | None
    _reasons: Counter[str] = field(factory=Counter, init=False)
    _settled: bool = field(default=False, init=False)  # a call was sparse, or the line is in the log

    def saw(
        self, layer: int, trace: AnyTrace | HeadGroupsTrace, *, q_len: int, k_len: int, window: int | None
    ) -> None:
        """A call of the pipeline, whose executor may have attended densely."""
        assert self.recorder is not None  # or nothing would be traced
        if trace.dense_because is not None:
            self.saw_dense(layer, trace.dense_because)
            return
        self.saw_sparse()
        self.recorder.saw_sparse(layer, trace.density(), q_len=q_len, k_len=k_len, window=window)

    def saw_sparse(self) -> None:
        self._settled = True

    def saw_dense(self, layer: int, reason: str) -> None:
        if self.recorder is not None:
            self.recorder.saw_dense(layer, reason)
        if self._settled:
            return
        if reason == "decode":
            self.tell()  # whatever prompt was read, all of it was dense
        else:
            with _COUNTING:
                self._reasons[reason] += 1

    def traced_dense(self, reason: str) -> None:
        """Calls of a compiled graph are dense; how many there will be is not known when it is traced."""
        if not self._settled and reason != "decode":
            with _COUNTING:
                self._reasons[f"{reason}, compiled"] += 1

    def tell(self) -> None:
        """Log one line if calls were dense and none was sparse. A later call does nothing."""
        with _COUNTING:
            if self._settled or not self._reasons:
                return
            self._settled = True
        reasons = ", ".join(
            f"{times} x {why}{_WAY_OUT.get(why, '')}" for why, times in self._reasons.most_common()
        )
        _log.warning("no attention of %s was sparse so far; dense calls: %s", self.model, reasons)
