"""Taking out: the client's end of the way up."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from nnsight_async.protocol import Entry, Post


class Receiver(Protocol):
    """Takes in one request's entries."""

    def receive(self, entry: Entry, slab: memoryview) -> None:
        """Take in an entry; ``slab`` holds its tensors' bytes."""


class Mailbox:
    """Receives posts on the engine's event loop and hands each entry to its request's receiver."""

    def __init__(self) -> None:
        # A socket file of its own folder: nobody else's process can connect.
        self._folder = tempfile.TemporaryDirectory(prefix="nnsight-async-")
        self.address = f"ipc://{Path(self._folder.name) / 'mailbox'}"
        self.receivers: dict[str, Receiver] = {}
        self._decoder = msgspec.msgpack.Decoder(Post)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(self.address)
        self._task: asyncio.Task[None] | None = None

    def start(self, failed: Callable[[BaseException], None]) -> None:
        """Receive from now on, on the running loop; ``failed`` is told if that ever ends in an error."""
        self._task = asyncio.get_running_loop().create_task(self._receive())

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                failed(error)

        self._task.add_done_callback(ended)

    async def _receive(self) -> None:
        while True:  # no variable here: it would hold the last post and its request until the next one comes
            self._deliver(*await self._socket.recv_multipart(copy=False))

    def _deliver(self, header: zmq.Frame, slab: zmq.Frame) -> None:
        for entry in self._decoder.decode(header.buffer).entries:
            receiver = self.receivers.get(entry.request)
            if receiver is not None:  # else it is over, or its caller has gone away
                receiver.receive(entry, slab.buffer)

    def close(self) -> None:
        """Stop receiving and remove the socket; call it on the loop that started it."""
        if self._task is not None:
            self._task.cancel()
        self._socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()
