"""Rows: the slice of a step's flat tensors that belongs to one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """One request's place in a step.

    ``start`` and ``stop`` bound its tokens in tensors ``[tokens, ...]`` of the forward pass; ``index`` is its row in
    tensors ``[requests, ...]`` of the logits and the sampler.
    """

    start: int
    stop: int
    index: int


class Spans:
    """The rows of several requests in a step's tensors, in the order in which the requests come.

    ``bounds`` has each one's first row and its last + 1; ``size`` is how many rows a tensor of rows has at least.
    """

    __slots__ = ("_apart", "_newest", "_picks", "_sizes", "bounds", "size", "start", "stop")

    def __init__(self, bounds: Sequence[tuple[int, int]], size: int) -> None:
        self.bounds = bounds
        self.size = size
        self.start = min(start for start, _ in bounds)
        self.stop = max(stop for _, stop in bounds)
        self._sizes: list[int] = []
        self._picks: list[int] = [0] * len(bounds)
        end = self.start
        for index in sorted(range(len(bounds)), key=bounds.__getitem__):
            start, stop = bounds[index]
            if start > end:
                self._sizes.append(start - end)  # rows of requests that are not among them
            self._picks[index] = len(self._sizes)
            self._sizes.append(stop - start)
            end = stop
        own = sum([stop - start for start, stop in bounds])
        self._apart = 2 * own < self.stop - self.start  # whether most rows between them are others'
        self._newest: torch.Tensor | None = None

    def are_in(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of rows: its first dimension is not shorter than the step."""
        return tensor.dim() > 0 and tensor.shape[0] >= self.size

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor from the first request's to the last one's, as a view."""
        return tensor[self.start : self.stop]

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each request's rows of a tensor, as views."""
        return self.split_cut(self.cut(tensor))

    def split_cut(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each request's rows of what :meth:`cut` gave, as views."""
        if len(self._sizes) == 1:
            return (rows,)
        parts = rows.split_with_sizes(self._sizes)
        return [parts[index] for index in self._picks]

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all requests, as a view with others' rows between them; without those where they are many."""
        if not self._apart:
            return self.cut(tensor)
        return torch.cat([tensor[start:stop] for start, stop in self.bounds])

    def split_rows(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each request's rows of what :meth:`rows` gave, as views."""
        if not self._apart:
            return self.split_cut(rows)
        return rows.split_with_sizes([stop - start for start, stop in self.bounds])

    def newest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Each request's last row, ``[requests, ...]``; a view where those are all the rows that there are."""
        if len(self.bounds) == self.stop - self.start and self._picks == list(range(len(self.bounds))):
            return self.cut(tensor)
        if self._newest is None or self._newest.device != tensor.device:
            self._newest = torch.tensor([stop - 1 for _, stop in self.bounds], device=tensor.device)
        return tensor.index_select(0, self._newest)


class Parts(tuple[Any, ...]):
    """A location's tuple as a block sees it: assigning to an item writes over the engine's tensor of that item.

    So ``layer.output[0] = t`` and ``layer.output[0] += v`` do what they say. It leaves the worker as a plain tuple.
    """

    def __setitem__(self, index: int, value: Any) -> None:
        assign(self[index], value, f"item {index} of the tuple")

    def __reduce__(self) -> tuple[Any, ...]:
        return (tuple, (list(self),))


def narrow(value: Any, size: int, start: int, stop: int, hand_out: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with each of its tensors narrowed to rows ``start:stop``, as views.

    A tensor whose first dimension is shorter than ``size`` (the step's tokens or requests) is no tensor of rows and is
    given whole. Tuples (as :class:`Parts`), lists and dicts are rebuilt; anything else is passed on.
    """
    if isinstance(value, torch.Tensor):
        whole = value.dim() == 0 or value.shape[0] < size
        return hand_out(value[:] if whole and value.dim() else value[start:stop] if not whole else value.view(()))
    if type(value) is tuple:
        return Parts(narrow(item, size, start, stop, hand_out) for item in value)
    if isinstance(value, list):
        return [narrow(item, size, start, stop, hand_out) for item in value]
    if isinstance(value, dict):
        return {key: narrow(item, size, start, stop, hand_out) for key, item in value.items()}
    return value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module's value, through tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


def assign(target: Any, value: Any, name: str) -> None:
    """Write ``value`` over the rows in ``target``, in place; a tuple is written item by item.

    Raises:
        ValueError: a tensor's shape is not the rows' shape (both are named), or a tuple's length differs.
        TypeError: ``value`` is no tensor where the rows are one.
    """
    if isinstance(target, torch.Tensor):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} can only be replaced by a tensor, not by {type(value).__name__}")
        if value is target:
            return
        if value.shape != target.shape:
            raise ValueError(f"{name} has shape {list(target.shape)}; its replacement has {list(value.shape)}")
        target.copy_(value)
    elif isinstance(target, (tuple, list)):
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"{name} is a tuple of {len(target)}; it can only be replaced by one")
        if len(value) != len(target):
            raise ValueError(f"{name} is a tuple of {len(target)}; its replacement has {len(value)} items")
        for index, (old, new) in enumerate(zip(target, value, strict=True)):
            assign(old, new, f"{name}[{index}]")
    elif isinstance(target, dict):
        for key, old in target.items():
            if key in value:
                assign(old, value[key], f"{name}[{key!r}]")
