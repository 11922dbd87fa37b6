"""Modules that blocks skip: what they give stands for the module's output, which is then not computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nnsight_async.errors import NeverReachedError
from nnsight_async.tree import describe
from nnsight_async.worker.block import Block
from nnsight_async.worker.hooks import Instead
from nnsight_async.worker.interleaver import Interleaver
from nnsight_async.worker.rows import assign, narrow, tensors_of
from nnsight_async.worker.runners.layers import attention_in


@dataclass(frozen=True, slots=True)
class Shape:
    """What one row of an output's tensor is: its shape without the rows, its type and its device."""

    row: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self, rows: int) -> torch.Tensor:
        """A tensor of ``rows`` such rows, all zero."""
        return torch.zeros((rows, *self.row), dtype=self.dtype, device=self.device)


class Outputs:
    """What the modules' outputs look like, learnt from a forward pass of one token."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._shapes: dict[str, Any] = {}

    def learn(self, path: str, output: Any) -> None:
        """Take in what a module returned for one token."""
        try:
            self._shapes[path] = _shape(output)
        except ValueError:
            self._shapes.pop(path, None)  # then the module is always run, and its rows replaced

    def of(self, path: str) -> Any:
        """A module's output, with a :class:`Shape` for each tensor; None where it is not known."""
        return self._shapes.get(path)

    def can_be_made_up(self, path: str) -> bool:
        """Whether a module's output can stand there without the module having been run.

        Not where it holds an attention layer: later steps read the keys and values of this one.
        """
        return path in self._shapes and attention_in(self._modules[path]) is None


def _shape(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        if output.dim() == 0 or output.shape[0] != 1:
            raise ValueError("not a tensor of one row")
        return Shape(tuple(output.shape[1:]), output.dtype, output.device)
    if type(output) in (tuple, list):
        return type(output)(_shape(item) for item in output)
    if output is None:
        return None
    raise ValueError(f"a {type(output).__name__}")


def _fill(shape: Any, rows: int) -> Any:
    if isinstance(shape, Shape):
        return shape.empty(rows)
    return None if shape is None else type(shape)(_fill(item, rows) for item in shape)


@dataclass(frozen=True, slots=True)
class _Skip:
    """One block's replacement, the block's rows at that point of the step, and how many rows there are in all."""

    block: Block
    value: Any
    size: int
    start: int
    stop: int


class Skips:
    """The skips of the step in progress."""

    def __init__(self, interleaver: Interleaver, outputs: Outputs) -> None:
        self._interleaver = interleaver
        self._outputs = outputs
        self._pending: dict[str, dict[str, _Skip]] = {}  # by the module's path and the request
        self._skipped: dict[str, list[str]] = {}  # the paths that each request skips
        self.any = False  # whether anything is skipped in this step

    def begin(self) -> None:
        """A step begins."""
        self._pending.clear()
        self._skipped.clear()
        self.any = False

    @property
    def pending(self) -> bool:
        """Whether a module is skipped whose output the pass has not come to yet."""
        return any(self._pending.values())

    def skip(self, path: str, replacement: Any) -> None:
        """Called in a block that is at the module's input.

        Raises:
            ValueError: a tensor of ``replacement`` has another shape than the output's rows, or a tuple another length.
            TypeError: it has no tensor where the output has one.
        """
        block = self._interleaver.running
        size, start, stop = self._interleaver.span(block)
        shape = self._outputs.of(path)
        value = replacement
        if shape is not None:
            value = _fill(shape, stop - start)
            assign(value, replacement, describe(path, "out"))
        else:
            value = _copied(replacement)
        self._pending.setdefault(path, {})[block.request_id] = _Skip(block, value, size, start, stop)
        self._skipped.setdefault(block.request_id, []).append(path)
        self.any = True

    def check(self, path: str) -> None:
        """Raise if the running block has skipped a module that ``path`` is inside of."""
        block = self._interleaver.running
        if block.cursor != block.step:
            return
        for skipped in self._skipped.get(block.request_id, ()):
            if path.startswith((f"{skipped}.", f"{skipped}:")):
                name = describe(path, "out").removesuffix(".output")
                raise NeverReachedError(
                    f"{name} is not reached at step {block.step}: the block skips {skipped}, so nothing inside it is "
                    f"run for this request; {skipped}.output is what it was replaced by"
                )

    def instead(self, path: str, inputs: Any) -> Instead | None:
        """At a module's input: its output, if every row of the step skips it."""
        skips = self._pending.get(path)
        if not skips or not self._outputs.can_be_made_up(path):
            return None
        every = list(skips.values())
        size = every[0].size
        if sum(skip.stop - skip.start for skip in every) != size:
            return None
        # The engine may have padded the step with rows that are nobody's.
        sizes = [tensor.shape[0] for tensor in tensors_of(inputs) if tensor.dim() > 1 and tensor.shape[0] >= size]
        rows = sizes[-1] if sizes else size
        output = _fill(self._outputs.of(path), rows)
        self.replace(path, output)
        return Instead(output)

    def replace(self, path: str, output: Any) -> None:
        """At a module's output: write the replacements over the rows of those that skip it."""
        for skip in self._pending.pop(path, {}).values():
            target = narrow(output, skip.size, skip.start, skip.stop, lambda view: view)
            try:
                assign(target, skip.value, describe(path, "out"))
            except (ValueError, TypeError) as error:
                skip.block.fail(error)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(map(_copied, value)) if isinstance(value, (tuple, list)) else value
