"""The background event loop on which an engine lives.

One thread a model runs one loop for as long as the model is open. The sync form waits for it; the async form hands
values over to the caller's own loop. So an engine outlives the caller's event loops (``asyncio.run`` called twice, a
test's loop a test), and a busy caller does not hold the engine up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # Windows has none
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class LoopThread:
    """A daemon thread with an event loop, so that an interpreter that exits is not kept waiting."""

    def __init__(self, name: str) -> None:
        self.loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it, from any other thread; an interrupt cancels it."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a blocking call cannot be made on the engine's own event loop")
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it, from a coroutine on any other loop."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Have a function called on the loop, from any thread."""
        self.loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """End the loop and its thread."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)
