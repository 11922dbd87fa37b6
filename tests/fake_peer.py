"""A peer of the benchmark that runs nothing, and has no package."""

from __future__ import annotations

import os

from benchmarks.jobs import Job, Run
from benchmarks.peers import Settings


async def start(settings: Settings) -> Settings:
    if settings.model == "broken":
        raise ValueError("no such model")
    return settings


async def close(engine: Settings) -> None:
    assert engine.model == "model"


async def one_layer(engine: Settings, job: Job) -> Run:
    return Run(job.tokens * len(job.prompts), float(os.environ["FAKE_SECONDS"]))


async def every_layer(engine: Settings, job: Job) -> Run:
    raise ValueError("too many layers")


WORKLOADS = {"one layer": one_layer, "every layer": every_layer}
