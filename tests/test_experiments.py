"""Experiments of the field, run in a block and with HuggingFace hooks, to the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from conftest import Engines
from reference import close, reference

PROMPT = "The capital of France is"
OTHER = "The capital of Japan is"
#: Query heads, key-value heads and the width of a head.
HEADS = {"qwen3": (4, 2, 32), "llama": (2, 1, 32), "qwen2_moe": (2, 2, 32), "smollm2": (9, 3, 64)}


def hooked(name: str, hooks: dict[str, Callable[..., Any]], prompt: str = PROMPT, *, before: bool = False) -> Any:
    """HuggingFace's logits ``[positions, vocabulary]`` with hooks on modules, before or after they run."""
    expected = reference(Engines.path(name))
    with ExitStack() as stack:
        for place, hook in hooks.items():
            module = expected.model.get_submodule(place)
            put = module.register_forward_pre_hook if before else module.register_forward_hook
            stack.enter_context(put(hook))
        return expected.logits(expected.encode(prompt))


@pytest.mark.parametrize("name", ["qwen3", "llama", "smollm2", "qwen2_moe"])
def test_attention_patterns_are_huggingface_s_eager_attention(engines: Engines, name: str) -> None:
    model, expected = engines.get(name, "sync"), reference(Engines.path(name))
    heads, groups, width = HEADS[name]
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        patterns, by_operation = list().save(), list().save()
        for layer in model.model.layers:
            for found, source in ((by_operation, True), (patterns, False)):
                if source:
                    query, key = layer.self_attn.source.rotary_emb_1.output
                else:
                    query, key, _ = layer.self_attn.attn.inputs[0]
                query = query.view(-1, heads, width).transpose(0, 1)
                key = key.view(-1, groups, width).repeat_interleave(heads // groups, dim=1).transpose(0, 1)
                scores = query @ key.transpose(1, 2) * layer.self_attn.scaling
                future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
                found.append(scores.masked_fill(future, -torch.inf).softmax(-1))
    ids = torch.tensor([expected.encode(PROMPT)])
    attentions = expected.model(ids, output_attentions=True).attentions
    assert len(patterns) == len(attentions)
    for mine, operation, theirs in zip(patterns, by_operation, attentions, strict=True):
        close(mine, theirs[0])
        close(operation, theirs[0])


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_head_zeroed_at_the_input_of_o_proj(engines: Engines, name: str) -> None:
    model, (heads, _, width) = engines.get(name, "sync"), HEADS[name]
    attention = model.model.layers[1].self_attn
    for head in range(heads):
        columns = slice(head * width, (head + 1) * width)
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            attention.o_proj.input[:, columns] = 0
            logits = model.logits.save()

        def zero(_: Any, args: tuple[Any, ...], columns: slice = columns) -> tuple[Any, ...]:
            ablated = args[0].clone()
            ablated[..., columns] = 0
            return (ablated, *args[1:])

        close(logits, hooked(name, {"model.layers.1.self_attn.o_proj": zero}, before=True)[-1:])


def test_activation_patching_between_two_prompts(engines: Engines) -> None:
    """The residual stream of one prompt put into another, at each layer and position."""
    model, expected = engines.get("qwen3", "sync"), reference(Engines.path("qwen3"))
    assert len(expected.encode(PROMPT)) == len(expected.encode(OTHER)) == 5
    with model.trace(OTHER, temperature=0.0, max_tokens=1):
        source = list().save()
        for layer in model.model.layers:
            source.append(sum(layer.output))
    states = expected.hidden_states(expected.encode(OTHER))[1:]
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for index in range(4):
            for position in range(5):
                with tracer.invoke(PROMPT):
                    hidden, residual = model.model.layers[index].output
                    hidden[position] = source[index][position] - residual[position]
                    patched = model.logits.save()
    for number, logits in enumerate(patched):
        index, position = divmod(number, 5)

        def patch(_: Any, __: Any, output: Any, index: int = index, position: int = position) -> Any:
            stream = output.clone()
            stream[0, position] = states[index][position]
            return stream

        close(logits, hooked("qwen3", {f"model.layers.{index}": patch})[-1:])


def test_an_expert_ablated_by_its_router_logit(engines: Engines) -> None:
    model = engines.get("qwen2_moe", "sync")
    plain = hooked("qwen2_moe", {})[-1:]
    changed = 0
    for expert in range(8):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            for layer in model.model.layers:
                layer.mlp.gate.output[0][:, expert] = -torch.inf
            logits = model.logits.save()

        def ablate(module: Any, _: Any, output: Any, expert: int = expert) -> Any:
            router = output[0].clone()
            router[:, expert] = -torch.inf
            scores, chosen = router.softmax(-1, dtype=torch.float32).topk(module.top_k, dim=-1)
            if module.norm_topk_prob:
                scores = scores / scores.sum(-1, keepdim=True)
            return router, scores, chosen

        theirs = hooked("qwen2_moe", {f"model.layers.{index}.mlp.gate": ablate for index in range(4)})[-1:]
        close(logits, theirs)
        changed += not torch.allclose(theirs, plain)
    assert changed > 4


def test_router_logits_and_the_experts_output(engines: Engines) -> None:
    model, expected = engines.get("qwen2_moe", "sync"), reference(Engines.path("qwen2_moe"))
    moe = model.model.layers[2].mlp
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        into = moe.input.clone()
        router = moe.gate.output[0].save()
        shared = moe.shared_expert.output.save()
        experts = moe.experts.output.save()
        whole = moe.output.save()
        called = moe.experts(hidden_states=into, router_logits=router).save()
    places = ["gate", "experts", "shared_expert", "shared_expert_gate"]
    theirs = expected.module_outputs(expected.encode(PROMPT), [f"model.layers.2.mlp.{place}" for place in places])
    gate, alone, shared_alone, weight = (theirs[f"model.layers.2.mlp.{place}"] for place in places)
    close(router, gate)
    close(shared, torch.sigmoid(weight) * shared_alone)
    close(experts, alone + torch.sigmoid(weight) * shared_alone)  # all experts and the shared one, combined
    close(whole, experts, 1e-6)
    close(called, experts, 1e-5)


@pytest.mark.parametrize("name", ["qwen3", "llama", "smollm2"])
def test_the_fused_projections_split_as_huggingface_s(engines: Engines, name: str) -> None:
    model, expected = engines.get(name, "sync"), reference(Engines.path(name))
    heads, groups, width = HEADS[name]
    layer = model.model.layers[1]
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        parts = layer.self_attn.qkv_proj.output[0].split([heads * width, groups * width, groups * width], dim=-1)
        query, key, value = (part.clone() for part in parts)
        halves = layer.mlp.gate_up_proj.output[0].chunk(2, dim=-1)
        kept = [query, key, value, *(half.clone() for half in halves)].save()
    at = "model.layers.1."
    places = [f"self_attn.{part}_proj" for part in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    theirs = expected.module_outputs(expected.encode(PROMPT), [f"{at}{place}" for place in places])
    for mine, place in zip(kept, places, strict=True):
        close(mine, theirs[f"{at}{place}"])
