"""The live stream: values while the model writes, messages to running requests, closing, and slow consumers."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from conftest import Engines
from reference import close, reference

from nnsight_async import VLLM
from nnsight_async.client.invoke import Invoke
from nnsight_async.errors import (
    ArgumentError,
    BlockError,
    CaptureError,
    ClosedError,
    MailboxFullError,
    OutsideBlockError,
    PromptError,
    RequestOverError,
    UnsupportedError,
)

PROMPT = "The capital of France is"


async def _quiet(model: VLLM) -> Any:
    """Wait until the worker has heard of what has ended, and return what the model takes up."""
    for _ in range(100):
        stats = await model.stats()
        if stats.live == 0:
            break
        await asyncio.sleep(0.05)
    return stats


# Values with every output.


async def _resid(model: VLLM, prompt: str, steps: int, states: list[torch.Tensor] | None) -> None:
    """Stream the residual stream of one layer, and look at every output as it comes."""
    with model.trace(prompt, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
        resid = list().save()
        for _ in tracer.iter[:steps]:
            resid.append(sum(model.model.layers[10].output))
    outputs = []
    async with tracer.backend as stream:
        async for output in stream:
            k = output.step
            assert len(output.outputs[0].token_ids) == k + 1
            assert len(output.saves["resid"]) == k + 1
            assert [row.shape[0] for row in output.saves["resid"][1:]] == [1] * k
            (new,) = output.new["resid"]
            assert new is output.saves["resid"][k]
            outputs.append(output)
    assert [output.step for output in outputs] == list(range(steps))
    expected = reference(Engines.path("smollm2"))
    ids = expected.encode(prompt)
    states = expected.hidden_states([*ids, *outputs[-1].outputs[0].token_ids[:-1]])
    for output in outputs:
        close(torch.cat(output.saves["resid"]), states[11][: len(ids) + output.step])


async def test_values_of_every_step_alone(engines: Engines) -> None:
    await _resid(engines.get("smollm2", "async"), PROMPT, 8, None)


@pytest.mark.slow
async def test_values_of_every_step_among_thirty_two(engines: Engines) -> None:
    model = engines.get("smollm2", "async")
    prompts = [f"{'The number before ' * (1 + i % 3)}{i} is" for i in range(32)]
    await asyncio.gather(*(_resid(model, prompt, 3 + i % 4, None) for i, prompt in enumerate(prompts)))


async def test_the_first_values_are_there_before_the_second_token(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engines.get("smollm2", "async")
    events: list[tuple[str, int]] = []
    put = Invoke.put

    def noted(self: Invoke, output: Any) -> None:
        events.append(("token", len(output.outputs[0].token_ids) - 1))
        put(self, output)

    monkeypatch.setattr(Invoke, "put", noted)
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        resid = list().save()
        for _ in tracer.iter[:4]:
            resid.append(sum(model.model.layers[3].output))
    async for output in tracer.backend:
        events.append(("values", len(output.saves["resid"]) - 1))
    assert sorted(events) == sorted((kind, k) for kind in ("token", "values") for k in range(4))
    assert events[:3] == [("token", 0), ("values", 0), ("token", 1)]


async def test_what_a_step_added(amodel: VLLM) -> None:
    model = amodel
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        tokens = list().save()
        by_step = dict().save()
        first = model.samples.item().save()
        count = 0
        for step in tracer.iter[:3]:
            tokens.append(model.samples.item())
            by_step[step] = (step, "é")
            count = (step + 1).save()
        result = tracer.result.save()
    outputs = [output async for output in tracer.backend]
    ids = list(outputs[-1].outputs[0].token_ids)
    assert outputs[0].new == {
        "tokens": ids[:1],
        "by_step": {0: (0, "é")},
        "first": ids[0],
        "count": 1,
    }
    assert outputs[1].new == {"tokens": ids[1:2], "by_step": {1: (1, "é")}, "count": 2}
    assert outputs[1].saves == {"tokens": ids[:2], "by_step": {0: (0, "é"), 1: (1, "é")}, "first": ids[0], "count": 2}
    assert outputs[2].new.pop("result") is outputs[2].saves["result"]
    assert outputs[2].new == {"tokens": ids[2:], "by_step": {2: (2, "é")}, "count": 3}


async def test_the_type_and_the_device_that_values_arrive_in(amodel: VLLM) -> None:
    model = amodel

    async def hidden(**settings: Any) -> Any:
        async with model.trace(PROMPT, temperature=0.0, max_tokens=1, **settings) as tracer:
            rows = model.model.layers[1].output[0].save()
            ids = model.samples.save()
            both = (rows, {"again": rows}).save()
        return tracer.saves

    plain, half, named, meta = (
        await hidden(),
        await hidden(dtype=torch.bfloat16),
        await hidden(dtype="float16", device="cpu"),
        await hidden(device="meta"),
    )
    assert plain["rows"].dtype == torch.float32
    assert torch.equal(half["rows"], plain["rows"].to(torch.bfloat16))
    assert torch.equal(named["rows"], plain["rows"].half())
    assert named["both"][0].dtype == torch.float16
    assert named["both"][1]["again"] is named["both"][0]
    assert torch.equal(half["ids"], plain["ids"])  # a token id is no floating-point number
    assert meta["rows"].device.type == "meta"
    for wrong in ({"dtype": torch.int64}, {"dtype": "float17"}, {"device": "nowhere"}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            model.trace(PROMPT, **wrong)


async def test_a_tensor_saved_twice_is_sent_once(amodel: VLLM) -> None:
    model = amodel
    async with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        rows = sum(model.model.layers[1].output).save()
        both = [rows, rows].save()
    assert both[0] is both[1]
    assert torch.equal(both[0], rows)


# Shared memory.


def _streaming(model: VLLM, nbytes: int, steps: int) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
        big = list().save()
        for step in tracer.iter[:steps]:
            model.logits
            big.append(torch.full((nbytes // 4,), float(step)))
    return tracer


async def _failing(model: VLLM) -> None:
    """A stream whose block fails when it has sent something; the error is caught where the tracer is known."""
    with model.trace(PROMPT, temperature=0.0, max_tokens=8) as tracer:
        big = list().save()
        for step in tracer.iter[:8]:
            big.append(torch.zeros(1 << 18))
            if step == 2:
                raise KeyError(step)
    try:
        async for output in tracer.backend:
            assert len(output.saves["big"]) == output.step + 1
        raise AssertionError("no error came")
    except KeyError:
        pass


async def test_memory_goes_with_the_last_reference_and_not_with_the_collector(amodel: VLLM) -> None:
    model = amodel
    gc.collect()
    before = await _quiet(model)
    gc.disable()
    try:
        tracer = _streaming(model, 1 << 20, 6)
        kept = None
        async for output in tracer.backend:
            kept = output.saves["big"][-1]
            assert (await model.stats()).shared_bytes >= before.shared_bytes + (1 << 20)
        del output, tracer
        stats = await _quiet(model)
        assert stats.shared_bytes == before.shared_bytes + (1 << 20)
        assert torch.equal(kept, torch.full((1 << 18,), 5.0))
        view = kept[10:20].numpy()
        del kept
        assert (await model.stats()).shared_bytes == before.shared_bytes + (1 << 20)
        assert view.tolist() == [5.0] * 10
        del view
        assert (await model.stats()).shared_bytes == before.shared_bytes
        assert model._connection.mailbox.segments.in_use == 0

        async with model.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
            whole = torch.zeros(1 << 20).save()
        del whole, tracer
        assert (await model.stats()).shared_bytes == before.shared_bytes

        tracer = _streaming(model, 1 << 20, 200)  # closed in the middle, with outputs that nobody took
        async with tracer.backend as stream:
            async for output in stream:
                if output.step == 3:
                    break
        del output, tracer, stream
        assert (await _quiet(model)).shared_bytes == before.shared_bytes

        for _ in range(3):
            await _failing(model)
        assert (await _quiet(model)).shared_bytes == before.shared_bytes
    finally:
        gc.enable()


async def test_values_stay_as_they_were_while_memory_is_used_again(amodel: VLLM) -> None:
    model = amodel
    with model.trace(PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True) as tracer:
        big = None
        for step in tracer.iter[:40]:
            model.logits
            big = torch.full((100_000,), float(step)).save()
    kept = {}
    async for output in tracer.backend:
        if output.step % 3 == 0:
            kept[output.step] = output.saves["big"]
    assert sorted(kept) == list(range(0, 40, 3))
    for step, value in kept.items():
        assert torch.equal(value, torch.full((100_000,), float(step)))


@pytest.mark.slow
async def test_a_gigabyte_from_one_request(amodel: VLLM) -> None:
    model = amodel
    before = (await _quiet(model)).segments
    tracer = _streaming(model, 128 << 20, 8)
    output = await tracer.backend
    big = output.saves["big"]
    assert sum(t.numel() * 4 for t in big) == 1 << 30
    assert all(bool((t == step).all()) for step, t in enumerate(big))
    async with model.trace(PROMPT, temperature=0.0, max_tokens=1):  # the same in one post, which is more than the limit
        model.logits
        whole = torch.arange((1 << 30) // 4 + 1, dtype=torch.int32).save()
    assert torch.equal(whole, torch.arange((1 << 30) // 4 + 1, dtype=torch.int32))
    del big, output, tracer, whole
    for _ in range(100):
        stats = await model.stats()
        if stats.segments <= before + 4:
            break
        await asyncio.sleep(0.05)
    assert stats.segments <= before + 4  # some memory is kept for what comes next
    assert model._connection.mailbox.segments.count <= before + 4


# Acting on a running request.


def _steered(model: VLLM, prompt: str, steps: int) -> Any:
    with model.trace(prompt, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
        seen = list().save()
        for _ in tracer.iter[:steps]:
            strength = tracer.live("strength", 0.0)
            seen.append(strength)
            model.model.layers[1].output[0][:, :8] += strength
    return tracer


def _switched(model: VLLM, prompt: str, steps: int, at: int, strength: float) -> Any:
    with model.trace(prompt, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
        for step in tracer.iter[:steps]:
            model.model.layers[1].output[0][:, :8] += strength if step >= at else 0.0
    return tracer


async def test_setting_a_value_on_one_of_eight_streams(amodel: VLLM) -> None:
    model, steps = amodel, 48
    prompts = [f"Number {i} is" for i in range(8)]
    plain = [list((await _switched(model, p, steps, 0, 0.0).backend).outputs[0].token_ids) for p in prompts]
    tracers = [_steered(model, prompt, steps) for prompt in prompts]
    held = -1

    async def consume(number: int) -> Any:
        nonlocal held
        async with tracers[number].backend as stream:
            async for output in stream:
                if number == 5 and output.step == 2:
                    held = await stream.set(strength=6.0)
        return output

    outputs = await asyncio.gather(*(consume(number) for number in range(8)))
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert 2 < held < steps
    for number in range(8):
        if number != 5:
            assert tokens[number] == plain[number]
            assert outputs[number].saves["seen"] == [0.0] * steps
    assert outputs[5].saves["seen"] == [0.0] * held + [6.0] * (steps - held)
    assert tokens[5][:held] == plain[5][:held]
    switched = await _switched(model, prompts[5], steps, held, 6.0).backend
    assert tokens[5] == list(switched.outputs[0].token_ids)
    assert tokens[5] != plain[5]


async def test_values_of_every_kind_can_be_set(amodel: VLLM) -> None:
    model = amodel
    with model.trace(PROMPT, temperature=0.0, max_tokens=60, ignore_eos=True) as tracer:
        seen = list().save()
        for _ in tracer.iter[:60]:
            model.logits
            seen.append((tracer.live("word"), tracer.live("vector", None), tracer.live("table", {})))
    async with tracer.backend as stream:
        await anext(stream)
        held = await stream.set({"word": "up"}, vector=torch.arange(3.0), table={"a": [1, (2.5, None)]})
        again = await stream.set(word=None)
        assert held <= again
        last = await stream
    assert last.saves["seen"][held - 1] == (None, None, {})
    for step in range(held, 60):
        word, vector, table = last.saves["seen"][step]
        assert word == ("up" if step < again else None)
        assert torch.equal(vector, torch.arange(3.0))
        assert table == {"a": [1, (2.5, None)]}


async def test_a_value_set_before_the_request_has_come_holds_from_its_first_step(amodel: VLLM) -> None:
    tracer = _steered(amodel, PROMPT, 3)
    assert await tracer.backend.set(strength=2.0) >= 0
    last = await tracer.backend
    assert last.saves["seen"][-1] == 2.0


async def test_a_message_to_a_request_that_waits_for_its_turn(engines: Engines) -> None:
    """More requests than run at once: the messages of those that wait are kept for them."""
    model = engines.get("qwen3", "async")
    limit = model._config.scheduler_config.max_num_seqs
    running = [_steered(model, f"Number {i} is", 40) for i in range(limit)]
    waiting = _steered(model, PROMPT, 3)
    assert await waiting.backend.set(strength=1.5) == 0
    last = await waiting.backend
    assert last.saves["seen"] == [1.5] * 3
    for tracer in running:
        assert (await tracer.backend).saves["seen"] == [0.0] * 40


async def test_a_misspelled_value_is_told(amodel: VLLM) -> None:
    tracer = _steered(amodel, PROMPT, 40)
    async with tracer.backend as stream:
        with pytest.raises(ArgumentError, match="did you mean 'strength'"):
            await stream.set(strenght=1.0)
        with pytest.raises(CaptureError, match="lock"):
            import threading

            await stream.set(strength=threading.Lock())
    with amodel.trace(PROMPT, max_tokens=40, ignore_eos=True) as tracer:
        token = amodel.samples.save()
    async with tracer.backend as stream:
        with pytest.raises(ArgumentError, match="no block of this trace reads"):
            await stream.set(strength=1.0)
    with pytest.raises(OutsideBlockError, match="only in a block"):
        tracer.live("strength")


async def test_names_that_the_text_does_not_tell_are_taken(amodel: VLLM) -> None:
    def helper(tracer: Any) -> Any:
        return tracer.live("hidden away", 0)

    with amodel.trace(PROMPT, temperature=0.0, max_tokens=60, ignore_eos=True) as tracer:
        found = 0
        for _ in tracer.iter[:60]:
            amodel.logits
            tracer.live("plain")
            found = helper(tracer).save()
    async with tracer.backend as stream:
        await stream.set({"hidden away": 7})
        assert (await stream).saves["found"] == 7


async def test_forcing_tokens(amodel: VLLM) -> None:
    model = amodel
    model.tokenizer.encode(" Paris is")  # loaded now: it takes longer than the tokens do
    plain = reference(Engines.path("qwen3")).greedy(PROMPT, 60)
    with model.trace(PROMPT, temperature=0.0, max_tokens=400, ignore_eos=True, logprobs=1) as tracer:
        seen = list().save()
        for _ in tracer.all():
            seen.append(model.samples.item())
    async with tracer.backend as stream:
        await anext(stream)
        at = await stream.force([70, 71])
        assert await stream.force(72) >= at
        assert await stream.force(" Paris is") < 60
        async for output in stream:
            if output.step > at + 10:
                break
        await stream.stop()
        last = await stream
    text = model.tokenizer.encode(" Paris is", add_special_tokens=False)
    forced = [70, 71, 72, *text]
    tokens = list(last.outputs[0].token_ids)
    assert tokens[:at] == plain[:at]
    assert tokens[at : at + 2] == [70, 71]
    drawn = iter(tokens[at:])
    assert all(token in drawn for token in forced)  # in order
    assert last.saves["seen"] == tokens
    for token, logprobs in zip(tokens, last.outputs[0].logprobs, strict=True):
        assert token in logprobs  # the logprob of the token that was forced, not of the one that was drawn
    ids = model.tokenizer.encode(PROMPT)
    expected = reference(Engines.path("qwen3")).logits([*ids, *tokens[:-1]]).log_softmax(-1)
    for step in (at, at + 1):
        row = expected[len(ids) + step - 1]
        assert last.outputs[0].logprobs[step][tokens[step]].logprob == pytest.approx(row[tokens[step]].item(), abs=1e-3)


async def test_editing_logits(amodel: VLLM) -> None:
    model = amodel
    plain = reference(Engines.path("qwen3")).greedy(PROMPT, 80)
    with model.trace(PROMPT, temperature=0.0, max_tokens=80, ignore_eos=True) as tracer:
        pass
    async with tracer.backend as stream:
        await anext(stream)
        at = await stream.edit_logits({90: float("inf")})
        replaced = await stream.edit_logits({91: 1e6, 90: float("-inf")})
        cleared = await stream.edit_logits(None)
        last = await stream
    tokens = list(last.outputs[0].token_ids)
    assert tokens[:at] == plain[:at]
    assert tokens[at:replaced] == [90] * (replaced - at)
    assert tokens[replaced:cleared] == [91] * (cleared - replaced)
    ids = model.tokenizer.encode(PROMPT)
    rows = reference(Engines.path("qwen3")).logits([*ids, *tokens[:-1]])[len(ids) - 1 :]
    assert tokens[cleared:] == rows.argmax(-1).tolist()[cleared:]
    banned = plain[0]
    with model.trace(PROMPT, temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
        pass
    if await tracer.backend.edit_logits({banned: float("-inf")}) == 0:
        assert (await tracer.backend).outputs[0].token_ids[0] != banned


async def test_stopping(amodel: VLLM, recwarn: pytest.WarningsRecorder) -> None:
    model = amodel
    with model.trace(PROMPT, temperature=0.0, max_tokens=400, ignore_eos=True, min_tokens=300) as tracer:
        steps = list().save()
        for step in tracer.all():
            steps.append(step)
    async with tracer.backend as stream:
        await anext(stream)
        at = await stream.stop()
        last = await stream
        assert last.saves["steps"] == list(range(at + 1))
        assert len(last.outputs[0].token_ids) == at + 1
        assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", "tracer.stop")
        for late in (stream.stop(), stream.force(1), stream.edit_logits({}), stream.set({}), stream.force("x")):
            with pytest.raises(RequestOverError, match="over"):
                await late
    assert not [w for w in recwarn if "cut short" in str(w.message)]  # its end is what somebody asked for


async def test_several_invokes_take_messages_together_or_one_by_one(amodel: VLLM) -> None:
    model = amodel
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        for number in range(3):
            with tracer.invoke(f"Number {number} is", max_tokens=2 if number == 1 else 100):
                for _ in tracer.all():
                    model.logits
    last = {}
    async with tracer.backend as stream:
        async for output in stream:
            last[output.invoke] = output
            if output.invoke == 1 and output.finished:
                break
        one = await stream.force(70, invoke=2)
        assert isinstance(one, int)
        with pytest.raises(RequestOverError):
            await stream.force(70, invoke=1)
        for wrong in (3, -1):
            with pytest.raises(ArgumentError, match="the trace has 3"):
                await stream.stop(invoke=wrong)
        both = await stream.force(71)
        assert both[1] is None
        first, third = both[0], both[2]
        stops = await stream.stop()
        assert stops[1] is None
        async for output in stream:
            last[output.invoke] = output
    tokens = {number: list(output.outputs[0].token_ids) for number, output in last.items()}
    assert tokens[2][one] == 70
    assert tokens[0][first] == tokens[2][third] == 71
    assert [len(tokens[0]), len(tokens[1]), len(tokens[2])] == [stops[0] + 1, 2, stops[2] + 1]


async def test_all_sequences_of_a_prompt_take_a_message(amodel: VLLM) -> None:
    model = amodel
    with model.trace(PROMPT, temperature=1.0, seed=0, max_tokens=60, ignore_eos=True, n=3) as tracer:
        pass
    async with tracer.backend as stream:
        await anext(stream)
        at = await stream.edit_logits({90: float("inf")})
        last = await stream
    assert [list(c.token_ids[at:]) for c in last.outputs] == [[90] * (60 - at)] * 3


@pytest.mark.parametrize(
    "message",
    [
        lambda stream: stream.force(1 << 20),
        lambda stream: stream.force([5, -1]),
        lambda stream: stream.edit_logits({1 << 20: 1.0}),
    ],
    ids=["too large", "negative", "a bias"],
)
async def test_a_token_outside_the_vocabulary_is_refused(amodel: VLLM, message: Any) -> None:
    with amodel.trace(PROMPT, temperature=0.0, max_tokens=20, ignore_eos=True) as tracer:
        pass
    async with tracer.backend as stream:
        with pytest.raises(ArgumentError, match="vocabulary"):
            await message(stream)
        assert len((await stream).outputs[0].token_ids) == 20


async def test_a_message_while_another_task_consumes(amodel: VLLM) -> None:
    with amodel.trace(PROMPT, temperature=0.0, max_tokens=400, ignore_eos=True) as tracer:
        for _ in tracer.all():
            pass

    async def consume() -> int:
        return len([output async for output in tracer.backend])

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)
    at = await tracer.backend.stop()
    assert await task == at + 1


# Closing.


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _worker_pids(model: VLLM) -> list[int]:
    """The engine core and its worker."""
    children: list[int] = []
    mine = [os.getpid()]
    while mine:
        parent = mine.pop()
        for task in Path(f"/proc/{parent}/task").iterdir():
            found = [int(pid) for pid in (task / "children").read_text().split()]
            children += found
            mine += found
    return children


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::nnsight_async.errors.LoopCutShortWarning")
async def test_five_hundred_streams_closed_anyhow_leave_nothing(engines: Engines) -> None:
    model = engines.get("qwen3", "async")
    generator = random.Random(7)

    def start(steps: int) -> Any:
        with model.trace(PROMPT, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
            big = list().save()
            for step in tracer.all():
                model.model.layers[1].output
                big.append(torch.full((8192,), float(step)))
        return tracer

    async def breaks(at: int) -> None:
        async with start(60).backend as stream:
            async for output in stream:
                if output.step >= at:
                    break

    async def raises(at: int) -> None:
        with pytest.raises(ZeroDivisionError):
            async with start(60).backend as stream:
                async for output in stream:
                    1 // (at - output.step)

    async def closes(at: int) -> None:
        stream = start(60).backend
        for _ in range(at):
            await anext(stream)
        await stream.aclose()
        await stream.aclose()

    async def cancels(at: int) -> None:
        async def consume() -> None:
            async with start(60).backend as stream:
                await stream

        task = asyncio.create_task(consume())
        await asyncio.sleep(generator.random() * 0.02 * at)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def cancels_the_wait(at: int) -> None:
        async def wait() -> None:
            async with model.trace(PROMPT, temperature=0.0, max_tokens=60, ignore_eos=True) as tracer:
                for _ in tracer.iter[:60]:
                    logits = model.logits.save()

        task = asyncio.create_task(wait())
        await asyncio.sleep(generator.random() * 0.02 * at)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def times_out(at: int) -> None:
        with anyio.move_on_after(generator.random() * 0.02 * at):
            async with start(60).backend as stream:
                async for _ in stream:
                    pass

    async def ends(at: int) -> None:
        await start(at).backend

    ways = [breaks, raises, closes, cancels, cancels_the_wait, times_out, ends]

    async def several(count: int) -> None:
        await asyncio.gather(*(generator.choice(ways)(generator.randint(1, 12)) for _ in range(count)))

    await several(30)  # what is opened once and for all is open now
    gc.collect()
    before = await _quiet(model)
    pids = [os.getpid(), *_worker_pids(model)]
    descriptors = [_descriptors(pid) for pid in pids]
    for _ in range(20):
        await several(25)
    stats = await _quiet(model)
    assert (stats.live, stats.unread_bytes) == (0, 0)
    gc.collect()  # a task that was cancelled is in its own traceback
    stats = await model.stats()
    assert stats.shared_bytes == before.shared_bytes
    assert stats.segments <= before.segments + 2
    assert model._connection.mailbox.receivers == {}
    assert model._connection.engine.output_processor.request_states == {}
    assert not model._connection._tasks
    grown = [_descriptors(pid) - count for pid, count in zip(pids, descriptors, strict=True)]
    assert max(grown) <= 2, grown
    async with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        token = model.samples.item().save()
    assert token == reference(Engines.path("qwen3")).greedy(PROMPT, 1)[0]


async def test_a_cancel_while_the_request_is_being_submitted(amodel: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = amodel._connection
    engine, entered = connection.engine, asyncio.Event()
    add_request, loop = engine.add_request, asyncio.get_running_loop()

    async def slow(*args: Any, **kwargs: Any) -> Any:
        collector = await add_request(*args, **kwargs)
        loop.call_soon_threadsafe(entered.set)
        await asyncio.sleep(0.2)  # as where the engine's socket is full
        return collector

    monkeypatch.setattr(engine, "add_request", slow)
    with amodel.trace(PROMPT, temperature=0.0, max_tokens=400, ignore_eos=True) as tracer:
        pass
    task = asyncio.create_task(anext(tracer.backend))
    await entered.wait()
    task.cancel()
    await tracer.backend.aclose()
    monkeypatch.undo()
    assert (await _quiet(amodel)).live == 0
    assert engine.output_processor.request_states == {}
    assert connection.mailbox.receivers == {}


# Slow consumers.


@pytest.fixture
def small_mailbox(engines: Engines) -> Iterator[VLLM]:
    model = engines.get("qwen3", "async")
    ledger = model._connection.ledger
    limit, ledger.limit = ledger.limit, 1 << 20
    yield model
    ledger.limit = limit


async def test_a_consumer_that_is_too_slow_is_told_and_its_neighbours_are_not_held_up(small_mailbox: VLLM) -> None:
    model = small_mailbox
    slow = _streaming(model, 256 << 10, 100)
    quick = _streaming(model, 256 << 10, 100)
    outputs = [output async for output in quick.backend]
    assert [output.step for output in outputs] == list(range(100))
    taken = []
    with pytest.raises(MailboxFullError, match=r"mailbox_bytes=1,048,576.*take the outputs out"):
        async for output in slow.backend:
            taken.append(output)
    assert 1 <= len(taken) < 100  # what had come is not dropped
    assert [output.step for output in taken] == list(range(len(taken)))
    assert sum(t.numel() * 4 for t in taken[-1].saves["big"]) <= (1 << 20) + (256 << 10)
    assert (await _quiet(model)).unread_bytes == 0


async def test_who_waits_for_a_trace_is_no_slow_consumer(small_mailbox: VLLM) -> None:
    model = small_mailbox
    async with model.trace(PROMPT, temperature=0.0, max_tokens=20, ignore_eos=True) as tracer:
        big = list().save()
        for step in tracer.iter[:20]:
            model.logits
            big.append(torch.full((1 << 18,), float(step)))
    assert len(big) == 20
    last = await tracer.backend
    assert last.finished
    assert len(last.saves["big"]) == 20
    assert len((await _streaming(model, 1 << 20, 20).backend).saves["big"]) == 20


async def test_a_trace_that_nobody_reads_and_everybody_forgets(small_mailbox: VLLM) -> None:
    model = small_mailbox
    over = [_streaming(model, 256 << 10, 3)._run.done for _ in range(4)]  # all else of it is dropped here
    await asyncio.gather(*map(asyncio.wrap_future, over))
    del over
    await _quiet(model)
    gc.collect()
    assert (await model.stats()).unread_bytes == 0


def test_a_mailbox_of_no_bytes_is_refused() -> None:
    with pytest.raises(ArgumentError, match="mailbox_bytes"):
        VLLM(Engines.path("qwen3"), mailbox_bytes=0)


# Many at once.


@pytest.mark.slow
async def test_a_program_is_sent_and_compiled_once(amodel: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = amodel
    await model.ready()
    sent = []
    rpc = model._connection.engine.collective_rpc

    async def noted(method: str, *args: Any, **kwargs: Any) -> Any:
        sent.append(method)
        return await rpc(method, *args, **kwargs)

    monkeypatch.setattr(model._connection.engine, "collective_rpc", noted)

    async def one(number: int) -> int:
        async with model.trace(f"Number {number} is", temperature=0.0, max_tokens=1):
            mine = number.save()
        return mine

    assert await asyncio.gather(*(one(number) for number in range(1000))) == list(range(1000))
    assert sent.count("nnsight_async_program") == 1

    def prompts() -> Iterator[str]:
        for number in range(300):
            yield f"Count to {number}"

    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for number, prompt in enumerate(prompts()):
            with tracer.invoke(prompt):
                mine = number.save()
                rows = model.model.layers[0].output[0].shape[0].save()
    await tracer.backend
    assert tracer.saves["mine"] == list(range(300))
    assert tracer.saves["rows"] == [len(model.tokenizer.encode(prompt)) for prompt in prompts()]
    assert sent.count("nnsight_async_program") == 2


async def test_a_program_that_the_worker_has_lost_is_told(amodel: VLLM) -> None:
    model = amodel
    await model.ready()

    async def one() -> int:
        async with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            token = model.samples.item().save()
        return token

    known = await one()
    programs = model._connection._programs
    digest = next(reversed(programs))
    del programs[digest]
    assert await one() == known  # sent again where the client is not sure
    with pytest.raises(BlockError, match="missing"):
        await one_with_an_unknown_program(model)


async def one_with_an_unknown_program(model: VLLM) -> None:
    connection = model._connection

    async def nothing(program: Any) -> None:
        return None

    original = connection._send_program
    connection._send_program = nothing  # type: ignore[method-assign]
    try:
        async with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            missing = model.samples.item().save()
    finally:
        connection._send_program = original  # type: ignore[method-assign]


async def test_mapping_a_function_over_prompts(amodel: VLLM) -> None:
    model = amodel
    running = most = 0

    async def probe(prompt: str) -> tuple[str, int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        async with model.trace(prompt, temperature=0.0, max_tokens=1):
            rows = model.model.layers[1].output[0].shape[0].save()
        running -= 1
        return prompt, rows

    async def prompts() -> AsyncIterator[str]:
        for number in range(40):
            yield "one " * (1 + number % 7)

    async with model.map(probe, prompts(), concurrency=6) as results:
        found = [result async for result in results]
    assert [prompt for prompt, _ in found] == ["one " * (1 + number % 7) for number in range(40)]
    assert [rows for _, rows in found] == [len(model.tokenizer.encode(prompt)) for prompt, _ in found]
    assert most == 6

    with pytest.raises(PromptError):
        async for _ in model.map(probe, ["one", "", "two"], concurrency=2):
            pass
    assert (await _quiet(model)).live == 0
    for wrong, error in ((0, ArgumentError),):
        with pytest.raises(error, match="concurrency"):
            model.map(probe, [], concurrency=wrong)


def test_mapping_belongs_to_the_async_form(model: VLLM) -> None:
    with pytest.raises(UnsupportedError, match="async"):
        model.map(lambda prompt: None, [])  # type: ignore[arg-type,return-value]


async def test_a_closed_stream_takes_no_message(amodel: VLLM) -> None:
    tracer = _steered(amodel, PROMPT, 100)
    await anext(tracer.backend)
    await tracer.backend.aclose()
    with pytest.raises(ClosedError):
        await tracer.backend.set(strength=1.0)
