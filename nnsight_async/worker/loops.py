"""What the compiled block calls where it had a loop that only collects; see :mod:`nnsight_async.worker.gathering`."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Hashable
from typing import Any, Final

from nnsight_async.errors import NnsightAsyncError
from nnsight_async.tracing.gathers import GATHER, GATHERED, REST
from nnsight_async.tree import ModuleRef
from nnsight_async.worker.faces import ModelFace
from nnsight_async.worker.gathering import Form, Plan
from nnsight_async.worker.interleaver import Interleaver


class Gatherer:
    """What the compiled block calls where the loops were; ``skipping`` tells whether any module is skipped now."""

    def __init__(self, interleaver: Interleaver, skipping: Callable[[], bool]) -> None:
        self._interleaver = interleaver
        self._skipping = skipping
        self._plans: dict[Hashable, Plan | None] = {}

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions by the names that the compiler uses."""
        return {GATHER: self.gather, GATHERED: self.gathered, REST: self.rest}

    def gather(self, items: Any, name: str, *place: Any) -> Any:
        """Append to a list of the block's; returns the items that are left."""
        target = self._interleaver.running.namespace.get(name)
        return self._gather(items, target, *place) if type(target) is list and target is not items else items

    def gathered(self, items: Any, *place: Any) -> list[Any]:
        """Append to a new list; what is left is for :meth:`rest`."""
        target: list[Any] = []
        block = self._interleaver.running
        block.rest = self._gather(items, target, *place)
        return target

    def rest(self) -> Any:
        """What :meth:`gathered` has left."""
        block = self._interleaver.running
        rest, block.rest = block.rest, None
        return rest

    def _gather(
        self,
        items: Any,
        target: list[Any],
        base: str,
        path: str,
        side: str,
        subscripts: tuple[int | str, ...],
        added: tuple[int | None, ...],
        cloned: bool,
    ) -> Any:
        """Wait until the list has all but the last; returns what is left, or ``items`` where there is no such way."""
        interleaver = self._interleaver
        block = interleaver.running
        each = _turns(items)
        if len(each) < 2:
            return items
        if not interleaver.alone or self._skipping() or block.cursor != block.step:
            return items
        if added == (None,) and block.namespace.get("sum", builtins.sum) is not builtins.sum:
            return items
        plan = self._plan(each, block.namespace, base, path, Form(side, subscripts, added, cloned))
        if plan is None:
            return items
        return each[interleaver.wait_for_all(plan, target) :]

    def _plan(self, items: tuple[Any, ...], namespace: dict[str, Any], base: str, path: str, form: Form) -> Plan | None:
        whole = _find(namespace, base) if base else None
        expected: type = ModuleRef if not base else int
        if (base and whole is None) or not all(type(item) is expected for item in items):
            return None
        known = (items, whole, path, form)
        if known not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            try:
                modules = items if whole is None else [whole[item] for item in items]
                keys = tuple([(module.at(path)._path, form.side) for module in modules])
            except NnsightAsyncError:
                return None  # then the loop itself is told, where it comes to it
            # A location that is there twice is once where the block has just been, or in a later call of its module.
            self._plans[known] = Plan(keys, form) if len(set(keys)) == len(keys) else None
        return self._plans[known]


#: Loops of more turns, or ranges of larger numbers, are run turn by turn.
_MOST_TURNS: Final = 4096
_MOST_PLANS: Final = 1024


def _turns(items: Any) -> tuple[Any, ...]:
    """What a loop goes over, if it can be known without running anything and is not too much."""
    if type(items) is range:
        return tuple(items) if all(-1 <= end <= _MOST_TURNS for end in (items.start, items.stop)) else ()
    return tuple(items) if type(items) in (ModuleRef, list, tuple) and len(items) <= _MOST_TURNS else ()


def _find(namespace: dict[str, Any], dotted: str) -> ModuleRef | None:
    """The module that a chain of names leads to, through modules alone."""
    root, *names = dotted.split(".")
    found = namespace.get(root)
    for name in names:
        if not isinstance(found, (ModelFace, ModuleRef)):
            return None
        try:
            found = getattr(found, name)
        except NnsightAsyncError:
            return None
    return found if isinstance(found, ModuleRef) else None
