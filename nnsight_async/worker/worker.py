"""vLLM's worker, with blocks run beside its forward passes."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform

from nnsight_async.protocol import CONFIG_KEY, WorkerSettings
from nnsight_async.worker.ranks import Ranks
from nnsight_async.worker.runners import Runner
from nnsight_async.worker.runners.v1 import V1Runner
from nnsight_async.worker.runners.v2 import V2Runner
from nnsight_async.worker.session import Session

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base
elif current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Base
else:
    from vllm.v1.worker.gpu_worker import Worker as _Base


class TracingWorker(_Base):
    """The platform's own worker; its steps run the blocks of the traced requests in them."""

    _session: Session | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Taken out, since vLLM looks compiled code up by a hash of all that is in there.
        settings = self.vllm_config.additional_config.pop(CONFIG_KEY)
        self._settings = msgspec.convert(settings, WorkerSettings)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, then learn the order of the forward pass and take requests' blocks from there on."""
        times = super().compile_or_warm_up_model()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the engine core: an interrupt is the client's to handle
        group = get_tp_group()
        ranks = Ranks(group, self.device) if group.world_size > 1 else None
        v2 = getattr(self, "use_v2_model_runner", False)  # a CPU's worker has V1 only
        runner: Runner = V2Runner(self.model_runner) if v2 else V1Runner(self.model_runner)
        self._session = Session(runner, self._settings, self.model_config, self.device, ranks)
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step's forward pass."""
        if self._session is not None:  # there is none yet while vLLM warms up
            self._session.begin_step(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Draw a step's tokens, and post what its blocks saved."""
        output = super().sample_tokens(grammar_output)
        return output if self._session is None else self._session.end_step(output)

    def nnsight_async_result(self, request_id: str, result: bytes | None) -> None:
        """Give the block of a finished request the RequestOutput that it waits for, and post what it then saved.

        With None there is nobody left to give it for: the block is freed.
        """
        assert self._session is not None
        self._session.resolve_result(request_id, result)

    def nnsight_async_program(self, digest: str, program: bytes) -> None:
        """Take in a program that requests will name by its digest."""
        assert self._session is not None
        self._session.programs.add(digest, program)

    def nnsight_async_message(self, request_ids: list[str], message: bytes) -> list[int] | str:
        """Apply a message to requests; returns the step from which it holds in each, or -1 where a request is over.

        A text says why it could not be applied.
        """
        assert self._session is not None
        return self._session.take_message(request_ids, message)

    def nnsight_async_trim(self) -> list[int]:
        """Close the segments of shared memory that are not needed; returns their numbers."""
        assert self._session is not None
        mailbox = self._session.mailbox
        return mailbox.arena.trim() if mailbox is not None else []

    def nnsight_async_stats(self) -> tuple[int, int, int]:
        """How many blocks the worker holds, bytes of shared memory in use, and the number of its segments."""
        assert self._session is not None
        live, mailbox = len(self._session.interleaver.blocks), self._session.mailbox
        if mailbox is None:
            return live, 0, 0
        mailbox.arena.reclaim()
        return live, mailbox.arena.used, len(mailbox.arena.segments)

    def nnsight_async_tiers(self) -> Any:
        """How the steps so far were run, as builtins of a :class:`TierCounts`."""
        assert self._session is not None
        return msgspec.to_builtins(self._session.tier_counts())

    def shutdown(self) -> None:
        """Close the way up, then shut down as vLLM does."""
        if self._session is not None:
            if self._session.mailbox is not None:
                self._session.mailbox.close()
            self._session = None
        super().shutdown()
