"""The module tree a person addresses, and the locations in it.

The same classes serve both processes. On the client the tree is built from a model on the meta device, so that it can
be printed, walked and bound to variables before an engine exists; inside a block it stands on the worker's own modules,
and reading a location waits for the forward pass to get there. What does the waiting is the :class:`Reader` that the
worker installs; where none is installed, a location says that it can only be read in a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nnsight_async.errors import LocationError, OutsideBlockError

if TYPE_CHECKING:
    from torch import nn

#: A location's side: what goes into a module, or what comes out of it.
Side = Literal["in", "out"]


class Reader(Protocol):
    """Serves the locations that a running block reads and writes."""

    def read(self, path: str, side: Side) -> Any:
        """Wait for the location and return its value, narrowed to the request's own rows."""

    def write(self, path: str, side: Side, value: Any) -> None:
        """Wait for the location and replace its value."""


class _Installed:
    reader: Reader | None = None


def install_reader(reader: Reader | None) -> None:
    """Make ``reader`` serve every location of this process (the worker does this once)."""
    _Installed.reader = reader


def describe(path: str, side: Side) -> str:
    """A location as a person writes it, without the model's own name: ``model.layers.10.output``."""
    word = "output" if side == "out" else "inputs"
    return f"{path}.{word}" if path else word


class ModuleRef:
    """One module of the model: its children are attributes, and its ``output``, ``input`` and ``inputs`` are locations.

    ``model.model.layers[10].mlp`` is a reference; so is ``layers["10"]``. A module list can be iterated, sliced and
    measured with ``len``. An attribute that is no child (``num_heads``, ``weight``) is the module's own: outside a
    block the parameters are on the meta device, inside one they are the worker's.

    Where a module has a child of the name ``output``, ``input`` or ``inputs``, the plain name is the location and the
    child is reached as ``module["output"]``.
    """

    __slots__ = ("_children", "_module", "_path", "_root")

    def __init__(self, module: nn.Module, path: str = "", root: ModuleRef | None = None) -> None:
        self._module = module
        self._path = path
        self._root = root if root is not None else self
        self._children: dict[str, ModuleRef] = {
            name: ModuleRef(child, f"{path}.{name}" if path else name, self._root)
            for name, child in module.named_children()
        }

    @property
    def output(self) -> Any:
        """What the module returned: its tensors narrowed to the request's rows, ``[rows, ...]``, no batch axis.

        A step's rows are the prompt's tokens in the prefill and one token in a decode step. A module that returns a
        tuple gives a tuple.

        Raises:
            OutsideBlockError: read outside a ``with model.trace(...)`` block.
            OutOfOrderError: the forward pass has already left this location.
        """
        return _reader(self._path, "out").read(self._path, "out")

    @output.setter
    def output(self, value: Any) -> None:
        _reader(self._path, "out").write(self._path, "out", value)

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module was called with, as ``(args, kwargs)``, narrowed like :attr:`output`."""
        value: tuple[tuple[Any, ...], dict[str, Any]] = _reader(self._path, "in").read(self._path, "in")
        return value

    @inputs.setter
    def inputs(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        _reader(self._path, "in").write(self._path, "in", value)

    @property
    def input(self) -> Any:
        """The module's first argument: the first positional one, or else the first keyword one."""
        args, kwargs = self.inputs
        if args:
            return args[0]
        if kwargs:
            return next(iter(kwargs.values()))
        raise LocationError(f"{self._path or 'the model'} was called without arguments, so it has no input")

    @input.setter
    def input(self, value: Any) -> None:
        args, kwargs = self.inputs
        if args:
            self.inputs = ((value, *args[1:]), kwargs)
        elif kwargs:
            first = next(iter(kwargs))
            self.inputs = (args, {**kwargs, first: value})
        else:
            raise LocationError(f"{self._path or 'the model'} was called without arguments, so it has no input")

    def at(self, path: str) -> ModuleRef:
        """The module at a dotted path below this one: ``model.at("model.layers.3.mlp")``; ``""`` is this one."""
        found = self
        for name in path.split(".") if path else ():
            found = found._child(name)
        return found

    def named_modules(self) -> Iterator[tuple[str, ModuleRef]]:
        """This module and all below it, as ``(path from the model, reference)``, parents first."""
        yield self._path, self
        for child in self._children.values():
            yield from child.named_modules()

    def _child(self, name: str) -> ModuleRef:
        try:
            return self._children[name]
        except KeyError:
            raise LocationError(self._missing(name)) from None

    def _missing(self, name: str) -> str:
        here = f"module {self._path!r}" if self._path else "the model"
        children = ", ".join(self._children) or "none"
        return f"{here} ({type(self._module).__name__}) has no child {name!r}; its children are: {children}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        child = self._children.get(name)
        if child is not None:
            return child
        try:
            return getattr(self._module, name)
        except AttributeError:
            raise LocationError(self._missing(name)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ModuleRef.__slots__ or name in ("output", "input", "inputs"):
            object.__setattr__(self, name, value)
            return
        here = self._path or "the model"
        raise LocationError(f"{here}.{name} cannot be assigned: the locations of a module are output, input and inputs")

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, str):
            return self._child(index)
        children = list(self._children.values())
        try:
            return children[index]
        except IndexError:
            here = self._path or "the model"
            raise LocationError(f"{here} has {len(children)} children, so index {index} is out of range") from None

    def __iter__(self) -> Iterator[ModuleRef]:
        return iter(self._children.values())

    def __len__(self) -> int:
        return len(self._children)

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._children})

    def __repr__(self) -> str:
        return repr(self._module)


def _reader(path: str, side: Side) -> Reader:
    if _Installed.reader is None:
        raise OutsideBlockError(
            f"{describe(path, side)} can only be read in a block: write it inside `with model.trace(...):`"
        )
    return _Installed.reader
