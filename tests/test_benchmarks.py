"""The benchmark: its figures on made-up numbers, its rounds on made-up engines, each workload once on a real one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Engines

from benchmarks.jobs import Job, Run, bounded, made_up_prompts, stream_all
from benchmarks.peers import Peer, Settings
from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.report import describe, fill_in, report
from benchmarks.rounds import Clock, Contestant, Results, Task, measure
from benchmarks.run import Shape, make_tasks, parse
from benchmarks.statistics import Spread, absolute, percentile, ratio, summarize
from benchmarks.workloads import WORKLOADS

JOB = Job([[1, 2], [3, 4]], tokens=3, layer=0, layers=1, width=8, head=4)
MACHINE = {"processor": "a processor", "cores": 2, "load": 0.5, "gpus": [], "vllm": "1", "torch": "2", "python": "3"}
SETTINGS = {
    "model": "model",
    "plain_eager": True,
    "absolute": False,
    "requests": [1, 2],
    "rounds": 3,
    "prompt_tokens": 2,
    "new_tokens": 3,
    "concurrency": 4,
}


def test_percentiles() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert percentile(values, 50) == 50.0
    assert percentile(values, 99) == 99.0
    assert percentile(values, 100) == 100.0
    assert percentile([7.0], 99) == percentile([7.0], 1) == 7.0
    with pytest.raises(ValueError, match="percentile of nothing"):
        percentile([], 50)


def test_ratios_are_within_a_round() -> None:
    plain = [Run(100, 1.0, [0.1, 0.2, 0.3], [0.01]), Run(100, 2.0, [0.2], [0.01]), Run(100, 4.0, [0.4], [0.01])]
    mine = [Run(100, 2.0, [0.4, 0.2, 0.1], [0.02]), Run(100, 2.0, [0.2], [0.01]), Run(100, 5.0, [0.1], [0.04])]
    rounds = [{"measured": summarize(a), "plain": summarize(b)} for a, b in zip(mine, plain, strict=True)]
    assert ratio(rounds, "throughput") == Spread(0.8, 0.5, 1.0)
    assert ratio(rounds, "seconds") == Spread(1.25, 1.0, 2.0)
    assert ratio(rounds, "first token, median") == Spread(1.0, 0.25, 1.0)
    assert ratio(rounds, "between tokens, 99th percentile") == Spread(2.0, 1.0, 4.0)
    assert absolute(rounds, "throughput", "measured") == 50.0
    assert ratio(rounds, "processor") is None  # nobody has looked
    unseen = [{"measured": summarize(Run(1, 1.0)), "plain": summarize(plain[0])}]
    assert ratio(unseen, "first token, median") is None
    assert absolute(unseen, "first token, median", "measured") is None


def _results(**settings: Any) -> dict[str, Any]:
    one = {"measured": summarize(Run(9, 2.0, [0.5], [0.1])), "plain": summarize(Run(9, 1.0, [0.25], [0.1]))}
    found = {
        "nnsight_async": {"one layer": {"1": [one, one], "2": [one]}, "sweep": {"64": [one]}},
        "other": {"one layer": {"2": [one]}},
    }
    return {"machine": MACHINE, "settings": {**SETTINGS, **settings}, "finished": False, "results": found}


def test_report() -> None:
    text = report(_results())
    assert "| requests in flight | 1 | 2 |\n| --- | ---: | ---: |" in text
    assert "| one layer | 0.50 (0.50 to 0.50) | 0.50 (0.50 to 0.50) |" in text
    assert "| other: one layer |  | 0.50 (0.50 to 0.50) |" in text
    assert "| one layer | 2.00, 2.00 | 2.00, 2.00 |" in text  # times to the first token
    assert "| one layer | 1.00, 1.00 | 1.00, 1.00 |" in text
    assert "| nnsight_async | 64 | 2.00 (2.00 to 2.00) |  |" in text
    assert "millisecond" not in text
    whole = report(_results(absolute=True))
    assert "| one layer | 4, 9 | 4, 9 |" in whole
    assert "| one layer | 500.0, 250.0 | 500.0, 250.0 |" in whole
    assert "| nnsight_async | 64 | 2.00 (2.00 to 2.00) |  | 2.00, 1.00 |" in whole
    assert "cut short" in describe(_results())
    assert report({**_results(), "results": {}}) == ""


def test_the_page_s_tables_are_those_of_the_recorded_results() -> None:
    root = Path(__file__).parent.parent
    page = (root / "docs" / "benchmarks.md").read_text()
    for name in re.findall(r"<!-- (benchmarks/results/\S+\.json) -->", page):
        if (root / name).exists():
            assert fill_in(page, name, json.loads((root / name).read_text())) == page
    assert "benchmarks/results/cpu.json" in page
    with pytest.raises(ValueError, match="no place"):
        fill_in(page, "benchmarks/results/other.json", _results())


async def _outputs(counts: list[int]) -> AsyncIterator[Any]:
    for count in counts:
        await asyncio.sleep(0)
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * count)])


async def test_a_stream_s_gaps_are_one_less_than_its_tokens() -> None:
    run = await stream_all(JOB, lambda prompt: _outputs([1, 2, 3]))
    assert (run.tokens, len(run.first), len(run.between)) == (6, 2, 4)
    merged = await stream_all(JOB, lambda prompt: _outputs([2, 3]))  # vLLM hands on several tokens to a slow consumer
    assert (merged.tokens, len(merged.first), len(merged.between)) == (6, 2, 4)
    assert all(first <= run.seconds for first in run.first)
    with pytest.raises(RuntimeError, match="2 of 3 tokens"):
        await stream_all(JOB, lambda prompt: _outputs([1, 2]))
    with pytest.raises(RuntimeError, match="too few values"):
        await stream_all(JOB, lambda prompt: _outputs([3]), lambda output: False)


async def test_a_plain_sweep_has_no_more_in_flight_than_it_should() -> None:
    running, most = 0, 0

    async def one(prompt: list[int]) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return len(prompt)

    assert await bounded(made_up_prompts(20, 3, 1000), 4, one) == 60
    assert most == 4


async def test_rounds_take_turns_and_leave_out_what_fails(tmp_path: Path) -> None:
    order: list[str] = []

    def runner(name: str) -> Any:
        async def run(job: Job) -> Run:
            if len(job.prompts) == 1:  # only to wake it up
                return Run(1, 1.0)
            order.append(name)
            if name == "broken" and order.count("broken") == 2:
                raise ValueError("broken")
            return Run(job.tokens, 1.0)

        return run

    tasks = [Task(name, "stream", 2, JOB) for name in ("first", "broken", "unknown")]
    contestant = Contestant("us", {name: runner(name) for name in ("first", "broken")})
    results = Results(tmp_path / "results.json", MACHINE, SETTINGS)
    plain = {"stream": runner("plain")}
    arguments: dict[str, Any] = {"rounds": 2, "group": 2, "clock": Clock(None), "until": None}
    assert await measure(contestant, plain, tasks, results, **arguments)
    warm_up, first, second = order[:3], order[3:6], order[6:]
    assert (warm_up, first, second) == (["plain", "first", "broken"], ["plain", "first", "broken"], ["first", "plain"])
    written = json.loads((tmp_path / "results.json").read_text())
    assert list(written["failures"]) == ["us: broken, 2"]
    assert {name: len(found["2"]) for name, found in written["results"]["us"].items()} == {"first": 2}

    late = Results(None, MACHINE, SETTINGS)
    assert not await measure(contestant, plain, tasks, late, **{**arguments, "until": -1.0})
    assert late.found == {}


async def test_a_peer_runs_in_a_process_of_its_own() -> None:
    peer = Peer("none", "none", "fake_peer", {"FAKE_SECONDS": "2.5"})
    process = PeerProcess(peer, Settings("model"))
    await process.ready()
    assert process.workloads == ["one layer", "every layer"]
    assert await process.run("one layer", JOB) == Run(6, 2.5)
    with pytest.raises(PeerError, match="too many layers"):
        await process.run("every layer", JOB)
    assert await process.run("one layer", JOB) == Run(6, 2.5)
    await process.close()

    broken = PeerProcess(peer, Settings("broken"))
    with pytest.raises(PeerError, match="no such model"):
        await broken.ready()
    await broken.close()


def test_the_command_line(engines: Engines) -> None:
    path = engines.path("qwen3")
    command = ["--requests", "1,2", "--workloads", "untraced,every layer,sweep", "--heavy-requests", "1"]
    arguments = parse([*command, "--model", path, "--sweep-prompts", "5"])
    tasks = make_tasks(arguments, Shape.of(path))
    assert [(task.workload, task.level) for task in tasks] == [
        ("sweep", 5),
        ("untraced", 1),
        ("every layer", 1),
        ("untraced", 2),
    ]
    with pytest.raises(SystemExit):
        parse(["--workloads", "untracked"])


@pytest.mark.parametrize("name", WORKLOADS)
async def test_each_workload(engines: Engines, name: str) -> None:
    model, spec = engines.get("qwen3", "async"), WORKLOADS[name]
    assert spec.says
    shape = Shape.of(Engines.path("qwen3"))
    tokens = 1 if spec.plain == "sweep" else 3
    job = shape.job(made_up_prompts(2, 7, shape.vocabulary), tokens, "cpu", concurrency=2)
    run = await spec.run(model, job)
    assert run.tokens == 2 * tokens
    if spec.plain == "stream":
        assert (len(run.first), len(run.between)) == (2, 4)
