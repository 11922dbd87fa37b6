"""Which live values a program reads."""

from __future__ import annotations

import ast
from functools import lru_cache


@lru_cache(maxsize=256)
def live_names(wrapped: str) -> frozenset[str] | None:
    """The names in the calls `tracer.live("name", ...)` of a program.

    None where the text does not tell: a name is computed, or what has the method is handed on to other code.

    Args:
        wrapped: the program's text in a form that can be parsed.
    """
    names: set[str] = set()
    owners: set[str] = set()
    tree = ast.parse(wrapped)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "live":
            first = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "name"), None)
            if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
                return None
            if not isinstance(node.func.value, ast.Name):
                return None
            names.add(first.value)
            owners.add(node.func.value.id)
    attributes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in owners and id(node) not in attributes:
            return None
    return frozenset(names)
