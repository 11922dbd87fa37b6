"""Generation under control: edits, stop, forced samples, edited logits, sequences, and plain generation."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Engines, live
from reference import close, reference
from vllm.inputs import TextPrompt, TokensPrompt

from nnsight_async import VLLM
from nnsight_async.errors import ArgumentError, BlockError, PromptError, UnsupportedError
from nnsight_async.worker.draws import DrawCheck

PROMPT = "The capital of France is"
STEPS = 5


# Writing.


def _edited_by_huggingface(path: str, layer: int, add: float, steps: int, *, every_step: bool) -> list[int]:
    """Greedy tokens with ``add`` added to what one layer returns, in the prefill or at every step."""
    expected = reference(path)
    seen = itertools.count()

    def edit(module: Any, args: Any, output: Any) -> Any:
        if next(seen) > 0 and not every_step:
            return output
        return (output[0] + add, *output[1:]) if isinstance(output, tuple) else output + add

    handle = expected.layers[layer].register_forward_hook(edit)
    try:
        return expected.greedy(PROMPT, steps)
    finally:
        handle.remove()


def test_an_edit_at_every_step_is_what_a_hook_makes_of_it(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        for _ in tracer.iter[:STEPS]:
            model.model.layers[1].output[0][:] += 2.0
        result = tracer.result.save()
    edited = _edited_by_huggingface(Engines.path("qwen3"), 1, 2.0, STEPS, every_step=True)
    assert list(result.outputs[0].token_ids) == edited
    assert edited != reference(Engines.path("qwen3")).greedy(PROMPT, STEPS)


def test_a_bare_edit_applies_to_the_prefill_alone(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        model.model.layers[1].output[0][:] += 2.0
        result = tracer.result.save()
    edited = _edited_by_huggingface(Engines.path("qwen3"), 1, 2.0, STEPS, every_step=False)
    assert list(result.outputs[0].token_ids) == edited
    assert edited != _edited_by_huggingface(Engines.path("qwen3"), 1, 2.0, STEPS, every_step=True)


def test_every_way_to_write_the_same_edit(model: VLLM) -> None:
    layer = model.model.layers[1]
    drawn = []
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        layer.output[0][:] += 2.0
        logits = model.logits.save()
    drawn.append(logits)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        layer.output[0] += 2.0
        logits = model.logits.save()
    drawn.append(logits)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        layer.output[0] = layer.output[0] + 2.0
        logits = model.logits.save()
    drawn.append(logits)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        hidden, residual = layer.output
        layer.output = (hidden + 2.0, residual)
        logits = model.logits.save()
    drawn.append(logits)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        layer.output[1].add_(2.0)
        logits = model.logits.save()
    drawn.append(logits)
    for other in drawn[1:]:
        close(other, drawn[0], 1e-5)


def test_replacing_outputs_and_inputs_of_modules(model: VLLM) -> None:
    mlp = model.model.layers[2].mlp
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        mlp.output[:] = 0
        zeroed = model.logits.save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        mlp.output = torch.zeros_like(mlp.output)
        replaced = model.logits.save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        mlp.down_proj.input = torch.zeros(5, 128)
        emptied = model.logits.save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        mlp.down_proj.inputs = ((torch.zeros(5, 128),), {})
        emptied_too = model.logits.save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        plain = model.logits.save()
    assert torch.equal(zeroed, replaced)
    close(emptied, zeroed, 1e-5)
    assert torch.equal(emptied, emptied_too)
    assert not torch.allclose(zeroed, plain)


def test_one_column_and_one_row(model: VLLM) -> None:
    mlp = model.model.layers[2].mlp
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        mlp.output[:, 3] = 0
        mlp.output[-1] = 7.0
        seen = mlp.output.save()
        stream = model.model.layers[2].output[0].save()
    assert seen[:4, 3].tolist() == [0.0] * 4
    assert seen[-1].tolist() == [7.0] * 64
    assert torch.equal(seen, stream)


@pytest.mark.parametrize("write", ["output", "input", "logits", "samples", "item"])
def test_a_replacement_of_the_wrong_shape_names_both(model: VLLM, write: str) -> None:
    wrong = torch.zeros(3, 7)
    with pytest.raises(ValueError, match=r"\[3, 7\]") as caught:
        with model.trace(PROMPT, max_tokens=2):
            if write == "output":
                model.model.layers[0].mlp.output = wrong
            elif write == "input":
                model.model.layers[0].mlp.input = wrong
            elif write == "logits":
                model.logits = wrong
            elif write == "samples":
                model.samples = wrong
            else:
                model.model.layers[0].output[1] = wrong
    sizes = {"logits": "[1, 49152]", "samples": "[1, 1]"}
    assert sizes.get(write, "[5, 64]") in str(caught.value)
    assert "wrong" in caught.value.where  # type: ignore[attr-defined]


def test_a_tuple_replaced_by_what_is_none(model: VLLM) -> None:
    with pytest.raises(TypeError, match="tuple of 2"):
        with model.trace(PROMPT, max_tokens=2):
            model.model.layers[0].output = torch.zeros(5, 64)
    with pytest.raises(ValueError, match="has 3 items"):
        with model.trace(PROMPT, max_tokens=2):
            a, b = model.model.layers[0].output
            model.model.layers[0].output = (a, b, b)


# Stop.


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("last", [0, 1, 5])
def test_stop_ends_the_request_at_that_step(model: VLLM, last: int, ignore_eos: bool) -> None:
    plain = reference(Engines.path("qwen3")).greedy(PROMPT, 6)
    with model.trace(PROMPT, temperature=0.0, max_tokens=40, min_tokens=30, ignore_eos=ignore_eos) as tracer:
        tokens = list().save()
        for step in tracer.iter[:40]:
            tokens.append(model.samples.item())
            if step == last:
                tracer.stop()
        never = "reached".save()
    assert tokens == plain[: last + 1]
    assert "never" not in locals()
    assert live(model) == 0


async def test_stop_says_so_in_the_output_and_forges_no_token(amodel: VLLM) -> None:
    model = amodel
    plain = reference(Engines.path("qwen3")).greedy(PROMPT, 40)

    async def run(last: int) -> Any:
        with model.trace(PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True) as tracer:
            for step in tracer.all():
                if step == last:
                    tracer.stop()
        return await tracer.backend

    lasts = [0, 1, 5, 100, 3, 5]
    with pytest.warns(UserWarning, match="cut short"):  # of the one that never stops
        outputs = await asyncio.gather(*map(run, lasts))
    for last, output in zip(lasts, outputs, strict=True):
        completion = output.outputs[0]
        assert list(completion.token_ids) == plain[: last + 1]
        assert completion.text == model.tokenizer.decode(plain[: last + 1])
        reason = ("stop", "tracer.stop") if last < 40 else ("length", None)
        assert (completion.finish_reason, completion.stop_reason) == reason
    assert await model.live() == 0


def test_stop_ends_one_of_several_sequences(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, n=4) as tracer:
        drawn = list().save()
        for step in tracer.iter[:6]:
            drawn.append(model.samples.item())
            if step == 2 and drawn[0] % 2 == 0:
                tracer.stop()
    even = [tokens for tokens in drawn if tokens[0] % 2 == 0]
    odd = [tokens for tokens in drawn if tokens[0] % 2]
    assert even
    assert odd
    assert all(len(tokens) == 3 for tokens in even)
    assert all(len(tokens) == 6 for tokens in odd)


# Forced samples and edited logits.


def test_forcing_a_text_token_by_token_is_feeding_it_as_a_prompt(smol: VLLM) -> None:
    model, expected = smol, reference(Engines.path("smollm2"))
    prompt, text = expected.encode(PROMPT), expected.encode(" Berlin, of course. Or is it Bonn")
    with model.trace(PROMPT, temperature=0.0, max_tokens=len(text), ignore_eos=True, logprobs=2) as tracer:
        rows = list().save()
        for step in tracer.iter[: len(text)]:
            rows.append(sum(model.model.layers[20].output))
            model.samples = torch.full_like(model.samples, text[step])
        result = tracer.result.save()
    completion = result.outputs[0]
    assert list(completion.token_ids) == text
    assert completion.text == " Berlin, of course. Or is it Bonn"
    whole = expected.hidden_states([*prompt, *text[:-1]])[21]
    close(torch.cat(rows), whole)
    distribution = expected.logits([*prompt, *text[:-1]]).log_softmax(-1)[len(prompt) - 1 :]
    for token, top, row in zip(text, completion.logprobs, distribution, strict=True):
        assert top[token].logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert top[token].rank == int((row > row[token]).sum()) + 1


@pytest.mark.parametrize("how", ["assigned", "in place"])
@pytest.mark.parametrize("token", [49152, -1])
def test_a_forced_id_outside_the_vocabulary(model: VLLM, how: str, token: int) -> None:
    with pytest.raises(ArgumentError, match=rf"token id {token} is outside the vocabulary of 49152"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=3):
            if how == "assigned":
                model.samples = torch.full_like(model.samples, token)
            else:
                model.samples[:] = token
    assert live(model) == 0


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 11}])
def test_logits_assigned_to_themselves_change_nothing(model: VLLM, sampling: dict[str, Any]) -> None:
    with model.trace(PROMPT, max_tokens=8, ignore_eos=True, **sampling) as tracer:
        plain = tracer.result.save()
    with model.trace(PROMPT, max_tokens=8, ignore_eos=True, **sampling) as tracer:
        for _ in tracer.iter[:8]:
            model.logits = model.logits
        same = tracer.result.save()
    assert same.outputs[0].token_ids == plain.outputs[0].token_ids


def test_the_sampler_draws_from_edited_logits_with_its_settings(model: VLLM) -> None:
    with model.trace(
        PROMPT, temperature=1.0, seed=5, max_tokens=30, ignore_eos=True, logprobs=1, repetition_penalty=1.0
    ) as tracer:
        for _ in tracer.iter[:30]:
            edited = torch.full_like(model.logits, -torch.inf)
            edited[0, 100], edited[0, 200] = 0.0, 1.0
            model.logits = edited
        result = tracer.result.save()
    completion = result.outputs[0]
    assert set(completion.token_ids) == {100, 200}
    both = torch.tensor([0.0, 1.0]).log_softmax(-1)
    for token, top in zip(completion.token_ids, completion.logprobs, strict=True):
        assert top[token].logprob == pytest.approx(both[int(token == 200)].item(), abs=1e-4)


# Sampling settings.


def test_sequences_come_back_as_lists(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=1.0, seed=0, max_tokens=4, ignore_eos=True, n=3) as tracer:
        tokens = list().save()
        for _ in tracer.iter[:4]:
            tokens.append(model.samples.item())
        row = model.model.layers[0].output[0].save() if False else torch.zeros(1).save()
        result = tracer.result.save()
    assert tokens == [list(completion.token_ids) for completion in result.outputs]
    assert len({tuple(sequence) for sequence in tokens}) > 1
    assert len(row) == 3


async def test_sequences_stream_each_with_its_own_saves(amodel: VLLM) -> None:
    model = amodel
    with model.trace(PROMPT, temperature=1.0, seed=0, max_tokens=3, ignore_eos=True, n=2) as tracer:
        tokens = list().save()
        for _ in tracer.iter[:3]:
            tokens.append(model.samples.item())
    seen: dict[int, list[int]] = {0: [], 1: []}
    async for output in tracer.backend:
        seen[output.sequence].append(output.step)
        if not output.finished:
            (completion,) = output.outputs
            assert completion.index == output.sequence
            assert output.saves["tokens"] == list(completion.token_ids)
    assert seen == {0: [0, 1, 2], 1: [0, 1, 2]}
    assert [len(completion.token_ids) for completion in output.outputs] == [3, 3]


def test_an_invokes_settings_win_even_where_they_are_vllms_defaults(model: VLLM) -> None:
    with model.trace(temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPT, max_tokens=16):
            longer = tracer.result.save()
        with tracer.invoke(PROMPT, max_new_tokens=3, temperature=1.0, seed=1):
            hotter = tracer.result.save()
        with tracer.invoke(PROMPT):
            plain = tracer.result.save()
    greedy = reference(Engines.path("qwen3")).greedy(PROMPT, 16)
    assert list(longer.outputs[0].token_ids) == greedy
    assert list(plain.outputs[0].token_ids) == greedy[:2]
    assert len(hotter.outputs[0].token_ids) == 3
    assert list(hotter.outputs[0].token_ids) != greedy[:3]


def test_max_tokens_given_twice(model: VLLM) -> None:
    with pytest.raises(ArgumentError, match="same setting"):
        model.trace(PROMPT, max_tokens=2, max_new_tokens=2)
    with pytest.raises(UnsupportedError, match="output_kind"):
        model.trace(PROMPT, output_kind=1)


def test_every_form_of_a_prompt(model: VLLM) -> None:
    ids = model.tokenizer(PROMPT)["input_ids"]
    forms: list[Any] = [
        PROMPT,
        ids,
        tuple(ids),
        torch.tensor(ids),
        model.tokenizer(PROMPT),
        model.tokenizer(PROMPT, return_tensors="pt"),
        {"input_ids": [ids], "attention_mask": [[1] * len(ids)]},
        TokensPrompt(prompt_token_ids=ids),
        TextPrompt(prompt=PROMPT),
    ]
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for form in forms:
            with tracer.invoke(form):
                logits = model.logits.save()
    assert len(logits) == len(forms)
    for other in logits[1:]:
        close(other, logits[0], 1e-4)


# Without a block.


def test_generate_is_plain_vllm(model: VLLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [PROMPT, [5, 6, 7, 8], {"prompt": "Once upon a time"}]
    outputs = model.generate(prompts, temperature=0.0, max_tokens=6, ignore_eos=True)
    expected = reference(Engines.path("qwen3"))
    for output, prompt in zip(outputs, [PROMPT, [5, 6, 7, 8], "Once upon a time"], strict=True):
        assert output.finished
        assert list(output.outputs[0].token_ids) == expected.greedy(prompt, 6)
    assert "Generating" in capsys.readouterr().err
    (one,) = model.generate([5, 6, 7, 8], temperature=0.0, max_tokens=6, ignore_eos=True, progress=False)
    assert one.outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert capsys.readouterr().err == ""
    (three,) = model.generate(PROMPT, n=3, temperature=1.0, max_tokens=2, progress=False)
    assert [completion.index for completion in three.outputs] == [0, 1, 2]


def test_what_generate_refuses(model: VLLM) -> None:
    with pytest.raises(ArgumentError, match="did you mean 'top_k'"):
        model.generate(PROMPT, topk=3)
    with pytest.raises(PromptError, match="empty"):
        model.generate([PROMPT, ""])
    with pytest.raises(PromptError, match="512"):
        model.generate([PROMPT, [5] * 600], progress=False)
    assert len(model.generate([PROMPT], max_tokens=1, progress=False)) == 1


async def test_generate_is_awaited_in_async_mode(amodel: VLLM) -> None:
    outputs = await amodel.generate([PROMPT] * 2, temperature=0.0, max_tokens=3, ignore_eos=True, progress=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [
        reference(Engines.path("qwen3")).greedy(PROMPT, 3)
    ] * 2


# Refusals.


def test_no_barrier_no_scan_no_gradients(model: VLLM) -> None:
    with model.trace(max_tokens=1) as tracer:
        with pytest.raises(UnsupportedError, match="save the value in one trace"):
            tracer.barrier(2)
        with tracer.invoke(PROMPT):
            pass
    with pytest.raises(UnsupportedError, match="save the value in one trace"):
        with model.trace(PROMPT, max_tokens=1) as tracer:
            tracer.barrier(2)
    with pytest.raises(UnsupportedError, match="meta device"):
        model.scan(PROMPT)
    with pytest.raises(UnsupportedError, match="meta device"):
        model.trace(PROMPT, scan=True)
    with pytest.raises(UnsupportedError, match=r"test_control\.py:\d+: `\.backward\(\)`.*transformers"):
        with model.trace(PROMPT, max_tokens=1):
            model.logits.sum().backward()
    with pytest.raises(UnsupportedError, match=r"`\.grad`.*transformers"):
        with model.trace(PROMPT, max_tokens=1):
            gradient = model.model.layers[0].output[0].grad.save()


def test_one_failed_invoke_of_several_keeps_the_others_values(model: VLLM) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(temperature=0.0, max_tokens=2) as tracer:
            for number in range(3):
                with tracer.invoke(PROMPT):
                    kept = number.save()
                    value = (10 // (number - 1)).save()
    assert isinstance(caught.value, BlockError)
    assert caught.value.invoke == 1
    assert kept == [0, 1, 2]
    assert value == [-10, 10]
    assert tracer.saves["value"] == [-10, 10]


def test_a_wrong_id_is_put_back_at_once_and_its_block_told_of_it_later() -> None:
    """As on a GPU, where the forward pass goes on before the host knows what was written."""
    failed: dict[str, BaseException] = {}

    def block(name: str) -> Any:
        return SimpleNamespace(
            request_id=name, fail=partial(failed.__setitem__, name), pickled_failure=lambda: name.encode()
        )

    drawn = torch.tensor([[3], [4], [5], [6]], dtype=torch.int32)
    samples = torch.tensor([[10], [-1], [9], [6]], dtype=torch.int32)
    check = DrawCheck(samples, drawn, {0: block("a"), 1: block("b"), 2: block("c")}, 10)
    assert samples.flatten().tolist() == [3, 4, 9, 6]
    assert failed == {}
    assert check.failures() == {"a": b"a", "b": b"b"}
    assert str(failed["a"]) == "token id 10 is outside the vocabulary of 10 tokens"
    assert str(failed["b"]) == "token id -1 is outside the vocabulary of 10 tokens"
