"""The only code that touches a vLLM model runner's own attributes, one module a runner."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from nnsight_async.worker.rows import Rows


class StepEvents(Protocol):
    """What a runner's adapter tells of each step, on the forward thread, in this order."""

    def before_forward(self, rows: dict[str, Rows], tokens: int) -> None:
        """The batch is laid out: ``rows`` says where each request is, ``tokens`` how many tokens there are."""

    def after_forward(self) -> None:
        """The forward pass is over; the logits come next."""

    def on_logits(self, logits: Tensor) -> None:
        """The logits ``[requests, vocab]`` are there, before the sampler has seen them."""

    def on_samples(self, samples: Tensor) -> None:
        """The sampled ids ``[requests, 1]`` are there, before anything has been made of them."""


class Runner(Protocol):
    """What the worker needs of a runner.

    ``scheduled`` is the scheduler's output of the step in progress; None outside one, and where nothing is traced.
    """

    scheduled: Any

    @property
    def model(self) -> nn.Module:
        """The model itself, without wrappers."""

    def attach(self, events: StepEvents) -> None:
        """Have ``events`` called at each step from now on."""

    def dummy_forward(self) -> None:
        """Run one forward pass on made-up tokens, and compute the logits."""

    def call_context(self) -> AbstractContextManager[None]:
        """What has to be around a module that is called outside the forward pass of its step."""

    def mark_stops(self, output: Any, stops: dict[str, str]) -> None:
        """Tell the scheduler, through a step's output, which requests end at this step and with what reason."""
