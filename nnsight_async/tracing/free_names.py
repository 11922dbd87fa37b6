"""The names that functions, classes and comprehensions inside a block take from the block."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["FreeNames", "NestedScopes"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(slots=True)
class FreeNames:
    """What one scope does with variables that are not its own.

    Attributes:
        reads: looked up in the scopes around it.
        binds: bound in the scopes around it (`nonlocal`, or `:=` in a comprehension).
        global_reads: read from the block, whatever lies between (`global`).
        global_binds: bound in the block, whatever lies between.
    """

    reads: set[str] = field(default_factory=set)
    binds: set[str] = field(default_factory=set)
    global_reads: set[str] = field(default_factory=set)
    global_binds: set[str] = field(default_factory=set)

    @property
    def read_from_block(self) -> set[str]:
        """What is read from a block that stands directly around the scope."""
        return self.reads | self.global_reads

    @property
    def bound_in_block(self) -> set[str]:
        """What is bound in a block that stands directly around the scope."""
        return self.binds | self.global_binds


class NestedScopes:
    """Works out the free names of the scopes in one block, each once."""

    def __init__(self) -> None:
        self._known: dict[ast.AST, FreeNames] = {}

    def of(self, node: ast.AST) -> FreeNames:
        """The free names of the function, class, lambda or comprehension that `node` is."""
        free = self._known.get(node)
        if free is None:
            free = self._known[node] = self._work_out(node)
        return free

    def _work_out(self, node: ast.AST) -> FreeNames:
        scope = _Scope(self)
        own: set[str] = {getattr(one, "name", "") for one in getattr(node, "type_params", ())}
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                own |= _parameters(node.args)
                scope.visit_all(node.body)
            case ast.Lambda():
                own |= _parameters(node.args)
                scope.visit(node.body)
            case ast.ClassDef():
                scope.visit_all(node.body)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                for index, generator in enumerate(node.generators):
                    scope.visit(generator.target)
                    scope.visit_all([*([generator.iter] if index else ()), *generator.ifs])
                if isinstance(node, ast.DictComp):
                    scope.visit_all([node.key, node.value])
                else:
                    scope.visit(node.elt)
            case _:
                raise TypeError(f"{type(node).__name__} opens no scope")
        return scope.close(own, node)


class _Scope(ast.NodeVisitor):
    """Gathers the names of one scope, without those of the scopes inside it."""

    def __init__(self, scopes: NestedScopes) -> None:
        self.scopes = scopes
        self.loads: set[str] = set()
        self.bound: set[str] = set()
        self.walrus: set[str] = set()
        self.global_names: set[str] = set()
        self.nonlocal_names: set[str] = set()
        self.inner: list[FreeNames] = []

    def close(self, own: set[str], node: ast.AST) -> FreeNames:
        free = FreeNames()
        inner_reads = set().union(*(one.reads for one in self.inner))
        inner_binds = set().union(*(one.binds for one in self.inner))
        comprehension = isinstance(node, _Comprehension)
        bound = self.bound | own
        if not comprehension:
            bound |= self.walrus
        local = bound - self.global_names - self.nonlocal_names
        if isinstance(node, ast.ClassDef):
            # Functions do not see the class's names, and `x = x` reads the block's `x` first.
            free.reads = (self.loads | inner_reads) - own - self.global_names
            free.binds = inner_binds | self.nonlocal_names
        else:
            free.reads = (self.loads | inner_reads) - local - self.global_names
            free.binds = (inner_binds | self.nonlocal_names | (self.walrus if comprehension else set())) - local
        free.global_reads = (self.loads & self.global_names).union(*(one.global_reads for one in self.inner))
        free.global_binds = (bound & self.global_names).union(*(one.global_binds for one in self.inner))
        return free

    def visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        (self.loads if isinstance(node.ctx, ast.Load) else self.bound).add(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.walrus.add(node.target.id)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.loads.add(node.target.id)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: _Function) -> None:
        self.bound.add(node.name)
        self._header(node, [*node.decorator_list, node.args, *([node.returns] if node.returns else ())])

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bound.add(node.name)
        self._header(node, [*node.decorator_list, *node.bases, *node.keywords])

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._header(node, [node.args])

    def _header(self, node: ast.AST, parts: Iterable[ast.AST]) -> None:
        header = _Scope(self.scopes)
        header.visit_all(parts)
        header.loads -= {getattr(one, "name", "") for one in getattr(node, "type_params", ())}
        self.loads |= header.loads
        self.bound |= header.bound
        self.walrus |= header.walrus
        self.inner += [*header.inner, self.scopes.of(node)]

    def visit_ListComp(self, node: _Comprehension) -> None:
        self.visit(node.generators[0].iter)  # the only part that runs in this scope
        free = self.scopes.of(node)
        self.walrus |= free.binds
        self.inner.append(free)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self.visit_ListComp(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self.visit_ListComp(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self.visit_ListComp(node)

    def visit_alias(self, node: ast.alias) -> None:
        self.bound.add(node.asname or node.name.partition(".")[0])

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._capture(node, node.name)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self._capture(node, node.name)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self._capture(node, node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._capture(node, node.rest)

    def _capture(self, node: ast.AST, name: str | None) -> None:
        if name is not None:
            self.bound.add(name)
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> None:
        self.global_names.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.nonlocal_names.update(node.names)


def _parameters(arguments: ast.arguments) -> set[str]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return {one.arg for one in every if one is not None}
