"""Names that nobody else has: a random one for this process, and a number."""

from __future__ import annotations

import itertools
import os
import uuid
from typing import Final

_numbers: Final = itertools.count()
_prefix = uuid.uuid4().hex


def _renew() -> None:
    global _prefix
    _prefix = uuid.uuid4().hex


os.register_at_fork(after_in_child=_renew)


def unique(kind: str) -> str:
    """A name that no other call gives, in this process or in another.

    Asking the system for random bytes gives the interpreter away to another thread, and getting it back can take
    longer than all else that is done for a short request; so it is asked once.
    """
    return f"{kind}-{_prefix}-{next(_numbers)}"
