"""The rounds of a benchmark: a contestant and plain vLLM take turns, and what they did is written down at once."""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.jobs import Job, Run
from benchmarks.machine import processor_seconds
from benchmarks.statistics import ratio, summarize

#: New tokens of each request of a warm-up: on a GPU enough for graphs to be captured.
_WARM_TOKENS = 16 if torch.cuda.is_available() else 4

Runner = Callable[[Job], Awaitable[Run]]


@dataclass(frozen=True)
class Task:
    """A workload at one number of requests, with the name of the plain run beside it."""

    workload: str
    plain: str
    level: int
    job: Job


@dataclass
class Contestant:
    """What is compared with plain vLLM: its name and how it runs each workload that it can do."""

    name: str
    run: Mapping[str, Runner]
    #: Called after each of its runs, to look at it.
    after: Callable[[Task], Awaitable[None]] | None = None


class Clock:
    """How much of the time there is has gone."""

    def __init__(self, budget: float | None) -> None:
        self._begin = time.monotonic()
        self.budget = budget

    @property
    def gone(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    def share(self, among: int) -> float | None:
        """When the first of so many who share what is left has to be done, in seconds since the start."""
        return None if self.budget is None else self.gone + max(0.0, self.budget - self.gone) / among


@dataclass
class Results:
    """What has been measured so far, in a file that is whole at any moment."""

    path: Path | None
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    starts: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    tiers: dict[str, Any] = field(default_factory=dict)
    found: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = field(default_factory=dict)
    finished: bool = False

    def add(self, who: str, task: Task, measured: Run, plain: Run) -> list[dict[str, Any]]:
        """Note one round of a workload; returns its rounds so far."""
        rounds = self.found.setdefault(who, {}).setdefault(task.workload, {}).setdefault(str(task.level), [])
        rounds.append({"measured": summarize(measured), "plain": summarize(plain)})
        return rounds

    def as_dict(self) -> dict[str, Any]:
        """The results as they are written."""
        return {
            "machine": self.machine,
            "settings": self.settings,
            "finished": self.finished,
            "starts": self.starts,
            "failures": self.failures,
            **({"tiers": self.tiers} if self.tiers else {}),
            "results": self.found,
        }

    def write(self) -> None:
        """Put everything into the file."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".part")
        aside.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        os.replace(aside, self.path)


async def measure(
    contestant: Contestant,
    plain: Mapping[str, Runner],
    tasks: Sequence[Task],
    results: Results,
    *,
    rounds: int,
    group: int,
    clock: Clock,
    until: float | None,
) -> bool:
    """Run every task of a contestant in each round, beside plain vLLM.

    A group of ``group`` workloads of one kind and one number of requests shares a plain run, which comes first in one
    round and last in the next. No round is begun that would probably not end ``until`` then (seconds on the clock),
    and none is gone on with after that. A workload that fails is noted and left out from there on.

    Returns whether every round was run.
    """
    able = [task for task in tasks if task.workload in contestant.run]
    for number in range(rounds):
        begin = clock.gone
        for members in _groups(able, group):
            if until is not None and clock.gone > until:
                return False
            if number == 0:
                await _warm_up(contestant, plain, members, results)
            measured: list[tuple[Task, Run]] = []
            if number % 2 == 0:
                beside = await _plainly(plain, members[0])
            ordered = members if number % 2 == 0 else members[::-1]
            await _try(contestant, _glance(ordered[0]), results, look=False)
            for task in ordered:
                run = await _try(contestant, task, results)
                if run is not None:
                    measured.append((task, run))
            if number % 2 == 1:
                beside = await _plainly(plain, members[0])
            for task, run in measured:
                _tell(number, contestant, task, results.add(contestant.name, task, run, beside))
            results.write()
        able = [task for task in able if _key(contestant, task) not in results.failures]
        if number + 1 < rounds and until is not None and clock.gone + (clock.gone - begin) > until:
            return False
    return True


async def _warm_up(
    contestant: Contestant, plain: Mapping[str, Runner], tasks: Sequence[Task], results: Results
) -> None:
    """Run a group with a few tokens: what is compiled, captured or allocated the first time is no one's cost."""
    job = tasks[0].job
    job = replace(job, tokens=min(job.tokens, _WARM_TOKENS), prompts=job.prompts[: job.concurrency])
    await _quietly(plain[tasks[0].plain], job)
    for task in tasks:
        await _try(contestant, replace(task, job=job), results, look=False)


def _glance(task: Task) -> Task:
    """One prompt of a task with a token or two, to wake up an engine that has been idle while another ran."""
    return replace(task, job=replace(task.job, prompts=task.job.prompts[:1], tokens=min(task.job.tokens, 2)))


async def _plainly(plain: Mapping[str, Runner], task: Task) -> Run:
    """The plain run beside a task, on an engine that is awake."""
    await _quietly(plain[task.plain], _glance(task).job)
    return await _quietly(plain[task.plain], task.job)


def _groups(tasks: Sequence[Task], size: int) -> Iterator[list[Task]]:
    """Tasks that share a plain run, in their order."""
    kinds: dict[tuple[int, str], list[Task]] = {}
    for task in tasks:
        kinds.setdefault((task.level, task.plain), []).append(task)
    for members in kinds.values():
        for first in range(0, len(members), size):
            yield members[first : first + size]


async def _quietly(run: Runner, job: Job) -> Run:
    """Run a job with the garbage of others out of the way, and note the processor time that it takes."""
    gc.collect()
    before = processor_seconds()
    done = await run(job)
    done.processor = processor_seconds() - before
    return done


async def _try(contestant: Contestant, task: Task, results: Results, *, look: bool = True) -> Run | None:
    """Run a task; None where it failed, which is noted."""
    if _key(contestant, task) in results.failures:
        return None
    try:
        run = await _quietly(contestant.run[task.workload], task.job)
        if look and contestant.after is not None:
            await contestant.after(task)
        return run
    except Exception as error:
        results.failures[_key(contestant, task)] = f"{type(error).__name__}: {error}"
        print(f"{_key(contestant, task)} failed, and is left out:\n{traceback.format_exc()}", flush=True)
        results.write()
        return None


def _key(contestant: Contestant, task: Task) -> str:
    return f"{contestant.name}: {task.workload}, {task.level}"


def _tell(number: int, contestant: Contestant, task: Task, rounds: Sequence[Mapping[str, Any]]) -> None:
    found = ratio(rounds[-1:], "seconds" if task.plain == "sweep" else "throughput")
    assert found is not None
    what = "of plain vLLM's time" if task.plain == "sweep" else "of plain vLLM's throughput"
    print(f"round {number + 1}  {_key(contestant, task):36} {found.median:.3f} {what}", flush=True)
