"""What the compiled block calls where the user wrote ``.save()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nnsight_async.saving import RESULT, install_mark, save
from nnsight_async.tracing.holds import HOLD
from nnsight_async.worker.faces import TracerFace
from nnsight_async.worker.interleaver import Interleaver

Names = tuple[str, ...]


def saving_functions(interleaver: Interleaver) -> dict[str, Callable[..., Any]]:
    """The functions that a program's rewritten saves call, by the names that the compiler uses."""

    def mark(value: Any, names: Names = ()) -> Any:
        return interleaver.running.mark(value, names)

    def save_method(value: Any, names: Names) -> Any:
        own = getattr(type(value), "save", None)
        if own is not None:  # an object of the user's with a save() of its own keeps it
            return value.save()
        return mark(value, names)

    def save_call(function: Any, value: Any, names: Names) -> Any:
        return mark(value, names) if function is save else function(value)

    def save_result(owner: Any, names: Names) -> Any:
        if isinstance(owner, TracerFace):
            # Only the client has it, and putting it there needs no trip: what follows is past the request's end.
            interleaver.move_to_end()
            return mark(RESULT, names)
        return save_method(owner.result, names)

    def save_whole(function: Any, value: Any, names: Names) -> Any:
        return mark(value, names) if function is save else value

    def hold(value: Any) -> Any:
        interleaver.running.hold(value)
        return value

    install_mark(mark)
    return {
        "__save__": save_method,
        "__save_call__": save_call,
        "__save_result__": save_result,
        "__save_whole__": save_whole,
        HOLD: hold,
    }
