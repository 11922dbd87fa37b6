"""What blocks wrote during a pass that has to be run once more.

A graph breaks where its blocks were expected to look. If one of them then asks for another location of the same step,
the pass is run again, without a graph. A step bears that: it writes the same keys and values to the same places.
Blocks have gone on meanwhile and are not run again; what those that write left behind is put back, each one's own rows,
when the second pass comes to where they wrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nnsight_async.worker.block import Key
from nnsight_async.worker.rows import Rows


@dataclass(slots=True)
class _Visit:
    """Copies of a location's tensors after it was visited, and the rows in them of those that may have written."""

    tensors: list[torch.Tensor]
    rows: list[Rows]


class Journal:
    """The visits of the step in progress."""

    def __init__(self) -> None:
        self._visits: dict[tuple[Key, int], _Visit] = {}
        self._times: Counter[Key] = Counter()

    def begin(self) -> None:
        """A pass begins, of which everything is noted."""
        self._visits.clear()
        self._times.clear()

    def begin_again(self) -> None:
        """The same pass begins once more."""
        self._times.clear()

    def note(self, key: Key, tensors: Sequence[torch.Tensor], rows: Sequence[Rows]) -> None:
        """Blocks have been at a location; ``rows`` are of those that may have written there."""
        index = self._times[key]
        self._times[key] += 1
        if rows:
            self._visits[key, index] = _Visit([tensor.clone() for tensor in tensors], list(rows))

    def put_back(self, key: Key, tensors: Sequence[torch.Tensor], size: int) -> None:
        """The second pass has come to a location: what was written there is written again.

        ``size`` is how many rows the step has; a tensor of fewer has no rows, and is put back whole.
        """
        index = self._times[key]
        self._times[key] += 1
        visit = self._visits.get((key, index))
        if visit is None:
            return
        for tensor, copy in zip(tensors, visit.tensors, strict=True):
            if tensor.dim() == 0 or tensor.shape[0] < size:
                tensor.copy_(copy)
                continue
            for rows in visit.rows:
                tensor[rows.start : rows.stop].copy_(copy[rows.start : rows.stop])
