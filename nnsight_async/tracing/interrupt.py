"""Raising an exception in a running frame, at an exact instruction.

Python 3.12 and later can watch the instructions of one code object (`sys.monitoring`), which no other tool
notices. Python 3.11 has only the trace function of the thread; what was there before is put back afterwards.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol

__all__ = ["Interrupt", "MonitoredInterrupt", "TracedInterrupt", "interrupt"]

_TraceFunction = Callable[[FrameType, str, Any], Any]


class Interrupt(Protocol):
    """Raises `exception` once, when `frame` is about to run one of the instructions at `offsets`."""

    raised: bool

    def start(self) -> None:
        """Begin to watch the frame."""

    def stop(self) -> None:
        """Stop watching, whether the exception was raised or not."""


def interrupt(frame: FrameType, offsets: frozenset[int], exception: BaseException) -> Interrupt:
    """The interrupt that fits this Python version and the tools that are active in it."""
    if sys.version_info >= (3, 12) and _tool() is not None:
        return MonitoredInterrupt(frame, offsets, exception)
    return TracedInterrupt(frame, offsets, exception)


class TracedInterrupt:
    """An interrupt through the thread's trace function. Debuggers and coverage get theirs back at the end."""

    def __init__(self, frame: FrameType, offsets: frozenset[int], exception: BaseException) -> None:
        self.raised = False
        self._frame = frame
        self._offsets = offsets
        self._exception = exception
        self._before: tuple[Any, Any, bool] = (None, None, False)

    def start(self) -> None:
        """Take over the trace function of this thread and of the frame."""
        frame = self._frame
        self._before = sys.gettrace(), frame.f_trace, frame.f_trace_opcodes
        # settrace looks at which events frames want: ask for opcodes before it is called.
        frame.f_trace_opcodes = True
        frame.f_trace = self._trace
        sys.settrace(_ignore)

    def stop(self) -> None:
        """Put the earlier trace functions back."""
        trace, frame_trace, opcodes = self._before
        self._frame.f_trace_opcodes = opcodes
        self._frame.f_trace = frame_trace
        sys.settrace(trace)

    def _trace(self, frame: FrameType, event: str, argument: object) -> _TraceFunction:
        if frame is self._frame and not self.raised and frame.f_lasti in self._offsets:
            self.raised = True
            raise self._exception
        return self._trace


def _ignore(frame: FrameType, event: str, argument: object) -> None:
    """The trace function for frames that are entered meanwhile: they are none of our business."""


class MonitoredInterrupt:
    """An interrupt through the instruction events of the frame's code."""

    def __init__(self, frame: FrameType, offsets: frozenset[int], exception: BaseException) -> None:
        self.raised = False
        self._frame = frame
        self._offsets = offsets
        self._exception = exception

    def start(self) -> None:
        """Switch on the events of the frame's code, unless another frame of the same code has them on
        already.
        """
        code = self._frame.f_code
        with _lock:
            watching = _watching.setdefault(code, {})
            watching[self._frame] = self
            if len(watching) == 1:
                _set_events(code, on=True)

    def stop(self) -> None:
        """Switch the events off when no other frame of the code waits for them."""
        code = self._frame.f_code
        with _lock:
            watching = _watching.get(code, {})
            watching.pop(self._frame, None)
            if not watching and _watching.pop(code, None) is not None:
                _set_events(code, on=False)

    def instruction(self, offset: int) -> None:
        """Called before each instruction of the frame."""
        if not self.raised and offset in self._offsets:
            self.raised = True
            raise self._exception


_lock = threading.RLock()
_watching: dict[CodeType, dict[FrameType, MonitoredInterrupt]] = {}
_TOOLS = (4, 3, 5)  # 0 to 2 are meant for debuggers, coverage and profilers
_chosen: list[int | None] = []


if sys.version_info >= (3, 12):

    def _tool() -> int | None:
        """The number this package has among monitoring tools; None when all are taken."""
        with _lock:
            if not _chosen:
                free = [number for number in _TOOLS if sys.monitoring.get_tool(number) is None]
                _chosen.append(free[0] if free else None)
                if free:
                    sys.monitoring.use_tool_id(free[0], "nnsight_async")
                    events = sys.monitoring.events
                    sys.monitoring.register_callback(free[0], events.INSTRUCTION, _instruction)
            return _chosen[0]

    def _set_events(code: CodeType, *, on: bool) -> None:
        tool = _tool()
        assert tool is not None
        sys.monitoring.set_local_events(tool, code, sys.monitoring.events.INSTRUCTION if on else 0)

    def _instruction(code: CodeType, offset: int) -> None:
        watching = _watching.get(code)
        if watching is not None:
            waiting = watching.get(sys._getframe(1))
            if waiting is not None:
                waiting.instruction(offset)

else:

    def _tool() -> int | None:
        """No monitoring in this Python version."""
        return None

    def _set_events(code: CodeType, *, on: bool) -> None:
        raise NotImplementedError
