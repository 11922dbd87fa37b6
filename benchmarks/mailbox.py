"""The way up by itself: throughput beside a plain pickle, latency behind the token, and the caller's event loop.

``python -m benchmarks.mailbox`` measures three things and writes them to a JSON file:

* throughput: tensors of several sizes from a second process, through the worker's and the client's mailbox, and as
  ``pickle.dumps`` over a ZeroMQ socket of the same kind, taking turns within a round; the ratio of bytes a second.
* latency: how much later than vLLM's output of a step the caller's loop has it joined with its values.
* responsiveness: the worst delay of a task that wakes every 5 ms, on the loop that consumes 32 streams with every
  layer saved.

Absolute times are the machine's own; on a CPU only the ratios mean anything elsewhere.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import argparse
import asyncio
import json
import multiprocessing
import pickle
import statistics
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import uvloop
import zmq
import zmq.asyncio

from benchmarks.machine import describe_machine
from benchmarks.run import ENGINE, prompts
from nnsight_async import VLLM
from nnsight_async.changes import Grow
from nnsight_async.client.invoke import Invoke
from nnsight_async.client.ledger import Ledger
from nnsight_async.client.mailbox import Mailbox
from nnsight_async.protocol import BlockState, Entry

SIZES = [4 << 10, 64 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20, 64 << 20]


# Throughput.


class _Block:
    """As much of a block as the worker's mailbox looks at: it has saved one more tensor at every step."""

    cast = None
    saved: ClassVar[dict[str, Any]] = {}

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def changes(self) -> dict[str, Any]:
        return {"saved": Grow({}, [self._tensor])}


def _send(commands: Any, mailbox: str, plain: str) -> None:
    """The second process: sends what it is told to, in the way that it is told to."""
    from nnsight_async.worker.mailbox import Mailbox as WorkerMailbox

    def entry(block: _Block, changes: bytes, *, final: bool) -> Entry:
        return Entry("benchmark", 0, BlockState.LOOPING, changes)

    torch.set_num_threads(1)  # the receiver is to have a core, and two threads of a copy would take it away
    sender = WorkerMailbox(mailbox, SimpleNamespace(entry=entry), lambda value: None, torch.device("cpu"))  # type: ignore[arg-type]
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(plain)
    while (command := commands.recv()) is not None:
        way, size, count = command
        tensor = torch.rand(size // 4)
        room = 0
        for _ in range(count):
            while not room:
                room = commands.recv()  # how many more the receiver is ready for: nothing is to fill the memory
            room -= 1
            if way == "mailbox":
                sender.post([_Block(tensor)])  # type: ignore[list-item]
            else:
                socket.send(pickle.dumps({"saved": tensor}, protocol=pickle.HIGHEST_PROTOCOL), copy=False)
    sender.close()


class _Receiver:
    """Takes in the benchmark's entries and puts their values together, as an invoke does."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.came: asyncio.Queue[torch.Tensor] = asyncio.Queue()

    def receive(self, entry: Entry, tensor_bytes: Any) -> None:
        changes = self._mailbox.loader.load(entry.changes, tensor_bytes, lambda reference: reference)
        grow = changes["saved"]
        assert isinstance(grow, Grow)
        self.came.put_nowait(grow.tail[0])


async def throughput(rounds: int) -> list[dict[str, Any]]:
    """Bytes a second of both ways, for tensors of each size."""
    mailbox = Mailbox(Ledger(), lambda: None)
    mailbox.start(lambda error: None)
    receiver = _Receiver(mailbox)
    mailbox.receivers["benchmark"] = receiver
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    path = f"ipc:///tmp/nnsight-async-benchmark-{os.getpid()}"
    socket.bind(path)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_send, args=(theirs, mailbox.address, path))
    process.start()

    async def run(way: str, size: int, count: int) -> float:
        ours.send((way, size, count))
        ahead = max(4, min(64, (16 << 20) // size))
        granted = min(ahead, count)
        ours.send(granted)
        kept: deque[torch.Tensor] = deque(maxlen=2)  # a consumer that lets go of values as it goes on
        begin = time.perf_counter()
        for number in range(count):
            if way == "mailbox":
                kept.append(await receiver.came.get())
            else:
                frame = await socket.recv(copy=False)
                kept.append(pickle.loads(frame.buffer)["saved"])
            more = min(ahead // 2, count - granted)
            if more and number + 1 + ahead // 2 >= granted:
                ours.send(more)
                granted += more
        seconds = time.perf_counter() - begin
        assert kept[-1].numel() == size // 4
        return count * size / seconds

    rows = []
    for size in SIZES:
        count = max(8, min(400, (1 << 30) // size))
        for way in ("mailbox", "pickle"):
            await run(way, size, count)  # warm up
        speeds: dict[str, list[float]] = {"mailbox": [], "pickle": []}
        for number in range(rounds):
            for way in ("mailbox", "pickle") if number % 2 else ("pickle", "mailbox"):
                speeds[way].append(await run(way, size, count))
        ratios = [a / b for a, b in zip(speeds["mailbox"], speeds["pickle"], strict=True)]
        row = {
            "bytes": size,
            "ratio": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "gigabytes_per_second": {way: statistics.median(found) / 1e9 for way, found in speeds.items()},
        }
        rows.append(row)
        print(
            f"{size >> 10:7} KiB  {row['ratio']:6.2f} times a pickle  ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    ours.send(None)
    process.join()
    socket.close(linger=0)
    context.term()
    mailbox.close()
    return rows


# Latency and responsiveness.


async def live(model: VLLM, requests: int, tokens: int) -> dict[str, Any]:
    """Stream many requests with every layer saved, and watch the caller's loop and the way from token to values."""
    put, added = Invoke.put, []
    came: dict[tuple[int, int], float] = {}

    def noted(self: Invoke, output: Any) -> None:
        came[(id(self), len(output.outputs[0].token_ids) - 1)] = time.perf_counter()
        put(self, output)

    Invoke.put = noted  # type: ignore[method-assign]
    layers = model.model.layers
    worst, running = 0.0, True

    async def heartbeat() -> None:
        nonlocal worst
        while running:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            worst = max(worst, time.perf_counter() - before - 0.005)

    async def one(ids: list[int]) -> None:
        with model.trace(ids, temperature=0.0, max_tokens=tokens, ignore_eos=True) as tracer:
            resid = list().save()
            for _ in tracer.iter[:tokens]:
                for layer in layers:
                    resid.append(sum(layer.output))
        invoke = tracer._run.invokes[0]  # type: ignore[union-attr]
        async with tracer.backend as stream:
            async for output in stream:
                added.append(time.perf_counter() - came[(id(invoke), output.step)])
                assert len(output.saves["resid"]) == len(layers) * (output.step + 1)

    try:
        await one(prompts(model, 1)[0])
        added.clear()
        task = asyncio.create_task(heartbeat())
        await asyncio.gather(*map(one, prompts(model, requests)))
        running = False
        await task
    finally:
        Invoke.put = put  # type: ignore[method-assign]
    cuts = statistics.quantiles(added, n=100)
    result = {
        "requests": requests,
        "layers": len(layers),
        "steps": len(added),
        "added_milliseconds": {"median": 1e3 * cuts[49], "p99": 1e3 * cuts[98], "worst": 1e3 * max(added)},
        "worst_heartbeat_delay_milliseconds": 1e3 * worst,
    }
    print(
        f"{requests:3} requests  from a token to its values: {1e3 * cuts[49]:.2f} ms median, {1e3 * cuts[98]:.2f} ms "
        f"99th percentile; the loop's worst delay {1e3 * worst:.1f} ms",
        flush=True,
    )
    return result


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, one after the other."""
    from small_models import smollm2

    rows = await throughput(arguments.rounds)
    async with VLLM(smollm2(), mode="async", **ENGINE) as model:
        await model.ready()
        streams = [await live(model, requests, arguments.tokens) for requests in (1, 32)]
    return {"throughput": rows, "streams": streams}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "mailbox-cpu.json")
    arguments = parser.parse_args()
    results = {"machine": describe_machine(), **uvloop.run(measure(arguments))}
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
