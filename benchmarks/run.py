"""This package and its peers beside plain vLLM, on the same workloads, on the same machine, in the same run.

``python -m benchmarks.run`` starts a plain ``AsyncLLM`` and, beside it, this package and then each peer that is
installed (benchmarks/peers). In every round each of them runs every workload in turn with plain vLLM, so what slows the
machine down slows both. It prints ratios to plain vLLM, median with lowest and highest, and writes what it has measured
so far to a JSON file after each step, with a plot beside it at the end.

Without a GPU it runs SmolLM2 in about five minutes, and only ratios mean anything. With one it runs the model in the
folder that ``NNSIGHT_ASYNC_GPU_MODEL`` names, with made-up weights.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_LENS_DISABLE", "1")  # where it is installed, it would make plain vLLM run eagerly

import argparse
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import torch
import uvloop

from benchmarks import plain
from benchmarks.jobs import Job, made_up_prompts
from benchmarks.machine import describe_machine
from benchmarks.peers import Settings, installed
from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.plot import plot
from benchmarks.report import describe, report
from benchmarks.rounds import Clock, Contestant, Results, Task, measure
from benchmarks.workloads import WORKLOADS
from nnsight_async import VLLM

OURS = "nnsight_async"
#: Tokens of a sweep's prompts.
SWEEP_TOKENS = 32

#: Engine arguments on a machine without a GPU; benchmarks.mailbox has the same.
ENGINE: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 512 << 20, "max_model_len": 512}
TEXT = "The capital of France is Paris, and the capital of Germany is Berlin. The river that runs through it is called"


def prompts(model: VLLM, count: int) -> list[list[int]]:
    """``count`` prompts of 8 to 23 tokens of text, all different."""
    ids = model.tokenizer(TEXT).input_ids
    return [[*ids[: 8 + number % 16], 1000 + number] for number in range(count)]


@dataclass(frozen=True)
class Shape:
    """As much of a model's shape as the workloads need."""

    layers: int
    width: int
    head: int
    vocabulary: int

    @classmethod
    def of(cls, model: str) -> Shape:
        """Read from a checkpoint's config."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model)
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(config.num_hidden_layers, config.hidden_size, head, config.vocab_size)

    def job(self, prompts: list[list[int]], tokens: int, device: str, concurrency: int = 128) -> Job:
        """A job on such a model."""
        layer = min(10, self.layers - 1)
        return Job(prompts, tokens, layer, self.layers, self.width, self.head, device, concurrency)


def make_tasks(arguments: argparse.Namespace, shape: Shape) -> list[Task]:
    """Every chosen workload at every number of requests."""
    device = "cuda" if arguments.gpu else "cpu"
    tasks = []
    if "sweep" in arguments.workloads:
        work = made_up_prompts(arguments.sweep_prompts, SWEEP_TOKENS, shape.vocabulary)
        job = shape.job(work, 1, device, arguments.concurrency)
        tasks.append(Task("sweep", "sweep", arguments.sweep_prompts, job))
    for level in arguments.requests:
        work = made_up_prompts(level, arguments.prompt_tokens, shape.vocabulary, seed=level)
        job = shape.job(work, arguments.new_tokens, device)
        for name in arguments.workloads:
            spec = WORKLOADS[name]
            if spec.plain != "sweep" and not (spec.heavy and level > arguments.heavy_requests):
                tasks.append(Task(name, spec.plain, level, job))
    return tasks


def engine_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """vLLM's engine arguments, the same for everybody."""
    common: dict[str, Any] = {"enable_prefix_caching": False, "disable_log_stats": True}
    if not arguments.gpu:
        return {**ENGINE, **common}
    longest = max(arguments.prompt_tokens + arguments.new_tokens, SWEEP_TOKENS + 1)
    return {
        **common,
        "load_format": arguments.load_format,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "max_model_len": max(1024, -(-longest // 256) * 256),
    }


async def ours(arguments: argparse.Namespace, stack: AsyncExitStack, results: Results) -> Contestant:
    """This package, its engine started."""
    extra: dict[str, Any] = {"graphs": "off"} if arguments.eager else {}
    if arguments.gpu:
        extra["mailbox_bytes"] = arguments.mailbox_bytes
    model = await stack.enter_async_context(VLLM(arguments.model, mode="async", **engine_arguments(arguments), **extra))
    await model.ready()
    stats = getattr(type(model), "tier_stats", None)

    async def tell_tiers(task: Task) -> None:
        assert stats is not None
        told = str(await stats(model))
        results.tiers.setdefault(f"{task.workload}, {task.level}", []).append(told)
        print(f"  steps by tier: {told}", flush=True)

    runners = {name: partial(spec.run, model) for name, spec in WORKLOADS.items()}
    return Contestant(OURS, runners, tell_tiers if arguments.steps_by_tier and stats is not None else None)


async def peer(name: str, arguments: argparse.Namespace, stack: AsyncExitStack, shape: Shape) -> Contestant:
    """A peer, its engine started in a process of its own."""
    engine = engine_arguments(arguments)
    process = PeerProcess(
        installed()[name], Settings(arguments.model, engine, min(10, shape.layers - 1), shape.layers, arguments.eager)
    )
    stack.push_async_callback(process.close)
    await process.ready()
    return Contestant(name, {workload: partial(process.run, workload) for workload in process.workloads})


async def run(arguments: argparse.Namespace, results: Results) -> None:
    """Start the engines, one contestant after the other beside plain vLLM, and measure."""
    clock = Clock(arguments.budget_seconds)
    shape = Shape.of(arguments.model)
    tasks = make_tasks(arguments, shape)
    settings = engine_arguments(arguments)
    if arguments.plain_eager:
        settings["enforce_eager"] = True
    whole = True
    begin = clock.gone
    engine = plain.start(arguments.model, **settings)
    try:
        results.starts["plain vLLM"] = clock.gone - begin
        yardstick = {kind: partial(workload, engine) for kind, workload in plain.PLAIN.items()}
        for number, name in enumerate(arguments.only):
            until = clock.share(len(arguments.only) - number)
            async with AsyncExitStack() as stack:
                begin = clock.gone
                try:
                    starting = ours(arguments, stack, results) if name == OURS else peer(name, arguments, stack, shape)
                    contestant = await starting
                except PeerError as error:
                    results.failures[name] = str(error)
                    whole = False
                    print(f"{name} could not start, and is left out:\n{error}", flush=True)
                    continue
                results.starts[name] = clock.gone - begin
                print(f"{name} has started, {clock.gone:.0f} s since the beginning", flush=True)
                whole &= await measure(
                    contestant,
                    yardstick,
                    tasks,
                    results,
                    rounds=arguments.rounds,
                    group=arguments.group,
                    clock=clock,
                    until=until,
                )
        results.finished = whole
    finally:
        results.write()
        await plain.stop(engine)


def parse(command: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults of this machine put in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workloads", type=_names(list(WORKLOADS)), help="names with commas between them (default: all)")
    add("--requests", type=_numbers, help="requests in flight, in this order (default 1,8,32,128; without a GPU 1,32)")
    add("--rounds", type=int, default=3, help="rounds of each workload (default 3)")
    add("--prompt-tokens", type=int, help="tokens of each prompt (default 512 on a GPU, 16 without)")
    add("--new-tokens", type=int, help="new tokens of each request (default 128 on a GPU, 8 without)")
    add("--sweep-prompts", type=int, help="prompts of a sweep (default 1024 on a GPU, 256 without)")
    add("--concurrency", type=int, default=128, help="requests of a sweep in flight (default 128)")
    add("--heavy-requests", type=int, help="most requests that send home every layer (default 32 on a GPU)")
    add("--group", type=int, help="workloads that share a plain run within a round (default 4 on a GPU, 3 without)")
    add("--model", help="a folder or a name (default: $NNSIGHT_ASYNC_GPU_MODEL on a GPU, SmolLM2 without)")
    add("--load-format", default="dummy", help="where weights come from, on a GPU (default dummy: made up)")
    add("--gpu-memory-utilization", type=float, default=0.4, help="of each engine (default 0.4)")
    add("--mailbox-bytes", type=int, default=8 << 30, help="what may wait to be read, on a GPU (default 8 GiB)")
    add("--only", type=_names([OURS, *installed()]), help="who is measured (default: all that are installed)")
    add("--eager", action="store_true", help="everybody runs eagerly, without CUDA graphs")
    add("--compile", action="store_true", help="let plain vLLM compile its model on a machine without a GPU, too")
    add("--steps-by-tier", action="store_true", help="after each workload, print which graphs its steps ran in")
    add("--budget-seconds", type=float, help="begin no round that would end later (default 440 on a GPU, 290 without)")
    add("--json", type=Path, help="where results go (default benchmarks/results/gpu.json or cpu.json)")
    arguments = parser.parse_args(command)
    arguments.gpu = torch.cuda.is_available()
    arguments.plain_eager = arguments.eager or not (arguments.gpu or arguments.compile)
    if arguments.gpu and not (arguments.model or os.environ.get("NNSIGHT_ASYNC_GPU_MODEL")):
        parser.error("name a model: --model, or NNSIGHT_ASYNC_GPU_MODEL in the environment")
    defaults: dict[str, tuple[Any, Any]] = {
        "requests": ([1, 8, 32, 128], [1, 32]),
        "prompt_tokens": (512, 16),
        "new_tokens": (128, 8),
        "sweep_prompts": (1024, 256),
        "heavy_requests": (32, 10**9),
        "group": (4, 3),
        "budget_seconds": (440.0, 290.0),
    }
    for name, (gpu, cpu) in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, gpu if arguments.gpu else cpu)
    if arguments.model is None:
        arguments.model = os.environ["NNSIGHT_ASYNC_GPU_MODEL"] if arguments.gpu else _smollm2()
    arguments.workloads = arguments.workloads or list(WORKLOADS)
    arguments.only = arguments.only or [OURS, *(installed() if arguments.gpu else ())]
    name = "gpu.json" if arguments.gpu else "cpu.json"
    arguments.json = arguments.json or Path(__file__).parent / "results" / name
    return arguments


def _smollm2() -> str:
    from small_models import smollm2

    return smollm2()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(known: list[str]) -> Any:
    def split(text: str) -> list[str]:
        names = [part.strip() for part in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return split


def main() -> None:
    """Measure, print the tables, write the results and the plot."""
    arguments = parse()
    settings = {
        "model": Path(arguments.model).name,
        "plain_eager": arguments.plain_eager,
        "absolute": arguments.gpu,
        "engine": engine_arguments(arguments),
    }
    for name in ("requests", "rounds", "prompt_tokens", "new_tokens", "sweep_prompts", "concurrency", "eager", "group"):
        settings[name] = getattr(arguments, name)
    settings["peers"] = {name: peer.version for name, peer in installed().items() if name in arguments.only}
    settings["requests"] = sorted(arguments.requests)
    results = Results(arguments.json, describe_machine(), settings)
    try:
        uvloop.run(run(arguments, results))
    finally:
        results.write()
    print(f"\n{describe(results.as_dict())}\n\n{report(results.as_dict())}\n\nwritten to {arguments.json}")
    try:
        plot(results.as_dict(), arguments.json.with_suffix(".svg"))
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed (pip install '.[bench]')")


if __name__ == "__main__":
    main()
