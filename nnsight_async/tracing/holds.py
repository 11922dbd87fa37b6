"""Naming to the worker the views that a statement holds while the model moves on.

In ``torch.stack([a.output[0][-1], b.output[0][-1]])`` the first row is a view of the engine's memory, and
while the block waits for ``b`` it is held by no variable. Wrapped as ``__hold__(a.output[0][-1])`` it is
known to the worker, which then keeps it from being overwritten.
"""

from __future__ import annotations

import ast
from typing import Final, cast

from nnsight_async.tracing.chains import LOCATIONS, leads_through

#: The function that a held expression is wrapped in; it returns its argument.
HOLD: Final = "__hold__"

_LOOPS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def hold_views(body: list[ast.stmt]) -> list[ast.stmt]:
    """``body`` with what may be a view wrapped, in statements in the middle of which the model may move on."""
    return [cast(ast.stmt, _Statements().visit(statement)) for statement in body]


class _Statements(ast.NodeTransformer):
    """Goes down to the expressions of single statements, and wraps in those where it may matter."""

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr):
            return cast(ast.AST, _Wrap().visit(node)) if _may_hold(node) else node
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Delete)) and _may_hold(node):
            return cast(ast.AST, _Wrap().visit(node))  # the target's own reads count as well
        return self.generic_visit(node)


class _Wrap(ast.NodeTransformer):
    """Wraps whatever may be a view of something: subscripts, attributes and calls, but no plain name or location."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return self._wrapped(node) if isinstance(node.ctx, ast.Load) else self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr in LOCATIONS:
            return node  # the location's own value is known to the worker as it is
        return self._wrapped(node) if isinstance(node.ctx, ast.Load) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self._wrapped(node)

    def _wrapped(self, node: ast.Subscript | ast.Attribute | ast.Call) -> ast.AST:
        self._inside(node)
        return ast.fix_missing_locations(ast.copy_location(ast.Call(ast.Name(HOLD, ast.Load()), [node], []), node))

    def _inside(self, node: ast.expr) -> None:
        """Wrap in the arguments and indices along a chain; the links of the chain are let go of as it is followed."""
        while True:
            if isinstance(node, ast.Call):
                node.args = [self._expression(argument) for argument in node.args]
                for keyword in node.keywords:
                    keyword.value = self._expression(keyword.value)
                node = node.func
            elif isinstance(node, ast.Subscript):
                node.slice = self._expression(node.slice)
                node = node.value
            elif isinstance(node, ast.Attribute):
                node = node.value
            else:
                self.generic_visit(node)
                return

    def _expression(self, node: ast.expr) -> ast.expr:
        return cast(ast.expr, self.visit(node))


def _may_hold(node: ast.AST) -> bool:
    """Whether the model may move on in the middle of evaluating ``node`` while it holds a view of something."""
    reads, others = 0, 0
    pending = [node]
    while pending:
        inner = pending.pop()
        if isinstance(inner, ast.Attribute) and inner.attr in LOCATIONS:
            reads += 1
            continue  # what leads to a location is a module
        if isinstance(inner, _LOOPS):
            reads += 1  # what stands in it may be evaluated more than once
        elif isinstance(inner, ast.Subscript) and isinstance(inner.ctx, ast.Load):
            others += not leads_through(inner)
        pending.extend(ast.iter_child_nodes(inner))
    return reads > 1 or (reads == 1 and others > 0)
