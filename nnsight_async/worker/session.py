"""Everything of ours in one worker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import cloudpickle
import msgspec
import torch
from torch import nn
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from nnsight_async.errors import CaptureError
from nnsight_async.protocol import (
    EDITS_ARG,
    EXTRA_ARG,
    STOPPED_BY_ERROR,
    STOPPED_BY_TRACER,
    BlockState,
    Message,
    TierCounts,
    Traced,
    WorkerSettings,
)
from nnsight_async.saving import RESULT, CacheMark
from nnsight_async.tracing import loads
from nnsight_async.tree import ModuleRef, install_reader
from nnsight_async.worker.block import Block, Key
from nnsight_async.worker.controls import Controls
from nnsight_async.worker.copies import Copies
from nnsight_async.worker.faces import ModelFace, TracerFace
from nnsight_async.worker.hooks import Hooks, Instead, record
from nnsight_async.worker.interleaver import Interleaver
from nnsight_async.worker.layouts import LayoutRecorder
from nnsight_async.worker.loops import Gatherer
from nnsight_async.worker.mailbox import Mailbox
from nnsight_async.worker.programs import NO_PROGRAM, Programs, keep_newest
from nnsight_async.worker.ranks import Ranks
from nnsight_async.worker.reader import WorkerReader, mentions_operations, seen_with_skips
from nnsight_async.worker.rows import Rows
from nnsight_async.worker.runners import Runner
from nnsight_async.worker.saving import saving_functions
from nnsight_async.worker.skips import Outputs, Skips
from nnsight_async.worker.taps import Taps

logger = init_logger(__name__)


class Session:
    """The tree, the blocks, the mailbox, and the runner they are attached to.

    Every rank of a tensor-parallel engine has a session and runs every block; only rank 0 posts what they save.
    """

    def __init__(
        self,
        runner: Runner,
        settings: WorkerSettings,
        model_config: Any,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self._runner = runner
        self._diverted: Callable[[Key, Any], None] | None = None
        modules: dict[str, nn.Module] = dict(runner.model.named_modules(remove_duplicate=False))
        self._hooks = Hooks(modules, self._seen, lambda: self.interleaver.busy)
        self.interleaver = Interleaver(self._hooks.add, ranks, model_config.get_vocab_size())
        outputs = Outputs(modules)
        self._skips = Skips(self.interleaver, outputs)
        self._root = ModuleRef(runner.model)
        self._tokenizer = cache(lambda: _load_tokenizer(model_config))
        self._model = ModelFace(self._root, self.interleaver, self._tokenizer)
        self._tracer = TracerFace(self.interleaver)
        posts = ranks is None or ranks.rank == 0
        self.mailbox = Mailbox(settings.mailbox, self.interleaver, self._reference, device) if posts else None
        self.programs = Programs()
        self._device = device
        self._early: OrderedDict[str, list[bytes]] = OrderedDict()  # messages that came before their requests
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._vocabulary: int = model_config.get_vocab_size()
        self._result: Any = None  # the RequestOutput that a block is being given
        gatherer = Gatherer(self.interleaver, lambda: self._skips.any)
        self._functions = saving_functions(self.interleaver) | gatherer.functions()
        install_reader(WorkerReader(self.interleaver, self._hooks, self._skips, runner.call_context))
        try:
            self._learn(modules, outputs, ranks)
        except Exception:  # then a location that is out of order is told at the end of its step, not at once
            if ranks is not None:  # but shares of values that nothing is known of cannot be put together
                raise
            logger.warning("the order of the model's forward pass could not be recorded", exc_info=True)
        runner.attach(self, [frozenset(keys) for keys in settings.taps])

    @torch.inference_mode()
    def _learn(self, modules: dict[str, nn.Module], outputs: Outputs, ranks: Ranks | None) -> None:
        """Run a forward pass of one token.

        It tells in what order it comes to the locations, what they hold, and how ranks share that.
        """
        order: list[tuple[str, str]] = []
        recorder = LayoutRecorder(modules, get_tp_group()) if ranks is not None else None

        def note(key: tuple[str, str], value: Any) -> None:
            order.append(key)
            if key[1] == "out":
                outputs.learn(key[0], value)
            if recorder is not None:
                recorder.see(key, value)

        with recorder or nullcontext():
            record(modules, self._runner.dummy_forward, note)
        self._hooks.learn_order(order)
        self.interleaver.order.learn(order)
        if ranks is not None and recorder is not None:
            ranks.learn_layouts(recorder.layouts)

    def tier_counts(self) -> TierCounts:
        """How the steps so far were run."""
        return self._runner.tier_counts()

    # Between steps.

    def begin_step(self, scheduler_output: Any) -> None:
        """Take in the step's new requests and let go of those that are over."""
        interleaver = self.interleaver
        if scheduler_output.finished_req_ids:
            interleaver.drop(scheduler_output.finished_req_ids, keep_for_result=True)
            self._note_ended(scheduler_output.finished_req_ids)
        if not interleaver.blocks:
            self._hooks.clear()
        for request in scheduler_output.scheduled_new_reqs:
            params = request.sampling_params
            traced = params.extra_args.get(EXTRA_ARG) if params is not None and params.extra_args else None
            if traced is not None and request.req_id not in interleaver.blocks:
                block = self._make_block(request.req_id, traced)
                block.edits = EDITS_ARG in params.extra_args
                interleaver.blocks[request.req_id] = block
        self._runner.scheduled = scheduler_output if interleaver.blocks else None

    def end_step(self, output: Any) -> Any:
        """Post what the step's blocks saved; returns vLLM's output, with the step's stops on it."""
        if self._runner.scheduled is None:
            return output
        self._runner.scheduled = None
        blocks = self.interleaver.finish()
        if not blocks:
            return output
        if self.mailbox is not None:
            self.mailbox.post(blocks, self.interleaver.caching.groups, self.interleaver.draws)
        stops = {block.request_id: reason for block in blocks if (reason := _stop_reason(block)) is not None}
        if stops:
            self._runner.mark_stops(output, stops)
        return output

    @torch.inference_mode()
    def resolve_result(self, request_id: str, result: bytes | None) -> None:
        """Run the rest of a block that waits for its request's result, post it, and free the block."""
        if result is None:
            self.interleaver.drop([request_id])
            return
        self._result = cloudpickle.loads(result)
        block = self.interleaver.resolve_result(request_id, self._result)
        if block is not None:
            if self.mailbox is not None:
                self.mailbox.post([block], final=True)
            self.interleaver.drop([request_id])
        self._result = None

    def take_message(self, request_ids: Sequence[str], data: bytes) -> list[int] | str:
        """Apply a message to requests; returns the step from which it holds in each, or -1 where a request is over.

        A request that has not come yet gets it when it comes. A text says why the message could not be applied.
        """
        steps = []
        try:
            for request_id in request_ids:
                block = self.interleaver.blocks.get(request_id)
                if request_id in self._ended:
                    steps.append(-1)
                elif block is None:
                    self._early.setdefault(request_id, []).append(data)
                    keep_newest(self._early, _MOST_EARLY)
                    steps.append(0)
                else:
                    block.controls.apply(msgspec.msgpack.decode(data, type=Message))
                    steps.append(block.step + 1)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return steps

    def _note_ended(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._ended[request_id] = None
            self._early.pop(request_id, None)
        keep_newest(self._ended, _MOST_ENDED)

    # In a step; called by the runner's adapter.

    def before_forward(self, rows: dict[str, Rows], tokens: int) -> None:
        """Run the step's blocks up to their first locations."""
        blocks = self.interleaver.blocks
        traced = {request_id: place for request_id, place in rows.items() if request_id in blocks}
        for request_id, place in traced.items():
            if blocks[request_id].step >= 0 and place.stop - place.start > 1:
                # A preempted request computes all its tokens again; only the last is new to its block.
                traced[request_id] = Rows(place.stop - 1, place.stop, place.index)
        self._skips.begin()
        self.interleaver.begin(traced, tokens, len(rows))

    def wanted(self) -> Taps | None:
        """What blocks and caches look at in the coming pass; None where they may ask for anything."""
        return self.interleaver.wanted()

    def note_pass(self) -> None:
        """The coming pass shows only what was expected."""
        self.interleaver.note_pass()

    def unserved(self) -> bool:
        """Whether that was too little."""
        return self.interleaver.unserved() or self._skips.pending

    def begin_again(self) -> None:
        """Then it is run once more, and shows everything."""
        self.interleaver.begin_again()

    def at_tap(self, key: Key, value: Any) -> None:
        """A graph has come to a location that it breaks at."""
        if key[1] == "out":
            self._skips.replace(key[0], value)
        self.interleaver.visit(key, value)

    def take_copies(self, copies: Copies) -> None:
        """A graph has copied what only caches look at."""
        self.interleaver.take_copies(copies)

    @contextmanager
    def diverted(self, keys: Collection[Key], tap: Callable[[Key, Any], None]) -> Iterator[None]:
        """Have a forward pass that is no step of anybody's show locations to ``tap`` instead of to the blocks."""
        wanted = frozenset(keys)
        for key in wanted:
            self._hooks.add(key)
        self._diverted = lambda key, value: tap(key, value) if key in wanted else None
        try:
            yield
        finally:
            self._diverted = None

    def after_forward(self) -> None:
        """The modules that compute the logits come next."""
        self.interleaver.end_forward()

    def on_logits(self, logits: torch.Tensor) -> None:
        """Show each request its logits."""
        self.interleaver.visit_logits(logits)

    def on_samples(self, samples: torch.Tensor) -> None:
        """Show each request its sampled token."""
        self.interleaver.visit_samples(samples)

    def _seen(self, key: Key, value: Any) -> Instead | None:
        if self._diverted is not None:
            self._diverted(key, value)
            return None
        return seen_with_skips(self.interleaver, self._skips, key, value)

    # Programs and values.

    def _make_block(self, request_id: str, traced: bytes) -> Block:
        namespace: dict[str, Any] = {"__name__": "__nnsight_async_block__"}
        controls = Controls(self._vocabulary, self._unpack_live)
        try:
            message = msgspec.msgpack.decode(traced, type=Traced)
            cast = getattr(torch, message.dtype) if message.dtype else None
            block = Block(request_id, *self.programs.get(message.digest), namespace, controls, cast)
            block.places = self.programs.places(message.digest)
            namespace.update(loads(message.values, self._resolve))
            for early in self._early.pop(request_id, ()):
                controls.apply(msgspec.msgpack.decode(early, type=Message))
            if mentions_operations(block.program.code, namespace):
                self._hooks.expect_operations()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            block = Block(request_id, *NO_PROGRAM, namespace, controls)
            block.fail(CaptureError(f"the block and the values it reads could not be rebuilt in the worker: {text}"))
        namespace.update(self._functions)
        return block

    def _unpack_live(self, data: bytes) -> dict[str, Any]:
        """Live values, their tensors on the model's device."""
        return {name: _on_device(value, self._device) for name, value in loads(data, self._resolve).items()}

    def _resolve(self, reference: Any) -> object:
        kind, *rest = reference
        if kind == "module":
            return self._root.at(rest[0])
        if kind == "tokenizer":
            return self._tokenizer()
        return {"model": self._model, "tracer": self._tracer}[kind]

    def _reference(self, value: object) -> tuple[Any, ...] | None:
        if type(value) is ModuleRef:
            return ("module", value._path)
        if value is self._model or value is self._tracer:
            return ("model",) if value is self._model else ("tracer",)
        if isinstance(value, CacheMark):
            return ("cache", value.number, value.device)
        if value is RESULT or (value is self._result and value is not None):
            return ("result",)
        return None


def _on_device(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``, through lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_on_device(item, device) for item in value)
    if type(value) is dict:
        return {key: _on_device(item, device) for key, item in value.items()}
    return value


#: How many requests' ends are remembered, so that a message to one that is over is told from one that came early.
_MOST_ENDED = 1 << 16
#: How many requests may have messages before they have come.
_MOST_EARLY = 1 << 16


def _stop_reason(block: Block) -> str | None:
    """Why a request ends at this step, if it does."""
    if block.state is BlockState.FAILED:
        return STOPPED_BY_ERROR
    return STOPPED_BY_TRACER if block.controls.stopped else None


def _load_tokenizer(model_config: Any) -> Any:
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config)
