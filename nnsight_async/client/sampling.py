"""Sampling settings: what a person may write, made into what vLLM takes.

vLLM reads a request's settings in a thread of the engine's process, which a value of the wrong type ends: from then on
the engine takes in nothing more, and says nothing. So each value goes through vLLM's own encoding here first, there and
back, to the type that the engine will ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Final, TypeVar, get_type_hints

import msgspec
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.tokenizers import cached_tokenizer_from_config

from nnsight_async.engine.arguments import did_you_mean
from nnsight_async.engine.limits import check_limits
from nnsight_async.errors import NO_SCAN, ArgumentError, UnsupportedError
from nnsight_async.protocol import EDITS_ARG, EXTRA_ARG

T = TypeVar("T")

#: msgspec's words for types, and Python's.
_WORDS: Final = {
    " - at `key` in `$": " of a key at `",
    " - at `$": " at `",
    "`": "",
    "array": "list",
    "object": "dict",
    "null": "None",
}

#: Every setting of vllm.SamplingParams that is a caller's to choose.
SETTINGS: Final = frozenset(name for name in SamplingParams.__struct_fields__ if not name.startswith("_"))
_OURS: Final = {
    "output_kind": "every output carries the whole text so far",
    "output_text_buffer_length": "vLLM works it out from the stop strings; leave it out",
    "skip_clone": "vLLM changes the settings of a request, so each has a copy of its own; leave it out",
    "skip_reading_prefix_cache": "a traced prompt is always computed, so that its rows can be read",
    "stream_interval": "every step is an output of its own",
}
#: Settings that are objects, or the dict of one.
_BY_PARTS: Final[dict[str, Any]] = {
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
}
#: Settings of which the engine does not take the type that they are given in, or that may be of any.
_UNTYPED: Final = frozenset({"extra_args", "prompt_logprob_token_ids"})


def check_settings(
    settings: Mapping[str, Any], config: VllmConfig, inherited: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The settings under vLLM's names (``max_new_tokens`` is ``max_tokens``), each as the engine will read it.

    ``inherited`` are checked settings, over which these win.

    Raises:
        ArgumentError: a name that vllm.SamplingParams does not have, with the one that was probably meant, or a value
            that the engine would not take.
        UnsupportedError: a setting that a trace decides itself.
    """
    given = dict(settings)
    if "max_new_tokens" in given:
        if "max_tokens" in given:
            raise ArgumentError("max_tokens and max_new_tokens are the same setting: give one of them")
        given["max_tokens"] = given.pop("max_new_tokens")
    for name in given:
        if name == "scan":
            raise UnsupportedError(NO_SCAN)
        if name in _OURS:
            raise UnsupportedError(f"{name} cannot be set on a trace: {_OURS[name]}")
        if name not in SETTINGS:
            raise ArgumentError(f"{name!r} is not a sampling setting of vLLM{did_you_mean(name, set(SETTINGS))}")
    checked = dict(inherited or {}) | {name: _as_received(name, value) for name, value in given.items()}
    _check_together(make_params(checked), config)
    if checked.get("max_tokens") is not None:  # the same, and it fits into the worker's tables
        checked["max_tokens"] = min(checked["max_tokens"], config.model_config.max_model_len)
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
    return _refused_as_argument(lambda: SamplingParams(**values, output_kind=output_kind))


def _as_received(name: str, value: Any) -> Any:
    """A setting's value as the engine will read it."""
    known = {field.name for field in fields(_BY_PARTS[name])} if name in _BY_PARTS else set()
    for key in value if known and isinstance(value, Mapping) else ():
        if key not in known:
            raise ArgumentError(f"{name} has no {key!r}{did_you_mean(str(key), known)}")
    if name in ("logprobs", "prompt_logprobs") and value is True:
        return 1  # vLLM's own reading of it
    plain = value if name in _UNTYPED else _plain(value)
    if name == "prompt_logprob_token_ids":
        return plain  # lists or an array: vLLM checks every number itself
    try:
        received = _decoder(name).decode(msgspec.msgpack.encode(plain))
    except (VLLMClientError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ArgumentError(f"{name}={_short(value)} is not a value that vLLM takes: {_reason(error)}") from error
    if name != "extra_args":
        return received
    for reserved in (EXTRA_ARG, EDITS_ARG):
        if received and reserved in received:
            raise ArgumentError(f"extra_args has the key {reserved!r}, under which blocks travel: name it otherwise")
    return plain


@cache
def _decoder(name: str) -> msgspec.msgpack.Decoder[Any]:
    # vLLM's own takes tensors as well, which the engine cannot send on to the worker.
    return msgspec.msgpack.Decoder(get_type_hints(SamplingParams)[name])


def _plain(value: Any) -> Any:
    """Python's own numbers and lists in place of those of NumPy and PyTorch."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value


def _check_together(params: SamplingParams, config: VllmConfig) -> None:
    """What can only be told with all settings and the model at hand; ``params`` may be changed."""
    model = config.model_config
    needs_tokenizer = bool(params.bad_words) or params.structured_outputs is not None
    tokenizer = cached_tokenizer_from_config(model) if needs_tokenizer else None

    def check() -> None:
        params.verify(model, config.speculative_config, config.structured_outputs_config, tokenizer)
        if params.bad_words and tokenizer is not None:
            params.update_from_tokenizer(tokenizer)

    _refused_as_argument(check)
    check_limits(params, config)


def _refused_as_argument(call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:  # vLLM asserts, compares and looks up before it checks
        raise ArgumentError(f"vLLM does not take these sampling settings: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        words = str(error).replace("Expected", "expected")
        for theirs, ours in _WORDS.items():
            words = words.replace(theirs, ours)
        return words
    if isinstance(error, VLLMClientError) and error.args:
        return str(error.args[0])  # without its repetition of the name and the value
    if isinstance(error, TypeError) and "Encoding objects" in str(error):
        return f"{str(error).replace('Encoding', 'encoding')} (plain numbers, strings, lists and dicts travel)"
    return str(error) or type(error).__name__


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
