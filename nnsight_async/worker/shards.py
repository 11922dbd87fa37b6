"""How tensor parallelism splits a value over ranks, and how the shares are put together and taken apart again.

A value is laid out in one of three ways. It is whole where every rank holds all of it; partial where every rank holds a
summand; sharded where every rank holds a share of dimension 1 of ``[tokens, width]`` or ``[tokens, heads, width]``.
What is put together is what a single rank would hold: a fused layer's output (queries, keys and values, or gate and up)
has each of its parts whole, in rank order, one after the other, and heads that several ranks hold alike once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import repeat

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of ``width`` columns of a rank's share; ``replicas`` ranks in a row hold the same ones."""

    width: int
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Sharded:
    """A share made of segments, one for each part of a fused layer.

    Their widths are columns of the share as a matrix ``[tokens, columns]``. A tensor ``[tokens, heads, head size]``
    splits its heads in the same proportions. ``flattened`` says how many heads a token has in a share
    ``[tokens * heads, head size]``, and is 0 elsewhere.
    """

    segments: tuple[Segment, ...]
    flattened: int = 0

    def along(self, size: int) -> Iterator[Segment]:
        """The segments in units of a share's dimension 1, which has ``size`` of them.

        Raises:
            ValueError: a segment is no whole number of them.
        """
        if len(self.segments) == 1:
            yield Segment(size, self.segments[0].replicas)
            return
        columns = sum(segment.width for segment in self.segments)
        for segment in self.segments:
            width, rest = divmod(segment.width * size, columns)
            if rest:
                raise ValueError(f"segments of {columns} columns do not divide a dimension of {size}")
            yield Segment(width, segment.replicas)


class Plain(Enum):
    """The layouts that need no more description."""

    WHOLE = "whole"
    PARTIAL = "partial"


Layout = Plain | Sharded


def assemble(shares: torch.Tensor, layout: Sharded) -> torch.Tensor:
    """The whole of shares ``[rows, ranks, width, ...]`` as ``[rows, whole width, ...]``; it may be a view of them."""
    parts, start = [], 0
    for segment in layout.along(shares.shape[2]):
        parts.append(shares[:, :: segment.replicas, start : start + segment.width].flatten(1, 2))
        start += segment.width
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def scatter(whole: torch.Tensor, share: torch.Tensor, layout: Sharded, rank: int, ranks: int) -> None:
    """Write a rank's share of ``whole`` ``[rows, whole width, ...]`` over ``share`` ``[rows, width, ...]``."""
    start = offset = 0
    for segment in layout.along(share.shape[1]):
        at = offset + rank // segment.replicas * segment.width
        share[:, start : start + segment.width].copy_(whole[:, at : at + segment.width])
        start += segment.width
        offset += ranks // segment.replicas * segment.width


def settle(whole: torch.Tensor, before: torch.Tensor, summand: torch.Tensor, rank: int) -> None:
    """Make the summands add up to ``whole``, which was ``before``: what has changed is rank 0's alone.

    What has not changed keeps its summands, bit for bit. Nothing waits for the device.
    """
    share = whole if rank == 0 else torch.zeros_like(whole)
    summand.copy_(torch.where(whole != before, share, summand))


def column_segments(widths: list[int], replicas: int) -> Sharded:
    """The layout of a column-parallel layer's output: ``widths`` are a rank's, part by part.

    ``replicas`` says how many ranks hold the same keys and values, which are the parts after the first.
    """
    return Sharded(tuple(map(Segment, widths, [1, *repeat(replicas, len(widths) - 1)])))
