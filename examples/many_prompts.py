"""Read several prompts in one trace: each is a request of its own, and vLLM batches them.

    python examples/many_prompts.py

This is the synchronous form: when the trace is left, the saved names hold their values, one for each prompt.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from small_models import smollm2

from nnsight_async import VLLM

PROMPTS = [
    "The capital of France is",
    "The capital of Japan is",
    "The opposite of hot is",
    "One, two, three,",
]


def main() -> None:
    # All arguments are vLLM's own; these fit a small machine without a GPU.
    with VLLM(smollm2(), dtype="float32", kv_cache_memory_bytes=256 << 20, max_model_len=512) as model:
        layer = model.model.layers[20]

        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            for prompt in PROMPTS:
                with tracer.invoke(prompt):
                    residual = sum(layer.output).save()  # [tokens of the prompt, 576]: no padding, no batch axis
                    token = model.logits.argmax(-1).save()  # [1]

        # A name saved in every invoke is a list, in the order of the invokes.
        for prompt, rows, ids in zip(PROMPTS, residual, token, strict=True):
            print(f"{prompt!r:28} {tuple(rows.shape)} -> {model.tokenizer.decode(ids)!r}")


if __name__ == "__main__":
    main()
