"""Prompts: the forms that a person may write, made into vLLM's prompt dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from vllm.inputs import TextPrompt, TokensPrompt

from nnsight_async.engine.arguments import did_you_mean
from nnsight_async.errors import PromptError

#: What one of vLLM's own prompt dicts may have.
_KEYS: Final = frozenset(TextPrompt.__annotations__) | frozenset(TokensPrompt.__annotations__)


def split_prompts(prompts: Any) -> list[dict[str, Any]]:
    """vLLM's prompt dicts of one prompt, or of a list of them (a list of numbers is one prompt's token ids)."""
    if isinstance(prompts, (list, tuple)) and prompts and not _is_number(prompts[0]):
        return [make_prompt(prompt) for prompt in prompts]
    return [make_prompt(prompts)]


def make_prompt(prompt: Any) -> dict[str, Any]:
    """One of vLLM's prompt dicts from a string, token ids, a tokenizer's dict, or one of vLLM's own.

    Raises:
        PromptError: it is empty, holds several prompts, or is nothing of these.
    """
    if isinstance(prompt, str):
        return {"prompt": _text(prompt)}
    if isinstance(prompt, Mapping) or hasattr(prompt, "keys"):
        if "input_ids" in prompt:
            return {"prompt_token_ids": _token_ids(prompt["input_ids"])}
        return _own_dict(prompt)
    return {"prompt_token_ids": _token_ids(prompt)}


def _own_dict(prompt: Mapping[str, Any]) -> dict[str, Any]:
    if "prompt_embeds" in prompt:
        raise PromptError("a prompt of embeddings is not served: give its tokens, and assign the embedding's output")
    if "prompt" not in prompt and "prompt_token_ids" not in prompt:
        raise PromptError(f"a prompt dict needs 'prompt', 'prompt_token_ids' or 'input_ids'; it has {list(prompt)}")
    for key in prompt:
        if key not in _KEYS:
            raise PromptError(f"{key!r} is not a key of vLLM's prompt dicts{did_you_mean(str(key), set(_KEYS))}")
    salt = prompt.get("cache_salt")
    if salt is not None:
        if not isinstance(salt, str) or not salt:
            raise PromptError(f"cache_salt is a string that is not empty, not {salt!r}")
        _check_unicode("cache_salt", salt)
    made = dict(prompt)
    if made.get("prompt_token_ids") is not None:
        made["prompt_token_ids"] = _token_ids(made["prompt_token_ids"])
        return made
    made.pop("prompt_token_ids", None)
    if not isinstance(made.get("prompt"), str):
        raise PromptError(f"the 'prompt' of a prompt dict is a string, not {type(made.get('prompt')).__name__}")
    return {**made, "prompt": _text(made["prompt"])}


def _text(text: str) -> str:
    if not text:
        raise PromptError("the prompt is empty: it needs at least one token")
    _check_unicode("the prompt", text)
    return str(text)


def _check_unicode(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise PromptError(
            f"{what} is no valid Unicode: {found!r} at {error.start} is half of a surrogate pair; "
            "text.encode(errors='replace').decode() replaces it"
        ) from None


def _token_ids(ids: Any) -> list[int]:
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise PromptError(f"a prompt is a string, a list of token ids or a prompt dict, not {type(ids).__name__}")
    if len(ids) == 1 and not isinstance(ids[0], str):
        first = ids[0].tolist() if hasattr(ids[0], "tolist") else ids[0]
        if isinstance(first, Sequence):
            ids = first  # a tokenizer's batch of one
    if not ids:
        raise PromptError("the prompt is empty: it needs at least one token")
    if not _is_number(ids[0]):
        raise PromptError(
            "one invoke takes one prompt, and this is a list of several: open one tracer.invoke(prompt) for each"
        )
    return [_token_id(token) for token in ids]


def _token_id(token: Any) -> int:
    value = token.item() if isinstance(token, (np.generic, torch.Tensor)) else token
    if not isinstance(value, int) or isinstance(value, bool):
        raise PromptError(f"a token id is an integer, not {value!r}: give the ids as integers")
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex, np.generic)) or (isinstance(value, torch.Tensor) and not value.ndim)
