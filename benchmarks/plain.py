"""The yardstick: plain vLLM through ``AsyncLLM``, as its user would call it."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.jobs import Job, Run, Workload, bounded, stream_all, timed

#: Seconds that an engine's processes are given to end by themselves.
_PATIENCE = 30


def start(model: str, **arguments: Any) -> AsyncLLM:
    """Start an engine with vLLM's own engine arguments; to be called in a running event loop."""
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(_PATIENCE))
    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **arguments))


async def stop(engine: AsyncLLM) -> None:
    """Shut an engine down, with time for its processes to give back what they share."""
    if engine.output_handler is not None:
        engine.output_handler.cancel()  # first, or it takes the end of the engine's process for a crash
        await asyncio.gather(engine.output_handler, return_exceptions=True)
    engine.shutdown(timeout=_PATIENCE)


def outputs(engine: AsyncLLM, prompt: list[int], job: Job, kind: RequestOutputKind, **extra: Any) -> AsyncIterator[Any]:
    """One request's outputs; ``extra`` is put into its sampling parameters."""
    params = SamplingParams(**job.sampling, output_kind=kind, **extra)
    return engine.generate({"prompt_token_ids": prompt}, params, uuid.uuid4().hex)


async def finished(engine: AsyncLLM, prompt: list[int], job: Job, **extra: Any) -> int:
    """Wait for one request; the number of its tokens."""
    count = 0
    async for output in outputs(engine, prompt, job, RequestOutputKind.FINAL_ONLY, **extra):
        count = len(output.outputs[0].token_ids)
    return count


async def batch(engine: AsyncLLM, job: Job) -> Run:
    """Every prompt at once, nothing looked at before the end."""

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*(finished(engine, prompt, job) for prompt in job.prompts)))

    return await timed(all_of_them())


async def stream(engine: AsyncLLM, job: Job) -> Run:
    """Every prompt at once, each consumed token by token."""
    return await stream_all(job, lambda prompt: outputs(engine, prompt, job, RequestOutputKind.CUMULATIVE))


async def sweep(engine: AsyncLLM, job: Job) -> Run:
    """Many prompts, ``job.concurrency`` of them at once."""
    return await timed(bounded(job.prompts, job.concurrency, lambda prompt: finished(engine, prompt, job)))


#: The ways in which plain vLLM is run; a workload names the one that its user would otherwise have taken.
PLAIN: dict[str, Workload] = {"batch": batch, "stream": stream, "sweep": sweep}
