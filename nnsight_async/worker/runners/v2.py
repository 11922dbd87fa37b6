"""vLLM's V2 model runner (``vllm.v1.worker.gpu.model_runner``), its own choice on a GPU.

Seams, on vLLM 0.32: ``prepare_inputs`` returns the batch in its final order, just before the forward pass; ``sample``
computes the logits and draws; the sampler's ``sample`` is given the logits, before anything is made of them but a count
of NaNs, and returns the drawn ids ``[requests]``, and the sampler gathers the logprobs after it. All three are replaced
on their instances.
"""

from __future__ import annotations

from typing import Any

import torch

from nnsight_async.engine.scheduler import STOPS_ATTRIBUTE
from nnsight_async.worker.rows import Rows
from nnsight_async.worker.runners import StepEvents
from nnsight_async.worker.runners.base import RunnerBase


class V2Runner(RunnerBase):
    """The adapter of one V2 runner."""

    def attach(self, events: StepEvents) -> None:
        """Have ``events`` called at each step from now on."""
        runner = self._runner
        prepare, sample, draw = runner.prepare_inputs, runner.sample, runner.sampler.sample

        def traced_prepare(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            if self.scheduled is not None:
                events.before_forward(*_layout(batch))
            return batch

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

        runner.prepare_inputs = traced_prepare
        runner.sample = traced_sample
        runner.sampler.sample = traced_draw

    def mark_stops(self, output: Any, stops: dict[str, str]) -> None:
        """Write the stops on the output that reaches the scheduler, the one inside the asynchronous one."""
        setattr(getattr(output, "model_runner_output", output), STOPS_ATTRIBUTE, stops)


def _layout(batch: Any) -> tuple[dict[str, Rows], int]:
    bounds = batch.query_start_loc_np.tolist()
    rows = {request_id: Rows(bounds[index], bounds[index + 1], index) for index, request_id in enumerate(batch.req_ids)}
    return rows, int(batch.num_tokens)
