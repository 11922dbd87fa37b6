"""Copies that a graph makes of locations while it runs, for those that only capture: no call, no break.

The copies of all locations whose tensors are alike lie in one slab, so that a step takes what it captures out of a few
tensors however many locations there are. The next replay writes over them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Copy(NamedTuple):
    """Stands for a tensor of a location's value: in which slab its copy is, and where in it."""

    slab: int
    at: int


@dataclass
class Copies:
    """What a graph leaves of the locations that it copies.

    Attributes:
        slabs: ``[copies, *shape]`` each, for every type and shape of tensors that there is.
        values: the locations' values, with a :class:`Copy` for each tensor.
    """

    slabs: list[torch.Tensor] = field(default_factory=list)
    values: dict[tuple[str, str], Any] = field(default_factory=dict)


class Copier:
    """Lays the slabs out in one forward pass and has them filled in another, under capture."""

    def __init__(self) -> None:
        self.copies = Copies()
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._counts: list[int] = []
        self._likes: list[torch.Tensor] = []

    def measure(self, key: tuple[str, str], value: Any) -> None:
        """Take note of a location's value."""
        self.copies.values[key] = self._measured(value)

    def allocate(self) -> None:
        """Make the slabs for all that was measured."""
        for count, like in zip(self._counts, self._likes, strict=True):
            self.copies.slabs.append(like.new_zeros((count, *like.shape)))

    def fill(self, key: tuple[str, str], value: Any) -> None:
        """Copy a location's value to its place."""
        self._fill(self.copies.values[key], value)

    def _measured(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dim() == 0:
                value = value.view(1)
            kind = value.dtype, value.shape, value.device
            slab = self._kinds.setdefault(kind, len(self._kinds))
            if slab == len(self._counts):
                self._counts.append(0)
                self._likes.append(value)
            self._counts[slab] += 1
            return Copy(slab, self._counts[slab] - 1)
        if isinstance(value, (tuple, list)):
            items = [self._measured(item) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, dict):
            return {name: self._measured(item) for name, item in value.items()}
        return value

    def _fill(self, place: Any, value: Any) -> None:
        if isinstance(place, Copy):
            self.copies.slabs[place.slab][place.at].copy_(value)
        elif isinstance(place, (tuple, list)):
            for one, item in zip(place, value, strict=True):
                self._fill(one, item)
        elif isinstance(place, dict):
            for name, one in place.items():
                self._fill(one, value[name])
