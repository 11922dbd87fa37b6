"""Putting in: one post a step, straight to the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from nnsight_async import wire
from nnsight_async.errors import BlockFailure, CaptureError
from nnsight_async.protocol import BlockState, Entry, Post
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
        frames: list[Any] = [self._encoder.encode(Post(entries)), slab.finish()]
        self._socket.send_multipart(frames, copy=False)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _entry(self, block: Block, slab: wire.SlabWriter, final: bool) -> Entry:
        changes = b""
        if block.state is not BlockState.FAILED or block.saved:
            try:
                changed = block.changes()
                if changed:
                    changes = wire.dumps(changed, slab, self._reference)
            except Exception as error:
                names = ", ".join(sorted(block.saved))
                block.failure = BlockFailure.of(
                    CaptureError(f"what the block saved ({names}) cannot be sent: {type(error).__name__}: {error}"),
                    "",
                    None,
                )
                block.state = BlockState.FAILED
                block.saved.clear()
        return self._interleaver.entry(block, changes, final=final)
