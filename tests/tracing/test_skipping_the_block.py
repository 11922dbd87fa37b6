"""A traced block does not run where it stands, wherever that is; what surrounds it does."""

# ruff: noqa: B008, E701, E702, F842
from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from local_trace import trace

from nnsight_async.errors import CaptureError

HERE: list[str] = []  # what ran in this process instead of the block


def touched(what: str = "body") -> None:
    HERE.append(what)


@pytest.fixture(autouse=True)
def nothing_ran_here() -> Iterator[None]:
    HERE.clear()
    before = sys.gettrace()
    yield
    assert HERE == []
    assert sys.gettrace() is before


@contextlib.contextmanager
def note(log: list[str], name: str) -> Iterator[str]:
    log.append(f"enter {name}")
    try:
        yield name
    finally:
        log.append(f"leave {name}")


def test_in_a_function() -> None:
    with trace(run=False) as tracer:
        touched()
    assert tracer.skipped


def test_on_the_with_statements_own_line() -> None:
    with trace(run=False) as tracer: touched(); touched()  # fmt: skip
    assert tracer.skipped
    assert tracer.source.text == "touched(); touched()"


def test_the_as_target_is_bound_first_also_over_several_lines() -> None:
    class Holder:
        tracer: Any = None

    holder = Holder()
    with trace(
        run=False,
    ) as holder.tracer:
        touched()
    assert holder.tracer.skipped


def test_without_a_target() -> None:
    tracer = trace(run=False)
    with tracer:
        touched()
    assert tracer.skipped


def test_last_of_several_items() -> None:
    log: list[str] = []
    with note(log, "a") as a, trace(run=False) as tracer:
        touched()
    assert tracer.skipped
    assert a == "a"
    assert log == ["enter a", "leave a"]


def test_a_context_behind_the_trace_is_refused() -> None:
    log: list[str] = []
    with pytest.raises(CaptureError, match="last context manager"), trace(run=False), note(log, "b"):
        touched()
    assert log == []


def test_two_traces_in_one_statement_are_refused() -> None:
    with pytest.raises(CaptureError, match="last context manager"):
        with trace(run=False), trace(run=False):
            touched()


def test_nested_in_other_contexts_loops_and_try() -> None:
    log: list[str] = []
    done = 0
    for _ in range(3):
        try:
            with note(log, "outer"):
                with trace(run=False) as tracer:
                    touched()
                done += tracer.skipped
        except BaseException:
            touched("except")
            raise
        else:
            log.append("else")
        finally:
            with trace(run=False) as tracer:
                touched()
            done += tracer.skipped
    assert done == 6
    assert log == ["enter outer", "leave outer", "else"] * 3


def test_in_a_finally_that_runs_on_an_exception() -> None:
    tracers = []
    with pytest.raises(KeyError):
        try:
            raise KeyError
        finally:
            with trace(run=False) as tracer:
                touched()
            tracers.append(tracer)
    assert tracers[0].skipped


def test_in_a_class_body_a_method_and_a_lambda_free_closure() -> None:
    class Body:
        with trace(run=False) as tracer:
            touched()

        def method(self) -> bool:
            with trace(run=False) as tracer:
                touched(repr(self))
            return tracer.skipped

    assert Body.tracer.skipped
    assert Body().method()


def test_in_a_generator() -> None:
    def generate() -> Iterator[bool]:
        for _ in range(2):
            with trace(run=False) as tracer:
                touched()
            yield tracer.skipped

    assert list(generate()) == [True, True]


async def test_in_a_coroutine() -> None:
    with trace(run=False) as tracer:
        touched()
    assert tracer.skipped
    async with trace(run=False) as tracer:
        touched()
    assert tracer.skipped


async def test_async_with_on_one_line_and_behind_another_context() -> None:
    async with trace(run=False) as tracer: touched()  # fmt: skip
    assert tracer.skipped
    async with asyncio.timeout(10), trace(run=False) as tracer:
        touched()
    assert tracer.skipped


async def test_async_enter_that_waits_first() -> None:
    class slow(trace):
        async def __aenter__(self) -> trace:
            frame = sys._getframe(1)
            self.enter(frame)
            await asyncio.sleep(0.01)
            self.skip.arm(self)
            return self

    async with slow(run=False) as tracer:
        touched()
    assert tracer.skipped


async def test_tasks_side_by_side() -> None:
    async def one(number: int) -> bool:
        await asyncio.sleep(0)
        async with trace(run=False) as tracer:
            touched(str(number))
        await asyncio.sleep(0)
        return tracer.skipped

    assert all(await asyncio.gather(*(one(n) for n in range(20))))


def test_bodies_of_nothing() -> None:
    with trace(run=False):
        pass
    with trace(run=False):
        ...
    with trace(run=False):
        """Only words."""
    with trace(run=False): pass  # fmt: skip
    with trace(run=False):
        x: int


def test_first_statements_with_handlers_of_their_own() -> None:
    with trace(run=False) as tracer:
        try:
            touched()
        except BaseException:
            touched("except")
        finally:
            touched("finally")
    assert tracer.skipped
    with trace(run=False) as tracer:
        while True:
            try:
                touched()
            finally:
                touched("finally")
    assert tracer.skipped
    with trace(run=False) as tracer:
        with contextlib.suppress(BaseException):
            touched()
    assert tracer.skipped


def test_a_try_on_one_line_first_in_the_block() -> None:
    with trace(run=False) as tracer:
        try: touched()  # fmt: skip
        except BaseException: touched("except")  # fmt: skip
    assert tracer.skipped
    tracer = trace(run=False)
    with tracer:
        try:
            touched()
        finally:
            touched("finally")
    assert tracer.skipped


class Holder:
    tracer: Any = None


def test_a_try_behind_a_target_that_is_no_name_is_refused() -> None:
    with pytest.raises(CaptureError, match="begins with `try`"):
        with trace(run=False) as Holder.tracer:
            try:
                touched()
            finally:
                touched("finally")


def test_first_statements_that_define() -> None:
    with trace(run=False) as tracer:

        @contextlib.contextmanager
        def f(x: Any = touched()) -> Any:
            yield x

    assert tracer.skipped
    with trace(run=False) as tracer:

        class C(dict):  # type: ignore[type-arg]
            touched()

    assert tracer.skipped
    with trace(run=False) as tracer:
        [touched() for _ in range(3)]
    assert tracer.skipped
    with trace(run=False) as tracer:
        import this  # noqa: F401
    assert tracer.skipped
    assert "this" not in sys.modules


def test_an_exception_of_the_target_is_not_swallowed() -> None:
    class Locked:
        __slots__ = ()

    locked: Any = Locked()
    with pytest.raises(AttributeError):
        with trace(run=False) as locked.tracer:
            touched()


def test_another_thread_runs_on_untouched() -> None:
    started, finish = threading.Event(), threading.Event()
    counted = 0

    def work() -> None:
        nonlocal counted
        started.set()
        while not finish.is_set():
            counted += 1
        assert sys.gettrace() is None

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    for _ in range(50):
        with trace(run=False) as tracer:
            touched()
        assert tracer.skipped
    finish.set()
    thread.join()
    assert counted


def test_traces_in_many_threads() -> None:
    skipped: list[bool] = []

    def work() -> None:
        for _ in range(100):
            with trace(run=False) as tracer:
                touched()
            skipped.append(tracer.skipped)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert skipped == [True] * 400


def test_module_level(tmp_path: Any) -> None:
    script = tmp_path / "module_level.py"
    script.write_text(
        "from local_trace import trace\nwith trace(run=False) as tracer:\n    raise SystemExit('ran here')\nafter = 1\n"
    )
    namespace: dict[str, Any] = {"__name__": "module_level"}
    exec(compile(script.read_text(), str(script), "exec"), namespace)
    assert namespace["tracer"].skipped
    assert namespace["after"] == 1


def test_the_frame_is_let_go() -> None:
    import gc
    import weakref

    class Big:
        pass

    def run() -> weakref.ref[Big]:
        big = Big()
        with trace(run=False) as tracer:
            touched()
        tracer.frame = None  # type: ignore[assignment]
        return weakref.ref(big)

    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()
