"""``tracer.cache``: declared captures, in one step and at every step, alone and among others."""

from __future__ import annotations

import asyncio
import gc
import pickle
from typing import Any

import pytest
import torch
from conftest import Engines
from reference import close, reference

from nnsight_async import VLLM
from nnsight_async.client.cache import Cache, Capture
from nnsight_async.errors import LocationError, OutOfOrderError, OutsideBlockError, UnsupportedError

PROMPT = "The capital of France is"


def test_one_step(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        cache = tracer.cache(modules=[model.model.layers[i].mlp for i in range(0, 4, 2)])
    assert list(cache.keys()) == ["model.model.layers.0.mlp", "model.model.layers.2.mlp"]
    expected = reference(Engines.path("qwen3"))
    outputs = expected.module_outputs(expected.encode(PROMPT), ["model.layers.0.mlp", "model.layers.2.mlp"])
    for path, output in outputs.items():
        close(cache[f"model.{path}"].output, output)
        assert cache[path].output is not None  # without the model's own name too
    with pytest.raises(AttributeError, match="include_inputs"):
        cache["model.model.layers.0.mlp"].inputs
    with pytest.raises(KeyError, match="was not captured"):
        cache["model.model.layers.1.mlp"]
    assert "2 modules" in repr(cache)


def test_every_step(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        cache = tracer.cache(modules="model.layers.*", include_inputs=True)
        out = tracer.result.save()
    expected = reference(Engines.path("qwen3"))
    ids = [*expected.encode(PROMPT), *out.outputs[0].token_ids[:-1]]
    states = expected.hidden_states(ids)
    assert list(cache) == [f"model.model.layers.{i}" for i in range(4)]
    for number in range(4):
        entry = cache[f"model.model.layers.{number}"]
        assert [capture.output[0].shape[0] for capture in entry] == [5, 1, 1, 1]
        close(torch.cat([sum(output) for output in entry.output]), states[number + 1])
        positions = torch.cat([inputs[0][0] for inputs in entry.inputs])
        assert positions.tolist() == list(range(8))
        if number:
            residual, hidden = entry[0].inputs[0][2], entry[0].inputs[0][1]
            close(residual + hidden, states[number][:5])


def test_every_module(engines: Engines) -> None:
    for name in ("qwen3", "qwen2_moe"):
        model = engines.get(name, "sync")
        with model.trace(PROMPT, temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
            cache = tracer.cache(include_inputs=True)
            kept = list().save()
            for _ in tracer.iter[:2]:
                kept.append(model.model.layers[1].mlp.output)
                kept.append(model.logits)
        assert torch.equal(cache["model.model.layers.1.mlp"][0].output, kept[0])
        assert torch.equal(cache["model.model.layers.1.mlp"][1].output, kept[2])
        assert torch.equal(cache["model.logits_processor"][0].output, kept[1])  # one row a request, not one a token
        assert len(cache) > 30
        for key in cache:
            for capture in cache[key]:
                assert isinstance(capture, Capture)
                repr(capture)
        assert cache["model.model.embed_tokens"].input[0].tolist() == model.tokenizer.encode(PROMPT)


async def test_many_requests_of_a_step_are_captured_together(amodel: VLLM) -> None:
    """Requests of several kinds in the same steps: a cache, another cache, none, and a block that edits."""
    model = amodel

    async def one(number: int) -> Any:
        steps, prompt = 3 + number % 4, f"{'the number ' * (number % 3)}{number} is"
        async with model.trace(prompt, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
            if number % 4 != 3:
                cache = tracer.cache(modules=["model.layers.*.mlp", model.model.norm][: 1 + number % 2])
            kept = list().save()
            for _ in tracer.iter[:steps]:
                if number % 4 == 2:
                    model.model.layers[1].mlp.output[:] += 1.0
                kept.append(model.model.layers[1].mlp.output)
        return tracer.saves

    alone = [await one(number) for number in range(12)]
    together = await asyncio.gather(*map(one, range(12)))
    for number, (mine, others) in enumerate(zip(alone, together, strict=True)):
        if number % 4 == 3:
            assert "cache" not in others
            continue
        assert list(mine["cache"]) == list(others["cache"])
        assert ("model.model.norm" in others["cache"]) == (number % 2 == 1)
        for saves in (mine, others):  # what is captured is what blocks have left there
            captured = saves["cache"]["model.model.layers.1.mlp"].output
            assert all(torch.equal(a, b) for a, b in zip(captured, saves["kept"], strict=True))
        for key in mine["cache"]:
            for a, b in zip(mine["cache"][key].output, others["cache"][key].output, strict=True):
                for x, y in zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]:
                    close(y, x, 1e-4)


async def test_a_stream_has_what_was_captured_so_far(amodel: VLLM) -> None:
    with amodel.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        cache = tracer.cache(modules="model.layers.2.mlp")
    outputs = [output async for output in tracer.backend]
    for step, output in enumerate(outputs):
        entry = output.saves["cache"]["model.model.layers.2.mlp"]
        assert [rows.shape[0] for rows in entry.output] == [5, 1, 1, 1][: step + 1]
        new = output.new["cache"]["model.model.layers.2.mlp"]
        assert torch.equal(new.output, entry[step].output)


def test_types_devices_and_pickles(model: VLLM) -> None:
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for prompt in (PROMPT, "One two three"):
            with tracer.invoke(prompt):
                plain = tracer.cache(modules=["model.model.layers.0.mlp"], include_inputs=True)
                half = tracer.cache(modules=["model.model.layers.0.mlp"], dtype=torch.float16)
                meta = tracer.cache(modules=["model.model.layers.0.mlp"], device="meta")
    for number in range(2):
        rows = plain[number]["model.model.layers.0.mlp"]
        assert torch.equal(half[number]["model.model.layers.0.mlp"].output, rows.output.half())
        assert meta[number]["model.model.layers.0.mlp"].output.device.type == "meta"
        again = pickle.loads(pickle.dumps(plain[number]))
        assert isinstance(again, Cache)
        assert torch.equal(again["model.model.layers.0.mlp"].output, rows.output)
        assert torch.equal(again["model.model.layers.0.mlp"].input, rows.input)
        assert rows.output.shape == rows.input.shape


def test_sequences_have_a_cache_each(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=1.0, seed=0, max_tokens=3, ignore_eos=True, n=2) as tracer:
        cache = tracer.cache(modules="model.embed_tokens", include_inputs=True)
        out = tracer.result.save()
    for one, completion in zip(cache, out.outputs, strict=True):
        ids = torch.cat(one["model.model.embed_tokens"].input).tolist()
        assert ids == [*model.tokenizer.encode(PROMPT), *completion.token_ids[:-1]]


def test_what_is_refused(model: VLLM) -> None:
    with pytest.raises(OutOfOrderError, match="before the block's first read"):
        with model.trace(PROMPT, max_tokens=1) as tracer:
            model.model.layers[0].output
            cache = tracer.cache()
    with pytest.raises(LocationError, match="attention"):
        with model.trace(PROMPT, max_tokens=1) as tracer:
            cache = tracer.cache(modules="model.layers.*.attention")
    with pytest.raises(UnsupportedError, match="cannot be read in the block"):
        with model.trace(PROMPT, max_tokens=1) as tracer:
            cache = tracer.cache(modules="model.norm")
            cache["model.model.norm"]
    with pytest.raises(OutsideBlockError, match="only in a block"):
        tracer.cache()


async def test_memory_goes_when_nothing_of_a_step_is_held(amodel: VLLM) -> None:
    model = amodel
    gc.collect()
    before = (await model.stats()).shared_bytes

    async def one(number: int) -> Any:
        async with model.trace(PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True) as tracer:
            cache = tracer.cache()
        return cache["model.model.layers.0.mlp"][0].output[0]

    rows = await asyncio.gather(*map(one, range(6)))
    gc.collect()
    stats = await model.stats()
    assert stats.shared_bytes > before
    assert stats.unread_bytes == 0
    assert len({tuple(row.tolist()) for row in rows}) == 1
    del rows
    gc.collect()
    assert (await model.stats()).shared_bytes == before
