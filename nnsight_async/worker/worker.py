"""vLLM's worker, with blocks run beside its forward passes."""

from __future__ import annotations

import ast
import signal
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec
import torch
from torch import nn
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform

from nnsight_async.errors import CaptureError
from nnsight_async.protocol import (
    CONFIG_KEY,
    EXTRA_ARG,
    STOPPED_BY_ERROR,
    STOPPED_BY_TRACER,
    BlockState,
    Message,
    Traced,
    WorkerSettings,
)
from nnsight_async.saving import RESULT
from nnsight_async.tracing import CompiledProgram, Program, compile_program, loads
from nnsight_async.tree import ModuleRef, install_reader
from nnsight_async.worker.block import Block
from nnsight_async.worker.controls import Controls
from nnsight_async.worker.faces import ModelFace, TracerFace
from nnsight_async.worker.hooks import Hooks, record_order
from nnsight_async.worker.interleaver import Interleaver
from nnsight_async.worker.layouts import LayoutRecorder
from nnsight_async.worker.mailbox import Mailbox
from nnsight_async.worker.mutation import Mutation, find_mutation
from nnsight_async.worker.ranks import Ranks
from nnsight_async.worker.rows import Rows
from nnsight_async.worker.runners import Runner
from nnsight_async.worker.runners.v1 import V1Runner
from nnsight_async.worker.saving import saving_functions

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base
elif current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Base
else:
    from vllm.v1.worker.gpu_worker import Worker as _Base

logger = init_logger(__name__)


class TracingWorker(_Base):
    """The platform's own worker; its steps run the blocks of the traced requests in them."""

    _session: Session | None = None

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, then learn the order of the forward pass and take requests' blocks from there on."""
        times = super().compile_or_warm_up_model()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the engine core: an interrupt is the client's to handle
        settings = msgspec.convert(self.vllm_config.additional_config[CONFIG_KEY], WorkerSettings)
        group = get_tp_group()
        ranks = Ranks(group, self.device) if group.world_size > 1 else None
        self._session = Session(V1Runner(self.model_runner), settings, self.model_config, ranks)
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step's forward pass."""
        assert self._session is not None
        self._session.begin_step(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Draw a step's tokens, and post what its blocks saved."""
        assert self._session is not None
        return self._session.end_step(super().sample_tokens(grammar_output))

    def nnsight_async_result(self, request_id: str, result: bytes | None) -> None:
        """Give the block of a finished request the RequestOutput that it waits for, and post what it then saved.

        With None there is nobody left to give it for: the block is freed.
        """
        assert self._session is not None
        self._session.resolve_result(request_id, result)

    def nnsight_async_message(self, request_id: str, message: bytes) -> int:
        """Apply a message to a request; returns the step from which it holds, or -1 if the request is over."""
        assert self._session is not None
        return self._session.take_message(request_id, message)

    def nnsight_async_live(self) -> int:
        """How many blocks the worker holds."""
        assert self._session is not None
        return len(self._session.interleaver.blocks)

    def shutdown(self) -> None:
        """Close the way up, then shut down as vLLM does."""
        if self._session is not None:
            if self._session.mailbox is not None:
                self._session.mailbox.close()
            self._session = None
        super().shutdown()


class Session:
    """Everything of ours in one worker: the tree, the blocks, the mailbox, and the runner they are attached to.

    Every rank of a tensor-parallel engine has a session and runs every block; only rank 0 posts what they save.
    """

    def __init__(self, runner: Runner, settings: WorkerSettings, model_config: Any, ranks: Ranks | None = None) -> None:
        self._runner = runner
        modules: dict[str, nn.Module] = dict(runner.model.named_modules(remove_duplicate=False))
        self._hooks = Hooks(modules, self._seen)
        self.interleaver = Interleaver(self._hooks.add, ranks)
        self._root = ModuleRef(runner.model)
        self._tokenizer = cache(lambda: _load_tokenizer(model_config))
        self._model = ModelFace(self._root, self.interleaver, self._tokenizer)
        self._tracer = TracerFace(self.interleaver)
        posts = ranks is None or ranks.rank == 0
        self.mailbox = Mailbox(settings.mailbox, self.interleaver, self._reference) if posts else None
        self._vocabulary: int = model_config.get_vocab_size()
        self._result: Any = None  # the RequestOutput that a block is being given
        self._programs: dict[str, tuple[CompiledProgram, Mutation]] = {}
        self._saving = saving_functions(self.interleaver)
        install_reader(self.interleaver)
        try:
            self._record(modules, ranks)
        except Exception:  # then a location that is out of order is told at the end of its step, not at once
            if ranks is not None:  # but shares of values that nothing is known of cannot be put together
                raise
            logger.warning("the order of the model's forward pass could not be recorded", exc_info=True)
        runner.attach(self)

    def _record(self, modules: dict[str, nn.Module], ranks: Ranks | None) -> None:
        """Learn, from one forward pass, in what order it comes to the locations and how ranks share their values."""
        recorder = LayoutRecorder(modules, get_tp_group()) if ranks is not None else None
        with recorder or nullcontext():
            order = record_order(modules, self._dummy_forward, recorder.see if recorder is not None else None)
        self.interleaver.learn_order(order)
        if ranks is not None and recorder is not None:
            ranks.learn_layouts(recorder.layouts)

    @torch.inference_mode()
    def _dummy_forward(self) -> None:
        self._runner.dummy_forward()

    # Between steps.

    def begin_step(self, scheduler_output: Any) -> None:
        """Take in the step's new requests and let go of those that are over."""
        interleaver = self.interleaver
        if scheduler_output.finished_req_ids:
            interleaver.drop(scheduler_output.finished_req_ids, keep_for_result=True)
        if not interleaver.blocks:
            self._hooks.clear()
        for request in scheduler_output.scheduled_new_reqs:
            params = request.sampling_params
            traced = params.extra_args.get(EXTRA_ARG) if params is not None and params.extra_args else None
            if traced is not None and request.req_id not in interleaver.blocks:
                interleaver.blocks[request.req_id] = self._make_block(request.req_id, traced)
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
            self.mailbox.post(blocks)
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

    def take_message(self, request_id: str, message: bytes) -> int:
        """Apply a message to a request; returns the step from which it holds, or -1 if the request is over."""
        block = self.interleaver.blocks.get(request_id)
        if block is None:
            return -1
        block.controls.apply(msgspec.msgpack.decode(message, type=Message))
        return block.step + 1

    # In a step; called by the runner's adapter.

    def before_forward(self, rows: dict[str, Rows], tokens: int) -> None:
        """Run the step's blocks up to their first locations."""
        blocks = self.interleaver.blocks
        traced = {request_id: place for request_id, place in rows.items() if request_id in blocks}
        for request_id, place in traced.items():
            if blocks[request_id].step >= 0 and place.stop - place.start > 1:
                # A preempted request computes all its tokens again; only the last is new to its block.
                traced[request_id] = Rows(place.stop - 1, place.stop, place.index)
        self.interleaver.begin(traced, tokens, len(rows))

    def after_forward(self) -> None:
        """The modules that compute the logits come next."""
        self.interleaver.end_forward()

    def on_logits(self, logits: torch.Tensor) -> None:
        """Show each request its logits."""
        self.interleaver.visit_logits(logits)

    def on_samples(self, samples: torch.Tensor) -> None:
        """Show each request its sampled token."""
        self.interleaver.visit_samples(samples)

    def _seen(self, key: tuple[str, str], value: Any) -> None:
        self.interleaver.visit(key, value)

    # Programs and values.

    def _make_block(self, request_id: str, traced: bytes) -> Block:
        namespace: dict[str, Any] = {"__name__": "__nnsight_async_block__"}
        controls = Controls(self._vocabulary)
        try:
            message = msgspec.msgpack.decode(traced, type=Traced)
            block = Block(request_id, *self._program(message), namespace, controls)
            namespace.update(loads(message.values, self._resolve))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            block = Block(request_id, *_NO_PROGRAM, namespace, controls)
            block.fail(CaptureError(f"the block and the values it reads could not be rebuilt in the worker: {text}"))
        namespace.update(self._saving)
        return block

    def _program(self, message: Traced) -> tuple[CompiledProgram, Mutation]:
        """A request's program, compiled when it is first seen, and what it may change in place."""
        known = self._programs.get(message.digest)
        if known is None:
            program = msgspec.msgpack.decode(message.program, type=Program)
            known = (compile_program(program), find_mutation(ast.parse(program.wrapped)))
            self._programs[message.digest] = known
            if len(self._programs) > _MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        return known

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
        if value is RESULT or (value is self._result and value is not None):
            return ("result",)
        return None


#: How many compiled programs are kept, the oldest going first.
_MOST_PROGRAMS = 1024
#: Stands in for a program that could not be compiled.
_NO_PROGRAM = (
    CompiledProgram(
        compile("", "<block>", "exec"), Program("", "<block>", 1, "", (), (), (), "", None, 0), frozenset()
    ),
    Mutation(False),
)


def _stop_reason(block: Block) -> str | None:
    """Why a request ends at this step, if it does."""
    if block.state is BlockState.FAILED:
        return STOPPED_BY_ERROR
    return STOPPED_BY_TRACER if block.controls.stopped else None


def _load_tokenizer(model_config: Any) -> Any:
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config)
