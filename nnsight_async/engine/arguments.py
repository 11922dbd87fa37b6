"""Engine arguments: vLLM's own, with what tracing needs put in and what contradicts it refused."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

from pydantic import ValidationError
from vllm.config import CompilationMode, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from nnsight_async.errors import ArgumentError, EngineError, UnsupportedError
from nnsight_async.protocol import CONFIG_KEY

_WORKER: Final = "nnsight_async.worker.worker.TracingWorker"
_SCHEDULER: Final = "nnsight_async.engine.scheduler.TracingScheduler"
_ASYNC_SCHEDULER: Final = "nnsight_async.engine.scheduler.TracingAsyncScheduler"


def _more_than_one(value: Any) -> bool:
    return value is not None and int(value) > 1


def _given(value: Any) -> bool:
    return value is not None


#: Arguments that contradict tracing: when, and why with the remedy.
_REFUSED: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "worker_cls": (lambda value: value != "auto", "the block runs in a worker class of ours; leave it out"),
    "scheduler_cls": (_given, "tracer.stop() ends a request in a scheduler class of ours; leave it out"),
    "enable_chunked_prefill": (bool, "a block sees a prompt's rows whole, in one step; leave it out"),
    "long_prefill_token_threshold": (bool, "a block sees a prompt's rows whole, in one step; leave it out"),
    "speculative_config": (_given, "a block's step is one token, and speculation draws several; leave it out"),
    "pipeline_parallel_size": (_more_than_one, "a block runs in one forward pass over all layers; use 1"),
    "prefill_context_parallel_size": (_more_than_one, "a block sees a prompt's rows whole, on every rank; use 1"),
    "decode_context_parallel_size": (_more_than_one, "heads that ranks share by context are not gathered; use 1"),
    "data_parallel_size": (_more_than_one, "one model drives one engine; start several models instead"),
    "kv_transfer_config": (_given, "rows that another engine computed cannot be read; leave it out"),
    "enable_batch_sharded_sampling": (bool, "a block sees its logits on every rank; leave it out"),
    "stream_interval": (_more_than_one, "every step is an output of its own; use 1"),
    "runner": (lambda value: value not in ("auto", "generate"), "only generating models can be traced"),
}


def build_config(model: str, arguments: dict[str, Any], graphs: str = "auto") -> VllmConfig:
    """vLLM's configuration of an engine that can be traced.

    Args:
        model: the model's name or folder.
        arguments: vLLM's engine arguments.
        graphs: ``"auto"`` leaves compiled code and CUDA graphs to vLLM; ``"off"`` does without, as a CPU always does.

    Raises:
        ArgumentError: an argument that vLLM does not have, or one that contradicts what tracing needs.
        UnsupportedError: something vLLM can do and tracing cannot yet.
        EngineError: vLLM refuses the model or a value; the cause is its own error.
    """
    known = {field.name for field in fields(AsyncEngineArgs)}
    for name, value in arguments.items():
        if name not in known:
            raise ArgumentError(f"{name!r} is not an engine argument of vLLM{did_you_mean(name, known)}")
        refused, why = _REFUSED.get(name, (None, ""))
        if refused is not None and refused(value):
            raise UnsupportedError(f"{name}={value!r} contradicts tracing: {why}")
    if graphs not in ("auto", "off"):
        raise ArgumentError(f'graphs is "auto" or "off", not {graphs!r}')
    has_graphs = graphs == "auto" and current_platform.is_cuda_alike()
    if arguments.get("enforce_eager") is False and not has_graphs:
        why = 'graphs="off" asks for it' if graphs == "off" else "there are no graphs here, and blocks need Python"
        raise UnsupportedError(f"enforce_eager=False contradicts tracing: {why}; leave it out")
    given: dict[str, Any] = {
        "disable_log_stats": True,
        "enable_chunked_prefill": False,
        "enforce_eager": not has_graphs,
    }
    given.update({name: value for name, value in arguments.items() if value is not None or name not in given})
    try:
        config = AsyncEngineArgs(model=model, **given).create_engine_config()
    except ValidationError as error:  # its text is followed by the whole input and a link
        told = "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
        raise EngineError(f"vLLM cannot serve {model!r} like this: {told}") from error
    except Exception as error:
        raise EngineError(f"vLLM cannot serve {model!r} like this: {error}") from error
    if not has_graphs and config.compilation_config.mode not in (None, CompilationMode.NONE):
        raise UnsupportedError("compilation_config asks for compiled code, which no block can run in; leave it out")
    if config.model_config.runner_type != "generate":
        raise UnsupportedError(f"{model} is a {config.model_config.runner_type} model; only generating ones are traced")
    budget, longest = config.scheduler_config.max_num_scheduled_tokens, config.model_config.max_model_len
    if budget is not None and budget < longest:
        raise ArgumentError(
            f"max_num_scheduled_tokens={budget} is smaller than max_model_len={longest}, so the longest prompts would "
            "wait forever: a prompt is computed whole, in one step; increase the one or decrease the other"
        )
    config.parallel_config.worker_cls = _WORKER
    asynchronous = config.scheduler_config.async_scheduling
    config.scheduler_config.scheduler_cls = _ASYNC_SCHEDULER if asynchronous else _SCHEDULER
    return config


def set_worker_settings(config: VllmConfig, settings: dict[str, Any]) -> None:
    """Put what the worker is told beside whatever else the user put into ``additional_config``."""
    additional = config.additional_config
    config.additional_config = {**(additional if isinstance(additional, dict) else {}), CONFIG_KEY: settings}


def did_you_mean(name: str, known: set[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing where nothing is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
