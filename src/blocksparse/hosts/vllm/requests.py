"""`Requests`: what a worker of vLLM knows of the requests of its step, and does not tell their attention."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, NamedTuple, final

from blocksparse.hosts.serving.settings import KEY

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say
TURNED_OFF = "turned off by the request"
_OURS = "blocksparse_requests"


class Request(NamedTuple):
    """One row of a batch."""

    known: int  # tokens before it decodes: its prompt, and after preemption its answer so far
    turned_off: bool


@final
class Requests:
    """The requests of one worker. `running` has them while the worker runs a step in this thread."""

    running: ContextVar[Requests | None] = ContextVar("running", default=None)

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._turned_off: set[str] = set()

    def saw(self, scheduled: Any) -> None:
        """Learn of the requests that begin, and of those that ended, from vLLM's SchedulerOutput of a step."""
        self._turned_off.difference_update(scheduled.finished_req_ids)
        for new in scheduled.scheduled_new_reqs:
            given = getattr(new.sampling_params, "extra_args", None) or {}
            (self._turned_off.add if _turns_off(given.get(KEY, True)) else self._turned_off.discard)(new.req_id)

    @property
    def some_turned_off(self) -> bool:
        """Whether any request of the engine turned this library off, in this step or not."""
        return bool(self._turned_off)

    def of_rows(self, rows: int, places: Sequence[int] | None) -> list[Request] | None:
        """The request of each row of a batch; None where vLLM does not tell.

        Args:
            rows: of the batch. Those that pad it stand at its end.
            places: of each row in the V2 model runner's table. CommonAttentionMetadata has them.
        """
        runner = self._worker.model_runner
        try:
            if hasattr(runner, "req_states"):
                if places is None:  # of hybrid models
                    raise AttributeError("the batches of this model have no req_idx")
                states = runner.req_states
                names = [states.index_to_req_id[place] for place in places]
                known = states.prefill_len.np[places].tolist()
            else:
                batch = runner.input_batch
                names, known = batch.req_ids, batch.num_tokens_no_spec[: batch.num_reqs].tolist()
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            _warn_once(f"{type(error).__name__}: {error}")
            return None
        if len(names) > rows:  # one of several parts of a batch, which the V1 runner does not number
            return None
        found = [Request(tokens, name in self._turned_off) for tokens, name in zip(known, names, strict=True)]
        return found + [Request(0, False)] * (rows - len(found))


def watch(worker: Any) -> None:
    """Let `Requests.running` follow the steps of a class of workers. A second call changes nothing.

    Every executor and both model runners run a step through `execute_model`. vLLM hands sizes alone from there on.
    """
    before = worker.execute_model
    if hasattr(before, _OURS):
        return

    @wraps(before)
    def execute_model(self: Any, scheduler_output: Any, *more: Any, **named: Any) -> Any:
        if (requests := vars(self).get(_OURS)) is None:
            requests = vars(self)[_OURS] = Requests(self)
        requests.saw(scheduler_output)
        token = Requests.running.set(requests)
        try:
            return before(self, scheduler_output, *more, **named)
        finally:
            Requests.running.reset(token)

    setattr(execute_model, _OURS, True)
    worker.execute_model = execute_model


def _turns_off(value: object) -> bool:
    """Whether a request's own word turns this library off. A wrong one must not stop the engine."""
    if value in (True, False):  # 1 and 0 too, since `vllm_xargs` over HTTP takes numbers
        return not value
    _say_ignored_once(repr(value)[:80])
    return False


@lru_cache(maxsize=64)
def _say_ignored_once(value: str) -> None:
    _log.warning(
        "blocksparse: '%s' in extra_args of a request must be false or true, and is ignored: %s", KEY, value
    )


@lru_cache(maxsize=1)
def _warn_once(error: str) -> None:
    _log.warning(
        "blocksparse: vLLM does not tell here how long prompts are, so each chunk counts as the end of its "
        "prompt, and a request that turns blocksparse off turns it off for all while it runs: %s",
        error,
    )
