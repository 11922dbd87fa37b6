"""Throughput of this package beside plain vLLM, on the same machine in the same run.

``python -m benchmarks.run`` starts a plain ``AsyncLLM`` and ours on SmolLM2, runs every workload on each in turn,
several times over, and prints the ratio of tokens per second to plain vLLM's: the median of the rounds, with the lowest
and the highest. The two take turns within a round, so what slows the machine down slows both. Only ratios mean anything
on a CPU.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import uvloop
from small_models import smollm2
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from nnsight_async import VLLM

ENGINE: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 512 << 20, "max_model_len": 512}
TEXT = "The capital of France is Paris, and the capital of Germany is Berlin. The river that runs through it is called"

Workload = Callable[[], Awaitable[int]]


def prompts(model: VLLM, count: int) -> list[list[int]]:
    """``count`` prompts of 8 to 23 tokens, all different."""
    ids = model.tokenizer(TEXT).input_ids
    return [[*ids[: 8 + number % 16], 1000 + number] for number in range(count)]


async def plain(engine: AsyncLLM, work: list[list[int]], tokens: int, kind: RequestOutputKind) -> int:
    """Every prompt through plain AsyncLLM, all at once; returns the number of tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=kind)

    async def one(ids: list[int]) -> int:
        count = 0
        async for output in engine.generate({"prompt_token_ids": ids}, params, uuid.uuid4().hex):
            count = len(output.outputs[0].token_ids)
        return count

    return sum(await asyncio.gather(*map(one, work)))


async def untraced(model: VLLM, work: list[list[int]], tokens: int) -> int:
    """Every prompt through ``model.generate``."""
    outputs = await model.generate(work, temperature=0.0, max_tokens=tokens, ignore_eos=True, progress=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


async def stream(backend: Any) -> int:
    """Consume a trace's stream to its end; returns the number of tokens."""
    count = 0
    async for output in backend:
        count = len(output.outputs[0].token_ids)
    return count


async def empty_trace(model: VLLM, work: list[list[int]], tokens: int) -> int:
    """A trace that reads nothing."""

    async def one(ids: list[int]) -> int:
        with model.trace(ids, temperature=0.0, max_tokens=tokens, ignore_eos=True) as tracer:
            pass
        return await stream(tracer.backend)

    return sum(await asyncio.gather(*map(one, work)))


async def one_layer(model: VLLM, work: list[list[int]], tokens: int) -> int:
    """The residual stream after one layer, at every step."""
    layer = model.model.layers[10]

    async def one(ids: list[int]) -> int:
        with model.trace(ids, temperature=0.0, max_tokens=tokens, ignore_eos=True) as tracer:
            resid = list().save()
            for _ in tracer.iter[:tokens]:
                resid.append(sum(layer.output))
        return await stream(tracer.backend)

    return sum(await asyncio.gather(*map(one, work)))


async def every_layer(model: VLLM, work: list[list[int]], tokens: int) -> int:
    """The residual stream after every layer, at every step."""
    layers = model.model.layers

    async def one(ids: list[int]) -> int:
        with model.trace(ids, temperature=0.0, max_tokens=tokens, ignore_eos=True) as tracer:
            resid = list().save()
            for _ in tracer.iter[:tokens]:
                for layer in layers:
                    resid.append(sum(layer.output))
        return await stream(tracer.backend)

    return sum(await asyncio.gather(*map(one, work)))


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the engines, run the rounds, and return the results."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=smollm2(), enforce_eager=not arguments.compile, **ENGINE))
    async with VLLM(smollm2(), mode="async", **ENGINE) as model:
        await model.ready()
        work, tokens = prompts(model, arguments.requests), arguments.tokens
        final, every = RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE
        # Each of ours with the plain run that its user would otherwise have made: a batch, or a stream.
        pairs: dict[str, tuple[Workload, Workload]] = {
            "untraced": (lambda: untraced(model, work, tokens), lambda: plain(engine, work, tokens, final)),
            "empty trace": (lambda: empty_trace(model, work, tokens), lambda: plain(engine, work, tokens, every)),
            "one layer": (lambda: one_layer(model, work, tokens), lambda: plain(engine, work, tokens, every)),
            "every layer": (lambda: every_layer(model, work, tokens), lambda: plain(engine, work, tokens, every)),
        }
        rows: dict[str, Any] = {}
        try:
            for name, (ours, theirs) in pairs.items():
                await timed(ours)  # warm up
                await timed(theirs)
                ratios, speeds = [], []
                for number in range(arguments.rounds):
                    order = [("ours", ours), ("plain", theirs)]
                    found = {who: await timed(run) for who, run in (order if number % 2 else reversed(order))}
                    ratios.append(found["ours"] / found["plain"])
                    speeds.append(found)
                rows[name] = {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
                rows[name]["rounds"] = speeds
                print(
                    f"{name:12} {rows[name]['ratio']:.3f} of plain vLLM  ({min(ratios):.3f} to {max(ratios):.3f})",
                    flush=True,
                )
        finally:
            engine.shutdown()
    return rows


async def timed(run: Workload) -> float:
    """Tokens per second of one run."""
    start = time.perf_counter()
    count = await run()
    return count / (time.perf_counter() - start)


def describe_machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}


def main() -> None:
    """Parse the command line, measure, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32, help="requests in flight (default 32)")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each request (default 32)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each workload (default 5)")
    parser.add_argument(
        "--compile", action="store_true", help="let plain vLLM compile its model, as it does by default"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    rows = uvloop.run(measure(arguments))
    if arguments.json:
        settings = {"requests": arguments.requests, "tokens": arguments.tokens, "compile": arguments.compile}
        arguments.json.write_text(
            json.dumps({"machine": describe_machine(), "settings": settings, "results": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
