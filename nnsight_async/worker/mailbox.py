"""Putting in: one post a step, straight to the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from nnsight_async import wire
from nnsight_async.errors import CaptureError
from nnsight_async.protocol import Entry, Post
from nnsight_async.worker.block import Block
from nnsight_async.worker.interleaver import Interleaver


class Mailbox:
    """The worker's end of the way up."""

    def __init__(self, address: str, interleaver: Interleaver, reference: wire.Reference) -> None:
        self._interleaver = interleaver
        self._reference = reference
        self._encoder = msgspec.msgpack.Encoder()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def post(self, blocks: Sequence[Block], *, final: bool = False) -> None:
        """Send what the blocks saved or changed since their last post."""
        slab = wire.SlabWriter()
        entries = [self._entry(block, slab, final) for block in blocks]
        try:
            data = slab.finish()
        except Exception as error:  # one tensor that cannot be copied: whose it is is not known here
            for block in blocks:
                _fail(block, error)
            slab = wire.SlabWriter()
            entries, data = [self._entry(block, slab, final) for block in blocks], slab.finish()
        frames: list[Any] = [self._encoder.encode(Post(entries)), data]
        self._socket.send_multipart(frames, copy=False)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _entry(self, block: Block, slab: wire.SlabWriter, final: bool) -> Entry:
        changes = b""
        try:
            changed = block.changes()
            if changed:
                changes = wire.dumps(changed, slab, self._reference)
        except BaseException as error:  # the user's own __reduce__ may raise whatever it likes, SystemExit too
            _fail(block, error)
        return self._interleaver.entry(block, changes, final=final)


def _fail(block: Block, error: BaseException) -> None:
    """End a block because what it saved cannot be sent."""
    names = ", ".join(sorted(block.saved))
    text = f"what the block saved ({names}) cannot be sent: {type(error).__name__}: {error}"
    block.forget_saves()
    block.fail(CaptureError(text))
