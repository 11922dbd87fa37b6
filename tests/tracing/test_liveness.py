"""Which variables a suspended block may still read."""

# ruff: noqa: E501
from __future__ import annotations

import dis
import sys
from typing import Any

import pytest
from local_trace import program_of

from nnsight_async.tracing import compile_program


def live_at_stop(text: str, stops: int = 1) -> set[str]:
    """The live variables where `stop()` is called for the `stops`-th time."""
    program = compile_program(program_of(text))
    answers: list[frozenset[str]] = []

    def stop(*_: Any) -> int:
        answers.append(program.live_names(sys._getframe(1).f_lasti))
        return len(answers)

    def mark(value: Any, names: tuple[str, ...]) -> Any:
        return value

    namespace = {"stop": stop, "__save__": mark, "r": range(3), "f": lambda *a: None}
    exec(program.code, namespace)
    return set(answers[stops - 1]) - {"stop", "f", "r", "__save__"}


@pytest.mark.parametrize(
    ("text", "live"),
    [
        ("a = 1\nb = 2\nstop()\nf(a)", "a"),
        ("a = 1\nstop()\na = 2\nf(a)", ""),
        ("a = 1\nstop()\nif a:\n    b = 2\nelse:\n    b = 3\nf(b)", "a"),
        ("a = b = 1\nif a:\n    stop()\nelse:\n    f(b)", ""),
        ("a = b = 1\nfor i in r:\n    f(a)\n    stop()\n    b = 2", "a"),
        ("a = b = 1\nfor i in r:\n    a = i\n    stop()\n    f(i)\nf(b)", "b i"),
        ("a = b = 1\nwhile b:\n    b = 0\n    stop()\n    a = 3\nf(a)", "b"),
        ("a = b = 1\nwhile b:\n    b = 0\n    stop()\n    continue\nf(a)", "a b"),
        ("a = 1\ntry:\n    stop()\n    a = 2\n    f(0)\nexcept KeyError:\n    f(a)", "a KeyError"),
        ("a = 1\ntry:\n    a = stop()\nfinally:\n    f(a)", "a"),
        ("a = b = 1\ntry:\n    stop()\nexcept OSError:\n    f(b)\nelse:\n    f(a)", "a b OSError"),
        ("a = b = 1\ng = lambda: a\nstop()\ng()", "a g"),
        ("a = 1\ndef g():\n    return [a for _ in r]\nstop()", "a"),
        ("a = b = 1\nstop()\n[a for b in r]", "a"),
        ("a = 1\na.save()\nstop()", "a"),
        ("a = b = 1\nstop()\nf(locals())", "a b locals"),
        ("a = 1\nstop()\ndel a", "a"),
        ("a = [1]\nstop(); a[0] = 2", "a"),
        ("a = b = 1\nx = f(stop(), a)\nf(b)", "b a"),
        ("a = b = 1\nx = f(a, stop())\nf(b)", "b"),
        ("import os\nclass C:\n    y = 1\nstop()\nf(os, C)", "os C __name__"),
        ("from contextlib import suppress\na = b = 1\nwith suppress(KeyError):\n    stop()\n    a = 2\n    f(3)\nf(a)", "a"),
        ("a = b = 1\nmatch stop():\n    case 1: f(a)\n    case _: f(b)", "a b"),
        ("global a\na = 1\nstop()\nf(a)", "a"),
        ("\n".join(f"v{n} = {n}" for n in range(300)) + "\nwhile v299:\n    v299 = 0\n    stop()\n" + "    f(v1)\n" * 300, "v1 v299"),
    ],
)  # fmt: skip
def test_live_names(text: str, live: str) -> None:
    assert live_at_stop(text) - set(["y"]) == set(live.split())


def test_an_offset_inside_the_instruction_is_the_instruction() -> None:
    program = compile_program(program_of("a = 1\nx = f(a)\ny = g(a)\nh(x)"))
    calls = [i.offset for i in dis.get_instructions(program.code) if i.opname == "CALL"]
    assert program.live_names(calls[0]) == program.live_names(calls[0] + 2)
    assert program.live_names(calls[0]) == {"a", "g", "h"}
    assert program.live_names(calls[1]) == {"x", "h"}


def test_before_the_first_instruction_all_that_is_read_first_is_live() -> None:
    program = compile_program(program_of("x = a\nb = 1\nf(b)"))
    assert program.live_names(-1) == {"a", "f"}


def test_names_of_a_save_that_is_known_only_when_it_runs() -> None:
    program = compile_program(program_of("a = save(1)\nstop()"))
    assert "a" in program.live_names(len(program.code.co_code))
    assert program.program.saves == ()
