"""vLLM's V2 model runner (``vllm.v1.worker.gpu.model_runner``), its own choice on a GPU.

Seams, on vLLM 0.32: ``gather_batch_req_state`` settles the order of the batch; the graph manager's ``dispatch`` then
picks how the forward pass is run (``tiers.py``); ``sample`` computes the logits and draws; the sampler's ``sample`` is
given the logits, before anything is made of them but a count of NaNs, and returns the drawn ids ``[requests]``, and the
sampler gathers the logprobs after it. All are replaced on their instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from nnsight_async.engine.scheduler import STOPS_ATTRIBUTE
from nnsight_async.protocol import TierCounts
from nnsight_async.worker.rows import Rows
from nnsight_async.worker.runners import StepEvents
from nnsight_async.worker.runners.base import RunnerBase
from nnsight_async.worker.runners.tiers import Tiers
from nnsight_async.worker.taps import Taps


class V2Runner(RunnerBase):
    """The adapter of one V2 runner."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._tiers = Tiers(runner, self.code, lambda: self.forced)

    def attach(self, events: StepEvents, taps: Sequence[Taps] = ()) -> None:
        """Have ``events`` called at each step from now on; graphs for ``taps`` are captured before this returns."""
        runner = self._runner
        gather, sample, draw = runner.gather_batch_req_state, runner.sample, runner.sampler.sample

        def traced_gather(scheduler_output: Any, dummy_run: bool) -> Any:
            found = gather(scheduler_output, dummy_run)
            if self.scheduled is not None and not dummy_run:
                events.before_forward(*_layout(found[0]))
                self._tiers.traced = True
            return found

        def traced_sample(*args: Any, **kwargs: Any) -> Any:
            if self.scheduled is not None:
                events.after_forward()
            return sample(*args, **kwargs)

        def traced_draw(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.scheduled is None:
                return draw(logits, *args, **kwargs)
            events.on_logits(logits)
            sampled, processed = draw(logits, *args, **kwargs)
            # Here the logprobs are not gathered yet: they will be those of the token that is written here.
            events.on_samples(sampled.view(-1, 1))
            return sampled, processed

        runner.gather_batch_req_state = traced_gather
        runner.sample = traced_sample
        runner.sampler.sample = traced_draw
        self._tiers.attach(events, taps)

    def tier_counts(self) -> TierCounts:
        """How the steps so far were run."""
        return self._tiers.counts()

    def mark_stops(self, output: Any, stops: dict[str, str]) -> None:
        """Write the stops on the output that reaches the scheduler, the one inside the asynchronous one."""
        setattr(getattr(output, "model_runner_output", output), STOPS_ATTRIBUTE, stops)


def _layout(state: Any) -> tuple[dict[str, Rows], int]:
    bounds = accumulate(state.num_scheduled_tokens.tolist(), initial=0)
    rows = {
        request_id: Rows(start, stop, index)
        for index, (request_id, (start, stop)) in enumerate(zip(state.req_ids, pairwise(bounds), strict=True))
    }
    return rows, int(state.num_tokens)
