"""Requests that edit are never preempted.

A preempted request computes the keys and values of all its tokens again, without its block. For one that only reads
they come out the same; for one that edits they would not. So a request that edits is admitted only where the cache has
room for all the tokens it may come to, and from then on requests are admitted only to what is left beside that room.
What is kept is a number of blocks, not the blocks themselves: requests that run may grow into it, and serve as victims
when it is needed; until then it holds prefixes.

No request waits forever. One that edits is admitted at the latest when nothing else runs, since vLLM refuses to start
with a cache that does not hold one request of the model's length. Once it runs, its next block is there, or held by a
request that can be preempted. All others wait in the order that they have anyway, and a preempted one goes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.request import Request, RequestStatus

from nnsight_async.protocol import EDITS_ARG

#: Before every priority that a person gives: the largest number is preempted first.
_FIRST: Final = -(1 << 62)


def edits(request: Request) -> bool:
    """Whether a request's block may change keys and values."""
    params = request.sampling_params
    return params is not None and bool(params.extra_args) and EDITS_ARG in params.extra_args


class Reservation:
    """The blocks of a cache that are kept for running requests that edit."""

    def __init__(self, manager: KVCacheManager, max_model_len: int) -> None:
        self._manager = manager
        self._max_model_len = max_model_len
        self._allocate = manager.allocate_slots
        manager.allocate_slots = self._allocate_slots
        self._kept: dict[str, int] = {}  # request: the blocks that it may still need

    def begin_step(self, running: Iterable[Request]) -> None:
        """Count anew, as requests have ended and been aborted."""
        self._kept = {request.request_id: self._still_needs(request) for request in running if edits(request)}

    def _allocate_slots(
        self, request: Request, num_new_tokens: int, *args: Any, reserved_blocks: int = 0, **kwargs: Any
    ) -> KVCacheBlocks | None:
        editing = edits(request)
        if request.status is not RequestStatus.RUNNING:
            reserved_blocks += sum(self._kept.values())
            pool = self._manager.block_pool
            most = pool.num_gpu_blocks - 1  # one is vLLM's own
            if editing and min(self._still_needs(request), most) > pool.get_num_free_blocks() - reserved_blocks:
                return None
        blocks = self._allocate(request, num_new_tokens, *args, reserved_blocks=reserved_blocks, **kwargs)
        if editing and blocks is not None:
            self._kept[request.request_id] = self._still_needs(request)
        return blocks

    def _still_needs(self, request: Request) -> int:
        """How many blocks a request may need at most beside those that it has."""
        tokens = min(request.num_prompt_tokens + request.max_tokens, self._max_model_len)
        blocks = 0
        for manager in self._manager.coordinator.single_type_managers:
            held = manager.req_to_blocks.get(request.request_id, ())
            most = manager.max_admission_blocks_per_request
            if most is None:
                blocks += max(cdiv(tokens, manager.block_size) - len(held), 0)
            else:  # a window: what has left it is given back, and a placeholder stands in its place
                have = sum(not block.is_null for block in held)
                blocks += max(min(cdiv(tokens, manager.block_size), most) - have, 0)
        return blocks


class Reserving:
    """A scheduler that never preempts a request that edits; to be mixed into one of vLLM's."""

    running: list[Request]
    kv_cache_manager: KVCacheManager
    max_model_len: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reservation = Reservation(self.kv_cache_manager, self.max_model_len)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Plan a step. vLLM preempts the last request, or the one of the largest priority: one that does not edit."""
        self.running.sort(key=lambda request: not edits(request))
        for request in self.running:
            if edits(request):
                request.priority = _FIRST
        self._reservation.begin_step(self.running)
        return super().schedule(throttle_prefills)  # type: ignore[misc]
