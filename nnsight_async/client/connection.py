"""A running engine, seen from the client: requests in, outputs and posts out, messages to the worker."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM

from nnsight_async.client.invoke import Invoke
from nnsight_async.client.loop import LoopThread
from nnsight_async.client.mailbox import Mailbox
from nnsight_async.engine.arguments import set_worker_settings
from nnsight_async.engine.start import Sink, start_engine
from nnsight_async.errors import ClosedError, EngineError, NnsightAsyncError
from nnsight_async.protocol import WorkerSettings


class Connection:
    """One engine on one background event loop. Everything but ``call`` and ``close`` runs on that loop."""

    def __init__(self, config: VllmConfig, *, log_stats: bool) -> None:
        self.loop = LoopThread("nnsight-async-engine")
        self._config = config
        self._log_stats = log_stats
        self._starting: asyncio.Task[None] | None = None
        self._engine: AsyncLLM | None = None
        self._sinks: dict[str, Sink] = {}
        self._mailbox: Mailbox | None = None
        self._invokes: set[Invoke] = set()
        self._closed = False

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
            EngineError: it could not start; the cause says why.
            ClosedError: the model is closed.
        """
        if self._closed:
            raise ClosedError("the model is closed")
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        # The start belongs to all who wait for it, so none of them may cancel it.
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        self._mailbox = Mailbox()
        set_worker_settings(self._config, msgspec.to_builtins(WorkerSettings(self._mailbox.address)))
        try:
            self._engine, self._sinks = start_engine(self._config, log_stats=self._log_stats)
        except Exception as error:
            self._mailbox.close()
            raise EngineError(f"the engine could not start: {error}") from error
        self._mailbox.start(self._mailbox_failed)

    def _mailbox_failed(self, error: BaseException) -> None:
        for invoke in list(self._invokes):
            invoke.put(EngineError(f"the mailbox failed: {type(error).__name__}: {error}"))

    async def submit(self, invoke: Invoke) -> str:
        """Put an invoke's request into the engine; returns its internal id."""
        await self.ready()
        self._invokes.add(invoke)
        request_id = f"trace-{uuid.uuid4().hex[:16]}"
        self._sinks[request_id] = invoke
        try:
            collector = await self.engine.add_request(request_id, invoke.prompt, invoke.params)
        finally:
            del self._sinks[request_id]
        return str(collector.request_id)

    async def forget(self, invoke: Invoke) -> None:
        """Free everything of an invoke, aborting its request if it is still running."""
        self._invokes.discard(invoke)
        if self._engine is None or self._closed:
            return
        for worker_id in invoke.worker_ids:
            self.mailbox.receivers.pop(worker_id, None)
        if not invoke.over or invoke.error is not None:
            # vLLM registers a request before it submits it: one that never came so far has its id registered too.
            ids = [invoke.internal_id] if invoke.internal_id else invoke.worker_ids
            with contextlib.suppress(Exception):  # the engine may be the one that died
                await self.engine.abort(ids, internal=True)
                if any(sequence.wants_result for sequence in invoke.sequences.values()):
                    for worker_id in invoke.worker_ids:
                        await self.send_result(worker_id, None)

    async def send_result(self, worker_id: str, result: bytes | None) -> None:
        """Hand a finished request's RequestOutput to its block, or None to have the block freed without."""
        await self.engine.collective_rpc("nnsight_async_result", args=(worker_id, result))

    async def worker_live(self) -> int:
        """How many blocks the worker holds."""
        return int((await self.engine.collective_rpc("nnsight_async_live"))[0])

    async def _shutdown(self) -> None:
        self._closed = True
        if self._starting is not None and not self._starting.done():
            with contextlib.suppress(NnsightAsyncError):
                await asyncio.shield(self._starting)
        for invoke in list(self._invokes):
            invoke.put(ClosedError("the model was closed while the request was running"))
        await asyncio.sleep(0)
        if self._engine is not None:
            self._engine.shutdown()
            assert self._mailbox is not None
            self._mailbox.close()
            self._engine = None

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine on the engine's loop and wait for it, from another thread."""
        return self.loop.call(coroutine)

    def close(self) -> None:
        """Shut the engine down and end the loop; the second time it does nothing."""
        if self.loop.loop.is_closed():
            return
        try:
            self.loop.call(self._shutdown())
        finally:
            self.loop.stop()
