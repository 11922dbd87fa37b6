"""What has to be known of vLLM's own layers: where the keys and values are, and where a CPU keeps its weights."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from nnsight_async.errors import UnsupportedError

#: Rows of the identity that a packed weight is read off with at a time.
_ROWS: Final = 1024


def attention_in(module: nn.Module) -> str | None:
    """The path, below ``module``, of the first layer that keeps something from step to step (keys and values)."""
    for path, inner in module.named_modules():
        if isinstance(inner, AttentionLayerBase):
            return str(path)
    return None


def is_split(module: nn.Module) -> bool:
    """Whether a tensor-parallel rank has only its part of a module's parameters."""
    return isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, RoutedExperts))


def check_callable(module: nn.Module, path: str) -> None:
    """Raise if a block cannot call a module.

    Raises:
        UnsupportedError: it holds an attention layer, or is an output embedding, which vLLM never calls.
    """
    inner = attention_in(module)
    if inner is not None:
        raise UnsupportedError(
            f"{path or 'the model'} cannot be called in a block: it holds an attention layer "
            f"({'.'.join(filter(None, (path, inner)))}), which works on the KV cache of a whole step; call what is "
            "around it (norms, projections, the MLP), and compute attention from its queries and keys"
        )
    if isinstance(module, ParallelLMHead):
        raise UnsupportedError(
            f"{path} cannot be called by itself, vLLM uses its weights directly: "
            f"call model.logits_processor(model.{path}, hidden_states)"
        )


class NoKeyValues(dict[str, Any]):
    """Stands for a step's attention metadata in a call by a block: whoever looks a layer up in it is told."""

    def __missing__(self, layer: str) -> Any:
        raise UnsupportedError(
            f"a block called something that runs the attention layer {layer}, which works on the KV cache of a whole "
            "step; call what is around it, and compute attention from its queries and keys"
        )


def true_weight(module: nn.Module, name: str, value: torch.Tensor) -> torch.Tensor:
    """A module's tensor as the checkpoint has it.

    On a CPU vLLM packs a linear layer's weight away and leaves an empty one; it is read off by applying the layer to
    the identity, which gives its numbers exactly. Embeddings are padded to a multiple of 64 tokens; the padding is left
    out.
    """
    if name != "weight":
        return value
    if isinstance(module, LinearBase) and value.numel() == 0:
        return _unpack(module)
    if isinstance(module, VocabParallelEmbedding) and module.tp_size == 1 and not module.num_added_embeddings:
        return value[: module.org_vocab_size]
    return value


def _unpack(module: Any) -> torch.Tensor:
    size: int = getattr(module, "input_size_per_partition", module.input_size)
    columns = []
    for start in range(0, size, _ROWS):
        identity = torch.zeros(min(_ROWS, size - start), size, dtype=module.params_dtype)
        identity.diagonal(start).fill_(1)
        columns.append(module.quant_method.apply(module, identity, None))
    return torch.cat(columns).t().contiguous()
