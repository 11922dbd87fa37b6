"""What this package is measured at: each workload runs a job on a model in the async form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.jobs import Job, Run, Workload, stream_all, timed
from nnsight_async import VLLM


async def untraced(model: VLLM, job: Job) -> Run:
    """``model.generate``, nothing traced."""

    async def generate() -> int:
        outputs = await model.generate(job.prompts, progress=False, **job.sampling)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return await timed(generate())


async def empty_trace(model: VLLM, job: Job) -> Run:
    """A trace whose block does nothing."""

    def start(prompt: list[int]) -> Any:
        with model.trace(prompt, **job.sampling) as tracer:
            pass
        return tracer.backend

    return await stream_all(job, start)


async def one_layer(model: VLLM, job: Job) -> Run:
    """One layer's hidden states, all positions, kept at every step."""
    layer, tokens = model.model.layers[job.layer], job.tokens

    def start(prompt: list[int]) -> Any:
        with model.trace(prompt, **job.sampling) as tracer:
            hidden = list().save()
            for _ in tracer.iter[:tokens]:
                hidden.append(layer.output[0])
        return tracer.backend

    return await stream_all(job, start, lambda output: len(output.saves["hidden"]) == tokens)


async def every_layer(model: VLLM, job: Job) -> Run:
    """Every layer's hidden states, all positions, kept at every step by the block."""
    layers, tokens = model.model.layers, job.tokens

    def start(prompt: list[int]) -> Any:
        with model.trace(prompt, **job.sampling) as tracer:
            hidden = list().save()
            for _ in tracer.iter[:tokens]:
                for layer in layers:
                    hidden.append(layer.output[0])
        return tracer.backend

    return await stream_all(job, start, lambda output: len(output.saves["hidden"]) == tokens * job.layers)


async def cache_every_layer(model: VLLM, job: Job) -> Run:
    """``tracer.cache`` of every layer's output (hidden states and residual), all positions, at every step."""

    def start(prompt: list[int]) -> Any:
        with model.trace(prompt, **job.sampling) as tracer:
            cache = tracer.cache(modules="model.layers.*")
        return tracer.backend

    return await stream_all(job, start, lambda output: len(output.saves["cache"]) == job.layers)


async def steering(model: VLLM, job: Job) -> Run:
    """A vector added to one layer's residual stream at every step."""
    layer, tokens, device = model.model.layers[job.layer], job.tokens, job.device
    vector = torch.full((job.width,), 0.01)

    def start(prompt: list[int]) -> Any:
        with model.trace(prompt, **job.sampling) as tracer:
            here = vector.to(device)
            for _ in tracer.iter[:tokens]:
                layer.output[0] += here
        return tracer.backend

    return await stream_all(job, start)


async def logit_lens(model: VLLM, job: Job) -> Run:
    """The top token of a middle layer's residual stream, through the final norm and the unembedding, at every step."""
    layer, tokens = model.model.layers[job.layers // 2], job.tokens
    norm, unembed, head = model.model.norm, model.logits_processor, model.lm_head

    def start(prompt: list[int]) -> Any:
        with model.trace(prompt, **job.sampling) as tracer:
            top = list().save()
            for _ in tracer.iter[:tokens]:
                last = sum(layer.output)[-1:]
                top.append(unembed(head, norm(last)).argmax(-1))
        return tracer.backend

    return await stream_all(job, start, lambda output: len(output.saves["top"]) == tokens)


async def zeroed_head(model: VLLM, job: Job) -> Run:
    """One attention head's output set to zero at every step."""
    projection, tokens, width = model.model.layers[job.layer].self_attn.o_proj, job.tokens, job.head

    def start(prompt: list[int]) -> Any:
        with model.trace(prompt, **job.sampling) as tracer:
            for _ in tracer.iter[:tokens]:
                projection.input[:, width : 2 * width] = 0
        return tracer.backend

    return await stream_all(job, start)


async def forced_samples(model: VLLM, job: Job) -> Run:
    """The block writes the token that the engine goes on from, at every step."""
    tokens, token = job.tokens, 1000

    def start(prompt: list[int]) -> Any:
        with model.trace(prompt, **job.sampling) as tracer:
            for _ in tracer.iter[:tokens]:
                model.samples = torch.full_like(model.samples, token)
        return tracer.backend

    return await stream_all(job, start, lambda output: set(output.outputs[0].token_ids) == {token})


async def sweep(model: VLLM, job: Job) -> Run:
    """Many short prompts through ``model.map``, one layer's hidden states of each, ``job.concurrency`` at once."""
    layer = model.model.layers[job.layer]

    async def probe(prompt: list[int]) -> int:
        async with model.trace(prompt, **job.sampling):
            hidden = layer.output[0].save()
        if hidden.shape[0] != len(prompt):
            raise RuntimeError(f"{hidden.shape[0]} rows came home for a prompt of {len(prompt)} tokens")
        return job.tokens

    async def run() -> int:
        async with model.map(probe, job.prompts, concurrency=job.concurrency) as results:
            return sum([tokens async for tokens in results])

    return await timed(run())


@dataclass(frozen=True)
class Spec:
    """A workload with the way in which plain vLLM is run beside it.

    ``heavy`` says that it sends home every layer of every position, which is gigabytes with long prompts.
    """

    run: Workload
    plain: Literal["batch", "stream", "sweep"] = "stream"
    heavy: bool = False

    @property
    def says(self) -> str:
        """What it does, in a line."""
        return (self.run.__doc__ or "").strip()


WORKLOADS: dict[str, Spec] = {
    "untraced": Spec(untraced, "batch"),
    "empty trace": Spec(empty_trace),
    "one layer": Spec(one_layer),
    "every layer": Spec(every_layer, heavy=True),
    "cache": Spec(cache_every_layer, heavy=True),
    "steering": Spec(steering),
    "logit lens": Spec(logit_lens),
    "zeroed head": Spec(zeroed_head),
    "forced samples": Spec(forced_samples),
    "sweep": Spec(sweep, "sweep"),
}
