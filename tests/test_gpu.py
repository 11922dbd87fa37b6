"""The same promises on a GPU, with Qwen3 shapes and made-up weights in bfloat16.

Set ``NNSIGHT_ASYNC_GPU_MODEL`` to a folder with a config and a tokenizer; the weights are made up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nnsight_async import VLLM
from nnsight_async.errors import ArgumentError

pytestmark = pytest.mark.gpu

PROMPT = list(range(100, 120))
STEPS = 6


@pytest.fixture(scope="module")
def gpu() -> Iterator[VLLM]:
    path = os.environ.get("NNSIGHT_ASYNC_GPU_MODEL")
    if path is None:
        pytest.skip("NNSIGHT_ASYNC_GPU_MODEL names no model")
    arguments: dict[str, Any] = {"load_format": "dummy", "max_model_len": 2048, "gpu_memory_utilization": 0.6}
    with VLLM(path, dispatch=True, **arguments) as model:
        yield model


def _greedy(model: VLLM, steps: int = STEPS) -> list[int]:
    (output,) = model.generate(PROMPT, temperature=0.0, max_tokens=steps, ignore_eos=True, progress=False)
    return list(output.outputs[0].token_ids)


def test_what_is_kept_is_what_was_read(gpu: VLLM) -> None:
    model = gpu
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        raw, copies = list().save(), list().save()
        for _ in tracer.iter[:3]:
            for layer in model.model.layers:
                raw.append(layer.output)
                copies.append([part.clone() for part in layer.output])
    assert len(raw) == 3 * len(model.model.layers)
    assert raw[0][0].dtype == torch.bfloat16
    assert raw[0][0].device.type == "cpu"
    for mine, own in zip(raw, copies, strict=True):
        assert torch.equal(mine[0], own[0])
        assert torch.equal(mine[1], own[1])


def test_a_trace_changes_nothing_by_itself(gpu: VLLM) -> None:
    model = gpu
    plain = _greedy(model)
    with model.trace(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        stream, likeliest, drawn = list().save(), list().save(), list().save()
        for _ in tracer.iter[:STEPS]:
            stream.append(sum(model.model.layers[20].output))
            likeliest.append(model.logits.argmax(-1).item())
            drawn.append(model.samples.item())
        result = tracer.result.save()
    assert drawn == likeliest == list(result.outputs[0].token_ids) == plain
    assert [tuple(rows.shape) for rows in stream] == [(20, 4096)] + [(1, 4096)] * (STEPS - 1)


@pytest.mark.parametrize("last", [0, 1, 5])
def test_stop(gpu: VLLM, last: int) -> None:
    model = gpu
    with model.trace(PROMPT, temperature=0.0, max_tokens=60, ignore_eos=True) as tracer:
        drawn = list().save()
        for step in tracer.iter[:60]:
            drawn.append(model.samples.item())
            if step == last:
                tracer.stop()
    assert drawn == _greedy(model, 6)[: last + 1]


def test_forced_samples_are_what_the_engine_goes_on_from(gpu: VLLM) -> None:
    model = gpu
    forced = [500, 600, 700]
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1) as tracer:
        rows = list().save()
        for step in tracer.iter[:4]:
            rows.append(sum(model.model.layers[30].output))
            if step < 3:
                model.samples = torch.full_like(model.samples, forced[step])
        result = tracer.result.save()
    assert list(result.outputs[0].token_ids[:3]) == forced
    assert all(token in top for token, top in zip(forced, result.outputs[0].logprobs, strict=False))
    with model.trace([*PROMPT, *forced], temperature=0.0, max_tokens=1):
        whole = sum(model.model.layers[30].output).save()
    scale = whole.float().abs().max()
    assert (torch.cat(rows).float() - whole.float()).abs().max() / scale < 0.03  # bfloat16, other kernels
    with pytest.raises(ArgumentError, match="outside the vocabulary"):
        with model.trace(PROMPT, max_tokens=3):
            model.samples[:] = 10**6
    assert _greedy(model, 2)


def test_one_steered_request_among_others(gpu: VLLM) -> None:
    model = gpu

    def run(edit: bool) -> Any:
        with model.trace(temperature=0.0, max_tokens=8, ignore_eos=True) as tracer:
            for number in range(8):
                with tracer.invoke([*PROMPT, 200 + number]):
                    for _ in tracer.iter[:8]:
                        if edit and number == 3:
                            model.model.layers[10].output[0][:] += 5.0
                        row = model.samples.item()
                    result = tracer.result.save()
        return [list(output.outputs[0].token_ids) for output in result]

    plain, steered = run(False), run(True)
    assert [a == b for a, b in zip(plain, steered, strict=True)] == [number != 3 for number in range(8)]


def test_streaming_many(gpu: VLLM) -> None:
    import copy

    model = copy.copy(gpu)
    model.mode = "async"

    async def one(number: int) -> int:
        with model.trace([*PROMPT, 300 + number], temperature=0.0, max_tokens=16, ignore_eos=True) as tracer:
            rows = list().save()
            for _ in tracer.iter[:16]:
                rows.append(sum(model.model.layers[5].output)[-1])
        count = 0
        async for output in tracer.backend:
            count += 1
            assert len(output.saves["rows"]) == count == output.step + 1
        return count

    async def many() -> list[int]:
        return await asyncio.gather(*map(one, range(64)))

    import threading

    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(many())))
    thread.start()
    thread.join()
    assert found == [[16] * 64]
