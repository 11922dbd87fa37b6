"""What a block may not contain, because it runs as a program of its own in another process."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from nnsight_async.errors import CaptureError, UnsupportedError

__all__ = ["check_block"]

_Place = Callable[[ast.AST], str]


def check_block(body: Sequence[ast.stmt], where: _Place) -> None:
    """Refuse what cannot be moved out of the caller's function.

    Args:
        body: the statements of the block.
        where: gives `file:line` for a node.

    Raises:
        CaptureError: names the place, what stands there, and what to write instead.
    """
    checker = _Checker(where)
    for statement in body:
        checker.visit(statement)


class _Checker(ast.NodeVisitor):
    """Walks a block with what encloses the current node: loops, functions and classes of the block itself."""

    def __init__(self, where: _Place) -> None:
        self.where = where
        self.loops = 0
        self.in_function = False
        self.in_class = False

    def refuse(self, node: ast.AST, what: str, remedy: str) -> CaptureError:
        return CaptureError(f"{self.where(node)}: {what} in a traced block; {remedy}.")

    def visit_Return(self, node: ast.Return) -> None:
        if not self.in_function:
            raise self.refuse(node, "`return`", "save the value under a name and return it after the block")
        self.generic_visit(node)

    def visit_Yield(self, node: ast.Yield | ast.YieldFrom) -> None:
        if not self.in_function:
            raise self.refuse(node, "`yield`", "collect values in a saved list and yield them after the block")
        self.generic_visit(node)

    def visit_YieldFrom(self, node: ast.YieldFrom) -> None:
        self.visit_Yield(node)

    def visit_Await(self, node: ast.Await) -> None:
        if not self.in_function:
            raise self._no_async(node, "`await`")
        self.generic_visit(node)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        if not self.in_function:
            raise self._no_async(node, "`async for`")
        self._loop(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        if not self.in_function:
            raise self._no_async(node, "`async with`")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        if node.is_async and not self.in_function:
            raise self._no_async(node.target, "an asynchronous comprehension")
        self.generic_visit(node)

    def _no_async(self, node: ast.AST, what: str) -> CaptureError:
        return self.refuse(node, what, "the block runs in the model's process, not in this event loop: await outside")

    def visit_For(self, node: ast.For) -> None:
        self._loop(node)

    def visit_While(self, node: ast.While) -> None:
        self._loop(node)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        self.visit(node.test if isinstance(node, ast.While) else node.iter)
        self.loops += 1
        for statement in node.body:
            self.visit(statement)
        self.loops -= 1
        for statement in node.orelse:
            self.visit(statement)

    def visit_Break(self, node: ast.Break | ast.Continue) -> None:
        if not self.loops:
            what = "`break`" if isinstance(node, ast.Break) else "`continue`"
            raise self.refuse(
                node,
                f"{what} of a loop outside the block",
                "decide on a saved value after the block, in that loop",
            )

    def visit_Continue(self, node: ast.Continue) -> None:
        self.visit_Break(node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        if not self.in_function:
            raise self.refuse(node, "`nonlocal`", "leave it out and save the variable under a name")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if any(alias.name == "*" for alias in node.names):
            raise self.refuse(node, "`from ... import *`", "import the names that the block uses")

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args and not self.in_class:
            raise self.refuse(node, "`super()` without arguments", "write super(Class, self), or call it before")
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("backward", "requires_grad_"):
            raise self._no_gradients(node, f"`.{node.func.attr}()`")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "grad":
            raise self._no_gradients(node, "`.grad`")
        self.generic_visit(node)

    def _no_gradients(self, node: ast.AST, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.where(node)}: {what} in a traced block; vLLM's forward pass keeps no graph, so there are no "
            "gradients: compute them on the same model in HuggingFace transformers"
        )

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, node.args, *([node.returns] if node.returns else ())):
            self.visit(part)
        self._inside(node.body, function=True, in_class=self.in_class)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._inside([node.body], function=True, in_class=self.in_class)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self._inside(node.body, function=False, in_class=True)

    def _inside(self, body: Sequence[ast.AST], *, function: bool, in_class: bool) -> None:
        before = (self.loops, self.in_function, self.in_class)
        self.loops, self.in_function, self.in_class = 0, function, in_class
        for part in body:
            self.visit(part)
        self.loops, self.in_function, self.in_class = before
