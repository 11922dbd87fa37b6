"""What is run, and what comes of a run: the same for plain vLLM, for this package and for its peers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """The work of one run.

    Attributes:
        prompts: token ids of each prompt; all of them are in flight at once.
        tokens: new tokens of each request.
        layer: the layer that is read or written where only one is.
        layers: how many layers the model has.
        width: width of the residual stream.
        head: width of one attention head.
        device: where the model's tensors are, for those that a block brings along.
        concurrency: how many requests a sweep has in flight.
    """

    prompts: list[list[int]]
    tokens: int
    layer: int
    layers: int
    width: int
    head: int
    device: str = "cpu"
    concurrency: int = 128

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling settings of every request, by vLLM's names."""
        return {"temperature": 0.0, "max_tokens": self.tokens, "ignore_eos": True, "detokenize": False}


@dataclass
class Run:
    """What came of one run.

    Attributes:
        tokens: new tokens of all requests together.
        seconds: from the first request's submission to the last one's end.
        first: for each request that was streamed, seconds from the start of the run to its first token. All requests
            are wanted at the start, so this includes what the client does for those before it.
        between: seconds between a token and the next, over all streamed requests.
        processor: seconds of processor time of this process and all that it has started, if somebody has looked.
    """

    tokens: int
    seconds: float
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    processor: float | None = None


#: Given an engine or a model and a job, do the work.
Workload = Callable[[Any, Job], Awaitable[Run]]


def made_up_prompts(count: int, tokens: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """``count`` prompts of ``tokens`` random token ids, the same for the same seed."""
    source = random.Random(seed)
    return [[source.randrange(100, vocabulary) for _ in range(tokens)] for _ in range(count)]


async def stream_all(
    job: Job,
    start: Callable[[list[int]], AsyncIterator[Any]],
    check: Callable[[Any], bool] | None = None,
) -> Run:
    """Stream every prompt of a job, all at once.

    ``start(prompt)`` gives vLLM's outputs of one request, each with all of its tokens so far. An output with several
    new tokens counts as so many equal gaps. ``check`` looks at each request's last output.

    Raises:
        RuntimeError: a request came home with another number of tokens than it should have, or ``check`` says no.
    """
    run = Run(0, 0.0)
    begin = time.perf_counter()

    async def one(prompt: list[int]) -> None:
        last, count, output = begin, 0, None
        async for output in start(prompt):
            new = len(output.outputs[0].token_ids) - count
            now = time.perf_counter()
            if count == 0 and new:
                run.first.append(now - begin)
                last, count, new = now, 1, new - 1
            if new:
                run.between.extend([(now - last) / new] * new)
                last, count = now, count + new
        if count != job.tokens or (check is not None and not check(output)):
            raise RuntimeError(f"a request came home with {count} of {job.tokens} tokens, or with too few values")
        run.tokens += count

    await asyncio.gather(*map(one, job.prompts))
    run.seconds = time.perf_counter() - begin
    return run


async def timed(work: Awaitable[int]) -> Run:
    """Wait for work that says how many tokens it has made."""
    begin = time.perf_counter()
    tokens = await work
    return Run(tokens, time.perf_counter() - begin)


async def bounded(prompts: list[list[int]], concurrency: int, one: Callable[[list[int]], Awaitable[int]]) -> int:
    """Call ``one`` for each prompt, so many at once; the sum of what it returns."""
    waiting = iter(prompts)

    async def worker() -> int:
        return sum([await one(prompt) for prompt in waiting])

    return sum(await asyncio.gather(*(worker() for _ in range(concurrency))))
