"""What an expression like ``model.layers[3].output[0]`` begins at, and whether it leads through a location."""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import Final

__all__ = ["LOCATIONS", "MODULE_LOCATIONS", "leads_through", "root_name"]

#: The attributes that are locations of a module, and the two beside the sampler.
MODULE_LOCATIONS: Final = frozenset({"output", "input", "inputs"})
LOCATIONS: Final = MODULE_LOCATIONS | {"logits", "samples"}


def leads_through(node: ast.expr, attributes: Collection[str] = LOCATIONS) -> bool:
    """Whether one of the attributes and items that ``node`` is a chain of is one of ``attributes``."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        if isinstance(node, ast.Attribute) and node.attr in attributes:
            return True
        node = node.value
    return False


def root_name(node: ast.expr) -> str | None:
    """The variable that a chain of attributes, items and calls begins at, if it is one's."""
    while True:
        match node:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Call(func=inner):
                node = inner
            case ast.Name(id=name):
                return name
            case _:
                return None
