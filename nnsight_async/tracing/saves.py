"""Turning `X.save()` into calls that say under which names the value is saved.

A save is known by the variable that its statement stores it in. Where the saved value itself is what the
variable holds (`name = X.save()`), the call carries the name. Where the variable holds something with the
value in it (`acts.append(X.save())`), the variable is saved as a whole, in a statement of its own behind the
first one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from nnsight_async.errors import CaptureError
from nnsight_async.tracing.free_names import NestedScopes
from nnsight_async.tracing.mangle import mangle

__all__ = ["SAVE", "SAVE_CALL", "SAVE_RESULT", "SAVE_WHOLE", "Saves", "rewrite_saves"]

SAVE = "__save__"
SAVE_RESULT = "__save_result__"
SAVE_CALL = "__save_call__"
SAVE_WHOLE = "__save_whole__"

# Methods that put their argument into what they are called on.
_STORES = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "extend",
        "extendleft",
        "insert",
        "put",
        "put_nowait",
        "setdefault",
        "update",
        "__setitem__",
    ]
)
_Node = TypeVar("_Node", bound=ast.AST)
_REMEDY = "assign it to a name, as in `name = value.save()`"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(slots=True)
class Saves:
    """The names that a block saves: for certain, and perhaps (`f(x)` with an `f` called `save`, known when it
    runs).
    """

    certain: set[str] = field(default_factory=set)
    possible: set[str] = field(default_factory=set)


def rewrite_saves(
    body: list[ast.stmt],
    binds: frozenset[str],
    scopes: NestedScopes,
    where: Callable[[ast.AST], str],
    class_name: str | None,
) -> Saves:
    """Rewrite every save in `body`, in place.

    Args:
        body: the statements of the block.
        binds: the names that the block binds.
        scopes: what its functions take from it.
        where: gives `file:line` for a node.
        class_name: the class whose private names the block uses, or None.

    Raises:
        CaptureError: a value is saved where no variable of the block takes it.
    """
    rewriter = _Rewriter(binds, scopes, where, class_name)
    body[:] = rewriter.statements(body, None)
    return rewriter.saves


def is_save(node: ast.AST) -> bool:
    """Whether `node` is a call of the form `X.save()`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "save"
        and not node.args
        and not node.keywords
    )


def _is_save_call(node: ast.AST) -> bool:
    """Whether `node` is a call of the form `save(X)` or `package.save(X)`."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
        return False
    function = node.func
    if isinstance(function, ast.Name):
        return function.id == "save"
    if not isinstance(function, ast.Attribute) or function.attr != "save":
        return False
    base = function.value
    while isinstance(base, ast.Attribute):
        base = base.value
    return isinstance(base, ast.Name)


def _any_save(node: ast.AST) -> bool:
    return any(is_save(part) or _is_save_call(part) for part in ast.walk(node))


@dataclass(slots=True)
class _Place:
    """Where the values saved in an expression go.

    Attributes:
        whole: variables to save as a whole behind the statement if a save is met.
        met: whether an `X.save()` was met that no name of its own takes.
        functions: the callees of `save(X)` calls met so.
        taken: whether a surrounding save already keeps what is in here.
    """

    whole: list[str]
    met: bool = False
    functions: list[ast.expr] = field(default_factory=list)
    taken: bool = False


class _Rewriter:
    def __init__(
        self, binds: frozenset[str], scopes: NestedScopes, where: Callable[[ast.AST], str], class_name: str | None
    ) -> None:
        self.binds = binds
        self.scopes = scopes
        self.where = where
        self.class_name = class_name
        self.saves = Saves()

    # ---- statements

    def statements(self, body: Sequence[ast.stmt], visible: frozenset[str] | None) -> list[ast.stmt]:
        """Rewrite a list of statements; `visible` are the block's variables seen in a function, None in the
        block.
        """
        result: list[ast.stmt] = []
        for statement in body:
            result.append(statement)
            if _any_save(statement):
                result.extend(self.statement(statement, visible))
        return result

    def statement(self, node: ast.stmt, visible: frozenset[str] | None) -> list[ast.stmt]:
        """Rewrite one statement in place; returns the statements to put behind it."""
        behind: list[ast.stmt] = []
        match node:
            case ast.Assign():
                for target in node.targets:
                    self.expression(target, _Place([]), visible)
                node.value = self.assigned(node.targets, node.value, visible, behind)
            case ast.AnnAssign() if node.value is not None:
                node.value = self.assigned([node.target], node.value, visible, behind)
            case ast.AugAssign():
                place = _Place(self.known([node.target], visible))
                node.value = self.expression(node.value, place, visible)
                behind += self.whole(place, node)
            case ast.Expr():
                node.value = self.bare(node.value, visible, behind)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for part in (*node.decorator_list, node.args):
                    self.inside(part, visible)
                free = self.scopes.of(node)
                seen = frozenset(free.read_from_block | free.bound_in_block)
                node.body = self.statements(node.body, seen if visible is None else seen & visible)
            case ast.ClassDef():
                self.inside(node, frozenset())
            case _:
                for name, value in ast.iter_fields(node):
                    if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                        setattr(node, name, self.statements(value, visible))
                    elif isinstance(value, list) and value and hasattr(value[0], "body"):  # handlers, match cases
                        for part in value:
                            self.inside(getattr(part, "guard", None) or getattr(part, "type", None), visible)
                            part.body = self.statements(part.body, visible)
                    elif isinstance(value, list):
                        for part in value:
                            self.inside(part, visible)
                    elif isinstance(value, ast.expr):
                        setattr(node, name, self.expression(value, _Place([]), visible))
        return behind

    def inside(self, node: object, visible: frozenset[str] | None) -> None:
        """Rewrite below a part of a statement that stores nothing by itself."""
        if isinstance(node, ast.expr):
            self.expression(node, _Place([]), visible)
        elif isinstance(node, ast.AST):
            self.children(node, _Place([]), visible)

    def assigned(
        self, targets: list[ast.expr], value: ast.expr, visible: frozenset[str] | None, behind: list[ast.stmt]
    ) -> ast.expr:
        """Rewrite the value of an assignment to `targets`."""
        if isinstance(value, ast.Tuple | ast.List):
            for position, element in enumerate(value.elts):
                parts = [_element(target, position, len(value.elts)) for target in targets]
                kept = [part for part in parts if part is not None]
                if len(kept) == len(targets) and not isinstance(element, ast.Starred):
                    value.elts[position] = self.assigned(kept, element, visible, behind)
                elif _any_save(element):
                    place = _Place(self.known(targets, visible))
                    value.elts[position] = self.expression(element, place, visible)
                    behind += self.whole(place, value)
            return value
        if isinstance(value, ast.IfExp):
            value.test = self.expression(value.test, _Place([]), visible)
            value.body = self.assigned(targets, value.body, visible, behind)
            value.orelse = self.assigned(targets, value.orelse, visible, behind)
            return value
        if is_save(value) or _is_save_call(value):
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            names = [name for name in names if visible is None or name in visible]
            others = self.known([target for target in targets if not isinstance(target, ast.Name)], visible)
            place = _Place(others, met=bool(others) and is_save(value), taken=bool(names or others))
            if others and not is_save(value):
                place.functions.append(value.func)  # type: ignore[attr-defined]
            result = self.save(value, names, place, visible)
            behind += self.whole(place, value)
            return result
        if isinstance(value, ast.NamedExpr):
            result = self.assigned([*targets, value.target], value.value, visible, behind)
            value.value = result
            return value
        place = _Place(self.known(targets, visible))
        result = self.expression(value, place, visible)
        behind += self.whole(place, value)
        return result

    def bare(self, value: ast.expr, visible: frozenset[str] | None, behind: list[ast.stmt]) -> ast.expr:
        """Rewrite an expression that is a statement."""
        if is_save(value) or _is_save_call(value):
            saved: ast.expr = value.func.value if is_save(value) else value.args[0]  # type: ignore[attr-defined]
            saved = saved.target if isinstance(saved, ast.NamedExpr) else saved
            names = [saved.id] if isinstance(saved, ast.Name) and (visible is None or saved.id in visible) else []
            return self.save(value, names, _Place([], taken=bool(names)), visible)
        place = _Place([])
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            base = _root(value.func.value)
            if base is not None and (value.func.attr in _STORES or base in self.binds):
                place.whole = [base] if visible is None or base in visible else []
        result = self.expression(value, place, visible)
        behind += self.whole(place, value)
        return result

    def known(self, targets: Sequence[ast.expr], visible: frozenset[str] | None) -> list[str]:
        """The variables of the block that the targets store into, in order and once each."""
        names = [name for target in targets for name in _stored(target)]
        return [name for name in dict.fromkeys(names) if visible is None or name in visible]

    def whole(self, place: _Place, node: ast.AST) -> list[ast.stmt]:
        """The statements that save variables as a whole, if the expression had a save in it."""
        result: list[ast.Expr] = []
        for name in place.whole:
            arguments = [ast.Name(name, ast.Load()), self.names([name])]
            if place.met:
                self.saves.certain.add(name)
                result.append(ast.Expr(ast.Call(ast.Name(SAVE, ast.Load()), arguments, [])))
                continue
            for function in place.functions:
                self.saves.possible.add(name)
                call = ast.Call(ast.Name(SAVE_WHOLE, ast.Load()), [_copy(function), *arguments], [])
                result.append(ast.Expr(call))
        return [_at(statement, node) for statement in result]

    def names(self, names: Sequence[str]) -> ast.expr:
        """The names as a tuple in the program, as Python stores them."""
        return ast.Tuple([ast.Constant(mangle(name, self.class_name)) for name in names], ast.Load())

    # ---- expressions

    def expression(self, node: ast.expr, place: _Place, visible: frozenset[str] | None) -> ast.expr:
        """Rewrite the saves in an expression; those without a name of their own are noted in `place`."""
        if is_save(node) or _is_save_call(node):
            saved = node.func.value if is_save(node) else node.args[0]  # type: ignore[attr-defined]
            names = [saved.target.id] if isinstance(saved, ast.NamedExpr) else []
            return self.save(node, names, place, visible)
        if isinstance(node, ast.NamedExpr):
            if is_save(node.value) or _is_save_call(node.value):
                node.value = self.save(node.value, [node.target.id], place, visible)
                return node
            if visible is None and _any_save(node.value):
                # The variable can only be saved once the statement is done; a save of the value itself is as
                # good.
                inner = _Place([], taken=True)
                node.value = self.expression(node.value, inner, visible)
                self.saves.certain.add(node.target.id)
                node.value = _at(
                    ast.Call(ast.Name(SAVE, ast.Load()), [node.value, self.names([node.target.id])], []),
                    node.value,
                )
                return node
        self.children(node, place, visible)
        return node

    def children(self, node: ast.AST, place: _Place, visible: frozenset[str] | None) -> None:
        if isinstance(node, _FUNCTIONS):
            place = _Place([])  # a value saved when some function runs is in no variable of this statement
            visible = frozenset()
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                setattr(node, name, self.expression(value, place, visible))
            elif isinstance(value, list):
                for position, part in enumerate(value):
                    if isinstance(part, ast.expr):
                        value[position] = self.expression(part, place, visible)
                    elif isinstance(part, ast.AST):
                        self.children(part, place, visible)
            elif isinstance(value, ast.AST):
                self.children(value, place, visible)

    def save(self, node: ast.expr, names: list[str], place: _Place, visible: frozenset[str] | None) -> ast.expr:
        """The call that replaces `X.save()` or `save(X)`."""
        assert isinstance(node, ast.Call)
        if visible is not None:
            names = [name for name in names if name in visible]
        inner = _Place([], taken=True)
        if not is_save(node):
            if not names:
                place.functions.append(node.func)
            self.saves.possible.update(names)
            value = self.expression(node.args[0], inner, visible)
            return _at(ast.Call(ast.Name(SAVE_CALL, ast.Load()), [node.func, value, self.names(names)], []), node)
        assert isinstance(node.func, ast.Attribute)
        if not names and not place.whole and not place.taken:
            saved = ast.unparse(node)
            raise CaptureError(f"{self.where(node)}: `{saved}` is saved in no variable of the block; {_REMEDY}.")
        if not names:
            place.met = True
        self.saves.certain.update(names)
        function, value = SAVE, node.func.value
        if isinstance(value, ast.Attribute) and value.attr == "result":
            function, value = SAVE_RESULT, value.value
        value = self.expression(value, inner, visible)
        return _at(ast.Call(ast.Name(function, ast.Load()), [value, self.names(names)], []), node)


def _at(node: _Node, place: ast.AST) -> _Node:
    """Give `node` and what is new below it the position of `place`."""
    return ast.fix_missing_locations(ast.copy_location(node, place))


def _copy(node: ast.expr) -> ast.expr:
    """The same name or chain of attributes once more."""
    if isinstance(node, ast.Attribute):
        return ast.Attribute(_copy(node.value), node.attr, ast.Load())
    assert isinstance(node, ast.Name)
    return ast.Name(node.id, ast.Load())


def _root(node: ast.expr) -> str | None:
    """The variable at the bottom of `name[...][...]`, or None for anything else."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _stored(target: ast.expr) -> Iterator[str]:
    """The variables that assigning to `target` puts the value into."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _stored(element)
    elif isinstance(target, ast.Starred):
        yield from _stored(target.value)
    else:
        root = _root(target)
        if root is not None:
            yield root


def _element(target: ast.expr, position: int, count: int) -> ast.expr | None:
    """The part of a tuple target that takes element `position` of a tuple of `count`, if it can be told."""
    if not isinstance(target, ast.Tuple | ast.List) or len(target.elts) != count:
        return None
    if any(isinstance(element, ast.Starred) for element in target.elts):
        return None
    return target.elts[position]
