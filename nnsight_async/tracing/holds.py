"""Naming to the worker the views that a statement holds while the model moves on.

In ``torch.stack([a.output[0][-1], b.output[0][-1]])`` the first row is a view of the engine's memory, and
while the block waits for ``b`` it is held by no variable. Wrapped as ``__hold__(a.output[0][-1])`` it is
known to the worker, which then keeps it from being overwritten.
"""

from __future__ import annotations

import ast
from typing import Final, cast

#: The function that a held expression is wrapped in; it returns its argument.
HOLD: Final = "__hold__"

_LOCATIONS: Final = frozenset({"output", "input", "inputs", "logits", "samples"})
_LOOPS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def hold_views(body: list[ast.stmt]) -> list[ast.stmt]:
    """``body`` with every view of a location wrapped, in statements that read more than one location."""
    return [cast(ast.stmt, _Statements().visit(statement)) for statement in body]


class _Statements(ast.NodeTransformer):
    """Goes down to the expressions of single statements, and wraps in those where it may matter."""

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr):
            return _Wrap().visit(node) if _reads_several(node) else node
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Delete)) and _reads_several(
            node
        ):
            return _Wrap().visit(node)  # the target's own reads count as well
        return self.generic_visit(node)


class _Wrap(ast.NodeTransformer):
    """Wraps each maximal chain of subscripts, attributes and calls that begins at a location."""

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)) and _is_view(node):
            if isinstance(node, ast.Call) or isinstance(node.ctx, ast.Load):
                call = ast.Call(ast.Name(HOLD, ast.Load()), [node], [])
                return ast.fix_missing_locations(ast.copy_location(call, node))
            return node
        return self.generic_visit(node)


def _is_view(node: ast.expr) -> bool:
    """A chain with something after the location: the location's own value is known to the worker as it is."""
    first = True
    while True:
        if isinstance(node, ast.Attribute) and node.attr in _LOCATIONS:
            return not first
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return False
        first = False


def _reads_several(node: ast.AST) -> bool:
    """Whether the model may move on in the middle of evaluating ``node``."""
    reads = 0
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and inner.attr in _LOCATIONS:
            reads += 1
        elif isinstance(inner, _LOOPS):
            reads += 1  # what stands in it may be evaluated more than once
    return reads > 1
