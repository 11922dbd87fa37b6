"""``model.map``: one call for each prompt, so many at once, the results in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class Map(Generic[T]):
    """The results of ``function(prompt)`` for each of many prompts, in their order: ``async for result in ...``.

    The prompts are taken one by one as there is room for them, so they may be a generator without end. A result that
    nobody has taken yet still counts among the ``concurrency``, so a slow consumer slows the work down and nothing
    piles up. If a call fails, its error is raised in its place, and the calls after it are cancelled. ``async with``
    cancels what is running when it is left.
    """

    def __init__(
        self,
        function: Callable[[Any], Awaitable[T]],
        prompts: Iterable[Any] | AsyncIterable[Any],
        concurrency: int,
    ) -> None:
        self._function = function
        self._prompts: Iterator[Any] | AsyncIterator[Any]
        self._prompts = aiter(prompts) if isinstance(prompts, AsyncIterable) else iter(prompts)
        self._concurrency = concurrency
        self._tasks: deque[asyncio.Task[T]] = deque()
        self._exhausted = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            while not self._exhausted and len(self._tasks) < self._concurrency:
                await self._start()
            if not self._tasks:
                raise StopAsyncIteration
            return await self._first()
        except BaseException:
            await self.aclose()
            raise

    async def _first(self) -> T:
        await asyncio.wait([self._tasks[0]])  # a caller that is cancelled here leaves the task to be closed
        return self._tasks.popleft().result()

    async def _start(self) -> None:
        try:
            prompt = await anext(self._prompts) if isinstance(self._prompts, AsyncIterator) else next(self._prompts)
        except (StopIteration, StopAsyncIteration):
            self._exhausted = True
            return
        self._tasks.append(asyncio.ensure_future(_call(self._function, prompt)))

    async def aclose(self) -> None:
        """Cancel the calls that are running, and wait until they have ended."""
        self._exhausted = True
        tasks = list(self._tasks)
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        for task in self._tasks:
            if not task.done() and not task.get_loop().is_closed():
                task.cancel()


async def _call(function: Callable[[Any], Awaitable[T]], prompt: Any) -> T:
    return await function(prompt)
