"""How saved values travel: what changed since the last time, and how to put it back together.

The worker keeps a :class:`Shadow` of what it has sent of each request and sends only what is new: a list that grew by
one sends one element. The client applies the changes to what it has, without touching what it handed out before, so
that the values of an earlier step stay as they were.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Final

import msgspec
import torch

from nnsight_async.saving import RESULT, CacheMark

_IMMUTABLE: Final = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)

#: What only the client can put a value in the place of.
_MARKS: Final = (CacheMark, type(RESULT))


class Set(msgspec.Struct, array_like=True, tag=0):
    """Replace the value whole."""

    value: Any


class Grow(msgspec.Struct, array_like=True, tag=1):
    """Change some items of a list and append others."""

    items: dict[int, Change]
    tail: Any  # a list: packed, it may be one extension


class Merge(msgspec.Struct, array_like=True, tag=2):
    """Change some entries of a dict and add others, as pairs of a key and its change."""

    entries: list[tuple[Any, Change]]


Change = Set | Grow | Merge


@dataclass(slots=True)
class _Leaf:
    value: Any


@dataclass(slots=True)
class _List:
    """A list as it was sent; ``nested`` holds the shadows of those items that are containers, ``of`` is the list."""

    values: list[Any]
    of: list[Any]
    nested: dict[int, _Node] = field(default_factory=dict)


@dataclass(slots=True)
class _Dict:
    entries: dict[Any, _Node]


_Node = _Leaf | _List | _Dict


class Shadow:
    """What has been sent of one block's saved values."""

    def __init__(self) -> None:
        self._mutates = False
        self._names: dict[str, _Node] = {}

    def update(
        self, saved: Mapping[str, Any], *, mutates: bool = False, only_grow: Collection[str] = ()
    ) -> dict[str, Change]:
        """The changes that turn what was sent into ``saved``, which counts as sent from now on.

        ``mutates`` says that tensors may have been changed in place: then a tensor's identity does not tell whether it
        is still the one that was sent, and every tensor is sent again. ``only_grow`` are names of lists that nothing
        is done to but appending: what was sent of them is not looked at again, which would take longer at every step.
        """
        self._mutates = mutates
        changes: dict[str, Change] = {}
        for name, value in saved.items():
            node, change = self._diff(self._names.get(name), value, only_grows=name in only_grow)
            if change is not None:
                self._names[name] = node
                changes[name] = change
        return changes

    def _diff(self, node: _Node | None, value: Any, *, only_grows: bool = False) -> tuple[_Node, Change | None]:
        if type(value) is list:
            if isinstance(node, _List) and len(value) >= len(node.values):
                return node, self._diff_list(node, value, as_sent=only_grows and node.of is value)
        elif type(value) is dict:
            if isinstance(node, _Dict) and node.entries.keys() <= value.keys():
                return node, self._diff_dict(node, value)
        elif isinstance(node, _Leaf) and self._same(node.value, value):
            return node, None
        return _shadow(value), Set(value)

    def _diff_list(self, node: _List, value: list[Any], *, as_sent: bool) -> Grow | None:
        sent = len(node.values)
        items: dict[int, Change] = {}
        if self._mutates or not (as_sent or all(map(is_, node.values, value))):
            for index in range(sent):
                if index not in node.nested and not self._same(node.values[index], value[index]):
                    items[index] = Set(value[index])
                    node.values[index] = value[index]
                    _note(node, index, value[index])
        for index, child in list(node.nested.items()) if node.nested else ():
            if index in items:
                continue
            node.nested[index], change = self._diff(child, value[index])
            node.values[index] = value[index]
            if change is not None:
                items[index] = change
        node.of = value
        tail = value[sent:]
        node.values += tail
        for index, item in enumerate(tail, sent):
            if type(item) is not torch.Tensor:
                _note(node, index, item)
        return Grow(items, tail) if items or tail else None

    def _diff_dict(self, node: _Dict, value: dict[Any, Any]) -> Merge | None:
        entries: list[tuple[Any, Change]] = []
        for key, item in value.items():
            node.entries[key], change = self._diff(node.entries.get(key), item)
            if change is not None:
                entries.append((key, change))
        return Merge(entries) if entries else None

    def _same(self, sent: Any, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return sent is value and not self._mutates
        if isinstance(value, _IMMUTABLE):
            return sent is value or (type(sent) is type(value) and bool(sent == value))
        if isinstance(value, _MARKS):
            return sent is value
        if isinstance(value, tuple):
            return type(sent) is type(value) and len(sent) == len(value) and all(map(self._same, sent, value))
        return False  # a set, an array, an object of the user's: nothing tells whether it changed


def _shadow(value: Any) -> _Node:
    if type(value) is list:
        node = _List(list(value), value)
        for index, item in enumerate(value):
            _note(node, index, item)
        return node
    if type(value) is dict:
        return _Dict({key: _shadow(item) for key, item in value.items()})
    return _Leaf(value)


def _note(node: _List, index: int, item: Any) -> None:
    """Remember that an item needs a look of its own at every step."""
    if type(item) is list or type(item) is dict:
        node.nested[index] = _shadow(item)
    else:
        node.nested.pop(index, None)
        if not _is_fixed(item):
            node.nested[index] = _Leaf(item)


def _is_fixed(item: Any) -> bool:
    """Whether an item can only change by being replaced (or, a tensor, in place)."""
    if isinstance(item, tuple):
        return all(map(_is_fixed, item))
    return isinstance(item, (torch.Tensor, *_IMMUTABLE))


def apply(values: Mapping[str, Any], changes: Mapping[str, Change]) -> dict[str, Any]:
    """``values`` with ``changes`` made, as new containers: nothing in ``values`` is altered."""
    result = dict(values)
    for name, change in changes.items():
        result[name] = _apply(result.get(name), change)
    return result


def _apply(value: Any, change: Change) -> Any:
    match change:
        case Set(new):
            return new
        case Grow(items, tail):
            grown = [*value, *tail]
            for index, item in items.items():
                grown[index] = _apply(grown[index], item)
            return grown
        case Merge(entries):
            merged = dict(value)
            for key, item in entries:
                merged[key] = _apply(merged.get(key), item)
            return merged


def added(values: Mapping[str, Any], changes: Mapping[str, Change]) -> dict[str, Any]:
    """What ``changes`` brought: ``values`` are those that they have been applied to.

    A list that only grew gives the items it grew by, a dict its new and changed entries, anything else its value.
    """
    return {name: _added(values[name], change) for name, change in changes.items()}


def _added(value: Any, change: Change) -> Any:
    match change:
        case Grow(items, tail) if not items:
            return list(tail)
        case Merge(entries):
            return {key: value[key] for key, _ in entries}
    return value
