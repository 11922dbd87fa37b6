"""What one visit costs: a block that is shown a location, keeps it, and has it sent, without an engine.

``python -m benchmarks.visits`` drives the worker's interleaver over a made-up model with blocks that are compiled from
text, on the CPU and with narrow tensors, so that what is measured is Python and not arithmetic. It prints, for each
kind of block, microseconds a visit: in the forward pass, in the post (the worker's mailbox, tensors copied into shared
memory), and in the client's process (a post decoded and joined to what was there before). Beside them is the number of
torch operations that the worker does for a visit, each of which is a launch on a GPU.

``--profile`` prints where the time goes, ``--collector`` how long Python's collector takes in a worker that holds all
that the blocks have kept.
"""

from __future__ import annotations

import argparse
import ast
import cProfile
import gc
import json
import pstats
import textwrap
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import zmq
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nnsight_async import changes
from nnsight_async.client.ledger import Ledger
from nnsight_async.client.mailbox import Mailbox as ClientMailbox
from nnsight_async.protocol import Entry
from nnsight_async.tracing import BlockSource, compile_program, make_program
from nnsight_async.tree import ModuleRef, install_reader
from nnsight_async.worker.block import Block
from nnsight_async.worker.controls import Controls
from nnsight_async.worker.faces import ModelFace, TracerFace
from nnsight_async.worker.hooks import Hooks
from nnsight_async.worker.interleaver import Interleaver
from nnsight_async.worker.loops import Gatherer
from nnsight_async.worker.mailbox import Mailbox
from nnsight_async.worker.mutation import find_mutation
from nnsight_async.worker.reader import WorkerReader
from nnsight_async.worker.rows import Rows
from nnsight_async.worker.saving import saving_functions
from nnsight_async.worker.skips import Outputs, Skips

#: The blocks, each with how many visits it makes at a step of a model of so many layers.
BLOCKS: dict[str, tuple[str, Callable[[int], int]]] = {
    "every layer": (
        """
hidden = list().save()
for step in tracer.iter[:]:
    for layer in model.model.layers:
        hidden.append(layer.output[0])
""",
        lambda layers: layers,
    ),
    "turn by turn": (
        """
hidden = list().save()
for step in tracer.iter[:]:
    for layer in model.model.layers:
        hidden.append(layer.output[0])
        count = step
""",
        lambda layers: layers,
    ),
    "last rows": (
        """
hidden = list().save()
for step in tracer.iter[:]:
    for layer in model.model.layers:
        hidden.append(layer.output[0][-1])
""",
        lambda layers: layers,
    ),
    "sums": (
        """
hidden = list().save()
for step in tracer.iter[:]:
    for layer in model.model.layers:
        hidden.append(layer.output[0] + layer.output[1])
""",
        lambda layers: layers,
    ),
    "one layer": (
        """
hidden = list().save()
for step in tracer.iter[:]:
    hidden.append(model.model.layers[1].output[0])
""",
        lambda layers: 1,
    ),
    "steering": (
        """
for step in tracer.iter[:]:
    model.model.layers[1].output[0][:] += v
""",
        lambda layers: 1,
    ),
    "logits, samples": (
        """
top, drawn = list().save(), list().save()
for step in tracer.iter[:]:
    top.append(model.logits.argmax(-1))
    drawn.append(model.samples)
""",
        lambda layers: 2,
    ),
}


class _Layer(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class _Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(count))


class _Model(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.model = _Layers(count)


class Worker:
    """As much of a worker as runs blocks and posts what they save; ``address`` is where it posts to."""

    def __init__(self, address: str, text: str, requests: int, layers: int, width: int) -> None:
        root = _Model(layers)
        modules: dict[str, nn.Module] = dict(root.named_modules())
        self.layers, self.requests, self.width = layers, requests, width
        self.interleaver = Interleaver(lambda key: None)
        self.interleaver.order.learn(
            [(f"model.layers.{index}", side) for index in range(layers) for side in ("in", "out")]
        )
        hooks = Hooks(modules, lambda key, value: None)
        skips = Skips(self.interleaver, Outputs(modules))
        install_reader(WorkerReader(self.interleaver, hooks, skips, nullcontext))
        self.mailbox = Mailbox(address, self.interleaver, lambda value: None, torch.device("cpu"))
        model = ModelFace(ModuleRef(root), self.interleaver, None)
        body = textwrap.indent(text.strip("\n"), "    ")
        lines = body.splitlines()
        program = make_program(
            BlockSource(
                text=body + "\n",
                filename="<block>",
                first_line=1,
                last_line=len(lines),
                first_column=4,
                last_column=len(lines[-1]),
                inline=False,
                with_line=1,
                is_last_item=True,
                has_target=True,
                target="tracer",
                class_name=None,
                flags=0,
            )
        )
        compiled, mutation = compile_program(program), find_mutation(ast.parse(program.wrapped))
        gatherer = Gatherer(self.interleaver, lambda: skips.any)
        for number in range(requests):
            namespace: dict[str, Any] = {"__name__": "__nnsight_async_block__"}
            namespace |= {"model": model, "tracer": TracerFace(self.interleaver), "v": torch.ones(width)}
            namespace |= saving_functions(self.interleaver) | gatherer.functions()
            name = f"request-{number}"
            self.interleaver.blocks[name] = Block(
                name, compiled, mutation, namespace, Controls(1000, lambda data: {}), None
            )
        self.rows = {f"request-{number}": Rows(number, number + 1, number) for number in range(requests)}
        self.values = [(torch.rand(requests, width), torch.rand(requests, width)) for _ in range(layers)]
        self.logits, self.samples = torch.rand(requests, width), torch.zeros(requests, 1, dtype=torch.int64)

    def forward(self) -> list[Block]:
        """Run a step, without its post."""
        interleaver = self.interleaver
        with torch.inference_mode():
            interleaver.begin(self.rows, self.requests, self.requests)
            for index in range(self.layers):
                interleaver.visit((f"model.layers.{index}", "in"), ((self.values[index][0],), {}))
                interleaver.visit((f"model.layers.{index}", "out"), self.values[index])
            interleaver.end_forward()
            interleaver.visit_logits(self.logits)
            interleaver.visit_samples(self.samples)
        return interleaver.finish()

    def close(self) -> None:
        """Unwind the blocks, and close the mailbox."""
        for block in self.interleaver.blocks.values():
            assert block.failure is None, block.failure
        self.interleaver.drop(list(self.interleaver.blocks))
        self.mailbox.close()
        install_reader(None)


class _Receiver:
    """Puts a request's values together, as an invoke does."""

    def __init__(self, mailbox: ClientMailbox) -> None:
        self._mailbox = mailbox
        self.saves: dict[str, Any] = {}
        self.outputs: list[dict[str, Any]] = []

    def receive(self, entry: Entry, tensor_bytes: Any) -> None:
        if entry.changes:
            changed = self._mailbox.loader.load(entry.changes, tensor_bytes, lambda reference: reference)
            self.saves = changes.apply(self.saves, changed)
            self.outputs.append(changes.added(self.saves, changed))

    def receive_captured(self, *arguments: Any) -> None:
        raise AssertionError


class _Count(TorchDispatchMode):
    """Counts operations; views and ``set_`` launch nothing and are counted apart."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: dict[str, int] = {}
        self.views = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if function.is_view or name in _LAUNCH_NOTHING:
            self.views += 1
        else:
            self.launches[name] = self.launches.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


_LAUNCH_NOTHING = {
    "set_",
    "_has_compatible_shallow_copy_type",  # what assigning to ``data`` asks
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "detach",
    "_unsafe_view",
    "split",
}


def _step(worker: Worker, client: ClientMailbox, times: list[tuple[float, float, float]] | None = None) -> None:
    start = time.perf_counter()
    blocks = worker.forward()
    ran = time.perf_counter()
    worker.mailbox.post(blocks)
    posted = time.perf_counter()
    assert client._socket.poll(10_000)
    begin = time.perf_counter()
    client._deliver(*client._socket.recv_multipart(zmq.NOBLOCK, copy=False))
    if times is not None:
        times.append((ran - start, posted - ran, time.perf_counter() - begin))


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One kind of block: microseconds a visit by stage, and operations a visit."""
    text, count = BLOCKS[name]
    client = ClientMailbox(Ledger(), lambda: None)
    worker = Worker(client.address, text, arguments.requests, arguments.layers, arguments.width)
    for request in worker.rows:
        client.receivers[request] = _Receiver(client)
    visits = count(arguments.layers) * arguments.requests
    assert client._socket.poll(10_000)
    client._deliver(*client._socket.recv_multipart(zmq.NOBLOCK, copy=False))
    gc.collect()
    gc.disable()  # it is looked at apart
    try:
        for _ in range(3):
            _step(worker, client)
        times: list[tuple[float, float, float]] = []
        profile = cProfile.Profile()
        if arguments.profile:
            profile.enable()
        for _ in range(arguments.steps):
            _step(worker, client, times)
        profile.disable()
        ran = _Count()
        with ran:
            blocks = worker.forward()
        sent = _Count()
        with sent:
            worker.mailbox.post(blocks)
        assert client._socket.poll(10_000)
        client._deliver(*client._socket.recv_multipart(zmq.NOBLOCK, copy=False))
    finally:
        gc.enable()
    if arguments.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(arguments.lines)
    if arguments.collector:
        _collect(worker)
    stages = [1e6 * min(stage) / visits for stage in zip(*times, strict=True)]  # what else runs only adds to it
    row = {
        "visits": visits,
        "microseconds": dict(zip(("visit", "post", "client"), stages, strict=True)),
        "launches": {"visit": sum(ran.launches.values()) / visits, "post": sum(sent.launches.values()) / visits},
        "views": {"visit": ran.views / visits, "post": sent.views / visits},
        "operations": {"visit": ran.launches, "post": sent.launches},
    }
    worker.close()
    client.receivers.clear()
    client._socket.close(linger=0)
    client._context.term()
    print(
        f"{name:16} {stages[0]:7.2f} {stages[1]:7.2f} {stages[2]:7.2f}   "
        f"{row['launches']['visit']:8.3f} {row['launches']['post']:7.3f}   "
        f"{row['views']['visit']:6.2f} {row['views']['post']:6.2f}",
        flush=True,
    )
    return row


def _collect(worker: Worker) -> None:
    """Print how long each generation's collection takes with all that is held now."""
    for generation in range(3):
        for _ in range(2):
            start = time.perf_counter()
            gc.collect(generation)
        print(f"  collecting generation {generation}: {1e3 * (time.perf_counter() - start):.1f} ms", flush=True)
    print(f"  {len(gc.get_objects()):,} objects are looked at", flush=True)


def main() -> None:
    """Parse the command line, measure, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--blocks", nargs="*", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--profile", action="store_true", help="print a profile of each")
    parser.add_argument("--lines", type=int, default=30, help="lines of the profile")
    parser.add_argument("--collector", action="store_true", help="print how long the collector takes")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("                    microseconds a visit    launches a visit    other operations")
    print("                   visit    post  client      visit    post    visit   post")
    rows = {name: measure(name, arguments) for name in arguments.blocks}
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
