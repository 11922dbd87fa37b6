"""Two ranks are one model: every location, every edit, and every block is as it is on a single one."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import ENGINE, Engines, live
from reference import close, relative_error

from nnsight_async import VLLM
from nnsight_async.errors import BlockError, RanksDifferError, UnsupportedError
from nnsight_async.worker.rows import tensors_of

pytestmark = pytest.mark.slow

PROMPTS = ["The capital of France is", "One, two, three, four, five"]
STEPS = 3
BINDING = "VLLM_CPU_OMP_THREADS_BIND"


class Pair:
    """The same checkpoint at tensor parallel 1 and 2."""

    def __init__(self, name: str, one: VLLM, two: VLLM) -> None:
        self.name, self.one, self.two = name, one, two


@pytest.fixture(scope="module", params=["qwen3", "qwen2_moe", "llama"])
def pair(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Pair]:
    name = str(request.param)
    one = engines.get(name, "sync")
    cores = sorted(os.sched_getaffinity(0))
    before = os.environ.get(BINDING)
    os.environ[BINDING] = f"{cores[0]}|{cores[-1]}"  # one core a rank; vLLM refuses to guess on one socket
    try:
        two = VLLM(Engines.path(name), dispatch=True, tensor_parallel_size=2, **ENGINE)
    finally:
        if before is None:
            del os.environ[BINDING]
        else:
            os.environ[BINDING] = before
    with two:
        yield Pair(name, one, two)


@pytest.fixture
def dense(pair: Pair) -> VLLM:
    """The dense model at tensor parallel 2, where which model it is makes no difference."""
    return pair.two


#: For tests that need one of the models only.
on_dense = pytest.mark.parametrize("pair", ["qwen3"], indirect=True)


def _live_on_every_rank(model: VLLM) -> list[int]:
    connection = model._connection
    return [live for live, _, _ in connection.call(connection.engine.collective_rpc("nnsight_async_stats"))]


async def _awaited_live(model: VLLM) -> list[int]:
    stats = await model._connection.wait(model._connection.engine.collective_rpc("nnsight_async_stats"))
    return [live for live, _, _ in stats]


# Reading.


def _locations() -> list[tuple[str, str]]:
    """All locations, in the order in which the forward pass comes to them; called in a block."""
    from nnsight_async.tree import _Installed

    order: dict[tuple[str, str], list[int]] = _Installed.reader._interleaver.order.at  # type: ignore[union-attr]
    return sorted(order, key=lambda key: order[key][0])


def _which_name(path: str) -> int:
    """Which of its module's names a path is: two of them cannot be waited for at the same moment."""
    if "._shared_experts._layer" in path:
        return 1
    return 2 if path.endswith("shared_expert.expert_gate") else 0


def _read(model: VLLM, which: int) -> list[dict[tuple[int, str, str], list[torch.Tensor]]]:
    with model.trace(temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                seen = dict().save()
                for step in tracer.iter[:STEPS]:
                    for path, side in _locations():
                        if _which_name(path) != which:
                            continue
                        if side == "logits":
                            value = model.logits
                        elif side == "samples":
                            value = model.samples
                        elif side == "in":
                            value = model.at(path).inputs
                        else:
                            value = model.at(path).output
                        seen[(step, path, side)] = list(tensors_of(value))
    return seen


def test_every_location_is_what_a_single_rank_has(pair: Pair) -> None:
    for which in range(3 if pair.name == "qwen2_moe" else 1):
        _compare(pair, which)


def _compare(pair: Pair, which: int) -> None:
    expected, actual = _read(pair.one, which), _read(pair.two, which)
    errors: dict[tuple[int, str, str], float] = {}
    for ours, theirs in zip(actual, expected, strict=True):
        assert list(ours) == list(theirs)
        assert {step for step, _, _ in ours} == set(range(STEPS))
        for key, tensors in theirs.items():
            assert len(ours[key]) == len(tensors), key
            for mine, other in zip(ours[key], tensors, strict=True):
                assert mine.shape == other.shape, key
                if other.numel():
                    errors[key] = max(errors.get(key, 0.0), relative_error(mine, other))
    assert not {key: error for key, error in errors.items() if not error <= 1e-4}
    paths = {path for _, path, _ in expected[0]}
    assert which or {"model.embed_tokens", "model.layers.3.self_attn.attn", "logits_processor"} <= paths


def test_a_location_read_again_is_the_same_object(pair: Pair) -> None:
    model = pair.two
    with model.trace(PROMPTS[0], temperature=0.0, max_tokens=1):
        layer = model.model.layers[1].self_attn
        same = [layer.qkv_proj.output is layer.qkv_proj.output].save()
        rotated = layer.rotary_emb.output
        rotated[0] += 1.0
        same.append(rotated[0] is layer.rotary_emb.output[0])
        shown = layer.attn.inputs[0][0].save()
        written = rotated[0].save()
    assert same == [True, True]
    assert torch.equal(shown, written)


def test_what_is_kept_does_not_change_with_what_is_written_later(pair: Pair) -> None:
    def run(model: VLLM) -> tuple[torch.Tensor, torch.Tensor]:
        with model.trace(PROMPTS[0], temperature=0.0, max_tokens=1):
            kept = model.model.layers[0].self_attn.qkv_proj.output[0].save()
            before = kept[:, :8].clone().save()
            model.model.layers[0].self_attn.attn.output[:] = 0
        assert torch.equal(kept[:, :8], before)
        return kept, before

    close(run(pair.two)[0], run(pair.one)[0], 1e-4)


# Writing.


def _edit(model: Any, kind: str) -> None:
    """One edit; called in a block."""
    layer = model.model.layers[1]
    if kind == "embedding":
        model.model.embed_tokens.output[-1] += 0.5
    elif kind == "residual":
        layer.output[1].add_(2.0)
    elif kind == "fused output":
        layer.self_attn.qkv_proj.output[0][:, ::3] = 0.5
    elif kind == "fused output, replaced":
        layer.self_attn.qkv_proj.output[0] = layer.self_attn.qkv_proj.output[0].flip(1) * 2
    elif kind == "rotated keys":
        layer.self_attn.rotary_emb.output[1][:, 5:] *= -3.0
    elif kind == "values":
        layer.self_attn.attn.inputs[0][2][:, ::2] = 1.0
    elif kind == "a head":
        layer.self_attn.attn.output[:, :32] = 0
    elif kind == "a normed head":
        layer.self_attn.q_norm.output[:, 3] *= 4.0
    elif kind == "row-parallel input":
        layer.self_attn.o_proj.input[:, 20:44] = 2.0
    elif kind == "row-parallel output":
        layer.self_attn.o_proj.output[0][:, 7] = 30.0
    elif kind == "neurons":
        layer.mlp.act_fn.output[:, ::5] = 3.0
    elif kind == "gate and up":
        layer.mlp.gate_up_proj.output[0][:, 60:200] *= -2.0
    elif kind == "replaced input":
        layer.mlp.down_proj.input = torch.ones_like(layer.mlp.down_proj.input)
    elif kind == "router logits":
        layer.mlp.gate.output[0][:, 3] += 20.0
    elif kind == "router logits, given":
        layer.mlp.experts.inputs[1]["router_logits"][:, 2] += 20.0
    elif kind == "experts":
        layer.mlp.experts.output[:, 9] = 40.0
    elif kind == "shared expert":
        layer.mlp.shared_expert.output[:, ::4] -= 20.0
    elif kind == "a summand":
        layer.mlp.shared_expert.down_proj.output[0][-1] = 30.0
    elif kind == "logits":
        model.logits[:, :30000] = -torch.inf
    elif kind == "samples":
        model.samples = model.samples // 2
    else:
        raise ValueError(kind)


ANYWHERE = [
    "embedding",
    "residual",
    "fused output",
    "fused output, replaced",
    "rotated keys",
    "values",
    "a head",
    "row-parallel input",
    "row-parallel output",
    "logits",
    "samples",
]
EDITS = {
    "qwen3": [*ANYWHERE, "a normed head", "neurons", "gate and up", "replaced input"],
    "llama": [*ANYWHERE, "neurons", "gate and up", "replaced input"],
    "qwen2_moe": [*ANYWHERE, "router logits", "router logits, given", "experts", "shared expert", "a summand"],
}


def _tokens(model: VLLM, kind: str | None, steps: int = 4) -> tuple[list[list[int]], torch.Tensor]:
    """What an edited request and its neighbour draw, and the edited one's first logits."""
    with model.trace(temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPTS[0]):
            first = list().save()
            for _ in tracer.iter[:steps]:
                if kind is not None and kind not in ("logits", "samples"):
                    _edit(model, kind)
                if kind == "logits":
                    _edit(model, kind)
                first.append(model.logits)
                if kind == "samples":
                    _edit(model, kind)
            out = tracer.result.save()
        with tracer.invoke(PROMPTS[1]):
            first = list().save()
            out = tracer.result.save()
    return [list(result.outputs[0].token_ids) for result in out], first[0][0]


def test_the_same_edit_gives_the_same_tokens(pair: Pair) -> None:
    plain, logits = _tokens(pair.one, None)
    assert _tokens(pair.two, None)[0] == plain
    for kind in EDITS[pair.name]:
        expected, edited = _tokens(pair.one, kind)
        actual, ours = _tokens(pair.two, kind)
        assert actual == expected, kind
        assert actual[1] == plain[1], f"{kind}: the neighbour's"
        if kind == "samples":
            assert actual[0] != plain[0]
            continue
        assert not torch.equal(edited, logits), f"{kind}: changes nothing"
        close(torch.nan_to_num(ours, neginf=0), torch.nan_to_num(edited, neginf=0), 1e-4)


def test_reading_changes_no_bit(pair: Pair) -> None:
    model, gated = pair.two, pair.name == "qwen2_moe"
    with model.trace(PROMPTS[0], temperature=0.0, max_tokens=1):
        plain = model.logits.save()
    with model.trace(PROMPTS[0], temperature=0.0, max_tokens=1):
        for layer in model.model.layers:
            layer.self_attn.qkv_proj.output
            layer.self_attn.attn.output
            mlp = layer.mlp.shared_expert if gated else layer.mlp
            mlp.act_fn.input
            mlp.output
        read = model.logits.save()
    assert torch.equal(read, plain)


# Blocks that differ, fail, stop, or go away.


def _rank() -> int:
    """The rank that a block runs on: what no block should ask."""
    return torch.distributed.get_rank()


async def _plain(model: VLLM) -> list[int]:
    async with model.trace(PROMPTS[1], temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
        norms = list().save()
        for _ in tracer.iter[:6]:
            norms.append(model.model.layers[2].mlp.act_fn.output.norm())
        out = tracer.result.save()
    return list(out.outputs[0].token_ids)


async def _differs(model: VLLM, how: str) -> None:
    layers = model.model.layers
    async with model.trace(PROMPTS[0], temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
        seen = list().save()
        if how == "at once" and _rank() == 1:
            seen.append(layers[3].output)
        for step in tracer.iter[:6]:
            seen.append(layers[0].self_attn.qkv_proj.output[0])
            if how == "waits elsewhere" and step == 2:
                seen.append(layers[1 + _rank()].mlp.act_fn.output)
            if how == "raises" and _rank() == 1:
                raise ValueError("only here")
            if how == "raises on rank 0" and _rank() == 0:
                raise ValueError("only here")
            if how == "stops" and _rank() == step == 1:
                tracer.stop()
            if how == "after the last location" and step == 1:
                try:
                    model.model.layers[3].mlp.never
                except AttributeError:
                    seen.append(model.samples)
                if _rank() == 1:
                    break
            if how == "catches everything" and _rank() == 1:
                try:
                    seen.append(layers[2].output)
                except BaseException:
                    seen.append(layers[3].output)


@on_dense
@pytest.mark.parametrize(
    "how",
    [
        "at once",
        "waits elsewhere",
        "raises",
        "raises on rank 0",
        "stops",
        "after the last location",
        "catches everything",
    ],
)
async def test_a_block_that_differs_between_ranks_is_an_error_and_no_hang(dense: VLLM, how: str) -> None:
    model = _async(dense)
    alone = await _plain(model)
    neighbour, error = await asyncio.wait_for(
        asyncio.gather(_plain(model), _differs(model, how), return_exceptions=True), 60
    )
    assert isinstance(error, RanksDifferError), error
    assert isinstance(error, BlockError)
    assert "on rank 0 it" in str(error)
    assert "on rank 1 it" in str(error)
    if how.startswith("raises"):
        assert "ValueError: only here" in str(error)
    if how == "waits elsewhere":
        assert "model.layers.1.mlp.act_fn.output of step 2" in str(error)
        assert "model.layers.2.mlp.act_fn.output of step 2" in str(error)
    assert neighbour == alone
    assert await _plain(model) == alone
    assert await _awaited_live(model) == [0, 0]


def _async(model: VLLM) -> VLLM:
    face = copy.copy(model)
    face.mode = "async"
    return face


@on_dense
def test_an_error_in_a_block_is_the_one_it_is_on_a_single_rank(dense: VLLM) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with dense.trace(PROMPTS[0], temperature=0.0, max_tokens=4):
            hidden = dense.model.layers[1].mlp.act_fn.output
            1 / 0
    assert isinstance(caught.value, BlockError)
    with pytest.raises(ValueError, match=r"has shape \[5, 128\]; its replacement has \[5, 64\]"):
        with dense.trace(PROMPTS[0], temperature=0.0, max_tokens=4):
            dense.model.layers[1].mlp.act_fn.output = torch.zeros(5, 64)
    assert _live_on_every_rank(dense) == [0, 0]


@on_dense
def test_what_cannot_be_sent_ends_the_request_on_every_rank(dense: VLLM) -> None:
    with pytest.raises(BlockError, match="cannot be sent"):
        with dense.trace(PROMPTS[0], temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
            bad = list().save()
            for _ in tracer.iter[:6]:
                bad.append(dense.model.layers[1].mlp.act_fn.output)
                bad.append(value for value in ())
    with dense.trace(PROMPTS[0], temperature=0.0, max_tokens=2):
        fine = dense.model.layers[1].mlp.act_fn.output.save()
    assert fine.shape == (5, 128)
    assert _live_on_every_rank(dense) == [0, 0]


@on_dense
def test_a_request_is_stopped_at_its_step(dense: VLLM) -> None:
    with dense.trace(PROMPTS[0], temperature=0.0, max_tokens=20, ignore_eos=True) as tracer:
        ids = list().save()
        for step in tracer.iter[:20]:
            ids.append(dense.samples.item())
            if step == 2:
                tracer.stop()
    assert len(ids) == 3
    with dense.trace(PROMPTS[0], temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        out = tracer.result.save()
    assert ids == list(out.outputs[0].token_ids)
    assert _live_on_every_rank(dense) == [0, 0]


@on_dense
def test_a_block_goes_on_with_its_result(dense: VLLM) -> None:
    with dense.trace(PROMPTS[0], temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        count = len(tracer.result.outputs[0].token_ids)
        count = [count].save()
    assert count == [3]
    with pytest.raises(RanksDifferError):
        with dense.trace(PROMPTS[0], temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            tokens = tracer.result.outputs[0].token_ids
            if _rank() == 1:
                raise ValueError("only here")
            late = list(tokens).save()
    assert _live_on_every_rank(dense) == [0, 0]


def test_random_numbers_are_the_same_on_every_rank_and_leave_the_sampler_alone(pair: Pair) -> None:
    layer, steps = 1, 6

    def noise(model: VLLM) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
        with model.trace(PROMPTS[0], temperature=1.0, max_tokens=steps, ignore_eos=True) as tracer:
            drawn, logits = list().save(), list().save()
            for _ in tracer.iter[:steps]:
                drawn.append(torch.randn(model.model.layers[layer].output[0].shape))
                model.model.layers[layer].output[0] += drawn[-1]
                logits.append(model.logits)
            out = tracer.result.save()
        return list(out.outputs[0].token_ids), drawn, logits

    tokens, drawn, logits = noise(pair.two)
    one = pair.one
    with one.trace(PROMPTS[0], temperature=1.0, max_tokens=steps, ignore_eos=True) as tracer:
        expected = list().save()
        for step in tracer.iter[:steps]:
            one.model.layers[layer].output[0] += drawn[step]
            expected.append(one.logits)
            one.samples[:] = tokens[step]
    for ours, theirs in zip(logits, expected, strict=True):
        close(ours, theirs, 1e-4)


@on_dense
def test_a_block_that_draws_more_on_one_rank_leaves_the_sampler_alone(dense: VLLM, pair: Pair) -> None:
    steps = 6
    with dense.trace(PROMPTS[0], temperature=1.0, max_tokens=steps, ignore_eos=True) as tracer:
        seen = list().save()
        for _ in tracer.iter[:steps]:
            seen.append(dense.model.layers[3].mlp.output)
            torch.randn(10 + 7 * _rank())
        out = tracer.result.save()
    tokens = list(out.outputs[0].token_ids)
    one = pair.one
    with one.trace(PROMPTS[0], temperature=1.0, max_tokens=steps, ignore_eos=True) as tracer:
        expected = list().save()
        for step in tracer.iter[:steps]:
            expected.append(one.model.layers[3].mlp.output)
            one.samples[:] = tokens[step]
    for ours, theirs in zip(seen, expected, strict=True):
        close(ours, theirs, 1e-4)


@on_dense
def test_ranks_go_on_from_the_token_that_rank_0_has_written(dense: VLLM, pair: Pair) -> None:
    with dense.trace(PROMPTS[0], temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        logits = list().save()
        for step in tracer.iter[:4]:
            logits.append(dense.logits)
            if step == 2:
                dense.logits[:, 40000 + _rank()] = 1e4
            else:
                dense.samples[:] = 30000 + step + 500 * _rank()  # which rank 1 has the embeddings of
        out = tracer.result.save()
    tokens = list(out.outputs[0].token_ids)
    assert tokens == [30000, 30001, 40000, 30003]
    one = pair.one
    with one.trace(PROMPTS[0], temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        expected = list().save()
        for step in tracer.iter[:4]:
            expected.append(one.logits)
            one.samples[:] = tokens[step]
    for ours, theirs in zip(logits, expected, strict=True):
        kept = ours != 1e4  # what was saved is what was then written into
        close(torch.where(kept, ours, 0), torch.where(kept, theirs, 0), 1e-4)


@on_dense
async def test_many_requests_at_once_and_none_is_left(dense: VLLM) -> None:
    model = _async(dense)

    async def one(number: int) -> tuple[list[int], list[torch.Tensor]]:
        async with model.trace(PROMPTS[number % 2], temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
            seen = list().save()
            for _ in tracer.iter[:5]:
                seen.append(model.model.layers[number % 4].self_attn.o_proj.input[-1])
            out = tracer.result.save()
        return list(out.outputs[0].token_ids), seen

    alone = [await one(number) for number in range(4)]
    together = await asyncio.gather(*map(one, range(40)))
    for number, (tokens, seen) in enumerate(together):
        assert tokens == alone[number % 4][0]
        for ours, theirs in zip(seen, alone[number % 4][1], strict=True):
            close(ours, theirs, 1e-4)
    assert await _awaited_live(model) == [0, 0]


@on_dense
async def test_a_cancelled_request_leaves_no_block_on_any_rank(dense: VLLM) -> None:
    model = _async(dense)
    with model.trace(PROMPTS[0], temperature=0.0, max_tokens=400, ignore_eos=True) as tracer:
        seen = list().save()
        for _ in tracer.iter[:400]:
            seen.append(model.model.layers[1].mlp.act_fn.output[-1, 0])
    async with tracer.backend as stream:
        async for output in stream:
            if output.step == 3:
                break
    await _plain(model)  # the engine lets go of what is over when it next runs a step
    assert await _awaited_live(model) == [0, 0]
    assert live(dense) == 0


# What a block does itself.


@on_dense
async def test_calls_and_skips_are_as_on_one_rank(pair: Pair) -> None:
    async def lens(model: VLLM) -> tuple[list[torch.Tensor], list[int]]:
        async with model.trace(PROMPTS[0], temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            found = list().save()
            for _ in tracer.iter[:3]:
                for layer in model.model.layers[:2]:
                    normed = model.model.norm(sum(layer.output))
                    found.append(model.logits_processor(model.lm_head, normed))
                model.model.layers[2].mlp.skip(torch.zeros_like(normed))
            out = tracer.result.save()
        return found, list(out.outputs[0].token_ids)

    (one, tokens), (two, same) = await lens(_async(pair.one)), await lens(_async(pair.two))
    assert same == tokens
    for actual, expected in zip(two, one, strict=True):
        close(actual, expected, 1e-4)


@on_dense
@pytest.mark.parametrize("what", ["a weight", "a skip", "an operation", "a call"])
async def test_what_each_rank_has_a_part_of_is_refused(pair: Pair, what: str) -> None:
    model = _async(pair.two)
    attention = model.model.layers[1].self_attn
    with pytest.raises(UnsupportedError, match="tensor-parallel rank"):
        async with model.trace(PROMPTS[0], temperature=0.0, max_tokens=2):
            if what == "a weight":
                attention.o_proj.weight
            elif what == "a skip":
                attention.qkv_proj.skip(torch.zeros(1))
            elif what == "an operation":
                attention.source.split_1.output
            else:
                attention.qkv_proj(torch.zeros(1, 64))
    assert await _awaited_live(model) == [0, 0]
