"""``tracer.backend``: a trace's outputs as they come, on the caller's own event loop."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from nnsight_async.client.output import StepOutput
from nnsight_async.errors import ArgumentError, LoopCutShortWarning


@dataclass
class CutShort:
    """A loop over steps that was cut short, on its way to the caller, where it becomes a warning.

    ``where`` is the loop's line, as ``file:line: source``.
    """

    where: str
    _given: bool = False

    def emit(self) -> None:
        """Give the warning, at the loop's own line; the second time does nothing."""
        if self._given:
            return
        self._given = True
        place, _, _ = self.where.partition(": ")
        filename, _, line = place.rpartition(":")
        warnings.warn_explicit(
            f"the loop at {self.where} asked for a step that the request did not make, so it was cut short: values "
            "saved inside the loop are kept, and the statements after it did not run. An open loop (tracer.all(), "
            "tracer.iter[:]) always ends this way; bound it (tracer.iter[:n]) where something follows",
            LoopCutShortWarning,
            filename or "<block>",
            int(line) if line.isdigit() else 1,
        )


class Stream:
    """The outputs of all invokes of one trace, in the order in which they come.

    * ``async for output in stream`` yields one :class:`StepOutput` for each step of each invoke. An invoke's error is
      raised where its next output would have been; iterating on goes on with the other invokes.
    * ``await stream`` takes out all that is left and returns the last output.
    * ``async with stream`` closes it at the end, whatever happens: the requests still running are aborted and freed.

    One consumer at a time. The engine's loop puts in, the caller's loop takes out.
    """

    def __init__(self, invokes: int, close: Callable[[], Awaitable[None]]) -> None:
        self._items: deque[StepOutput | BaseException | CutShort] = deque()
        self._lock = threading.Lock()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._running = invokes
        self._close = close
        self._last: StepOutput | None = None
        self._closed = False

    # On the engine's loop.

    def put(self, item: StepOutput | BaseException | CutShort) -> None:
        """Add an output, the error of an invoke, or a warning about one."""
        with self._lock:
            if not self._closed:
                self._items.append(item)
                self._wake()

    def ended(self) -> None:
        """Count one invoke as over."""
        with self._lock:
            self._running -= 1
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            loop, event = self._waiter
            self._waiter = None
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    # On the caller's loop.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepOutput:
        while True:
            item = await self._next()
            if isinstance(item, CutShort):
                item.emit()
            elif isinstance(item, BaseException):
                raise item
            else:
                self._last = item
                return item

    async def _next(self) -> StepOutput | BaseException | CutShort:
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                if not self._running:
                    raise StopAsyncIteration
                if self._waiter is not None:
                    raise ArgumentError("the stream is being consumed already: it has one consumer at a time")
                event = asyncio.Event()
                self._waiter = waiter = (asyncio.get_running_loop(), event)
            try:
                await event.wait()
            finally:
                with self._lock:
                    if self._waiter is waiter:  # cancelled while waiting
                        self._waiter = None

    def __await__(self) -> Generator[Any, None, StepOutput]:
        return self._drain().__await__()

    async def _drain(self) -> StepOutput:
        async for _ in self:
            pass
        if self._last is None:
            raise ArgumentError("the stream has no output: it was closed, or its error was raised before")
        return self._last

    async def aclose(self) -> None:
        """Abort the requests that are still running and drop what has not been taken out."""
        self._closed = True
        await self._close()
        with self._lock:
            self._items.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()
