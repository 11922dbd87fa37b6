"""How the V2 runner runs each step: in vLLM's whole graph, in a tapped graph, or eagerly.

The choice is made where vLLM makes its own, in ``CudaGraphManager.dispatch``, when the step's blocks have run up to
their first locations. Where none of them waits for a location of the forward pass, it stays vLLM's. Else the step is
run in a graph that breaks at what its blocks look at, if there is one or it is time for one (``taps.py`` says when),
and eagerly if not.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.offloader.base import get_offloader
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from nnsight_async.protocol import TierCounts
from nnsight_async.worker.runners import StepEvents
from nnsight_async.worker.runners.compiled import CompiledCode
from nnsight_async.worker.runners.tapped import Capturer, TappedGraph, addresses
from nnsight_async.worker.taps import Shelf, Taps

logger = init_logger(__name__)

#: Tapped graphs that are kept at most.
_MOST_GRAPHS: Final = 256
#: Bytes of the device's memory that are left alone: with less, a new graph takes an old one's place.
_SPARE: Final = 1 << 30
#: Whether steps with prompts in them get graphs too. Not yet run on a GPU, and so not without being asked for.
_PROMPTS: Final = os.environ.get("NNSIGHT_ASYNC_PROMPT_GRAPHS", "0") == "1"
#: For how many tokens: with more, the device takes longer than Python does to launch its work.
_PROMPT_SIZES: Final = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048)


class Tiers:
    """The choice between the tiers, for one runner. While ``forced()`` says so, everything is run eagerly."""

    def __init__(self, runner: Any, code: CompiledCode, forced: Callable[[], bool]) -> None:
        self._runner = runner
        self._code = code
        self._manager = runner.cudagraph_manager
        self._dispatch, self._run = self._manager.dispatch, self._manager.run_fullgraph
        self._run_pieces = self._manager.run_pw_graph
        self._events: StepEvents | None = None
        self._capturer: Capturer | None = None
        self._shelf: Shelf[BatchExecutionDescriptor, TappedGraph] = Shelf(self._capture, _MOST_GRAPHS)
        self._sizes: dict[BatchExecutionDescriptor, list[BatchExecutionDescriptor]] = {}
        self._prompt_sizes: list[BatchExecutionDescriptor] = []
        self._chosen: TappedGraph | None = None
        self._replaying = False
        self._forced = forced
        self._step: tuple[Any, Any, Any] | None = None  # what a second pass of the step needs
        self._counts = TierCounts()
        #: Whether the step in progress has blocks in it.
        self.traced = False
        self._manager.dispatch = self._choose

    def attach(self, events: StepEvents, taps: Sequence[Taps]) -> None:
        """Begin to take the steps' blocks into account."""
        self._events = events
        manager, runner = self._manager, self._runner
        manager.run_fullgraph = self._run_graph
        if not manager.graphs or not self._can_tap():
            return
        prepare = runner.model_state.prepare_attn

        def keeping_prepare(batch: Any, mode: Any, tables: Any, slots: Any, *args: Any, **kwargs: Any) -> Any:
            metadata = prepare(batch, mode, tables, slots, *args, **kwargs)
            self._step = batch, metadata, slots
            return metadata

        runner.model_state.prepare_attn = keeping_prepare
        self._code.use(True)  # vLLM looks whether there is compiled code
        self._capturer = Capturer(runner, self._visit)
        if _PROMPTS and not manager.use_breakable_cg:
            manager.run_pw_graph = self._run_prompts
            most = runner.max_num_tokens
            self._prompt_sizes = [
                BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, tokens, None)
                for tokens in _PROMPT_SIZES
                if tokens <= most
            ]
        for keys in taps:
            for size in [*manager.graphs, *self._prompt_sizes]:
                if self._shelf.add(keys, size) is None:
                    break

    def _can_tap(self) -> bool:
        runner = self._runner
        return (
            runner.vllm_config.parallel_config.world_size == 1
            and runner.lora_config is None
            and not runner.uses_inputs_embeds
            and not runner.use_aux_hidden_state_outputs
        )

    def counts(self) -> TierCounts:
        """How the steps so far were run, and which graphs there are."""
        graphs: dict[tuple[Taps, bool], list[int]] = {}
        for keys, size in self._shelf:
            graphs.setdefault((keys, size.cg_mode is not CUDAGraphMode.FULL), []).append(size.num_tokens)
        self._counts.graphs = [(sorted(keys), sorted(sizes), prompts) for (keys, prompts), sizes in graphs.items()]
        return self._counts

    # Where vLLM chooses a graph.

    def _choose(self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        traced, self.traced = self.traced, False
        self._chosen = None
        own: BatchExecutionDescriptor = self._dispatch(num_reqs, num_tokens, *args, **kwargs)
        eager = BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            num_active_loras=own.num_active_loras,
            num_ubatches=own.num_ubatches,
        )
        if self._forced():
            self._code.use(False)
            return eager
        wanted: Taps | None = frozenset()
        if traced:
            assert self._events is not None
            wanted = self._events.wanted()
        if wanted is not None and not wanted:
            self._code.use(True)
            if own.cg_mode is CUDAGraphMode.FULL:
                self._counts.whole += 1
            elif self._code or own.cg_mode is CUDAGraphMode.PIECEWISE:
                self._counts.plain += 1
            else:
                self._counts.eager += 1
            return own
        self._code.use(False)
        if wanted is not None and self._capturer is not None:
            found = self._pick(wanted, own, num_tokens)
            if found is not None:
                size, self._chosen = found
                self._counts.tapped += 1
                return size
        self._counts.eager += 1
        return eager

    def _pick(self, wanted: Taps, own: BatchExecutionDescriptor, tokens: int) -> Any:
        """A graph for a step of ``tokens`` tokens, for which vLLM would take ``own``; None where there is none."""
        if own.cg_mode is CUDAGraphMode.FULL:
            return self._shelf.pick(wanted, self._sizes_from(own))
        first = bisect_left(self._prompt_sizes, tokens, key=lambda size: size.num_tokens)
        sizes = [size for size in self._prompt_sizes[first:] if size.num_tokens <= 2 * tokens + 16]
        # Copies of all the tokens of prompts would be large; such a graph breaks where a cache looks as well.
        return self._shelf.pick(frozenset([tap[:2] for tap in wanted]), sizes) if sizes else None

    def _sizes_from(self, own: BatchExecutionDescriptor) -> list[BatchExecutionDescriptor]:
        """The size that vLLM would take, and then the larger ones that would do, up to twice as large."""
        sizes = self._sizes.get(own)
        if sizes is None:
            kind = own.uniform_token_count, own.max_query_len, own.num_active_loras, own.num_ubatches
            larger = [
                size
                for size in self._manager.graphs
                if (size.uniform_token_count, size.max_query_len, size.num_active_loras, size.num_ubatches) == kind
                and own.num_tokens < size.num_tokens <= 2 * own.num_tokens + 8
                and (size.num_reqs or 0) >= (own.num_reqs or 0)
            ]
            sizes = self._sizes[own] = [own, *sorted(larger, key=lambda size: size.num_tokens)]
        return sizes

    # Where vLLM replays it.

    def _run_graph(self, size: BatchExecutionDescriptor) -> Any:
        graph, self._chosen = self._chosen, None
        if graph is None:
            return self._run(size)
        graphs = self._manager.graphs
        own, graphs[size] = graphs[size], graph
        try:
            output, served = self._replay(graph, lambda: self._run(size))
        finally:
            graphs[size] = own
        if not served:
            self._run_again()
        return output

    def _run_prompts(self, model: Any, inputs: dict[str, Any]) -> Any:
        """The same where vLLM would run the pieces between attention, in the step's forward context."""
        graph, self._chosen = self._chosen, None
        if graph is None:
            return self._run_pieces(model, inputs)
        if graph.inputs != addresses(inputs):  # vLLM hands over other buffers than it did
            return model(**inputs)
        get_offloader().sync_prev_onload()
        _, served = self._replay(graph, graph.replay)
        if served:
            return graph.output
        self._again()
        return model(**inputs)

    def _replay(self, graph: TappedGraph, replay: Callable[[], Any]) -> tuple[Any, bool]:
        """Replay a graph; returns what that returned, and whether it has shown all that blocks asked for."""
        assert self._events is not None
        self._events.note_pass()
        self._replaying = True
        try:
            output = replay()
        finally:
            self._replaying = False
        if graph.copies.values:
            self._events.take_copies(graph.copies)
        return output, not self._events.unserved()

    def _visit(self, key: tuple[str, str], value: Any) -> None:
        assert self._events is not None
        if self._replaying:
            self._events.at_tap(key, value)

    def _run_again(self) -> None:
        """Run the step's forward pass once more, eagerly; its hidden states go where the graph's are."""
        assert self._step is not None
        runner, (batch, metadata, slots) = self._runner, self._step
        self._again()
        tokens = batch.num_tokens_after_padding
        inputs = {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "inputs_embeds": None,
            "intermediate_tensors": None,
            **runner.model_state.prepare_inputs(batch, runner.req_states),
        }
        with set_forward_context(
            metadata,
            runner.vllm_config,
            num_tokens=tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            batch_descriptor=BatchDescriptor(num_tokens=tokens),
            slot_mapping=build_slot_mappings_by_layer(slots, runner.kv_cache_config),
            is_padding=batch.is_padding,
        ):
            hidden = runner.model(**inputs)
        self._manager.hidden_states[: hidden.shape[0]].copy_(hidden)

    def _again(self) -> None:
        assert self._events is not None
        self._counts.again += 1
        self._events.begin_again()

    # Capturing.

    def _capture(self, keys: Taps, size: BatchExecutionDescriptor) -> TappedGraph | None:
        assert self._capturer is not None
        assert self._events is not None
        if torch.cuda.mem_get_info(self._manager.device)[0] < _SPARE and not self._shelf.drop_oldest():
            return None
        start = time.perf_counter()
        self._code.use(False)
        diverted: Callable[..., Any] = partial(self._events.diverted)
        try:
            graph = self._capturer.capture(keys, size, diverted)
        except Exception:
            logger.warning("a graph with breaks could not be captured; such steps run eagerly", exc_info=True)
            self._counts.refused += 1
            return None
        self._counts.captured += 1
        self._counts.capture_seconds += time.perf_counter() - start
        return graph
