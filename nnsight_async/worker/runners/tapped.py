"""CUDA graphs that break where blocks look, captured while the engine runs.

A tapped graph is a list of what a replay does in turn: replay a part of the forward pass, call back at a location,
replay the next part. It is captured by running the model's forward once under stream capture, with the wrappers of the
awaited modules ending the capture of one part and beginning that of the next. Where a location is only captured, by
``tracer.cache``, no part ends: the graph copies it. Attention stays inside, as in vLLM's FULL
graphs, from which everything else is taken: their static input buffers, their attention metadata, their memory pool and
the buffer of hidden states that they leave. So ``run_fullgraph`` can replay the one in place of the other.

Seams on vLLM 0.32: ``ModelCudaGraphManager.capture`` makes a function that prepares a forward of a size and runs it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.model_executor.offloader.base import get_offloader
from vllm.utils.torch_utils import weak_ref_tensor
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

from nnsight_async.worker.copies import Copier, Copies
from nnsight_async.worker.taps import COPIED, Taps


class TappedGraph:
    """A forward pass captured in parts, with calls between them; ``copies`` is what a replay leaves of locations."""

    def __init__(self, pool: Any, copies: Copies) -> None:
        self.copies = copies
        self._pool = pool
        self._turns: list[Callable[[], Any]] = []
        self._part: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        """Capture a part from here on, on the current stream."""
        self._part = torch.cuda.CUDAGraph()
        # Other threads go on waiting for copies meanwhile; that is no part of this, and no error.
        self._part.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """The part ends here."""
        part, self._part = self._part, None
        if part is not None:
            part.capture_end()
            self._turns.append(part.replay)

    def call(self, function: Callable[[], Any]) -> None:
        """Have a function called here in every replay."""
        self.end()
        self._turns.append(function)
        self.begin()

    def replay(self) -> None:
        """Run the pass, on the current stream."""
        for turn in self._turns:
            turn()


class Capturer:
    """Captures tapped graphs for one V2 runner.

    Args:
        runner: vLLM's runner, warmed up, with its own graphs captured.
        visit: called in replays as ``visit(key, value)``.
    """

    def __init__(self, runner: Any, visit: Callable[[tuple[str, str], Any], None]) -> None:
        self._manager = runner.cudagraph_manager
        self._visit = visit
        self._forward_of = _forward_factory(runner)

    def capture(self, taps: Taps, size: Any, diverted: Any) -> TappedGraph:
        """Capture a graph of the size of one of vLLM's own.

        ``diverted(keys, tap)`` is a context in which the model's forward calls ``tap(key, value)`` at locations. To be
        called between steps; waits for the device.
        """
        manager, copier = self._manager, Copier()
        keys = {(tap[0], tap[1]) for tap in taps}
        copied = {(tap[0], tap[1]) for tap in taps if tap[2:] == (COPIED,)}
        torch.cuda.synchronize()
        with torch.inference_mode(), graph_capture(device=manager.device), _no_collection():
            with diverted(copied, copier.measure):
                self._forward_of(size, warmup=True)(CUDAGraphMode.NONE)
            copier.allocate()
            forward = self._forward_of(size, warmup=False)
            get_offloader().sync_prev_onload()
            with capture_pool(manager.pool, manager.vllm_config) as pool:
                graph = TappedGraph(pool, copier.copies)

                def tap(key: tuple[str, str], value: Any) -> None:
                    if key in copied:
                        copier.fill(key, value)
                        return
                    # Weakly, as the pool's memory is the graph's, and the next part may use it again.
                    shown = _weakly(value)
                    graph.call(lambda: self._visit(key, shown))

                with diverted(keys, tap):
                    graph.begin()
                    try:
                        forward(CUDAGraphMode.FULL)
                        get_offloader().join_after_forward()
                    finally:
                        graph.end()
        torch.cuda.synchronize()
        return graph


def _forward_factory(runner: Any) -> Callable[..., Callable[[Any], None]]:
    """What ``ModelCudaGraphManager.capture`` gives its base class to capture."""
    made: list[Any] = []

    class Keeping(CudaGraphManager):
        def capture(self, create_forward_fn: Any, *args: Any, **kwargs: Any) -> None:
            made.append(create_forward_fn)

    class Asked(ModelCudaGraphManager, Keeping):
        pass

    manager = runner.cudagraph_manager
    own = manager.__class__
    manager.__class__ = Asked
    try:
        manager.capture(
            runner.model,
            runner.model_state,
            runner.input_buffers,
            runner.intermediate_tensors,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            use_aux_hidden_state_outputs=runner.use_aux_hidden_state_outputs,
        )
    finally:
        manager.__class__ = own
    factory: Callable[..., Callable[[Any], None]] = made[0]
    return factory


def _weakly(value: Any) -> Any:
    """``value`` with tensors that do not keep their memory, through tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return weak_ref_tensor(value) if value.is_cuda else value
    if type(value) in (tuple, list):
        return type(value)(map(_weakly, value))
    if type(value) is dict:
        return {name: _weakly(item) for name, item in value.items()}
    return value


@contextmanager
def _no_collection() -> Iterator[None]:
    """Freeing memory of the device's in the middle of a capture would break it."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
