"""The requests of one trace: their coroutines on the engine's loop, their stream, and the messages to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nnsight_async.client.invoke import Invoke
from nnsight_async.client.output import StepOutput
from nnsight_async.client.stream import OVER, Stream
from nnsight_async.engine.arguments import did_you_mean
from nnsight_async.errors import ArgumentError, RequestOverError
from nnsight_async.protocol import EditLogits, ForceSamples, Message
from nnsight_async.tracing import dumps

if TYPE_CHECKING:
    from nnsight_async.model import VLLM


class Run:
    """A trace that has been submitted.

    ``streamed`` says that each output is for somebody to take out of the stream; else only the last of each invoke is.
    ``reference`` is how the model's own objects in values travel.
    """

    def __init__(
        self,
        model: VLLM,
        invokes: Sequence[Invoke],
        reference: Callable[[object], tuple[Any, ...] | None],
        *,
        streamed: bool,
    ) -> None:
        self.invokes = invokes
        self._model = model
        self._reference: Callable[[object], tuple[Any, ...] | None] | None = reference
        self._streamed = streamed
        self._keeps_last = model.mode == "async"
        self.stream = Stream(len(invokes), self)
        for invoke in invokes:
            invoke.emit = self._emit
        self._task: asyncio.Task[None] | None = None
        self.done: Future[None] = model._connection.start(self._run())

    # On the engine's loop.

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        try:
            if len(self.invokes) == 1:  # no task of its own, which a short request would notice
                await self._run_invoke(self.invokes[0])
            else:
                await asyncio.gather(*(self._run_invoke(invoke) for invoke in self.invokes))
        finally:
            self._reference = self._task = None  # they refer back: what was saved is to go with its last reader

    async def _run_invoke(self, invoke: Invoke) -> None:
        try:
            await invoke.run(self._model._connection)
        finally:
            if invoke.error is not None and self._streamed:
                self.stream.put(invoke.error)
                invoke.error = None  # whoever is told of it has frames that lead here, and it leads to the frames
            for loop in invoke.cut_short:
                self.stream.put(loop)
            self.stream.ended()

    def _emit(self, output: StepOutput, read: Callable[[], None]) -> None:
        if self._streamed or (output.finished and self._keeps_last):
            self.stream.put((output, read))
        else:
            read()

    async def _abort(self) -> None:
        """End the invokes that are still running, and wait until everything of them is freed."""
        task = self._task
        if task is not None and not task.done():
            if not all([invoke.abort() for invoke in self.invokes]):
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _message(self, message: Message, numbers: Sequence[int]) -> list[int | None]:
        """Send a message to invokes; the step from which it holds in each, None for one that is over."""
        ids = {number: await self.invokes[number].running_ids() for number in numbers}
        steps = await self._model._connection.send_message([i for found in ids.values() for i in found], message)
        held: list[int | None] = []
        for number, found in ids.items():
            running = set(await self.invokes[number].running_ids())  # as it is now
            held.append(max((steps[i] for i in found if i in running and steps[i] >= 0), default=None))
        return held

    # What the stream asks for, on the caller's loop (nnsight_async.client.stream.Control).

    async def close(self) -> None:
        """Close the trace; a caller that is cancelled meanwhile does not undo it."""
        if not self.done.done():
            await asyncio.shield(self._model._connection.wait(self._abort()))

    async def send(self, message: Message, invoke: int | None) -> int | list[int | None]:
        """Send a message to one invoke, or to all of them; the step from which it holds in each.

        Raises:
            RequestOverError: it is over, or all of them are.
            ArgumentError: there is no such invoke, or it cannot take the message.
        """
        count = len(self.invokes)
        if invoke is not None and not (isinstance(invoke, int) and 0 <= invoke < count):
            raise ArgumentError(f"there is no invoke {invoke!r}: the trace has {count}, counted from 0")
        self._check(message)
        numbers = range(count) if invoke is None else [invoke]
        steps = await self._model._connection.wait(self._message(message, numbers))
        if all(step is None for step in steps):
            raise RequestOverError(OVER)
        return steps if len(steps) > 1 else steps[0]  # type: ignore[return-value]  # the only one is not None

    def _check(self, message: Message) -> None:
        ids: Collection[int] = ()
        if isinstance(message, ForceSamples):
            ids = message.token_ids
        elif isinstance(message, EditLogits):
            ids = message.bias.keys()
        vocabulary = self._model._config.model_config.get_vocab_size()
        for token_id in ids:
            if not 0 <= token_id < vocabulary:
                raise ArgumentError(f"token id {token_id} is outside the vocabulary of {vocabulary} tokens")

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens.

        Raises:
            ArgumentError: it is no valid Unicode.
        """
        try:
            ids: list[int] = self._model.tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, ValueError) as error:  # a tokenizer's own word for half of a surrogate pair
            raise ArgumentError(f"the text {text!r} cannot be tokenized: {error}") from error
        return ids

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """Values for ``tracer.live`` as they travel.

        Raises:
            ArgumentError: no block of the trace reads one of the names.
            CaptureError: a value cannot be sent.
            RequestOverError: all of the trace is over.
        """
        known = [invoke.live_names for invoke in self.invokes]
        names = frozenset[str]().union(*(found for found in known if found is not None))
        for name in values:
            if name not in names and None not in known:
                close = did_you_mean(name, set(names))
                raise ArgumentError(f"no block of this trace reads tracer.live({name!r}){close}")
        if self._reference is None:
            raise RequestOverError(OVER)
        return dumps(values, self._reference, where="stream.set()")
