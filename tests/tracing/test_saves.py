"""What `X.save()` saves, and under which names."""

from __future__ import annotations

from typing import Any

import pytest
from local_trace import program_of, save, trace

from nnsight_async.errors import CaptureError


class V:
    """A value that can be saved."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, V) and other.value == self.value

    def __add__(self, other: int) -> V:
        return V(self.value + other)


def test_names_of_each_form() -> None:
    with trace() as tracer:
        a = V(1).save()
        b = c = V(2).save()
        (d := V(3)).save()
        e = V(4)
        e.save()
        f, g = V(5).save(), V(6)
        h, i = (V(7), V(8)).save()  # noqa: RUF059
        j: V = V(9).save()
        k = [V(10).save(), V(11)]
        m = V(12).save() + 1
        n = {}
        n["k"] = V(13).save()
        o = []
        o.append(V(14).save())
        o.append(V(15))
        if (p := V(16).save()) == V(16):
            q = [V(0)]
        q += [V(17).save()]
        r = V(18).save() if False else V(19)
        s = V(20).save() if True else V(21)
        print(t := V(22).save())
    assert tracer.saved == {
        "a": V(1), "b": V(2), "c": V(2), "d": V(3), "e": V(4), "f": V(5), "h": V(7), "i": V(8), "j": V(9),
        "k": [V(10), V(11)], "m": V(13), "n": {"k": V(13)}, "o": [V(14), V(15)], "p": V(16), "q": [V(0), V(17)],
        "s": V(20), "t": V(22),
    }  # fmt: skip
    assert set(tracer.program.saves) == {*tracer.saved, "r"}
    assert (a, c, o[1], s) == (V(1), V(2), V(15), V(20))


def test_a_list_saved_before_it_is_filled() -> None:
    resid = "of an earlier trace"
    with trace() as tracer:
        resid = list().save()
        for step in range(3):
            resid.append(step)
    assert resid == [0, 1, 2]
    assert "resid" not in tracer.sent


def test_the_result_of_the_request() -> None:
    outs: list[Any] = []
    with trace() as tracer:
        out = tracer.result.save()
        outs = []
        outs.append(tracer.result.save())
    assert out.text == "a result"
    assert tracer.results == [("out",), ()]
    assert [one.text for one in outs] == ["a result"]


def test_the_function_form() -> None:
    import local_trace as ns

    with trace() as tracer:
        a = save(V(1))
        b = ns.save(V(2)) if True else None
        c = [ns.save(V(3))]
        d = []
        d.append(save(V(4)))
        save(a)
    assert tracer.saved == {"a": V(1), "b": V(2), "c": [V(3)], "d": [V(4)]}


def test_another_save_function_is_called_and_saves_nothing() -> None:
    class Figure:
        def __init__(self) -> None:
            self.files: list[str] = []

        def save(self, path: str) -> str:
            self.files.append(path)
            return path

    with trace() as tracer:
        figure = Figure()
        a = figure.save("x")
        b = []
        b.append(figure.save("y"))
        files = figure.files
        files.save()
    assert tracer.saved == {"files": ["x", "y"]}
    assert tracer.program.saves == ("files",)


def test_in_functions_of_the_block_that_fill_its_variables() -> None:
    with trace() as tracer:
        acts = []
        last = None

        def note(value: V) -> None:
            global last
            acts.append(value.save())
            last = value.save()

        note(V(1))
        note(V(2))
        squares = [V(n * n).save() for n in range(3)]
    assert tracer.saved == {"acts": [V(1), V(2)], "last": V(2), "squares": [V(0), V(1), V(4)]}


def test_a_saved_value_in_every_kind_of_statement() -> None:
    with trace() as tracer:
        for n in range(2):
            if n:
                a = V(n).save()
            else:
                b = V(n).save()
        while True:
            c = V(2).save()
            break
        try:
            d = V(3).save()
            raise KeyError
        except KeyError:
            e = V(4).save()
        else:
            pass
        finally:
            f = V(5).save()
        match n:
            case 1:
                g = V(6).save()
            case _:
                pass
        with open("/dev/null"):
            h = V(7).save()
    assert tracer.saved == dict(zip("badcefgh", map(V, (0, 1, 3, 2, 4, 5, 6, 7)), strict=True))


@pytest.mark.parametrize(
    "text",
    [
        "self.attr = X.save()",
        "print(X.save())",
        "f(X).save()",
        "self.acts.append(X.save())",
        "if X.save(): pass",
        "for x in X.save(): pass",
        "with X.save() as y: pass",
        "assert X.save()",
        "x = lambda: y.save()",
        "def f():\n    return X.save()",
        "def f():\n    x = X.save()",
        "class C:\n    x = X.save()",
        "logger.info(X.save())",
        "self.d['k'] = X.save()",
        "while X.save(): pass",
        "match X.save():\n    case _: pass",
        "try:\n    pass\nexcept X.save():\n    pass",
        "raise X.save()",
        "del x[X.save()]",
        "@X.save()\ndef f(): pass",
    ],
)
def test_a_save_without_a_variable_is_refused(text: str) -> None:
    with pytest.raises(CaptureError, match=r"^block.py:1\d: .*assign it to a name"):
        program_of(text)


def test_the_message_names_the_line() -> None:
    with pytest.raises(CaptureError, match=r"^block.py:13: `f\(x\).save\(\)` is saved in no variable"):
        program_of("x = 1\ny = 2\nf(x).save()")


def test_methods_called_save_with_arguments_are_left_alone(tmp_path: Any) -> None:
    with trace() as tracer:

        class Store:
            def save(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
                return args, kwargs

        got = [Store().save(1, 2), Store().save(a=1)]
        got.save()
    assert got == [((1, 2), {}), ((), {"a": 1})]
