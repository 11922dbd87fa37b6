"""Everything that can go wrong, in one hierarchy.

Whatever this package raises on purpose is a :class:`NnsightAsyncError`, so one ``except`` catches it all; each class
says in one line what happened, and its message names the thing and the remedy.
"""

from __future__ import annotations

import os
import pickle
import traceback
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Final

_PACKAGE = os.path.dirname(__file__) + os.sep


class NnsightAsyncError(Exception):
    """Base class of every error this package raises on purpose."""


class ArgumentError(NnsightAsyncError, ValueError):
    """An argument is misspelled, out of range, or contradicts what tracing needs."""


class PromptError(ArgumentError):
    """A prompt the engine cannot serve: empty, too long, of the wrong kind, or several where one is meant."""


class SourceError(NnsightAsyncError):
    """The source text of a block could not be found, so the block cannot be shipped to the worker."""


class CaptureError(NnsightAsyncError):
    """A block, or a value it reads, cannot be shipped to the worker."""


class OutsideBlockError(NnsightAsyncError):
    """A location was read, or a value saved, outside a block."""


class LocationError(NnsightAsyncError, AttributeError, IndexError):
    """A module path that is not in the tree, or a location that its module does not have."""


class OutOfOrderError(NnsightAsyncError):
    """A block reads a location that the forward pass has already left."""


class NeverReachedError(NnsightAsyncError):
    """A block waits for a location that the forward pass did not come to."""


class HeldViewError(NnsightAsyncError):
    """A block holds a piece of the engine's own memory where it cannot be found and kept safe."""


class RanksDifferError(NnsightAsyncError):
    """A block did not do the same on every rank of a tensor-parallel engine."""


class EngineError(NnsightAsyncError):
    """The engine could not start, or has died."""


class ClosedError(NnsightAsyncError):
    """The model, or the request, is closed."""


class RequestOverError(ClosedError):
    """A message was sent to a request that is over."""


class MailboxFullError(NnsightAsyncError):
    """A request was ended because its caller does not read what it saves as fast as it comes."""


class UnsupportedError(NnsightAsyncError, NotImplementedError):
    """Something this engine does not do; the message says what to do instead."""


#: What is said once an engine has died.
ENGINE_DIED: Final = (
    "the engine has died, and with it every request that was running; its processes' own messages, on stderr, say why. "
    "Close this model and start it anew"
)
#: Why there is no barrier, in the caller and in a block.
NO_BARRIER: Final = (
    "tracer.barrier is not available: each invoke is a request of its own and runs when the scheduler takes it, so "
    "invokes cannot wait for one another; save the value in one trace and use it in a second one"
)
#: Why there is no scan.
NO_SCAN: Final = (
    "scan is not available: vLLM's modules cannot run on shapes alone; read the shapes off model.<path>.weight, which "
    "is on the meta device before the engine starts, or trace one token (max_tokens=1)"
)


class LoopCutShortWarning(UserWarning):
    """A loop over steps asked for a step that the request did not make.

    An open loop (``tracer.all()``, ``tracer.iter[:]``) always ends this way. What was saved in the loop is kept; the
    statements after the loop did not run.
    """


class BlockError(NnsightAsyncError):
    """A block raised while it ran in the worker.

    The error in the caller is a :class:`BlockError` and also an instance of the type that was raised, so both
    ``except BlockError`` and ``except ZeroDivisionError`` catch a ``1/0`` in a block.

    Attributes:
        invoke: which invoke of the trace it was, counted from 0.
        where: the block's own line, as ``file:line: source``; empty if it is not known.
        remote_traceback: the traceback in the worker, as text.
    """

    invoke: int = 0
    where: str = ""
    remote_traceback: str = ""


@dataclass(frozen=True)
class BlockFailure:
    """A block's error as it travels from the worker to the client.

    ``error`` is the pickled exception where it can be pickled, else empty; ``type_name`` and ``message`` say what it
    was in either case.
    """

    type_name: str
    message: str
    where: str
    remote_traceback: str
    error: bytes = b""

    @classmethod
    def of(cls, error: BaseException, where: str, tb: TracebackType | None) -> BlockFailure:
        """Describe ``error``; ``tb`` is the part of its traceback that is the user's own."""
        described = traceback.TracebackException(type(error), error, tb)
        described.stack = traceback.StackSummary.from_list(
            [frame for frame in described.stack if not frame.filename.startswith(_PACKAGE)]
        )
        lines = described.format()
        try:
            data = pickle.dumps(error.with_traceback(None))
            pickle.loads(data)  # an exception with an __init__ of its own often pickles and does not come back
        except Exception:
            data = b""
        return cls(type(error).__name__, str(error), where, "".join(lines), data)

    def to_exception(self, invoke: int) -> BlockError:
        """The exception to raise in the caller, with the original as its cause where there is one."""
        original: BaseException | None = None
        if self.error:
            try:
                original = pickle.loads(self.error)
            except Exception:
                original = None
        return self._error(original, invoke)

    def _error(self, original: BaseException | None, invoke: int) -> BlockError:
        kind: type[BlockError] = BlockError
        if original is not None:
            kind = _block_error_type(type(original))  # type: ignore[arg-type]  # mypy: a class is hashable
        message = self.message if kind is not BlockError else f"{self.type_name}: {self.message}"
        text = f"{message}\n  in the block at {self.where}" if self.where else message
        error = kind.__new__(kind)
        error.args = (text,)
        error.invoke, error.where, error.remote_traceback = invoke, self.where, self.remote_traceback
        error.add_note(f"in the worker:\n{self.remote_traceback.rstrip()}")
        error.__cause__ = original
        return error


@cache
def _block_error_type(original: type[BaseException]) -> type[BlockError]:
    """A class that is both a BlockError and ``original``, or BlockError where Python does not allow the mix."""
    if not issubclass(original, Exception) or issubclass(original, BaseExceptionGroup):
        return BlockError

    def to_text(self: BlockError) -> str:
        return str(self.args[0]) if self.args else ""

    try:
        # KeyError and others print their argument their own way, so the text is fixed here.
        return type(original.__name__, (BlockError, original), {"__str__": to_text, "__module__": original.__module__})
    except TypeError:
        return BlockError
