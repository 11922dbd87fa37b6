"""CUDA graphs that break where blocks look, captured while the engine runs.

A tapped graph is a list of what a replay does in turn: replay a part of the forward pass, call back at a location,
replay the next part. It is captured by running the model's forward once under stream capture, with the wrappers of the
awaited modules ending the capture of one part and beginning that of the next.

A decode step's graph has attention inside, as in vLLM's FULL graphs, from which everything else is taken: their static
input buffers, their attention metadata, their memory pool and the buffer of hidden states that they leave. So
``run_fullgraph`` can replay the one in place of the other. Where a location is only captured, by ``tracer.cache``, no
part ends: the graph copies it.

The graph of a step with prompts in it leaves attention out, as vLLM's PIECEWISE graphs do: what attention does there
depends on how long each prompt is. It ends a part at each of the operations that vLLM splits compiled models at, which
are then run on the memory of the parts around them.

Seams on vLLM 0.32: ``ModelCudaGraphManager.capture`` makes a function that prepares a forward of a size and runs it,
through ``run_pw_graph`` if the size is one of steps with prompts; attention layers call their operations as
``torch.ops.vllm.<name>``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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
    """A forward pass captured in parts, with calls between them.

    ``copies`` is what a replay leaves of locations, ``inputs`` where in memory it reads what a step hands to the model,
    and ``output`` what it leaves of the pass; the last two only where those are not the runner's own.
    """

    def __init__(self, pool: Any, copies: Copies) -> None:
        self.copies = copies
        self.inputs: dict[str, int] = {}
        self.output: Any = None
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

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function here that must not be captured, and in every replay; returns what it returned now.

        It has to leave its results in what it is given.
        """
        shown, named = _weakly(args), _weakly(kwargs)
        self.end()
        result = function(*args, **kwargs)
        self._turns.append(lambda: function(*shown, **named))
        self.begin()
        return result

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
        self._split_at = _operations_left_out(self._manager.compilation_config)

    def capture(self, taps: Taps, size: Any, diverted: Any) -> TappedGraph:
        """Capture a graph of a size that vLLM has a FULL graph of, or of one that is PIECEWISE.

        ``diverted(keys, tap)`` is a context in which the model's forward calls ``tap(key, value)`` at locations. To be
        called between steps; waits for the device.
        """
        manager, copier = self._manager, Copier()
        whole = size.cg_mode is CUDAGraphMode.FULL
        keys = {(tap[0], tap[1]) for tap in taps}
        copied = {(tap[0], tap[1]) for tap in taps if tap[2:] == (COPIED,)}
        torch.cuda.synchronize()
        with torch.inference_mode(), graph_capture(device=manager.device), _no_collection():
            with diverted(copied, copier.measure):
                self._forward_of(size, warmup=True)(CUDAGraphMode.NONE if whole else CUDAGraphMode.PIECEWISE)
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

                split = nullcontext() if whole else self._split(graph)
                with diverted(keys, tap), split:
                    graph.begin()
                    try:
                        forward(size.cg_mode)
                        get_offloader().join_after_forward()
                    finally:
                        graph.end()
        torch.cuda.synchronize()
        return graph

    @contextmanager
    def _split(self, graph: TappedGraph) -> Iterator[None]:
        """Leave out of a graph what one for steps with prompts cannot have in it; note what it reads and leaves."""

        def run(model: Any, inputs: dict[str, Any]) -> Any:
            graph.inputs = addresses(inputs)
            output = model(**inputs)
            graph.output = _weakly(output)
            return output

        own = self._manager.run_pw_graph
        self._manager.run_pw_graph = run
        try:
            with replaced_operations(self._split_at, graph.run):
                yield
        finally:
            self._manager.run_pw_graph = own


def addresses(inputs: dict[str, Any]) -> dict[str, int]:
    """Where in memory the tensors are that are handed to a model."""
    return {name: value.data_ptr() for name, value in inputs.items() if isinstance(value, torch.Tensor)}


@contextmanager
def replaced_operations(names: Iterable[str], call: Callable[..., Any]) -> Iterator[None]:
    """Have ``torch.ops.<namespace>.<name>(...)`` become ``call(operation, ...)``.

    Args:
        names: the operations, as ``namespace::name``; one that is not registered is passed over.
        call: called with the operation and its arguments; returns what stands for its result.
    """
    with ExitStack() as stack:
        for qualified in names:
            namespace, _, name = qualified.partition("::")
            operations = getattr(torch.ops, namespace)
            if hasattr(operations, name):
                operation = getattr(operations, name)  # from here on an attribute of the namespace
                stack.callback(setattr, operations, name, operation)
                setattr(operations, name, _Operation(operation, call))
        yield


class _Operation:
    """An operation of PyTorch's that is called in another way, and is itself in all else."""

    def __init__(self, operation: Any, call: Callable[..., Any]) -> None:
        self._operation = operation
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._operation, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)


def _operations_left_out(config: Any) -> list[str]:
    """The operations that vLLM splits models at, without those that write keys and values to their slots.

    These read the slots from a buffer of vLLM's, so a graph can have them inside.
    """
    names = config.splitting_ops or config._attention_ops
    return [name for name in names if not name.endswith("_cache_update")]


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
