"""The operations of a module: the calls that its forward method makes, named, listed, and made observable.

Some of what a person wants to read has no module: queries after a reshape, the parts of a fused projection. The text of
the module's forward is parsed, and each call in it gets a name, ``split_1`` for the first call of something ``split``.
To look at them, the forward is compiled anew with every call ``f(x)`` turned into ``operate("split_1", f, x)``.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CellType, CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final

from nnsight_async.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import nn

#: Called as ``operate(name, function, *args, **kwargs)`` in place of ``function(*args, **kwargs)``.
Operate = Callable[..., Any]

_OPERATE: Final = "__operate__"
_FACTORY: Final = "__factory__"
_FUTURE: Final = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


@dataclass(frozen=True, slots=True)
class Forward:
    """A class's forward method and the operations in it.

    ``names`` are those of the operations, in the order of the text; ``listing`` is the text with the names beside it.
    """

    function: FunctionType
    names: tuple[str, ...]
    listing: str
    code: CodeType

    def bind(self, module: nn.Module, operate: Operate) -> Callable[..., Any]:
        """The module's forward, with every operation run through ``operate``."""
        function = self.function
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells[_OPERATE] = CellType(operate)
        closure = tuple(cells[name] for name in self.code.co_freevars)
        own = FunctionType(self.code, function.__globals__, function.__name__, function.__defaults__, closure)
        own.__kwdefaults__ = function.__kwdefaults__
        return MethodType(own, module)


def read_forward(module: nn.Module) -> Forward:
    """Find the operations in the forward of a module's class.

    Raises:
        UnsupportedError: the forward is not a plain function whose source can be found; the message says why.
    """
    function = inspect.getattr_static(type(module), "forward")
    if getattr(function, "__name__", "") == "_forward_unimplemented":
        raise UnsupportedError(f"{type(module).__name__} has no forward of its own, so it has no operations")
    return _read(function)


@cache
def _read(function: Any) -> Forward:
    where = getattr(function, "__qualname__", repr(function))
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        raise _refusal(where, "it is wrapped by a decorator")
    try:
        lines, first = inspect.getsourcelines(function)
        node = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise _refusal(where, "its source cannot be found") from error
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        raise _refusal(where, "it is no plain function")
    named = _name_calls(node, function)
    listing = _list_lines(f"{function.__module__}.{where}", lines, named)
    class_name = where.rpartition(".")[0].rpartition(".")[2].lstrip("_")
    node.body = [_Rewriter(named, class_name).visit(statement) for statement in node.body]
    return Forward(function, tuple(named.values()), listing, _compile(node, function, first))


def _refusal(where: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the operations of {where} cannot be addressed: {why}; read the module's own input and output, or its children"
    )


def _name_calls(node: ast.FunctionDef, function: FunctionType) -> dict[ast.Call, str]:
    """The calls in a function's body with their names, in the order in which their callees are written."""
    calls = [inner for statement in node.body for inner in ast.walk(statement) if isinstance(inner, ast.Call)]
    calls.sort(key=lambda call: (call.func.end_lineno or 0, call.func.end_col_offset or 0))
    counts: Counter[str] = Counter()
    named: dict[ast.Call, str] = {}
    for call in calls:
        if isinstance(call.func, ast.Name):
            name = call.func.id
            # Python's own functions say nothing about the model, and super() and locals() must stay where they are.
            if hasattr(builtins, name) and name not in function.__globals__:
                continue
        else:
            name = call.func.attr if isinstance(call.func, ast.Attribute) else "call"
        counts[name] += 1
        named[call] = f"{name}_{counts[name]}"
    return named


def _list_lines(title: str, lines: list[str], named: dict[ast.Call, str]) -> str:
    beside: dict[int, list[str]] = {}
    for call, name in named.items():
        beside.setdefault(call.func.end_lineno or 1, []).append(name)
    margins = [", ".join(beside.get(number, ())) for number in range(1, len(lines) + 1)]
    width = max(map(len, margins), default=0)
    text = textwrap.dedent("".join(lines)).splitlines()
    body = (f"{margin:>{width}} | {line}".rstrip() for margin, line in zip(margins, text, strict=True))
    return "\n".join([title, *body])


class _Rewriter(ast.NodeTransformer):
    """Turns each named call ``f(x)`` into ``operate(name, f, x)``, and private names into what the class makes them."""

    def __init__(self, named: dict[ast.Call, str], class_name: str) -> None:
        self._named = named
        self._class_name = class_name

    def visit_Call(self, node: ast.Call) -> ast.Call:
        name = self._named.get(node)
        self.generic_visit(node)
        if name is not None:
            node.args = [ast.copy_location(ast.Constant(name), node.func), node.func, *node.args]
            node.func = ast.copy_location(ast.Name(_OPERATE, ast.Load()), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        if node.attr.startswith("__") and not node.attr.endswith("__"):
            node.attr = f"_{self._class_name}{node.attr}"
        return node


def _compile(node: ast.FunctionDef, function: FunctionType, first_line: int) -> CodeType:
    """The code of a rewritten forward; what it took from its surroundings is free in it, as it was before."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    node.returns = None
    given = [_OPERATE, *function.__code__.co_freevars]
    factory = ast.parse(f"def {_FACTORY}({', '.join(given)}): pass").body[0]
    assert isinstance(factory, ast.FunctionDef)
    factory.body = [node]
    ast.increment_lineno(node, first_line - 1)
    tree = ast.fix_missing_locations(ast.Module([factory], []))
    flags = function.__code__.co_flags & _FUTURE
    module = compile(tree, function.__code__.co_filename, "exec", flags, dont_inherit=True)
    return _inner(_inner(module, _FACTORY), node.name)


def _inner(code: CodeType, name: str) -> CodeType:
    return next(const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name)
