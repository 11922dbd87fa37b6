"""Which programs may write into the memory that a forward pass works on; read from their source, on the client.

The keys and values of such a request cannot be computed again without its block, so the engine never preempts it. An
edit of the logits or the samples does not count: it changes no keys and values. Guessing too much costs the engine
some freedom, guessing too little costs right values: what is not known to only read counts as writing.
"""

from __future__ import annotations

import ast
import functools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from nnsight_async.tracing.chains import LOCATIONS, MODULE_LOCATIONS, leads_through, root_name
from nnsight_async.tracing.harmless import ANYTHING, PURE, is_harmless, is_package, words
from nnsight_async.tracing.mangle import mangle

__all__ = ["Edits", "find_edits"]

_TYPES: Final = (torch.Tensor, list, dict, set, frozenset, tuple, str, bytes, int, float, range, slice, deque)
#: Methods that write into no tensor, whichever of these types they are called on.
_METHODS: Final = (
    frozenset(name for kind in _TYPES for name in dir(kind) if not name.startswith("_"))
    | {"save", "stop", "all", "at", "named_modules", "live", "cache"}
) - {"data_ptr", "storage", "untyped_storage", "typed_storage", "resize", "resize_as"}
#: Methods that put their arguments into what they are called on.
_PUTS: Final = words("append appendleft extend extendleft insert add update setdefault")
#: What makes a tensor of its own, or a number, of whatever it is given.
_FRESH_METHODS: Final = words(
    "clone sum mean norm item tolist argmax argmin std var abs softmax log_softmax square sqrt exp log matmul stack "
    "cat zeros_like ones_like full_like topk decode size dim numel"
)
_FRESH_BUILTINS: Final = words("len int float bool str repr range round abs isinstance type print")
_FRESH_ATTRIBUTES: Final = words("shape dtype device ndim logits samples tokenizer iter")
_MAKES_CONTAINER: Final = words("list dict set deque defaultdict OrderedDict Counter")
_DISPLAYS: Final = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
#: Where a value is only computed with.
_COMPUTES: Final = (
    ast.BinOp,
    ast.Compare,
    ast.UnaryOp,
    ast.FormattedValue,
    ast.Slice,
    ast.Subscript,
    ast.If,
    ast.While,
)


@dataclass(frozen=True, slots=True)
class Edits:
    """What a program may write into.

    ``always`` says that it writes, or does something unknown. Else it does not if, of the variables it reads from
    around it, those of ``uses`` hold values whose own code writes into nothing, and those of ``packages`` are modules
    of that kind.
    """

    always: bool
    uses: frozenset[str] = frozenset()
    packages: frozenset[str] = frozenset()

    def possible(self, values: Mapping[str, Any]) -> bool:
        """Whether the program may write, the variables that it reads being ``values``."""
        if self.always or any(not is_harmless(values[name]) for name in self.uses if name in values):
            return True
        return not all(is_package(values.get(name)) for name in self.packages)


@functools.lru_cache(maxsize=1024)
def find_edits(wrapped: str, class_name: str | None) -> Edits:
    """Read a program's text, in the form that can be parsed (:attr:`Program.wrapped`)."""
    reading = _Reading(ast.parse(wrapped))
    if reading.writes():
        return Edits(True)
    uses, packages = (frozenset(mangle(name, class_name) for name in names) for names in reading.needs())
    return Edits(False, uses, packages)


class _Reading:
    """One program, without regard to the order of its statements or to the scopes of its functions."""

    def __init__(self, tree: ast.AST) -> None:
        self._nodes = list(ast.walk(tree))
        self._parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._bindings: list[tuple[str, ast.expr]] = []  # a variable, and what it is bound to or what is put into it
        self._unknown: set[str] = set()  # variables bound to what is not known
        self._defined: set[str] = set()  # functions of the block
        self._imported: set[str] = set()
        self._odd = False
        for node in self._nodes:
            self._gather(node)
        bound = {name for name, _ in self._bindings} | self._unknown
        self._bound = bound | self._defined | self._imported
        self._functions = self._defined - bound - self._imported
        self._containers = self._find_containers()
        self._shown = set(self._unknown)
        self._gather_puts()
        self._spread()

    # What is bound to what.

    def _gather(self, node: ast.AST) -> None:
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, node.value)
            case ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
                self._bind(node.target, value)
            case ast.For() | ast.comprehension():
                self._bind(node.target, node.iter)
            case ast.withitem(optional_vars=ast.expr() as target):
                self._bind(target, node.context_expr)
            case ast.FunctionDef():
                self._defined.add(node.name)
                self._odd |= bool(node.decorator_list)
            case ast.arg():
                self._unknown.add(node.arg)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                self._unknown.add(name)
            case ast.ExceptHandler(name=str(name)):
                self._unknown.add(name)
            case ast.Import() | ast.ImportFrom():
                homes = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                self._odd |= any(home.partition(".")[0] not in PURE for home in homes)
                self._odd |= any(alias.name.endswith(("_", "*")) or alias.name in ANYTHING for alias in node.names)
                self._imported |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            case ast.ClassDef() | ast.AsyncFunctionDef():
                self._odd = True

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case (ast.Tuple(elts=names), ast.Tuple(elts=values)) if len(names) == len(values):
                for name, item in zip(names, values, strict=True):
                    self._bind(name, item)
            case _:
                parts = [node for node in ast.walk(target) if isinstance(node, ast.Name)]
                self._bindings += [(part.id, value) for part in parts if isinstance(part.ctx, ast.Store)]

    def _find_containers(self) -> set[str]:
        kinds: dict[str, bool] = {}
        for name, value in self._bindings:
            kinds[name] = kinds.get(name, True) and self._makes_container(value)
        return {name for name, always in kinds.items() if always} - self._unknown - self._defined - self._imported

    def _makes_container(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(attr="save", value=inner)) | ast.BinOp(left=inner, op=ast.Mult()):
                return self._makes_container(inner)
            case ast.Call(func=ast.Name(id="save"), args=[inner]):
                return self._makes_container(inner)
            case ast.Call(func=ast.Name(id=name)):
                return name in _MAKES_CONTAINER
        return isinstance(node, _DISPLAYS)

    def _gather_puts(self) -> None:
        for node in self._nodes:
            match node:
                case ast.Call(func=ast.Attribute(attr=attr, value=base)) if attr in _PUTS:
                    self._put(base, [*node.args, *(keyword.value for keyword in node.keywords)])
                case ast.AugAssign(target=ast.Name(id=name)) if name in self._containers:
                    self._put(node.target, [node.value])
                case ast.Assign():
                    for target in node.targets:
                        if isinstance(target, ast.Subscript):
                            self._put(target.value, [node.value])

    def _put(self, base: ast.expr, values: Iterable[ast.expr]) -> None:
        name = root_name(base)
        if name is not None:
            self._bindings += [(name, value) for value in values]

    # What may be, or hold, memory of the engine's.

    def _spread(self) -> None:
        before = -1
        while len(self._shown) != before:
            before = len(self._shown)
            self._shown |= {name for name, value in self._bindings if self._shows(value)}

    def _shows(self, node: ast.expr) -> bool:
        match node:
            case ast.Name():
                return node.id in self._shown
            case ast.Attribute(attr=attr):
                if attr in MODULE_LOCATIONS or attr in _FRESH_ATTRIBUTES:
                    return attr in MODULE_LOCATIONS
                return self._is_outer(node.value) or self._shows(node.value)
            case ast.Subscript() | ast.Starred() | ast.NamedExpr():
                return self._shows(node.value)
            case ast.Call():
                return self._returns_shown(node)
            case ast.BinOp():  # of lists it makes one with the same items, of anything else something new
                sides = (node.left, node.right)
                return any(self._is_list(side) for side in sides) and any(self._shows(side) for side in sides)
            case ast.UnaryOp():
                return isinstance(node.op, ast.UAdd) and self._shows(node.operand)
            case ast.IfExp():
                return self._shows(node.body) or self._shows(node.orelse)
            case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                return any(self._shows(part) for part in parts)
            case ast.Dict(values=parts):
                return any(self._shows(part) for part in parts)
            case ast.ListComp(elt=item) | ast.SetComp(elt=item) | ast.GeneratorExp(elt=item) | ast.DictComp(value=item):
                return self._shows(item)
            case ast.Constant() | ast.JoinedStr() | ast.Compare() | ast.Lambda() | ast.Slice():
                return False
        return True

    def _returns_shown(self, call: ast.Call) -> bool:
        handed = self._handed(call)
        match call.func:
            case ast.Name(id="sum") if len(call.args) == 1:
                return False
            case ast.Name(id=name):
                return name not in _FRESH_BUILTINS and (name in self._bound or any(map(self._shows, handed)))
            case ast.Attribute(attr=attr, value=base):
                return attr not in _FRESH_METHODS and (self._shows(base) or any(map(self._shows, handed)))
        return True

    def _handed(self, call: ast.Call) -> list[ast.expr]:
        return [*call.args, *(keyword.value for keyword in call.keywords)]

    def _is_outer(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id not in self._bound

    def _is_list(self, node: ast.expr) -> bool:
        return isinstance(node, (ast.Tuple, *_DISPLAYS)) or (isinstance(node, ast.Name) and node.id in self._containers)

    # What is written.

    def writes(self) -> bool:
        """Whether the program writes into what it was shown, or does what is not known."""
        return self._odd or any(map(self._is_write, self._nodes))

    def _is_write(self, node: ast.AST) -> bool:
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                return node.attr not in LOCATIONS - MODULE_LOCATIONS
            case ast.Attribute(attr=attr):
                if attr.endswith("__"):
                    return attr != "__name__"
                return attr.endswith("_") and self._is_odd(node)
            case ast.Subscript(ctx=ast.Store()):
                container = isinstance(node.value, ast.Name) and node.value.id in self._containers
                return not container and self._shows(node.value)
            case ast.AugAssign(target=ast.Subscript(value=base)):
                return self._shows(base)
            case ast.AugAssign(target=ast.Name(id=name)):
                return name in self._shown and name not in self._containers
            case ast.Call():
                return self._may_write(node)
            case ast.Name(ctx=ast.Load()):
                return node.id in ANYTHING and node.id not in self._bound
        return False

    def _is_odd(self, method: ast.Attribute) -> bool:
        """Whether a method that says that it writes may be meant for anything shown."""
        call = self._parents[method]
        if not isinstance(call, ast.Call) or call.func is not method or self._shows(method.value):
            return True
        return any(map(self._shows, self._handed(call)))

    def _may_write(self, call: ast.Call) -> bool:
        shown = any(map(self._shows, self._handed(call)))
        if isinstance(call.func, ast.Attribute):
            shown = shown or self._shows(call.func.value)
        for keyword in call.keywords:
            if keyword.arg in ("out", None) and self._shows(keyword.value):
                return True
            if keyword.arg == "inplace" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                return True
        if shown and any(isinstance(arg, ast.Constant) and arg.value is True for arg in call.args):
            return True  # it may be the one that is called `inplace`
        match call.func:
            case ast.Name(id=name):
                return name in self._bound - self._functions - self._imported
            case ast.Attribute(attr="numpy", value=base):
                return self._shows(base)
            case ast.Attribute():
                return not self._is_known(call.func)
        return True

    def _is_known(self, method: ast.Attribute) -> bool:
        """Whether a method is known to write nothing, or is to be looked for in a package."""
        name = root_name(method)
        if method.attr == "skip":
            return False
        if method.attr in _METHODS or leads_through(method.value, ("tokenizer",)):
            return True
        return name is not None and _is_plain(method) and (name in self._imported or name not in self._bound)

    # What depends on values.

    def needs(self) -> tuple[set[str], set[str]]:
        """The variables around the program whose values' own code it may run, and those that have to be packages."""
        uses = {
            node.id
            for node in self._nodes
            if isinstance(node, ast.Name) and self._is_outer(node) and not self._is_only_read(node)
        }
        packages = set[str]()
        for node in self._nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                method, name = node.func, root_name(node.func)
                if method.attr not in _METHODS and not leads_through(method.value, ("tokenizer",)):
                    packages |= {name} - self._bound if name is not None else set()
        return uses, packages

    def _is_only_read(self, name: ast.Name) -> bool:
        """Whether a value, or a part of it, is only computed with: ``self.scale * x``, ``layers[self.index]``."""
        node: ast.AST = name
        parent = self._parents[node]
        while isinstance(parent, ast.Attribute) or (isinstance(parent, ast.Subscript) and parent.value is node):
            node, parent = parent, self._parents[parent]
        return isinstance(parent, _COMPUTES)


def _is_plain(node: ast.expr) -> bool:
    """A chain of public names, as of a package's function; ``torch.ops`` holds functions that write as they like."""
    while isinstance(node, ast.Attribute):
        if node.attr.startswith("_") or node.attr == "ops":
            return False
        node = node.value
    return isinstance(node, ast.Name)
