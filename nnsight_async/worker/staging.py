"""Copies of saved tensors into shared memory, from the host's memory or off a device.

Off a device nothing waits: the tensors are gathered on the device, behind what the step has queued there, so that a
block may go on to change them; a stream of its own copies the gathered bytes to the host, and a thread waits for that
and then sends the post.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from nnsight_async.segments import PAGE
from nnsight_async.worker.arena import Prepare

_STOP: Final = None


@dataclass(slots=True)
class Piece:
    """A tensor on its way: it goes, as ``dtype``, to ``memory`` at ``offset`` bytes."""

    tensor: torch.Tensor
    dtype: torch.dtype
    memory: mmap.mmap
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes there."""
        return self.tensor.numel() * self.dtype.itemsize


class Staging(Protocol):
    """Copies pieces to where they belong and says when they are there."""

    @property
    def prepare(self) -> Prepare | None:
        """What has to be done with memory before it is copied into."""

    @property
    def dispose(self) -> Prepare | None:
        """What has to be done with it before it goes."""

    def copy(self, pieces: Sequence[Piece], then: Callable[[], None]) -> None:
        """Copy the pieces, which are sorted by where they go, and call ``then`` when all have been copied.

        What ``then`` is called for comes in the order of the calls. The tensors may be changed once this returns.
        """

    def close(self) -> None:
        """Finish what is under way."""


class HostStaging:
    """Where the model computes in the host's memory: a copy, and it is there."""

    prepare: Prepare | None = None
    dispose: Prepare | None = None

    def copy(self, pieces: Sequence[Piece], then: Callable[[], None]) -> None:
        """Copy the pieces and call ``then``."""
        for piece in pieces:
            _copy_on_host(piece)
        then()

    def close(self) -> None:
        """Nothing is ever under way."""


def _copy_on_host(piece: Piece) -> None:
    tensor = piece.tensor
    if tensor.numel():
        flat = torch.frombuffer(piece.memory, dtype=piece.dtype, count=tensor.numel(), offset=piece.offset)
        flat.view(tensor.shape).copy_(tensor)


class CudaStaging:
    """Where the model computes on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._padding = torch.zeros(PAGE, dtype=torch.uint8, device=device)
        self._queue: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._finish, name="nnsight-async-mailbox", daemon=True)
        self._thread.start()

    def prepare(self, address: int, size: int) -> None:
        """Lock memory in place and tell the device of it, so that copies into it go by themselves."""
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, size, 0)))

    def dispose(self, address: int, size: int) -> None:
        """Undo :meth:`prepare`."""
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))

    def copy(self, pieces: Sequence[Piece], then: Callable[[], None]) -> None:
        """Queue the copies; ``then`` is called on another thread."""
        on_device = [piece for piece in pieces if piece.tensor.device.type == "cuda" and piece.tensor.numel()]
        for piece in pieces:
            if piece.tensor.device.type != "cuda":
                _copy_on_host(piece)
        event = self._start(on_device) if on_device else None
        self._queue.put((event, then))

    def close(self) -> None:
        """Send what is still under way, and end the thread."""
        self._queue.put(_STOP)
        self._thread.join()

    def _start(self, pieces: Sequence[Piece]) -> torch.cuda.Event:
        dtypes = {piece.dtype for piece in pieces}
        unit = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        parts, runs = [], list(_runs(pieces))
        for run in runs:
            end = run[0].offset
            for piece in run:
                if piece.offset > end:
                    parts.append(self._padding[: piece.offset - end].view(unit))
                parts.append(piece.tensor.to(piece.dtype).contiguous().view(-1).view(unit))
                end = piece.offset + piece.nbytes
        gathered = torch.cat(parts).view(torch.uint8)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        gathered.record_stream(self._stream)
        event = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            start = 0
            for run in runs:
                first, last = run[0], run[-1]
                size = last.offset + last.nbytes - first.offset
                target = torch.frombuffer(first.memory, dtype=torch.uint8, count=size, offset=first.offset)
                target.copy_(gathered[start : start + size], non_blocking=True)
                start += size
            event.record(self._stream)
        return event

    def _finish(self) -> None:
        while (item := self._queue.get()) is not _STOP:
            event, then = item
            if event is not None:
                event.synchronize()
            then()


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The pieces that one copy can bring: in a row in one memory, less than a page between two of them."""
    run: list[Piece] = []
    end = 0
    for piece in pieces:
        if run and (piece.memory is not run[-1].memory or not 0 <= piece.offset - end < PAGE):
            yield run
            run = []
        run.append(piece)
        end = piece.offset + piece.nbytes
    if run:
        yield run
