"""Skipping a module: what is given stands for its output, and it is not run where nobody needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Engines, live
from reference import close, reference

from nnsight_async import VLLM
from nnsight_async.errors import NeverReachedError, OutOfOrderError, OutsideBlockError
from nnsight_async.worker.skips import Outputs, Skips

PROMPT = "The capital of France is"
STEPS = 4


def replaced(name: str, place: str, output: Callable[[tuple[Any, ...], Any], Any]) -> tuple[list[int], torch.Tensor]:
    """HuggingFace's greedy tokens, and the logits at their positions, with a module's output replaced at all steps."""
    expected = reference(Engines.path(name))
    module = expected.model.get_submodule(place)
    with module.register_forward_hook(lambda _, args, result: output(args, result)):
        tokens = expected.greedy(PROMPT, STEPS)
        ids = expected.encode(PROMPT)
        return tokens, expected.logits([*ids, *tokens[:-1]])[len(ids) - 1 :]


def test_a_skipped_mlp_is_huggingface_s_with_its_output_replaced(model: VLLM) -> None:
    mlp = model.model.layers[2].mlp
    with model.trace(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        logits, outputs, calls = list().save(), list().save(), list().save()
        counted = mlp.down_proj._module.register_forward_hook(lambda *_: calls.append(1))
        for _ in tracer.iter[:STEPS]:
            mlp.skip(mlp.input * 0.5)
            outputs.append((mlp.input, mlp.output))
            logits.append(model.logits)
        counted.remove()
        out = tracer.result.save()
    tokens, expected = replaced("qwen3", "model.layers.2.mlp", lambda args, _: args[0] * 0.5)
    assert list(out.outputs[0].token_ids) == tokens
    for step, (row, (into, output)) in enumerate(zip(logits, outputs, strict=True)):
        close(row, expected[step][None])
        assert torch.equal(into * 0.5, output)
    assert calls == []  # the module was not run


def test_a_skipped_layer_leaves_the_stream_and_keeps_its_keys(model: VLLM) -> None:
    """It holds an attention layer, so it runs, and its rows are replaced."""
    layer = model.model.layers[1]
    with model.trace(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        logits = list().save()
        for _ in tracer.iter[:STEPS]:
            _, hidden, residual = layer.inputs[0]
            layer.skip((hidden, residual))
            logits.append(model.logits)
        out = tracer.result.save()
    tokens, expected = replaced("qwen3", "model.layers.1", lambda args, _: args[0])
    assert list(out.outputs[0].token_ids) == tokens
    close(torch.cat(logits), expected)

    # Skipped at the prefill only: what the later steps attend to are the keys and values of the layer as it was run.
    with model.trace(PROMPT, temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        after = list().save()
        for step in tracer.iter[:2]:
            _, hidden, residual = layer.inputs[0]
            if step == 0:
                layer.skip((hidden, residual))
            else:
                after.append(layer.self_attn.output)
        token = tracer.result.save()
    ids = [*reference(Engines.path("qwen3")).encode(PROMPT), token.outputs[0].token_ids[0]]
    with model.trace(ids, temperature=0.0, max_tokens=1):
        whole = layer.self_attn.output.save()
    close(after[0], whole[-1:], 1e-4)


def test_only_the_skipping_requests_rows_are_replaced(engines: Engines) -> None:
    for name in ("qwen3", "qwen2_moe"):
        model = engines.get(name, "async")
        mlp = model.model.layers[1].mlp

        async def run(skip: bool, prompt: str, model: VLLM = model, mlp: Any = mlp) -> list[Any]:
            async with model.trace(prompt, temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
                seen = list().save()
                for _ in tracer.iter[:6]:
                    if skip:
                        mlp.skip(torch.full_like(mlp.input, 0.25))
                    seen.append((mlp.output, model.logits))
            return seen

        async def check(run: Any = run) -> None:
            work = [(number % 3 == 0, f"{number} {PROMPT}" + " and" * number) for number in range(6)]
            alone = [await run(*item) for item in work]
            together = await asyncio.gather(*(run(*item) for item in work))
            every = await asyncio.gather(*(run(True, prompt) for _, prompt in work))
            for (skip, _), own, shared, skipped in zip(work, alone, together, every, strict=True):
                for one, other in zip(own, shared, strict=True):
                    close(other[0], one[0], 1e-4)
                    close(other[1], one[1], 1e-4)
                assert all(bool((output == 0.25).all()) for output, _ in skipped)
                assert all(bool((output == 0.25).all()) == skip for output, _ in shared)

        asyncio.run(check())
        assert live(engines.get(name, "sync")) == 0


def test_a_linear_and_a_norm_are_skipped_with_their_own_structure(model: VLLM) -> None:
    layer = model.model.layers[2]
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        layer.mlp.down_proj.skip((torch.ones(5, 64), None))
        ones = layer.mlp.output.save()
        model.model.norm.skip((torch.zeros(5, 64), torch.zeros(5, 64)))
        logits = model.logits.save()
    assert torch.equal(ones, torch.ones(5, 64))
    assert torch.equal(logits, torch.zeros_like(logits))
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        model.model.embed_tokens.skip(torch.ones(5, 64))
        embedded = model.model.layers[0].inputs[0][1].save()
        model.logits_processor.skip(torch.arange(49152.0)[None])
        top = model.samples.save()
    assert torch.equal(embedded, torch.ones(5, 64))
    assert top.tolist() == [[49151]]


def test_mistakes_are_told_at_once(model: VLLM) -> None:
    mlp = model.model.layers[2].mlp
    with pytest.raises(OutsideBlockError):
        mlp.skip(torch.ones(5, 64))
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.output has shape \[5, 64\].*\[4, 64\]"):
        with model.trace(PROMPT, max_tokens=1):
            mlp.skip(torch.ones(4, 64))
    with pytest.raises(TypeError, match=r"mlp\.down_proj\.output is a tuple of 2"):
        with model.trace(PROMPT, max_tokens=1):
            mlp.down_proj.skip(torch.ones(5, 64))
    with pytest.raises(ValueError, match="tuple of 2; its replacement has 1"):
        with model.trace(PROMPT, max_tokens=1):
            mlp.down_proj.skip((torch.ones(5, 64),))
    with pytest.raises(TypeError, match="can only be replaced by a tensor, not by int"):
        with model.trace(PROMPT, max_tokens=1):
            mlp.skip(0)
    with pytest.raises(NeverReachedError, match=r"mlp\.act_fn is not reached at step 0: the block skips model\.layers"):
        with model.trace(PROMPT, max_tokens=1):
            mlp.skip(mlp.input)
            inner = mlp.act_fn.output.save()
        print(inner)
    with pytest.raises(OutOfOrderError, match=r"model\.layers\.2\.mlp\.inputs has passed"):
        with model.trace(PROMPT, max_tokens=1):
            mlp.skip(mlp.output)
    with model.trace(PROMPT, temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        told, inner = list().save(), list().save()
        for step in tracer.iter[:2]:
            if step == 0:
                mlp.skip(mlp.input)
                try:
                    mlp.act_fn.output.sum()
                except NeverReachedError as error:
                    told.append(str(error))
            else:
                inner.append(mlp.act_fn.output)  # the skip was the other step's
    assert len(told) == 1
    assert inner[0].shape == (1, 128)
    assert live(model) == 0


def test_every_sequence_of_a_prompt_skips_for_itself(model: VLLM) -> None:
    mlp = model.model.layers[2].mlp
    with model.trace(PROMPT, temperature=1.0, seed=0, max_tokens=3, n=3, ignore_eos=True) as tracer:
        outputs = list().save()
        for _ in tracer.iter[:3]:
            mlp.skip(torch.zeros_like(mlp.input))
            outputs.append(mlp.output)
    assert [[tuple(output.shape) for output in sequence] for sequence in outputs] == [[(5, 64), (1, 64), (1, 64)]] * 3
    assert all(not output.any() for sequence in outputs for output in sequence)
    assert live(model) == 0


async def test_a_stream_that_is_closed_leaves_its_neighbours_and_nothing_behind(amodel: VLLM) -> None:
    model = amodel
    layer = model.model.layers[2]

    async def whole() -> list[Any]:
        async with model.trace(PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True) as tracer:
            seen = list().save()
            for _ in tracer.iter[:12]:
                seen.append((layer.self_attn.source.rotary_emb_1.output[0].clone(), layer.mlp.output, model.logits))
        return seen

    async def closed() -> None:
        with model.trace(PROMPT, temperature=0.0, max_tokens=400, ignore_eos=True) as tracer:
            norms = list().save()
            for _ in tracer.all():
                layer.self_attn.source.rotary_emb_1.output[0][:] = 0
                layer.mlp.skip(torch.zeros_like(layer.mlp.input))
                norms.append(model.model.norm(layer.mlp.output).norm().item())
        async with tracer.backend as stream:
            async for output in stream:
                if output.step == 3:
                    break

    alone = await whole()
    together, *_ = await asyncio.gather(whole(), closed(), closed())
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one, other, strict=True):
            close(b, a, 1e-4)
    for _ in range(50):
        if await model.live() == 0:
            break
        await asyncio.sleep(0.1)
    assert await model.live() == 0


def test_wrappers_are_taken_off_when_nobody_is_left(model: VLLM) -> None:
    layer = model.model.layers[2]

    def wrapped(model: Any) -> list[str]:
        return [path for path, module in model.named_modules() if "forward" in vars(module._module)]

    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        before = wrapped(model).save()
        layer.self_attn.source.split_1.output[0].sum()
        during = wrapped(model).save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        after = wrapped(model).save()
    assert before == after == []
    assert "model.layers.2.self_attn" in during
    assert "model.layers.1.self_attn" not in during


def test_an_output_that_nothing_is_known_of_is_replaced_after_the_module_has_run() -> None:
    """As where the recording failed, or where an output is not one of rows: a wrong shape then fails the block."""
    mlp = torch.nn.Linear(2, 2)
    outputs = Outputs({"mlp": mlp})
    outputs.learn("mlp", torch.ones(1, 2))
    assert outputs.can_be_made_up("mlp")
    outputs.learn("mlp", torch.ones(3, 2))
    assert not outputs.can_be_made_up("mlp")

    failures = list[Exception]()
    block = SimpleNamespace(request_id="a", fail=failures.append)
    interleaver: Any = SimpleNamespace(running=block, span=lambda _: (3, 1, 3))
    skips = Skips(interleaver, outputs)
    for replacement, rows, failed in ((torch.ones(2, 2), [0.0, 1.0, 1.0], 0), (torch.ones(1, 2), [0.0] * 3, 1)):
        skips.skip("mlp", replacement)
        assert skips.instead("mlp", ((torch.ones(3, 2),), {})) is None
        output = torch.zeros(3, 2)
        skips.replace("mlp", output)
        assert output[:, 0].tolist() == rows
        assert len(failures) == failed
    assert "mlp.output has shape [2, 2]; its replacement has [1, 2]" in str(failures[0])
