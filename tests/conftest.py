"""Engines shared by the whole run: one takes the better part of a minute to start."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from small_models import smollm2, tiny

from nnsight_async import VLLM

#: Engine arguments for this suite: small, and in the reference's own precision.
ENGINE: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 256 << 20, "max_model_len": 512}
#: Further arguments of engines that a test asks for under a name with a dash: prefixes are shared, a block of the cache
#: holds 32 tokens, and there is room for one and a half requests of the model's length.
VARIANTS: dict[str, dict[str, Any]] = {
    "small-cache": {
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "num_gpu_blocks_override": 13,
        "enable_prefix_caching": True,
        "disable_log_stats": False,  # a request's metrics say how often it was preempted
    }
}


class Engines:
    """The engines of the run, each started when a test first asks for it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._models: dict[str, VLLM] = {}

    @staticmethod
    def path(name: str) -> str:
        """The folder of the checkpoint that an engine serves."""
        name = name.partition("-")[0]
        return smollm2() if name == "smollm2" else tiny(name)  # type: ignore[arg-type]

    def get(self, name: str, mode: str) -> VLLM:
        """A model by name, in a mode; both modes of a name are faces of one engine."""
        if name not in self._models:
            arguments = {**ENGINE, **VARIANTS.get(name.partition("-")[2], {})}
            self._models[name] = self._stack.enter_context(VLLM(self.path(name), **arguments))
        face = copy.copy(self._models[name])
        face.mode = mode  # type: ignore[assignment]
        return face

    def close(self) -> None:
        """Shut all of them down."""
        self._stack.close()


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    started = Engines()
    yield started
    started.close()


@pytest.fixture
def model(engines: Engines) -> VLLM:
    """A tiny Qwen3 in sync mode."""
    return engines.get("qwen3", "sync")


@pytest.fixture
def amodel(engines: Engines) -> VLLM:
    """The same tiny Qwen3, in async mode."""
    return engines.get("qwen3", "async")


@pytest.fixture
def smol(engines: Engines) -> VLLM:
    """SmolLM2-135M-Instruct in sync mode."""
    return engines.get("smollm2", "sync")


def live(model: VLLM) -> int:
    """How many blocks the worker holds."""
    connection = model._connection
    return connection.call(connection.stats()).live
