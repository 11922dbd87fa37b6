"""What vLLM's two model runners have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from vllm.forward_context import set_forward_context

from nnsight_async.worker.runners.compiled import CompiledCode
from nnsight_async.worker.runners.layers import NoKeyValues


class RunnerBase:
    """An adapter's common part. ``runner`` is vLLM's own."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.code = CompiledCode(runner.get_model())
        self.forced = False  # whether forward passes are run eagerly, whoever looks
        #: The scheduler's output of the step in progress; None outside one, as in the runner's own dummy runs.
        self.scheduled: Any = None

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        model: nn.Module = self._runner.get_model()
        return model

    def dummy_forward(self) -> None:
        """Run one forward pass of one token, and compute its logits."""
        with self.eager():
            _, hidden = self._runner._dummy_run(1, skip_eplb=True)
            self._runner.get_model().compute_logits(hidden[:1])

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Forward passes in this context are run by Python, as the model is written."""
        self.forced = True
        try:
            yield
        finally:
            self.forced = False

    def call_context(self) -> AbstractContextManager[None]:
        """What vLLM's layers look for around them, without a KV cache."""
        context: AbstractContextManager[None] = set_forward_context(NoKeyValues(), self._runner.vllm_config)
        return context
