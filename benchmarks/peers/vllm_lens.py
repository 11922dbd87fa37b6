"""vLLM-Lens 1.3: a plug-in of vLLM that always runs eagerly; activations come with a request's last output."""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import RequestOutputKind
from vllm_lens import SteeringVector

from benchmarks import plain
from benchmarks.jobs import Job, Run, bounded, stream_all, timed
from benchmarks.peers import Settings


async def start(settings: Settings) -> Any:
    """An engine of vLLM, which the plug-in has changed."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return plain.start(settings.model, **settings.engine)


async def close(engine: Any) -> None:
    """Shut the engine down."""
    await plain.stop(engine)


async def _stream(engine: Any, job: Job, extra: dict[str, Any], check: Any = None) -> Run:
    def start(prompt: list[int]) -> Any:
        # A fresh dictionary for each request: the plug-in takes entries out of it.
        return plain.outputs(engine, prompt, job, RequestOutputKind.CUMULATIVE, extra_args=dict(extra))

    return await stream_all(job, start, check)


async def one_layer(engine: Any, job: Job) -> Run:
    """One layer's residual stream, all positions."""
    extra = {"output_residual_stream": [job.layer]}
    return await _stream(engine, job, extra, lambda output: output.activations["residual_stream"].shape[0] == 1)


async def every_layer(engine: Any, job: Job) -> Run:
    """Every layer's residual stream, all positions."""
    extra = {"output_residual_stream": list(range(job.layers))}
    return await _stream(
        engine, job, extra, lambda output: output.activations["residual_stream"].shape[0] == job.layers
    )


async def steering(engine: Any, job: Job) -> Run:
    """A vector added to one layer's residual stream at every step."""
    vector = SteeringVector(activations=torch.full((1, job.width), 0.01), layer_indices=[job.layer])
    return await _stream(engine, job, {"apply_steering_vectors": [vector]})


async def sweep(engine: Any, job: Job) -> Run:
    """Many short prompts, one layer's residual stream of each."""

    async def one(prompt: list[int]) -> int:
        extra = {"output_residual_stream": [job.layer]}
        return await plain.finished(engine, prompt, job, extra_args=extra)

    return await timed(bounded(job.prompts, job.concurrency, one))


WORKLOADS = {
    "untraced": plain.batch,
    "one layer": one_layer,
    "every layer": every_layer,
    "steering": steering,
    "sweep": sweep,
}
