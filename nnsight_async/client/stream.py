"""``tracer.backend``: a trace's outputs as they come, on the caller's own event loop."""

from __future__ import annotations

import asyncio
import math
import operator
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, Self, SupportsIndex

from nnsight_async.client.output import StepOutput
from nnsight_async.errors import ArgumentError, LoopCutShortWarning, RequestOverError
from nnsight_async.protocol import EditLogits, ForceSamples, Message, SetLive, Stop


@dataclass
class CutShort:
    """A loop over steps that was cut short, on its way to the caller, where it becomes a warning.

    ``where`` is the loop's line, as ``file:line: source``.
    """

    where: str
    _given: bool = False

    def emit(self) -> None:
        """Give the warning, at the loop's own line; the second time does nothing."""
        if self._given:
            return
        self._given = True
        place, _, _ = self.where.partition(": ")
        filename, _, line = place.rpartition(":")
        warnings.warn_explicit(
            f"the loop at {self.where} asked for a step that the request did not make, so it was cut short: values "
            "saved inside the loop are kept, and the statements after it did not run. An open loop (tracer.all(), "
            "tracer.iter[:]) always ends this way; bound it (tracer.iter[:n]) where something follows",
            LoopCutShortWarning,
            filename or "<block>",
            int(line) if line.isdigit() else 1,
        )


#: What a stream holds: an output with what to call once it is read, the error of an invoke, or a warning about one.
Item = tuple[StepOutput, Callable[[], None]] | BaseException | CutShort


class Control(Protocol):
    """What a stream asks of its trace, on the caller's loop."""

    async def close(self) -> None:
        """Abort the requests that are still running and free everything of them."""

    async def send(self, message: Message, invoke: int | None) -> int | list[int | None]:
        """Send a message to one invoke, or to all of them."""

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """Values as they travel to the worker."""


class Stream:
    """The outputs of all invokes of one trace, in the order in which they come, and the way to act on them.

    * ``async for output in stream`` yields one :class:`StepOutput` for each step of each invoke. An invoke's error is
      raised where its next output would have been; iterating on goes on with the other invokes.
    * ``await stream`` takes out all that is left and returns the last output.
    * ``async with stream`` closes it at the end, whatever happens: the requests still running are aborted and freed.
    * :meth:`stop`, :meth:`force`, :meth:`edit_logits` and :meth:`set` act on the running requests.

    One consumer at a time, on one event loop; messages can be sent by any task of it meanwhile.
    """

    def __init__(self, invokes: int, control: Control) -> None:
        self._items: deque[Item] = deque()
        self._lock = threading.Lock()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._running = invokes
        self._control: Control | None = control
        self._last: StepOutput | None = None
        self._closed = False

    # On the engine's loop.

    def put(self, item: Item) -> None:
        """Add an output, the error of an invoke, or a warning about one."""
        with self._lock:
            if not self._closed:
                self._items.append(item)
                self._wake()
                return
        if isinstance(item, tuple):
            item[1]()

    def ended(self) -> None:
        """Count one invoke as over."""
        with self._lock:
            self._running -= 1
            self._wake()
        if not self._running:
            self._control = None  # it refers back to the stream: what was saved is to go with its last reader

    def _wake(self) -> None:
        if self._waiter is not None:
            loop, event = self._waiter
            self._waiter = None
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    # On the caller's loop: taking out.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepOutput:
        while True:
            item = await self._next()
            if isinstance(item, tuple):
                self._last, read = item
                read()
                return self._last
            if isinstance(item, CutShort):
                item.emit()
                continue
            try:
                raise item
            finally:
                del item  # or the error would refer to itself through this frame

    async def _next(self) -> Item:
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                if not self._running:
                    raise StopAsyncIteration
                if self._waiter is not None:
                    raise ArgumentError("the stream is being consumed already: it has one consumer at a time")
                event = asyncio.Event()
                self._waiter = waiter = (asyncio.get_running_loop(), event)
            try:
                await event.wait()
            finally:
                with self._lock:
                    if self._waiter is waiter:  # cancelled while waiting
                        self._waiter = None

    def __await__(self) -> Generator[Any, None, StepOutput]:
        return self._drain().__await__()

    async def _drain(self) -> StepOutput:
        async for _ in self:
            pass
        if self._last is None:
            raise ArgumentError("the stream has no output: it was closed, or its error was raised before")
        return self._last

    async def aclose(self) -> None:
        """Abort the requests that are still running and drop what has not been taken out."""
        self._closed = True
        try:
            if self._control is not None:
                await self._control.close()
        finally:
            with self._lock:
                items, self._items = self._items, deque()
            for item in items:
                if isinstance(item, tuple):
                    item[1]()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    # On the caller's loop: acting on the running requests.

    async def stop(self, *, invoke: int | None = None) -> int | list[int | None]:
        """End the requests, with ``finish_reason`` "stop" and ``stop_reason`` "tracer.stop".

        A request whose next step is on its way to the device makes that step, which is its last. A block that is in a
        loop over steps leaves it, as at ``tracer.stop()``.

        Args:
            invoke: the one invoke that is meant, counted from 0; all of them by default.

        Returns:
            The step from which the message holds, here the last step; where several invokes are meant, a list of these,
            None for those that are over already.

        Raises:
            RequestOverError: it is over, or all of them are.
        """
        return await self._send(Stop(), invoke)

    async def force(self, tokens: int | str | Sequence[int], *, invoke: int | None = None) -> int | list[int | None]:
        """Have the next sampled tokens be these, in order.

        They are as if drawn: the model goes on from them, and logprobs are theirs. What is forced while earlier tokens
        are still to come is appended to them.

        Args:
            tokens: a token id, a list of them, or a text, which the model's tokenizer turns into ids.
            invoke: as for :meth:`stop`.

        Returns:
            As :meth:`stop`: the step at which the first of them is drawn, unless earlier ones are still to come.

        Raises:
            RequestOverError: it is over, or all of them are.
            ArgumentError: they are no token ids, or an id is outside the vocabulary.
        """
        ids = self._running_control().encode(tokens) if isinstance(tokens, str) else _token_ids(tokens)
        return await self._send(ForceSamples(ids), invoke)

    async def edit_logits(
        self, bias: Mapping[int, float] | None, *, invoke: int | None = None
    ) -> int | list[int | None]:
        """Add numbers to the logits of some tokens, at every step until this is called again.

        Args:
            bias: what is added, by token id; ``-inf`` bans a token. It replaces an earlier one whole; None clears.
            invoke: as for :meth:`stop`.

        Returns:
            As :meth:`stop`.

        Raises:
            RequestOverError: it is over, or all of them are.
            ArgumentError: it is no dict of numbers by token id, or an id is outside the vocabulary.
        """
        return await self._send(EditLogits({} if bias is None else _bias(bias)), invoke)

    async def set(
        self, values: Mapping[str, Any] | None = None, /, *, invoke: int | None = None, **named: Any
    ) -> int | list[int | None]:
        """Have ``tracer.live(name, default)`` return these values in the block from now on.

        Args:
            values: values by name, for names that are no keywords; the others are given as keywords.
            invoke: as for :meth:`stop`.
            named: numbers, strings, tensors and small containers of them. Tensors arrive on the model's device.

        Returns:
            As :meth:`stop`. All that is set in one call holds from the same step.

        Raises:
            RequestOverError: it is over, or all of them are.
            ArgumentError: the block reads no such name.
            CaptureError: a value cannot be sent.
        """
        if values is not None and not (isinstance(values, Mapping) and all(isinstance(name, str) for name in values)):
            raise ArgumentError(f"stream.set takes a dict of values by name, or keywords, not {values!r}")
        control = self._running_control()
        return await self._send(SetLive(control.pack({**(values or {}), **named})), invoke)

    async def _send(self, message: Message, invoke: int | None) -> int | list[int | None]:
        return await self._running_control().send(message, invoke)

    def _running_control(self) -> Control:
        if self._control is None or self._closed:
            raise RequestOverError(OVER)
        return self._control


def _token_ids(tokens: Any) -> list[int]:
    if isinstance(tokens, SupportsIndex) and not getattr(tokens, "ndim", 0):
        return [_token_id(tokens)]
    if isinstance(tokens, (bytes, Mapping)) or not isinstance(tokens, Iterable):
        raise ArgumentError(f"tokens are a token id, a list of them or a text, not {tokens!r}")
    return [_token_id(token) for token in tokens]


def _token_id(token: Any) -> int:
    try:
        if not isinstance(token, bool):
            return operator.index(token)
    except (TypeError, ValueError):
        pass
    raise ArgumentError(f"a token id is an integer, not {token!r}")


def _bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ArgumentError(f"a logit bias is a dict of numbers by token id, not {bias!r}")
    numbers = {}
    for token, value in bias.items():
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isnan(number):
            raise ArgumentError(f"the bias of token {token!r} is {value!r}: not a number (-inf bans the token)")
        numbers[_token_id(token)] = number
    return numbers


#: What is said to a message that comes too late.
OVER: Final = "the request is over: there is nothing left that the message could act on"
