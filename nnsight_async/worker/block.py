"""One request's block while it runs: a greenlet, its variables, and what it waits for."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final

import greenlet
import torch

from nnsight_async.changes import Change, Shadow
from nnsight_async.errors import BlockFailure, HeldViewError
from nnsight_async.protocol import BlockState, Stop
from nnsight_async.tracing import CompiledProgram, source_line
from nnsight_async.worker.controls import Controls
from nnsight_async.worker.keep import Shown
from nnsight_async.worker.mutation import Mutation
from nnsight_async.worker.rows import tensors_of
from nnsight_async.worker.taps import Places

if TYPE_CHECKING:
    from nnsight_async.worker.caching import CacheSpec
    from nnsight_async.worker.gathering import Gathering
    from nnsight_async.worker.joined import Call, Result

#: A place in a step: a module's path and side, or one of the two places around the sampler.
Key = tuple[str, str]
LOGITS: Final[Key] = ("", "logits")
SAMPLES: Final[Key] = ("", "samples")


class StopRequest(BaseException):
    """Raised by ``tracer.stop()`` to leave the block; the request ends at this step."""


class RequestOver(BaseException):
    """Thrown into a block that waits for a step its request will not make, to unwind it."""


class Waiting:
    """What a parked block waits for: a key at a step, or (``key`` None) the beginning of a step, or the result."""

    __slots__ = ("key", "result", "step")

    def __init__(self, key: Key | None, step: int, *, result: bool = False) -> None:
        self.key = key
        self.step = step
        self.result = result


class Block:
    """A program bound to one request.

    ``step`` is the request's current step; ``cursor`` the step that the block is reading, which a loop over steps
    moves. ``namespace`` holds the block's variables, ``saved`` those marked by ``.save()``, ``caches`` what it has
    declared to be captured; ``cast`` is the type in which floating-point tensors are sent.
    """

    def __init__(
        self,
        request_id: str,
        program: CompiledProgram,
        mutation: Mutation,
        namespace: dict[str, Any],
        controls: Controls,
        cast: torch.dtype | None = None,
    ) -> None:
        self.request_id = request_id
        self.program = program
        self.namespace = namespace
        self.step = -1
        self.cursor = 0
        self.rows = (0, 0)  # its first row in this step's tensors, and its last + 1
        self.index = 0  # its row where requests have one each
        self.waiting: Waiting | None = None
        self.visit: Shown | None = None  # what it is being shown: readable until it waits for something else
        self.saved: dict[str, Any] = {}
        self.marked: dict[int, Any] = {}
        self.state: BlockState | None = None  # set once the block has ended
        self.failure: BlockFailure | None = None
        self.shadow = Shadow()
        self.controls = controls
        self.cast = cast
        self.caches: list[CacheSpec] = []
        self.has_waited = False
        self.places = Places()  # the program's own, which its blocks share
        self.noted: set[Key] = self.places.prefill  # where in it the step in progress is noted
        self.edits = False  # whether it may write into what it is shown
        self._mutation = mutation
        # What the caller brings along may be held by something else of the caller's too.
        self._only_grow = mutation.only_grow.difference(program.program.reads)
        self.started = False
        self.result: Any = None  # the RequestOutput, once the block has been given it
        self.calling: Call | None = None  # what it waits for where it waits for a call that others make as well
        self.again: tuple[Key, Any] | None = None  # what it was shown before that, in memory of its own by now
        self.gathering: Gathering | None = None  # a loop whose turn, where the block waits, is run without it
        self.rest: Any = None  # what a comprehension goes on with whose first items were gathered
        self._greenlet = greenlet.greenlet(self._run)
        self._frame: FrameType | None = None  # that of the program, once it had to be looked for
        self._lines: dict[int, str] = {}

    @property
    def ended(self) -> bool:
        """Whether the block has run to its end, failed, or stopped."""
        return self.state is not None

    def park(self, waiting: Waiting) -> Any:
        """Called in the block: wait, and return what the visit brings."""
        self.waiting = waiting
        self.has_waited = True
        return self._greenlet.parent.switch()  # to what resumed it

    def join(self, call: Call) -> Result | None:
        """Called in the block: wait until a call has been run with others; None where the block is to run it itself."""
        if self.visit is not None:
            for tensor in tensors_of((call.args, call.kwargs)):
                self.visit.hand_out(tensor)
        self.calling = call
        try:
            result: Result | None = self._greenlet.parent.switch()
        finally:
            self.calling = None
        return result

    def resume(self, value: Any = None, visit: Shown | None = None) -> None:
        """Called on the forward thread: run the block until it waits again or ends.

        Whatever it then still holds of the memory shown to it is given other memory.
        """
        self.waiting = None
        self.visit = visit
        self.started = True
        self._greenlet.parent = greenlet.getcurrent()
        self._greenlet.switch(value if visit is None else visit.value)
        while visit is not None:
            calling = self.calling
            if calling is not None:
                self.again = visit.key, visit.value  # it may go on with it when the call has been run
            self.visit = visit.value = None  # the last reference to the value that is not the block's own
            if not visit.held() or self._release(visit) or self.ended:
                return
            visit.undo()
            if calling is not None and self.again is not None:  # then it runs the call itself, now
                self.visit, visit.value, self.again = visit, self.again[1], None
                self._greenlet.switch(None)
                continue
            self.throw(
                HeldViewError(
                    "a view of the value just read is held where it cannot be kept safe from being overwritten (in the "
                    "middle of an expression, in a comprehension of a function that the block calls, or in an object "
                    "of a type of its own); clone() it, or assign it to a variable, before reading the next location"
                )
            )

    def throw(self, error: BaseException) -> None:
        """Raise ``error`` in a parked block, at the line it waits on, and run it until it waits again or ends."""
        self.waiting = None
        self._greenlet.parent = greenlet.getcurrent()
        self._greenlet.throw(error)

    def fail(self, error: BaseException) -> None:
        """End the block because of an error that is not its own code's."""
        self.failure = self._describe(error)
        self.state = BlockState.FAILED

    def _run(self, _: Any = None) -> None:
        try:
            exec(self.program.code, self.namespace)
            self.state = BlockState.DONE
        except StopRequest:
            self.controls.apply(Stop())
            self.state = BlockState.STOPPED
        except RequestOver:
            self.state = BlockState.DONE
        except BaseException as error:
            self.fail(error)
        finally:
            self._frame = None

    def _describe(self, error: BaseException) -> BlockFailure:
        where, tb = "", error.__traceback__
        line: TracebackType | None = tb
        first: TracebackType | None = None
        while line is not None:
            if line.tb_frame.f_code is self.program.code:
                first = first or line
                where = self._line(line.tb_lineno)
            line = line.tb_next
        return BlockFailure.of(error, where, first)

    def _line(self, number: int) -> str:
        line = self._lines.get(number)
        if line is None:
            source = source_line(self.program.program, number)
            place = f"{self.program.program.filename}:{number}"
            line = self._lines[number] = f"{place}: {source.strip()}" if source else place
        return line

    def line(self) -> str:
        """The line the parked block waits on, as ``file:line: source``."""
        frame = self._frame
        if frame is None:
            frame = self._frame = next((f for f in self._frames() if f.f_code is self.program.code), None)
        return self._line(frame.f_lineno) if frame is not None else ""

    def _frames(self) -> Iterator[FrameType]:
        frame = self._greenlet.gr_frame
        while frame is not None:
            yield frame
            frame = frame.f_back

    def _release(self, shown: Shown) -> bool:
        frame = self._frame
        if frame is not None:
            dead = self.program.dead.get(frame.f_lasti)
            if dead is not None:
                return shown.release(self.namespace, dead, self.saved, self._helpers)
        elif not self.ended:
            frame = self._frame = next(f for f in self._frames() if f.f_code is self.program.code)
        dead = self.program.dead_names(frame.f_lasti if frame is not None else None, self.saved)
        return shown.release(self.namespace, dead, self.saved, self._helpers)

    def _helpers(self) -> list[dict[str, Any]]:
        """What the block has saved, and the variables of functions that it is in the middle of calling."""
        helpers: list[dict[str, Any]] = [self.saved]
        for frame in self._frames():
            if frame.f_code is self.program.code:
                break
            if not frame.f_globals.get("__name__", "").startswith("nnsight_async."):
                helpers.append(frame.f_locals)
        return helpers

    def mark(self, value: Any, names: tuple[str, ...]) -> Any:
        """``.save()``: keep ``value`` under ``names``; without a name, under those that come to hold it."""
        if names:
            for name in names:
                self.saved[name] = value
        else:
            self.marked[id(value)] = value
        return value

    def changes(self) -> dict[str, Change]:
        """What the saved values have changed by since this was last asked."""
        mutates = self._mutation.possible(self.namespace)
        only_grow = self._only_grow if self.namespace.get("list", list) is list else ()
        return self.shadow.update(self._collect(), mutates=mutates, only_grow=only_grow)

    def _collect(self) -> dict[str, Any]:
        """The saved values as they are now, by name."""
        if self.marked:
            for name in self.program.program.binds:
                value = self.namespace.get(name)
                if id(value) in self.marked and not isinstance(value, (int, str, float, bytes, bool, type(None))):
                    self.saved[name] = value
        return self.saved

    def hold(self, value: Any) -> None:
        """Take note of a view that the block may hold where no variable leads to it."""
        if self.visit is not None:
            for tensor in tensors_of(value):
                self.visit.hand_out(tensor)

    def forget_saves(self) -> None:
        """Let go of all that is saved, so that it is not sent again."""
        self.saved.clear()
        self.marked.clear()

    def pickled_failure(self) -> bytes:
        """The failure as it travels, empty if the block has not failed."""
        return pickle.dumps(self.failure) if self.failure is not None else b""
