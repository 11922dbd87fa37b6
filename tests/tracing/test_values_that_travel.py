"""The values of a block travel whole, with the user's own code, or the error names what cannot."""

# ruff: noqa: E501
from __future__ import annotations

import functools
import json
import os
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from local_trace import trace

from nnsight_async.errors import CaptureError
from nnsight_async.tracing import collect, dumps, loads

HERE = Path(__file__).parent


def nothing(_: object) -> None:
    return None


def elsewhere(values: dict[str, Any], expression: str, folder: Path) -> Any:
    """Unpickle `values` in a process that knows nothing of this one's files, and evaluate `expression` there."""
    data = folder / "values"
    data.write_bytes(dumps(values, nothing))
    script = (
        "import sys, json\n"
        "from nnsight_async.tracing import loads\n"
        "values = loads(open(sys.argv[1], 'rb').read(), None)\n"
        "print(json.dumps(eval(sys.argv[2], values)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(data), expression],
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
        cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


HELPERS = """
    import dataclasses, enum, functools, os, threading
    from typing import NamedTuple, TypeVar
    import other_helpers
    from other_helpers import double

    T = TypeVar("T")
    SCALE = 10
    TABLE = {"a": 1}
    LOCK = threading.Lock()

    class Color(enum.Enum):
        RED = 1
        BLUE = 2

    @dataclasses.dataclass
    class Point:
        x: int
        y: int = SCALE
        def norm(self):
            return scaled(self.x + self.y)

    class Child(Point):
        def norm(self):
            return super().norm() + 1

    class Pair(NamedTuple):
        a: int
        b: int = 2

    def scaled(x, by=SCALE):
        return double(x) * by

    def even(n):
        return True if n == 0 else odd(n - 1)

    def odd(n):
        return False if n == 0 else even(n - 1)

    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    def adder(n):
        def add(x):
            return x + n + other_helpers.ONE
        return add

    def guarded(x):
        with LOCK:
            return x

    def path():
        return os.path.basename("/a/b")

    def identity(x: T) -> T:
        return x

    half = functools.partial(scaled, by=0.5)
"""


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A user's module next to the script, which imports another one."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "my_helpers.py").write_text(textwrap.dedent(HELPERS))
    (folder / "other_helpers.py").write_text("ONE = 1\nimport my_helpers\ndef double(x):\n    return x * 2\n")
    monkeypatch.syspath_prepend(str(folder))
    import my_helpers

    yield my_helpers
    for name in ("my_helpers", "other_helpers"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "expression", "result"),
    [
        ("scaled", "f(2)", 40),
        ("half", "f(2)", 2.0),
        ("even", "f(10)", True),
        ("factorial", "f(5)", 120),
        ("path", "f()", "b"),
        ("identity", "f(3)", 3),
        ("Point", "f(1).norm()", 220),
        ("Child", "f(1).norm()", 221),
        ("Child", "repr(f(1))", "Child(x=1, y=10)"),
        ("Color", "[f.RED.value, f(2).name, f['RED'] is f.RED]", [1, "BLUE", True]),
        ("Pair", "f(1)._asdict()", {"a": 1, "b": 2}),
        ("SCALE", "f", 10),
    ],
)
def test_the_users_functions_and_classes(helpers: Any, tmp_path: Path, name: str, expression: str, result: Any) -> None:
    assert elsewhere({"f": getattr(helpers, name)}, expression, tmp_path) == result


def test_closures_and_objects_of_the_users_classes(helpers: Any, tmp_path: Path) -> None:
    values = {"add": helpers.adder(3), "point": helpers.Point(1, 2), "red": helpers.Color.RED}
    assert elsewhere(values, "[add(1), point.norm(), point.y, red.name]", tmp_path) == [5, 60, 2, "RED"]


def test_the_users_modules(helpers: Any, tmp_path: Path) -> None:
    values = {"helpers": helpers, "os": os}
    expression = (
        "[helpers.scaled(2), helpers.TABLE, helpers.Point(1).norm(), helpers.other_helpers.ONE, "
        "helpers.other_helpers.my_helpers is helpers, helpers.__name__, os.path.basename('a/b')]"
    )
    assert elsewhere(values, expression, tmp_path) == [40, {"a": 1}, 220, 1, True, "my_helpers", "b"]


def test_what_a_users_module_cannot_send_is_named_when_it_is_missed(helpers: Any) -> None:
    arrived = loads(dumps({"helpers": helpers}, nothing), nothing)["helpers"]
    assert arrived is not helpers
    assert arrived.scaled(1) == 20
    with pytest.raises(AttributeError, match=r"my_helpers.LOCK could not be sent with the block.*_thread.lock"):
        _ = arrived.LOCK
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_the_kind'"):
        _ = arrived.nothing_of_the_kind


def test_a_function_that_needs_a_lock_is_refused_by_name(helpers: Any) -> None:
    with pytest.raises(CaptureError, match=r"here.py:3: the block reads `f` \(a function\).*`LOCK`, a _thread.lock"):
        dumps({"x": 1, "f": helpers.guarded}, nothing, where="here.py:3")


def test_installed_packages_are_imported_over_there() -> None:
    data = dumps({"pytest": pytest, "skip": pytest.skip, "path": Path, "dumps": dumps, "json": json.loads}, nothing)
    assert len(data) < 400
    assert loads(data, nothing)["dumps"] is dumps


class Holder:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.items = {"a": [1, socket.socket]}
        self.threshold = 3


def test_the_error_leads_to_the_part_that_is_the_trouble() -> None:
    holder = Holder()
    with pytest.raises(
        CaptureError,
        match=r"the block reads `holder` \(a test_values_that_travel.Holder\).*`holder.lock`, a _thread.lock.*Bind what the block needs",
    ):
        with trace():
            x = holder.threshold
    with pytest.raises(CaptureError, match=r"`deep\['a'\]\[1\].lock`, a _thread.lock"):
        dumps({"deep": {"a": [1, holder]}}, nothing)


def test_the_error_names_the_file_and_line_of_the_block() -> None:
    generator = (n for n in range(3))
    line = test_the_error_names_the_file_and_line_of_the_block.__code__.co_firstlineno + 4
    with pytest.raises(CaptureError, match=rf"^{__file__}:{line}: the block reads `generator` \(a generator\)"):
        with trace():
            x = list(generator)


def test_references_stand_for_what_the_other_side_has() -> None:
    class Model:
        def __init__(self) -> None:
            self.lock = threading.Lock()

    model = Model()

    def helper() -> Any:
        return model

    class Owner:
        def __init__(self) -> None:
            self.model = model

        def method(self) -> Any:
            return self.model, helper()

    def reference(value: object) -> object | None:
        return "the model" if value is model else None

    values = {
        "model": model,
        "helper": helper,
        "owner": Owner(),
        "many": [model, {"m": model}],
        "method": Owner().method,
    }
    arrived = loads(dumps(values, reference), {"the model": 17}.__getitem__)
    assert arrived["model"] == arrived["helper"]() == arrived["owner"].model == 17
    assert arrived["many"] == [17, {"m": 17}]
    assert arrived["method"]() == (17, 17)


def test_values_shared_by_names_stay_shared() -> None:
    shared: list[Any] = []
    arrived = loads(dumps({"a": shared, "b": [shared], "f": lambda: shared}, nothing), nothing)
    assert arrived["a"] is arrived["b"][0]
    assert arrived["f"]() is arrived["a"]


def test_a_class_is_not_changed_by_objects_that_come_back(helpers: Any) -> None:
    method = helpers.Point.norm
    point = helpers.Point(1)
    arrived = loads(dumps({"point": point}, nothing), nothing)["point"]
    assert arrived == point
    assert type(arrived) is helpers.Point
    assert helpers.Point.norm is method


def test_functions_that_hold_themselves_and_partial_methods() -> None:
    def walk(n: int) -> int:
        return 0 if n == 0 else 1 + walk(n - 1)

    arrived = loads(dumps({"walk": walk, "bound": functools.partial(walk, 3)}, nothing), nothing)
    assert arrived["walk"](4) == 4
    assert arrived["bound"]() == 3


GLOBAL = "of the module"
SHADOWED = "of the module"


def test_where_values_are_taken_from() -> None:
    local, unbound = 1, 2
    captured = 3
    del unbound

    def inner() -> dict[str, Any]:
        SHADOWED = "of the function"
        _ = captured
        if False:
            GLOBAL_LATER = 1

        class Body:
            attribute = 4
            values = collect(sys._getframe(), ["attribute", "captured", "GLOBAL", "len", "SHADOWED"])
            assert captured == 3

        assert Body.values == {"attribute": 4, "captured": 3, "GLOBAL": GLOBAL, "SHADOWED": "of the module"}
        return collect(sys._getframe(), ["captured", "SHADOWED", "GLOBAL", "print", "GLOBAL_LATER", "nowhere"])

    assert inner() == {"captured": 3, "SHADOWED": "of the function", "GLOBAL": GLOBAL}
    assert collect(sys._getframe(), ["local", "unbound", "__builtins__"]) == {"local": 1}


def test_reading_does_not_disturb_variables() -> None:
    count = 0

    def bump() -> None:
        nonlocal count
        count += 1

    for n in range(3):
        bump()
        assert collect(sys._getframe(), ["count"]) == {"count": n + 1}
        assert count == n + 1


def test_a_script_beside_its_helpers(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("K = 3\ndef f(x):\n    return g(x) + K\ndef g(x):\n    return x * 2\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import beside\nfrom beside import f\nfrom local_trace import trace\n"
        "class Mine:\n    def go(self):\n        return f(2)\n"
        "mine = Mine()\n"
        "with trace() as tracer:\n    x = (f(1), beside.g(2), beside.K, mine.go())\n    x.save()\nprint(x)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent.parent}"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "(5, 4, 3, 7)\n", done.stderr


def test_programs_pickle() -> None:
    with trace() as tracer:
        x = 1
    assert pickle.loads(pickle.dumps(tracer.program)) == tracer.program
