"""Calls of one module that several blocks make at one location, run as one.

A module of a language model works on each row by itself, so calls of it on the rows of several requests are one call on
all of those rows. An unembedding, which has a row for each token of the vocabulary, is then read once and not once a
request. What comes of it is the same to rounding, as it is for the rows of the forward pass itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch

from nnsight_async.tree import ModuleRef
from nnsight_async.worker.calls import call
from nnsight_async.worker.parameters import ReadOnly

#: Rows of a call at most, as what comes of them may be as wide as the vocabulary.
_MOST_ROWS: Final = 1024
#: Kinds of calls that are remembered as not to be run together.
_MOST_REFUSED: Final = 1024
_VALUES: Final = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


@dataclass(slots=True, eq=False)
class Call:
    """A call that a block has parked in. Calls of one ``kind`` can be run as one; ``rows`` is how many this one has."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    context: Callable[[], AbstractContextManager[None]]
    kind: Hashable
    rows: int


@dataclass(slots=True)
class Result:
    """What a call that was run with others has returned."""

    value: Any


class _AloneError(Exception):
    """A call, or what came of it, is not one of rows."""


class Joiner:
    """Which calls can be run together."""

    def __init__(self) -> None:
        self._refused: set[Hashable] = set()

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        context: Callable[[], AbstractContextManager[None]],
    ) -> Call | None:
        """A call that may be run with others of its kind; None where it has to be run alone.

        It may where its tensors, beside parameters, all have the same number of rows and at least two dimensions.
        """
        sizes: set[int] = set()
        owner = getattr(function, "__self__", None)
        try:
            kind = (id(owner), getattr(function, "__func__", function), _kind(tuple(args), sizes), _kind(kwargs, sizes))
            hash(kind)
        except (_AloneError, TypeError):
            return None
        if len(sizes) != 1 or not 0 < (rows := sizes.pop()) <= _MOST_ROWS // 2 or kind in self._refused:
            return None
        return Call(function, args, kwargs, context, kind, rows)

    def groups(self, calls: Iterable[Call]) -> list[list[int]]:
        """Which of some calls are to be run together, by their places."""
        groups: list[list[int]] = []
        latest: dict[Hashable, tuple[list[int], int]] = {}
        for place, one in enumerate(calls):
            group, rows = latest.get(one.kind, ([], 0))
            if not group or rows + one.rows > _MOST_ROWS:
                group, rows = [], 0
                groups.append(group)
            group.append(place)
            latest[one.kind] = group, rows + one.rows
        return groups

    def run(self, calls: Sequence[Call]) -> list[Result | None]:
        """Run calls of one kind together; returns what each has returned, in memory of its own.

        None stands for a call that has to be run alone: there is only one, or what comes of them cannot be taken apart,
        or there is an error, which is then some call's own.
        """
        alone: list[Result | None] = [None] * len(calls)
        if len(calls) < 2:
            return alone
        first, sizes = calls[0], [one.rows for one in calls]
        try:
            output = call(
                first.function, _join([one.args for one in calls]), _join([one.kwargs for one in calls]), first.context
            )
            parts = _part(output, sizes)
        except torch.OutOfMemoryError:
            return alone
        except Exception:
            if len(self._refused) >= _MOST_REFUSED:
                self._refused.clear()
            self._refused.add(first.kind)
            return alone
        return list(map(Result, parts))


def _kind(value: Any, sizes: set[int]) -> Hashable:
    if isinstance(value, ModuleRef):
        return value._path
    if isinstance(value, ReadOnly):
        return value.data_ptr(), value.shape, value.stride()
    if type(value) is torch.Tensor and value.dim() > 1 and value.layout is torch.strided:
        sizes.add(value.shape[0])
        return value.dtype, value.device, value.shape[1:]
    if isinstance(value, _VALUES):
        return type(value), value
    if type(value) in (tuple, list):
        return type(value), tuple([_kind(item, sizes) for item in value])
    if isinstance(value, dict):
        return dict, tuple([(name, _kind(item, sizes)) for name, item in value.items()])
    raise _AloneError


def _join(values: Sequence[Any]) -> Any:
    first = values[0]
    if type(first) is torch.Tensor:
        return torch.cat(list(values))
    if isinstance(first, (tuple, list)):
        return type(first)(_join(items) for items in zip(*values, strict=True))
    if isinstance(first, dict):
        return {name: _join([value[name] for value in values]) for name in first}
    return first


def _part(output: Any, sizes: Sequence[int]) -> list[Any]:
    """Each call's part of what came of all of them."""
    if type(output) is torch.Tensor and output.dim() > 0 and output.shape[0] == sum(sizes):
        return [part.clone() for part in output.split_with_sizes(list(sizes))]
    if isinstance(output, _VALUES):
        return [output] * len(sizes)
    if type(output) in (tuple, list):
        columns = [_part(item, sizes) for item in output]
        return [type(output)(items) for items in zip(*columns, strict=True)] if columns else [output] * len(sizes)
    raise _AloneError
