"""vLLM's V1 model runner (``vllm.v1.worker.gpu_model_runner``), which the CPU worker uses as well.

Seams, on vLLM 0.32: ``_determine_batch_execution_and_padding`` picks how the forward pass is run, when
``input_batch.req_ids`` and the scheduled tokens are in their final order; ``_model_forward`` runs the model;
``_sample`` takes the logits; the sampler's ``sample`` returns the drawn ids ``[requests]``, and the sampler gathers the
logprobs after it. All four are replaced on their instances.

There are no tapped graphs here: a step at whose locations somebody looks is run eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import CUDAGraphMode

from nnsight_async.engine.scheduler import STOPS_ATTRIBUTE
from nnsight_async.protocol import TierCounts
from nnsight_async.worker.rows import Rows
from nnsight_async.worker.runners import StepEvents
from nnsight_async.worker.runners.base import RunnerBase
from nnsight_async.worker.taps import Taps


class V1Runner(RunnerBase):
    """The adapter of one V1 runner."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._counts = TierCounts()
        self._determine = runner._determine_batch_execution_and_padding
        runner._determine_batch_execution_and_padding = self._choose
        self._events: StepEvents | None = None

    def attach(self, events: StepEvents, taps: Sequence[Taps] = ()) -> None:
        """Have ``events`` called at each step from now on; ``taps`` is for runners with tapped graphs."""
        self._events = events
        runner = self._runner
        forward, sample, draw = runner._model_forward, runner._sample, runner.sampler.sample

        def traced_forward(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self.scheduled is not None:
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

    def tier_counts(self) -> TierCounts:
        """How the steps so far were run."""
        return self._counts

    def mark_stops(self, output: Any, stops: dict[str, str]) -> None:
        """Write the stops on the output that reaches the scheduler (the one inside, where outputs are asynchronous)."""
        setattr(getattr(output, "_model_runner_output", output), STOPS_ATTRIBUTE, stops)

    def _choose(self, *args: Any, **kwargs: Any) -> Any:
        eager = self.forced
        if self.scheduled is not None:
            assert self._events is not None
            self._events.before_forward(*self._layout())
            wanted = self._events.wanted()
            eager = eager or wanted is None or bool(wanted)
        self.code.use(not eager)
        if eager:
            kwargs["force_eager"] = True
        chosen = self._determine(*args, **kwargs)
        if not self.forced:
            self._count(eager, chosen[0])
        return chosen

    def _count(self, eager: bool, mode: CUDAGraphMode) -> None:
        if mode is CUDAGraphMode.FULL:
            self._counts.whole += 1
        elif not eager and (self.code or mode is CUDAGraphMode.PIECEWISE):
            self._counts.plain += 1
        else:
            self._counts.eager += 1

    def _layout(self) -> tuple[dict[str, Rows], int]:
        scheduled = self.scheduled.num_scheduled_tokens
        rows, start = {}, 0
        for index, request_id in enumerate(self._runner.input_batch.req_ids):
            stop = start + scheduled[request_id]
            rows[request_id] = Rows(start, stop, index)
            start = stop
        return rows, start
