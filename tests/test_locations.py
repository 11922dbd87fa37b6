"""Every kind of module can be read, however vLLM calls it."""

from __future__ import annotations

from conftest import Engines
from reference import close, reference

from nnsight_async import VLLM

PROMPT = "The capital of France is"


def test_a_parent_after_its_child_in_one_block(model: VLLM) -> None:
    layer = model.model.layers[1]
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        inner = layer.mlp.down_proj.output[0].save()
        mlp = layer.mlp.output.save()
        whole = layer.output[0].save()
        last = model.model.output.save()
        logits = model.logits_processor.output.save()
        drawn = model.logits.save()
    close(inner, mlp, 1e-6)
    close(mlp, whole, 1e-6)
    assert last.shape == (5, 64)
    close(logits, drawn, 1e-6)


def test_a_module_whose_class_calls_forward_itself(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        seen = list().save()
        for _ in tracer.iter[:3]:
            ids = model.model.inputs[1].get("input_ids", model.model.inputs[0])
            seen.append((ids, model.model.output))
        top = model.samples.save()
    assert [tuple(output.shape) for _, output in seen] == [(5, 64), (1, 64), (1, 64)]
    assert top.shape == (1, 1)


def test_a_module_shared_by_all_layers_is_read_in_its_own_layer(engines: Engines) -> None:
    model, expected = engines.get("llama", "sync"), reference(Engines.path("llama"))
    assert model.model.layers[0].self_attn.rotary_emb._module is not None
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        rotated = list().save()
        for layer in model.model.layers:
            qkv = layer.self_attn.qkv_proj.output[0]
            query, key = layer.self_attn.rotary_emb.inputs[0][1:3]
            rotated.append((qkv[:, :64], query, key))
    assert len(rotated) == 4
    ids = expected.encode(PROMPT)
    for index, (split, query, _) in enumerate(rotated):
        own = expected.module_outputs(ids, [f"model.layers.{index}.self_attn.q_proj"])
        close(split, own[f"model.layers.{index}.self_attn.q_proj"])
        close(query.reshape(split.shape), split, 1e-6)


def test_embeddings_norms_and_projections(model: VLLM) -> None:
    expected = reference(Engines.path("qwen3"))
    ids = expected.encode(PROMPT)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        embedded = model.model.embed_tokens.output.save()
        normed = model.model.layers[0].input_layernorm.output.save()
        out = model.model.layers[3].self_attn.o_proj.output[0].save()
        final = model.model.norm.output[0].save()
    own = expected.module_outputs(
        ids, ["model.embed_tokens", "model.layers.0.input_layernorm", "model.layers.3.self_attn.o_proj", "model.norm"]
    )
    close(embedded, own["model.embed_tokens"])
    close(normed, own["model.layers.0.input_layernorm"])
    close(out, own["model.layers.3.self_attn.o_proj"])
    close(final, own["model.norm"])


def test_the_tree_is_there_before_the_engine(engines: Engines) -> None:
    from conftest import ENGINE

    model = VLLM(Engines.path("qwen3"), **ENGINE)
    try:
        assert "(0-3): 4 x Qwen3DecoderLayer" in repr(model)
        assert len(model.model.layers) == 4
        assert model.model.layers[1].mlp.down_proj.weight.is_meta
        assert [layer._path for layer in model.model.layers[2:]] == ["model.layers.2", "model.layers.3"]
        assert model.at("model.layers.3.mlp") is model.model.layers[3].mlp
        assert dict(model.named_modules())["model.norm"] is model.model.norm
        assert model.tokenizer.decode(model.tokenizer("Paris").input_ids) == "Paris"
    finally:
        model.close()
        model.close()
