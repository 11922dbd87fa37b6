"""A frame's variables, without leaving a copy of them behind."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["variables_of"]

_HELD_BY_FRAME = 3  # references to a copy that only its frame holds: that one, our variable, and the argument


@contextmanager
def variables_of(frame: FrameType) -> Iterator[dict[str, Any]]:
    """A frame's variables as a dict, for as long as the context lasts.

    Up to Python 3.12 a function's `f_locals` is a copy that the frame keeps until it returns. It is emptied again, or
    `del model` in a function would not let go of the model, nor of the last trace's tensors; unless somebody else holds
    it, as after a call of `locals()`, or in a debugger.
    """
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        yield frame.f_locals
        return
    variables = frame.f_locals
    ours = sys.getrefcount(variables) == _HELD_BY_FRAME
    try:
        yield variables
    finally:
        if ours:
            variables.clear()
