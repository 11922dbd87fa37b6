"""The client's side of the shared memory: what the worker has filled is shown as tensors and given back after use."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from nnsight_async.protocol import Captured, Entry, SegmentOpened
from nnsight_async.segments import PAGE, RELEASED, segment_size, table_size

#: Bytes mapped above which memory that nothing shows any more is asked to be freed.
_KEPT = 256 << 20


class _Segment:
    """One mapped segment."""

    __slots__ = ("base", "given", "memory", "pages")

    def __init__(self, opened: SegmentOpened) -> None:
        self.pages = opened.pages
        self.base = table_size(opened.pages)
        fd = os.open(opened.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.memory = mmap.mmap(fd, segment_size(opened.pages))
        finally:
            os.close(fd)
        # Bytes of each range that is shown, by its first page. What the collector frees may be freed anywhere, in the
        # middle of anything: there is no lock here, each operation on this is one of the interpreter's.
        self.given: dict[int, int] = {}


class _Range(np.ndarray[Any, Any]):
    """An entry's bytes. When the last tensor that shows any of them is gone, so is this, and the pages are given back.

    A tensor made of an array holds just that array, and the array holds the mapped memory.
    """

    _release: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self._release is not None:
            self._release()


class Segments:
    """All segments of one worker, as this process has them mapped.

    ``idle`` is called, from any thread, when much memory is mapped and a segment has become unused: the worker should
    be asked to close it.
    """

    def __init__(self, idle: Callable[[], None]) -> None:
        self._segments: dict[int, _Segment] = {}
        self._idle = idle

    @property
    def count(self) -> int:
        """How many segments are mapped."""
        return len(self._segments)

    @property
    def in_use(self) -> int:
        """Bytes that have not been given back."""
        return sum(sum(list(segment.given.values())) for segment in self._segments.values())

    def open(self, opened: SegmentOpened) -> None:
        """Map a segment that the worker has made.

        Raises:
            OSError: it cannot be opened, as where the two processes do not share a host.
        """
        self._segments[opened.number] = _Segment(opened)

    def drop(self, numbers: list[int]) -> None:
        """Unmap segments that the worker has closed."""
        for number in numbers:
            segment = self._segments.pop(number, None)
            if segment is not None:
                segment.memory.close()

    def take(self, entry: Entry | Captured) -> Any:
        """The buffer of an entry's tensors. Its pages are given back when it is gone, and what shows it."""
        segment, page = self._segments[entry.segment], entry.offset
        taken = np.frombuffer(segment.memory, np.uint8, entry.nbytes, segment.base + page * PAGE).view(_Range)
        segment.given[page] = entry.nbytes
        taken._release = partial(self._release, segment, page)
        return taken

    def _release(self, segment: _Segment, page: int) -> None:
        del segment.given[page]
        segment.memory[page] = RELEASED
        if not segment.given and sum([s.pages for s in list(self._segments.values())]) * PAGE > _KEPT:
            self._idle()
