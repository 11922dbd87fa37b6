"""Prompts and sampling settings: what a person may write, made into what vLLM takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from nnsight_async.engine.arguments import did_you_mean
from nnsight_async.errors import NO_SCAN, ArgumentError, PromptError, UnsupportedError

#: Every setting of vllm.SamplingParams that is a caller's to choose.
SETTINGS: Final = frozenset(name for name in SamplingParams.__struct_fields__ if not name.startswith("_"))
_OURS: Final = {
    "output_kind": "every output carries the whole text so far",
    "skip_reading_prefix_cache": "a traced prompt is always computed, so that its rows can be read",
    "stream_interval": "every step is an output of its own",
}


def check_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under vLLM's names (``max_new_tokens`` is ``max_tokens``).

    Raises:
        ArgumentError: a name that vllm.SamplingParams does not have, with the one that was probably meant.
        UnsupportedError: a setting that a trace decides itself.
    """
    checked = dict(settings)
    if "max_new_tokens" in checked:
        if "max_tokens" in checked:
            raise ArgumentError("max_tokens and max_new_tokens are the same setting: give one of them")
        checked["max_tokens"] = checked.pop("max_new_tokens")
    for name in checked:
        if name == "scan":
            raise UnsupportedError(NO_SCAN)
        if name in _OURS:
            raise UnsupportedError(f"{name} cannot be set on a trace: {_OURS[name]}")
        if name not in SETTINGS:
            raise ArgumentError(f"{name!r} is not a sampling setting of vLLM{did_you_mean(name, set(SETTINGS))}")
    return checked


def make_params(
    settings: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
) -> SamplingParams:
    """vLLM's sampling parameters of one request; ``extra`` is what rides along for the worker if it is traced.

    Raises:
        ArgumentError: a value that vLLM refuses.
    """
    values = dict(settings)
    if extra is not None:
        values["extra_args"] = {**(values.get("extra_args") or {}), **extra}
        values["skip_reading_prefix_cache"] = True
    try:
        return SamplingParams(**values, output_kind=output_kind)
    except (VLLMClientError, ValueError, TypeError) as error:
        raise ArgumentError(str(error)) from error


def split_prompts(prompts: Any) -> list[dict[str, Any]]:
    """vLLM's prompt dicts of one prompt, or of a list of them (a list of numbers is one prompt's token ids)."""
    if isinstance(prompts, (list, tuple)) and prompts and not isinstance(prompts[0], int):
        return [make_prompt(prompt) for prompt in prompts]
    return [make_prompt(prompts)]


def make_prompt(prompt: Any) -> dict[str, Any]:
    """One of vLLM's prompt dicts from a string, token ids, a tokenizer's dict, or one of vLLM's own.

    Raises:
        PromptError: it is empty, holds several prompts, or is nothing of these.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError("the prompt is empty: it needs at least one token")
        return {"prompt": prompt}
    if isinstance(prompt, Mapping) or hasattr(prompt, "keys"):
        if "input_ids" in prompt:
            return {"prompt_token_ids": _token_ids(prompt["input_ids"])}
        if "prompt_token_ids" in prompt:
            return {**prompt, "prompt_token_ids": _token_ids(prompt["prompt_token_ids"])}
        if "prompt" in prompt:
            return {**prompt, **make_prompt(prompt["prompt"])}
        raise PromptError(f"a prompt dict needs 'prompt', 'prompt_token_ids' or 'input_ids'; it has {list(prompt)}")
    return {"prompt_token_ids": _token_ids(prompt)}


def _token_ids(ids: Any) -> list[int]:
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise PromptError(f"a prompt is a string, a list of token ids or a prompt dict, not {type(ids).__name__}")
    if len(ids) == 1 and isinstance(ids[0], Sequence) and not isinstance(ids[0], str):
        ids = ids[0]  # a tokenizer's batch of one
    if not ids:
        raise PromptError("the prompt is empty: it needs at least one token")
    if not all(isinstance(token, int) for token in ids):
        raise PromptError(
            "one invoke takes one prompt, and this is a list of several: open one tracer.invoke(prompt) for each"
        )
    return list(ids)
