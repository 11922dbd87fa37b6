"""``nnsight_async.save``: marking a value from code that the block's compiler does not rewrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from nnsight_async.errors import OutsideBlockError, UnsupportedError

T = TypeVar("T")


class _Result:
    """Stands in a block's saved values for the RequestOutput, which only the client has."""

    def __repr__(self) -> str:
        return "<the request's result>"


#: Saved in place of ``tracer.result``; the client puts the RequestOutput there.
RESULT: Final = _Result()


class CacheMark:
    """Stands in a block's saved values for what ``tracer.cache`` has captured, which only the client puts together.

    ``number`` says which of the block's caches it is, ``device`` where its tensors are to be put (empty: on the host).
    """

    def __init__(self, number: int, device: str = "") -> None:
        self.number = number
        self.device = device

    def __repr__(self) -> str:
        return "<a cache: what it captured is in the caller's variable after the trace>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(_UNREAD)

    def __getitem__(self, key: object) -> Any:
        raise UnsupportedError(_UNREAD)


_UNREAD: Final = (
    "a cache cannot be read in the block: what it captures is put together in the caller; read the locations themselves"
)


class _Installed:
    mark: Callable[[Any], Any] | None = None


def install_mark(mark: Callable[[Any], Any] | None) -> None:
    """Make ``mark`` take in what :func:`save` is given (the worker does this once)."""
    _Installed.mark = mark


def save(value: T) -> T:
    """Save ``value`` from within a block, or from a function that a block calls; returns it unchanged.

    In the block itself ``value.save()`` does the same. In a helper function the method is not there (a tensor has no
    ``save``), so call this instead; the variable of the block that comes to hold the value names it. A number, a string
    or None has no identity of its own: assign and save it in the block.

    Raises:
        OutsideBlockError: called outside a block.
    """
    if _Installed.mark is None:
        raise OutsideBlockError("save() has a meaning only in a block: write it inside `with model.trace(...):`")
    _Installed.mark(value)
    return value
