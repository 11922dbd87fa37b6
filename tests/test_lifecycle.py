"""Nothing is left behind: not by a close, an exit without one, a kill, or a model that is collected."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import ENGINE, Engines

from nnsight_async import VLLM
from nnsight_async.errors import ClosedError, UnsupportedError

SCRIPT = """
import os, sys, time
from nnsight_async import VLLM

model = VLLM({path!r}, dispatch=True, **{engine!r})
with model.trace("The capital of France is", temperature=0.0, max_tokens=2):
    logits = model.logits.save()
print("ready", logits.shape, flush=True)
{end}
"""


def _segments(pids: list[int]) -> set[str]:
    """The shared memory that processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line.partition("/dev/shm/")[2]
                if name and not name.endswith("(deleted)"):
                    found.add(name)
    return found


def _children(pid: int) -> list[int]:
    """All processes below ``pid``, but for Python's own resource tracker, which one process keeps for good."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if b"resource_tracker" in Path(f"/proc/{entry}/cmdline").read_bytes():
                    continue
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found = list(parents.get(pid, []))
    for child in found:
        found.extend(parents.get(child, []))
    return found


def _alive(pids: list[int]) -> list[int]:
    alive = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            alive.append(pid)
    return alive


def _start(tmp_path: Path, end: str) -> tuple[subprocess.Popen[str], list[int]]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(path=Engines.path("qwen3"), engine=ENGINE, end=end))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        process_group=0,  # its own, as a shell gives it
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready"):
            break
    else:
        pytest.fail(process.communicate()[1][-3000:])
    return process, _children(process.pid)


def _wait_until_gone(pids: list[int], segments: set[str], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (_alive(pids) or segments & set(os.listdir("/dev/shm"))):
        time.sleep(0.2)
    assert _alive(pids) == []
    assert segments & set(os.listdir("/dev/shm")) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("raise ValueError('on the way out')", 1), ("model.close(); model.close()", 0)],
    ids=["falls off the end", "an exception", "closes twice"],
)
def test_a_process_that_exits(tmp_path: Path, end: str, status: int) -> None:
    process, children = _start(tmp_path, end)
    segments = _segments(children)
    assert children
    assert segments
    _, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors[-3000:]
    assert "leaked" not in errors
    _wait_until_gone(children, segments)
    assert not list(tmp_path.glob("nnsight-async-*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended_by_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    process, children = _start(tmp_path, "time.sleep(600)")
    segments = _segments(children)
    assert children
    process.send_signal(number)
    process.wait(timeout=60)
    _wait_until_gone(children, segments)  # and with them the mailbox's memory, which has no name
    assert not list(tmp_path.glob("nnsight-async-*"))


@pytest.mark.slow
def test_a_model_that_is_closed_or_collected_frees_its_engine() -> None:
    async def trace_then_close() -> None:
        async with VLLM(Engines.path("qwen3"), mode="async", **ENGINE) as model:
            assert await model.live() == 0  # before the engine has started
            with model.trace("One two", temperature=0.0, max_tokens=400, ignore_eos=True) as tracer:
                steps = list().save()
                for step in tracer.all():
                    if step == 0:
                        large = torch.arange(100_000).save()  # in shared memory
                        logits = model.logits.save()
                    steps.append(step)
            async for output in tracer.backend:
                if output.step == 2:
                    break
            kept, copied = (output.saves["large"], output.saves["logits"]), output.saves["logits"].clone()
        assert torch.equal(kept[0], torch.arange(100_000))  # what came home outlives the engine
        assert torch.equal(kept[1], copied)
        with pytest.raises(ClosedError):  # the request was running when the model was closed
            while True:
                await anext(tracer.backend)
        with pytest.raises(ClosedError, match="closed"):
            await model.ready()
        with pytest.raises(ClosedError, match="closed"):
            with model.trace("One two", max_tokens=1):
                pass

    thread = threading.Thread(target=lambda: asyncio.run(trace_then_close()))
    mine = set(_children(os.getpid()))
    thread.start()
    thread.join()
    left = set(_alive(_children(os.getpid()))) - mine
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]

    model = VLLM(Engines.path("qwen3"), dispatch=True, **ENGINE)
    with model.trace("One two", max_tokens=1):
        token = model.samples.save()
    engine = [pid for pid in _children(os.getpid()) if pid not in mine]
    segments = _segments(engine)
    assert engine
    del model
    gc.collect()
    _wait_until_gone(engine, segments)


async def test_the_models_own_with_belongs_to_its_mode(model: VLLM) -> None:
    with pytest.raises(UnsupportedError, match="mode"):
        async with model:
            pass


@pytest.mark.slow
def test_an_interrupt_of_the_whole_terminal_leaves_the_engine_usable(tmp_path: Path) -> None:
    end = """
import signal
try:
    os.killpg(0, signal.SIGINT)  # what Ctrl-C in a terminal does
    time.sleep(60)
except KeyboardInterrupt:
    pass
time.sleep(1)
with model.trace("The capital of France is", temperature=0.0, max_tokens=2) as tracer:
    result = tracer.result.save()
print("after", len(result.outputs[0].token_ids), flush=True)
"""
    process, _ = _start(tmp_path, end)
    out, errors = process.communicate(timeout=120)
    assert "after 2" in out, errors[-3000:]
    assert process.returncode == 0


DYING = """
import asyncio, copy, threading
from nnsight_async.errors import EngineError

face = copy.copy(model)
face.mode = "async"
told = []

def tell(name, call):
    try:
        call()
        told.append(f"{name}: no error")
    except EngineError as error:
        told.append(f"{name}: {error}")

def trace():
    with model.trace("One two", max_tokens=400, ignore_eos=True) as tracer:
        for _ in tracer.all():
            time.sleep(0.1)
            logits = model.logits.save()

def generate():
    model.generate(["One two"] * 3, max_tokens=400, ignore_eos=True, progress=False)

def stats():
    while True:
        model._connection.call(model._connection.stats())

async def stream():
    with face.trace("One two", max_tokens=400, ignore_eos=True) as tracer:
        for _ in tracer.all():
            time.sleep(0.1)
            face.samples
    await anext(tracer.backend)
    print("running", flush=True)
    async for _ in tracer.backend:
        await tracer.backend.edit_logits({3: 1.0})

calls = {"trace": trace, "generate": generate, "stats": stats, "stream": lambda: asyncio.run(stream())}
threads = [threading.Thread(target=tell, args=item) for item in calls.items()]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for item in calls.items():
    tell(*item)
model.close()
print(*told, sep="\\n", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["VLLM::Worker", "VLLM::EngineCor"])  # the kernel keeps 15 characters of a name
def test_an_engine_that_dies_is_told_to_all_who_wait_and_all_who_come(tmp_path: Path, victim: str) -> None:
    process, children = _start(tmp_path, DYING)
    (pid,) = [pid for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == victim]
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    os.kill(pid, signal.SIGKILL)
    out, errors = process.communicate(timeout=120)
    told = [line for line in out.splitlines() if ": " in line and not line.startswith("(")]
    assert sorted(line.partition(":")[0] for line in told) == sorted(["trace", "generate", "stats", "stream"] * 2), (
        errors
    )
    for line in told:
        assert "the engine has died" in line
        assert "start it anew" in line
    assert process.returncode == 0
    assert _alive(children) == []
