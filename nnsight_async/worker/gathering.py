"""Loops over locations that the worker runs for its blocks, all blocks of a location together.

Running a block up to its next location costs some microseconds, and a loop over all layers that only appends what it
reads does it once a layer. So a block that comes to such a loop (:mod:`nnsight_async.tracing.gathers` finds them) waits
for all of its locations at once: at each, the rows of all such blocks are copied together and appended to their lists,
and no block runs. At the last location the block runs again and does that turn of the loop itself, as it does every
turn for which anything is out of the ordinary.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, Any

import torch

from nnsight_async.tracing.gathers import LAST_ROW
from nnsight_async.worker.rows import Parts, Spans

if TYPE_CHECKING:
    from nnsight_async.worker.block import Key
    from nnsight_async.worker.slabs import Refs


@dataclass(frozen=True, slots=True)
class Form:
    """What is made of a location's value: see ``__gather__`` in :mod:`nnsight_async.tracing.gathers`."""

    side: str
    subscripts: tuple[int | str, ...]
    added: tuple[int | None, ...]
    cloned: bool


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """Some locations in turn, and what is made of each; loops that do the same share one."""

    keys: tuple[Key, ...]
    form: Form


class Gathering:
    """One block's loop: the list it appends to, and how far it is."""

    __slots__ = ("done", "plan", "target")

    def __init__(self, plan: Plan, target: list[Any]) -> None:
        self.plan = plan
        self.target = target
        self.done = 0


def take(value: Any, form: Form, spans: Spans) -> tuple[Sequence[Any], Refs] | None:
    """What each of some blocks would have kept of a location's value, and references to what of it shares memory.

    None where that cannot be told for all of them at once.
    """
    if form.side == "in":
        args, _ = value
        if not args:
            return None
        value = args[0]
    if type(value) is tuple and not form.subscripts and not form.added:
        if form.cloned:
            return None
        columns = [column for term in value if (column := _column([term], (), spans)) is not None]
        if not value or len(columns) < len(value):
            return None
        refs = [weakref.ref(part) for column in columns for part in column]
        return list(map(Parts, zip(*columns, strict=True))), refs
    found = _terms(value, form)
    column = None if found is None else _column(*found, spans, form.added)
    return None if column is None else (column, [weakref.ref(part) for part in column])


def _terms(value: Any, form: Form) -> tuple[list[Any], tuple[int | str, ...]] | None:
    """The tensors of a value that are read, and the subscripts of what comes of them."""
    if type(value) is not tuple:
        return ([value], form.subscripts) if not form.added else None
    if form.added == (None,):
        return list(value), form.subscripts
    indices, subscripts = form.added or form.subscripts[:1], form.subscripts if form.added else form.subscripts[1:]
    if not all(isinstance(index, int) and -len(value) <= index < len(value) for index in indices):
        return None
    return [value[index] for index in indices], subscripts  # type: ignore[index]


def _column(
    terms: Sequence[Any], subscripts: tuple[int | str, ...], spans: Spans, added: tuple[int | None, ...] = ()
) -> Sequence[torch.Tensor] | None:
    """Each block's rows of a tensor, or of the sum of several, in memory of their own."""
    if subscripts not in ((), (-1,), (LAST_ROW,)) or not terms:
        return None
    first = terms[0]
    for term in terms:
        if type(term) is not torch.Tensor or not spans.are_in(term) or term.shape != first.shape:
            return None
    rows = [spans.newest(term) if subscripts else spans.rows(term) for term in terms]
    if added:
        whole = sum(rows) if added == (None,) else add(*rows)
        assert isinstance(whole, torch.Tensor)
    elif rows[0].untyped_storage()._cdata == first.untyped_storage()._cdata:
        whole = rows[0].clone()
    else:
        whole = rows[0]
    if not subscripts:
        return spans.split_rows(whole)
    return whole.unbind() if subscripts == (-1,) else whole.split(1)
