"""The model on the meta device: its modules and shapes, without weights, before an engine exists."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Final

import torch
import vllm.distributed.parallel_state as parallel_state
from torch import nn
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

#: Building vLLM's layers asks these groups for sizes and ranks; nothing is ever sent through them.
_GROUPS: Final = ("_WORLD", "_TP", "_PP", "_DP", "_EP", "_DCP", "_PCP")


def build_meta_model(config: VllmConfig) -> nn.Module:
    """The engine's model class, built as on a single device, every tensor on the meta device."""
    # Attention layers register themselves in the config they are built from, so it gets a copy.
    own = copy.deepcopy(config)
    own.compilation_config.mode = CompilationMode.NONE  # nothing is going to run it
    with (
        _single_rank(),
        _own_rotary_embeddings(),
        torch.device("meta"),
        set_default_torch_dtype(own.model_config.dtype),
    ):
        model: nn.Module = initialize_model(own)
        return model.eval()


@contextmanager
def _own_rotary_embeddings() -> Iterator[None]:
    """vLLM shares rotary embeddings through a table of the process, which a forked engine inherits: no meta tensors."""
    before = dict(rotary_embedding._ROPE_DICT)
    try:
        yield
    finally:
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(before)


@contextmanager
def _single_rank() -> Iterator[None]:
    """Stand-ins for the process groups that this process does not have."""
    alone = SimpleNamespace(
        world_size=1, rank=0, local_rank=0, rank_in_group=0, ranks=[0], is_first_rank=True, is_last_rank=True
    )
    before = {name: getattr(parallel_state, name) for name in _GROUPS if hasattr(parallel_state, name)}
    for name, group in before.items():
        if group is None:
            setattr(parallel_state, name, alone)
    try:
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)
