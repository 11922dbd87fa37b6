"""nnsight 0.8 on vLLM, in its synchronous form: in its asynchronous one, lists come home without all of their entries.

Without ``eager`` its engine has taps at every layer's output and keeps CUDA graphs. Its requests are not streamed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nnsight.modeling.vllm import VLLM

from benchmarks.jobs import Job, Run, timed
from benchmarks.peers import Settings


async def start(settings: Settings) -> Any:
    """An engine of its own, in this process's main thread."""
    taps = [] if settings.eager else ["model.layers.*.output"]
    return VLLM(settings.model, dispatch=True, taps=taps, **settings.engine)


async def close(model: Any) -> None:
    """Shut the engine's process down."""
    model.vllm_entrypoint.llm_engine.engine_core.shutdown()


async def _timed(run: Callable[[], int]) -> Run:
    async def work() -> int:
        return run()

    return await timed(work())


async def untraced(model: Any, job: Job) -> Run:
    """The engine's own ``generate``."""
    from vllm import SamplingParams

    def run() -> int:
        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        outputs = model.vllm_entrypoint.generate(prompts, SamplingParams(**job.sampling), use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return await _timed(run)


async def one_layer(model: Any, job: Job) -> Run:
    """One layer's hidden states at every step."""
    layer, tokens = model.model.layers[job.layer], job.tokens

    def run() -> int:
        with model.trace(**job.sampling) as tracer:
            for prompt in job.prompts:
                with tracer.invoke(prompt):
                    hidden = list().save()
                    for _ in tracer.iter[:tokens]:
                        hidden.append(layer.output[0].clone())
        return tokens * len(job.prompts)

    return await _timed(run)


async def every_layer(model: Any, job: Job) -> Run:
    """Every layer's hidden states at every step."""
    layers, tokens = model.model.layers, job.tokens

    def run() -> int:
        with model.trace(**job.sampling) as tracer:
            for prompt in job.prompts:
                with tracer.invoke(prompt):
                    hidden = list().save()
                    for _ in tracer.iter[:tokens]:
                        for layer in layers:
                            hidden.append(layer.output[0].clone())
        return tokens * len(job.prompts)

    return await _timed(run)


async def steering(model: Any, job: Job) -> Run:
    """A vector added to one layer's residual stream at every step."""
    layer, tokens, device = model.model.layers[job.layer], job.tokens, job.device
    vector = torch.full((job.width,), 0.01)

    def run() -> int:
        with model.trace(**job.sampling) as tracer:
            for prompt in job.prompts:
                with tracer.invoke(prompt):
                    here = vector.to(device)
                    for _ in tracer.iter[:tokens]:
                        layer.output[0][:] += here
        return tokens * len(job.prompts)

    return await _timed(run)


async def sweep(model: Any, job: Job) -> Run:
    """Many short prompts, one layer's hidden states of each; the engine is given all of them at once."""
    layer = model.model.layers[job.layer]

    def run() -> int:
        with model.trace(**job.sampling) as tracer:
            for prompt in job.prompts:
                with tracer.invoke(prompt):
                    hidden = layer.output[0].clone().save()
        return job.tokens * len(job.prompts)

    return await _timed(run)


WORKLOADS = {
    "untraced": untraced,
    "one layer": one_layer,
    "every layer": every_layer,
    "steering": steering,
    "sweep": sweep,
}
