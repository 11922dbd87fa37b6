"""Graphs captured in parts, with PyTorch operations recorded and repeated in place of CUDA's graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nnsight_async.worker.copies import Copier
from nnsight_async.worker.hooks import Hooks
from nnsight_async.worker.runners.tapped import TappedGraph, addresses, replaced_operations

WIDTH = 4
TOKENS = 6


class _Recording(TorchDispatchMode):
    """Stands for ``torch.cuda.CUDAGraph``: what is captured is run again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, output))
        return output

    def capture_begin(self, **settings: Any) -> None:
        assert settings == {"pool": None, "capture_error_mode": "thread_local"}
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        for func, args, kwargs, output in self.calls:
            again = func(*args, **kwargs)
            if isinstance(output, torch.Tensor) and again is not output:
                output.copy_(again)


#: How many tokens of the batch are real, as attention is told by a step's metadata and not by what it is given.
_real = TOKENS


@torch.library.custom_op("nnsight_async_test::attend", mutates_args=("output",))
def _attend(query: torch.Tensor, output: torch.Tensor, layer: str, scale: torch.Tensor | None = None) -> None:
    output[:_real] = query[:_real].cumsum(0) * (2 if layer == "first" else 3)


class _Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query = self.project(hidden)
        output = torch.zeros_like(query)
        torch.ops.nnsight_async_test.attend(query, output, self.name, scale=None)
        return hidden + output


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer("first"), _Layer("second")])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[_Recording]:
    made: list[_Recording] = []

    def make() -> _Recording:
        made.append(_Recording())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    return made


@torch.no_grad()
def _captured(model: nn.Module, hidden: torch.Tensor, seen: Callable[[Any, Any], None], split: bool) -> TappedGraph:
    graph = TappedGraph(None, Copier().copies)
    tap: list[Callable[[Any, Any], None]] = [lambda key, value: graph.call(lambda: seen(key, value))]
    hooks = Hooks(dict(model.named_modules()), lambda key, value: tap[0](key, value))
    hooks.add(("layers.0", "out"))
    hooks.add(("layers.1.project", "in"))
    with replaced_operations(["nnsight_async_test::attend", "nnsight_async_test::none"], graph.run if split else _call):
        graph.begin()
        graph.output = model(hidden)
        graph.end()
    hooks.clear()
    return graph


def _call(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return operation(*args, **kwargs)


@torch.no_grad()
def test_a_replay_is_the_pass_on_what_is_in_its_memory_now(
    graphs: list[_Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, hidden = _Model(), torch.randn(TOKENS, WIDTH)
    shown: list[tuple[Any, Any]] = []

    def seen(key: Any, value: Any) -> None:
        shown.append((key, value))
        if key == ("layers.0", "out") and len(shown) > 2:
            value += 1.0  # as a block would: what comes after it in the pass goes on from that

    graph = _captured(model, hidden, seen, split=True)
    assert shown == []  # nothing is shown while it is captured
    assert len(graphs) == 5  # two taps and two operations are between five parts
    operation = torch.ops.nnsight_async_test.attend
    for real in (TOKENS, 4, 1):
        monkeypatch.setattr(f"{__name__}._real", real)
        hidden.copy_(torch.randn(TOKENS, WIDTH))
        graph.replay()
        first = model.layers[0](hidden)
        if len(shown) > 2:
            first = first + 1.0
        expected = model.layers[1](first)
        assert torch.equal(graph.output[:real], expected[:real])
        (output, input_) = shown[-2:]
        assert [output[0], input_[0]] == [("layers.0", "out"), ("layers.1.project", "in")]
        assert torch.equal(output[1][:real], first[:real])
        assert torch.equal(input_[1][0][0][:real], first[:real])
    assert torch.ops.nnsight_async_test.attend is operation


@torch.no_grad()
def test_operations_that_are_not_left_out_are_captured_as_they_were(graphs: list[_Recording]) -> None:
    model, hidden = _Model(), torch.randn(TOKENS, WIDTH)
    graph = _captured(model, hidden, lambda key, value: None, split=False)
    assert len(graphs) == 3
    hidden.copy_(torch.randn(TOKENS, WIDTH))
    graph.replay()
    assert torch.equal(graph.output, model(hidden))


def test_an_operation_comes_back_when_something_fails() -> None:
    operation = torch.ops.nnsight_async_test.attend
    with pytest.raises(RuntimeError, match="in the middle"):
        with replaced_operations(["nnsight_async_test::attend"], _call):
            assert torch.ops.nnsight_async_test.attend is not operation
            raise RuntimeError("in the middle")
    assert torch.ops.nnsight_async_test.attend is operation


def test_the_inputs_of_a_graph_are_told_by_their_addresses() -> None:
    one, other = torch.zeros(3), torch.zeros(3)
    assert addresses({"ids": one[:2], "embeds": None}) == addresses({"ids": one, "embeds": None})
    assert addresses({"ids": one}) != addresses({"ids": other})
    assert addresses({"ids": one, "positions": other}) != addresses({"ids": one})
