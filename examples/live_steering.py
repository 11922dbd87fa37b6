"""Steer a model while it writes, with a probe's reading under every token: a page with a slider, in a terminal.

    python examples/live_steering.py --prompt "Here is what I think of the film:" --tokens 48

A direction is found from two sentences first. Then one request streams; half way, this process turns the steering up,
and later bans a token, all while the request runs. Nothing is started again, and the block does not change.
"""

from __future__ import annotations

import argparse
import asyncio
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from small_models import smollm2

from nnsight_async import VLLM

LAYER = 14
ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 256 << 20, "max_model_len": 512}


async def mean_stream(model: VLLM, text: str) -> torch.Tensor:
    """The residual stream after one layer, averaged over a text: ``[width]``."""
    async with model.trace(text, max_tokens=1):
        mean = sum(model.model.layers[LAYER].output).mean(0).save()
    return mean


async def main(prompt: str, tokens: int, strength: float) -> None:
    async with VLLM(smollm2(), mode="async", **ENGINE) as model:
        texts = ["It was wonderful, I loved every minute of it.", "It was terrible, I hated every minute of it."]
        good, bad = await asyncio.gather(*(mean_stream(model, text) for text in texts))
        direction = (good - bad) / (good - bad).norm()

        with model.trace(prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True) as tracer:
            readings = [].save()
            for _ in tracer.iter[:tokens]:
                layer = model.model.layers[LAYER]
                layer.output[0] += tracer.live("strength", 0.0) * direction
                readings.append((sum(layer.output)[-1] @ direction).item())  # the probe

        written = 0
        async with tracer.backend as stream:
            async for output in stream:
                text = output.outputs[0].text
                print(f"{output.step:3}  {output.saves['readings'][-1]:8.2f}  {text[written:]!r}")
                written = len(text)
                if output.step == tokens // 3:
                    step = await stream.set(strength=strength)  # the slider moved
                    print(f"     strength is {strength} from step {step} on")
                if output.step == 2 * tokens // 3:
                    step = await stream.set(strength=0.0)
                    print(f"     strength is 0 from step {step} on")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="Here is what I think of the film:")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--strength", type=float, default=40.0)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.prompt, arguments.tokens, arguments.strength))
