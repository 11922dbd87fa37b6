"""vLLM's schedulers, with two additions: a request ends at the step at which its block says so, and one that edits is
never preempted (see :mod:`nnsight_async.engine.reserve`).

The worker writes the stops of a step on its ``ModelRunnerOutput``; the scheduler reads them where it looks for the
usual reasons to stop. No token is forged, and ``ignore_eos`` and ``min_tokens`` make no difference. Beside that, an
engine ends when the client that started it has died.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from nnsight_async.engine.reserve import Reserving

#: The attribute of a ModelRunnerOutput that holds ``{request id: stop reason}``; absent where nothing stops.
STOPS_ATTRIBUTE: Final = "nnsight_async_stops"


class _Stops:
    _stops: dict[str, str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A Ctrl-C in a terminal reaches every process there; what it means is for the client to say.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The scheduler is what of ours lives in the engine core's process, which by itself outlives a killed client.
        threading.Thread(
            target=_end_with_parent, args=(os.getppid(),), name="nnsight-async-parent", daemon=True
        ).start()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._stops = getattr(model_runner_output, STOPS_ATTRIBUTE, {})
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        tokens, stopped = super()._update_request_with_output(  # type: ignore[misc]
            request, new_token_ids, is_stale=is_stale
        )
        reason = self._stops.get(request.request_id)
        if reason is None:
            return tokens, stopped
        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = reason
        return tokens, True


def _end_with_parent(parent: int) -> None:
    """Have the engine shut down in good order once the process that started it is no more."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


class TracingScheduler(_Stops, Reserving, Scheduler):
    """The synchronous scheduler."""


class TracingAsyncScheduler(_Stops, Reserving, AsyncScheduler):
    """The scheduler that plans a step ahead."""
