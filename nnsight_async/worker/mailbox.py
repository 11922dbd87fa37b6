"""Putting in: one post a step, straight to the client."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import torch
import zmq

from nnsight_async import wire
from nnsight_async.errors import CaptureError
from nnsight_async.protocol import BlockState, CachedRows, Captured, Entry, Post, SegmentOpened
from nnsight_async.segments import PAGE
from nnsight_async.worker.arena import Arena, Segment
from nnsight_async.worker.block import Block
from nnsight_async.worker.caching import Group
from nnsight_async.worker.draws import DrawCheck
from nnsight_async.worker.interleaver import Interleaver
from nnsight_async.worker.staging import CudaStaging, HostStaging, Piece, Staging

#: Bytes of an entry's tensors up to which they ride in the message: less than what a page shared costs.
_INLINE: Final = 16 << 10


@dataclass(slots=True)
class _Parcel:
    """One entry with its tensors, before they are copied."""

    cast: torch.dtype | None
    tensors: list[tuple[int, Sequence[torch.Tensor], torch.dtype, int]] = field(default_factory=list)
    nbytes: int = 0
    entry: Entry | Captured | None = None
    place: tuple[Segment, int] | None = None
    start: int = 0  # bytes from its place on, where it shares that with others

    def add(self, tensor: torch.Tensor) -> tuple[int, torch.dtype]:
        """Take a tensor in (:class:`nnsight_async.wire.Tensors`)."""
        if tensor.device.type == "meta":
            raise ValueError("a tensor on the meta device has no values")
        return self.add_alike((tensor.detach(),))

    def add_alike(self, tensors: Sequence[torch.Tensor]) -> tuple[int, torch.dtype]:
        """Take in tensors of one type and shape (:class:`nnsight_async.wire.Tensors`)."""
        first, offset = tensors[0], self.nbytes
        dtype = self.cast if self.cast is not None and first.is_floating_point() else first.dtype
        step = wire.step_of(first.numel(), dtype)
        self.tensors.append((offset, tensors, dtype, step))
        self.nbytes = offset + step * len(tensors)
        return offset, dtype

    def pieces(self) -> list[Piece]:
        """Its tensors, with where they go."""
        if self.place is None:
            return []
        segment, page = self.place
        start = segment.base + page * PAGE + self.start
        memory = segment.memory
        return [
            Piece(tensors, dtype, memory, start + offset, step)
            for offset, tensors, dtype, step in self.tensors
            if tensors[0].numel()
        ]


class Mailbox:
    """The worker's end of the way up. For the forward thread."""

    def __init__(self, address: str, interleaver: Interleaver, reference: wire.Reference, device: torch.device) -> None:
        self._interleaver = interleaver
        self._reference = reference
        self._encoder = msgspec.msgpack.Encoder()
        self._staging: Staging = CudaStaging(device) if device.type == "cuda" else HostStaging()
        self.arena = Arena(self._staging.prepare, self._staging.dispose)
        self._opened: list[SegmentOpened] = []  # what the client has still to hear of
        # Used by whatever thread the staging calls back on, and by no other.
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._staging.copy([], partial(self._send, []))  # tells the client that the way is open

    def post(
        self,
        blocks: Sequence[Block],
        groups: Sequence[Group] = (),
        draws: DrawCheck | None = None,
        *,
        final: bool = False,
    ) -> None:
        """Send what the blocks saved or changed since their last post, and what was captured for their caches.

        Those that fail because of what they have left as sampled ids are told with it.
        """
        self.arena.reclaim()
        parcels = [self._parcel(block, final) for block in blocks]
        parcels += [_captured(group) for group in groups]
        try:
            self._copy(parcels, draws)
        except Exception as error:  # one tensor that cannot be copied: whose it is is not known here
            for block in blocks:
                _fail(block, error)
            self._copy([self._parcel(block, final) for block in blocks], draws)

    def close(self) -> None:
        """Send what is under way, and close the socket and the memory."""
        self._staging.close()
        self._socket.close()
        self.arena.close()

    def _parcel(self, block: Block, final: bool) -> _Parcel:
        parcel = _Parcel(block.cast)
        changes = b""
        try:
            changed = block.changes()
            if changed:
                changes = wire.dumps(changed, parcel, self._reference)
        except BaseException as error:  # the user's own __reduce__ may raise whatever it likes, SystemExit too
            _fail(block, error)
            parcel = _Parcel(None)
        parcel.entry = self._interleaver.entry(block, changes, final=final)
        return parcel

    def _copy(self, parcels: Sequence[_Parcel], draws: DrawCheck | None) -> None:
        # Those that will ride in the message have one place together: one copy brings all of them.
        together = 0
        for parcel in parcels:
            if 0 < parcel.nbytes <= _INLINE:
                parcel.start = together
                together += parcel.nbytes
        shared = self.arena.allocate(together) if together else None
        places = [shared] if shared is not None else []
        for parcel in parcels:
            if parcel.nbytes > _INLINE:
                parcel.place = self.arena.allocate(parcel.nbytes)
                places.append(parcel.place)
            elif parcel.nbytes:
                parcel.place = shared
        placed = sorted(
            (parcel for parcel in parcels if parcel.place is not None),
            key=lambda parcel: (parcel.place[0].number, parcel.place[1], parcel.start),  # type: ignore[index]
        )
        pieces = [piece for parcel in placed for piece in parcel.pieces()]
        self._opened += [
            SegmentOpened(segment.number, f"/proc/{os.getpid()}/fd/{segment.fd}", segment.pages)
            for segment in self.arena.opened()
        ]
        try:
            self._staging.copy(pieces, partial(self._send, parcels, shared, together, self._opened, draws))
        except Exception:
            for segment, page in places:
                segment.release(page)
            raise
        self._opened = []
        for parcel in parcels:
            parcel.tensors = []  # their memory is not to wait until the post is on its way

    def _send(
        self,
        parcels: Sequence[_Parcel],
        shared: tuple[Segment, int] | None = None,
        together: int = 0,
        opened: Sequence[SegmentOpened] = (),
        draws: DrawCheck | None = None,
    ) -> None:
        """Send a post whose tensors have been copied; on the staging's thread."""
        failures = draws.failures() if draws is not None else {}
        inline = b""
        if shared is not None:
            segment, page = shared
            start = segment.base + page * PAGE
            inline = segment.memory[start : start + together]
            segment.release(page)
        post = Post([], list(opened))
        for parcel in parcels:
            entry = parcel.entry
            if isinstance(entry, Captured):
                post.captured.append(entry)
            else:
                assert entry is not None
                if entry.request in failures:
                    entry.state, entry.error = BlockState.FAILED, failures[entry.request]
                post.entries.append(entry)
            if parcel.place is None:
                continue
            entry.nbytes = parcel.nbytes
            if parcel.nbytes <= _INLINE:
                entry.segment, entry.offset = -1, parcel.start
            else:
                entry.segment, entry.offset = parcel.place[0].number, parcel.place[1]
        frames: list[Any] = [self._encoder.encode(post), inline]
        self._socket.send_multipart(frames, copy=False)


def _captured(group: Group) -> _Parcel:
    """What was captured of a group of requests, with who they are and where their rows are."""
    parcel = _Parcel(None)
    requests, start = [], 0
    for block, rows in zip(group.blocks, group.rows, strict=True):
        stop = start + rows.stop - rows.start
        requests.append(CachedRows(block.request_id, block.step, start, stop))
        start = stop
    parcel.entry = Captured(group.number, requests, wire.dumps_captured(group.captured, parcel))
    group.captured = []
    return parcel


def _fail(block: Block, error: BaseException) -> None:
    """End a block because what it saved cannot be sent."""
    names = ", ".join(sorted(block.saved))
    text = f"what the block saved ({names}) cannot be sent: {type(error).__name__}: {error}"
    block.forget_saves()
    block.fail(CaptureError(text))
