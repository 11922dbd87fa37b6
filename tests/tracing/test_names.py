"""Which names a block takes from its caller, and which it binds."""

# ruff: noqa: E501
from __future__ import annotations

import sys
from typing import Any

import pytest
from local_trace import program_of, trace

from nnsight_async.errors import CaptureError


def reads(text: str) -> set[str]:
    return set(program_of(text).reads)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = a\ny = x", "a"),
        ("x = x", "x"),
        ("x += 1", "x"),
        ("x = 1\nx += y", "y"),
        ("a.b = c", "a c"),
        ("a[i] = c", "a i c"),
        ("(x, *y), z = v\nf(x, y, z)", "v f"),
        ("if c:\n    x = 1\nf(x)", "c f x"),
        ("if c:\n    x = 1\nelse:\n    x = 2\nf(x)", "c f"),
        ("for i in r:\n    x = i\nf(i, x)", "r f i x"),
        ("for i in r:\n    if i: continue\n    x = i\n    f(x)", "r f"),
        ("while c:\n    x = 1\nelse:\n    f(x)", "c f x"),
        ("try:\n    x = g()\nexcept E as e:\n    f(e)\n    raise\nf(x)", "g E f"),
        ("try:\n    x = g()\nexcept E:\n    pass\nf(x)", "g E f x"),
        ("try:\n    x = g()\nfinally:\n    y = 1\nf(x, y)", "g f"),
        ("try:\n    x = g()\nfinally:\n    f(x)", "g f x"),
        ("with c() as x:\n    y = x\nf(x)", "c f"),
        ("with c():\n    y = 1\nf(y)", "c f y"),
        ("def f(a, b=d):\n    c = a\n    return c + e + f()\nf(1)", "d e"),
        ("f = lambda a, *b, c=d: a + b + c + e", "d e"),
        ("x = [i + k for i in r if j]", "r k j"),
        ("x = {i: v for i in r for j in i}", "r v"),
        ("x = sum(y for y in z)\ny", "sum z y"),
        ("def f():\n    def g():\n        return a\n    a = 1\n    return g", ""),
        ("def f():\n    return a\na = 1", "a"),
        ("class C(B, metaclass=M):\n    x = y\n    z = x\n    def m(self):\n        return w", "B M y x w"),
        ("import a.b, c as d\nfrom e import f\ng(a, d, f)", "g"),
        ("from . import helper", "__package__ __name__"),
        ("y = (x := a) + x\nf(x)", "a f"),
        ("c and (x := 1)\nf(x)", "c f x"),
        ("del x", "x"),
        ("x = 1\ndel x\nf(x)", "f x"),
        ("match v:\n    case [a, *b] if g(a): x = 1\n    case {'k': k, **rest}: x = 2\n    case _: x = 3\nf(x)", "v g f"),
        ("match v:\n    case P(q=w): f(w)", "v P f"),
        ("x: T = a", "a"),
        ("class C:\n    x = x", "x"),
        ("f'{x!r:{w}}'", "x w"),
        ("global x\nx = 1\nf(x)", "f"),
        ("x = [lambda: q, [p for _ in s]]", "q p s"),
        ("@d(a)\ndef f(x: T) -> R: pass", "d a T R"),
        ("[(y := x) for x in z]\nf(y)", "z f y"),
        ("def f():\n    [(y := x) for x in z]\n    return y", "z"),
        ("a = [i for i in r]; i = 1; g = lambda: i", "r"),
        ("def f():\n    x = 1\n    def g():\n        global x\n        x += 1", "x"),
    ],
)  # fmt: skip
def test_reads(text: str, expected: str) -> None:
    assert reads(text) == set(expected.split())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax is of Python 3.12")
def test_reads_of_type_parameters() -> None:
    assert reads("def f[T](x: T) -> list[T]:\n    return x + y") == {"list", "y"}
    assert "T" not in reads("class C[T]:\n    x: T")


def test_binds() -> None:
    program = program_of(
        "import a.b\nx, (y, z.w) = v\nfor i in r: pass\nwith c as k: pass\ndef f():\n    global g\n    g = 1\n"
        "class C: pass\ntry: pass\nexcept E as e: pass\n(n := 1)\n[(m := q) for q in r]\nmatch v:\n    case s: pass"
    )
    assert set(program.binds) == set(["a", "x", "y", "i", "k", "f", "g", "C", "e", "n", "m", "s"])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("return 1", "`return`"),
        ("x = yield 1", "`yield`"),
        ("yield from x", "`yield`"),
        ("await x", "`await`"),
        ("async for x in y: pass", "`async for`"),
        ("async with x: pass", "`async with`"),
        ("x = [i async for i in y]", "asynchronous comprehension"),
        ("x = [await i for i in y]", "`await`"),
        ("break", "`break`"),
        ("for x in y:\n    pass\nelse:\n    continue", "`continue`"),
        ("if x:\n    break", "`break`"),
        ("nonlocal x", "`nonlocal`"),
        ("from x import *", "import"),
        ("super().f()", "super"),
        ("def f():\n    super().f()", "super"),
        ("def f():\n    nonlocal x\n    x = 1\nx = 2", "nonlocal"),
    ],
)
def test_what_cannot_be_shipped_is_refused(text: str, what: str) -> None:
    with pytest.raises(CaptureError, match=r"^block.py:1\d: ") as caught:
        program_of("pass\n" + text)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    yield 1\n    return 2",
        "async def f():\n    async with x: await y\n    async for z in w: pass\n    return [i async for i in z]",
        "for x in y:\n    if x: break\n    else: continue",
        "while x:\n    try: break\n    finally: pass",
        "class C(B):\n    def f(self):\n        return super().f()",
        "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2\n    return g",
        "super(C, self).f()",
    ],
)
def test_the_same_inside_functions_and_loops_of_the_block_is_fine(text: str) -> None:
    program_of(text)


def test_the_digest_tells_programs_apart() -> None:
    one, same, other = program_of("x = 1"), program_of("x = 1"), program_of("x = 2")
    assert one.digest == same.digest
    assert one.digest != other.digest
    assert len(one.digest) == 64


class _Private:
    __hidden = 5

    def __init__(self) -> None:
        self.__value = 7

    def run(self) -> tuple[int, int, Any]:
        __local = 1
        with trace() as tracer:
            total = (self.__value + self.__hidden + __local).save()
            __mine = total.save()

            def __f(__a: int) -> int:
                return __a

            other = __f(__a=3).save()
        return total, __mine, (other, tracer)


def test_private_names_of_a_class() -> None:
    total, mine, (other, tracer) = _Private().run()
    assert (total, mine, other) == (13, 13, 3)
    assert set(tracer.program.saves) == {"total", "_Private__mine", "other"}
    assert "_Private__local" in tracer.program.reads


def test_a_name_known_nowhere_fails_at_its_own_line() -> None:
    with pytest.raises(NameError, match="nowhere_to_be_found") as caught:
        with trace():
            x = 1
            nowhere_to_be_found  # noqa: F821
    entry = caught.traceback[-1]
    assert entry.lineno + 1 == test_a_name_known_nowhere_fails_at_its_own_line.__code__.co_firstlineno + 4
    assert str(entry.path) == __file__
