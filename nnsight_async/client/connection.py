"""A running engine, seen from the client: requests in, outputs and posts out, messages to the worker."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from nnsight_async.client.invoke import Invoke
from nnsight_async.client.ledger import Ledger
from nnsight_async.client.loop import LoopThread
from nnsight_async.client.mailbox import Mailbox
from nnsight_async.client.tiers import TierStats, tier_stats
from nnsight_async.client.unique import unique
from nnsight_async.engine.arguments import set_worker_settings
from nnsight_async.engine.start import Sink, render_prompt, settle, start_engine, stop_engine, watch_end
from nnsight_async.errors import ENGINE_DIED, ArgumentError, ClosedError, EngineError, NnsightAsyncError, PromptError
from nnsight_async.protocol import KNOWN_PROGRAMS, Message, TierCounts, WorkerSettings
from nnsight_async.tracing import Program

T = TypeVar("T")

logger = logging.getLogger(__name__)

_open: weakref.WeakSet[Connection] = weakref.WeakSet()


#: Seconds without a post after which shared memory that nothing needs is given back.
_QUIET = 1.0
#: Seconds within which an engine that could not answer is found to have died, if it has.
_LAST_WORDS = 10.0


def _close_all() -> None:
    """A process that exits without closing its models leaves no engine behind."""
    for connection in list(_open):
        connection.close()


@dataclass(frozen=True)
class Stats:
    """What a model's traced requests take up.

    Attributes:
        live: how many of them the worker holds.
        unread_bytes: saved values that have come and have not been read; ``mailbox_bytes`` limits them.
        shared_bytes: shared memory in use, by values that are unread and by tensors that somebody still has.
        segments: how many pieces of shared memory the worker has.
    """

    live: int = 0
    unread_bytes: int = 0
    shared_bytes: int = 0
    segments: int = 0


class Connection:
    """One engine on one background event loop. What is not said to be for any thread runs on that loop."""

    def __init__(
        self, config: VllmConfig, *, log_stats: bool, mailbox_bytes: int, taps: list[list[tuple[str, str]]]
    ) -> None:
        self.loop = LoopThread("nnsight-async-engine")
        self._config = config
        self._log_stats = log_stats
        self._taps = taps
        self._starting: asyncio.Task[None] | None = None
        self._engine: AsyncLLM | None = None
        self._sinks: dict[str, Sink] = {}
        self._mailbox: Mailbox | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls: set[asyncio.Task[Any]] = set()  # to the worker
        self._running: set[Invoke] = set()
        self._failure = ""
        self._ended = asyncio.Event()
        self._closed = False
        self._closing = threading.Lock()
        self.ledger = Ledger(mailbox_bytes)
        self._programs: OrderedDict[str, asyncio.Event] = OrderedDict()  # those sent, the least used first
        self._trimming = False
        _open.add(self)

    @property
    def mailbox(self) -> Mailbox:
        """The way up, once the engine runs."""
        assert self._mailbox is not None
        return self._mailbox

    @property
    def engine(self) -> AsyncLLM:
        """vLLM's engine, once it runs."""
        assert self._engine is not None
        return self._engine

    async def ready(self) -> None:
        """Start the engine if it is not started yet, and wait until it is.

        Raises:
            EngineError: it could not start, and the cause says why, or it has died.
            ClosedError: the model is closed.
        """
        if self._closed:
            raise ClosedError("the model is closed")
        if self._failure:
            raise EngineError(self._failure)
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        # The start belongs to all who wait for it, so none of them may cancel it.
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        self._mailbox = Mailbox(self.ledger, self._memory_is_idle)
        set_worker_settings(self._config, msgspec.to_builtins(WorkerSettings(self._mailbox.address, self._taps)))
        try:
            self._engine, self._sinks = start_engine(self._config, log_stats=self._log_stats)
        except Exception as error:
            self._mailbox.close()
            raise EngineError(f"the engine could not start: {error}") from error
        watch_end(self._engine, lambda: self._failed(ENGINE_DIED))
        self._mailbox.start(lambda error: self._failed(f"the mailbox failed: {type(error).__name__}: {error}"))
        # Handlers run last in, first out, and multiprocessing's own would terminate the engine before it is closed.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    def _failed(self, why: str) -> None:
        """Tell everybody who waits for something, and all who come later."""
        if self._closed or self._failure:
            return
        self._failure = why
        self._ended.set()
        for invoke in list(self._running):
            invoke.put(EngineError(why))
        for call in list(self._calls):
            call.cancel()

    async def submit(self, invoke: Invoke) -> str:
        """Put an invoke's request into the engine; returns its internal id."""
        await self.ready()
        request_id = unique("trace")
        self._sinks[request_id] = invoke
        self._running.add(invoke)
        try:
            try:
                prompt = await render_prompt(self.engine, invoke.prompt)
            except (VLLMClientError, ValueError, TypeError) as error:
                raise PromptError(f"vLLM does not take this prompt: {error}") from error
            if invoke.program is not None:
                await self._send_program(invoke.program)
            try:
                collector = await self.engine.add_request(request_id, prompt, invoke.params)
            except (VLLMClientError, ValueError, TypeError) as error:
                raise ArgumentError(f"vLLM does not take this request: {error}") from error
        finally:
            del self._sinks[request_id]
        return str(collector.request_id)

    def forget(self, invoke: Invoke) -> None:
        """Expect nothing more from the worker for an invoke."""
        self._running.discard(invoke)
        if self._mailbox is not None:
            for worker_id in invoke.worker_ids:
                self._mailbox.receivers.pop(worker_id, None)

    async def abort(self, invoke: Invoke) -> None:
        """Free everything of an invoke in the engine, whose request may still be running."""
        if self._engine is None:
            return
        # vLLM registers a request before it submits it: one that never came so far has its id registered too.
        ids = [invoke.internal_id] if invoke.internal_id else invoke.worker_ids
        with contextlib.suppress(Exception):  # the engine may be the one that died
            await self.engine.abort(ids, internal=True)
            for worker_id in invoke.may_want_result():
                await self.send_result(worker_id, None)

    async def send_result(self, worker_id: str, result: bytes | None) -> None:
        """Hand a finished request's RequestOutput to its block, or None to have the block freed without."""
        await self._ask("nnsight_async_result", worker_id, result)

    async def send_message(self, worker_ids: Sequence[str], message: Message) -> dict[str, int]:
        """Send a message to running requests; the step from which it holds in each, -1 for one that is over.

        Raises:
            ArgumentError: the worker could not take it.
        """
        if not worker_ids:
            return {}
        steps = (await self._ask("nnsight_async_message", list(worker_ids), msgspec.msgpack.encode(message)))[0]
        if isinstance(steps, str):
            raise ArgumentError(f"the message could not be taken: {steps}")
        await settle(self.engine)  # a request whose last output has come by now is over
        return dict(zip(worker_ids, steps, strict=True))

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; their answers.

        Raises:
            EngineError: the engine has died, before or while it was asked.
        """
        call = asyncio.get_running_loop().create_task(self._call_workers(method, *args))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait([call])
        finally:
            call.cancel()
        return call.result()

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        try:
            return await self._answers(method, *args)
        except asyncio.CancelledError:
            if self._failure:  # vLLM leaves those who wait for an answer waiting
                raise EngineError(self._failure) from None
            raise

    async def _answers(self, method: str, *args: Any) -> list[Any]:
        try:
            answers: list[Any] = await self.engine.collective_rpc(method, args=args)
            return answers
        except EngineDeadError as error:
            raise EngineError(ENGINE_DIED) from error
        except Exception as error:  # of an engine that is dying, this may come before the news of it
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    await self._ended.wait()
            raise EngineError(self._failure or f"the worker could not answer: {error}") from error

    async def _send_program(self, program: Program) -> None:
        """Send a program ahead of the first request that needs it; the engine takes both in order."""
        sent = self._programs.get(program.digest)
        if sent is not None:
            self._programs.move_to_end(program.digest)
            await sent.wait()
            return
        sent = self._programs[program.digest] = asyncio.Event()
        if len(self._programs) > KNOWN_PROGRAMS:
            self._programs.popitem(last=False)
        encoded = msgspec.msgpack.encode(program)
        task = asyncio.get_running_loop().create_task(
            self._call_workers("nnsight_async_program", program.digest, encoded)
        )
        self._calls.add(task)
        task.add_done_callback(partial(self._program_sent, program.digest))
        try:
            await asyncio.sleep(0)  # the call is on its way once its task has run; its answer need not be waited for
        finally:
            sent.set()

    def _program_sent(self, digest: str, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if task.cancelled() or task.exception() is not None:  # whoever needs it hears of that from the worker
            self._programs.pop(digest, None)

    def _memory_is_idle(self) -> None:
        """Have the worker give back shared memory that nothing needs; from any thread."""
        if not self._trimming and not self._closed:
            self._trimming = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.loop.loop.call_soon_threadsafe(self._start_trim)

    def _start_trim(self) -> None:
        loop = asyncio.get_running_loop()
        if self._closed:
            return
        if time.monotonic() - self.mailbox.last_post < _QUIET:  # what is free now is what the next posts will use
            loop.call_later(_QUIET, self._start_trim)
            return
        task = asyncio.get_running_loop().create_task(self._trim())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _trim(self) -> None:
        try:
            if self._engine is not None:
                closed = await self._ask("nnsight_async_trim")
                self.mailbox.segments.drop(closed[0])
        except Exception:  # the engine may be the one that died
            logger.debug("shared memory could not be given back", exc_info=True)
        finally:
            self._trimming = False

    async def stats(self) -> Stats:
        """What the traced requests take up; nothing before the engine runs."""
        if self._engine is None:
            return Stats()
        live, shared, segments = (await self._ask("nnsight_async_stats"))[0]
        return Stats(live, self.ledger.unread, shared, segments)

    async def tier_stats(self) -> TierStats:
        """How the steps so far were run; starts the engine."""
        await self.ready()
        return tier_stats(msgspec.convert((await self._ask("nnsight_async_tiers"))[0], TierCounts))

    # From any thread.

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the engine's loop; it is cancelled if the model is closed meanwhile.

        Raises:
            ClosedError: the model is closed.
        """
        if self._closed:
            coroutine.close()
            raise ClosedError("the model is closed")
        return self.loop.submit(self._tracked(coroutine))

    async def _tracked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await coroutine
        finally:
            self._tasks.discard(task)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop and wait for it, from another thread; an interrupt cancels it."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop and wait for it, from a coroutine on any other loop."""
        return await asyncio.wrap_future(self.start(coroutine))

    def close(self) -> None:
        """Abort what is running, shut the engine down and end the loop; the second time it does nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self.loop.is_current():
            # The garbage collector may call from anywhere, and the loop cannot wait for itself.
            threading.Thread(target=self._close, name="nnsight-async-close").start()
        else:
            self._close()

    def _close(self) -> None:
        try:
            self.loop.submit(self._shutdown()).result()
        finally:
            self.loop.stop()

    async def _shutdown(self) -> None:
        if self._starting is not None and not self._starting.done():
            with contextlib.suppress(NnsightAsyncError):
                await asyncio.shield(self._starting)
        tasks = [*self._tasks, *self._calls]
        for task in tasks:
            task.cancel("the model was closed")
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._engine is not None:
            await stop_engine(self._engine)
            self.mailbox.close()
            self._engine = None
