"""One sequence of a request, as far as the client has heard of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput

from nnsight_async.client.cache import Cache, Share
from nnsight_async.protocol import BlockState, Entry
from nnsight_async.saving import CacheMark


@dataclass
class SequenceState:
    """One of the ``n`` sequences of an invoke, as far as it has come."""

    index: int
    internal_id: str
    step: int = -1
    saves: dict[str, Any] = field(default_factory=dict)
    new: dict[str, Any] = field(default_factory=dict)
    unread: int = 0
    shares: dict[int, list[Share]] = field(default_factory=dict)
    captured_bytes: dict[int, int] = field(default_factory=dict)
    state: BlockState | None = None
    where: str = ""
    ended: bool = False
    waiting_outputs: deque[tuple[int, RequestOutput]] = field(default_factory=deque)
    waiting_entries: dict[int, tuple[Entry, Any]] = field(default_factory=dict)
    completion: CompletionOutput | None = None
    final: tuple[Entry, Any] | None = None

    @property
    def finished(self) -> bool:
        """Whether vLLM has finished it, though an entry of its may still be on its way."""
        return self.completion is not None and self.completion.finish_reason is not None

    @property
    def wants_result(self) -> bool:
        """Whether the block waits for the request's result, and has not been given it."""
        return self.state is BlockState.WANTS_RESULT and self.final is None

    def with_caches(self, step: int, saves: dict[str, Any], *, single: bool) -> dict[str, Any]:
        """``saves`` with what was captured up to a step where the block saved a cache.

        ``single`` says that the request has one step, so that a module has one capture and not a list of them.
        """
        for name, value in saves.items():
            if isinstance(value, CacheMark):
                shares = self.shares.get(value.number, [])[: step + 1]
                saves[name] = Cache(shares, single=single, device=value.device)
        return saves

    def newly_captured(self, step: int) -> dict[str, Any]:
        """The caches that the block saved, with what this step added to them."""
        marks = {name: value for name, value in self.saves.items() if isinstance(value, CacheMark)}
        return {
            name: Cache(self.shares.get(mark.number, [])[step : step + 1], single=True, device=mark.device)
            for name, mark in marks.items()
        }
