"""After a block its saved names hold their values in the caller, wherever the caller keeps its variables."""

# ruff: noqa: SIM113
from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any

from local_trace import trace

from nnsight_async.tracing import write_back


def test_a_function() -> None:
    other = before = 1
    with trace():
        x = 5
        x.save()
        other = 7  # bound in the block, not saved
    assert (x, before, other) == (5, 1, 1)


def test_a_variable_shared_with_a_nested_function() -> None:
    shared = 0

    def read() -> int:
        return shared

    def write(value: int) -> None:
        nonlocal shared, untouched
        shared = value
        untouched = value

    untouched = 0
    for number in range(3):
        write(number)
        with trace():
            shared = shared + 10
            shared.save()
        assert read() == shared == number + 10
        assert untouched == number


def test_other_variables_keep_their_newest_values() -> None:
    def bump() -> None:
        nonlocal cell
        cell += 1

    cell = 0
    fast = 0
    frame = sys._getframe()
    for number in range(100):
        _ = frame.f_locals  # a snapshot that soon is out of date
        fast += 1
        bump()
        write_back(frame, {"result": number})
        assert (fast, cell, result) == (number + 1, number + 1, number)  # noqa: F821
    result = None


def test_unbound_variables_stay_unbound_and_deleted_ones_deleted() -> None:
    gone = 1
    del gone
    with trace():
        x = 1
        x.save()
    assert x == 1
    try:
        gone  # noqa: F821
    except UnboundLocalError:
        pass
    else:
        raise AssertionError("a deleted variable came back")


def test_under_a_trace_function() -> None:
    def run() -> tuple[int, int]:
        other = 0
        for number in range(3):
            other += 1
            with trace():
                x = number * 2
                x.save()
            other += x
        return x, other

    def tracer(frame: Any, event: str, argument: Any) -> Callable[..., Any]:
        _ = frame.f_locals
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        assert run() == (4, 9)
    finally:
        sys.settrace(before)


seen_globally = "old"


def test_a_name_declared_global() -> None:
    global seen_globally
    with trace():
        seen_globally = "new"
        seen_globally.save()
    assert globals()["seen_globally"] == "new"


def test_a_class_body() -> None:
    around = 3

    class Body:
        x = around
        with trace():
            x = x + around
            y = x * 2
            x.save()
            y.save()

    assert (Body.x, Body.y) == (6, 12)
    assert not hasattr(Body, "around")


def test_nonlocal_and_global_in_a_class_body() -> None:
    outer = 0

    class Body:
        nonlocal outer
        global seen_globally
        with trace():
            outer = 4
            outer.save()
            seen_globally = "by a class"
            seen_globally.save()

    assert outer == 4
    assert globals()["seen_globally"] == "by a class"
    assert not {"outer", "seen_globally"} & set(vars(Body))


def test_module_level() -> None:
    namespace: dict[str, Any] = {}
    exec("import sys\nframe = sys._getframe()\n", namespace)
    write_back(namespace["frame"], {"x": 1})
    assert namespace["x"] == 1


def test_a_generator_that_is_suspended() -> None:
    def generate() -> Iterator[int]:
        x = 1
        while True:
            yield x

    generator: Any = generate()
    assert next(generator) == 1
    write_back(generator.gi_frame, {"x": 2})
    assert next(generator) == 2


async def test_a_coroutine_that_is_suspended() -> None:
    async def wait() -> int:
        x = 1
        await asyncio.sleep(0.01)
        return x

    coroutine: Any = wait()
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    write_back(coroutine.cr_frame, {"x": 2})
    assert await task == 2


async def test_async_with() -> None:
    async with trace():
        x = 9
        x.save()
    assert x == 9


def test_a_frame_that_has_ended() -> None:
    def ended() -> Any:
        x = 1
        return sys._getframe()

    write_back(ended(), {"x": 2})


def test_comprehensions_and_lambdas_of_the_caller_see_it() -> None:
    read = [lambda: x]
    for number in range(3):
        with trace():
            x = [number for number in range(number)]
            x.save()
        assert read[0]() == list(range(number))
        assert [x for _ in range(2)] == [list(range(number))] * 2
