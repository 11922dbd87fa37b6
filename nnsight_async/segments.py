"""The layout of the shared memory in which tensors go from the worker to the client.

A segment is a table and pages. The worker fills pages, says in a post where an entry's bytes begin, and writes over
them only when the client has given them back; the client gives them back when the last tensor that shows them is gone.
The table has one byte a page, of which the one of an entry's first page counts. Each side writes that byte in one
direction only, so neither waits for the other: the worker sets :data:`IN_USE` before it tells of the entry and
:data:`FREE` when it takes the pages back, the client sets :data:`RELEASED`.

A segment is an anonymous file (``memfd_create(2)``), which the client opens through the worker's ``/proc/<pid>/fd``: it
has no name that could be left behind, and is gone with the last process that has it mapped. It does not count against
the size of ``/dev/shm``, which containers keep small.
"""

from __future__ import annotations

from typing import Final

#: Bytes in a page of a segment.
PAGE: Final = 4096

FREE: Final = 0
IN_USE: Final = 1
RELEASED: Final = 2


def table_size(pages: int) -> int:
    """Bytes of the table of a segment with so many pages, the table itself ending at a page's end."""
    return -(-pages // PAGE) * PAGE


def segment_size(pages: int) -> int:
    """Bytes of a whole segment."""
    return table_size(pages) + pages * PAGE


def pages_of(nbytes: int) -> int:
    """How many pages so many bytes take."""
    return -(-nbytes // PAGE)
