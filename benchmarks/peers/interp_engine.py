"""interp-engine 1.14 on vLLM: its static backend, which keeps CUDA graphs, or with ``eager`` its hooked one.

Only the finished requests are looked at: its streaming capture asks the worker for rows at every step, and is slower.
Its captures do not take ``ignore_eos``, so a request may end early; only tokens that came count.
"""

from __future__ import annotations

import asyncio
from typing import Any

from interp_engine import load_model

from benchmarks.jobs import Job, Run, bounded, timed
from benchmarks.peers import Settings

#: Engine arguments that ``load_model`` has parameters of its own for.
_OWN = ("dtype", "gpu_memory_utilization", "max_model_len")


async def start(settings: Settings) -> Any:
    """An engine whose declared points are the residual streams leaving all layers."""
    own = {name: settings.engine[name] for name in _OWN if name in settings.engine}
    rest = {name: value for name, value in settings.engine.items() if name not in _OWN}
    static: dict[str, Any] = {"static_points": [f"resid_post.{layer}" for layer in range(settings.layers)]}
    model = load_model(
        settings.model,
        backend="vllm" if settings.eager else "vllm-static",
        extra_vllm_kwargs=rest,
        **({} if settings.eager else static),
        **own,
    )
    await model.warmup()
    return model


async def close(model: Any) -> None:
    """Shut the engine down."""
    await model.shutdown()


async def untraced(model: Any, job: Job) -> Run:
    """Plain generations."""

    async def one(prompt: list[int]) -> int:
        output = await model.generate_full(prompt, max_tokens=job.tokens, temperature=0.0)
        return len(output.token_ids)

    return await _at_once(job, one)


async def _at_once(job: Job, one: Any) -> Run:
    async def work() -> int:
        return sum(await asyncio.gather(*map(one, job.prompts)))

    return await timed(work())


async def _generation(model: Any, prompt: list[int], job: Job, layers: range) -> int:
    points = [f"resid_post.{layer}" for layer in layers]
    output, rows = await model.capture_generation(prompt, points, max_tokens=job.tokens, temperature=0.0)
    if len(rows) != len(points):
        raise RuntimeError(f"{len(rows)} of {len(points)} points came home")
    return len(output.token_ids)


async def one_layer(model: Any, job: Job) -> Run:
    """One layer's residual stream, all positions."""
    layers = range(job.layer, job.layer + 1)
    return await _at_once(job, lambda prompt: _generation(model, prompt, job, layers))


async def every_layer(model: Any, job: Job) -> Run:
    """Every layer's residual stream, all positions."""
    return await _at_once(job, lambda prompt: _generation(model, prompt, job, range(job.layers)))


async def sweep(model: Any, job: Job) -> Run:
    """Many short prompts, one layer's residual stream of each."""

    async def one(prompt: list[int]) -> int:
        await model.capture(prompt, [f"resid_post.{job.layer}"])
        return job.tokens

    return await timed(bounded(job.prompts, job.concurrency, one))


WORKLOADS = {"untraced": untraced, "one layer": one_layer, "every layer": every_layer, "sweep": sweep}
