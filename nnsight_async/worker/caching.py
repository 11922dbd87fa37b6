"""``tracer.cache``: captures that were declared, without running a block for each.

Requests that ask for the same are captured together: at each of their locations the rows of all of them are copied at
once, and at the end of the step all of that goes into the post as it is. The client splits it by rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from nnsight_async.errors import LocationError, OutOfOrderError
from nnsight_async.saving import CacheMark
from nnsight_async.tree import ModuleRef
from nnsight_async.wire import RowsOf
from nnsight_async.worker.block import Block, Key
from nnsight_async.worker.copies import Copies, Copy
from nnsight_async.worker.rows import Rows


@dataclass(frozen=True)
class CacheSpec:
    """What one cache captures: modules' outputs, and inputs if so asked, in which type of floating-point numbers."""

    paths: frozenset[str]
    inputs: bool
    dtype: torch.dtype | None

    def locations(self) -> list[Key]:
        """The locations."""
        sides = ("in", "out") if self.inputs else ("out",)
        return [(path, side) for path in self.paths for side in sides]


def chosen_paths(modules: Any, known: Iterable[str]) -> frozenset[str]:
    """The paths of the modules that a cache is to take; ``known`` are those that a forward pass comes to.

    Args:
        modules: references, paths, patterns in which ``*`` stands for one name (``model.layers.*.mlp``), or None for
            every module.

    Raises:
        LocationError: a pattern or path that no module has.
    """
    known = list(known)
    if modules is None:
        return frozenset(known)
    if isinstance(modules, (str, ModuleRef)):
        modules = [modules]
    found: set[str] = set()
    for module in modules:
        if isinstance(module, ModuleRef):
            found.add(module._path)
            continue
        if not isinstance(module, str):
            raise LocationError(f"modules are references, paths or patterns, not {type(module).__name__}")
        pattern = re.compile(re.escape(module).replace(r"\*", r"[^.]+"))
        matching = [path for path in known if pattern.fullmatch(path) or pattern.fullmatch(f"model.{path}")]
        if not matching:
            raise LocationError(f"no module of the forward pass has the path {module!r} (in which * is one name)")
        found.update(matching)
    return frozenset(found)


@dataclass
class Group:
    """The requests of a step that have caches of the same kind, and what is captured of them."""

    spec: CacheSpec
    number: int
    blocks: list[Block] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    captured: list[tuple[str, str, bool, Any]] = field(default_factory=list)


#: How many specifications are kept to be found again.
_MOST_SPECS: Final = 1024


class Caching:
    """The captures of the step in progress."""

    def __init__(self) -> None:
        self._by_key: dict[Key, list[Group]] = {}
        self._specs: dict[CacheSpec, CacheSpec] = {}
        self.groups: list[Group] = []

    def known(self, spec: CacheSpec) -> CacheSpec:
        """The same specification for all that are equal, so that their identities tell them apart."""
        if len(self._specs) > _MOST_SPECS:
            self._specs.clear()
        return self._specs.setdefault(spec, spec)

    def begin(self, blocks: Iterable[Block], rows: Mapping[str, Rows]) -> list[Key]:
        """Start a step; returns the locations at which something will be captured."""
        self._by_key.clear()
        groups: dict[tuple[int, int], Group] = {}
        for block in blocks:
            for number, spec in enumerate(block.caches):
                group = groups.get((id(spec), number))
                if group is None:
                    group = groups[id(spec), number] = Group(spec, number)
                group.blocks.append(block)
                group.rows.append(rows[block.request_id])
        self.groups = list(groups.values())
        for group in self.groups:
            for key in group.spec.locations():
                self._by_key.setdefault(key, []).append(group)
        return list(self._by_key)

    def begin_again(self) -> None:
        """The forward pass is run once more: what was captured in it may be another now."""
        for group in self.groups:
            group.captured.clear()

    def take_copies(self, copies: Copies, size: int) -> None:
        """Capture what a graph has left of locations, all of them at once; ``size`` is the number of tokens."""
        for group in self.groups:
            wanted = [key for key in copies.values if group in self._by_key.get(key, ())]
            if not wanted:
                continue
            places = _merge([(rows.start, rows.stop) for rows in group.rows])
            taken: list[Sequence[Any]] = []
            for slab in copies.slabs:
                if slab.shape[1] < size:
                    rows = slab
                elif len(places) == 1:
                    rows = slab[:, slice(*places[0])]
                else:
                    rows = torch.cat([slab[:, start:stop] for start, stop in places], dim=1)
                if group.spec.dtype is not None and rows.is_floating_point():
                    rows = rows.to(group.spec.dtype)
                parts = rows.unbind()
                taken.append(parts if slab.shape[1] < size else [RowsOf(part) for part in parts])
            for key in wanted:
                group.captured.append((*key, False, _taken(copies.values[key], taken)))

    def locations(self) -> Iterable[Key]:
        """Where something is captured in this step."""
        return self._by_key

    def wants(self, key: Key) -> bool:
        """Whether anything is captured at a location in this step."""
        return key in self._by_key

    def capture(self, key: Key, value: Any, size: int, *, by_index: bool) -> None:
        """Capture a location's value; ``size`` is the number of its rows, one a request where ``by_index``."""
        for group in self._by_key[key]:
            places = [(r.index, r.index + 1) if by_index else (r.start, r.stop) for r in group.rows]
            group.captured.append((*key, by_index, _capture(value, _merge(places), size, group.spec.dtype)))


#: What travels of a value as it is.
_PLAIN: Final = (int, float, str, bool, type(None))


def _capture(value: Any, places: Sequence[tuple[int, int]], size: int, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        cast = dtype if dtype is not None and value.is_floating_point() else value.dtype
        if value.dim() == 0 or value.shape[0] < size:
            return value.to(cast, copy=True)
        parts = [value[start:stop] for start, stop in places]
        return RowsOf(parts[0].to(cast, copy=True) if len(parts) == 1 else torch.cat(parts).to(cast))
    if isinstance(value, tuple):
        return tuple(_capture(item, places, size, dtype) for item in value)
    if isinstance(value, list):
        return [_capture(item, places, size, dtype) for item in value]
    if isinstance(value, dict):
        return {str(name): _capture(item, places, size, dtype) for name, item in value.items()}
    return value if type(value) in _PLAIN else None


def _taken(value: Any, taken: Sequence[Sequence[Any]]) -> Any:
    """``value`` as :func:`_capture` gives it, its tensors found in what was taken of the slabs."""
    if isinstance(value, Copy):
        return taken[value.slab][value.at]
    if isinstance(value, tuple):
        return tuple(_taken(item, taken) for item in value)
    if isinstance(value, list):
        return [_taken(item, taken) for item in value]
    if isinstance(value, dict):
        return {str(name): _taken(item, taken) for name, item in value.items()}
    return value if type(value) in _PLAIN else None


def _merge(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges with those that follow on each other made one."""
    merged: list[tuple[int, int]] = []
    for start, stop in places:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def open_cache(block: Block, spec: CacheSpec, device: str) -> CacheMark:
    """Open a cache on a block; the mark that stands for it, saved under the name that comes to hold it.

    Raises:
        OutOfOrderError: the block has read a location already, so some may have passed.
    """
    if block.has_waited:
        raise OutOfOrderError(
            "tracer.cache is opened before the block's first read or edit: some locations have passed"
        )
    mark = CacheMark(len(block.caches), device)
    block.caches.append(spec)
    block.mark(mark, ())
    return mark
