"""The engine's parameters in a block: to be read and computed with, but not written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from nnsight_async.errors import UnsupportedError

#: Methods that write, beside those whose name ends in an underscore.
_WRITES: Final = frozenset(
    {"__setitem__", "__delitem__", "__set__"}
    | {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
    | {"__ilshift__", "__irshift__"}
)


class ReadOnly(torch.Tensor):
    """A view of an engine's tensor whose methods do not write.

    What is computed from it is an ordinary tensor; a view of it is again one of these.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        target = kwargs["out"] if "out" in kwargs else args[0] if args and _writes(func) else None
        if isinstance(target, (tuple, list)):
            target = next((item for item in target if isinstance(item, cls)), None)
        if isinstance(target, cls):
            raise UnsupportedError(
                "a parameter of the engine cannot be written to in a block, all requests share it: clone() it, or edit "
                "the values that go into its module and come out of it"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return cls._protect(result, {_pointer(arg) for arg in args if isinstance(arg, cls)})

    @classmethod
    def _protect(cls, result: Any, pointers: set[int]) -> Any:
        """Views of the same memory among a function's results, made read-only as well."""
        if isinstance(result, (tuple, list)) and type(result) in (tuple, list):
            return type(result)(cls._protect(item, pointers) for item in result)
        if isinstance(result, np.ndarray):
            result.flags.writeable = False
        elif type(result) is torch.Tensor and result.layout is torch.strided and _pointer(result) in pointers:
            return result.as_subclass(cls)
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return itemgetter(0), ((plain(self),),)  # it leaves the worker as an ordinary tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as an ordinary tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor) if isinstance(tensor, ReadOnly) else tensor


def _writes(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _pointer(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


class Parameters:
    """Hands out the engine's tensors; one that has to be computed is remembered for as long as somebody holds it.

    ``true_weight(module, name, value)`` finds the tensor as the checkpoint has it.
    """

    def __init__(self, true_weight: Callable[[nn.Module, str, torch.Tensor], torch.Tensor]) -> None:
        self._true_weight = true_weight
        self._known: weakref.WeakValueDictionary[tuple[int, str], ReadOnly] = weakref.WeakValueDictionary()

    def read(self, module: nn.Module, name: str, value: torch.Tensor) -> ReadOnly:
        """The tensor ``value``, an attribute ``name`` of ``module``, to be read by a block."""
        known = self._known.get((id(module), name))
        if known is None:
            known = self._true_weight(module, name, value.data).as_subclass(ReadOnly)
            self._known[id(module), name] = known
        return known
