"""A stand-in for the engine: runs a block's program right here, through the same pickles it would travel in."""

from __future__ import annotations

import pickle
import sys
from types import FrameType, SimpleNamespace
from typing import Any

from nnsight_async.tracing import (
    BlockSource,
    BodySkip,
    CompiledProgram,
    Program,
    collect,
    compile_program,
    dumps,
    find_block,
    loads,
    make_program,
    write_back,
)

RESULT = SimpleNamespace(text="a result")


class Value(int):
    """What a location yields: a number that can be saved."""


def save(value: Any) -> Any:
    """The function form of a save."""
    raise AssertionError("only called in a block, where it is replaced")


class trace:
    """`with trace() as tracer:` and `async with trace() as tracer:`; the block's saves come back to the caller."""

    def __init__(self, *, run: bool = True) -> None:
        self.run_it = run
        self.result = RESULT
        self.sent: dict[str, Any] = {}
        self.saved: dict[str, Any] = {}
        self.results: list[tuple[str, ...]] = []
        self.namespace: dict[str, Any] = {}

    # what a block may use of the tracer
    def location(self, number: int) -> Value:
        return Value(number)

    def enter(self, frame: FrameType) -> None:
        self.frame = frame
        self.source: BlockSource = find_block(frame)
        self.program: Program = make_program(self.source)
        self.skip = BodySkip(frame, self.source)

    def leave(self, exc_type: type[BaseException] | None, exc: BaseException | None) -> bool:
        skipped = self.skip.disarm(exc_type, exc)
        if exc is None or skipped:
            self.skipped = skipped
            if self.run_it:
                self.run()
            return True
        return False

    def run(self) -> None:
        def reference(value: object) -> object | None:
            return "tracer" if value is self else None

        values = collect(self.frame, self.program.reads)
        self.sent = dict(values)
        data = dumps(values, reference, where=self.source.where)
        arrived = loads(data, lambda key: self)
        program: Program = pickle.loads(pickle.dumps(self.program))
        self.compiled: CompiledProgram = compile_program(program)
        self.namespace = {
            **arrived,
            "__save__": self.save,
            "__save_result__": self.save_result,
            "__save_call__": self.save_call,
            "__save_whole__": self.save_whole,
            "__gather__": lambda items, *place: items,
            "__gathered__": self.gathered,
            "__rest__": lambda: self.rest,
        }
        try:
            exec(self.compiled.code, self.namespace)
        finally:
            write_back(self.frame, self.saved)

    def save(self, value: Any, names: tuple[str, ...]) -> Any:
        self.saved.update(dict.fromkeys(names, value))
        return value

    def gathered(self, items: Any, *place: Any) -> list[Any]:
        self.rest = items
        return []

    def save_result(self, owner: Any, names: tuple[str, ...]) -> Any:
        self.results.append(names)
        return self.save(owner.result, names)

    def save_call(self, function: Any, value: Any, names: tuple[str, ...]) -> Any:
        if getattr(function, "__name__", "") == "save" and function.__module__ == __name__:
            return self.save(value, names)
        return function(value)

    def save_whole(self, function: Any, value: Any, names: tuple[str, ...]) -> Any:
        if getattr(function, "__name__", "") == "save" and function.__module__ == __name__:
            self.save(value, names)

    def __enter__(self) -> trace:
        self.enter(sys._getframe(1))
        self.skip.arm(self)
        return self

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> bool:
        return self.leave(exc_type, exc)

    async def __aenter__(self) -> trace:
        frame = sys._getframe(1)
        self.enter(frame)
        self.skip.arm(self)
        return self

    async def __aexit__(self, exc_type: Any, exc: Any, traceback: Any) -> bool:
        return self.leave(exc_type, exc)


def program_of(text: str, *, inline: bool = False, class_name: str | None = None) -> Program:
    """The program of a block given as text, indented under a with statement on the line before it."""
    first = text.lstrip("\n")
    lines = first.splitlines()
    return make_program(
        BlockSource(
            text="\n".join("    " + line for line in lines) + "\n",
            filename="block.py",
            first_line=11,
            last_line=10 + len(lines),
            first_column=4,
            last_column=4 + len(lines[-1]),
            inline=inline,
            with_line=10,
            is_last_item=True,
            has_target=False,
            target=None,
            class_name=class_name,
            flags=0,
        )
    )
