"""Operations inside a module's forward: listed, read and written, each request its own rows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from conftest import ENGINE, Engines, live
from reference import close, reference

from nnsight_async import VLLM
from nnsight_async.errors import LocationError, NeverReachedError, OutOfOrderError, OutsideBlockError, UnsupportedError
from nnsight_async.forward import read_forward

PROMPT = "The capital of France is"


class Base(torch.nn.Module):
    def forward(self, x: torch.Tensor, *, scale: int = 2) -> torch.Tensor:
        return x * scale


class Odd(Base):
    """Most of what a forward may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.__hidden = 3
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *more: float, scale: int = 2, **rest: Any) -> tuple[Any, ...]:
        folded = self.lin(x).view(-1).view(4, -1)
        kept = [torch.relu(part) for part in (x, folded) if isinstance(part, torch.Tensor)]
        return super().forward(x, scale=scale), kept, self.__hidden, sum(more), dict(**rest)


@torch.no_grad()
def _wrapped(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x.relu()


class Wrapped(torch.nn.Module):
    forward = _wrapped


def test_a_rewritten_forward_does_what_the_forward_does() -> None:
    module, names = Odd(), list[str]()

    def operate(name: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        names.append(name)
        return function(*args, **kwargs)

    forward = read_forward(module)
    assert forward.names == ("lin_1", "view_1", "view_2", "relu_1", "forward_1")
    x = torch.randn(4, 4)
    given: dict[str, Any] = {"scale": 5, "name": "n", "function": 1}
    plain, rewritten = module(x, 1.0, 2.0, **given), forward.bind(module, operate)(x, 1.0, 2.0, **given)
    assert torch.equal(plain[0], rewritten[0])
    assert torch.equal(plain[0], x * 5)
    assert all(map(torch.equal, plain[1], rewritten[1]))
    assert plain[2:] == rewritten[2:] == (3, 3.0, {"name": "n", "function": 1})
    assert names == ["lin_1", "view_1", "view_2", "relu_1", "relu_1", "forward_1"]
    assert "lin_1, view_1, view_2 |     folded = self.lin(x)" in forward.listing


def test_a_forward_that_cannot_be_rewritten_says_why() -> None:
    with pytest.raises(UnsupportedError, match="wrapped by a decorator; read the module's own input"):
        read_forward(Wrapped())
    with pytest.raises(UnsupportedError, match="ModuleList has no forward"):
        read_forward(torch.nn.ModuleList())
    space: dict[str, Any] = {"nn": torch.nn}
    exec("class Typed(nn.Module):\n    def forward(self, x):\n        return x.relu()\n", space)
    with pytest.raises(UnsupportedError, match="its source cannot be found"):
        read_forward(space["Typed"]())


def test_the_operations_are_listed_before_there_is_an_engine() -> None:
    model = VLLM(Engines.path("qwen3"), **ENGINE)
    try:
        source = model.model.layers[0].self_attn.source
        text = repr(source)
        assert "qwen3.Qwen3Attention.forward" in text
        assert "rotary_emb_1 |     q, k = self.rotary_emb(positions, q, k)" in text
        assert list(source)[:3] == ["qkv_proj_1", "split_1", "view_1"]
        assert "attn_1" in dir(source)
        with pytest.raises(LocationError, match=r"source has no operation 'rope_1'; its operations are: qkv"):
            source.rope_1
        with pytest.raises(OutsideBlockError, match=r"self_attn\.source\.split_1\.output can only be read in a block"):
            source.split_1.output
        with pytest.raises(LocationError, match=r"split_1\.value cannot be assigned"):
            source.split_1.value = 1
    finally:
        model.close()


def test_operations_are_what_the_modules_around_them_say(model: VLLM) -> None:
    layer = model.model.layers[1]
    attention = layer.self_attn
    rope = attention.source.rotary_emb_1  # bound outside, it travels as a reference
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        seen = list().save()
        for _ in tracer.iter[:3]:
            entered = layer.source.input_layernorm_2.inputs[0]
            qkv = attention.qkv_proj.output[0].clone()  # inside the forward already
            q, k, v = attention.source.split_1.output
            split = torch.cat([q, k, v], dim=-1)
            normed = attention.source.q_norm_1.output
            turned = rope.output
            core = attention.attn.inputs[0]
            same = torch.equal(turned[0].reshape(core[0].shape), core[0])
            out = attention.source.o_proj_1.output[0].clone()
            whole = attention.output
            seen.append((qkv, split, normed, same, out, whole, entered[0]))
    for step, (qkv, split, normed, same, out, whole, entered) in enumerate(seen):
        rows = 5 if step == 0 else 1
        shapes = [tuple(tensor.shape) for tensor in (split, normed, entered)]
        assert shapes == [(rows, 256), (rows, 4, 32), (rows, 64)]
        assert torch.equal(qkv, split)
        assert same
        close(out, whole, 1e-6)
    ids = reference(Engines.path("qwen3")).encode(PROMPT)
    outputs = reference(Engines.path("qwen3")).module_outputs(ids, ["model.layers.1.self_attn.v_proj"])
    close(seen[0][1][:, 192:], outputs["model.layers.1.self_attn.v_proj"])


def test_an_operation_is_written_like_any_location(model: VLLM) -> None:
    """Zeroing the values of the split is zeroing those columns of the fused projection, which they are a view of."""
    attention = model.model.layers[1].self_attn
    results = []
    for way in range(3):
        with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
            fused, logits = list().save(), list().save()
            for _ in tracer.iter[:4]:
                if way == 0:
                    attention.qkv_proj.output[0][:, 192:] = 0
                elif way == 1:
                    attention.source.split_1.output[2][:] = 0
                else:
                    q, k, v = attention.source.split_1.output
                    attention.source.split_1.output = (q, k, torch.zeros_like(v))
                fused.append(attention.output)
                logits.append(model.logits)
        results.append((torch.cat(fused), torch.cat(logits)))
    assert torch.equal(results[0][0], torch.zeros(8, 64))
    for fused, logits in results[1:]:
        close(fused, results[0][0])
        close(logits, results[0][1], 1e-5)


async def test_requests_that_share_a_step_see_and_change_their_own_rows(amodel: VLLM) -> None:
    model, steps = amodel, 5
    attention = model.model.layers[2].self_attn

    async def run(way: int, prompt: str) -> list[Any]:
        async with model.trace(prompt, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
            seen = list().save()
            for _ in tracer.iter[:steps]:
                if way == 0:
                    query = attention.source.rotary_emb_1.output[0].clone()
                elif way == 1:
                    query = attention.attn.inputs[0][0].clone()
                else:
                    attention.source.rotary_emb_1.output[0][:] = 0
                    query = attention.attn.inputs[0][0].clone()
                seen.append((query, model.logits))
        return seen

    work = [(number % 3, f"{number} {PROMPT}" + " and" * number) for number in range(7)]
    alone = [await run(*item) for item in work]
    together = await asyncio.gather(*(run(*item) for item in work))
    for (way, _), own, shared in zip(work, alone, together, strict=True):
        for one, other in zip(own, shared, strict=True):
            close(other[0], one[0], 1e-4)
            close(other[1], one[1], 1e-4)
            assert bool((other[0] == 0).all()) == (way == 2)
    assert live(model) == 0


def test_an_operation_that_runs_several_times_is_read_each_time(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        streams, entered = list().save(), list().save()
        layer = model.model.source.layer_1
        for _ in range(4):
            entered.append(layer.inputs[0][0].tolist())  # to read the output twice in a row is to read one run's
            hidden, residual = layer.output
            streams.append(hidden + residual)
    states = reference(Engines.path("qwen3")).hidden_states(reference(Engines.path("qwen3")).encode(PROMPT))[1:]
    assert entered == [list(range(5))] * 4
    for mine, state in zip(streams, states, strict=True):
        close(mine, state)


def _helper(attention: Any) -> Any:
    return attention.source.attn_1.output


def test_an_operation_read_in_a_helper_function(model: VLLM) -> None:
    attention = model.model.layers[1].self_attn
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        norm = attention.q_norm.output.norm().save()
        heads = _helper(attention).save()
        into = attention.o_proj.input.save()
    assert norm > 0
    close(heads, into, 1e-6)


def test_wrong_orders_and_names_end_in_an_error(model: VLLM) -> None:
    layer = model.model.layers[1]
    attention = layer.self_attn
    with pytest.raises(OutOfOrderError, match=r"self_attn\.source\.split_1\.output has passed"):
        with model.trace(PROMPT, max_tokens=1):
            late = layer.mlp.output.sum()
            early = attention.source.split_1.output[0].save()
        print(late, early)
    with pytest.raises(NeverReachedError, match=r"source\.split_1\.output was not reached at step 0: the operation"):
        with model.trace(PROMPT, max_tokens=1):
            late = attention.source.rotary_emb_1.output[0].sum()
            early = attention.source.split_1.output[0].save()
        print(late, early)
    with pytest.raises(OutOfOrderError, match=r"self_attn\.inputs has passed"):
        with model.trace(PROMPT, max_tokens=1):
            late = attention.source.split_1.output[0].sum()
            early = attention.inputs.save()
        print(late, early)
    with pytest.raises(LocationError, match="has no operation 'nothing_1'"):
        with model.trace(PROMPT, max_tokens=1):
            early = attention.source.nothing_1.output.save()
        print(early)
    with pytest.raises(NeverReachedError, match=r"self_attn\.source\.split_1 is not reached.*the block skips model"):
        with model.trace(PROMPT, max_tokens=1):
            attention.skip(torch.zeros(5, 64))
            early = attention.source.split_1.output.save()
        print(early)
    with pytest.raises(ValueError, match=r"source\.split_1\.output\[0\] has shape \[5, 128\]"):
        with model.trace(PROMPT, max_tokens=1):
            attention.source.split_1.output = (torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1))
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        fine = attention.source.split_1.output[1].save()
    assert fine.shape == (5, 64)
    assert live(model) == 0


def test_an_operation_that_nothing_announced_is_told_and_reached_the_next_time(model: VLLM) -> None:
    """Where the block does not name ``source``, the forward it is inside of was not made ready for it."""
    attention = model.model.layers[1].self_attn
    word = "sou" + "rce"
    with pytest.raises(NeverReachedError, match=r"write `\.source` in the block itself"):
        with model.trace(PROMPT, max_tokens=1):
            inside = attention.qkv_proj.output[0].sum()
            split = getattr(attention, word).split_1.output[0].save()
        print(inside, split)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        split = getattr(attention, word).split_1.output[0].save()
    assert split.shape == (5, 128)
