"""What a block's locations, skips, calls and parameters come down to in the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

import torch

from nnsight_async.errors import UnsupportedError
from nnsight_async.tree import ModuleRef, Side, describe, is_operation, split_operation
from nnsight_async.worker.calls import call
from nnsight_async.worker.hooks import Hooks, Instead
from nnsight_async.worker.interleaver import Interleaver
from nnsight_async.worker.parameters import Parameters
from nnsight_async.worker.runners.layers import check_callable, is_split, true_weight
from nnsight_async.worker.skips import Skips


class WorkerReader:
    """Serves the module tree inside a block; see :class:`nnsight_async.tree.Reader`."""

    def __init__(
        self,
        interleaver: Interleaver,
        hooks: Hooks,
        skips: Skips,
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._interleaver = interleaver
        self._hooks = hooks
        self._skips = skips
        self._context = context
        self._parameters = Parameters(true_weight)

    def read(self, path: str, side: Side) -> Any:
        """Wait for a location at the block's step and return the request's rows of its value."""
        if self._skips.any or is_operation(path):
            self._check(path)
        return self._interleaver.wait_for((path, side))

    def write(self, path: str, side: Side, value: Any) -> None:
        """Replace the request's rows of a location's value."""
        self._check(path)
        self._interleaver.replace((path, side), value)

    def skip(self, path: str, replacement: Any) -> None:
        """Have ``replacement`` stand for the request's rows of a module's output."""
        self._check(path)
        if self._interleaver.splits((path, "out")):
            raise UnsupportedError(
                f"{path} cannot be skipped here: each tensor-parallel rank has its own part of its output; replace "
                "the output instead, which puts every part in its place"
            )
        self._interleaver.wait_for((path, "in"))
        self._hooks.add((path, "out"))
        self._interleaver.running.places.irregular = True  # what is inside of it is not to be run
        self._skips.skip(path, replacement)

    def call(self, module: ModuleRef, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a module on the block's own tensors."""
        check_callable(module._module, module._path)
        path = module._path
        if self._interleaver.splits((path, "in")) or self._interleaver.splits((path, "out")):
            raise UnsupportedError(
                f"{path} cannot be called here: each tensor-parallel rank has its own part of what goes in and comes "
                "out; call the module that contains it"
            )
        return self._call(module._module, args, kwargs)

    def attribute(self, module: ModuleRef, name: str, value: Any) -> Any:
        """A parameter as the checkpoint has it and read-only; a method so that calling it is a call by the block."""
        if isinstance(value, torch.Tensor):
            if not self._interleaver.alone and is_split(module._module):
                raise UnsupportedError(
                    f"{module._path}.{name} cannot be read here: each tensor-parallel rank has its own part of it; "
                    "read it on an engine of one rank, or from the checkpoint"
                )
            return self._parameters.read(module._module, name, value)
        if name == "forward":
            return module
        if isinstance(value, MethodType) and value.__self__ is module._module:
            return partial(self._call_method, value)
        return value

    def expect_operations(self) -> None:
        """Have forwards show their operations from here on."""
        self._hooks.expect_operations()

    def _check(self, path: str) -> None:
        if not self._interleaver.alone and split_operation(path) is not None:
            raise UnsupportedError(
                f"{describe(path, 'out')} cannot be read here: the operations inside a module work on each "
                "tensor-parallel rank's own part; read the module's input or output"
            )
        self._skips.check(path)
        self._hooks.check_operation(path)

    def _call_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._call(method, args, kwargs)

    def _call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        block = self._interleaver.running  # outside a block the call would be taken for the forward pass's own
        if self._interleaver.joining:
            joined = self._interleaver.joiner.call(function, args, kwargs, self._context)
            if joined is not None and (result := block.join(joined)) is not None:
                return result.value
        self._interleaver.settle()  # a layer may write into memory that it shares with others
        return call(function, args, kwargs, self._context)


def seen_with_skips(interleaver: Interleaver, skips: Skips, key: tuple[str, str], value: Any) -> Instead | None:
    """What happens where a forward pass comes to a module's location."""
    path, side = key
    if side == "out":
        skips.replace(path, value)
    interleaver.visit(key, value)
    return skips.instead(path, value) if side == "in" else None


def mentions_operations(code: CodeType, namespace: Mapping[str, Any]) -> bool:
    """Whether a program, or a function that it reads, names ``source``: it may ask for an operation at any time."""
    if _mentions(code):
        return True
    functions = [value for value in namespace.values() if isinstance(value, FunctionType)]
    seen: set[int] = set()
    while functions:
        function = functions.pop()
        if id(function) in seen or function.__module__ in _LIBRARIES:
            continue
        seen.add(id(function))
        if _mentions(function.__code__):
            return True
        functions += [
            value
            for name in function.__code__.co_names
            if isinstance(value := function.__globals__.get(name), FunctionType)
        ]
    return False


_LIBRARIES: Final = frozenset({"torch", "torch.functional", "torch.nn.functional"})


def _mentions(code: CodeType) -> bool:
    return "source" in code.co_names or any(_mentions(const) for const in code.co_consts if isinstance(const, CodeType))
