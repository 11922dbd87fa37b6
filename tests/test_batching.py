"""Requests share forward passes; each block sees its own rows, as if it were alone."""

from __future__ import annotations

import asyncio
import random

import torch
from conftest import live
from reference import close

from nnsight_async import VLLM

TEXTS = [
    "Paris",
    "The capital of France is",
    "Once upon a time there was a small model that",
    "One two three four five six seven eight nine ten eleven twelve thirteen",
    "def f(x):",
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z, said the teacher, and then again, backwards:",
]


async def _traced(model: VLLM, prompt: str, steps: int, delay: float) -> dict[str, object]:
    await asyncio.sleep(delay)
    async with model.trace(prompt, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
        streams, inputs, logits, tokens = list().save(), list().save(), list().save(), list().save()
        for _ in tracer.iter[:steps]:
            streams.append([sum(layer.output) for layer in model.model.layers])
            inputs.append(model.model.norm.inputs[0])
            logits.append(model.logits)
            tokens.append(model.samples.item())
    return {"streams": streams, "inputs": inputs, "logits": logits, "tokens": tokens}


def _compare(together: dict[str, object], alone: dict[str, object]) -> None:
    assert together["tokens"] == alone["tokens"]
    for mine, own in zip(together["streams"], alone["streams"], strict=True):  # type: ignore[call-overload]
        for a, b in zip(mine, own, strict=True):
            close(a, b, 1e-4)
    for mine, own in zip(together["inputs"], alone["inputs"], strict=True):  # type: ignore[call-overload]
        for a, b in zip(mine, own, strict=True):
            close(a, b, 1e-4)
    for a, b in zip(together["logits"], alone["logits"], strict=True):  # type: ignore[call-overload]
        close(a, b, 1e-4)


async def test_requests_of_different_lengths_arriving_at_different_times(amodel: VLLM) -> None:
    chance = random.Random(0)
    work = [(text, chance.randint(3, 12), chance.random() * 0.4) for text in TEXTS * 2]
    together = await asyncio.gather(*(_traced(amodel, *item) for item in work))
    for item, result in zip(work, together, strict=True):
        _compare(result, await _traced(amodel, item[0], item[1], 0.0))
    assert live(amodel) == 0


async def test_traced_requests_beside_untraced_ones(amodel: VLLM) -> None:
    model = amodel
    alone = await _traced(model, TEXTS[1], 8, 0.0)

    async def plain(number: int) -> list[int]:
        params_trace = model.trace(TEXTS[number % 6], temperature=0.0, max_tokens=10, ignore_eos=True)
        with params_trace as tracer:
            pass
        return list((await tracer.backend).outputs[0].token_ids)

    *others, traced = await asyncio.gather(*(plain(n) for n in range(6)), _traced(model, TEXTS[1], 8, 0.05))
    assert all(len(tokens) == 10 for tokens in others)
    _compare(traced, alone)  # type: ignore[arg-type]


def test_invokes_of_one_trace_each_see_their_own_rows(model: VLLM) -> None:
    with model.trace(temperature=0.0, max_tokens=2) as tracer:
        for text in TEXTS:
            with tracer.invoke(text):
                rows = sum(model.model.layers[3].output).save()
                token = model.logits.argmax(-1).save()
    assert isinstance(rows, list)
    for text, mine, drawn in zip(TEXTS, rows, token, strict=True):
        with model.trace(text, temperature=0.0, max_tokens=1):
            own = sum(model.model.layers[3].output).save()
            first = model.samples[0].save()
        assert mine.shape[0] == len(model.tokenizer(text).input_ids)
        close(mine, own, 1e-4)
        assert torch.equal(drawn, first.to(drawn.dtype))


async def test_an_edit_in_place_reaches_its_own_request_alone(amodel: VLLM) -> None:
    model = amodel

    async def run(edit: bool, steps: int = 6) -> list[int]:
        async with model.trace(TEXTS[1], temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
            tokens = list().save()
            for _ in tracer.iter[:steps]:
                if edit:
                    model.model.layers[1].output[0][:] += 3.0
                tokens.append(model.samples.item())
        return tokens

    plain, edited = await run(False), await run(True)
    assert plain != edited
    together = await asyncio.gather(*(run(number == 3) for number in range(8)))
    assert together == [edited if number == 3 else plain for number in range(8)]
