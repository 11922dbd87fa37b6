"""A hundred random batches of random programs: each gives what the same program gives in HuggingFace with hooks."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import linecache
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import Engines, live
from hypothesis import HealthCheck, assume, event, given, note, seed, settings
from hypothesis import strategies as st
from programs import (
    BUMP,
    LAYERS,
    WIDTH,
    AddUp,
    Both,
    Edit,
    Expected,
    Fail,
    How,
    Kind,
    Loop,
    Place,
    Program,
    Read,
    Request,
    Result,
    SaveLater,
    Statement,
    Stop,
    Stream,
    Sweep,
    Tried,
    When,
    expect,
    source,
    statements,
)
from reference import close, reference
from torch import Tensor

from nnsight_async import VLLM
from nnsight_async.errors import LoopCutShortWarning

#: What a value may be off by, as a fraction of its scale; a token that is chosen by less is not compared.
TOLERANCE = 1e-3
#: Larger magnitudes are what a program wrote into its logits: they are compared exactly, and give no scale.
WRITTEN = 1e6
VOCABULARY = 49152
#: The steps of an open loop.
OPEN = range(1 << 30)


# Programs, from hypothesis. One is mostly in the order of the forward pass, and sometimes not.


def _chance(draw: st.DrawFn, percent: int) -> bool:
    return draw(st.integers(0, 99)) >= 100 - percent


_inside: tuple[Kind, ...] = ("attention", "post_norm", "mlp_input", "mlp", "layer")
_token = st.integers(3, VOCABULARY - 1)


class _Pool:
    """Where one program reads and edits, and fresh names for what it reads.

    A few layers only: their locations share memory (a layer's hidden states are its mlp's output), and what is kept of
    one must not change with an edit of the next.
    """

    def __init__(self, layers: set[int]) -> None:
        rows = [Place(kind, layer) for layer in sorted(layers) for kind in (*_inside, "layer")]
        after = [Place("logits"), Place("samples")] * len(layers)
        self.hidden = st.sampled_from([*rows, Place("norm")])
        self.place = st.sampled_from([*rows, Place("norm"), *after])
        self._numbers = itertools.count()

    def name(self) -> str:
        return f"v{next(self._numbers)}"


@st.composite
def _read(draw: st.DrawFn, pool: _Pool) -> Statement:
    place = draw(pool.place)
    parts = {"logits": ["", "[:, 3:9]", ".argmax(-1)"], "samples": ["", ".item()"]}.get(
        place.kind, ["", "", "[-1]", "[:, 3:9]", ".T", "[-1].norm()"]
    )
    part = draw(st.sampled_from(parts))
    if len(parts) > 3 and _chance(draw, 12):
        part = "[1]"
    into = draw(st.sampled_from(["list", "list", "name", "dict", "item", "later"]))
    pair = place.kind == "layer" and part == "" and draw(st.booleans())
    return Read(pool.name(), place, part, into, pair)


@st.composite
def _edit(draw: st.DrawFn, pool: _Pool) -> Statement:
    place = draw(pool.place)
    if place.kind == "samples":
        return Edit(place, "force", index=draw(_token))
    if place.kind == "logits":
        how: How = draw(st.sampled_from(["column", "ban", "force"]))
        return Edit(place, how, draw(st.sampled_from([-3.0, 5.0])), draw(_token))
    ways = ["add", "bump", "zero", "scale"]
    if place.kind not in ("norm", "post_norm"):  # whose first element is no place to assign to
        ways += ["replace", "replace"]
        if _chance(draw, 5):
            ways = ["misshape"]
    return Edit(
        place,
        draw(st.sampled_from(ways)),
        draw(st.sampled_from([-2.0, -0.5, 0.5, 1.5, 3.0])),
        draw(st.integers(0, WIDTH - 1)),
    )


@st.composite
def _statement(draw: st.DrawFn, pool: _Pool) -> Statement:
    match draw(st.sampled_from(["read"] * 6 + ["edit"] * 5 + ["both", "sweep", "add up"])):
        case "read":
            return draw(_read(pool))
        case "edit":
            return draw(_edit(pool))
        case "both":
            into = draw(st.sampled_from(["list", "name", "dict"]))
            two = [draw(pool.hidden), draw(pool.hidden)]
            if not _chance(draw, 5):
                two.sort(key=lambda place: place.order)
            return Both(pool.name(), *two, into)
        case "sweep":
            return Sweep(pool.name(), draw(st.integers(1, LAYERS - 1)), draw(st.booleans()))
        case _:
            return AddUp(draw(pool.hidden))


def _span(statement: Statement) -> tuple[int, int]:
    """The first and the last place that a statement comes to."""
    match statement:
        case Both(_, first, second, _):
            return first.order, second.order
        case Sweep(_, first, _):
            return Place("layer", first).order, Place("layer", LAYERS - 1).order
        case Read() | Edit() | AddUp():
            return statement.place.order, statement.place.order
    raise AssertionError(statement)


@st.composite
def _body(
    draw: st.DrawFn, pool: _Pool, most: int, start: int, steps: Sequence[int] = ()
) -> tuple[tuple[Statement, ...], int]:
    """Statements from the place numbered `start` on, and the place that they end at; `steps` are a loop's."""
    drawn = [draw(_statement(pool)) for _ in range(draw(st.integers(1, most)))]
    body: list[Statement] = []
    if _chance(draw, 5):
        body = drawn
    else:
        for one in sorted(drawn, key=lambda s: _span(s)[0]):
            first, last = _span(one)
            if first >= start:
                start = last
                body.append(one)
    for index, one in reversed(list(enumerate(body))):
        if isinstance(one, Read) and one.into == "later":
            body.insert(draw(st.integers(index + 1, len(body))), SaveLater(one.name))
        if _chance(draw, 6):
            body[index] = Tried(body[index])
        if steps and _chance(draw, 15):
            body[index] = When(draw(st.sampled_from(steps[:4])), body[index])
    if _chance(draw, 15):  # mostly too late for the first place of all, and the block goes on
        early = Read(pool.name(), Place(_inside[0]), into="name")
        body.insert(draw(st.integers(0, len(body))), Tried(early))
    ending: Statement | None = Stop() if _chance(draw, 30 if steps else 8) else Fail() if _chance(draw, 4) else None
    if ending is not None:
        if steps and not _chance(draw, 25):
            ending = When(draw(st.sampled_from(steps[:3])), ending)
        body.insert(draw(st.integers(len(body) // 2, len(body))), ending)
    return tuple(body), start


@st.composite
def _steps(draw: st.DrawFn, start: int, most: int) -> tuple[str, Sequence[int]]:
    """A loop's steps from `start` on, mostly within `most`: as the text says them, and themselves."""
    first = start + draw(st.sampled_from([0, 0, 0, 1]))
    last = max(first + 1, most) + (draw(st.integers(1, 3)) if _chance(draw, 12) else 0)
    if most - first > 1 and not _chance(draw, 50):
        last = draw(st.integers(first + 1, last))
    match draw(st.sampled_from(["bounded"] * 5 + ["one", "list", "stride", "open", "all"])):
        case "bounded":
            return (f"tracer.iter[{first}:{last}]" if first else f"tracer.iter[:{last}]"), range(first, last)
        case "one":
            return f"tracer.iter[{first}]", [first]
        case "list":
            chosen = [first, *(step for step in range(first + 1, last) if draw(st.booleans()))]
            return f"tracer.iter[{chosen}]", chosen
        case "stride":
            return f"tracer.iter[{first}:{last}:2]", range(first, last, 2)
        case "open":
            return f"tracer.iter[{first}:]", OPEN[first:]
        case _:
            return "tracer.all()", OPEN


@st.composite
def _programs(draw: st.DrawFn, max_tokens: int) -> Program:
    ending = draw(st.sampled_from(["none"] * 3 + ["too late", "stop"]))
    pool = _Pool(draw(st.sets(st.integers(0, LAYERS - 1), min_size=1, max_size=2)))
    body: list[Statement] = []
    step, place = 0, -1
    if _chance(draw, 55):
        prefill, place = draw(_body(pool, 7, -1))
        body += prefill
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 2]))):
        if place >= 0 and not _chance(draw, 25):
            step, place = step + 1, -1  # else the loop begins in the step at hand
        text, steps = draw(_steps(step, max_tokens))
        inner, place = draw(_body(pool, 9, place, steps))
        body.append(Loop(text, steps, inner))
        step = min(steps[-1], max_tokens)  # nothing comes after an open loop, but something may be written there
    if len(body) and isinstance(body[-1], Loop) and _chance(draw, 40):
        after, place = draw(_body(pool, 4, place))
        body += after
    if ending != "none":  # where the program ends otherwise
        body.append(Stop() if ending == "stop" else AddUp(Place(_inside[0])))
    elif _chance(draw, 40):
        body.append(Result(draw(st.booleans())))
    return Program(tuple(body), draw(st.booleans()))


@st.composite
def _batches(draw: st.DrawFn) -> list[Request]:
    shared = _chance(draw, 20)  # one program for all of them, as a function called several times
    batch: list[Request] = []
    for _ in range(draw(st.sampled_from([1, 2, 2, 3, 3, 4, 4]))):
        prompt = tuple(draw(st.lists(_token, min_size=1, max_size=12)))
        max_tokens = draw(st.integers(1, 5))
        program = batch[0].program if shared and batch else draw(_programs(max_tokens))
        batch.append(Request(prompt, max_tokens, program))
    return batch


# A batch in the engine.


@dataclass
class Actual:
    """What a request gave: its saves at the end, and what came on the way there."""

    saves: dict[str, Any] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    names: dict[str, Any] | None = None
    error: Exception | None = None


def _import(path: Path, program: Program) -> ModuleType:
    path.write_text(source(program))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def _one(model: VLLM, module: ModuleType, request: Request) -> Actual:
    seen: dict[str, Any] = {"outputs": []}
    sampling = {"temperature": 0.0, "max_tokens": request.max_tokens, "ignore_eos": True}
    error = None
    try:
        await module.run(model, list(request.prompt), sampling, BUMP, seen)
    except Exception as raised:
        error = raised
    names = seen.get("names")
    if names is not None:
        names = {name: names[name] for name in names.keys() - {"model", "prompt", "settings", "bump", "seen", "tracer"}}
    return Actual(seen["tracer"].saves, seen["outputs"], names, error)


async def _all(model: VLLM, modules: list[ModuleType], batch: list[Request]) -> tuple[list[Actual], Counter[str]]:
    """All requests of a batch at once, and how many loops of each file were said to be cut short."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        running = [_one(model, module, request) for module, request in zip(modules, batch, strict=True)]
        results = await asyncio.wait_for(asyncio.gather(*running), 60)
    cut = [warning for warning in caught if issubclass(warning.category, LoopCutShortWarning)]
    for warning in cut:
        line = linecache.getline(warning.filename, warning.lineno)
        assert line.lstrip().startswith("for step in tracer."), line
    return results, Counter(warning.filename for warning in cut)


# The comparison.


def _same(actual: Any, expected: Any, where: str) -> None:
    """Assert that a saved value is the expected one."""
    match expected:
        case Stream(value):
            assert isinstance(actual, tuple), f"{where}: a {type(actual).__name__}"
            _same(sum(actual), value, where)
        case Tensor():
            assert isinstance(actual, Tensor), f"{where}: a {type(actual).__name__}"
            assert actual.shape == expected.shape, f"{where}: {tuple(actual.shape)}, not {tuple(expected.shape)}"
            written = expected.abs() >= WRITTEN
            assert actual[written].tolist() == expected[written].tolist(), where
            if not expected.is_floating_point():
                assert actual.tolist() == expected.tolist(), f"{where}: {actual.tolist()}, not {expected.tolist()}"
            elif not written.all():
                try:
                    close(actual[~written], expected[~written], TOLERANCE)
                except AssertionError as error:
                    raise AssertionError(f"{where}: {error}") from None
        case dict():
            assert actual.keys() == expected.keys(), f"{where}: {sorted(actual)}, not {sorted(expected)}"
            for name, value in expected.items():
                _same(actual[name], value, f"{where}[{name!r}]")
        case list():
            assert len(actual) == len(expected), f"{where}: {len(actual)} items, not {len(expected)}"
            for index, value in enumerate(expected):
                _same(actual[index], value, f"{where}[{index}]")
        case float():
            assert actual == pytest.approx(expected, rel=TOLERANCE), where
        case _:
            assert type(actual) is type(expected), f"{where}: a {type(actual).__name__}"
            assert actual == expected, f"{where}: {actual}, not {expected}"


def _plain(saves: dict[str, Any]) -> dict[str, Any]:
    """Saves with the tokens in place of the request's result."""
    if "out" not in saves:
        return saves
    return {**saves, "out": list(saves["out"].outputs[0].token_ids)}


def _compare(actual: Actual, expected: Expected, program: Program, where: str) -> None:
    """Assert that a request did what it should: its error, what it saved in the end and at every step, its tokens."""
    kinds = [kind.__name__ for kind in type(actual.error).__mro__] if actual.error is not None else []
    if expected.failed is None:
        assert actual.error is None, f"{where}: {actual.error!r}"
    else:
        assert expected.failed in kinds, f"{where}: {expected.failed} expected, not {actual.error!r}"
        assert "BlockError" in kinds, where
    _same(_plain(actual.saves), expected.saves, f"{where}: saves")
    if not program.streamed:
        assert actual.names is not None
        _same(_plain(actual.names), expected.saves, f"{where}: written back")
        return
    assert [output.step for output in actual.outputs] == list(range(len(expected.tokens))), where
    for step, (output, saves) in enumerate(zip(actual.outputs, expected.snapshots, strict=True)):
        assert list(output.outputs[0].token_ids) == expected.tokens[: step + 1], f"{where}: tokens at step {step}"
        _same(_plain(output.saves), saves, f"{where}: step {step}")
    if expected.failed is None:
        last = actual.outputs[-1].outputs[0]
        reason = ("stop", "tracer.stop") if expected.stopped else ("length", None)
        assert (last.finish_reason, last.stop_reason) == reason, where


def _kinds(batch: list[Request], expected: list[Expected]) -> set[str]:
    """What there is in a batch, in words; the test sees to it that all of it came up."""
    kinds = {f"a batch of {len(batch)}"}
    for request, outcome in zip(batch, expected, strict=True):
        kinds.add("streamed" if request.program.streamed else "written back")
        kinds.add("stopped" if outcome.stopped else outcome.failed or "to the end")
        if outcome.cut_short:
            kinds.add("cut short")
        if outcome.saves.get("told"):
            kinds.add("caught in the block")
        loops = sum(isinstance(statement, Loop) for statement in request.program.body)
        kinds.add(f"{loops} loops")
        for statement in statements(request.program.body):
            kinds.add(type(statement).__name__)
            if isinstance(statement, Edit):
                kinds |= {f"edit: {statement.how}", f"edit: {statement.place.kind}"}
            elif isinstance(statement, Read):
                kinds |= {f"read: {statement.place.kind}", f"saved: {statement.into}"}
    return kinds


#: What must have come up in a hundred batches, or they say little.
WANTED = {
    *(f"a batch of {size}" for size in (1, 2, 3, 4)),
    *("streamed", "written back", "to the end", "stopped", "cut short", "caught in the block"),
    *("OutOfOrderError", "ValueError", "IndexError", "0 loops", "1 loops", "2 loops"),
    *(kind.__name__ for kind in (SaveLater, Both, Sweep, AddUp, When, Result)),
    *(f"edit: {how}" for how in ("add", "bump", "zero", "scale", "replace", "column", "ban", "force")),
    *(f"read: {kind}" for kind in (*_inside, "norm", "logits", "samples")),
    *(f"edit: {kind}" for kind in (*_inside, "norm", "logits", "samples")),
    *(f"saved: {into}" for into in ("name", "list", "item", "dict", "later")),
}


def _wait_until_free(model: VLLM) -> None:
    """The worker frees a block in the step after its request's last."""
    deadline = time.monotonic() + 5
    while live(model) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert live(model) == 0


@pytest.mark.slow
def test_random_programs_give_what_they_give_in_huggingface(engines: Engines, tmp_path: Path) -> None:
    model, huggingface = engines.get("qwen3", "async"), reference(Engines.path("qwen3"))
    numbers, came_up = itertools.count(), Counter[str]()

    def check(batch: list[Request]) -> None:
        expected = [expect(huggingface, request, TOLERANCE) for request in batch]
        assume(not any(outcome.tie for outcome in expected))
        modules: dict[int, ModuleType] = {}
        for request in batch:
            if id(request.program) not in modules:
                path = tmp_path / f"program_{next(numbers)}.py"
                modules[id(request.program)] = _import(path, request.program)
        files = [modules[id(request.program)] for request in batch]
        for request, module in zip(batch, files, strict=True):
            note(f"{module.__name__}: {len(request.prompt)} and {request.max_tokens} tokens\n{source(request.program)}")

        results, warned = thread.submit(asyncio.run, _all(model, files, batch)).result()

        for request, module, actual, outcome in zip(batch, files, results, expected, strict=True):
            _compare(actual, outcome, request.program, module.__name__)
        cut = [str(module.__file__) for module, outcome in zip(files, expected, strict=True) if outcome.cut_short]
        assert warned == Counter(cut)
        _wait_until_free(model)
        for kind in _kinds(batch, expected):
            came_up[kind] += 1
            event(kind)

    # The same examples at every run, as long as the package is the same: hypothesis also draws what stands in its code,
    # so another version may need some more batches until everything has come up.
    for number, count in enumerate([100, *[40] * 5]):
        run = settings(
            max_examples=count,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        )(seed(1 + number)(given(_batches())(check)))
        # In a thread: the suite's own event loop belongs to the main one.
        with ThreadPoolExecutor(1) as thread:
            run()
        if came_up.keys() >= WANTED:
            break
    assert came_up.keys() >= WANTED, f"never came up: {sorted(WANTED - came_up.keys())}"
