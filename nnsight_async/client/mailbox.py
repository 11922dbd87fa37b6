"""Taking out: the client's end of the way up."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import zmq

from nnsight_async import wire
from nnsight_async.client.cache import CapturedStep, Share
from nnsight_async.client.ledger import Ledger
from nnsight_async.client.segments import Segments
from nnsight_async.protocol import Captured, Entry, Post

#: Posts taken out in a row before the loop goes on to something else.
_AT_ONCE: Final = 16


def _nobody_is_told(error: BaseException) -> None:
    """Before receiving has begun."""


class Receiver(Protocol):
    """Takes in one request's entries."""

    def receive(self, entry: Entry, tensor_bytes: Any) -> None:
        """Take in an entry; ``tensor_bytes`` is the buffer of its tensors, None if it has none."""

    def receive_captured(self, request: str, step: int, number: int, share: Share, nbytes: int) -> None:
        """Take in what was captured for a cache of the request in a step, ahead of the step's entry."""


class Mailbox:
    """Receives posts on the engine's event loop and hands each entry to its request's receiver.

    ``idle`` is called, from any thread, when the worker should be asked to free memory (:meth:`Segments`).
    """

    def __init__(self, ledger: Ledger, idle: Callable[[], None]) -> None:
        # A socket file of its own folder: nobody else's process can connect. It goes once the worker has.
        self._folder: tempfile.TemporaryDirectory[str] | None = tempfile.TemporaryDirectory(prefix="nnsight-async-")
        self.address = f"ipc://{Path(self._folder.name) / 'mailbox'}"
        self.receivers: dict[str, Receiver] = {}
        self.segments = Segments(idle)
        self.ledger = ledger
        self.loader = wire.Loader()
        self._decoder = msgspec.msgpack.Decoder(Post)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(self.address)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed: Callable[[BaseException], None] = _nobody_is_told
        self.last_post = 0.0

    def start(self, failed: Callable[[BaseException], None]) -> None:
        """Receive from now on, on the running loop; ``failed`` is told if that ever ends in an error."""
        self._loop = asyncio.get_running_loop()
        self._failed = failed
        self._loop.add_reader(self._socket.FD, self._receive)
        self._receive()

    def _receive(self) -> None:
        """Take out what has come; the descriptor tells of new messages only once there are none left."""
        loop = self._loop
        if loop is None:
            return
        try:
            for _ in range(_AT_ONCE):
                self._deliver(*self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            return
        except Exception as error:
            self._stop_receiving()
            self._failed(error)
            return
        loop.call_soon(self._receive)  # others on the loop have their turn

    def _stop_receiving(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.FD)
            self._loop = None

    def _deliver(self, header: zmq.Frame, inline: zmq.Frame) -> None:
        self.last_post = time.monotonic()
        post = self._decoder.decode(header.buffer)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        for opened in post.opened:
            self.segments.open(opened)
        for captured in post.captured:
            self._deliver_captured(captured, inline)
        for entry in post.entries:
            receiver = self.receivers.get(entry.request)
            # Taken in any case, so that its pages are given back: it may be over, or its caller gone away.
            tensor_bytes = self._tensor_bytes(entry, inline)
            if receiver is not None:
                receiver.receive(entry, tensor_bytes)
            del tensor_bytes

    def _deliver_captured(self, captured: Captured, inline: zmq.Frame) -> None:
        step = CapturedStep(captured.values, self._tensor_bytes(captured, inline))
        total = max(sum(rows.stop - rows.start for rows in captured.requests), 1)
        for index, rows in enumerate(captured.requests):
            receiver = self.receivers.get(rows.request)
            if receiver is not None:
                share = Share(step, index, rows.start, rows.stop)
                nbytes = captured.nbytes * (rows.stop - rows.start) // total
                receiver.receive_captured(rows.request, rows.step, captured.number, share, nbytes)

    def _tensor_bytes(self, entry: Entry | Captured, inline: zmq.Frame) -> Any:
        if not entry.nbytes:
            return None
        if entry.segment < 0:
            return bytearray(inline.buffer[entry.offset : entry.offset + entry.nbytes])
        return self.segments.take(entry)

    def close(self) -> None:
        """Stop receiving and remove the socket; call it on the loop that started it."""
        self._stop_receiving()
        self._socket.close(linger=0)
        self._context.term()
        if self._folder is not None:
            self._folder.cleanup()
