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


@pytest.fixture(scope="module", params=["V1", "V2"])
def gpu(request: pytest.FixtureRequest) -> Iterator[VLLM]:
    """The model on each of vLLM's model runners, one after the other."""
    path = os.environ.get("NNSIGHT_ASYNC_GPU_MODEL")
    if path is None:
        pytest.skip("NNSIGHT_ASYNC_GPU_MODEL names no model")
    arguments: dict[str, Any] = {"load_format": "dummy", "max_model_len": 2048, "gpu_memory_utilization": 0.6}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(request.param == "V2")))
        model = VLLM(path, dispatch=True, **arguments)
    with model:
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


def _in_a_loop(coroutine: Any) -> Any:
    """Run a coroutine in a loop of its own, on a thread: pytest's runs in this one."""
    import threading

    found: list[Any] = []

    def run() -> None:
        try:
            found.append(asyncio.run(coroutine))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _asynchronous(model: VLLM) -> VLLM:
    import copy

    face = copy.copy(model)
    face.mode = "async"
    return face


def test_values_of_both_memories_and_of_many_types_arrive_as_they_were(gpu: VLLM) -> None:
    """What is copied while the model goes on is what it was at the end of its step, whatever the block does next."""
    model, steps = _asynchronous(gpu), 24

    async def stream() -> list[Any]:
        with model.trace(PROMPT, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
            total = torch.zeros(300_000, device="cuda").save()
            kinds = list().save()
            for step in tracer.iter[:steps]:
                model.logits
                base = torch.arange(5_001, device="cuda") + step
                kinds.append(
                    (base, base.to(torch.bfloat16), base.cpu() * 2, base.double(), base[::3], base % 2 == 0, base[:0])
                )
                total += 1.0
        return [output async for output in tracer.backend]

    outputs = _in_a_loop(stream())
    assert len(outputs) == steps
    for step, output in enumerate(outputs):
        assert torch.equal(output.saves["total"], torch.full((300_000,), step + 1.0))
        assert len(output.saves["kinds"]) == step + 1
        base = torch.arange(5_001) + step
        expected = (base, base.to(torch.bfloat16), base * 2, base.double(), base[::3], base % 2 == 0, base[:0])
        for mine, own in zip(output.saves["kinds"][step], expected, strict=True):
            assert mine.device.type == "cpu"
            assert torch.equal(mine, own)


def test_much_at_once(gpu: VLLM) -> None:
    model = gpu
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        big = list().save()
        for step in tracer.iter[:4]:
            model.logits
            big.append(torch.arange(64 << 20, dtype=torch.int32, device="cuda") + step)
    for step, values in enumerate(big):
        assert torch.equal(values, torch.arange(64 << 20, dtype=torch.int32) + step)


def test_a_cache_of_every_layer_is_what_blocks_read(gpu: VLLM) -> None:
    model = gpu
    with model.trace(temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        for number in range(6):
            with tracer.invoke([*PROMPT[number:], 400 + number]):
                cache = tracer.cache(modules="model.layers.*")
                read = list().save()
                for _ in tracer.iter[:4]:
                    for layer in model.model.layers:
                        read.append(layer.output)
    for mine, own in zip(cache, read, strict=True):
        assert len(mine) == len(model.model.layers)
        values = iter(own)
        for step in range(4):
            for entry in mine.values():
                hidden, residual = next(values)
                assert torch.equal(entry[step].output[0], hidden)
                assert torch.equal(entry[step].output[1], residual)


def test_messages_to_a_running_request(gpu: VLLM) -> None:
    model = _asynchronous(gpu)
    plain = _greedy(gpu, 40)

    async def act() -> Any:
        with model.trace(PROMPT, temperature=0.0, max_tokens=400, ignore_eos=True) as tracer:
            seen = list().save()
            for _ in tracer.all():
                direction = tracer.live("direction")
                seen.append(direction is not None)
                if direction is not None:
                    model.model.layers[10].output[0] += direction
        async with tracer.backend as stream:
            await anext(stream)
            set_at = await stream.set(direction=torch.full((4096,), 5.0, dtype=torch.bfloat16))
            forced_at = await stream.force([500, 600])
            stopped_at = await stream.stop()
            return set_at, forced_at, stopped_at, await stream

    set_at, forced_at, stopped_at, last = _in_a_loop(act())
    tokens = list(last.outputs[0].token_ids)
    assert tokens[:set_at] == plain[:set_at]
    assert last.saves["seen"] == [step >= set_at for step in range(stopped_at + 1)]
    assert len(tokens) == stopped_at + 1
    if stopped_at > forced_at:
        assert tokens[forced_at : forced_at + 2] == [500, 600][: stopped_at + 1 - forced_at]


def test_modules_called_in_a_block(gpu: VLLM) -> None:
    model = gpu
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        lens, own = list().save(), list().save()
        for _ in tracer.iter[:3]:
            stream = sum(model.model.layers[-1].output)
            lens.append(model.logits_processor(model.lm_head, model.model.norm(stream)[-1:]))
            own.append(model.logits)
        weight = model.model.layers[0].self_attn.o_proj.weight.save()
    assert weight.shape == (4096, 4096)
    for mine, theirs in zip(lens, own, strict=True):
        scale = theirs.float().abs().max()
        assert (mine.float() - theirs.float()).abs().max() / scale < 0.02  # bfloat16, the norm fused or not


def test_skipping_a_module(gpu: VLLM) -> None:
    model = gpu
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        rows = list().save()
        for _ in tracer.iter[:3]:
            model.model.layers[4].mlp.skip(torch.zeros_like(model.model.layers[4].mlp.input))
            rows.append(model.model.layers[4].mlp.output)
    assert all(int(part.count_nonzero()) == 0 for part in rows)
    assert [part.shape[0] for part in rows] == [len(PROMPT), 1, 1]


_SEEN: dict[str, tuple[list[int], torch.Tensor]] = {}


def test_both_runners_give_the_same(gpu: VLLM, request: pytest.FixtureRequest) -> None:
    model = gpu
    with model.trace(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        stream = list().save()
        for _ in tracer.iter[:STEPS]:
            stream.append(sum(model.model.layers[20].output))
        result = tracer.result.save()
    _SEEN[request.node.callspec.params["gpu"]] = list(result.outputs[0].token_ids), torch.cat(stream)
    if len(_SEEN) == 2:
        (tokens, rows), (others, other_rows) = _SEEN.values()
        assert tokens == others
        assert torch.equal(rows, other_rows)
