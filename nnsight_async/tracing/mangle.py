"""Private names: what `self.__x` in a class means once its code stands outside the class."""

from __future__ import annotations

import ast
from typing import TypeVar

__all__ = ["mangle", "mangle_tree"]

_Node = TypeVar("_Node", bound=ast.AST)

# The fields of syntax nodes that hold an identifier which Python mangles.
_IDENTIFIERS = {
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.keyword: "arg",
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
    ast.ExceptHandler: "name",
    ast.MatchAs: "name",
    ast.MatchStar: "name",
    ast.MatchMapping: "rest",
}


def mangle(name: str, class_name: str | None) -> str:
    """The name under which Python stores `name` when it is used inside the class `class_name`."""
    if class_name is None or not name.startswith("__") or name.endswith("__") or "." in name:
        return name
    stripped = class_name.lstrip("_")
    return f"_{stripped}{name}" if stripped else name


def mangle_tree(tree: _Node, class_name: str | None) -> _Node:
    """Mangle every private name in `tree` as its class would. Classes inside it keep their own names'
    mangling.
    """
    if class_name is not None:
        _mangle(tree, class_name)
    return tree


def _mangle(node: ast.AST, class_name: str) -> None:
    if isinstance(node, ast.ClassDef):
        # Bases and decorators belong to the surrounding class; Python mangles the body by the new one.
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            _mangle(part, class_name)
        node.name = mangle(node.name, class_name)
        return
    field = _IDENTIFIERS.get(type(node))
    if field is not None:
        name = getattr(node, field)
        if name is not None:
            setattr(node, field, mangle(name, class_name))
    elif isinstance(node, ast.Global | ast.Nonlocal):
        node.names = [mangle(name, class_name) for name in node.names]
    elif isinstance(node, ast.MatchClass):
        node.kwd_attrs = [mangle(name, class_name) for name in node.kwd_attrs]
    elif isinstance(node, ast.alias) and node.name != "*":
        bound = node.asname or node.name.partition(".")[0]
        if mangle(bound, class_name) != bound:
            node.asname = mangle(bound, class_name)
    for child in ast.iter_child_nodes(node):
        _mangle(child, class_name)
