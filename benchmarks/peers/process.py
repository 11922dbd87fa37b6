"""A peer in a process of its own, which runs the jobs that it is sent and sends back what came of them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.jobs import Job, Run
from benchmarks.peers import Peer, Settings


class PeerError(RuntimeError):
    """The peer failed; the message is its own traceback."""


def _serve(peer: Peer, settings: Settings, pipe: Connection) -> None:
    """The child process: start the engine, answer with the workloads that it can do, then run what comes."""

    async def serve() -> None:
        adapter, engine = None, None
        try:
            os.environ.update(peer.environment)
            adapter = peer.load()
            engine = await adapter.start(settings)
            pipe.send(list(adapter.WORKLOADS))
            while (command := await asyncio.to_thread(pipe.recv)) is not None:
                workload, job = command
                try:
                    pipe.send(await adapter.WORKLOADS[workload](engine, job))
                except Exception:
                    pipe.send(traceback.format_exc())
        except Exception:
            pipe.send(traceback.format_exc())
        finally:
            if adapter is not None and engine is not None:
                await adapter.close(engine)

    uvloop.run(serve())


class PeerProcess:
    """The parent's side: ``await run(workload, job)`` for one job after the other."""

    def __init__(self, peer: Peer, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(peer, settings, theirs))
        self._process.start()
        theirs.close()
        self.workloads: list[str] = []

    async def ready(self) -> None:
        """Wait until the engine has started.

        Raises:
            PeerError: it has not.
        """
        self.workloads = await self._answer()

    async def run(self, workload: str, job: Job) -> Run:
        """Run one job.

        Raises:
            PeerError: it failed.
        """
        self._pipe.send((workload, job))
        return await self._answer()

    async def _answer(self) -> Any:
        try:
            answer = await asyncio.to_thread(self._pipe.recv)
        except EOFError:
            raise PeerError("the peer's process ended") from None
        if isinstance(answer, str):
            raise PeerError(answer)
        return answer

    async def close(self) -> None:
        """End the process; it is killed if it does not end by itself within half a minute."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        await asyncio.to_thread(self._process.join, 30)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
