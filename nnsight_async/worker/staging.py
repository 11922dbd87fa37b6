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
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Protocol

import torch

from nnsight_async.segments import PAGE
from nnsight_async.worker.arena import Prepare

_STOP: Final = None
#: Bytes that are gathered at a time, and of one tensor's more.
_BUNCH: Final = 256 << 20
#: Bytes that may wait on the device to be copied; with more, the forward pass waits.
_UNDER_WAY: Final = 4 << 30
#: Bytes of the thread's buffer.
_BUFFER: Final = 32 << 20


@dataclass(slots=True)
class Piece:
    """Tensors of one type and shape, none of them empty, on their way.

    They go, as ``dtype``, to ``memory`` at ``offset`` bytes, each ``step`` bytes behind the one before it.
    """

    tensors: Sequence[torch.Tensor]
    dtype: torch.dtype
    memory: mmap.mmap
    offset: int
    step: int

    @property
    def size(self) -> int:
        """Bytes that one of them takes there."""
        return self.tensors[0].numel() * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that they take there, with what is between them."""
        return self.step * (len(self.tensors) - 1) + self.size


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
    tensors, first, itemsize = piece.tensors, piece.tensors[0], piece.dtype.itemsize
    flat = torch.frombuffer(piece.memory, dtype=piece.dtype, count=piece.nbytes // itemsize, offset=piece.offset)
    if len(tensors) == 1:
        flat.view(first.shape).copy_(first)
        return
    strides = torch.empty(first.shape, device="meta").stride()
    target = flat.as_strided((len(tensors), *first.shape), (piece.step // itemsize, *strides))
    if first.dtype is piece.dtype:
        torch.stack(tuple(tensors), out=target)
    else:
        target.copy_(torch.stack(tuple(tensors)))


class CudaStaging:
    """Where the model computes on a CUDA device.

    Copies into memory that the driver knows go by themselves. Other memory the thread fills through a buffer of its
    own, so that neither the forward pass nor the driver waits for pages to be made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._known: set[int] = set()  # the memory that the driver knows
        self._buffer: torch.Tensor | None = None
        self._under_way = 0  # bytes on the device that wait to be copied
        self._arrived = threading.Condition()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._finish, name="nnsight-async-mailbox", daemon=True)
        self._thread.start()

    def prepare(self, memory: mmap.mmap, address: int, size: int) -> None:
        """Lock memory in place and tell the driver of it."""
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, size, 0)))
        self._known.add(id(memory))

    def dispose(self, memory: mmap.mmap, address: int, size: int) -> None:
        """Undo :meth:`prepare`."""
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))
        self._known.discard(id(memory))

    def copy(self, pieces: Sequence[Piece], then: Callable[[], None]) -> None:
        """Queue the copies; ``then`` is called on another thread."""
        on_device = []
        for piece in pieces:
            if piece.tensors[0].is_cuda:
                on_device.append(piece)
            else:
                _copy_on_host(piece)
        for runs in _bunches(list(_runs(on_device))):
            self._queue.put(self._start(runs))
        self._queue.put(_Job(then=then))

    def close(self) -> None:
        """Send what is still under way, and end the thread."""
        self._queue.put(_STOP)
        self._thread.join()

    def _start(self, runs: Sequence[Sequence[Piece]]) -> _Job:
        size = sum(_size(run) for run in runs)
        with self._arrived:  # the device has other uses for its memory
            self._arrived.wait_for(lambda: self._under_way == 0 or self._under_way + size <= _UNDER_WAY)
            self._under_way += size
        gathered = gather(runs)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        gathered.record_stream(self._stream)
        arrived = torch.cuda.Event(blocking=True)
        job = _Job(size=size, event=arrived)
        with torch.cuda.stream(self._stream):
            start = 0
            for run in runs:
                size = _size(run)
                target = torch.frombuffer(run[0].memory, dtype=torch.uint8, count=size, offset=run[0].offset)
                part = gathered[start : start + size]
                if id(run[0].memory) in self._known:
                    target.copy_(part, non_blocking=True)
                else:
                    job.copies.append((target, part))
                start += size
            arrived.record(self._stream)
        return job

    def _finish(self) -> None:
        while (job := self._queue.get()) is not _STOP:
            if job.event is not None:
                job.event.synchronize()
                for target, part in job.copies:
                    self._fill(target, part)
                job.copies.clear()
                with self._arrived:
                    self._under_way -= job.size
                    self._arrived.notify_all()
            if job.then is not None:
                job.then()

    @torch.inference_mode()
    def _fill(self, target: torch.Tensor, part: torch.Tensor) -> None:
        if self._buffer is None:
            self._buffer = torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._stream):
            for rows, place in zip(part.split(_BUFFER), target.split(_BUFFER), strict=True):
                buffer = self._buffer[: len(rows)]
                buffer.copy_(rows, non_blocking=True)
                self._stream.synchronize()
                place.copy_(buffer)


@dataclass(slots=True)
class _Job:
    """What the thread has to wait for, to copy, and to call, in this order."""

    size: int = 0
    event: torch.cuda.Event | None = None
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    then: Callable[[], None] | None = None


def _size(run: Sequence[Piece]) -> int:
    return run[-1].offset + run[-1].nbytes - run[0].offset


def _bunches(runs: Sequence[Sequence[Piece]]) -> Iterator[list[Sequence[Piece]]]:
    """The runs, so many at a time that gathering them takes little memory."""
    bunch: list[Sequence[Piece]] = []
    total = 0
    for run in runs:
        if bunch and total + _size(run) > _BUNCH:
            yield bunch
            bunch, total = [], 0
        bunch.append(run)
        total += _size(run)
    if bunch:
        yield bunch


def gather(runs: Sequence[Sequence[Piece]]) -> torch.Tensor:
    """The bytes of runs of pieces, ``[bytes]``, one run behind the other and each as it is to be in its memory.

    On a device what counts is how many operations are queued, and how many are called for in Python: tensors go into
    one ``cat`` as they are, all those together that can be, and are cast afterwards.
    """
    alike: dict[Any, list[Piece]] = {}
    for run in runs:
        for piece in run:
            first = piece.tensors[0]
            # Those of several lengths can be put together unless there have to be gaps between them.
            shape = first.shape[1:] if piece.step == piece.size else first.shape
            alike.setdefault((first.dtype, piece.dtype, first.dim(), shape, piece.step == piece.size), []).append(piece)
    blobs: dict[int, torch.Tensor] = {}
    for (_, dtype, dims, _, dense), pieces in alike.items():
        tensors = [tensor for piece in pieces for tensor in piece.tensors]
        blob = (torch.cat(tensors) if dims else torch.stack(tensors)).to(dtype).view(-1).view(torch.uint8)
        if not dense:
            size, step = pieces[0].size, pieces[0].step
            spread = blob.new_zeros((len(tensors), step))
            spread[:, :size] = blob.view(-1, size)
            blob = spread.view(-1)
        if len(alike) == 1 and dense and all(_touch(run) for run in runs):
            return blob
        lengths = [piece.step * len(piece.tensors) for piece in pieces]
        blobs.update(zip(map(id, pieces), blob.split(lengths), strict=True))
    parts, padding = [], None
    for run in runs:
        end = run[0].offset
        for piece in run:
            if piece.offset > end:
                if padding is None:
                    padding = piece.tensors[0].new_zeros(PAGE, dtype=torch.uint8)
                parts.append(padding[: piece.offset - end])
            parts.append(blobs[id(piece)][: piece.nbytes])
            end = piece.offset + piece.nbytes
    return torch.cat(parts)


def _touch(run: Sequence[Piece]) -> bool:
    """Whether each of a run's pieces begins where the one before it ends."""
    return all(piece.offset + piece.nbytes == after.offset for piece, after in pairwise(run))


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The pieces that one copy can bring: in a row in one memory, less than a page between two, and not too many."""
    run: list[Piece] = []
    end = 0
    for piece in pieces:
        far = run and (piece.memory is not run[-1].memory or not 0 <= piece.offset - end < PAGE)
        if far or (run and end - run[0].offset > _BUNCH):
            yield run
            run = []
        run.append(piece)
        end = piece.offset + piece.nbytes
    if run:
        yield run
