"""Loops that do nothing but collect a location of one module after the other.

``for layer in model.model.layers: hidden.append(layer.output[0])`` needs no code of the block's own between two of the
layers. What the loop goes over becomes ``__gather__(...)``, which may append all but the last by itself and then gives
the last to the loop; where it cannot, it gives the loop all there is. ``[layer.output[0] for layer in ...]`` becomes
``[*__gathered__(...), *[layer.output[0] for layer in __rest__()]]`` likewise. The worker's side is
:mod:`nnsight_async.worker.gathering`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from nnsight_async.tracing.chains import MODULE_LOCATIONS
from nnsight_async.tracing.holds import HOLD

__all__ = ["GATHER", "GATHERED", "LAST_ROW", "REST", "gather_loops"]

#: ``__gather__(items, name, base, path, side, subscripts, added, cloned)``: appends to the list that the variable
#: ``name`` is; returns the items that are left for the loop. Item by item, the module is the item itself, or
#: ``base[item]`` where ``base`` is not empty, and ``path`` below that; ``subscripts`` are what its value is subscripted
#: with. ``added``, if not empty, are the items of the value that are added up, or ``(None,)`` for all, before that.
#: ``cloned`` says that ``clone()`` is called on the value itself, which then has to be a tensor.
GATHER: Final = "__gather__"
#: The same with a new list, which it returns; what is left is what ``__rest__()`` returns.
GATHERED: Final = "__gathered__"
REST: Final = "__rest__"
#: The subscript ``-1:``.
LAST_ROW: Final = "-1:"

#: Attributes of a module reference that are never the child of that name.
_NO_CHILD: Final = MODULE_LOCATIONS | {"source", "skip"}
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, slots=True)
class _Place:
    """What is read of each item: the arguments of ``__gather__`` from ``base`` on."""

    base: str
    path: str
    side: str
    subscripts: tuple[int | str, ...] = ()
    added: tuple[int | None, ...] = ()
    cloned: bool = False

    def arguments(self) -> list[Any]:
        return [self.base, self.path, self.side, self.subscripts, self.added, self.cloned]


def gather_loops(body: list[ast.stmt]) -> list[ast.stmt]:
    """``body`` with such loops of its own rewritten; what stands in functions stays as it is."""
    return [cast(ast.stmt, _Loops().visit(statement)) for statement in body]


class _Loops(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, _FUNCTIONS):
            return node
        if isinstance(node, ast.For):
            self.generic_visit(node)
            return _loop(node)
        if isinstance(node, _COMPREHENSIONS):  # what stands in it is a scope of its own
            return _comprehension(node) if isinstance(node, ast.ListComp) else node
        return self.generic_visit(node)


def _loop(node: ast.For) -> ast.AST:
    match node:
        case ast.For(target=ast.Name(id=item), body=[ast.Expr(value)]):
            match _plain(value):
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[kept], keywords=[]) if (
                    name != item
                ):
                    place = _place(kept, item)
                    if place is not None:
                        node.iter = _call(GATHER, [node.iter], [name, *place.arguments()], kept)
    return node


def _comprehension(node: ast.ListComp) -> ast.AST:
    match node.generators:
        case [ast.comprehension(target=ast.Name(id=item), iter=items, ifs=[], is_async=0)]:
            place = _place(node.elt, item)
            if place is not None:
                first = _call(GATHERED, [items], place.arguments(), node.elt)
                node.generators[0].iter = _call(REST, [], [], node.elt)
                parts: list[ast.expr] = [ast.Starred(first, ast.Load()), ast.Starred(node, ast.Load())]
                return ast.fix_missing_locations(ast.copy_location(ast.List(parts, ast.Load()), node))
    return node


def _call(name: str, values: list[ast.expr], constants: list[Any], where: ast.expr) -> ast.expr:
    """A call that stands, in tracebacks, where the block reads the location."""
    arguments = [*values, *[ast.Constant(value) for value in constants]]
    return ast.fix_missing_locations(ast.copy_location(ast.Call(ast.Name(name, ast.Load()), arguments, []), where))


def _place(node: ast.expr, item: str) -> _Place | None:
    """What ``node`` reads of each item, if that is all that it does."""
    match _plain(node):
        case ast.Call(func=ast.Attribute(value=inner, attr="clone"), args=[], keywords=[]):
            place = _place(inner, item)  # what is kept is a copy anyway
            return place if place is None or place.subscripts or place.added else replace(place, cloned=True)
        case ast.Call(func=ast.Name(id="sum"), args=[whole], keywords=[]) if item != "sum":
            place = _location(whole, item)
            return None if place is None else _Place(place.base, place.path, place.side, added=(None,))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            match _place(left, item), _place(right, item):
                case (
                    _Place(subscripts=(int() as one, *rest), added=()) as first,
                    _Place(subscripts=(int() as other, *others), added=()) as second,
                ) if rest == others and _whole(first) == _whole(second):
                    return _Place(first.base, first.path, first.side, tuple(rest), (one, other))
            return None
        case ast.Subscript(value=inner, slice=index):
            place, subscript = _place(inner, item), _subscript(index)
            if place is None or subscript is None or place.cloned or len(place.subscripts) > 1:
                return None
            return replace(place, subscripts=(*place.subscripts, subscript))
        case other:
            return _location(other, item)


def _whole(place: _Place) -> _Place:
    return _Place(place.base, place.path, place.side)


def _subscript(node: ast.expr) -> int | str | None:
    match _plain(node):
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)) if not isinstance(value, bool):
            return -value
        case ast.Slice(lower=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)), upper=None, step=None):
            return LAST_ROW
    return None


def _location(node: ast.expr, item: str) -> _Place | None:
    """``item.a.b.output``, or ``base[item].a.b.output``."""
    match _plain(node):
        case ast.Attribute(value=module, attr="output" | "input" as attribute):
            side = "out" if attribute == "output" else "in"
        case _:
            return None
    root, names = _chain(module)
    path = ".".join(names)
    match root:
        case ast.Name(id=name) if name == item:
            return _Place("", path, side)
        case ast.Subscript(value=whole, slice=ast.Name(id=name)) if name == item:
            root, names = _chain(whole)
            if isinstance(root, ast.Name) and root.id != item:
                return _Place(".".join([root.id, *names]), path, side)
    return None


def _chain(node: ast.expr) -> tuple[ast.expr, list[str]]:
    """What a chain of modules' names begins at, and the names."""
    names: list[str] = []
    node = _plain(node)
    while isinstance(node, ast.Attribute) and node.attr not in _NO_CHILD:
        names.insert(0, node.attr)
        node = _plain(node.value)
    return node, names


def _plain(node: ast.expr) -> ast.expr:
    """An expression without what :mod:`nnsight_async.tracing.holds` has wrapped it in."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == HOLD:
        node = node.args[0]
    return node
