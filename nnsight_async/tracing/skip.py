"""Keeping the interpreter from running a block in the caller.

Python has no way for a context manager to say that its body should not run. An exception can be raised in the
frame at an exact instruction, though, and the with statement's own exit can swallow it; that is what happens
here.
"""

from __future__ import annotations

import dis
from collections import OrderedDict
from types import CodeType, FrameType

from nnsight_async.errors import CaptureError
from nnsight_async.tracing.bytecode import HandlerRange, handler_at, handler_ranges
from nnsight_async.tracing.interrupt import Interrupt, interrupt
from nnsight_async.tracing.source import BlockSource
from nnsight_async.tracing.writeback import write_back

__all__ = ["BodySkip", "SkipBody"]

_UNKNOWN = object()


class SkipBody(BaseException):
    """Raised at a block's first instruction and swallowed when its with statement ends; never seen by a user."""


class BodySkip:
    """Skips the body of one with statement, once.

    `__enter__` ends with `skip.arm(entered)`; `__exit__` begins with `skipped = skip.disarm(exc_type, exc)`,
    and returns True if `skipped` is.
    """

    def __init__(self, frame: FrameType, source: BlockSource) -> None:
        self._frame: FrameType | None = frame
        self._source = source
        self._interrupt: Interrupt | None = None
        self._exception: SkipBody | None = None
        self._target: tuple[str, object] | None = None

    def arm(self, entered: object = _UNKNOWN) -> None:
        """Have the body skipped. To be called last in `__enter__`, or last in the coroutine of `__aenter__`.

        Args:
            entered: what `__enter__` returns. A block that begins with `try` can only be skipped before its
                `as` target is bound; this is then bound to it.

        Raises:
            CaptureError: the statement enters a further context manager behind this one, or the block cannot
                be skipped where it stands.
        """
        frame, source = self._frame, self._source
        if frame is None:
            raise RuntimeError("this skip has been used")
        if not source.is_last_item:
            raise CaptureError(
                f"{source.where}: the trace has to be the last context manager of its with statement; "
                "move the others in front of it."
            )
        offsets, early = _plan(frame.f_code, frame.f_lasti, source)
        if not offsets:
            return  # nothing in it does anything
        if early and source.has_target:
            if source.target is None or entered is _UNKNOWN:
                raise CaptureError(
                    f"{source.where}: a block that begins with `try` needs a plain name behind `as`, "
                    "or another statement in front of the `try`."
                )
            self._target = source.target, entered
        self._exception = SkipBody()
        self._interrupt = interrupt(frame, offsets, self._exception)
        self._interrupt.start()

    def disarm(self, exc_type: type[BaseException] | None, exc: BaseException | None) -> bool:
        """Stop watching the frame, and say whether the body ended by being skipped.

        To be called first in `__exit__` or `__aexit__`; a second call does nothing and returns False.

        Raises:
            CaptureError: the body ran to its end here although it should have been skipped.
        """
        frame, watching, exception, target = self._frame, self._interrupt, self._exception, self._target
        self._frame = self._interrupt = self._exception = self._target = None
        if watching is None or frame is None:
            return False
        watching.stop()
        if not watching.raised and exc_type is None:
            raise CaptureError(
                f"{self._source.where}: the block ran here instead of being sent to the model: another tool "
                "took over the trace function (sys.settrace) while it was entered."
            )
        if exception is None or exc is not exception:
            return False
        exception.__traceback__ = None  # or the exception would keep the caller's frame alive
        if target is not None:
            write_back(frame, dict([target]))
        return True


_plans: OrderedDict[tuple[int, int], tuple[CodeType, frozenset[int], bool]] = OrderedDict()
_PLANS_KEPT = 1024


def _plan(code: CodeType, entering: int, source: BlockSource) -> tuple[frozenset[int], bool]:
    """The byte offsets to raise at, and whether they lie before the instruction that binds the `as` target."""
    key = (id(code), entering)  # holding the code below keeps its id from being given to another
    kept = _plans.get(key)
    if kept is None:
        body = sorted(offset for offset in _body(code, source) if offset > entering)
        kept = _plans[key] = (code, *_choose(code, body))
        if len(_plans) > _PLANS_KEPT:
            _plans.popitem(last=False)
    return kept[1], kept[2]


def _body(code: CodeType, source: BlockSource) -> set[int]:
    """The offsets of the instructions that lie in the body."""
    start, end = (source.first_line, source.first_column), (source.last_line, source.last_column)
    offsets: set[int] = set()
    for index, (line, end_line, column, end_column) in enumerate(code.co_positions()):
        if line is None or end_line is None:
            continue
        if column is None or end_column is None:
            if source.first_line <= line <= source.last_line:
                if source.inline:
                    raise CaptureError(
                        f"{source.where}: put the block on a line of its own; without column numbers "
                        "(-X no_debug_ranges) it cannot be told from the with statement."
                    )
                offsets.add(index * 2)
        elif start <= (line, column) and (end_line, end_column) <= end:
            offsets.add(index * 2)
    return offsets


def _choose(code: CodeType, body: list[int]) -> tuple[frozenset[int], bool]:
    """Where in a body an exception goes straight to the exit of its with statement."""
    if not body:
        return frozenset(), False
    ranges = handler_ranges(code)
    before = body[0] - 2  # binds the `as` target, or drops what was entered
    leaving = handler_at(ranges, before)
    for offset in body:
        if handler_at(ranges, offset) == leaving:
            return _with_handler(body, ranges, leaving), False
        # The instructions of `pass` and `try:` stand outside of all protection, and do nothing.
        if dis.opname[code.co_code[offset]] not in ("NOP", "CACHE"):
            return frozenset([before]), True
    return frozenset(), False


def _with_handler(body: list[int], ranges: list[HandlerRange], handler: int | None) -> frozenset[int]:
    return frozenset(offset for offset in body if handler_at(ranges, offset) == handler)
