"""The examples run, on the suite's own engines."""

from __future__ import annotations

import contextlib
import re

import live_steering
import pytest
from conftest import Engines


async def test_live_steering(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    face = engines.get("smollm2", "async")
    monkeypatch.setattr(live_steering, "VLLM", lambda *args, **kwargs: contextlib.nullcontext(face))
    await live_steering.main("Here is what I think of the film:", 24, 40.0)
    printed = capsys.readouterr().out
    up, down = (int(step) for step in re.findall(r"from step (\d+) on", printed))
    readings = [float(line.split()[1]) for line in printed.splitlines() if re.match(r" *\d+ ", line)]
    assert len(readings) == 24
    assert 8 < up <= down <= 24
    if down > up:
        assert min(readings[up:down]) > max(readings[1:up])  # the probe sees the steering, from that step on
