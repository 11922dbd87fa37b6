"""vLLM's V1 model runner (``vllm.v1.worker.gpu_model_runner``), which the CPU worker uses as well.

Seams, on vLLM 0.32: ``_model_forward`` runs the model when ``input_batch.req_ids`` and the scheduled tokens are in
their final order; ``_sample`` takes the logits; the sampler's ``sample`` returns the drawn ids ``[requests]``, and the
sampler gathers the logprobs after it. All three are replaced on their instances.
"""

from __future__ import annotations

from typing import Any

import torch

from nnsight_async.engine.scheduler import STOPS_ATTRIBUTE
from nnsight_async.worker.rows import Rows
from nnsight_async.worker.runners import StepEvents
from nnsight_async.worker.runners.base import RunnerBase


class V1Runner(RunnerBase):
    """The adapter of one V1 runner."""

    def attach(self, events: StepEvents) -> None:
        """Have ``events`` called at each step from now on."""
        runner = self._runner
        forward, sample, draw = runner._model_forward, runner._sample, runner.sampler.sample

        def traced_forward(*args: Any, **kwargs: Any) -> Any:
            if self.scheduled is None:
                return forward(*args, **kwargs)
            rows, tokens = self._layout()
            events.before_forward(rows, tokens)
            output = forward(*args, **kwargs)
            events.after_forward()
            return output

        def traced_sample(logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
            if self.scheduled is None or logits is None:
                return sample(logits, spec_decode_metadata)
            events.on_logits(logits)
            return sample(logits, spec_decode_metadata)

        def traced_draw(*args: Any, **kwargs: Any) -> Any:
            sampled, processed = draw(*args, **kwargs)
            if self.scheduled is not None:
                # Here the logprobs are not gathered yet: they will be those of the token that is written here.
                events.on_samples(sampled.view(-1, 1))
            return sampled, processed

        runner._model_forward = traced_forward
        runner._sample = traced_sample
        runner.sampler.sample = traced_draw

    def mark_stops(self, output: Any, stops: dict[str, str]) -> None:
        """Write the stops on the output that reaches the scheduler (the one inside, where outputs are asynchronous)."""
        setattr(getattr(output, "_model_runner_output", output), STOPS_ATTRIBUTE, stops)

    def _layout(self) -> tuple[dict[str, Rows], int]:
        scheduled = self.scheduled.num_scheduled_tokens
        rows, start = {}, 0
        for index, request_id in enumerate(self._runner.input_batch.req_ids):
            stop = start + scheduled[request_id]
            rows[request_id] = Rows(start, stop, index)
            start = stop
        return rows, start
