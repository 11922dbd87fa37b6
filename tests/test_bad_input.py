"""What a person does wrong is one clear error in their own process, and the engine serves the next request."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from conftest import ENGINE, Engines, live

from nnsight_async import VLLM, save
from nnsight_async.errors import (
    ArgumentError,
    BlockError,
    CaptureError,
    EngineError,
    LocationError,
    LoopCutShortWarning,
    NeverReachedError,
    OutOfOrderError,
    OutsideBlockError,
    PromptError,
    UnsupportedError,
)

PROMPT = "The capital of France is"


@pytest.fixture(autouse=True)
def _the_engine_serves_the_next_request(model: VLLM) -> Iterator[None]:
    yield
    with model.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
        after = tracer.result.save()
    assert len(after.outputs[0].token_ids) == 2
    assert live(model) == 0


def test_a_path_that_is_not_in_the_tree(model: VLLM) -> None:
    with pytest.raises(LocationError, match=r"'model' \(Qwen3Model\) has no child 'layer'; its children are: embed_to"):
        model.model.layer
    with pytest.raises(LocationError, match="has 4 children, so index 9 is out of range"):
        model.model.layers[9]
    with pytest.raises(BlockError, match="has no child 'mpl'") as caught:
        with model.trace(PROMPT):
            value = model.model.layers[1].mpl.output.save()
    assert isinstance(caught.value, LocationError)
    assert "model.model.layers[1].mpl.output.save()" in caught.value.where
    assert caught.value.where.startswith(__file__)


def test_a_misspelled_sampling_keyword(model: VLLM) -> None:
    with pytest.raises(
        ArgumentError, match="'temperatur' is not a sampling setting of vLLM; did you mean 'temperature'"
    ):
        model.trace(PROMPT, temperatur=0)
    with model.trace() as tracer:
        with pytest.raises(ArgumentError, match="did you mean 'max_tokens'"):
            tracer.invoke(PROMPT, max_token=3)
        with tracer.invoke(PROMPT):
            pass


def test_an_impossible_sampling_value(model: VLLM) -> None:
    with pytest.raises(ArgumentError, match="top_p"):
        model.trace(PROMPT, top_p=7.0)


@pytest.mark.parametrize("prompts", [["one", "two"], [["one"], ["two"]], [[1, 2], [3, 4]]])
def test_a_list_of_prompts_in_one_invoke(model: VLLM, prompts: object) -> None:
    with pytest.raises(PromptError, match="one invoke takes one prompt"):
        model.trace(prompts)


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"input_ids": []}])
def test_an_empty_prompt(model: VLLM, prompt: object) -> None:
    with pytest.raises(PromptError, match="empty"):
        model.trace(prompt)


def test_a_prompt_of_no_kind_we_know(model: VLLM) -> None:
    with pytest.raises(PromptError, match="not float"):
        model.trace(3.5)
    with pytest.raises(PromptError, match="it has"):
        model.trace({"text": "hello"})


def test_a_prompt_longer_than_the_models_length(model: VLLM) -> None:
    with pytest.raises(PromptError, match="512"):
        with model.trace([5] * 600, max_tokens=1):
            value = model.logits.save()


def test_a_token_id_outside_the_vocabulary(model: VLLM) -> None:
    with pytest.raises(PromptError, match="vocab"):
        with model.trace([5, 10**7], max_tokens=1):
            value = model.logits.save()


def test_a_block_that_raises_comes_home_with_its_line(model: VLLM) -> None:
    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        with model.trace(PROMPT, max_tokens=4):
            1 / 0
    error = caught.value
    assert isinstance(error, BlockError)
    assert "1 / 0" in error.where
    assert "1 / 0" in error.remote_traceback
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_block_that_raises_in_the_middle_of_the_forward(model: VLLM) -> None:
    with pytest.raises(ValueError, match="not this one"):
        with model.trace(PROMPT, max_tokens=4):
            kept = model.model.layers[0].output[0].save()
            raise ValueError("not this one")
    assert kept.shape == (5, 64)  # what was saved before the error is kept


def test_an_exception_of_the_users_own_type(model: VLLM) -> None:
    class Peculiar(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    with pytest.raises(BlockError, match="Peculiar: 1 and 2"):
        with model.trace(PROMPT, max_tokens=4):
            raise Peculiar(1, 2)


def test_a_name_that_does_not_exist(model: VLLM) -> None:
    with pytest.raises(NameError, match="nowhere") as caught:
        with model.trace(PROMPT, max_tokens=2):
            x = nowhere.save()  # type: ignore[name-defined]  # noqa: F821
    assert "nowhere.save()" in caught.value.where


def test_a_block_that_exits_the_process_does_not(model: VLLM) -> None:
    with pytest.raises(BlockError, match="SystemExit"):
        with model.trace(PROMPT, max_tokens=2):
            raise SystemExit(3)


def test_a_value_that_cannot_travel_is_named(model: VLLM) -> None:
    guard = threading.Lock()
    with pytest.raises(CaptureError, match="guard"):
        with model.trace(PROMPT, max_tokens=2):
            guard.acquire()


def test_a_value_that_cannot_come_back_is_named(model: VLLM) -> None:
    with pytest.raises(CaptureError, match=r"lock\) cannot be sent"):
        with model.trace(PROMPT, max_tokens=2):
            lock = threading.Lock().save()


def test_an_earlier_location_after_a_later_one(model: VLLM) -> None:
    with pytest.raises(
        OutOfOrderError, match=r"model\.layers\.1\.output has passed.*model\.layers\.3\.output"
    ) as caught:
        with model.trace(PROMPT, max_tokens=2):
            model.model.layers[3].output
            value = model.model.layers[1].output.save()
    assert "layers[1]" in caught.value.where


def test_a_modules_input_after_its_output(model: VLLM) -> None:
    with pytest.raises(OutOfOrderError, match=r"layers\.1\.mlp\.inputs"):
        with model.trace(PROMPT, max_tokens=2):
            model.model.layers[1].mlp.output
            value = model.model.layers[1].mlp.input.save()


def test_a_module_after_the_sampler(model: VLLM) -> None:
    with pytest.raises(OutOfOrderError, match="samples"):
        with model.trace(PROMPT, max_tokens=2):
            model.samples
            value = model.model.layers[1].output.save()


def test_a_step_that_has_passed(model: VLLM) -> None:
    with pytest.raises(OutOfOrderError, match="step 0 has passed"):
        with model.trace(PROMPT, max_tokens=4, ignore_eos=True) as tracer:
            for _ in tracer.iter[:2]:
                model.samples
            for _ in tracer.iter[:2]:
                value = model.samples.save()


def test_a_module_that_the_forward_does_not_call(model: VLLM) -> None:
    with pytest.raises(NeverReachedError, match=r"lm_head\.output is never reached"):
        with model.trace(PROMPT, max_tokens=2):
            value = model.lm_head.output.save()


def test_a_bounded_loop_that_the_request_cannot_supply(model: VLLM) -> None:
    after = "before"
    with pytest.warns(LoopCutShortWarning, match=r"tracer\.iter\[:9\]") as caught:
        with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            seen = list().save()
            for step in tracer.iter[:9]:
                seen.append(step)
            after = "after".save()
    assert seen == [0, 1, 2]
    assert after == "before"
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_steps_that_make_no_sense(model: VLLM) -> None:
    with pytest.raises(ArgumentError, match="counted from 0"):
        with model.trace(PROMPT, max_tokens=2) as tracer:
            for _ in tracer.iter[-2:]:
                value = model.samples.save()


def test_a_return_in_a_block(model: VLLM) -> None:
    with pytest.raises(CaptureError, match="return"):
        with model.trace(PROMPT, max_tokens=2):
            return


def test_outside_a_block(model: VLLM) -> None:
    for read in (lambda: model.model.layers[0].output, lambda: model.logits, lambda: model.samples, lambda: save(3)):
        with pytest.raises(OutsideBlockError, match="in"):
            read()


def test_a_save_between_the_invokes(model: VLLM) -> None:
    with pytest.raises(OutsideBlockError, match=r"tracer\.invoke"):
        with model.trace() as tracer:
            both = list().save()  # type: ignore[attr-defined]
            with tracer.invoke(PROMPT):
                both.append(1)


def test_a_trace_without_any_prompt(model: VLLM) -> None:
    with pytest.raises(ArgumentError, match="no prompt"):
        with model.trace():
            pass


def test_an_invoke_in_a_trace_with_a_prompt(model: VLLM) -> None:
    with pytest.raises(UnsupportedError, match="invoke"):
        with model.trace(PROMPT, max_tokens=1) as tracer:
            with tracer.invoke(PROMPT):
                value = model.logits.save()


def test_an_exception_between_the_invokes_is_the_callers_own(model: VLLM) -> None:
    with pytest.raises(RuntimeError, match="mine"):
        with model.trace(max_tokens=1) as tracer:
            with tracer.invoke(PROMPT):
                token = model.samples.save()
            raise RuntimeError("mine")
    assert "token" not in locals()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"enforce_eager": False}, "no graphs here"),
        ({"enable_chunked_prefill": True}, "whole"),
        ({"pipeline_parallel_size": 2}, "one forward pass"),
        ({"decode_context_parallel_size": 2}, "not gathered"),
        ({"worker_cls": "my.Worker"}, "worker class"),
        ({"speculative_config": {"method": "ngram"}}, "one token"),
    ],
)
def test_an_engine_argument_that_contradicts_tracing(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason) as caught:
        VLLM(Engines.path("qwen3"), **{**ENGINE, **arguments})
    assert next(iter(arguments)) in str(caught.value)


def test_an_engine_argument_that_vllm_does_not_have() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'max_model_len'"):
        VLLM(Engines.path("qwen3"), max_model_length=12)
    with pytest.raises(ArgumentError, match="mode"):
        VLLM(Engines.path("qwen3"), mode="asynchronous")  # type: ignore[arg-type]


def test_a_model_that_is_not_there() -> None:
    with pytest.raises((EngineError, ArgumentError), match="no-such-model"):
        VLLM("./no-such-model")


def test_a_group_of_exceptions(model: VLLM) -> None:
    with pytest.raises(BlockError, match="ExceptionGroup: both"):
        with model.trace(PROMPT, max_tokens=2):
            raise ExceptionGroup("both", [ValueError("one"), TypeError("two")])


def test_a_block_that_catches_what_it_is_told_and_reads_on(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        told = list().save()
        for _ in tracer.iter[:3]:
            model.samples
            try:
                model.model.layers[0].output
            except Exception as error:
                told.append(type(error).__name__)
    assert told == ["OutOfOrderError"] * 3


def test_a_block_that_begins_with_try(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
        try:
            token = model.samples.item().save()
            result = tracer.result.save()
        finally:
            done = "yes".save()
    assert (token, done) == (result.outputs[0].token_ids[0], "yes")


class _Unpicklable:
    def __reduce__(self):
        raise SystemExit(3)


def test_a_value_that_does_what_it_likes_when_it_is_sent(model: VLLM) -> None:
    with pytest.raises(CaptureError, match="SystemExit: 3"):
        with model.trace(PROMPT, max_tokens=2):
            value = _Unpicklable().save()


def test_sparse_and_nested_tensors_travel(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        sparse = torch.eye(3).to_sparse().save()
    assert sparse.to_dense().tolist() == torch.eye(3).tolist()
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).save()
    assert [part.tolist() for part in nested.unbind()] == [[1.0, 1.0], [1.0, 1.0, 1.0]]
