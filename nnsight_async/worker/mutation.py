"""Which programs may change, in place, a tensor that they have saved; read from their source.

Nothing tells of a tensor of the engine's own making whether it was written to, so a tensor that may have been is sent
again at every step. Guessing too much costs time, guessing too little returns stale numbers: what is not known to be
harmless counts.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

_LOCATIONS: Final = frozenset({"output", "input", "inputs", "logits", "samples"})
#: Methods that take a tensor and keep it as it is.
_HARMLESS: Final = frozenset(
    {"append", "extend", "insert", "add", "update", "setdefault", "get", "save", "item", "tolist"}
)


@dataclass(frozen=True, slots=True)
class Mutation:
    """What a program may change in place: ``always`` says something, ``counters`` names what ``name += x`` is done to.

    ``n += 1`` on a number makes a new number, on a tensor it changes the tensor.
    """

    always: bool
    counters: frozenset[str]

    def possible(self, namespace: Mapping[str, Any]) -> bool:
        """Whether a tensor may have been changed, the program's variables being as they are now."""
        return self.always or any(isinstance(namespace.get(name), torch.Tensor) for name in self.counters)


def find_mutation(tree: ast.AST, saved: Collection[str]) -> Mutation:
    """Read a program. An edit of a location does not count: the block's copies of it are its own.

    ``saved`` are the names that the program saves.
    """
    counters = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign):
            if isinstance(node.target, ast.Name):
                counters.add(node.target.id)
            elif not _is_location(node.target):
                return Mutation(True, frozenset())
        elif (isinstance(node, ast.Assign) and any(map(_writes_into, node.targets))) or (
            isinstance(node, ast.Call) and _may_write(node, saved)
        ):
            return Mutation(True, frozenset())
    return Mutation(False, frozenset(counters))


def _writes_into(target: ast.expr) -> bool:
    """``t[i] = x`` and ``t.data = x``, but not a slot of a saved dict or list by a plain key: that is seen anyway."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(map(_writes_into, target.elts))
    return isinstance(target, (ast.Subscript, ast.Attribute)) and not _is_location(target)


def _may_write(call: ast.Call, saved: Collection[str]) -> bool:
    if any(keyword.arg in ("out", "inplace") for keyword in call.keywords):
        return True
    function = call.func
    if isinstance(function, ast.Attribute):
        name = function.attr
        if name.endswith("_") and not name.endswith("__"):
            return True
        if name in _HARMLESS or (isinstance(function.value, ast.Name) and function.value.id == "torch"):
            return False
    elif isinstance(function, ast.Name) and (hasattr(builtins, function.id) or function.id.startswith("__")):
        return False
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(isinstance(inner, ast.Name) and inner.id in saved for item in arguments for inner in ast.walk(item))


def _is_location(target: ast.expr) -> bool:
    """Whether what is written into begins at a location: ``layer.output[0][:]``."""
    node: ast.expr = target
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        if isinstance(node, ast.Attribute) and node.attr in _LOCATIONS:
            return True
        node = node.value
    return False
