"""Reading and writing a frame's variables keeps none of them alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from local_trace import trace


class Thing:
    """Something that can be seen to be gone."""

    size = 3


def test_a_deleted_variable_is_let_go_of() -> None:
    for _ in range(2):  # the second time the frame has an emptied copy already
        thing = Thing()
        gone = weakref.ref(thing)
        with trace():
            size = thing.size.save()
        assert size == 3
        del thing
        gc.collect()
        assert gone() is None


def test_a_dict_of_the_users_own_stays() -> None:
    one = 1
    mine: dict[str, Any] = locals()
    with trace():
        two = (one + 1).save()
    assert two == 2
    assert mine["one"] == 1
