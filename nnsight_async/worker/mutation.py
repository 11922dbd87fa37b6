"""Which programs may change, in place, a tensor that they have saved; read from their source.

Nothing tells of a tensor of the engine's own making whether it was written to, so a tensor that may have been is sent
again at every step. Guessing too much costs time, guessing too little returns stale numbers: what is not known to be
harmless counts.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch

from nnsight_async.tracing.chains import leads_through, root_name

#: Packages whose functions leave their arguments as they are, but for those that say otherwise (``add_``, ``out=``).
_PURE: Final = frozenset(
    {"builtins", "torch", "math", "numpy", "operator", "itertools", "functools", "collections", "einops", "time"}
) | {"nnsight_async"}
#: What has only methods that leave tensors as they are, but for those whose name ends in an underscore.
_HARMLESS: Final = (torch.Tensor, list, dict, set, tuple, str, int, float)


@dataclass(frozen=True, slots=True)
class Mutation:
    """What a program may change in place.

    ``always`` says that something is changed; ``counters`` names what ``name += x`` is done to (on a number it makes a
    new number, on a tensor it changes the tensor); ``callees`` names what is called, or whose methods are;
    ``only_grow`` names lists of the program's own making that nothing is done to but appending.
    """

    always: bool
    counters: frozenset[str] = frozenset()
    callees: frozenset[str] = frozenset()
    only_grow: frozenset[str] = frozenset()

    def possible(self, namespace: Mapping[str, Any]) -> bool:
        """Whether a tensor may have been changed, the program's variables being as they are now."""
        if self.always or any([isinstance(namespace.get(name), torch.Tensor) for name in self.counters]):
            return True
        return not all([name not in namespace or _is_harmless(namespace[name]) for name in self.callees])


def find_mutation(tree: ast.AST) -> Mutation:
    """Read a program. An edit of a location does not count: the block's copies of it are its own."""
    only_grow = find_lists_that_only_grow(tree)
    counters: set[str] = set()
    callees: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign):
            if isinstance(node.target, ast.Name):
                counters.add(node.target.id)
            elif not leads_through(node.target):
                return Mutation(True, only_grow=only_grow)
        elif isinstance(node, ast.Assign) and any(map(_writes_into, node.targets)):
            return Mutation(True, only_grow=only_grow)
        elif isinstance(node, ast.Call):
            if _writes(node):
                return Mutation(True, only_grow=only_grow)
            name = root_name(node.func)
            callees |= {name} if name is not None else set()
    return Mutation(False, frozenset(counters), frozenset(callees), only_grow)


def _is_harmless(value: Any) -> bool:
    """Whether calling a value, or a method of it, leaves tensors that are saved as they are."""
    if isinstance(value, _HARMLESS):
        return True
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if not isinstance(home, str):  # a bound method of a built-in type, say
        home = type(value).__module__
    return home.partition(".")[0] in _PURE


def _writes_into(target: ast.expr) -> bool:
    """``t[i] = x`` and ``t.data = x``, unless it is a location that is written."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(map(_writes_into, target.elts))
    return isinstance(target, (ast.Subscript, ast.Attribute)) and not leads_through(target)


def _writes(call: ast.Call) -> bool:
    """A call that says that it writes, or gives out a tensor's memory (``numpy()``)."""
    if any(keyword.arg in ("out", "inplace") for keyword in call.keywords):
        return True
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return name == "numpy" or (name.endswith("_") and not name.endswith("__"))


def find_lists_that_only_grow(tree: ast.AST) -> frozenset[str]:
    """The names that only ever stand for a new list, and are read for nothing but appending to it.

    No other name, and no function, can come by such a list, so its items stay what they are.
    """
    made: set[str] = set()
    appends: set[int] = set()  # the nodes of names that are appended to, or bound to a new list
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("append", "extend")
        ):
            appends.add(id(node.func.value))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for one, new in pairs:
                if isinstance(one, ast.Name) and _is_new_list(new):
                    made.add(one.id)
                    appends.add(id(one))
    others: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if id(node) not in appends:
                others.add(node.id)
        else:
            # Whatever else may bind a name (a function, an import, a pattern) has it as a string.
            strings = (value for _, value in ast.iter_fields(node))
            others.update(value for value in strings if isinstance(value, str))
    if others & _SEES_ALL or any(
        isinstance(node, ast.Name) and node.id == "list" and not isinstance(node.ctx, ast.Load)
        for node in ast.walk(tree)
    ):
        return frozenset()
    return frozenset(name for name in made - others if not name.startswith("__"))


def _is_new_list(value: ast.expr) -> bool:
    """``[...]`` or ``list(...)``, saved or not."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "save":
        value = value.func.value
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "list"
    return isinstance(value, ast.List)


_SEES_ALL: Final = frozenset({"locals", "globals", "vars", "exec", "eval"})
