"""Putting saved values into the variables of the frame that holds the with statement."""

from __future__ import annotations

import ctypes
import dis
import inspect
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from nnsight_async.tracing.frames import variables_of

__all__ = ["write_back"]


def write_back(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Bind each name of `values` in `frame`, as if the frame itself had assigned it.

    Local variables, variables shared with nested functions, class attributes under construction and globals
    are all bound where the frame's own code would bind them. Other variables keep what they hold.

    Args:
        frame: the frame with the with statement; it may be running, or suspended at an `await` or a `yield`.
        values: what to bind, by name.
    """
    code = frame.f_code
    local: dict[str, Any] = {}
    for name, value in values.items():
        if code.co_flags & inspect.CO_OPTIMIZED:
            is_local = name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars
        else:
            is_local = name not in _declared_global(code)
        if not is_local:
            frame.f_globals[name] = value
        elif not code.co_flags & inspect.CO_OPTIMIZED and name in code.co_freevars:
            _write_enclosing(frame, name, value)
        else:
            local[name] = value
    if local:
        _write_locals(frame, local)


def _write_locals(frame: FrameType, values: Mapping[str, Any]) -> None:
    # Up to Python 3.12 this takes a fresh copy of a function's variables, so writing all of it back below
    # changes nothing but `values`. From 3.13 on it is a view that writes through.
    with variables_of(frame) as variables:
        for name, value in values.items():
            variables[name] = value
        if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _write_enclosing(frame: FrameType, name: str, value: object) -> None:
    """Bind a variable that a class body declares `nonlocal`: it lives in a function the body is run from."""
    outer = frame.f_back
    while outer is not None:
        if name in outer.f_code.co_cellvars:
            _write_locals(outer, {name: value})
            return
        outer = outer.f_back


@lru_cache(maxsize=256)
def _declared_global(code: CodeType) -> frozenset[str]:
    """The names that a class body or a module declares `global`."""
    return frozenset(
        str(instruction.argval) for instruction in dis.get_instructions(code) if instruction.opname == "STORE_GLOBAL"
    )
