"""The async form: one output a step with what was saved up to it, several invokes, waiting, and closing."""

from __future__ import annotations

import asyncio

import pytest
import torch
from conftest import Engines, live
from reference import close, reference

from nnsight_async import VLLM
from nnsight_async.errors import (
    ArgumentError,
    BlockError,
    ClosedError,
    LoopCutShortWarning,
    OutsideBlockError,
    UnsupportedError,
)

PROMPT = "The capital of France is"


async def test_an_output_for_each_step_with_the_values_saved_so_far(amodel: VLLM, engines: Engines) -> None:
    model, expected = amodel, reference(Engines.path("qwen3"))
    with model.trace(PROMPT, temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
        resid = list().save()
        for _ in tracer.iter[:6]:
            resid.append(sum(model.model.layers[1].output)[-1])

    outputs = [output async for output in tracer.backend]

    assert [output.step for output in outputs] == [0, 1, 2, 3, 4, 5]
    assert [output.invoke for output in outputs] == [0] * 6
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    prompt = expected.encode(PROMPT)
    tokens = outputs[-1].outputs[0].token_ids
    states = expected.hidden_states([*prompt, *tokens[:-1]])[2]
    for k, output in enumerate(outputs):  # looked at after the end: an earlier output is not changed by later ones
        assert len(output.outputs[0].token_ids) == k + 1
        assert len(output.saves["resid"]) == k + 1
        for step, row in enumerate(output.saves["resid"]):
            close(row, states[len(prompt) + step - 1])


async def test_the_first_values_are_there_before_the_last_token(amodel: VLLM) -> None:
    model = amodel
    with model.trace(PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True) as tracer:
        first = model.model.layers[0].output[0].save()
    async for output in tracer.backend:
        assert not output.finished
        assert output.saves["first"].shape == (5, 64)
        break
    await tracer.backend.aclose()


async def test_the_block_is_left_at_once(amodel: VLLM) -> None:
    await amodel.ready()
    with amodel.trace(PROMPT, temperature=0.0, max_tokens=20, ignore_eos=True) as tracer:
        token = amodel.samples.save()
    assert "token" not in locals()
    output = await tracer.backend
    assert output.finished
    assert int(output.saves["token"]) == output.outputs[0].token_ids[0]


async def test_awaiting_again_gives_the_last_output_again(amodel: VLLM) -> None:
    with amodel.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
        token = amodel.samples.save()
    first = await tracer.backend
    assert (await tracer.backend) is first
    assert token_is_unbound(locals())


def token_is_unbound(names: dict[str, object]) -> bool:
    return "token" not in names


async def test_async_with_waits_and_writes_back(amodel: VLLM) -> None:
    model = amodel
    async with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        tokens = list().save()
        for _ in tracer.iter[:3]:
            tokens.append(model.samples.item())
        result = tracer.result.save()
    assert tokens == list(result.outputs[0].token_ids)
    assert len(tokens) == 3


async def test_several_invokes_each_with_its_own_steps(amodel: VLLM) -> None:
    model = amodel
    prompts = ["Paris is in", "Berlin is in", "The capital of Japan is"]
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        for number, prompt in enumerate(prompts):
            with tracer.invoke(prompt, max_tokens=2 + number):
                rows = model.model.layers[1].output[0].save()
                mine = (number * 10).save()

    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    last = {}
    async for output in tracer.backend:
        seen[output.invoke].append(output.step)
        last[output.invoke] = output
    assert seen == {0: [0, 1], 1: [0, 1, 2], 2: [0, 1, 2, 3]}
    lengths = [len(model.tokenizer(prompt).input_ids) for prompt in prompts]
    assert [last[i].saves["rows"].shape[0] for i in range(3)] == lengths
    assert [last[i].saves["mine"] for i in range(3)] == [0, 10, 20]
    assert tracer.saves["mine"] == [0, 10, 20]
    assert rows_are_remote(locals())


def rows_are_remote(names: dict[str, object]) -> bool:
    return "rows" not in names and "mine" not in names


async def test_many_traces_at_once(amodel: VLLM) -> None:
    model = amodel

    async def one(number: int) -> tuple[int, int]:
        async with model.trace(f"Number {number} is", temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
            mine = number.save()
            steps = 0
            for _ in tracer.iter[:4]:
                steps += 1
            steps.save()
        return mine, steps

    results = await asyncio.gather(*(one(number) for number in range(24)))
    assert results == [(number, 4) for number in range(24)]


async def test_an_error_is_raised_where_the_next_output_would_have_been(amodel: VLLM) -> None:
    model = amodel
    with model.trace(PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True) as tracer:
        seen = list().save()
        for step in tracer.iter[:8]:
            seen.append(step)
            if step == 2:
                raise KeyError("three")
    steps = []
    with pytest.raises(KeyError, match="three") as caught:
        async for output in tracer.backend:
            steps.append(output.step)
    assert steps == [0, 1]
    assert isinstance(caught.value, BlockError)
    assert 'raise KeyError("three")' in str(caught.value)


async def test_the_other_invokes_go_on_after_one_has_failed(amodel: VLLM) -> None:
    model = amodel
    with model.trace(temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
        for bad in (False, True, False):
            with tracer.invoke(PROMPT):
                value = (1 / 0 if bad else model.samples.item()).save()
    finished, errors = [], []
    while True:
        try:
            async for output in tracer.backend:
                if output.finished:
                    finished.append(output)
            break
        except ZeroDivisionError as error:
            errors.append(error)
    assert [error.invoke for error in errors] == [1]
    assert sorted(output.invoke for output in finished) == [0, 2]
    assert all(output.saves["value"] == output.outputs[0].token_ids[0] for output in finished)


async def test_an_open_loop_warns_in_the_callers_process(amodel: VLLM) -> None:
    with amodel.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        steps = list().save()
        for step in tracer.all():
            steps.append(step)
        never = "reached".save()
    with pytest.warns(LoopCutShortWarning, match=r"for step in tracer\.all"):
        output = await tracer.backend
    assert output.saves == {"steps": [0, 1, 2]}


async def test_a_loop_is_told_of_once(amodel: VLLM) -> None:
    with pytest.warns(LoopCutShortWarning) as caught:
        async with amodel.trace(PROMPT, temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
            steps = list().save()
            for step in tracer.all():
                steps.append(step)
        await tracer.backend
    assert steps == [0, 1]
    assert len(caught) == 1


async def test_closing_a_stream_ends_its_request(amodel: VLLM) -> None:
    model = amodel
    with model.trace(PROMPT, temperature=0.0, max_tokens=400, ignore_eos=True) as tracer:
        tokens = list().save()
        for _ in tracer.all():
            tokens.append(model.samples)
    async with tracer.backend as stream:
        async for output in stream:
            if output.step == 3:
                break
    for _ in range(50):
        if await model.live() == 0:
            break
        await asyncio.sleep(0.1)
    assert await model.live() == 0
    assert model._connection.engine.output_processor.request_states == {}
    assert model._connection.mailbox.receivers == {}


async def test_cancelling_a_task_that_waits_ends_its_request(amodel: VLLM) -> None:
    model = amodel

    async def consume() -> None:
        async with model.trace(PROMPT, temperature=0.0, max_tokens=400, ignore_eos=True) as tracer:
            for _ in tracer.all():
                model.samples

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(50):
        if await model.live() == 0:
            break
        await asyncio.sleep(0.1)
    assert await model.live() == 0


def test_an_engine_outlives_the_callers_event_loops(amodel: VLLM) -> None:
    async def one() -> int:
        async with amodel.trace(PROMPT, temperature=0.0, max_tokens=2):
            token = amodel.samples.item().save()
        return int(token)

    import threading

    found: list[int] = []

    def run() -> None:
        found.append(asyncio.run(one()))

    for _ in range(2):  # a thread each, since pytest's own loop runs in this one
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]


async def test_what_belongs_to_the_other_form_says_so(model: VLLM, amodel: VLLM) -> None:
    with pytest.raises(UnsupportedError, match='mode="async"'):
        async with model.trace(PROMPT):
            pass
    with model.trace(PROMPT, max_tokens=1) as tracer:
        pass
    with pytest.raises(UnsupportedError, match='mode="async"'):
        tracer.backend
    trace = amodel.trace(PROMPT, max_tokens=1)
    with pytest.raises(OutsideBlockError, match="left"):
        trace.backend
    with pytest.raises(OutsideBlockError, match="only in a block"):
        trace.result


async def test_the_final_output_carries_the_result_and_what_was_made_of_it(amodel: VLLM) -> None:
    with amodel.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        result = tracer.result
        text = result.outputs[0].text.save()
        count = len(result.outputs[0].token_ids).save()
    outputs = [output async for output in tracer.backend]
    assert [output.saves for output in outputs[:-1]] == [{}, {}]
    assert outputs[-1].saves == {"text": outputs[-1].outputs[0].text, "count": 3}
    assert live(amodel) == 0


async def test_tensors_of_a_saved_value_are_the_callers_own(amodel: VLLM) -> None:
    model = amodel
    async with model.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
        hidden = model.model.layers[0].output[0].save()
    hidden += 1
    assert hidden.device == torch.device("cpu")
    with pytest.raises(ClosedError):
        raise ClosedError  # a closed request's error is one of ours
    assert tracer.saves["hidden"] is hidden


async def test_a_stream_has_one_consumer_at_a_time(amodel: VLLM) -> None:
    with amodel.trace(PROMPT, temperature=0.0, max_tokens=200, ignore_eos=True) as tracer:
        pass
    first = asyncio.create_task(anext(tracer.backend))
    await asyncio.sleep(0)
    with pytest.raises(ArgumentError, match="one consumer"):
        await anext(tracer.backend)
    assert (await first).step == 0
    with pytest.raises(TimeoutError):  # a consumer that gives up leaves the place to the next
        async with asyncio.timeout(0):
            while True:
                await anext(tracer.backend)
    assert (await anext(tracer.backend)).step >= 1
    await tracer.backend.aclose()


async def test_a_request_that_is_closed_before_its_result_leaves_nothing(amodel: VLLM) -> None:
    async def one() -> None:
        async with amodel.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            count = len(tracer.result.outputs).save()

    await one()
    for number in range(20):
        task = asyncio.create_task(one())
        await asyncio.sleep(0.002 * number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for _ in range(50):
        if await amodel.live() == 0:
            break
        await asyncio.sleep(0.1)
    assert await amodel.live() == 0
