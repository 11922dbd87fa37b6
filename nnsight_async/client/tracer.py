"""``model.trace(...)``: the context manager that takes a block in, and the tracer that it hands out."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Mapping
from concurrent.futures import CancelledError, Future
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec
import torch

from nnsight_async.client.invoke import Invoke
from nnsight_async.client.prompts import make_prompt
from nnsight_async.client.run import Run
from nnsight_async.client.sampling import check_settings, make_params
from nnsight_async.client.stream import Stream
from nnsight_async.client.unique import unique
from nnsight_async.errors import (
    NO_BARRIER,
    ArgumentError,
    CaptureError,
    ClosedError,
    OutsideBlockError,
    UnsupportedError,
)
from nnsight_async.protocol import EDITS_ARG, EXTRA_ARG, Traced
from nnsight_async.saving import RESULT, CacheMark
from nnsight_async.tracing import (
    BodySkip,
    Program,
    collect,
    dumps,
    find_block,
    find_edits,
    live_names,
    make_program,
    write_back,
)
from nnsight_async.tree import ModuleRef

if TYPE_CHECKING:
    from nnsight_async.model import VLLM


class _Block:
    """A block being taken in: from ``enter``, in the frame of its ``with``, to ``leave``, when it has been skipped."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._source = find_block(frame)
        self._program = make_program(self._source)
        self._skip = BodySkip(frame, self._source)

    def arm(self, entered: object) -> None:
        """Have the interpreter skip the body; the last thing done on entering. ``entered`` is what ``as`` binds."""
        self._skip.arm(entered)

    def leave(self, exc_type: type[BaseException] | None, exc: BaseException | None) -> bool:
        """Whether the body was skipped (or was empty), and not left by an exception of its own."""
        return self._skip.disarm(exc_type, exc) or exc is None

    @property
    def program(self) -> Program:
        """The block's program."""
        return self._program

    def extra_args(self, tracer: Tracer, dtype: str) -> dict[str, Any]:
        """The block as it travels, with the values it reads as they are now, and whether it may edit."""
        program = self._program
        reads = collect(self._frame, program.reads)
        values = dumps(reads, tracer._reference, where=self._source.where)
        edits = find_edits(program.wrapped, program.class_name).possible(reads)
        traced = msgspec.msgpack.encode(Traced(program.digest, values, dtype))
        return {EXTRA_ARG: traced, **({EDITS_ARG: True} if edits else {})}


class Tracer:
    """One trace: one prompt with its block, or several of them opened with :meth:`invoke`.

    Use it as ``with model.trace(prompt, **sampling) as tracer:``. The body is not run here but in the worker, beside
    the forward pass. Without a prompt the body is run here, and opens the invokes::

        with model.trace(temperature=0.0) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    token = model.logits.argmax(-1).save()

    When the block is left, the sync form waits for the requests and puts the saved names into the caller's frame: a
    name saved in several invokes as the list of its values in invoke order, a name saved in one as its value. The async
    form goes on at once, and :attr:`backend` streams; ``async with`` waits at its end and writes back as well.
    """

    def __init__(
        self,
        model: VLLM,
        prompt: Any,
        settings: Mapping[str, Any],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        self._model = model
        self._dtype = _dtype_name(dtype)
        self._device = _checked_device(device)
        self._settings = check_settings(settings, model._config)  # a bad value is told here, not after the block
        self._prompt = None if prompt is None else make_prompt(prompt)
        self._frame: FrameType | None = None
        self._block: _Block | None = None
        self._invokes: list[Invoke] = []
        self._run: Run | None = None
        self._entered = False
        self._travelled = False

    # Opening and leaving.

    def __enter__(self) -> Self:
        self._enter(sys._getframe(1))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool:
        if not self._leave(exc_type, exc):
            return False
        run = self._submit(streamed=self._model.mode == "async")
        if self._model.mode == "sync":
            self._wait_here(run.done)
            self._finish()
        self._frame = None
        return True

    def __aenter__(self) -> Awaitable[Self]:
        frame = sys._getframe(1)  # taken now: in a coroutine it would be the event loop's

        async def enter() -> Self:
            if self._model.mode != "async":
                raise UnsupportedError('`async with model.trace(...)` needs VLLM(..., mode="async"); use `with` here')
            self._enter(frame)
            return self

        return enter()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool:
        if not self._leave(exc_type, exc):
            return False
        run = self._submit(streamed=False)
        try:
            await asyncio.shield(asyncio.wrap_future(run.done))
        except asyncio.CancelledError:
            if run.done.cancelled():
                raise ClosedError("the model was closed while the trace was running") from None
            await run.close()
            raise
        self._finish()
        self._frame = None
        return True

    def _enter(self, frame: FrameType) -> None:
        if self._entered:
            raise ArgumentError("a trace is opened once: call model.trace(...) again for another")
        self._entered = True
        self._frame = frame
        if self._prompt is not None:
            self._block = _Block(frame)
            self._block.arm(self)

    def _leave(self, exc_type: type[BaseException] | None, exc: BaseException | None) -> bool:
        if self._block is not None:
            if not self._block.leave(exc_type, exc):
                return False
            self._add(self._prompt, self._settings, self._block)
            self._block = None
            return True
        if isinstance(exc, AttributeError) and exc.name == "save":
            raise OutsideBlockError(
                "save() has a meaning only in a block, and the body of a trace without a prompt is none: "
                "save inside `with tracer.invoke(...):`"
            ) from exc
        return exc is None

    # Invokes.

    def invoke(self, prompt: Any, **settings: Any) -> InvokeContext:
        """Open one more prompt with a block of its own: ``with tracer.invoke(prompt, **sampling):``.

        Args:
            prompt: one prompt, in any of the forms that :meth:`VLLM.trace` takes.
            settings: sampling settings of this invoke; they win over the trace's.

        Raises:
            ArgumentError: a misspelled setting, or the trace has a prompt itself.
            PromptError: the prompt is empty, or several.
        """
        if self._prompt is not None:
            raise ArgumentError(
                "this trace has a prompt, so its body is a block: open invokes in `with model.trace() as tracer:`"
            )
        if not self._entered or self._run is not None:
            raise ArgumentError("tracer.invoke is opened inside `with model.trace() as tracer:`")
        return InvokeContext(self, make_prompt(prompt), check_settings(settings, self._model._config, self._settings))

    def _add(self, prompt: Any, settings: Mapping[str, Any], block: _Block) -> None:
        self._travelled = False  # set when a reference to the tracer is made, with which a block can read the result
        program = block.program
        params = make_params(settings, block.extra_args(self, self._dtype))
        # Salted, so that what an edited request leaves in the prefix cache is found by nobody.
        salted = {**prompt, "cache_salt": unique("salt")}
        number = len(self._invokes)
        # A block that the tracer has not travelled with cannot ask for a live value.
        names = live_names(program.wrapped) if self._travelled else frozenset[str]()
        invoke = Invoke(
            number,
            salted,
            params,
            self._resolve,
            device=self._device,
            program=program,
            reads_result=self._travelled,
            live_names=names,
        )
        self._invokes.append(invoke)

    def _submit(self, *, streamed: bool) -> Run:
        if not self._invokes:
            raise ArgumentError(
                "the trace has no prompt: write model.trace(prompt), or open `with tracer.invoke(prompt):` in it"
            )
        self._run = Run(self._model, self._invokes, self._reference, streamed=streamed)
        return self._run

    # After the block.

    @property
    def backend(self) -> Stream:
        """The stream of this trace's outputs, in the async form.

        Raises:
            OutsideBlockError: the block has not been left yet.
            UnsupportedError: the model is in sync mode, where the values are in the caller's frame.
        """
        if self._model.mode != "async":
            raise UnsupportedError(
                'tracer.backend streams in the async form: VLLM(..., mode="async"); in the sync form the saved names '
                "hold their values after the block"
            )
        if self._run is None:
            raise OutsideBlockError("tracer.backend is there once the block has been left")
        return self._run.stream

    def _wait_here(self, done: Future[None]) -> None:
        try:
            done.result()
        except CancelledError:
            raise ClosedError("the model was closed while the trace was running") from None
        except BaseException:  # an interrupt: the requests are of no more use
            done.cancel()
            raise

    def _finish(self) -> None:
        """Write the saved names back, tell of loops that were cut short, and raise the first error there was."""
        assert self._frame is not None
        write_back(self._frame, self.saves)
        for loop in itertools.chain.from_iterable(invoke.cut_short for invoke in self._invokes):
            loop.emit()
        first: BaseException | None = None
        for invoke in self._invokes:
            error, invoke.error = invoke.error, None  # it is going to lead to frames that lead to the invoke
            if first is None:
                first = error
            elif error is not None:
                first.add_note(f"another invoke failed as well: {type(error).__name__}: {error}")
        if first is not None:
            try:
                raise first
            finally:
                del first, error

    @property
    def saves(self) -> dict[str, Any]:
        """The saved names of all invokes, as the sync form puts them into the caller's frame."""
        if len(self._invokes) == 1:
            return dict(self._invokes[0].saves)
        values: dict[str, list[Any]] = {}
        for invoke in self._invokes:
            for name, value in invoke.saves.items():
                values.setdefault(name, []).append(value)
        return {name: found[0] if len(found) == 1 else found for name, found in values.items()}

    # References that travel with values.

    def _reference(self, value: object) -> tuple[Any, ...] | None:
        if type(value) is ModuleRef:
            if value._root is not self._model._root:
                raise CaptureError(f"module {value._path!r} belongs to another model than the one being traced")
            return ("module", value._path)
        if value is self._model:
            return ("model",)
        if isinstance(value, (Tracer, InvokeContext)):
            self._travelled = True
            return ("tracer",)
        return ("tokenizer",) if value is self._model._loaded_tokenizer and value is not None else None

    def _resolve(self, reference: tuple[Any, ...]) -> object:
        kind, *rest = reference
        if kind == "module":
            return self._model._root.at(rest[0])
        if kind == "cache":
            return CacheMark(*rest)
        return {"model": self._model, "tracer": self, "result": RESULT}[kind]

    # What only a block has.

    @property
    def iter(self) -> NoReturn:
        """In a block: steps to loop over, ``for step in tracer.iter[:8]``, ``tracer.iter[3]``, ``tracer.iter[2:]``."""
        raise OutsideBlockError("tracer.iter has a meaning only in a block")

    def all(self) -> NoReturn:
        """In a block: every step of the request. The loop ends with the request; what follows it does not run."""
        raise OutsideBlockError("tracer.all() has a meaning only in a block")

    @property
    def result(self) -> NoReturn:
        """In a block: vLLM's ``RequestOutput`` of the finished request."""
        raise OutsideBlockError("tracer.result has a meaning only in a block: save it there")

    def cache(
        self,
        modules: Any = None,
        *,
        include_inputs: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> NoReturn:
        """In a block: capture modules' outputs at every step, keyed by their paths; see :class:`.cache.Cache`.

        ``cache = tracer.cache(modules=[...])`` needs no ``save()``: the variable is saved. Nothing of the block runs
        for it at later steps. What is captured at a location is what blocks have left there.

        Args:
            modules: module references, paths, or patterns in which ``*`` stands for one name
                (``"model.layers.*.mlp"``); every module that the forward pass comes to by default.
            include_inputs: capture what they are called with as well.
            device: where the captured tensors are put in the caller; the CPU by default.
            dtype: the type in which floating-point tensors are captured; their own by default.

        Raises:
            OutOfOrderError: the block has read or edited something before.
            LocationError: a path or pattern that no module has.
        """
        raise OutsideBlockError("tracer.cache() has a meaning only in a block: open it first thing there")

    def live(self, name: str, default: Any = None) -> NoReturn:
        """In a block: the value that the caller has last set with ``stream.set(name=value)``, else ``default``.

        It changes between steps only.
        """
        raise OutsideBlockError("tracer.live() has a meaning only in a block; set its value with tracer.backend.set()")

    def barrier(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: invokes are requests of their own and never share a forward pass for certain.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(NO_BARRIER)

    def stop(self) -> NoReturn:
        """In a block: end the request at this step and leave the block."""
        raise OutsideBlockError("tracer.stop() has a meaning only in a block")


def _checked_device(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None or torch.device(device).type == "cpu" else torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"device={device!r} is no device: {error}") from error


def _dtype_name(dtype: torch.dtype | str | None) -> str:
    """The name of a type that tensors can be sent in; empty for their own.

    Raises:
        ArgumentError: it is no floating-point type of torch's.
    """
    if dtype is None:
        return ""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArgumentError(f"dtype={dtype!r} is no floating-point type of torch's (torch.float32, 'bfloat16', ...)")
    return str(found).removeprefix("torch.")


class InvokeContext:
    """``with tracer.invoke(prompt):``; what ``as`` binds stands for the tracer inside the block."""

    def __init__(self, tracer: Tracer, prompt: Any, settings: Mapping[str, Any]) -> None:
        self._tracer = tracer
        self._prompt = prompt
        self._settings = settings
        self._block: _Block | None = None

    def __enter__(self) -> Self:
        self._block = _Block(sys._getframe(1))
        self._block.arm(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool:
        block, self._block = self._block, None
        assert block is not None
        if not block.leave(exc_type, exc):
            return False
        self._tracer._add(self._prompt, self._settings, block)
        return True
