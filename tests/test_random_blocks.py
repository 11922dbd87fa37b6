"""Blocks made up at random, run together and each alone, on values that are whole numbers: nothing may differ.

Alone, a block's loops are run turn by turn and its calls by itself; together, loops that only collect and calls of one
module are run for all of them at once.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from blocks import Batch
from torch import nn

from nnsight_async.tracing.gathers import GATHER, GATHERED, REST
from nnsight_async.worker.rows import Rows

WIDTH = 4
BATCHES = 300


class Scale(nn.Module):
    """Multiplies its rows, in place."""

    def forward(self, rows: torch.Tensor, *, times: float = 2.0) -> Any:
        rows *= times
        return rows, [rows + 1, None]


class Mix(nn.Module):
    """A linear layer with whole numbers for weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.arange(-6, 10).view(WIDTH, WIDTH).float()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight


def _program(rng: random.Random) -> tuple[str, bool]:
    """A block's text, and whether it edits; it reads the locations in the order of the pass."""
    lines, edits, variables = [], False, []
    at = 0
    while at < 3:
        here = f"modules[{at}].output"
        value = rng.choice([*variables, *[f"{here}[{item}]" for item in (0, 0, 1, 1)]])
        name = f"v{len(lines)}"
        match rng.randrange(12):
            case 0 | 1 | 2:
                stop = rng.randint(at + 1, 3)
                form = rng.choice(
                    ["m.output", "m.output[0]", "m.output[1][-1]", "sum(m.output)", "m.output[0] + m.output[1]"]
                )
                if rng.random() < 0.5:
                    lines += [f"for m in modules[{at}:{stop}]:", f"    kept.append({form})"]
                else:
                    lines.append(f"kept.append([{form} for m in modules[{at}:{stop}]])")
                at = stop
                continue
            case 3:
                lines.append(f"{name} = {value}")
                variables.append(name)
            case 4 | 5:
                lines.append(f"{name} = scale({value})[0]")
                variables.append(name)
            case 6:
                lines.append(f"kept.append(mix({value}))")
            case 7:
                lines.append(f"kept.append(({here}[0], scale({here}[1], times=3.0)[1][0], {here}[1]))")
            case 8:
                lines.append(f"kept.append({{'a': {value}, 'b': [mix({value}), {value}]}})")
            case 9:
                lines.append(f"kept.append((lambda x: mix(x) + 0 * x)({value}))")
            case 10:
                lines.append(f"{here}[0][:] += mix({here}[1])")
                edits = True
            case 11:
                lines.append(f"kept.append({here})")
        at += rng.random() < 0.5
    if rng.random() < 0.5:
        lines = ["for step in tracer.iter[:2]:", *[f"    {line}" for line in lines]]
    return "\n".join(lines) + "\n", edits


def _run(
    programs: dict[str, tuple[str, bool]], rows: dict[str, tuple[int, int]], seed: int, *, alone: bool
) -> dict[str, list[Any]]:
    """What each block has kept after two steps, how it ended, and what it left in the values of every location."""
    batch = Batch({"scale": Scale(), "mix": Mix()})
    if alone:
        rest: list[Any] = []
        batch.functions |= {
            GATHER: lambda items, *place: items,
            GATHERED: lambda items, *place: rest.append(items) or [],  # type: ignore[func-returns-value]
            REST: rest.pop,
        }
    interleaver = batch.interleaver
    interleaver.order.learn([(name, side) for name in "abc" for side in ("in", "out")])
    modules = {"modules": [batch.root_ref.at(name) for name in "abc"]}
    modules |= {"scale": batch.root_ref.at("scale"), "mix": batch.root_ref.at("mix")}
    for name, (text, edits) in programs.items():
        batch.add(name, text, kept=[], **modules).edits = edits
    found: dict[str, list[Any]] = {name: [] for name in programs}
    tokens = max(stop for _, stop in rows.values())
    for step in range(2):
        values = {path: (torch.zeros(tokens + 1, WIDTH), torch.zeros(tokens + 1, WIDTH)) for path in "abc"}
        for name, (start, stop) in rows.items():
            generator = torch.Generator().manual_seed(1000 * seed + 10 * int(name) + step)
            for pair in values.values():
                for tensor in pair:
                    tensor[start:stop] = torch.randint(-5, 6, (stop - start, WIDTH), generator=generator).float()
        with torch.inference_mode():
            places = {name: Rows(*bounds, index) for index, (name, bounds) in enumerate(rows.items())}
            interleaver.begin(places, tokens, len(places))
            for path, pair in values.items():
                interleaver.visit((path, "out"), pair)
                for name, (start, stop) in rows.items():
                    found[name] += [tensor[start:stop].clone() for tensor in pair]
                for tensor in pair:
                    tensor.fill_(-77)  # as an engine may
            interleaver.end_forward()
        interleaver.finish()
    for name, block in interleaver.blocks.items():
        assert block.failure is None, (programs[name], block.failure)
        found[name] += [block.namespace["kept"], block.state]
    batch.close()
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("first", range(0, BATCHES, 100))
def test_together_as_each_alone(first: int) -> None:
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        common = _program(rng)
        programs = {str(number): common if rng.random() < 0.5 else _program(rng) for number in range(rng.randint(2, 6))}
        rows, end = {}, 0
        for name in rng.sample(sorted(programs), len(programs)):
            start = end + rng.choice([0, 0, 1])
            end = start + rng.choice([1, 1, 1, 2, 3])
            rows[name] = start, end
        together = _run(programs, rows, seed, alone=False)
        for name, (start, stop) in rows.items():
            alone = _run({name: programs[name]}, {name: (0, stop - start)}, seed, alone=True)
            assert _same(together[name], alone[name]), (seed, name, rows, programs[name][0])
