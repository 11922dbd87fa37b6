"""Engines that serve others too: shared prefixes, a cache too small for all, prompts as long as a step can take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
import torch
from conftest import ENGINE, Engines, live
from reference import close, reference

from nnsight_async import VLLM
from nnsight_async.client import connection
from nnsight_async.errors import ArgumentError, EngineError, PromptError, UnsupportedError

STEPS = 40
STEERING = 3 * torch.randn(64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def shared(engines: Engines) -> VLLM:
    """A tiny Qwen3 with shared prefixes and a cache of 12 blocks of 32 tokens, in async mode."""
    return engines.get("qwen3-small-cache", "async")


def prompt_ids(number: int, length: int) -> list[int]:
    """A prompt of ``length`` tokens that begins like no other."""
    chance = torch.Generator().manual_seed(number)
    return torch.randint(10, 1000, (length,), generator=chance).tolist()


# Shared prefixes.


async def test_the_same_prompt_traced_twice_has_all_its_rows_both_times(shared: VLLM) -> None:
    model, ids = shared, prompt_ids(1, 90)
    expected = reference(Engines.path("qwen3")).hidden_states(ids)[3]
    await model.generate([ids], temperature=0.0, max_tokens=2, progress=False)
    (again,) = await model.generate([ids], temperature=0.0, max_tokens=2, progress=False)
    assert again.num_cached_tokens == 64  # a plain request reads its prefix from the cache
    for _ in range(2):
        async with model.trace(ids, temperature=0.0, max_tokens=1) as tracer:
            stream = sum(model.model.layers[2].output).save()
            out = tracer.result.save()
        assert out.num_cached_tokens == 0
        close(stream, expected, 1e-4)


async def _edited_then_plain(model: VLLM, ids: list[int]) -> list[int]:
    """The tokens of a plain request whose prompt an edited one has just had."""
    async with model.trace(ids, temperature=0.0, max_tokens=2):
        model.model.layers[0].output[0][:] += STEERING
    (plain,) = await model.generate([ids], temperature=0.0, max_tokens=12, ignore_eos=True, progress=False)
    return list(plain.outputs[0].token_ids)


async def test_a_plain_request_finds_nothing_of_an_edited_one_with_its_prompt(shared: VLLM) -> None:
    ids = prompt_ids(2, 90)
    assert await _edited_then_plain(shared, ids) == reference(Engines.path("qwen3")).greedy(ids, 12)


async def test_without_the_salt_it_would(shared: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unsalted(engine: Any, prompt: Any) -> Any:
        return await render(engine, {key: value for key, value in prompt.items() if key != "cache_salt"})

    render = connection.render_prompt
    monkeypatch.setattr(connection, "render_prompt", unsalted)
    ids = prompt_ids(3, 90)
    assert await _edited_then_plain(shared, ids) != reference(Engines.path("qwen3")).greedy(ids, 12)


# A cache too small for all.


async def _read(model: VLLM, ids: list[int]) -> dict[str, Any]:
    async with model.trace(ids, temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        first, streams, logits = [].save(), [].save(), [].save()
        for step in tracer.iter[:STEPS]:
            if step == 0:
                first.append(sum(model.model.layers[1].output))
            streams.append(sum(model.model.layers[2].output)[-1])
            logits.append(model.logits[0])
        out = tracer.result.save()
    return {"saved": [first[0], torch.stack(streams), torch.stack(logits)], "out": out}


async def _edit(model: VLLM, ids: list[int], n: int = 1) -> dict[str, Any]:
    async with model.trace(
        ids, temperature=0.0 if n == 1 else 1.0, seed=5, n=n, max_tokens=STEPS, ignore_eos=True
    ) as tracer:
        streams = [].save()
        for step in tracer.iter[:STEPS]:
            model.model.layers[1].output[0][:] += (1 + step % 3) * STEERING
            streams.append(sum(model.model.layers[2].output)[-1])
        out = tracer.result.save()
    return {"saved": [torch.stack(one) for one in (streams if n > 1 else [streams])], "out": out}


async def _plain(model: VLLM, ids: list[int]) -> dict[str, Any]:
    (out,) = await model.generate([ids], temperature=0.0, max_tokens=STEPS, ignore_eos=True, progress=False)
    return {"saved": [], "out": out}


Work = tuple[Callable[..., Awaitable[dict[str, Any]]], list[int]]


async def _compare(model: VLLM, work: list[Work]) -> list[dict[str, Any]]:
    """Run all at once, and assert that each returns what it returns alone."""
    together = await asyncio.gather(*(run(model, ids) for run, ids in work))
    for (run, ids), result in zip(work, together, strict=True):
        alone = await run(model, ids)
        assert _tokens(result) == _tokens(alone)
        for mine, own in zip(result["saved"], alone["saved"], strict=True):
            close(mine, own, 1e-4)
        assert _preemptions([alone]) == 0
    assert live(model) == 0
    return together


def _tokens(result: dict[str, Any]) -> list[list[int]]:
    return [list(sequence.token_ids) for sequence in result["out"].outputs]


def _preemptions(results: Iterable[dict[str, Any]]) -> int:
    return sum(result["out"].metrics.num_preemptions for result in results)


async def test_requests_that_read_return_what_they_return_alone(shared: VLLM) -> None:
    together = await _compare(shared, [(_read, prompt_ids(100 + number, 5 + 2 * number)) for number in range(16)])
    assert _preemptions(together) > 0


async def test_requests_that_edit_return_what_they_return_alone(shared: VLLM) -> None:
    together = await _compare(shared, [(_edit, prompt_ids(200 + number, 5 + 2 * number)) for number in range(16)])
    assert _preemptions(together) == 0


async def test_requests_of_all_kinds_return_what_they_return_alone(shared: VLLM) -> None:
    async def sampled(model: VLLM, ids: list[int]) -> dict[str, Any]:
        return await _edit(model, ids, n=3)

    kinds = (_read, _edit, _plain, _edit, sampled)
    work = [(kinds[number % 5], prompt_ids(300 + number, 5 + 2 * number)) for number in range(20)]
    together = await _compare(shared, work)
    by_kind = {run: [result for (one, _), result in zip(work, together, strict=True) if one is run] for run in kinds}
    assert _preemptions([*by_kind[_read], *by_kind[_plain]]) > 0
    assert _preemptions([*by_kind[_edit], *by_kind[sampled]]) == 0


async def test_a_request_that_edits_gives_its_room_back_when_it_is_closed(shared: VLLM) -> None:
    model = shared
    for number in range(3):
        with model.trace(prompt_ids(400 + number, 20), temperature=0.0, max_tokens=230, ignore_eos=True) as tracer:
            for _ in tracer.iter[:230]:
                model.model.layers[1].output[0][:] += STEERING
        async with tracer.backend as stream:
            await anext(stream)
    # It needs the whole cache, or nearly.
    result = await _plain(model, prompt_ids(403, 200))
    assert len(_tokens(result)[0]) == STEPS
    assert live(model) == 0


# Long prompts.


@pytest.mark.parametrize(("length", "tokens", "drawn"), [(252, 4, 4), (255, 50, 1), (200, 100, 56)])
async def test_a_prompt_that_fits_the_models_length_is_served_whole(
    shared: VLLM, length: int, tokens: int, drawn: int
) -> None:
    model, ids = shared, prompt_ids(length, length)
    async with model.trace(ids, temperature=0.0, max_tokens=tokens, ignore_eos=True) as tracer:
        stream = sum(model.model.layers[2].output).save()
        out = tracer.result.save()
    close(stream, reference(Engines.path("qwen3")).hidden_states(ids)[3], 1e-4)
    assert len(out.outputs[0].token_ids) == drawn


@pytest.mark.parametrize("length", [256, 300])
async def test_a_prompt_that_does_not_is_refused(shared: VLLM, length: int) -> None:
    model = shared
    with pytest.raises(PromptError, match=r"(?s)256.*(max_model_len|reduce the length)"):
        async with model.trace(prompt_ids(0, length), max_tokens=1):
            value = model.logits.save()
    assert live(model) == 0


async def test_prompts_that_together_are_longer_than_a_step_are_each_served_whole(shared: VLLM) -> None:
    model = shared
    work = [prompt_ids(500 + number, 100) for number in range(6)]

    async def rows(ids: list[int]) -> torch.Tensor:
        async with model.trace(ids, temperature=0.0, max_tokens=2):
            stream = sum(model.model.layers[2].output).save()
        return stream

    for ids, stream in zip(work, await asyncio.gather(*map(rows, work)), strict=True):
        close(stream, reference(Engines.path("qwen3")).hidden_states(ids)[3], 1e-4)


@pytest.mark.parametrize(
    ("arguments", "kind", "told"),
    [
        ({"max_num_batched_tokens": 100}, EngineError, "increase max_num_batched_tokens or decrease max_model_len.$"),
        ({"max_num_scheduled_tokens": 100}, ArgumentError, "max_num_scheduled_tokens=100 .* max_model_len=512"),
        ({"long_prefill_token_threshold": 100}, UnsupportedError, "whole, in one step; leave it out"),
    ],
)
def test_a_step_that_is_too_small_for_a_prompt(arguments: dict[str, int], kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        VLLM(Engines.path("qwen3"), **{**ENGINE, **arguments})
