"""Whether a program changes tensors in place, read from its source."""

from __future__ import annotations

import ast
from typing import Final

_LOCATIONS: Final = {"output", "input", "inputs", "logits", "samples"}


def mutates_in_place(tree: ast.AST) -> bool:
    """True if some statement may write into a tensor that is not a location's own.

    An edit of a location (``layer.output[0][:] += v``) does not count: it lands in the engine's memory, of which the
    block keeps copies. Anything that could reach a saved tensor does: ``t[i] = x``, ``t += x``, ``t.add_(x)``,
    ``out=t``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and _may_be_saved(node.target):
            return True
        if isinstance(node, ast.Assign) and any(_writes_into(target) for target in node.targets):
            return True
        if isinstance(node, ast.Call):
            if any(keyword.arg == "out" for keyword in node.keywords):
                return True
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr.endswith("_") and not function.attr.endswith("__"):
                return True
    return False


def _writes_into(target: ast.expr) -> bool:
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(map(_writes_into, target.elts))
    return isinstance(target, ast.Subscript) and _may_be_saved(target)


def _may_be_saved(target: ast.expr) -> bool:
    """Whether what is written into is anything but a location, or a plain counter's name."""
    node: ast.expr = target
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        if isinstance(node, ast.Attribute) and node.attr in _LOCATIONS:
            return False
        node = node.value
    return True
