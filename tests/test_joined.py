"""Calls of one module by several blocks are run as one, and each block gets what it would have got alone."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from blocks import Batch
from conftest import Engines, live
from reference import close
from torch import nn

from nnsight_async import VLLM
from nnsight_async.worker import joined

ROWS = {"r": (0, 3), "s": (3, 4), "t": (5, 7)}
TOKENS = 8
WIDTH = 4


class Doubling(nn.Module):
    """Doubles its rows, in place, and returns them twice; ``calls`` has the number of rows of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, rows: torch.Tensor, *, times: float = 2.0, other: nn.Module | None = None) -> Any:
        self.calls.append(len(rows))
        if rows.shape[-1] != WIDTH:
            raise ValueError(f"rows of {rows.shape[-1]}")
        rows *= times
        return rows, [rows + 1, None], 5

    def total(self, rows: torch.Tensor) -> torch.Tensor:
        """One number for all rows: not to be taken apart."""
        self.calls.append(len(rows))
        return rows.sum()


def _run(text: str, *, edits: str = "") -> Any:
    module = Doubling()
    batch = Batch({"twice": module})
    refs = {"a": batch.root_ref.at("a"), "b": batch.root_ref.at("b"), "double": batch.root_ref.at("twice")}
    for name in ROWS:
        block = batch.add(name, textwrap.dedent(text), kept=[], who=name, **refs)
        block.edits = name in edits
    values = {name: torch.arange(TOKENS * WIDTH).float().view(TOKENS, WIDTH) + 100 * (name == "b") for name in "ab"}
    before = {name: value.clone() for name, value in values.items()}
    batch.step(values, ROWS, TOKENS)
    kept = {name: block.namespace["kept"] for name, block in batch.interleaver.blocks.items()}
    failures = {name: block.failure for name, block in batch.interleaver.blocks.items()}
    batch.close()
    own = {path: {name: value[slice(*ROWS[name])] for name in ROWS} for path, value in before.items()}
    return module, kept, failures, own


def test_one_call_for_all_of_them() -> None:
    text = """
    first = a.output
    doubled, rest, five = double(first)
    kept += [first, doubled, rest[0], rest[1], five]
    kept.append(a.output)
    again = double(doubled)[0]
    kept.append(again)
    kept.append(double(b.output, times=3.0, other=a)[0])
    """
    module, kept, failures, own = _run(text)
    assert module.calls == [6, 6, 6]
    for name in ROWS:
        assert failures[name] is None
        rows, later = own["a"][name], own["b"][name]
        first, doubled, more, none, five, same, again, tripled = kept[name]
        assert first is same
        assert (none, five) == (None, 5)
        for mine, expected in (
            (first, rows),
            (doubled, 2 * rows),
            (more, 2 * rows + 1),
            (again, 4 * rows),
            (tripled, 3 * later),
        ):
            assert torch.equal(mine, expected)


def test_what_a_call_returns_is_its_callers_alone() -> None:
    text = """
    result = double(a.output)[0]
    view = result[0]
    if who == "r":
        result += 1000
        kept.append(view)
    else:
        kept.append(result)
    """
    module, kept, _, own = _run(text)
    assert module.calls == [6]
    assert torch.equal(kept["r"][0], 2 * own["a"]["r"][0] + 1000)
    for name in "st":
        assert torch.equal(kept[name][0], 2 * own["a"][name])
        assert kept[name][0].untyped_storage().nbytes() == kept[name][0].nbytes


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # A view that stands in the middle of an expression cannot be kept safe, so the call is made at once.
        ("x = a.output\nkept.append([x[:1], (x[:1] * 2, double(x)[0])][1][1])\n", [3, 1, 2]),
        ("kept.append((a.output, double(a.output)[0])[1])\n", [6]),
        ("kept.append({1: a.output[:], 2: double(torch.ones(1, 4))}[1] * 2)\n", [3]),
        ("kept.append(double(a.output[0][None])[0].repeat(len(a.output), 1) * 0 + 2 * a.output)\n", [3]),
        ("kept.append(double.total(a.output) * 0 + 2 * a.output)\n", [6, 3, 1, 2]),
        ("x = a.output\nkept.append(double(x if who != 's' else x.double())[0].float())\n", [5, 1]),
        ("kept.append(double(a.output[:, None])[0][:, 0])\n", [6]),
        # Nor can the rows that an iterator still has: only the last of each request waits for the others.
        ("x = a.output\nkept.append(torch.stack([double(row[None])[0][0] for row in x]))\n", [1, 1, 1, 3]),
        ("def f(x):\n    y = double(x)[0]\n    return y + 0 * x\nkept.append(f(a.output))\n", [6]),
    ],
)
def test_every_way_of_calling_gives_twice_the_rows(text: str, calls: list[int]) -> None:
    module, kept, failures, own = _run(text)
    for name in ROWS:
        assert failures[name] is None, failures[name].message
        assert torch.equal(kept[name][0], 2 * own["a"][name])
    assert module.calls == calls


def test_a_block_that_edits_calls_by_itself() -> None:
    """What it is shown stays the engine's memory, before the call and after it."""
    text = """
    x = a.output
    y = double(x)[0]
    if who == "s":
        x[:] += y
    kept.append(a.output)
    """
    module, kept, failures, own = _run(text, edits="s")
    assert module.calls == [1, 5]
    assert torch.equal(kept["s"][0], 3 * own["a"]["s"])
    for name in "rt":
        assert torch.equal(kept[name][0], own["a"][name])
    assert not any(failures.values())


def test_an_error_is_told_to_those_who_made_it() -> None:
    text = """
    x = a.output
    if who == "s":
        x = x[:, :2]
    kept.append(double(x)[0])
    kept.append(double(x[:, :1])[0])
    """
    module, kept, failures, own = _run(text)
    assert module.calls == [5, 1, 5, 3, 2]  # together, then the wrong one; and all were wrong, which are told singly
    assert [len(kept[name]) for name in "rst"] == [1, 0, 1]
    assert (failures["s"].message, failures["s"].where) == ("rows of 2", "<block>:4: kept.append(double(x)[0])")
    for name in "rt":
        assert torch.equal(kept[name][0], 2 * own["a"][name])
        assert failures[name].message == "rows of 1"
        assert failures[name].where == "<block>:5: kept.append(double(x[:, :1])[0])"


def test_many_rows_are_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "_MOST_ROWS", 4)
    module, kept, _, own = _run("kept.append(double(a.output)[0])\n")
    assert module.calls == [3, 3]  # by itself, having more than half of what is allowed; then the others
    for name in ROWS:
        assert torch.equal(kept[name][0], 2 * own["a"][name])


def _each(kept: Any, chosen: list[int]) -> list[Any]:
    return [kept] if len(chosen) == 1 else list(kept)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_moe"])
def test_the_logit_lens_of_many_requests_is_that_of_each_alone(engines: Engines, name: str) -> None:
    """At the prompt and after it, through methods and modules; some of the requests steer by what a module returned."""
    model: VLLM = engines.get(name, "sync")
    layers, prompts = model.model.layers, ["The", "The capital of France is", "def f(x):", "One two three"] * 3

    def run(chosen: list[int]) -> list[Any]:
        with model.trace(temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            for number in chosen:
                with tracer.invoke(prompts[number]):
                    kept = list().save()
                    for _ in tracer.iter[:3]:
                        stream = sum(layers[1].output)
                        logits = model.logits_processor(model.lm_head, model.model.norm(stream))
                        kept.append((stream, logits.topk(3).values))
                        if number % 4 == 3:
                            layers[2].output[0][:] += layers[3].mlp(layers[2].output[0]) * 0.5
                        early = layers[2].output[0]
                        kept.append((model.compute_logits(early)[-1], early))
                        kept.append((model.logits,))
        return [[tensor for values in one for tensor in values] for one in _each(kept, chosen)]

    def steered(chosen: list[int]) -> list[Any]:
        with model.trace(temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            for number in chosen:
                with tracer.invoke(prompts[number]):
                    kept = list().save()
                    for _ in tracer.iter[:3]:
                        stream = sum(layers[1].output)
                        kept.append(model.model.norm(stream))
                        kept.append(model.logits_processor(model.lm_head, kept[-1]))
                        kept.append(stream)
                        kept.append(model.logits)
        return _each(kept, chosen)

    for work in (run, steered):
        together = work(list(range(len(prompts))))
        for number in range(4):
            (alone,) = work([number])
            for mine, own in zip(together[number], alone, strict=True):
                close(mine, own, 1e-4)
            for mine, own in zip(together[number], together[number + 4], strict=True):
                close(mine, own, 1e-4)
    assert live(model) == 0
