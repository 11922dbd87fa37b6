"""Which names a block reads from its surroundings, and which it binds."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nnsight_async.tracing.free_names import NestedScopes

__all__ = ["BlockNames", "block_names"]


@dataclass(frozen=True, slots=True)
class BlockNames:
    """The names of a block.

    Attributes:
        reads: may be read before the block itself has certainly bound them.
        binds: are bound somewhere in the block.
    """

    reads: frozenset[str]
    binds: frozenset[str]


def block_names(body: Sequence[ast.stmt], scopes: NestedScopes) -> BlockNames:
    """The names that the statements of a block read from outside, and those they bind."""
    flow = _Flow(scopes)
    flow.run(body, set())
    return BlockNames(frozenset(flow.reads), frozenset(flow.binds))


_Assigned = set[str] | None  # names certainly bound at a point; None where the program never comes to


def _meet(*states: _Assigned) -> _Assigned:
    reached = [state for state in states if state is not None]
    return set.intersection(*reached) if reached else None


class _Flow:
    """Runs through the statements in order, keeping the names that are certainly bound."""

    def __init__(self, scopes: NestedScopes) -> None:
        self.scopes = scopes
        self.reads: set[str] = set()
        self.binds: set[str] = set()

    # ---- statements

    def run(self, body: Iterable[ast.stmt], state: _Assigned) -> _Assigned:
        for statement in body:
            # Code behind a `break` or `raise` is still read, with everything it needs: it costs nothing.
            state = self.statement(statement, set() if state is None else state)
        return state

    def statement(self, node: ast.stmt, now: set[str]) -> _Assigned:
        match node:
            case ast.Assign():
                self.load(node.value, now)
                for target in node.targets:
                    self.store(target, now)
            case ast.AugAssign():
                self.load(_as_load(node.target), now)
                self.load(node.value, now)
                self.store(node.target, now)
            case ast.AnnAssign():
                if node.value is not None:  # annotations of variables are dropped from the program
                    self.load(node.value, now)
                    self.store(node.target, now)
            case ast.If():
                self.load(node.test, now)
                return _meet(self.run(node.body, set(now)), self.run(node.orelse, set(now)))
            case ast.For() | ast.AsyncFor():
                self.load(node.iter, now)
                inside = set(now)
                self.store(node.target, inside)
                self.run(node.body, inside)
                self.run(node.orelse, set(now))
            case ast.While():
                self.load(node.test, now)
                self.run(node.body, set(now))
                self.run(node.orelse, set(now))
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self.load(item.context_expr, now)
                    if item.optional_vars is not None:
                        self.store(item.optional_vars, now)
                self.run(node.body, set(now))  # the context may swallow an exception from anywhere in it
            case ast.Try():
                return self.try_statement(node, now)
            case ast.TryStar():
                return self.try_statement(node, now)
            case ast.Match():
                self.load(node.subject, now)
                last = node.cases[-1]
                exhaustive = (
                    last.guard is None and isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
                )
                ends: list[_Assigned] = [] if exhaustive else [now]
                for case in node.cases:
                    inside = set(now)
                    self.pattern(case.pattern, inside)
                    if case.guard is not None:
                        self.load(case.guard, inside)
                    ends.append(self.run(case.body, inside))
                return _meet(*ends)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.definition(node, now)
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    self.bind(alias.asname or alias.name.partition(".")[0], now)
                if isinstance(node, ast.ImportFrom) and node.level:
                    self.reads |= {"__package__", "__name__"}
            case ast.Delete():
                for target in node.targets:
                    self.load(_as_load(target), now)
                    if isinstance(target, ast.Name):
                        now.discard(target.id)
            case ast.Break() | ast.Continue():
                return None
            case ast.Raise():
                self.children(node, now)
                return None
            case _:
                self.children(node, now)
        return now

    def try_statement(self, node: ast.Try | ast.TryStar, now: set[str]) -> _Assigned:
        tried = self.run(node.body, set(now))
        ends = [self.run(node.orelse, tried)]
        for handler in node.handlers:
            inside = set(now)
            if handler.type is not None:
                self.load(handler.type, inside)
            if handler.name is not None:
                self.bind(handler.name, inside)
            end = self.run(handler.body, inside)
            if end is not None and handler.name is not None:
                end.discard(handler.name)  # Python deletes it
            ends.append(end)
        before_finally = set(now)
        after = self.run(node.finalbody, before_finally)
        end = _meet(*ends)
        return None if end is None or after is None else end | after

    def definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, now: set[str]) -> None:
        for decorator in node.decorator_list:
            self.load(decorator, now)
        header: list[ast.AST] = []
        if isinstance(node, ast.ClassDef):
            header += [*node.bases, *node.keywords]
        else:
            header += [node.args, *([node.returns] if node.returns is not None else ())]
        parameters = {getattr(one, "name", "") for one in getattr(node, "type_params", ())}
        for part in header:
            self.load(part, now | parameters)
        if not isinstance(node, ast.ClassDef):
            self.bind(node.name, now)  # before its body: a function may call itself
        self.nested(node, now)
        self.bind(node.name, now)

    def pattern(self, node: ast.pattern, now: set[str]) -> None:
        for part in ast.walk(node):
            match part:
                case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                    self.bind(name, now)
                case ast.Name(id=name):
                    self.read(name, now)

    # ---- expressions

    def load(self, node: ast.AST, now: set[str]) -> None:
        """Evaluate an expression: its names are read in order, and `:=` binds."""
        match node:
            case ast.Name(ctx=ast.Load()):
                self.read(node.id, now)
            case ast.NamedExpr():
                self.load(node.value, now)
                self.store(node.target, now)
            case ast.BoolOp():
                self.load(node.values[0], now)
                for value in node.values[1:]:
                    self.load(value, set(now))
            case ast.IfExp():
                self.load(node.test, now)
                self.load(node.body, set(now))
                self.load(node.orelse, set(now))
            case ast.Compare():
                self.load(node.left, now)
                self.load(node.comparators[0], now)
                for value in node.comparators[1:]:
                    self.load(value, set(now))
            case ast.Lambda():
                self.load(node.args, now)
                self.nested(node, now)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self.load(node.generators[0].iter, now)  # the only part that runs in the block's own scope
                self.nested(node, now)
            case _:
                self.children(node, now)

    def children(self, node: ast.AST, now: set[str]) -> None:
        for child in ast.iter_child_nodes(node):
            self.load(child, now)

    def nested(self, node: ast.stmt | ast.expr, now: set[str]) -> None:
        free = self.scopes.of(node)
        self.reads |= free.read_from_block - now
        self.binds |= free.bound_in_block

    def store(self, target: ast.AST, now: set[str]) -> None:
        match target:
            case ast.Name():
                self.bind(target.id, now)
            case ast.Tuple() | ast.List():
                for element in target.elts:
                    self.store(element, now)
            case ast.Starred():
                self.store(target.value, now)
            case _:
                self.children(target, now)  # `a.b = ...` and `a[i] = ...` read `a` and `i`

    def read(self, name: str, now: set[str]) -> None:
        if name not in now:
            self.reads.add(name)

    def bind(self, name: str, now: set[str]) -> None:
        now.add(name)
        self.binds.add(name)


def _as_load(target: ast.expr) -> ast.expr:
    """The same place, read instead of written."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    return target
