"""Which values' own code writes only where it says so; asked of the values that a block reads from around it."""

from __future__ import annotations

import functools
from collections import deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch

__all__ = ["ANYTHING", "PURE", "is_harmless", "is_package", "words"]


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


#: Packages whose functions write into their arguments only where their name or a keyword says so.
PURE: Final = words(
    "builtins torch math cmath itertools functools collections einops time random json re string typing dataclasses "
    "copy warnings logging statistics fractions decimal datetime nnsight_async"
)
#: Packages whose objects write into no tensor that they are not given.
_PURE_OBJECTS: Final = PURE | {"numpy", "transformers", "tokenizers", "vllm"}
#: Built-in functions that can do anything.
ANYTHING: Final = words("setattr delattr getattr exec eval compile vars globals locals __import__")
#: How much of a value is looked through.
_MOST_ITEMS: Final = 10_000
_CONTAINERS: Final = (list, tuple, set, frozenset, deque)


def is_package(value: Any) -> bool:
    """Whether a value is a module, a class or a model of ours whose functions only write where they say so.

    A module of the model's that a block calls works on copies of what it is given.
    """
    if _home(type(value)) == "nnsight_async":
        return True
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in PURE
    return isinstance(value, type) and _home(value) in PURE


def is_harmless(value: Any) -> bool:
    """Whether calling a value, or a method of it, or computing with it, writes into nothing it is not told to."""
    pending, seen = [value], 0
    while pending:
        item = pending.pop()
        seen += 1
        if seen > _MOST_ITEMS or not _is_harmless_one(item):
            return False
        if isinstance(item, _CONTAINERS):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend([*item.values(), getattr(item, "default_factory", None)])
    return True


def _is_harmless_one(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _PURE_OBJECTS
    if isinstance(value, (torch.nn.Module, functools.partial, MethodType)):
        return False
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        name = value.__name__
        return not name.endswith("_") and name not in ANYTHING and _home(value) in PURE
    return _home(type(value)) in _PURE_OBJECTS and _home(value) in _PURE_OBJECTS  # a wrapper names what it wraps


def _home(value: Any) -> str:
    """The package that a value, or its type, is of."""
    home = getattr(value, "__module__", None)
    if not isinstance(home, str):  # one of Python's own, or one of torch's functions
        owner = getattr(value, "__self__", None)
        home = getattr(owner, "__module__", None) if isinstance(owner, type) else type(owner).__module__
    return home.partition(".")[0] if isinstance(home, str) else ""
