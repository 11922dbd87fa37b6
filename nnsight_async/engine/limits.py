"""What only vLLM's worker would refuse of a request's settings, and end with: it has to be told before."""

from __future__ import annotations

from typing import Any, Final

import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

from nnsight_async.errors import ArgumentError, UnsupportedError

_INT64: Final = 1 << 63


def check_limits(params: SamplingParams, config: VllmConfig) -> None:
    """Refuse what does not fit into the worker's tables; ``params`` is verified, its bad words are token ids.

    Raises:
        ArgumentError: a number or a list that is too large.
        UnsupportedError: a setting of a feature that the engine is not started with.
    """
    longest = config.model_config.max_model_len
    if params.min_tokens > longest:
        raise ArgumentError(f"min_tokens={params.min_tokens} is more than the model's length, {longest}: make it less")
    for token, bias in (params.logit_bias or {}).items():
        if bias != bias:
            raise ArgumentError(f"logit_bias of token {token} is nan: give a number (-inf bans the token)")
    if "kv_transfer_params" in (params.extra_args or {}):
        raise UnsupportedError("extra_args has kv_transfer_params, but this engine transfers no cache: leave them out")
    if config.use_v2_model_runner:
        _check_tables(params, config)


def _check_tables(params: SamplingParams, config: VllmConfig) -> None:
    """The V2 runner keeps settings in tables of a fixed width."""
    from vllm.v1.worker.gpu.sample import logit_bias as tables

    if params.seed is not None and not -_INT64 <= params.seed < _INT64:
        raise ArgumentError(f"seed={params.seed} does not fit into 64 bits with a sign: use a smaller one")
    _check_width("allowed_token_ids", params.allowed_token_ids, tables.MAX_NUM_ALLOWED_TOKEN_IDS)
    _check_width("logit_bias", params.logit_bias, tables.MAX_NUM_LOGIT_BIAS_TOKENS)
    words = params.bad_words_token_ids or []
    _check_width("bad_words", [token for word in words for token in word], envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS)
    if params.min_tokens > 0 and params.stop_token_ids:
        # Until min_tokens are there, these tokens and those that end a sequence anyway are banned.
        ends = config.model_config.try_get_generation_config().get("eos_token_id") or []
        stops = {*params.stop_token_ids, *([ends] if isinstance(ends, int) else ends)}
        _check_width("stop_token_ids", stops, tables.MAX_NUM_STOP_TOKEN_IDS - 1)  # one is the tokenizer's


def _check_width(name: str, tokens: Any, most: int) -> None:
    if tokens is not None and len(tokens) > most:
        raise ArgumentError(f"{name} has {len(tokens)} tokens, and the engine has room for {most}: give fewer")
