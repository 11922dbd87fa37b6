"""Shares of tensor-parallel values: the arithmetic, and how a forward pass tells which values are shares."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear

from nnsight_async.worker.hooks import record
from nnsight_async.worker.layouts import LayoutRecorder
from nnsight_async.worker.ranks import Gathered
from nnsight_async.worker.shards import Plain, Segment, Sharded, assemble, column_segments, scatter, settle

HEAD = 4


def _split(parts: list[torch.Tensor], ranks: int) -> tuple[list[torch.Tensor], Sharded]:
    """Whole parts as every rank's share of them, as vLLM loads fused weights: heads fewer than ranks are repeated."""
    shares, widths, replicas = [], [], 1
    for part in parts:
        heads = part.shape[1] // HEAD
        repeats = max(1, ranks // heads)
        replicas = max(replicas, repeats)
        widths.append(part.shape[1] * repeats // ranks)
    for rank in range(ranks):
        pieces = []
        for part, width in zip(parts, widths, strict=True):
            start = rank * part.shape[1] // ranks // width * width
            pieces.append(part[:, start : start + width])
        shares.append(torch.cat(pieces, 1))
    return shares, column_segments(widths, replicas)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("heads", [(8, 8, 8), (8, 4, 4), (8, 2, 2), (8, 1, 1)])
def test_a_fused_layer_put_together_is_what_one_rank_would_hold(ranks: int, heads: tuple[int, ...]) -> None:
    parts = [torch.randn(5, count * HEAD) for count in heads]
    shares, layout = _split(parts, ranks)
    assert torch.equal(assemble(torch.stack(shares, 1), layout), torch.cat(parts, 1))


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_written_is_put_back_into_every_rank(ranks: int) -> None:
    shares, layout = _split([torch.randn(5, count * HEAD) for count in (8, 2, 2)], ranks)
    edited = assemble(torch.stack(shares, 1), layout) * 2 + 1
    expected, _ = _split(list(edited.split([8 * HEAD, 2 * HEAD, 2 * HEAD], 1)), ranks)
    for rank, share in enumerate(shares):
        scatter(edited, share, layout, rank, ranks)
        assert torch.equal(share, expected[rank])


def test_heads_are_put_together_and_taken_apart_along_their_own_dimension() -> None:
    whole = torch.randn(3, 8, HEAD)
    layout = Sharded((Segment(4 * HEAD),))
    shares = [whole[:, :4].clone(), whole[:, 4:].clone()]
    assert torch.equal(assemble(torch.stack(shares, 1), layout), whole)
    scatter(whole + 1, shares[1], layout, 1, 2)
    assert torch.equal(shares[1], whole[:, 4:] + 1)

    fused = Sharded((Segment(4 * HEAD), Segment(2 * HEAD, 2)))
    queries, keys = torch.randn(3, 8, HEAD), torch.randn(3, 2, HEAD)
    stacked = torch.stack([torch.cat([queries[:, :4], keys], 1), torch.cat([queries[:, 4:], keys], 1)], 1)
    assert torch.equal(assemble(stacked, fused), torch.cat([queries, keys], 1))
    with pytest.raises(ValueError, match="do not divide"):
        list(fused.along(5))


def test_summands_add_up_to_what_was_written_and_keep_their_bits_elsewhere() -> None:
    summands = [torch.randn(4, 6), torch.randn(4, 6)]
    untouched = [summand.clone() for summand in summands]
    before = summands[0] + summands[1]
    whole = before.clone()
    whole[1] = 7.0
    whole[2, 3] = torch.nan
    for rank, summand in enumerate(summands):
        settle(whole, before, summand, rank)
    torch.testing.assert_close(summands[0] + summands[1], whole, rtol=0, atol=0, equal_nan=True)
    for summand, old in zip(summands, untouched, strict=True):
        assert torch.equal(summand[[0, 3]], old[[0, 3]])
        assert torch.equal(summand[2, :3], old[2, :3])


class _Others:
    """A group in which all ranks hold what this one holds."""

    world_size = 2

    def all_gather(self, share: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([share, share], dim)


def test_heads_in_the_first_dimension_are_put_together_token_by_token() -> None:
    share = torch.randn(3 * 2, HEAD)  # three tokens of two heads
    gathered = Gathered(share, Sharded((Segment(2 * HEAD),), flattened=2), _Others())
    assert torch.equal(gathered.whole, share.view(3, 2, HEAD).repeat(1, 2, 1).view(12, HEAD))
    gathered.whole[6] = 7.0  # the second token's third head, which is rank 1's first
    gathered.put_back(1, 2)
    assert share[2].tolist() == [7.0] * HEAD
    assert not (share[[0, 1, 3, 4, 5]] == 7.0).any()


# Recording. Two ranks' worth of layers, in one process: only the shapes of rank 0 matter.


class _Group:
    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def all_gather(self, value: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([value, value], dim)


class _Column(ColumnParallelLinear):
    def __init__(self, size: int, widths: list[int]) -> None:
        nn.Module.__init__(self)
        self.tp_size, self.gather_output, self.output_partition_sizes = 2, False, widths
        self.weight = nn.Parameter(torch.randn(sum(widths), size), requires_grad=False)

    def forward(self, value: torch.Tensor) -> Any:
        return nn.functional.linear(value, self.weight), None


class _QKV(_Column, QKVParallelLinear):
    num_kv_head_replicas = 2


class _Row(RowParallelLinear):
    def __init__(self, size: int, width: int, group: _Group | None) -> None:
        nn.Module.__init__(self)
        self.tp_size, self.input_is_parallel, self.reduce_results, self.group = 2, True, group is not None, group
        self.weight = nn.Parameter(torch.randn(width, size), requires_grad=False)

    def forward(self, value: torch.Tensor) -> Any:
        value = nn.functional.linear(value, self.weight)
        return (self.group.all_reduce(value) if self.group is not None else value), None


class _Launched(nn.Module):
    """Fills its output by a kernel of its own, unseen."""

    def forward(self, queries: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        out = torch.empty(queries.shape)
        out.numpy()[:] = 1.0
        return out


class _Experts(MoERunner):
    def __init__(self, skip: bool) -> None:
        nn.Module.__init__(self)
        self.moe_config = SimpleNamespace(skip_final_all_reduce=skip, tp_size=2, ep_size=1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2


class _Attention(nn.Module):
    def __init__(self, group: _Group) -> None:
        super().__init__()
        self.qkv_proj = _QKV(8, [8, 4, 4])
        self.norm = nn.LayerNorm(4, elementwise_affine=False)
        self.latent = nn.Identity()
        self.flat = nn.Identity()
        self.attn = _Launched()
        self.o_proj = _Row(8, 8, group)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        query, key, other = self.qkv_proj(value)[0].split([8, 4, 4], -1)
        query, key = self.norm(query.view(1, 2, 4)).view(1, 8), self.norm(key.view(1, 1, 4)).view(1, 4)
        self.latent(value + 1)
        self.flat(query.reshape(-1, 4))
        out: torch.Tensor = self.o_proj(self.attn(query, key, other) * 2)[0]
        return out


class _Layer(nn.Module):
    """Attention and a gated layer beside it, whose sums are made whole together."""

    def __init__(self, group: _Group, skip: bool) -> None:
        super().__init__()
        self.attention = _Attention(group)
        self.gate_up = _Column(8, [6, 6])
        self.act = nn.GLU()
        self.down = _Row(6, 8, None)
        self.gated = nn.Identity()
        self.experts = _Experts(skip)
        self.group = group

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value + self.attention(value)
        summand = torch.sigmoid(value) * self.down(self.act(self.gate_up(value)[0]))[0]
        return self.group.all_reduce(self.gated(summand)) + self.experts(value)


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = _Column(8, [6, 6])
        self.act = nn.GLU()
        self.down = _Row(6, 8, None)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(value) * self.down(self.act(self.gate_up(value)[0]))[0]


class _Operation(nn.Module):
    """Calls a module from within an operation, as vLLM's experts do on a GPU: nothing inside it is seen."""

    def __init__(self, group: _Group) -> None:
        super().__init__()
        self.shared = _Gated()
        self.group = group

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            summand = self.shared(value)
        return self.group.all_reduce(summand + value)


def _record(make: Callable[[_Group], nn.Module]) -> tuple[dict[Any, Any], _Group]:
    group = _Group()
    layer = make(group)
    modules = dict(layer.named_modules(remove_duplicate=False))
    recorder = LayoutRecorder(modules, group)
    with torch.inference_mode(), recorder:
        record(modules, lambda: layer(torch.randn(1, 8)), recorder.see)
    return recorder.layouts, group


def test_what_lies_between_parallel_layers_is_told_from_the_pass() -> None:
    layouts, group = _record(lambda group: _Layer(group, skip=False))
    queries, keys = Sharded((Segment(8),)), Sharded((Segment(4, 2),))
    fused = Sharded((Segment(8), Segment(4, 2), Segment(4, 2)))
    gate_up = Sharded((Segment(6), Segment(6)))
    assert layouts == {
        ("attention.qkv_proj", "out"): (fused,),
        ("attention.norm", "in"): (queries,),
        ("attention.norm", "out"): (queries,),
        ("attention.flat", "in"): (Sharded((Segment(8),), flattened=2),),
        ("attention.flat", "out"): (Sharded((Segment(8),), flattened=2),),
        ("attention.attn", "in"): (queries, keys, keys),
        ("attention.attn", "out"): (queries,),
        ("attention.o_proj", "in"): (queries,),
        ("gate_up", "out"): (gate_up,),
        ("act", "in"): (gate_up,),
        ("act", "out"): (Sharded((Segment(6),)),),
        ("down", "in"): (Sharded((Segment(6),)),),
        ("down", "out"): (Plain.PARTIAL,),
        ("gated", "in"): (Plain.PARTIAL,),
        ("gated", "out"): (Plain.PARTIAL,),
    }
    assert not vars(group)  # the collectives are as they were


def test_experts_that_leave_their_sum_to_somebody_else_are_partial() -> None:
    layouts, _ = _record(lambda group: _Layer(group, skip=True))
    assert layouts["experts", "out"] == (Plain.PARTIAL,)


def test_what_happens_within_an_operation_is_told_from_its_modules() -> None:
    layouts, _ = _record(_Operation)
    assert layouts == {
        ("shared.gate_up", "out"): (Sharded((Segment(6), Segment(6))),),
        ("shared.act", "in"): (Sharded((Segment(6), Segment(6))),),
        ("shared.act", "out"): (Sharded((Segment(6),)),),
        ("shared.down", "in"): (Sharded((Segment(6),)),),
        ("shared.down", "out"): (Plain.PARTIAL,),
        ("shared", "out"): (Plain.PARTIAL,),
    }
