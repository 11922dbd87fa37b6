"""Which steps get which graphs, and what becomes of blocks where the guess was wrong. On a GPU: tests/test_gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Engines
from torch import nn

from nnsight_async import VLLM
from nnsight_async.client.tiers import find_taps
from nnsight_async.errors import ArgumentError, LocationError, UnsupportedError
from nnsight_async.tracing import CompiledProgram
from nnsight_async.worker.block import Block
from nnsight_async.worker.caching import CacheSpec, Caching
from nnsight_async.worker.controls import Controls
from nnsight_async.worker.copies import Copier
from nnsight_async.worker.hooks import Hooks, record
from nnsight_async.worker.interleaver import Interleaver
from nnsight_async.worker.journal import Journal
from nnsight_async.worker.programs import NO_PROGRAM
from nnsight_async.worker.rows import Rows
from nnsight_async.worker.taps import Places, Shelf, Taps

ONE: Taps = frozenset({("layers.1", "out")})
TWO: Taps = frozenset({("layers.1", "out"), ("layers.2", "out")})


def _shelf(most: int = 8, refuse: Callable[[Taps], bool] = lambda keys: False) -> Shelf[int, tuple[Taps, int]]:
    return Shelf(lambda keys, size: None if refuse(keys) else (keys, size), most)


def test_a_set_of_locations_that_recurs_gets_a_graph() -> None:
    shelf = _shelf()
    assert shelf.pick(ONE, [8, 16]) is None
    assert shelf.pick(ONE, [8, 16]) == (8, (ONE, 8))
    assert shelf.pick(ONE, [8, 16]) == (8, (ONE, 8))
    assert list(shelf) == [(ONE, 8)]


def test_a_larger_graph_or_one_with_more_breaks_stands_in_until_it_is_worth_one() -> None:
    shelf = _shelf()
    shelf.add(TWO, 8)
    shelf.add(ONE, 16)
    found = [shelf.pick(ONE, [8, 16]) for _ in range(16)]
    assert found[:-1] == [(8, (TWO, 8))] * 15
    assert found[-1] == (8, (ONE, 8))
    assert shelf.pick(ONE, [4, 8, 16]) == (8, (ONE, 8))
    assert shelf.pick(frozenset({("layers.3", "out")}), [8, 16]) is None


def test_sets_that_never_recur_get_a_graph_for_all_of_them() -> None:
    shelf = _shelf()
    keys = [frozenset({("layers.1", "out"), (f"layers.{number}", "in")}) for number in range(8)]
    assert [shelf.pick(one, [8]) for one in keys[:-1]] == [None] * 7
    union = frozenset().union(*keys)
    assert shelf.pick(keys[-1], [8]) == (8, (union, 8))
    assert shelf.pick(keys[3], [8]) == (8, (union, 8))


def test_the_least_recently_used_graphs_go_and_what_cannot_be_captured_is_not_tried_again() -> None:
    asked: list[Taps] = []

    def refuse(keys: Taps) -> bool:
        asked.append(keys)
        return keys == TWO

    shelf = _shelf(2, refuse)
    for size in (1, 2):
        shelf.add(ONE, size)
    assert shelf.pick(ONE, [1]) is not None
    shelf.add(ONE, 4)
    assert list(shelf) == [(ONE, 1), (ONE, 4)]
    assert [shelf.pick(TWO, [8]) for _ in range(5)] == [None] * 5
    assert asked.count(TWO) == 1
    assert shelf.drop_oldest()
    assert shelf.drop_oldest()
    assert not shelf.drop_oldest()


def test_steps_are_expected_where_such_steps_were_before() -> None:
    places = Places()
    assert places.expected() == set()
    assert places.expected(prompt=True) is None
    places.prefill.add(("layers.1", "out"))
    assert places.expected() == ONE
    assert places.expected(prompt=True) is None
    places.prefilled = True
    places.decode.add(("layers.2", "out"))
    assert places.expected() == {("layers.2", "out")}
    assert places.expected(prompt=True) == ONE
    places.irregular = True
    assert places.expected() is places.expected(prompt=True) is None


def test_the_journal_puts_back_the_rows_of_those_that_write() -> None:
    journal, key = Journal(), ("layers.1", "out")
    journal.begin()
    first, second, whole = torch.zeros(4, 2), torch.ones(4, 2), torch.full((1, 3), 7.0)
    journal.note(key, [first, whole], [Rows(1, 2, 1)])
    journal.note(key, [second, whole], [Rows(0, 1, 0), Rows(3, 4, 2)])
    first.fill_(-1)  # what the graph's next part may do
    second.fill_(-1)
    journal.begin_again()
    now, all_of_it = torch.full((4, 2), 5.0), torch.zeros(1, 3)
    journal.put_back(key, [now, all_of_it], 3)
    assert now[:, 0].tolist() == [5, 0, 5, 5]
    assert all_of_it.tolist() == [[7, 7, 7]]
    journal.put_back(key, [now, all_of_it], 3)
    assert now[:, 0].tolist() == [1, 0, 5, 1]
    journal.put_back(key, [now, all_of_it], 3)
    journal.begin()
    journal.put_back(key, [now.fill_(9), all_of_it], 3)
    assert now.tolist() == [[9, 9]] * 4


def test_copies_of_many_locations_are_captured_together() -> None:
    values: dict[tuple[str, str], Any] = {
        ("layers.0", "out"): (torch.randn(4, 3), torch.randn(4, 3)),
        ("layers.0", "in"): ((torch.randn(4, 2),), {"scale": torch.tensor(2.0), "name": "x"}),
        ("layers.1", "out"): torch.randn(4, 3),
    }
    copier = Copier()
    for key, value in values.items():
        copier.measure(key, value)
    copier.allocate()
    assert sorted(slab.shape[0] for slab in copier.copies.slabs) == [1, 1, 3]
    for key, value in values.items():
        copier.fill(key, value)
    caching = Caching()
    paths = frozenset({"layers.0", "layers.1"})
    everything, outputs = (
        caching.known(CacheSpec(paths, True, None)),
        caching.known(CacheSpec(paths, False, torch.half)),
    )
    blocks: list[Any] = [SimpleNamespace(caches=[everything]), SimpleNamespace(caches=[everything, outputs])]
    rows = {"a": Rows(0, 1, 0), "b": Rows(2, 3, 1)}
    for name, block in zip(rows, blocks, strict=True):
        block.request_id = name
    caching.begin(blocks, rows)
    caching.take_copies(copier.copies, 3)
    first, second = caching.groups
    assert [key[:2] for key in first.captured] == list(values)
    assert {key[:2] for key in second.captured} == {("layers.0", "out"), ("layers.1", "out")}
    expected: Any = values["layers.0", "out"]
    got = first.captured[0][3]
    assert torch.equal(got[1].tensor, expected[1][[0, 2]])
    (args, kwargs) = first.captured[1][3]
    assert torch.equal(args[0].tensor, values["layers.0", "in"][0][0][[0, 2]])
    assert kwargs["scale"].item() == 2.0
    assert kwargs["name"] == "x"
    assert torch.equal(second.captured[0][3][0].tensor, expected[0][2:3].half())
    caching.begin_again()
    assert first.captured == []


class _Model(nn.Module):
    """Three layers, each of which adds its number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Add(number + 1) for number in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class _Add(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.number


def _block(request_id: str, text: str, namespace: dict[str, Any], *, edits: bool) -> Block:
    program = CompiledProgram(compile(text, "<block>", "exec"), NO_PROGRAM[0].program, frozenset())
    block = Block(request_id, program, NO_PROGRAM[1], dict(namespace), Controls(10, lambda data: {}))
    block.edits = edits
    return block


def test_a_location_that_was_not_expected_is_shown_in_a_second_pass_with_all_edits_in_place() -> None:
    model = _Model()
    modules = dict(model.named_modules())
    expected: Taps = frozenset({("layers.0", "out")})
    passes: list[str] = []

    def seen(key: tuple[str, str], value: Any) -> None:
        if len(passes) > 1 or key in expected:
            interleaver.visit(key, value)

    hooks = Hooks(modules, seen)
    interleaver = Interleaver(hooks.add)
    order: list[tuple[str, str]] = []
    record(modules, lambda: model(torch.zeros(1, 1)), lambda key, value: order.append(key))
    hooks.learn_order(order)
    interleaver.order.learn(order)
    kept: dict[str, float] = {}
    names = {"kept": kept, "at": lambda number: interleaver.wait_for((f"layers.{number}", "out"))}
    blocks = [
        _block("a", "kept['a0'] = float(at(0))\nkept['a2'] = float(at(2))", names, edits=False),
        _block("b", "rows = at(0)\nrows *= 10", names, edits=True),
        _block(
            "c", "rows = at(0)\nrows += 100\nrows = at(1)\nkept['c1'] = float(rows)\nrows += 1000", names, edits=True
        ),
    ]
    for block in blocks:
        interleaver.blocks[block.request_id] = block
    rows = {name: Rows(index, index + 1, index) for index, name in enumerate("abc")}
    interleaver.begin(rows, 3, 3)
    assert interleaver.wanted() == expected
    interleaver.note_pass()
    hidden = torch.tensor([[0.0], [10.0], [20.0], [0.0]])  # the last row is padding
    passes.append("first")
    model(hidden.clone())
    assert interleaver.unserved()
    interleaver.begin_again()
    passes.append("second")
    output = model(hidden.clone())
    assert not interleaver.unserved()
    assert kept == {"a0": 1.0, "a2": 6.0, "c1": 123.0}
    assert output[:3, 0].tolist() == [6.0, 11.0 * 10 + 5, 21.0 + 100 + 2 + 1000 + 3]
    assert blocks[0].places.decode == {("layers.0", "out"), ("layers.2", "out")}


def test_taps_are_found_by_their_names() -> None:
    paths = ["", "model", "model.layers.0", "model.layers.1", "model.layers.1.mlp"]
    assert find_taps(["model.layers.0.output", {"model.layers.*.output", "model.layers.1.mlp.inputs"}], paths) == [
        [("model.layers.0", "out")],
        [("model.layers.0", "out"), ("model.layers.1", "out"), ("model.layers.1.mlp", "in")],
    ]
    with pytest.raises(LocationError, match="no location"):
        find_taps(["model.layers.0"], paths)
    with pytest.raises(LocationError, match=r"model\.layers\.7"):
        find_taps([["model.layers.7.output"]], paths)
    for wrong in ("model.layers.0.output", 3, [3], [[3]]):
        with pytest.raises(ArgumentError):
            find_taps(wrong, paths)


def test_arguments() -> None:
    path = Engines.path("qwen3")
    with pytest.raises(ArgumentError, match="graphs"):
        VLLM(path, graphs="on")  # type: ignore[arg-type]
    with pytest.raises(LocationError, match="taps"):
        VLLM(path, taps=["model.layers.99.output"])
    with pytest.raises(UnsupportedError, match="graphs"):
        VLLM(path, graphs="off", enforce_eager=False)


def test_on_a_cpu_every_step_is_eager(engines: Engines) -> None:
    model = engines.get("qwen3", "sync")
    before = model.tier_stats()
    with model.trace("The capital of France is", max_tokens=5, ignore_eos=True):
        hidden = list().save()
        for _ in range(1):
            hidden.append(model.model.layers[0].output[0])
    model.generate("The capital of France is", max_tokens=3, ignore_eos=True, progress=False)
    after = model.tier_stats()
    assert len(hidden) == 1
    assert after.eager - before.eager >= 8
    assert (after.whole, after.plain, after.tapped, after.again, after.graphs) == (0, 0, 0, 0, ())
