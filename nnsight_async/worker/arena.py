"""The worker's shared memory: pages for the tensors of posts, taken back when the client has given them back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from nnsight_async.segments import FREE, IN_USE, PAGE, RELEASED, pages_of, segment_size, table_size

_RELEASED: Final = bytes([RELEASED])
#: Pages of a segment, unless one entry needs more ...
_SEGMENT: Final = (64 << 20) // PAGE
#: ... and of the first one where memory has to be prepared, which takes a while: it is made at the start, and kept.
_PREPARED: Final = (512 << 20) // PAGE
#: Pages that are kept, free, for what comes next, when the client asks to have memory given back.
_SPARE: Final = (256 << 20) // PAGE

#: Called with memory, its address and its size in bytes.
Prepare = Callable[[mmap.mmap, int, int], None]


class Segment:
    """One anonymous file, mapped: its table, its pages, and which of them are free."""

    def __init__(self, number: int, pages: int) -> None:
        self.number = number
        self.pages = pages
        self.fd = os.memfd_create(f"nnsight-async-{number}", os.MFD_CLOEXEC)
        size = segment_size(pages)
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)
        self.base = table_size(pages)
        self._given: dict[int, int] = {}  # the pages of each range that the client has, by its first page
        self._free = [(0, pages)]  # sorted, and no two of them touch

    @property
    def is_free(self) -> bool:
        """Whether none of its pages are in use."""
        return not self._given

    @property
    def used(self) -> int:
        """Pages in use."""
        return sum(self._given.values())

    def allocate(self, pages: int) -> int | None:
        """The first of so many pages in a row, now in use; None if there are not so many.

        The lowest are taken: they were used last, and are still in the processor's caches.
        """
        for place, (start, stop) in enumerate(self._free):
            if stop - start >= pages:
                if stop - start == pages:
                    del self._free[place]
                else:
                    self._free[place] = (start + pages, stop)
                self._given[start] = pages
                self.memory[start] = IN_USE
                return start
        return None

    def release(self, start: int) -> None:
        """Mark a range as given back, as the client does; from any thread."""
        self.memory[start] = RELEASED

    def reclaim(self) -> None:
        """Take back the pages that have been given back."""
        start = -1
        while (start := self.memory.find(_RELEASED, start + 1, self.pages)) >= 0:
            self.memory[start] = FREE
            self._put_back(start, start + self._given.pop(start))

    def _put_back(self, start: int, stop: int) -> None:
        place = bisect_left(self._free, (start, stop))
        if place < len(self._free) and self._free[place][0] == stop:
            stop = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == start:
            place -= 1
            start = self._free.pop(place)[0]
        self._free.insert(place, (start, stop))

    def address(self) -> int:
        """Where its memory begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close(self, *, remove: bool) -> None:
        """Let go of it; with ``remove`` its memory is freed in the client too, which must show none of it any more."""
        if remove:
            self.memory.madvise(mmap.MADV_REMOVE)
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # something still shows it: then it goes when that does
            self.memory.close()


class Arena:
    """All segments of one worker. For one thread, but for :meth:`Segment.release`.

    ``prepare`` and ``dispose`` are told of the first segment's memory, when it is made and before it goes: a GPU's
    driver has to know memory to copy into it while the program goes on.
    """

    def __init__(self, prepare: Prepare | None = None, dispose: Prepare | None = None) -> None:
        self.segments: dict[int, Segment] = {}
        self._dispose = dispose
        self._count = 0
        self._opened: list[Segment] = []
        self._prepared: Segment | None = None
        if prepare is not None:
            self._prepared = first = self._open(_PREPARED)
            prepare(first.memory, first.address(), segment_size(first.pages))

    @property
    def used(self) -> int:
        """Bytes in use."""
        return PAGE * sum(segment.used for segment in self.segments.values())

    def reclaim(self) -> None:
        """Take back what the client has given back since the last time."""
        for segment in self.segments.values():
            if not segment.is_free:
                segment.reclaim()

    def allocate(self, nbytes: int) -> tuple[Segment, int]:
        """Pages for so many bytes: the segment and the first page."""
        pages = pages_of(nbytes)
        for segment in self.segments.values():
            page = segment.allocate(pages)
            if page is not None:
                return segment, page
        segment = self._open(max(_SEGMENT, pages))
        page = segment.allocate(pages)
        assert page is not None
        return segment, page

    def opened(self) -> list[Segment]:
        """The segments made since this was last asked: the client has to hear of them."""
        opened, self._opened = self._opened, []
        return opened

    def trim(self) -> list[int]:
        """Close the segments that are free, but for some spare memory; returns their numbers."""
        self.reclaim()
        free = sorted((s for s in self.segments.values() if s.is_free), key=lambda segment: segment.pages)
        closed, spare = [], 0
        for segment in free:
            if segment is self._prepared:
                continue
            spare += segment.pages
            if spare > _SPARE and segment not in self._opened:
                self._close(segment, remove=True)
                closed.append(segment.number)
        return closed

    def close(self) -> None:
        """Close all segments. What the client still shows of them stays until it does not any more."""
        for segment in list(self.segments.values()):
            self._close(segment, remove=False)

    def _open(self, pages: int) -> Segment:
        segment = self.segments[self._count] = Segment(self._count, pages)
        self._count += 1
        self._opened.append(segment)
        return segment

    def _close(self, segment: Segment, *, remove: bool) -> None:
        del self.segments[segment.number]
        if segment is self._prepared and self._dispose is not None:
            self._dispose(segment.memory, segment.address(), segment_size(segment.pages))
        segment.close(remove=remove)
