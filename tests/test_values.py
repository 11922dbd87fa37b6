"""What a block reads is what HuggingFace transformers computes, in float32, on every architecture we have."""

from __future__ import annotations

import pytest
import torch
from conftest import Engines
from reference import close, reference

MODELS = ["qwen3", "llama", "qwen2_moe", "smollm2"]
PROMPT = "The capital of France is"
STEPS = 6


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_residual_stream_after_every_layer_at_every_step(engines: Engines, name: str) -> None:
    model, expected = engines.get(name, "sync"), reference(Engines.path(name))
    with model.trace(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        steps = list().save()
        for _ in tracer.iter[:STEPS]:
            stream = []
            for layer in model.model.layers:
                stream.append(sum(layer.output))
            steps.append(stream)
        result = tracer.result.save()

    prompt = expected.encode(PROMPT)
    tokens = result.outputs[0].token_ids
    assert list(tokens) == expected.greedy(PROMPT, STEPS)
    states = expected.hidden_states([*prompt, *tokens[:-1]])[1:]
    assert len(steps) == STEPS
    worst = 0.0
    for step, stream in enumerate(steps):
        rows = slice(0, len(prompt)) if step == 0 else slice(len(prompt) + step - 1, len(prompt) + step)
        assert len(stream) == len(states)
        for layer, state in enumerate(states):
            worst = max(worst, close(stream[layer], state[rows]))
    print(f"{name}: worst relative difference of the residual stream {worst:.2g}")


def test_attention_mlp_and_logits(engines: Engines, name: str) -> None:
    model, expected = engines.get(name, "sync"), reference(Engines.path(name))
    layer = model.model.layers[2]
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        attention = layer.self_attn.output.save()
        mlp_in = layer.mlp.input.save()
        mlp = layer.mlp.output.save()
        logits = model.logits.save()

    ids = expected.encode(PROMPT)
    outputs = expected.module_outputs(
        ids, ["model.layers.2.self_attn", "model.layers.2.post_attention_layernorm", "model.layers.2.mlp"]
    )
    assert logits.shape == (1, 49152)
    print(
        name,
        close(attention, outputs["model.layers.2.self_attn"]),
        close(mlp_in, outputs["model.layers.2.post_attention_layernorm"]),
        close(mlp, outputs["model.layers.2.mlp"]),
        close(logits, expected.logits(ids)[-1:]),
    )


@pytest.mark.parametrize("name", ["qwen3", "llama", "smollm2"])
def test_mlp_activations(engines: Engines, name: str) -> None:
    model, expected = engines.get(name, "sync"), reference(Engines.path(name))
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        neurons = list().save()
        for layer in model.model.layers:
            neurons.append(layer.mlp.act_fn.output)

    ids = expected.encode(PROMPT)
    for index, activation in enumerate(neurons):
        place = f"model.layers.{index}.mlp"
        outputs = expected.module_outputs(ids, [f"{place}.gate_proj", f"{place}.up_proj"])
        gate, up = outputs[f"{place}.gate_proj"], outputs[f"{place}.up_proj"]
        close(activation, torch.nn.functional.silu(gate) * up)


def test_logits_and_samples_at_every_step(engines: Engines, name: str) -> None:
    model, expected = engines.get(name, "sync"), reference(Engines.path(name))
    with model.trace(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        logits, samples = list().save(), list().save()
        for _ in tracer.iter[:STEPS]:
            logits.append(model.logits)
            samples.append(model.samples)
        out = tracer.result.save()

    assert [tuple(sample.shape) for sample in samples] == [(1, 1)] * STEPS
    assert [int(sample) for sample in samples] == list(out.outputs[0].token_ids)
    prompt = expected.encode(PROMPT)
    every = expected.logits([*prompt, *out.outputs[0].token_ids[:-1]])
    for step, row in enumerate(logits):
        close(row, every[len(prompt) + step - 1][None])


def test_gpt2_block_returns_one_tensor(engines: Engines) -> None:
    model, expected = engines.get("gpt2", "sync"), reference(Engines.path("gpt2"))
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        stream = list().save()
        for block in model.transformer.h:
            stream.append(block.output)

    for actual, state in zip(stream, expected.hidden_states(expected.encode(PROMPT))[1:], strict=True):
        close(actual, state)
