"""Loops that only collect are run for all blocks together, and give what they give run block by block."""

from __future__ import annotations

import ast
import copy
import textwrap
from typing import Any

import pytest
import torch
from blocks import Batch
from conftest import Engines

from nnsight_async import VLLM
from nnsight_async.tracing.gathers import GATHER, GATHERED, REST, gather_loops
from nnsight_async.tracing.holds import hold_views
from nnsight_async.worker.block import Block

ROWS = {
    "one token each": ({"r": (0, 1), "s": (1, 2), "t": (2, 3)}, 3),
    "in another order": ({"r": (2, 3), "s": (0, 1), "t": (1, 2)}, 3),
    "prompts and others between": ({"r": (0, 3), "s": (4, 5), "t": (6, 8)}, 9),
    "far apart": ({"r": (0, 1), "s": (9, 11)}, 12),
    "alone": ({"r": (1, 4)}, 5),
}
PADDING = 2


def _values(kind: str, tokens: int) -> dict[str, Any]:
    """Each location's value; a step may be padded."""
    generator = torch.Generator().manual_seed(tokens)

    def tensor(width: int = 4) -> torch.Tensor:
        return torch.randn(tokens + PADDING, width, generator=generator)

    if kind == "tensor":
        return {name: tensor() for name in "abc"}
    if kind == "strided":
        return {name: tensor(12)[:, 2:6] for name in "abc"}
    return {name: (tensor(), tensor()) for name in "abc"}


def _run(text: str, kind: str, rows: str, *, gather: bool, steps: int = 2) -> Batch:
    places, tokens = ROWS[rows]
    batch = Batch()
    if not gather:
        batch.functions |= {GATHER: lambda items, *place: items, GATHERED: _nothing(batch), REST: lambda: batch.rest}
    batch.interleaver.order.learn([(name, side) for name in "abc" for side in ("in", "out")])
    modules = [batch.root_ref.at(name) for name in "abc"]
    for name in places:
        batch.add(name, text, kept=[], modules=modules, root=batch.root_ref)
    for _ in range(steps):
        batch.step(_values(kind, tokens), places, tokens)
    return batch


def _nothing(batch: Batch) -> Any:
    def gathered(items: Any, *place: Any) -> list[Any]:
        batch.rest = items
        return []

    return gathered


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests whose blocks were run, each time that they were."""
    found: list[str] = []
    resume = Block.resume

    def noting(block: Block, *args: Any) -> None:
        found.append(block.request_id)
        resume(block, *args)

    monkeypatch.setattr(Block, "resume", noting)
    return found


EVERY = "for step in tracer.iter[:]:\n    for module in modules:\n        kept.append({})\n"
TENSOR = ["module.output", "module.output[-1]", "module.output[-1:]", "module.output.clone()"]
PAIR = [
    "module.output",
    "module.output[0]",
    "module.output[1][-1]",
    "module.output[-1][-1:]",
    "module.output[0] + module.output[1]",
    "module.output[0][-1] + module.output[1][-1]",
    "(module.output[0] + module.output[1])[-1]",
    "sum(module.output)",
    "sum(module.output)[-1]",
    "sum(module.output).clone()",
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("kind", "read"),
    [(kind, read) for kind in ("tensor", "strided") for read in TENSOR] + [("pair", read) for read in PAIR],
)
def test_a_loop_gives_what_it_gives_block_by_block(kind: str, read: str, rows: str, resumed: list[str]) -> None:
    for text in (
        EVERY.format(read),
        f"for step in tracer.iter[:]:\n    kept.append([{read} for module in modules])\n    last = step\n",
    ):
        resumed.clear()
        mine = _run(text, kind, rows, gather=True)
        gathered = len(resumed)
        own = _run(text, kind, rows, gather=False)
        for name, block in mine.interleaver.blocks.items():
            other = own.interleaver.blocks[name]
            assert block.failure is other.failure is None
            assert _same(block.namespace["kept"], other.namespace["kept"])
            for value in block.namespace["kept"]:
                assert value is not None
        blocks = len(mine.interleaver.blocks)
        assert gathered == blocks * (1 + 2 * 2) - blocks  # a step's beginning and its last location, not the others
        assert len(resumed) - gathered == blocks * (1 + 2 * 4) - blocks
        mine.close()
        own.close()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (EVERY.format("module.output[5]"), "pair"),
        (EVERY.format("module.output[0] + module.output[7]"), "pair"),
        (EVERY.format("module.output[0][0]"), "tensor"),
        (EVERY.format("module.output[7]"), "tensor"),
        (EVERY.format("module.output.clone()"), "pair"),
        (
            "try:\n    for m in modules:\n        kept.append(m.output.clone())\n"
            "except AttributeError:\n    kept.append(7)\n    for m in modules:\n        kept.append(m.output[1])\n",
            "pair",
        ),
        ("for m in (modules[0], modules[0], modules[2]):\n    kept.append(m.output[0])\n", "pair"),
        ("kept.append([root[i].output[0] for i in (0, 1, 1, 2, 2)])\n", "pair"),
        ("for m in [modules[1]] * 3:\n    kept.append(m.output[0])\n", "pair"),
        ("for i in range(10**20):\n    kept.append(root[i].output[0])\n", "pair"),
        ("for i in range(3):\n    kept.append(root[i].output[0])\n", "pair"),
        ("for i in range(2, -10**9, -1):\n    kept.append(root[i].output[0])\n", "pair"),
        ("kept.append([sum(sum.output) for sum in modules])\n", "pair"),
        (EVERY.format("sum(module.output)"), "tensor"),
        (EVERY.format("module.nothing.output"), "pair"),
        ("for module in modules[::-1]:\n    kept.append(module.output)\n", "pair"),
        ("for module in [*modules, modules[0]]:\n    kept.append(module.output)\n", "pair"),
        ("for module in [[1], {}]:\n    kept.append(module.output)\n", "pair"),
        ("for module in [True, False]:\n    kept.append(modules[module].output)\n", "pair"),
        ("for module in [*modules, 3]:\n    kept.append(module.output)\n", "pair"),
        ("early = modules[1].output\nfor module in modules:\n    kept.append(module.output)\n", "pair"),
        ("for module in modules:\n    missing.append(module.output)\n", "pair"),
        ("for module in modules:\n    modules.append(module.output)\n", "pair"),
        ("kept = (7,)\nfor module in modules:\n    kept.append(module.output)\n", "pair"),
        ("for module in modules[:2]:\n    kept.append(module.output)\nkept.append(module.output)\n1 / 0\n", "pair"),
        ("for module in ():\n    missing.append(module.output)\nelse:\n    kept.append(7)\n", "pair"),
        ("for module in modules:\n    kept.append(module.output)\nelse:\n    kept.append(module._path)\n", "pair"),
        ("for module in iter(modules):\n    kept.append(module.output)\n", "pair"),
        ("def sum(values):\n    return 5\nfor module in modules:\n    kept.append(sum(module.output))\n", "pair"),
        ("kept.append([m.output[0] for m in modules if m is not modules[1]])\n", "pair"),
        ("kept.append([[m.output[0] for m in modules] for _ in range(1)])\n", "pair"),
        ("first = modules[0].output\nkept.append([m.output[0] for m in modules])\n", "pair"),
        ("kept.append([m.output[0] for m in modules][1:])\nkept.append(modules[2].output)\n", "pair"),
        ("modules[0].output[0][:] += 1\nfor m in modules[1:]:\n    kept.append(m.output[0])\n", "pair"),
    ],
)
def test_what_is_out_of_the_ordinary_is_as_without_gathering(text: str, kind: str) -> None:
    mine = _run(text, kind, "prompts and others between", gather=True)
    own = _run(text, kind, "prompts and others between", gather=False)
    for name, block in mine.interleaver.blocks.items():
        other = own.interleaver.blocks[name]
        assert _same(block.namespace["kept"], other.namespace["kept"])
        assert block.state is other.state
        for attribute in ("type_name", "message", "where"):
            assert getattr(block.failure, attribute, None) == getattr(other.failure, attribute, None)
    mine.close()
    own.close()


@pytest.mark.parametrize("rows", ["one token each", "in another order", "prompts and others between"])
def test_loops_beside_blocks_that_read_one_by_one(rows: str) -> None:
    texts = {
        "r": "for m in modules:\n    kept.append(m.output[0])\nkept.append(m.output[1])\n",
        "s": "kept.append(modules[2].output[0])\n",
        "t": "for m in modules[1:]:\n    kept.append(m.output[0])\n",
    }
    places, tokens = ROWS[rows]
    for order in ("rst", "srt", "tsr"):
        batch = Batch()
        batch.interleaver.order.learn([(name, side) for name in "abc" for side in ("in", "out")])
        modules = [batch.root_ref.at(name) for name in "abc"]
        for name in order:
            batch.add(name, texts[name], kept=[], modules=modules)
        values = _values("pair", tokens)
        expected = {
            name: [values[path][0][slice(*places[name])].clone() for path in paths]
            for name, paths in {"r": "abc", "s": "c", "t": "bc"}.items()
        }
        expected["r"].append(values["c"][1][slice(*places["r"])].clone())
        batch.step(values, {name: places[name] for name in order}, tokens)
        for name, block in batch.interleaver.blocks.items():
            assert block.failure is None
            assert _same(block.namespace["kept"], expected[name])
        batch.close()


def test_a_location_that_is_not_reached_is_told_at_the_line_that_reads_it() -> None:
    found = []
    for gather in (True, False):
        batch = _run(
            "for m in modules:\n    kept.append(\n        m.output\n    )\n", "pair", "alone", gather=gather, steps=0
        )
        rows, tokens = ROWS["alone"]
        values = _values("pair", tokens)
        del values["b"]
        batch.step(values, rows, tokens)
        block = batch.interleaver.blocks["r"]
        assert block.failure is not None
        found.append((block.failure.message, block.failure.where, len(block.namespace["kept"])))
        batch.close()
    assert found[0] == found[1]
    assert found[0][1] == "<block>:3: m.output"
    assert found[0][2] == 1


def test_what_was_gathered_is_its_holders_own() -> None:
    batch = _run(EVERY.format("module.output[0]"), "pair", "one token each", gather=True, steps=1)
    lists = [block.namespace["kept"] for block in batch.interleaver.blocks.values()]
    before = copy.deepcopy(lists)
    with torch.inference_mode():
        lists[0][0] += 100
    assert torch.equal(lists[0][0], before[0][0] + 100)
    for mine, own in zip(lists[1:], before[1:], strict=True):
        assert _same(mine, own)
    batch.close()


def _gathered(text: str) -> list[list[Any]]:
    """The constants of every loop of a text that is rewritten."""
    tree = ast.Module(gather_loops(hold_views(ast.parse(textwrap.dedent(text)).body)), [])
    compile(tree, "<text>", "exec")
    return [
        [argument.value for argument in node.args[1:] if isinstance(argument, ast.Constant)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (GATHER, GATHERED)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for x in layers:\n    h.append(x.output)", ["h", "", "", "out", (), (), False]),
        (
            "for x in layers:\n    h.append(x.self_attn.o_proj.input[-1])",
            ["h", "", "self_attn.o_proj", "in", (-1,), (), False],
        ),
        (
            "for i in range(9):\n    h.append(m.layers[i].mlp.output[0])",
            ["h", "m.layers", "mlp", "out", (0,), (), False],
        ),
        ("h = [sum(x.output)[-1:] for x in layers]", ["", "", "out", ("-1:",), (None,), False]),
        ("f(g([x.output[0].clone() for x in layers]))", ["", "", "out", (0,), (), False]),
        (
            "if a:\n    while b:\n        for x in y():\n            h.append(x.output)",
            ["h", "", "", "out", (), (), False],
        ),
    ],
)
def test_which_loops_are_found(text: str, expected: list[Any]) -> None:
    assert _gathered(text) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "for x in layers:\n    h.append(x.output)\n    n += 1",
        "for x in layers:\n    h.append(x.output, 3)",
        "for x in layers:\n    h.extend(x.output)",
        "for x in layers:\n    h[0].append(x.output)",
        "for x in layers:\n    x.append(x.output)",
        "for x, y in layers:\n    h.append(x.output)",
        "for x in layers:\n    h.append(y.output)",
        "for x in layers:\n    h.append(x.output[0] * 2)",
        "for x in layers:\n    h.append(x.output[0] + x.input[0])",
        "for x in layers:\n    h.append(x.output[0] + x.output[1][-1])",
        "for x in layers:\n    h.append(x.output[i])",
        "for x in layers:\n    h.append(x.output[True])",
        "for x in layers:\n    h.append(x.output[-2:])",
        "for x in layers:\n    h.append(x.output[0][0][0])",
        "for x in layers:\n    h.append(x().output)",
        "for x in layers:\n    h.append(x.inputs)",
        "for x in layers:\n    h.append(x.output.clone()[0])",
        "for sum in layers:\n    h.append(sum(sum.output))",
        "for x in layers:\n    h.append(x.logits)",
        "for x in layers:\n    h.append(x[x].output)",
        "for x in layers:\n    h.append(x.output.output)",
        "for x in layers:\n    h.append(x.source.call_1.output)",
        "for i in range(3):\n    h.append(m.output[i].output)",
        "for i in range(3):\n    h.append(i.layers[i].output)",
        "for x in layers:\n    h.append(f(x).layers[x].output)",
        "for x in layers:\n    h.append(sum(x.output, 3))",
        "for x in layers:\n    h.append(x.output.clone(memory_format=f))",
        "def f():\n    for x in layers:\n        h.append(x.output)",
        "f = lambda: [x.output for x in layers]",
        "[x.output for x in layers for y in z]",
        "[x.output for x in layers if x]",
        "{x.output for x in layers}",
        "(x.output for x in layers)",
        "[[x.output for x in layers] for y in z]",
    ],
)
def test_which_are_not(text: str) -> None:
    assert _gathered(text) == []


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_requests_of_an_engine_collect_what_they_read_one_by_one(engines: Engines, name: str) -> None:
    """Prompts of several lengths, some steered, on a model whose layers return pairs and on one of plain tensors."""
    model: VLLM = engines.get(name, "sync")
    layers = model.model.layers if name == "qwen3" else model.transformer.h
    prompts = ["The", "The capital of France is", "One two three four five six seven eight"] * 4
    count = len(layers)
    with model.trace(temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        for number, prompt in enumerate(prompts):
            with tracer.invoke(prompt):
                kept = [].save()
                for _ in tracer.iter[:4]:
                    if number % 3 == 1:
                        layers[0].output[0][:] *= 1.5
                    if number % 4 == 0:
                        for layer in layers[1:]:
                            kept.append(layer.output)
                    elif number % 4 == 1:
                        for layer in layers[1:]:
                            kept.append(layer.mlp.output[-1])
                    elif number % 4 == 2:
                        kept.append([layer.input for layer in layers[1:]])
                    else:
                        for i in range(1, count):
                            kept.append(layers[i].mlp.input)
                result = tracer.result.save()
    with model.trace(temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        for number, prompt in enumerate(prompts):
            with tracer.invoke(prompt):
                singly = [].save()
                for _ in tracer.iter[:4]:
                    if number % 3 == 1:
                        layers[0].output[0][:] *= 1.5
                    together = []
                    for layer in iter(layers[1:]):  # a loop over an iterator is run turn by turn
                        if number % 4 == 0:
                            singly.append(layer.output)
                        elif number % 4 == 1:
                            singly.append(layer.mlp.output[-1])
                        elif number % 4 == 2:
                            together.append(layer.input)
                        else:
                            singly.append(layer.mlp.input)
                    if number % 4 == 2:
                        singly.append(together)
                own = tracer.result.save()
    for number in range(len(prompts)):
        assert len(kept[number]) == (4 if number % 4 == 2 else 4 * (count - 1))
        assert _same(kept[number], singly[number])
        assert list(result[number].outputs[0].token_ids) == list(own[number].outputs[0].token_ids)
