"""Modules called from a block, on the worker's own weights, and those weights read."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import Engines, live
from reference import close, reference
from safetensors.torch import load_file

from nnsight_async import VLLM
from nnsight_async.errors import BlockError, OutsideBlockError, UnsupportedError
from nnsight_async.worker.calls import call

PROMPT = "The capital of France is"
MODELS = ["qwen3", "qwen2_moe"]


def checkpoint(name: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, as they are on disk."""
    return load_file(f"{Engines.path(name)}/model.safetensors")


@pytest.mark.parametrize("name", MODELS)
def test_modules_called_where_the_model_calls_them_give_what_the_model_computes(engines: Engines, name: str) -> None:
    model = engines.get(name, "sync")
    layer = model.model.layers[1]
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        pairs = list().save()
        for _ in tracer.iter[:3]:
            into = layer.mlp.input.clone()
            mine = layer.mlp(into)
            theirs = layer.mlp.output.clone()
            again = layer.mlp(into)
            pairs += [(mine, theirs), (again, theirs)]
            hidden, residual = model.model.norm.inputs[0]
            normed = model.model.norm(hidden, residual)
            head = model.logits_processor(model.lm_head, normed[0][-1:])
            pairs += [(normed[0], model.model.norm.output[0].clone()), (head, model.logits)]
            # At the logits the forward pass of the step is over, and what vLLM keeps around it is gone.
            pairs.append((layer.mlp(into), theirs))
    assert len(pairs) == 15
    for mine, theirs in pairs:
        close(mine, theirs, 1e-5)


def test_a_call_leaves_its_arguments_and_the_engine_as_they_were(model: VLLM) -> None:
    layer = model.model.layers[2]
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        plain = model.logits.save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        hidden, residual = layer.output
        before, stream = (hidden.clone(), residual.clone()), (hidden + residual).save()
        summed = model.model.norm(hidden, residual)
        query, key = torch.ones(5, 128), torch.ones(5, 64)
        turned = model.model.layers[0].self_attn.rotary_emb(torch.arange(5), query, key)  # in place, by its nature
        same = [torch.equal(hidden, before[0]), torch.equal(residual, before[1])].save()
        same += [torch.equal(query, torch.ones(5, 128)), not torch.equal(turned[0], query)]
        own = model.model.norm(hidden + residual).save()
        normed, total = summed.save()
        after = model.logits.save()
    assert same == [True] * 4
    close(normed, own, 1e-6)
    close(total, stream, 1e-6)
    assert torch.equal(plain, after)


def test_a_result_is_the_blocks_own_memory(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        plain = model.logits.save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        first = model.model.embed_tokens(torch.tensor([1, 2]))
        again = model.model.embed_tokens(torch.tensor([1, 2]))
        kept = first.clone().save()
        first[:] = 0.0
        model.model.layers[0].input_layernorm(again)[:] = 0.0
        last = again.save()
        after = model.logits.save()
    assert torch.equal(kept, last)
    assert torch.equal(plain, after)


def test_what_a_module_keeps_is_copied_and_what_it_makes_is_not() -> None:
    class Keeps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.buffer = torch.ones(3)
            self.made = 0

        def forward(self, x: torch.Tensor, more: dict[str, list[torch.Tensor]]) -> tuple[Any, ...]:
            made = x + 1
            self.made = made.data_ptr()
            return self.buffer, made, x, more["more"][0].add_(1), None

    module, x, more = Keeps(), torch.zeros(3), torch.zeros(3)
    buffer, made, same, added, none = call(module, [x], {"more": {"more": [more]}}, nullcontext)
    assert buffer.data_ptr() != module.buffer.data_ptr()
    assert made.data_ptr() == module.made
    assert same.data_ptr() != x.data_ptr()
    assert none is None
    assert [int(tensor.sum()) for tensor in (buffer, made, same, added, more)] == [3, 3, 0, 3, 0]


async def test_a_call_is_no_visit_for_the_other_blocks_of_the_step(amodel: VLLM) -> None:
    """While one block calls the MLP of layer 3, another waits for exactly that location; both see the truth."""
    model, steps = amodel, 4

    async def calls(prompt: str) -> list[Any]:
        async with model.trace(prompt, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
            mine = list().save()
            for _ in tracer.iter[:steps]:
                early = model.model.layers[0].output[0].clone()
                called = model.model.layers[3].mlp(early)
                model.model.layers[3].mlp.down_proj(torch.zeros(1, 128))
                later = model.model.layers[3].mlp.output
                mine.append((early, called, later, model.compute_logits(early)))
        return mine

    async def reads(prompt: str) -> list[Any]:
        async with model.trace(prompt, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
            seen = list().save()
            for _ in tracer.iter[:steps]:
                inner = model.model.layers[3].mlp.down_proj.output[0].clone()
                seen.append((inner, model.model.layers[3].mlp.output, model.logits_processor.output))
        return seen

    prompts = [PROMPT, "Once upon a time", "def f(x):"]
    alone = [(await calls(prompt), await reads(prompt)) for prompt in prompts]
    together = await asyncio.gather(*(work(prompt) for prompt in prompts for work in (calls, reads)))
    for index, pair in enumerate(alone):
        for own, shared in zip(pair, together[2 * index : 2 * index + 2], strict=True):
            assert len(own) == steps
            for one, other in zip(own, shared, strict=True):
                for a, b in zip(one, other, strict=True):
                    close(a, b, 1e-4)
    assert live(model) == 0


def test_the_logit_lens_at_every_layer_and_position_is_huggingface_s(engines: Engines) -> None:
    for name in ("qwen3", "smollm2"):
        model, expected = engines.get(name, "sync"), reference(Engines.path(name))
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            top, scores = list().save(), list().save()
            for layer in model.model.layers:
                stream = sum(layer.output)
                logits = model.logits_processor(model.lm_head, model.model.norm(stream))
                best = logits.topk(5, dim=-1)
                top.append(best.indices)
                scores.append(best.values)
        ids = expected.encode(PROMPT)
        states = expected.hidden_states(ids)[1:]
        assert len(top) == len(states) == len(model.model.layers)
        body = expected.model
        for indices, values, state in zip(top, scores, states, strict=True):
            assert indices.shape == (len(ids), 5)  # all that travelled
            lens = body.lm_head(body.base_model.norm(state))
            close(values, lens.gather(-1, indices), 1e-3)
            close(values, lens.topk(5, dim=-1).values, 1e-3)


def test_what_cannot_be_called_is_refused_with_the_remedy(model: VLLM) -> None:
    layer = model.model.layers[1]
    with pytest.raises(OutsideBlockError, match=r"model\.norm can only be called in a block"):
        model.model.norm(torch.ones(1, 64))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1\.self_attn cannot be called in a block.*KV cache"):
        with model.trace(PROMPT, max_tokens=1):
            layer.self_attn(torch.arange(5), layer.self_attn.inputs[1]["hidden_states"])
    with pytest.raises(UnsupportedError, match=r"call model\.logits_processor"):
        with model.trace(PROMPT, max_tokens=1):
            model.lm_head(model.model.norm.output[0])
    with pytest.raises(UnsupportedError, match="the model cannot be called in a block"):
        with model.trace(PROMPT, max_tokens=1):
            model(torch.arange(5))
    with pytest.raises(UnsupportedError, match="attention layer"):
        with model.trace(PROMPT, max_tokens=1):
            layer.self_attn.forward(torch.arange(5), torch.ones(5, 64))
    with pytest.raises(UnsupportedError, match=r"attention layer model\.layers\.1\.self_attn\.attn"):
        with model.trace(PROMPT, max_tokens=1):
            layer.self_attn.attn._call_impl(torch.ones(5, 128), torch.ones(5, 64), torch.ones(5, 64))
    with pytest.raises(BlockError, match=r"mat|size|shape"):
        with model.trace(PROMPT, max_tokens=1):
            layer.mlp.down_proj(torch.ones(1, 3))
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        fine = layer.mlp(torch.ones(2, 64)).save()
    assert fine.shape == (2, 64)
    assert live(model) == 0


def test_weights_are_the_checkpoints(engines: Engines) -> None:
    model, disk = engines.get("qwen3", "sync"), checkpoint("qwen3")
    layer = model.model.layers[2]
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        qkv = layer.self_attn.qkv_proj.weight.save()
        out = layer.self_attn.o_proj.weight.save()
        gate_up = layer.mlp.gate_up_proj.weight.save()
        down = layer.mlp.down_proj.weight.save()
        norms = [layer.input_layernorm.weight, layer.self_attn.q_norm.weight, model.model.norm.weight].save()
        embed = model.model.embed_tokens.weight.save()
        head = model.lm_head.weight.save()
        attribution = (model.model.norm.output[0][-1] @ model.lm_head.weight[1000]).save()
        direct = model.logits[0, 1000].save()
    at = "model.layers.2."
    assert torch.equal(qkv, torch.cat([disk[f"{at}self_attn.{part}_proj.weight"] for part in "qkv"]))
    assert torch.equal(out, disk[f"{at}self_attn.o_proj.weight"])
    assert torch.equal(gate_up, torch.cat([disk[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up")]))
    assert torch.equal(down, disk[f"{at}mlp.down_proj.weight"])
    expected = [f"{at}input_layernorm.weight", f"{at}self_attn.q_norm.weight", "model.norm.weight"]
    assert all(torch.equal(norm, disk[place]) for norm, place in zip(norms, expected, strict=True))
    assert torch.equal(embed, disk["model.embed_tokens.weight"])
    assert torch.equal(head, disk["lm_head.weight"])
    assert type(head) is torch.Tensor
    close(attribution[None], direct[None], 1e-4)


def test_weights_of_a_tied_head_and_of_the_router(engines: Engines) -> None:
    model = engines.get("smollm2", "sync")
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        tied = torch.equal(model.lm_head.weight, model.model.embed_tokens.weight).save()
        head = model.lm_head.weight[:100].save()
        down = model.model.layers[29].mlp.down_proj.weight.save()
    assert tied is True
    disk = checkpoint("smollm2")
    assert torch.equal(head, disk["model.embed_tokens.weight"][:100])
    assert torch.equal(down, disk["model.layers.29.mlp.down_proj.weight"])

    model, disk = engines.get("qwen2_moe", "sync"), checkpoint("qwen2_moe")
    mlp = model.model.layers[1].mlp
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        router = mlp.gate.weight.save()
        bias = model.model.layers[1].self_attn.qkv_proj.bias.save()
        qkv = model.model.layers[1].self_attn.qkv_proj.weight.save()
    assert torch.equal(router, disk["model.layers.1.mlp.gate.weight"])
    assert torch.equal(bias, torch.cat([disk[f"model.layers.1.self_attn.{part}_proj.bias"] for part in "qkv"]))
    assert torch.equal(qkv, torch.cat([disk[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]))


def test_a_weight_cannot_be_written_to(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        plain = model.logits.save()
    weights = {"packed": model.model.layers[1].mlp.down_proj, "norm": model.model.norm, "head": model.lm_head}
    for module in weights.values():
        for way in range(4):
            with pytest.raises(UnsupportedError, match="cannot be written to in a block"):
                with model.trace(PROMPT, temperature=0.0, max_tokens=1):
                    if way == 0:
                        module.weight[0] = 0.0
                    elif way == 1:
                        module.weight[0].zero_()
                    elif way == 2:
                        module.weight.data.T.mul_(2)
                    else:
                        torch.add(torch.ones(1), 1.0, out=module.weight)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        mine = model.model.norm.weight.clone()
        mine[:] = 0.0
        after = model.logits.save()
    assert torch.equal(plain, after)
