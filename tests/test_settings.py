"""A sampling setting, prompt or message that makes no sense is one clear error at once, and the engine goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import live
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from nnsight_async import VLLM
from nnsight_async.client.sampling import SETTINGS, check_settings
from nnsight_async.client.stream import Stream
from nnsight_async.errors import ArgumentError, PromptError, UnsupportedError

PROMPT = "The capital of France is"


@pytest.fixture(autouse=True)
async def _the_engine_serves_the_next_request(model: VLLM, amodel: VLLM) -> AsyncIterator[None]:
    yield
    async with amodel.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
        after = tracer.result.save()
    assert len(after.outputs[0].token_ids) == 2
    assert live(model) == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"seed": "x"}, r"seed='x' .* expected int \| None, got str"),
        ({"seed": 2**70}, "seed"),
        ({"max_tokens": 1.5}, "max_tokens=1.5 .* got float"),
        ({"max_tokens": True}, "max_tokens=True .* got bool"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": "hot"}, "temperature='hot' .* expected float, got str"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": None}, "temperature=None"),
        ({"top_k": "x"}, "top_k='x'"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 2, "temperature": 0.0}, "n must be 1 when using greedy sampling"),
        ({"min_tokens": -1}, "min_tokens must be greater"),
        ({"min_tokens": 10**9, "max_tokens": None}, "min_tokens=1000000000 is more than the model's length, 512"),
        ({"logprobs": 10**6}, "greater than max allowed: 20"),
        ({"stop": 5}, "stop=5 .* got int"),
        ({"stop": ["a", 5]}, r"stop=.* got int at \[1\]"),
        ({"stop": "\ud800"}, "stop=.* surrogates"),
        ({"stop": "a", "detokenize": False}, "stop strings are only supported when detokenize is True"),
        ({"stop_token_ids": "x"}, "stop_token_ids='x' .* expected list"),
        ({"logit_bias": {"a": 1}}, "logit_bias=.* expected int, got str of a key"),
        ({"logit_bias": {10**9: 1.0}}, "logit_bias contain out-of-vocab"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias of token 1 is nan"),
        ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty"),
        ({"allowed_token_ids": [10**9]}, "allowed_token_ids contains out-of-vocab"),
        ({"bad_words": [1]}, r"bad_words=\[1\] .* got int"),
        ({"skip_special_tokens": "maybe"}, "skip_special_tokens='maybe' .* expected bool"),
        ({"structured_outputs": 1}, "structured_outputs=1 "),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs has no 'regexp'; did you mean 'regex'"),
        ({"structured_outputs": StructuredOutputsParams(regex="(")}, "sampling settings: .*"),
        ({"extra_args": 3}, "extra_args=3 .* expected dict"),
        ({"extra_args": {"a": torch.ones(2)}}, "extra_args=.* type .*Tensor"),
        ({"extra_args": {"nnsight_async": b""}}, "extra_args has the key 'nnsight_async'"),
        ({"thinking_token_budget": 5}, "thinking_token_budget is set but"),
        ({"best_of": 3}, "'best_of' is not a sampling setting"),
    ],
    ids=str,
)
async def test_a_value_that_the_engine_would_not_take(
    model: VLLM, amodel: VLLM, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ArgumentError, match=told):
        with model.trace(PROMPT, **settings):
            logits = model.logits.save()
    with pytest.raises(ArgumentError, match=told):
        async with amodel.trace(PROMPT, **settings):
            logits = amodel.logits.save()
    with pytest.raises(ArgumentError, match=told):
        with model.trace() as tracer:
            with tracer.invoke(PROMPT, **settings):
                logits = model.logits.save()
    with pytest.raises(ArgumentError, match=told):
        model.generate(PROMPT, progress=False, **settings)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"output_kind": RequestOutputKind.DELTA}, "output_kind cannot be set on a trace: every output"),
        ({"stream_interval": 4}, "stream_interval cannot be set on a trace: every step"),
        ({"skip_reading_prefix_cache": False}, "skip_reading_prefix_cache cannot be set"),
        ({"skip_clone": True}, "skip_clone cannot be set"),
        ({"extra_args": {"kv_transfer_params": {}}}, "kv_transfer_params, but this engine transfers no cache"),
    ],
    ids=str,
)
def test_a_setting_of_vllms_that_contradicts_tracing(model: VLLM, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        model.trace(PROMPT, **settings)


WRONG: tuple[Any, ...] = ("x", 1.5, None, -1, -(2**63), 2**31, 2**63, 2**64 - 1, 2**70, True, [], [1], ["a"], [-1])
WRONG += ([10**9], {}, {"a": 1}, {1: 1.0}, object(), float("nan"), float("inf"), 1e300, b"x", "", np.float32(0.5))


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_with_every_kind_of_value_is_refused_or_served(model: VLLM, name: str) -> None:
    served = 0
    for value in WRONG:
        settings = {"max_tokens": 2, name: value}
        try:
            with model.trace(PROMPT, **settings):
                logits = model.logits.save()
        except (ArgumentError, UnsupportedError):
            continue
        assert logits.shape[0] == 1
        served += 1
    assert served < len(WRONG)


async def test_settings_are_read_as_they_are_meant(model: VLLM, amodel: VLLM) -> None:
    settings = {"seed": np.int64(3), "temperature": np.float32(0.5), "max_tokens": torch.tensor(3), "stop": ("zz",)}
    with model.trace(PROMPT, **settings, logit_bias={np.int64(7): 1}, stop_token_ids=np.array([1, 2])) as tracer:
        one = tracer.result.save()
    plain = {"seed": 3, "temperature": 0.5, "max_tokens": 3, "stop": ["zz"]}
    async with amodel.trace(PROMPT, **plain, logit_bias={7: 1.0}, stop_token_ids=[1, 2]) as tracer:
        other = tracer.result.save()
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    (whole,) = model.generate(PROMPT, progress=False, temperature=0.0, max_tokens=10**15, ignore_eos=True)
    assert len(whole.outputs[0].token_ids) == 512 - 5
    with model.trace(PROMPT, max_tokens=2, logprobs=True, structured_outputs={"choice": ["a"]}) as tracer:
        chosen = tracer.result.save()
    assert chosen.outputs[0].text == "a"
    assert len(chosen.outputs[0].logprobs[0]) <= 2


def test_an_invokes_settings_win_over_the_traces(model: VLLM) -> None:
    with model.trace(temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPT, max_new_tokens=2):
            one = tracer.result.save()
        with tracer.invoke(PROMPT):
            other = tracer.result.save()
    assert [len(one.outputs[0].token_ids), len(other.outputs[0].token_ids)] == [2, 3]


def test_what_only_the_v2_runners_tables_have_no_room_for(model: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model._config
    for runs_v2 in (True, False):
        monkeypatch.setattr(type(config), "use_v2_model_runner", runs_v2)
        for settings in (
            {"seed": 2**63},
            {"allowed_token_ids": range(1025)},
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            {"stop_token_ids": range(128), "min_tokens": 1},
        ):
            if runs_v2:
                with pytest.raises(ArgumentError, match=next(iter(settings))):
                    check_settings(settings, config)
            else:
                assert SamplingParams(**check_settings(settings, config)).n == 1


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([1, 2.0], "a token id is an integer, not 2.0"),
        ([True, False], "a token id is an integer, not True"),
        ([1, None], "a token id is an integer, not None"),
        (np.array([3.0]), "a token id is an integer, not 3.0"),
        ([5, -1], "-1 is out of vocabulary"),
        ([2**70], "out of vocabulary"),
        ([[[1]]], "one prompt"),
        (torch.tensor(3), "not int"),
        (b"abc", "not bytes"),
        ("a\ud800", r"no valid Unicode: '\\ud800' at 1"),
        ({"prompt": 5}, "a string, not int"),
        ({"prompt": "x", "cache_slat": "y"}, "'cache_slat' is not a key .* did you mean 'cache_salt'"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt is a string"),
        ({"prompt_token_ids": [1, True]}, "not True"),
        ({"prompt_embeds": torch.ones(3, 64)}, "embeddings is not served"),
        ({"prompt": "x", "multi_modal_data": 5}, "vLLM does not take this prompt"),
    ],
    ids=repr,
)
async def test_a_prompt_that_the_engine_would_not_take(model: VLLM, amodel: VLLM, prompt: Any, told: str) -> None:
    with pytest.raises(PromptError, match=told):
        with model.trace(prompt):
            logits = model.logits.save()
    with pytest.raises(PromptError, match=told):
        async with amodel.trace(prompt):
            logits = amodel.logits.save()
    with pytest.raises(PromptError, match=told):
        with model.trace() as tracer:
            with tracer.invoke(prompt):
                logits = model.logits.save()
    if not (isinstance(prompt, list) and isinstance(prompt[0], list)):  # which are several prompts here
        with pytest.raises(PromptError, match=told):
            model.generate(prompt, progress=False)


@pytest.mark.parametrize(
    "prompt",
    [np.array([3, 4]), torch.tensor([[3, 4]]), [np.int64(3), np.int64(4)], [torch.tensor(3), torch.tensor(4)], (3, 4)],
    ids=repr,
)
def test_token_ids_of_any_integer_type(model: VLLM, prompt: Any) -> None:
    (expected,) = model.generate([3, 4], progress=False, temperature=0.0, max_tokens=3)
    (generated,) = model.generate(prompt, progress=False, temperature=0.0, max_tokens=3)
    with model.trace(prompt, temperature=0.0, max_tokens=3) as tracer:
        traced = tracer.result.save()
    assert generated.prompt_token_ids == traced.prompt_token_ids == [3, 4]
    assert generated.outputs[0].token_ids == traced.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    ("method", "argument", "told"),
    [
        ("force", 1.5, "tokens are a token id, a list"),
        ("force", None, "tokens are a token id, a list"),
        ("force", {1: 2}, "tokens are a token id, a list"),
        ("force", True, "a token id is an integer, not True"),
        ("force", [1.5], "a token id is an integer, not 1.5"),
        ("force", torch.tensor([[3, 4]]), "a token id is an integer"),
        ("force", 2**70, "outside the vocabulary"),
        ("force", "\ud800", "cannot be tokenized"),
        ("edit_logits", [1, 2], "a dict of numbers by token id"),
        ("edit_logits", {"a": 1.0}, "a token id is an integer, not 'a'"),
        ("edit_logits", {1: "2"}, "the bias of token 1 is '2'"),
        ("edit_logits", {1: float("nan")}, "the bias of token 1 is nan"),
        ("edit_logits", {1: torch.ones(2)}, "the bias of token 1 is"),
        ("edit_logits", {-1: 1.0}, "outside the vocabulary"),
        ("set", 5, "a dict of values by name"),
        ("set", {5: 1}, "a dict of values by name"),
    ],
    ids=str,
)
async def test_a_message_that_makes_no_sense(amodel: VLLM, method: str, argument: Any, told: str) -> None:
    with amodel.trace(PROMPT, max_tokens=400, ignore_eos=True) as tracer:
        for _ in tracer.all():
            tracer.live("x", 0)
    stream: Stream
    async with tracer.backend as stream:
        await anext(stream)
        with pytest.raises(ArgumentError, match=told):
            await getattr(stream, method)(argument)
        with pytest.raises(ArgumentError, match="there is no invoke 'x'"):
            await stream.stop(invoke="x")  # type: ignore[arg-type]
        step = await stream.force([3, 4])
        async for output in stream:
            if output.step > step:
                break
        assert output.outputs[0].token_ids[step : step + 2] == [3, 4]


async def test_flat_logprobs_of_an_output_stay_as_they_are(amodel: VLLM) -> None:
    with amodel.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1, flat_logprobs=True) as tracer:
        token = amodel.samples.save()
    outputs = [output async for output in tracer.backend]
    assert [len(output.outputs[0].logprobs) for output in outputs] == [1, 2, 3, 4]
