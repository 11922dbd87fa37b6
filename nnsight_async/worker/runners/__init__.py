"""The only code that touches a vLLM model runner's own attributes, one module a runner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from nnsight_async.protocol import TierCounts
from nnsight_async.worker.copies import Copies
from nnsight_async.worker.rows import Rows
from nnsight_async.worker.taps import Taps


class StepEvents(Protocol):
    """What a runner's adapter tells of each step, on the forward thread, in this order."""

    def before_forward(self, rows: dict[str, Rows], tokens: int) -> None:
        """The batch is laid out: ``rows`` says where each request is, ``tokens`` how many tokens there are."""

    def wanted(self) -> Taps | None:
        """What the coming forward pass is going to be looked at for; None: anything."""

    def note_pass(self) -> None:
        """The pass that comes shows no more than what was wanted."""

    def at_tap(self, key: tuple[str, str], value: Any) -> None:
        """Such a pass has come to a wanted location."""

    def take_copies(self, copies: Copies) -> None:
        """Such a pass is over, and has left copies of the wanted locations that it did not show."""

    def unserved(self) -> bool:
        """Whether, at its end, somebody waits for another."""

    def begin_again(self) -> None:
        """Then the same pass is run once more, and shows everything."""

    def diverted(
        self, keys: Collection[tuple[str, str]], tap: Callable[[tuple[str, str], Any], None]
    ) -> AbstractContextManager[None]:
        """Show ``keys`` to ``tap``, and nothing to anybody's blocks, in the forward passes of this context."""

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

    def attach(self, events: StepEvents, taps: Sequence[Taps] = ()) -> None:
        """Have ``events`` called at each step from now on; where there are tapped graphs, capture some for ``taps``."""

    def tier_counts(self) -> TierCounts:
        """How the steps so far were run."""

    def dummy_forward(self) -> None:
        """Run one forward pass on made-up tokens, and compute the logits."""

    def call_context(self) -> AbstractContextManager[None]:
        """What has to be around a module that is called outside the forward pass of its step."""

    def mark_stops(self, output: Any, stops: dict[str, str]) -> None:
        """Tell the scheduler, through a step's output, which requests end at this step and with what reason."""
