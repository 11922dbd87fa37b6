"""The module tree a person addresses, and the locations in it.

The same classes serve both processes. On the client the tree is built from a model on the meta device, so that it can
be printed, walked and bound to variables before an engine exists; inside a block it stands on the worker's own modules,
and reading a location waits for the forward pass to get there. What does the waiting is the :class:`Reader` that the
worker installs; where none is installed, a location says that it can only be read in a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Protocol

from nnsight_async.errors import LocationError, OutsideBlockError
from nnsight_async.forward import Forward, read_forward

if TYPE_CHECKING:
    from torch import nn

#: A location's side: what goes into a module, or what comes out of it.
Side = Literal["in", "out"]

#: Stands between a module's path and the name of one of its operations; no module has it in its name.
_OPERATION: Final = ":"


class Reader(Protocol):
    """Serves the locations that a running block reads and writes, and the modules that it uses.

    A path is a module's, or that of an operation in a module (see :func:`split_operation`).
    """

    def read(self, path: str, side: Side) -> Any:
        """Wait for the location and return its value, narrowed to the request's own rows."""

    def write(self, path: str, side: Side, value: Any) -> None:
        """Wait for the location and replace its value."""

    def skip(self, path: str, replacement: Any) -> None:
        """Wait for the module's input and have ``replacement`` stand for its output."""

    def call(self, module: ModuleRef, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module on the block's own tensors."""

    def attribute(self, module: ModuleRef, name: str, value: Any) -> Any:
        """What a block gets for an attribute of the module that is no child: a parameter, a method, a number."""

    def expect_operations(self) -> None:
        """Learn that operations are going to be read."""


class _Installed:
    reader: Reader | None = None


def install_reader(reader: Reader | None) -> None:
    """Make ``reader`` serve every location of this process (the worker does this once)."""
    _Installed.reader = reader


def split_operation(path: str) -> tuple[str, str] | None:
    """An operation's path as its module's path and its name; None for the path of a module."""
    module, found, name = path.rpartition(_OPERATION)
    return (module, name) if found else None


def is_operation(path: str) -> bool:
    """Whether a path is that of an operation, see :func:`split_operation`."""
    return _OPERATION in path


def describe(path: str, side: Side) -> str:
    """A location as a person writes it, without the model's own name: ``model.layers.10.output``."""
    word = "output" if side == "out" else "inputs"
    path = path.replace(_OPERATION, ".source.").removeprefix(".")
    return f"{path}.{word}" if path else word


class _Locations:
    """What a module and an operation have in common: the values that go into it and come out of it."""

    __slots__ = ("_path",)

    _path: str

    @property
    def output(self) -> Any:
        """What it returned: its tensors narrowed to the request's rows, ``[rows, ...]``, no batch axis.

        A step's rows are the prompt's tokens in the prefill and one token in a decode step. A tuple that is
        returned gives a tuple.

        Raises:
            OutsideBlockError: read outside a ``with model.trace(...)`` block.
            OutOfOrderError: the forward pass has already left this location.
        """
        reader = _Installed.reader
        if reader is None:
            reader = _reader(self._path, "out")
        return reader.read(self._path, "out")

    @output.setter
    def output(self, value: Any) -> None:
        _reader(self._path, "out").write(self._path, "out", value)

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What it was called with, as ``(args, kwargs)``, narrowed like :attr:`output`."""
        value: tuple[tuple[Any, ...], dict[str, Any]] = _reader(self._path, "in").read(self._path, "in")
        return value

    @inputs.setter
    def inputs(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        _reader(self._path, "in").write(self._path, "in", value)

    @property
    def input(self) -> Any:
        """The first argument: the first positional one, or else the first keyword one."""
        args, kwargs = self.inputs
        if args:
            return args[0]
        if kwargs:
            return next(iter(kwargs.values()))
        raise LocationError(f"{self._name()} was called without arguments, so it has no input")

    @input.setter
    def input(self, value: Any) -> None:
        args, kwargs = self.inputs
        if args:
            self.inputs = ((value, *args[1:]), kwargs)
        elif kwargs:
            first = next(iter(kwargs))
            self.inputs = (args, {**kwargs, first: value})
        else:
            raise LocationError(f"{self._name()} was called without arguments, so it has no input")

    def _name(self) -> str:
        return describe(self._path, "out").removesuffix("output").removesuffix(".") or "the model"


class ModuleRef(_Locations):
    """One module of the model: its children are attributes, and its ``output``, ``input`` and ``inputs`` are locations.

    ``model.model.layers[10].mlp`` is a reference; so is ``layers["10"]``. A module list can be iterated, sliced and
    measured with ``len``. An attribute that is no child (``num_heads``, ``weight``) is the module's own: outside a
    block the parameters are on the meta device, inside one they are the worker's, to be read and not written.

    Where a module has a child of the name ``output``, ``input``, ``inputs``, ``source`` or ``skip``, the plain name is
    what is described here and the child is reached as ``module["output"]``.
    """

    __slots__ = ("_children", "_module", "_root")

    def __init__(self, module: nn.Module, path: str = "", root: ModuleRef | None = None) -> None:
        self._module = module
        self._path = path
        self._root = root if root is not None else self
        self._children: dict[str, ModuleRef] = {
            name: ModuleRef(child, f"{path}.{name}" if path else name, self._root)
            for name, child in module.named_children()
        }

    @property
    def source(self) -> SourceRef:
        """The operations in the module's forward: ``print(attn.source)`` lists them, with the forward's text.

        Each is a location of its own: ``attn.source.split_1.output``.

        Raises:
            UnsupportedError: the forward's source cannot be found or rewritten.
        """
        return SourceRef(self)

    def skip(self, replacement: Any) -> None:
        """In a block: have ``replacement`` stand for the request's rows of the module's output.

        The module is not run at all where every request of the step skips it. Where only some do, or where it holds an
        attention layer (whose keys and values later steps need), it runs and their rows are replaced. Its ``input`` can
        be read before, its ``output`` after, and nothing inside it by this block.

        Args:
            replacement: what the module would have returned, of the same shape and structure.

        Raises:
            ValueError: a shape, or the length of a tuple, is not the output's.
            TypeError: there is no tensor where the output has one.
            OutOfOrderError: the forward pass has passed the module's input.
        """
        _reader(self._path, "out").skip(self._path, replacement)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In a block: run the module, with the worker's weights, on the block's own tensors.

        Modules among the arguments are the worker's (``model.logits_processor(model.lm_head, x)``). The arguments are
        left as they are and the result is the block's own. The call is no visit: no location of the module is reached
        by it.

        Raises:
            OutsideBlockError: called outside a block.
            UnsupportedError: the module holds an attention layer, which cannot run on some rows.
        """
        if _Installed.reader is None:
            raise OutsideBlockError(
                f"{self._name()} can only be called in a block, where its weights are: write it inside "
                "`with model.trace(...):`"
            )
        return _Installed.reader.call(self, args, kwargs)

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
            value = getattr(self._module, name)
        except AttributeError:
            raise LocationError(self._missing(name)) from None
        return value if _Installed.reader is None else _Installed.reader.attribute(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ASSIGNABLE:
            object.__setattr__(self, name, value)
            return
        _refuse_assignment(self._name(), name)

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


_ASSIGNABLE: Final = frozenset({*ModuleRef.__slots__, *_Locations.__slots__, "output", "input", "inputs"})


class SourceRef:
    """The operations in one module's forward, as attributes; printed, the forward's text with their names beside it."""

    __slots__ = ("_forward", "_owner")

    def __init__(self, owner: ModuleRef) -> None:
        if _Installed.reader is not None:
            _Installed.reader.expect_operations()
        self._owner = owner
        self._forward: Forward = read_forward(owner._module)

    def __getattr__(self, name: str) -> OperationRef:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._forward.names:
            raise LocationError(
                f"{self._owner._name()}.source has no operation {name!r}; its operations are: "
                f"{', '.join(self._forward.names) or 'none'}"
            )
        return OperationRef(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._forward.names)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._forward.names})

    def __repr__(self) -> str:
        return self._forward.listing

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, "source")


class OperationRef(_Locations):
    """One call in a module's forward: ``output`` is what it returned, ``input`` and ``inputs`` what it was given.

    Rows are narrowed as in a module's locations. A method's own object (``qkv`` in ``qkv.split(...)``) is not among its
    inputs. An output that is a view of another tensor, as of a split, writes into that tensor.
    """

    __slots__ = ("_operation", "_owner")

    _operation: str
    _owner: ModuleRef

    def __init__(self, owner: ModuleRef, name: str) -> None:
        object.__setattr__(self, "_owner", owner)
        object.__setattr__(self, "_operation", name)
        object.__setattr__(self, "_path", f"{owner._path}{_OPERATION}{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("output", "input", "inputs"):
            _refuse_assignment(self._name(), name)
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<operation {self._name()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (SourceRef(self._owner), self._operation)


def _refuse_assignment(owner: str, name: str) -> NoReturn:
    raise LocationError(f"{owner}.{name} cannot be assigned: only output, input and inputs can")


def _reader(path: str, side: Side) -> Reader:
    if _Installed.reader is None:
        raise OutsideBlockError(
            f"{describe(path, side)} can only be read in a block: write it inside `with model.trace(...):`"
        )
    return _Installed.reader
