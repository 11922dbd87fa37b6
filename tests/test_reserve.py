"""Requests that edit are never preempted, and nobody waits forever: vLLM's schedulers, driven without an engine."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
import torch
from conftest import Engines
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from nnsight_async.engine.arguments import build_config
from nnsight_async.engine.reserve import Reserving, edits
from nnsight_async.protocol import EDITS_ARG

BLOCK, LONGEST = 16, 256


class Reserved(Reserving, Scheduler):
    """What a synchronous engine runs, without what belongs to a process of its own."""


class ReservedAsync(Reserving, AsyncScheduler):
    """The same of an asynchronous engine."""


class Engine:
    """A scheduler, and a worker that draws the same token again and again, ``ahead`` steps behind."""

    def __init__(self, scheduler: type[Scheduler], policy: str, window: int | None, blocks: int) -> None:
        config = _config(policy)
        config.cache_config.num_gpu_blocks = blocks
        form: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["a"], FullAttentionSpec(**form))]
        if window is not None:
            groups.append(KVCacheGroupSpec(["b"], SlidingWindowSpec(**form, sliding_window=window)))
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler = scheduler(config, cache, StructuredOutputManager(config), BLOCK)
        self.ahead = 1 if issubclass(scheduler, AsyncScheduler) else 0
        init_none_hash(sha256)
        self.planned: deque[Any] = deque()
        self.requests: list[Request] = []
        self.steps: Counter[str] = Counter()  # how often the worker ran each request, that is, its block

    def add(self, prompt: int, tokens: int, *, editing: bool, priority: int = 0) -> Request:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args={EDITS_ARG: True} if editing else None)
        params.skip_reading_prefix_cache = editing
        number = len(self.requests)
        prompt_ids = [number % 3] * prompt  # plain ones find prefixes of each other
        salt = f"salt {number}" if editing else None
        hashes = get_request_block_hasher(BLOCK, sha256)
        request = Request(
            f"r{number}",
            prompt_ids,
            params,
            None,
            arrival_time=number,
            cache_salt=salt,
            priority=priority,
            block_hasher=hashes,
        )
        self.requests.append(request)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        self.planned.append(self.scheduler.schedule())
        if len(self.planned) > self.ahead:
            plan = self.planned.popleft()
            names = list(plan.num_scheduled_tokens)
            self.steps.update(names)
            output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [[7] for _ in names])
            self.scheduler.update_from_output(plan, output)

    def run(self, steps: int = 20_000) -> None:
        for _ in range(steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        for _ in range(2):
            self.step()
        assert all(request.is_finished() for request in self.requests)
        for request in self.requests:  # preempted or not, each step of the worker is one token
            if request.status is not RequestStatus.FINISHED_ABORTED:
                assert self.steps[request.request_id] == request.num_output_tokens
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def preempted(self, *, editing: bool) -> int:
        return sum(request.num_preemptions for request in self.requests if edits(request) == editing)


def _config(policy: str, known: dict[str, VllmConfig] = {}) -> VllmConfig:  # noqa: B006
    if policy not in known:
        arguments = {"max_model_len": LONGEST, "block_size": BLOCK, "scheduling_policy": policy, "max_num_seqs": 32}
        known[policy] = build_config(Engines.path("qwen3"), arguments)
    return known[policy]


EACH = pytest.mark.parametrize("scheduler", [Reserved, ReservedAsync])


@EACH
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("window", [None, 64])
def test_random_traffic(scheduler: type[Scheduler], policy: str, window: int | None) -> None:
    plain = 0
    for seed in range(12):
        chance = random.Random(seed)
        least = LONGEST // BLOCK * (1 if window is None else 2)
        engine = Engine(scheduler, policy, window, 1 + least + chance.choice([0, 3, 10, 30]))
        for _ in range(40):
            prompt = chance.randint(1, 200)
            tokens = chance.choice([1, 5, 40, 500])  # the last runs into the model's length
            engine.add(prompt, tokens, editing=chance.random() < 0.5, priority=chance.randint(-2, 2))
            for _ in range(chance.choice([0, 0, 1, 20])):
                engine.step()
            if chance.random() < 0.1:
                victim = chance.choice(engine.requests)
                engine.scheduler.finish_requests(victim.request_id, RequestStatus.FINISHED_ABORTED)
        engine.run()
        assert engine.preempted(editing=True) == 0
        plain += engine.preempted(editing=False)
    assert plain > 0


@pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler])
def test_without_the_reservation_requests_that_edit_are_preempted(scheduler: type[Scheduler]) -> None:
    engine = Engine(scheduler, "fcfs", None, 1 + LONGEST // BLOCK)
    for _ in range(8):
        engine.add(20, 60, editing=True)
    engine.run()
    assert engine.preempted(editing=True) > 0


@EACH
def test_requests_that_edit_share_the_cache_as_far_as_they_fit(scheduler: type[Scheduler]) -> None:
    engine = Engine(scheduler, "fcfs", None, 1 + LONGEST // BLOCK)
    for _ in range(8):
        engine.add(20, 60, editing=True)  # 80 tokens, five blocks: three of them fit into sixteen
    engine.step()
    assert len(engine.scheduler.running) == 3
    engine.run()
    assert engine.preempted(editing=True) == 0


@EACH
def test_a_plain_request_is_not_admitted_to_what_is_kept(scheduler: type[Scheduler]) -> None:
    engine = Engine(scheduler, "fcfs", None, 1 + LONGEST // BLOCK)
    editing = engine.add(20, 220, editing=True)  # fifteen blocks of sixteen
    engine.add(20, 5, editing=False)  # two
    fits = engine.add(5, 5, editing=False)
    engine.step()
    assert engine.scheduler.running == [editing]  # the third waits for its turn, behind the second
    engine.run()
    assert fits.num_preemptions == 0


@EACH
def test_a_plain_request_grows_into_what_is_kept_until_it_is_needed(scheduler: type[Scheduler]) -> None:
    engine = Engine(scheduler, "fcfs", None, 1 + LONGEST // BLOCK)
    plain = engine.add(16, 100, editing=False)
    editing = engine.add(20, 220, editing=True)  # fifteen blocks of sixteen
    for _ in range(80):
        engine.step()
    assert plain.num_output_tokens > 60  # five blocks
    assert plain.num_preemptions == 0
    engine.run()
    assert (plain.num_preemptions, editing.num_preemptions) == (0, 0)  # it was over in time

    plain, editing = engine.add(16, 200, editing=False), engine.add(20, 220, editing=True)
    engine.run()
    assert plain.num_preemptions > 0
    assert editing.num_preemptions == 0


@EACH
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_plain_request_is_not_starved_by_requests_that_edit(scheduler: type[Scheduler], policy: str) -> None:
    engine = Engine(scheduler, policy, None, 1 + LONGEST // BLOCK)
    engine.add(20, 60, editing=True)
    plain = engine.add(100, 120, editing=False)
    for _ in range(600):
        engine.add(20, 60, editing=True)
        engine.step()
        if plain.is_finished():
            break
    assert plain.is_finished()


@EACH
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_long_request_that_edits_is_not_starved_by_plain_ones(scheduler: type[Scheduler], policy: str) -> None:
    engine = Engine(scheduler, policy, None, 1 + LONGEST // BLOCK)
    for _ in range(6):
        engine.add(30, 40, editing=False)
    editing = engine.add(LONGEST - 1, 500, editing=True)  # needs the whole cache
    for _ in range(600):
        engine.add(30, 40, editing=False)
        engine.step()
        if editing.is_finished():
            break
    assert editing.is_finished()
    assert editing.num_preemptions == 0


@EACH
def test_what_is_kept_for_a_request_that_is_aborted_is_free_again(scheduler: type[Scheduler]) -> None:
    engine = Engine(scheduler, "fcfs", None, 1 + LONGEST // BLOCK)
    first = engine.add(20, 500, editing=True)  # all blocks are kept for it
    second = engine.add(20, 500, editing=True)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.running == [first]
    engine.scheduler.finish_requests(first.request_id, RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert engine.scheduler.running == [second]
    engine.run()
