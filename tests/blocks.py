"""Blocks that run by themselves: a forward pass made up of tensors, and no engine."""

from __future__ import annotations

import ast
import textwrap
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from nnsight_async.tracing import BlockSource, compile_program, make_program
from nnsight_async.tree import ModuleRef, install_reader
from nnsight_async.worker.block import Block
from nnsight_async.worker.controls import Controls
from nnsight_async.worker.faces import ModelFace, TracerFace
from nnsight_async.worker.hooks import Hooks
from nnsight_async.worker.interleaver import Interleaver
from nnsight_async.worker.loops import Gatherer
from nnsight_async.worker.mutation import find_mutation
from nnsight_async.worker.reader import WorkerReader
from nnsight_async.worker.rows import Rows
from nnsight_async.worker.saving import saving_functions
from nnsight_async.worker.skips import Outputs, Skips


class Batch:
    """The blocks of a batch, over a model whose children are ``a``, ``b`` and ``c``, and those in ``more``.

    A step is :meth:`step`: it is given each location's value, and writes over the values' memory once it has been
    visited, as an engine may.
    """

    def __init__(self, more: dict[str, nn.Module] | None = None) -> None:
        self.root = nn.ModuleDict({**{name: nn.Identity() for name in "abc"}, **(more or {})})
        self.root_ref = ModuleRef(self.root)
        self.rest: Any = None  # for a test that has loops run block by block
        self.interleaver = Interleaver(lambda key: None)
        modules: dict[str, nn.Module] = dict(self.root.named_modules())
        hooks = Hooks(modules, lambda key, value: None)
        skips = Skips(self.interleaver, Outputs(modules))
        install_reader(WorkerReader(self.interleaver, hooks, skips, nullcontext))
        self.functions = saving_functions(self.interleaver)
        self.functions |= Gatherer(self.interleaver, lambda: skips.any).functions()

    def add(self, name: str, text: str, **values: Any) -> Block:
        """A request with the block ``text``."""
        body = textwrap.indent(textwrap.dedent(text).strip("\n"), "    ")
        lines = body.splitlines()
        program = make_program(
            BlockSource(
                body + "\n", "<block>", 1, len(lines), 4, len(lines[-1]), False, 1, True, True, "tracer", None, 0
            )
        )
        namespace: dict[str, Any] = {"__name__": "__nnsight_async_block__", **values}
        namespace |= {"model": ModelFace(self.root_ref, self.interleaver, None), "torch": torch}
        namespace |= {"tracer": TracerFace(self.interleaver), **self.functions}
        mutation = find_mutation(ast.parse(program.wrapped))
        block = Block(name, compile_program(program), mutation, namespace, Controls(100, lambda data: {}))
        self.interleaver.blocks[name] = block
        return block

    def step(self, values: dict[str, Any], rows: dict[str, tuple[int, int]], tokens: int) -> list[Block]:
        """Run a step in which the requests have these rows."""
        with torch.inference_mode():
            places = {name: Rows(*bounds, index) for index, (name, bounds) in enumerate(rows.items())}
            self.interleaver.begin(places, tokens, len(places))
            for path, value in values.items():
                self.interleaver.visit((path, "out"), value)
                for tensor in value if isinstance(value, tuple) else (value,):
                    tensor.fill_(-1)
            self.interleaver.end_forward()
        return self.interleaver.finish()

    def close(self) -> None:
        """Unwind the blocks."""
        self.interleaver.drop(list(self.interleaver.blocks))
        install_reader(None)
