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
from nnsight_async.client.tiers import TierStats
from nnsight_async.errors import ArgumentError

pytestmark = pytest.mark.gpu

PROMPT = list(range(100, 120))
STEPS = 6
#: Relative to the largest, in bfloat16: what the same numbers differ by in a step of another size.
NOISE = 0.02


#: The engines: vLLM's runners with graphs, and one without. Each: whether it is the V2 runner, whether steps with
#: prompts in them get graphs, and arguments.
ENGINES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eager": ("1", "0", {"graphs": "off"}),
    "V2": ("1", "0", {"taps": ["model.layers.33.output"]}),
    "prompts": ("1", "1", {"taps": ["model.layers.33.output"]}),
    "V1": ("0", "0", {}),
}
TAPPED = ("V2", "prompts")


@pytest.fixture(scope="module", params=list(ENGINES))
def gpu(request: pytest.FixtureRequest) -> Iterator[VLLM]:
    """The model on each of the engines, one after the other."""
    path = os.environ.get("NNSIGHT_ASYNC_GPU_MODEL")
    if path is None:
        pytest.skip("NNSIGHT_ASYNC_GPU_MODEL names no model")
    runner, prompts, settings = ENGINES[request.param]
    arguments: dict[str, Any] = {"load_format": "dummy", "max_model_len": 2048, "gpu_memory_utilization": 0.6}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
        patch.setenv("NNSIGHT_ASYNC_PROMPT_GRAPHS", prompts)
        model = VLLM(path, dispatch=True, **settings, **arguments)
    with model:
        yield model


@pytest.fixture
def engine(request: pytest.FixtureRequest, gpu: VLLM) -> str:
    """Which of the engines it is."""
    name: str = request.node.callspec.params["gpu"]
    return name


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


def test_loops_that_only_collect(gpu: VLLM) -> None:
    """What is gathered for all requests at once is what each reads turn by turn, prompts and single tokens together."""
    model = gpu
    layers = model.model.layers
    with model.trace(temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        for number in range(8):
            with tracer.invoke(list(range(500, 503 + 5 * number))):
                whole, last, summed = list().save(), list().save(), list().save()
                turns = list().save()
                for step in tracer.iter[:4]:
                    if number % 2 == 0:
                        for layer in layers:
                            whole.append(layer.output[0])
                    elif number % 4 == 1:
                        last.append([layer.mlp.output[-1] for layer in layers])
                    else:
                        for layer in layers:
                            summed.append(layer.output[0] + layer.output[1])
                    turns.append(step)
    with model.trace(temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        for number in range(8):
            with tracer.invoke(list(range(500, 503 + 5 * number))):
                own = list().save()
                for _ in tracer.iter[:4]:
                    together = []
                    for layer in iter(layers):
                        if number % 2 == 0:
                            together.append(layer.output[0])
                        elif number % 4 == 1:
                            together.append(layer.mlp.output[-1])
                        else:
                            together.append(layer.output[0] + layer.output[1])
                    own.append(together)
    for number in range(8):
        kept = whole[number] + summed[number] + [row for rows in last[number] for row in rows]
        expected = [value for values in own[number] for value in values]
        assert turns[number] == [0, 1, 2, 3]
        assert len(kept) == len(expected) == 4 * len(layers)
        for mine, other in zip(kept, expected, strict=True):
            assert mine.shape == other.shape
            assert _close(mine, other)


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


def test_calls_that_are_run_together(gpu: VLLM) -> None:
    model = gpu

    def lens(numbers: list[int]) -> list[list[torch.Tensor]]:
        with model.trace(temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            for number in numbers:
                with tracer.invoke(list(range(700 + number, 710 + 3 * number))):
                    kept = list().save()
                    for _ in tracer.iter[:3]:
                        stream = sum(model.model.layers[20].output)
                        kept.append(stream)
                        kept.append(model.logits_processor(model.lm_head, model.model.norm(stream)[-1:]))
                        kept.append(model.model.layers[20].output[1])
        return [kept] if len(numbers) == 1 else list(kept)

    together = lens(list(range(12)))
    for number in (0, 5, 11):
        (alone,) = lens([number])
        assert len(alone) == len(together[number]) == 9
        for mine, own in zip(together[number], alone, strict=True):
            assert _close(mine, own)


def test_skipping_a_module(gpu: VLLM) -> None:
    model = gpu
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        rows = list().save()
        for _ in tracer.iter[:3]:
            model.model.layers[4].mlp.skip(torch.zeros_like(model.model.layers[4].mlp.input))
            rows.append(model.model.layers[4].mlp.output)
    assert all(int(part.count_nonzero()) == 0 for part in rows)
    assert [part.shape[0] for part in rows] == [len(PROMPT), 1, 1]


_SEEN: dict[tuple[str, str], Any] = {}


def _same_on_all(engine: str, name: str, values: list[torch.Tensor], tokens: list[int], scale: float = 0.0) -> None:
    """Compare with what the first engine gave: tokens are equal, values too, but for ``scale`` of the largest."""
    first, first_tokens = (
        _SEEN.setdefault(("eager", name), (values, tokens)) if engine == "eager" else _SEEN["eager", name]
    )
    assert tokens == first_tokens
    for mine, own in zip(values, first, strict=True):
        assert (mine.float() - own.float()).abs().max() <= scale * own.float().abs().max()


def _since(model: VLLM, before: TierStats) -> dict[str, int]:
    now = model.tier_stats()
    return {name: getattr(now, name) - getattr(before, name) for name in ("whole", "plain", "tapped", "eager", "again")}


def test_tiers_every_way_gives_the_same(gpu: VLLM, engine: str) -> None:
    """Steps run eagerly at first and in a tapped graph when they recur; whole graphs where nobody looks."""
    model, steps = gpu, 12

    def layer() -> tuple[list[torch.Tensor], list[int]]:
        with model.trace(PROMPT, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
            rows = list().save()
            for _ in tracer.iter[:steps]:
                rows.append(model.model.layers[20].output[0] + model.model.layers[20].output[1])
            result = tracer.result.save()
        return rows, list(result.outputs[0].token_ids)

    def many() -> tuple[list[torch.Tensor], list[int]]:
        with model.trace(PROMPT, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
            rows = list().save()
            for _ in tracer.iter[:steps]:
                for one in model.model.layers:
                    rows.append(one.self_attn.o_proj.input)
                    rows.append(one.mlp.act_fn.output)
                    rows.append(one.output[0])
                rows.append(model.logits)
            result = tracer.result.save()
        return rows, list(result.outputs[0].token_ids)

    for name, run in (("layer", layer), ("many", many)):
        before = model.tier_stats()
        first = run()
        second = run()
        ran = _since(model, before)
        for mine, own in zip(first[0], second[0], strict=True):
            assert torch.equal(mine, own)
        assert first[1] == second[1] == _greedy(model, steps)
        _same_on_all(engine, name, *second)
        if engine in TAPPED:
            assert ran["tapped"] == 2 * steps - 4 + 1  # all but two prompts and the first step
            assert ran["eager"] == 3
        else:
            assert ran["eager"] == 2 * steps
        assert ran["again"] == 0


def test_tiers_logits_and_samples_need_no_break(gpu: VLLM, engine: str) -> None:
    model = gpu
    before = model.tier_stats()
    with model.trace(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        likeliest, drawn = list().save(), list().save()
        for _ in tracer.iter[:STEPS]:
            likeliest.append(model.logits.argmax(-1).item())
            drawn.append(model.samples.item())
    assert drawn == likeliest == _greedy(model)
    ran = _since(model, before)
    if engine == "eager":
        assert ran["eager"] == 2 * STEPS
    else:
        assert ran["whole"] == 2 * STEPS - 2
        assert ran["eager"] == ran["tapped"] == 0


def test_tiers_graphs_captured_at_the_start(gpu: VLLM, engine: str) -> None:
    model = gpu
    before = model.tier_stats()
    with model.trace(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        for _ in tracer.iter[:STEPS]:
            model.model.layers[33].output[0][:] += 1.0
    ran = _since(model, before)
    if engine in TAPPED:
        (graphs,) = [one for one in before.graphs if one.locations == ("model.layers.33.output",) and not one.prompts]
        assert {1, 8, 128} <= set(graphs.tokens)
        assert (ran["tapped"], ran["eager"]) == (STEPS - 1, 1)
    else:
        assert ran["eager"] == STEPS


def test_tiers_a_look_that_was_not_expected(gpu: VLLM, engine: str) -> None:
    """A block looks somewhere new in the middle of its request, beside others that write: the step is run again."""
    model, steps = gpu, 14

    def run(late: int) -> tuple[list[torch.Tensor], list[Any]]:
        with model.trace(temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
            for number in range(3):
                with tracer.invoke([*PROMPT, 600 + number]):
                    seen, cached = list().save(), tracer.cache(modules="model.layers.30")
                    for step in tracer.iter[:steps]:
                        if number == 1:
                            model.model.layers[5].output[0][:] *= 1.5
                            model.model.layers[7].mlp.output[:] += 0.5
                        if number == 0:
                            seen.append(model.model.layers[6].output[0])
                            if step >= late:
                                model.model.layers[25].output[0][:] -= 0.25
                                seen.append(model.model.layers[26].output[0])
                    result = tracer.result.save()
        values = [tensor for one in seen for tensor in one]
        for one in cached:
            values += [step.output[0] for step in one["model.layers.30"]]
        return values, [list(output.outputs[0].token_ids) for output in result]

    before = model.tier_stats()
    values, tokens = run(9)
    ran = _since(model, before)
    again, tokens_again = run(9)
    for mine, own in zip(values, again, strict=True):
        assert _close(mine, own)
    assert tokens == tokens_again
    _same_on_all(engine, "late", values, tokens, NOISE)
    assert ran["again"] == (engine in TAPPED)
    assert len({tuple(one) for one in tokens}) == 3


def test_tiers_a_cache_alone_is_copied_in_the_graph(gpu: VLLM, engine: str) -> None:
    model = gpu

    def cached() -> Any:
        with model.trace(temperature=0.0, max_tokens=8, ignore_eos=True) as tracer:
            for number in range(5):
                with tracer.invoke([*PROMPT[number:], 700 + number]):
                    cache = tracer.cache(modules=["model.layers.*", "model.layers.3.mlp"], include_inputs=True)
        return cache

    before = model.tier_stats()
    first, second = cached(), cached()
    ran = _since(model, before)
    if engine in TAPPED:
        graphs = [one for one in model.tier_stats().graphs if "model.layers.3.mlp.output" in one.copied]
        assert [one.locations for one in graphs] == [()]
        assert ran["tapped"] >= 12
    for number, (mine, own) in enumerate(zip(first, second, strict=True)):
        assert list(mine) == list(own)
        for path, steps in mine.items():
            for step, (one, other) in enumerate(zip(steps, own[path], strict=True)):
                assert _close(one.output, other.output), (number, path, step)
                assert _close(one.inputs[0], other.inputs[0]), (number, path, step)
    values = [part for rows in second[2]["model.layers.17"].output for part in rows]
    _same_on_all(engine, "cache", values, [], NOISE)


def test_tiers_prompts_in_graphs(gpu: VLLM, engine: str) -> None:
    """Prompts of several lengths, alone, together and beside requests that decode; some steer, some look elsewhere."""
    model, lengths = gpu, (3, 20, 70, 200, 600)

    def run() -> tuple[list[torch.Tensor], list[list[int]]]:
        with model.trace(temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
            for number, length in enumerate(lengths):
                with tracer.invoke([1000 + 7 * number + place % 50 for place in range(length)]):
                    rows, cache = list().save(), tracer.cache(modules=["model.layers.30.mlp"])
                    for _ in tracer.iter[:4]:
                        rows.append(model.model.layers[2].self_attn.o_proj.input)
                        if number % 2:
                            model.model.layers[8].output[0][:] *= 1.25
                        rows.append(model.model.layers[21 + number].output[0])
                        assert model.logits.argmax(-1).item() == model.samples.item()
                    result = tracer.result.save()
        values = [tensor for one in rows for tensor in one]
        for one in cache:
            values += [step.output for step in one["model.layers.30.mlp"]]
        return values, [list(output.outputs[0].token_ids) for output in result]

    runs = [run() for _ in range(4)]
    before = model.tier_stats()
    runs.append(run())
    after = model.tier_stats()
    for values, tokens in runs[1:]:
        assert tokens == runs[0][1]
        for mine, own in zip(values, runs[0][0], strict=True):
            assert mine.shape == own.shape
            assert _close(mine, own)
    _same_on_all(engine, "prompts", *runs[-1], NOISE)
    if engine == "prompts":
        assert any(one.prompts for one in after.graphs)
        assert after.tapped - before.tapped > 3  # the steps of single tokens are three
        assert after.refused == 0


def test_tiers_a_prompt_that_is_looked_at_elsewhere(gpu: VLLM, engine: str) -> None:
    """A block that goes another way with every third prompt: then the pass is run again, with its edits in place."""
    model = gpu

    def run(number: int) -> Any:
        with model.trace([*PROMPT, 900 + number], temperature=0.0, max_tokens=1):
            first = model.model.layers[3].output[0]
            first[:] += 1.0
            kept = first.clone().save()
            if number % 3 == 2:
                late = model.model.layers[9].output[0].save()
            last = model.model.layers[12].output[0].save()
        return [kept, late, last] if number % 3 == 2 else [kept, last]

    before = model.tier_stats()
    found = [run(number) for number in range(6)]
    ran = _since(model, before)
    _same_on_all(engine, "elsewhere", [value for values in found for value in values], [], NOISE)
    if engine == "prompts":
        assert ran["again"] == 1
        assert ran["tapped"] >= 2


def _close(one: Any, other: Any) -> bool:
    """Equal but for what other kernels make of another number of rows: prompts may share a step or not."""
    if isinstance(one, torch.Tensor):
        return bool((one.float() - other.float()).abs().max() <= NOISE * other.float().abs().max())
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_close, one, other))
    return bool(one == other)


def test_tiers_batches_that_change(gpu: VLLM) -> None:
    """Requests of many lengths, so that the number in a step changes; each reads elsewhere, and some steer."""
    model = gpu
    lengths = [4 + 3 * number % 31 for number in range(20)]
    for _ in range(3):
        with model.trace(temperature=0.0, ignore_eos=True) as tracer:
            for number, length in enumerate(lengths):
                with tracer.invoke([*PROMPT, 800 + number], max_tokens=length):
                    rows = list().save()
                    for _ in tracer.iter[:length]:
                        layer = model.model.layers[number]
                        if number % 5 == 3:
                            layer.output[0][:] += 2.0
                        if number % 5 != 4:
                            hidden = layer.output[0]
                            rows.append((hidden, model.model.layers[number + 1].inputs[0][1]))
                        rows.append(model.samples.item())
                    result = tracer.result.save()
        for number, (read, output) in enumerate(zip(rows, result, strict=True)):
            pairs = [item for item in read if isinstance(item, tuple)]
            assert [item for item in read if isinstance(item, int)] == list(output.outputs[0].token_ids)
            assert [len(hidden) for hidden, _ in pairs] == ([21] + [1] * (lengths[number] - 1)) * (number % 5 != 4)
            assert all(torch.equal(hidden, same) for hidden, same in pairs)


def test_all_engines_give_the_same(gpu: VLLM, engine: str) -> None:
    model = gpu
    with model.trace(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        stream = list().save()
        for _ in tracer.iter[:STEPS]:
            stream.append(sum(model.model.layers[20].output))
        result = tracer.result.save()
    _same_on_all(engine, "engines", stream, list(result.outputs[0].token_ids))
