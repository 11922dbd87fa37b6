"""One invoke: one prompt with its block, one vLLM request, one coroutine.

Two streams come in for it, each in order: vLLM's outputs, and the worker's entries. The output with ``k + 1`` tokens
and the entry of step ``k`` belong together; whichever is first waits for the other.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import torch
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from nnsight_async import changes, wire
from nnsight_async.client.cache import Share
from nnsight_async.client.ledger import Account
from nnsight_async.client.output import StepOutput
from nnsight_async.client.sequence import SequenceState
from nnsight_async.client.stream import CutShort
from nnsight_async.errors import (
    ENGINE_DIED,
    CaptureError,
    ClosedError,
    EngineError,
    MailboxFullError,
    NnsightAsyncError,
)
from nnsight_async.protocol import STOPPED_BY_TRACER, BlockState, Entry
from nnsight_async.saving import RESULT
from nnsight_async.tracing import Program

if TYPE_CHECKING:
    from nnsight_async.client.connection import Connection


_CLOSED: Final = "the request was closed before it was over"

#: Takes in a joined output, and what to call once it is read.
Emit = Callable[[StepOutput, Callable[[], None]], None]


class Invoke:
    """The coroutine that manages one request, and what has come of it.

    ``resolve`` finds what references in saved values stand for; without it the request is not traced, and no entries
    are waited for. ``device`` is where saved tensors are put, if not left on the host. ``emit`` is called on the
    engine's loop with each joined output, as it comes, and with what to call, from any thread, once the output is read.
    ``reads_result`` says that the block may wait for the request's result; ``live_names`` are the live values that it
    reads, None if that is not known.
    """

    def __init__(
        self,
        number: int,
        prompt: Any,
        params: SamplingParams,
        resolve: wire.Resolve | None,
        *,
        device: torch.device | None = None,
        program: Program | None = None,
        reads_result: bool = False,
        live_names: frozenset[str] | None = None,
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.params = params
        self.program = program
        self.live_names = live_names
        self._single = params.max_tokens == 1
        self.error: BaseException | None = None
        self.output: StepOutput | None = None
        self.sequences: dict[int, SequenceState] = {}
        self.cut_short: list[CutShort] = []
        self._by_id: dict[str, SequenceState] = {}
        self._resolve = resolve
        self._device = device
        self.emit: Emit = _no_emit
        self._account: Account | None = None
        self._registered = asyncio.Event()
        self._reads_result = reads_result
        self._over = asyncio.Event()
        self._final = asyncio.Event()
        self._whole: RequestOutput | None = None
        self._connection: Connection | None = None
        self._internal_id: str | None = None

    async def run(self, connection: Connection) -> None:
        """Submit the request and stay until it is over; the error, if any, is kept in ``error``."""
        self._connection = connection
        try:
            try:
                self._internal_id = await connection.submit(self)
                await self._over.wait()
                if self.error is None:
                    await self._finish()
            except asyncio.CancelledError:
                self.error = self.error or ClosedError(_CLOSED)
                raise
            except NnsightAsyncError as error:
                self.error = error
            except Exception as error:
                self.error = _engine_error(error)
        finally:
            connection.forget(self)
            try:
                if not self.over or self.error is not None:
                    # A cancel must not keep the engine from hearing of it.
                    await asyncio.shield(connection.abort(self))
            finally:
                self._close()

    def abort(self) -> bool:
        """End the request as closed; returns False while it is still being submitted, when a cancel has to do it.

        A cancel's traceback would hold what was saved until the collector comes.
        """
        if self._internal_id is None:
            return False
        self._fail(ClosedError(_CLOSED))
        return True

    def _close(self) -> None:
        """Let go of what is only needed while the request runs: the values have to go with their last reader."""
        self._over.set()
        self._registered.set()
        self._resolve = None  # it refers back to the tracer
        self.emit = _no_emit
        dropped = 0
        for sequence in self.sequences.values():
            dropped += sequence.unread + sum(_size(entry) for entry, _ in sequence.waiting_entries.values())
            dropped += sum(sequence.captured_bytes.values())
            sequence.captured_bytes.clear()
            sequence.saves = sequence.with_caches(sequence.step, dict(sequence.saves), single=self._single)
            sequence.shares.clear()
            sequence.unread = 0
            sequence.waiting_outputs.clear()
            sequence.waiting_entries.clear()
            sequence.new = {}
        if self._account is not None:
            self._account.read(dropped)
            self._account.finish()

    @property
    def result(self) -> RequestOutput:
        """vLLM's RequestOutput of the finished request, with the completions of all its sequences."""
        assert self.output is not None
        if self._whole is None:
            self._whole = self._assemble(self.output)
        return self._whole

    @property
    def over(self) -> bool:
        """Whether the request has ended."""
        return self._over.is_set()

    async def running_ids(self) -> list[str]:
        """Wait until the request is submitted; the worker's ids of its sequences that are not over."""
        await self._registered.wait()
        return [] if self.over else [s.internal_id for s in self.sequences.values() if not s.finished]

    @property
    def internal_id(self) -> str | None:
        """The id under which the engine knows the request, once it is submitted."""
        return self._internal_id

    @property
    def worker_ids(self) -> list[str]:
        """The ids under which the worker knows the request's sequences."""
        return list(self._by_id)

    def may_want_result(self) -> list[str]:
        """The worker's ids of sequences whose blocks may be waiting for the result: the worker keeps those.

        What a block waits for now is not known here if its last entry is still on its way.
        """
        ended = (BlockState.DONE, BlockState.FAILED, BlockState.STOPPED)
        waiting = [s.internal_id for s in self.sequences.values() if s.state not in ended and s.final is None]
        return waiting if self._reads_result else []

    @property
    def saves(self) -> dict[str, Any]:
        """The saved names: each one's value, or with ``n > 1`` the list of the sequences' values."""
        ordered = [self.sequences[index] for index in sorted(self.sequences)]
        if self.params.n == 1:
            return ordered[0].saves if ordered else {}
        names = dict.fromkeys(name for sequence in ordered for name in sequence.saves)
        values = {name: [s.saves[name] for s in ordered if name in s.saves] for name in names}
        # The result is the request's, not a sequence's: its outputs are the sequences.
        return {name: v[0] if all(isinstance(o, RequestOutput) for o in v) else v for name, v in values.items()}

    # The two streams in; called on the engine's loop.

    def registered(self, internal_id: str, index: int) -> None:
        """Learn the worker's id of a sequence."""
        self.sequences[index] = self._by_id[internal_id] = SequenceState(index, internal_id)
        if self._resolve is not None and self._connection is not None:
            self._connection.mailbox.receivers[internal_id] = self
            if self._account is None:
                self._account = self._connection.mailbox.ledger.open()
        if len(self.sequences) == self.params.n:
            self._registered.set()

    def put(self, output: RequestOutput | Exception) -> None:
        """Take in vLLM's output, or the error that ended the engine."""
        if isinstance(output, Exception):
            self._fail(_engine_error(output))
            return
        for completion in output.outputs:
            # vLLM goes on appending to these lists; an output is to stay as it is.
            completion.token_ids = list(completion.token_ids)
            completion.logprobs = completion.logprobs and completion.logprobs[:]
            sequence = self.sequences[completion.index]
            sequence.completion = completion
            sequence.waiting_outputs.append((len(completion.token_ids) - 1, output))
            self._join(sequence)

    def receive(self, entry: Entry, tensor_bytes: Any) -> None:
        """Take in the worker's entry of a step."""
        if self.over and not entry.final:
            return
        sequence = self._by_id[entry.request]
        if entry.final:
            sequence.final = (entry, tensor_bytes)
            if not any(s.wants_result for s in self.sequences.values()):
                self._final.set()
            return
        assert self._account is not None
        try:
            self._account.arrive(_size(entry))
        except MailboxFullError as error:
            self._fail(error)
            return
        sequence.waiting_entries[entry.step] = (entry, tensor_bytes)
        self._join(sequence)

    def receive_captured(self, request: str, step: int, number: int, share: Share, nbytes: int) -> None:
        """Take in what was captured for a cache of a sequence in a step, ahead of the step's entry."""
        if self.over:
            return
        sequence = self._by_id[request]
        assert self._account is not None
        try:
            self._account.arrive(nbytes)
        except MailboxFullError as error:
            self._fail(error)
            return
        sequence.shares.setdefault(number, []).append(share)
        sequence.captured_bytes[step] = sequence.captured_bytes.get(step, 0) + nbytes

    def _join(self, sequence: SequenceState) -> None:
        while sequence.waiting_outputs and not self._over.is_set():
            step, output = sequence.waiting_outputs[0]
            if self._resolve is not None and step > sequence.step:
                if step not in sequence.waiting_entries:
                    return
                for passed in range(sequence.step + 1, step + 1):
                    entry, tensor_bytes = sequence.waiting_entries.pop(passed)
                    sequence.unread += _size(entry) + sequence.captured_bytes.pop(passed, 0)
                    self._take(sequence, entry, tensor_bytes)
                    del tensor_bytes
                    if self.error is not None:
                        return
            sequence.waiting_outputs.popleft()
            sequence.step = max(step, sequence.step)
            self._output(sequence, step, output)
            if not sequence.ended:
                sequence.new = {}

    def _take(self, sequence: SequenceState, entry: Entry, tensor_bytes: Any) -> None:
        sequence.state, sequence.where = entry.state, entry.where
        assert self._resolve is not None
        assert self._connection is not None
        try:
            if entry.changes:
                loader = self._connection.mailbox.loader
                changed = loader.load(entry.changes, tensor_bytes, self._resolve, self._device)
                sequence.saves = changes.apply(sequence.saves, changed)
                sequence.new |= changes.added(sequence.saves, changed)
            if entry.error:
                self._fail(pickle.loads(entry.error).to_exception(self.number))
        except Exception as error:
            self._fail(CaptureError(f"what the block saved cannot be rebuilt here: {type(error).__name__}: {error}"))
            return

    def _output(self, sequence: SequenceState, step: int, output: RequestOutput) -> None:
        completion = next(c for c in output.outputs if c.index == sequence.index)
        joined = StepOutput.of(
            output,
            invoke=self.number,
            step=step,
            sequence=sequence.index,
            saves=sequence.with_caches(step, _without_result(sequence.saves), single=self._single),
            new=_without_result(sequence.new) | sequence.newly_captured(step),
        )
        if completion.finish_reason is not None:
            sequence.ended = True
            if completion.finish_reason == "abort" and self.error is None:
                self.error = ClosedError(_CLOSED)
        if all(s.ended for s in self.sequences.values()):
            self.output = joined  # emitted by _finish, with what is saved at the very end
            self._over.set()
        else:
            self._emit_read(sequence, joined)

    def _emit_read(self, sequence: SequenceState, output: StepOutput) -> None:
        """Emit an output; what came with it counts as unread until it is read."""
        account, unread = self._account, sequence.unread
        sequence.unread = 0
        self.emit(output, _nothing if account is None else lambda: account.read(unread))

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self._over.set()
        self._final.set()

    # The end.

    async def _finish(self) -> None:
        """Put the result where the block wants it, note loops that were cut short, emit the last output."""
        assert self.output is not None
        assert self._connection is not None
        result = self.result
        waiting = [s for s in self.sequences.values() if s.wants_result]
        if waiting:
            data = cloudpickle.dumps(result)
            for sequence in waiting:
                await self._connection.send_result(sequence.internal_id, data)
            await self._final.wait()
            for sequence in waiting:
                assert sequence.final is not None
                self._take(sequence, *sequence.final)
                sequence.final = (sequence.final[0], None)
        for sequence in self.sequences.values():
            stopped = sequence.completion is not None and sequence.completion.stop_reason == STOPPED_BY_TRACER
            if sequence.state is BlockState.LOOPING and not stopped:  # else its end is what somebody asked for
                self.cut_short.append(CutShort(sequence.where))
            sequence.saves = {name: _with_result(value, result) for name, value in sequence.saves.items()}
        last = self.sequences[self.output.sequence]
        new = {name: _with_result(value, result) for name, value in last.new.items()}
        self.output.new = new | last.newly_captured(last.step)
        for sequence in self.sequences.values():
            sequence.saves = sequence.with_caches(sequence.step, sequence.saves, single=self._single)
        self.output.saves = last.saves
        if self.error is not None:
            return
        if self.params.n > 1:
            self.output.outputs = result.outputs
        self._emit_read(last, self.output)

    def _assemble(self, last: RequestOutput) -> RequestOutput:
        """The request's own RequestOutput, with the completions of all its sequences."""
        result = RequestOutput.__new__(RequestOutput)
        result.__dict__.update({k: v for k, v in last.__dict__.items() if k not in StepOutput.__annotations__})
        completions = [s.completion for _, s in sorted(self.sequences.items())]
        result.outputs = [completion for completion in completions if completion is not None]
        return result


def _size(entry: Entry) -> int:
    """Bytes that an entry takes while it waits to be read."""
    return entry.nbytes + len(entry.changes)


def _nothing() -> None:
    """An output without saved values is nothing to be read."""


def _no_emit(output: StepOutput, read: Callable[[], None]) -> None:
    """Nobody looks at the steps of an untraced request, and one that is over has none."""


def _with_result(value: Any, result: RequestOutput) -> Any:
    """``value`` with the result where the block saved it, in containers too."""
    if value is RESULT:
        return result
    if type(value) is list:
        return [_with_result(item, result) for item in value]
    if type(value) is tuple:
        return tuple(_with_result(item, result) for item in value)
    if type(value) is dict:
        return {key: _with_result(item, result) for key, item in value.items()}
    return value


def _without_result(saves: dict[str, Any]) -> dict[str, Any]:
    """The saves of a step before the last: the result is not there yet."""
    return {name: value for name, value in saves.items() if value is not RESULT}


def _engine_error(error: BaseException) -> NnsightAsyncError:
    if isinstance(error, NnsightAsyncError):
        return error
    died = isinstance(error, EngineDeadError)
    wrapped = EngineError(ENGINE_DIED if died else str(error) or type(error).__name__)
    wrapped.__cause__ = error
    return wrapped
