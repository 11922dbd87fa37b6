"""Stream activations out of a model, token by token, while it writes.

    python examples/stream_activations.py --prompt "The capital of France is" --tokens 24

What to look at: the block under `with model.trace(...)` is not run in this process. It is sent to the process that
holds the weights and runs there, between the layers of the forward pass, and what it saves comes back with each token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

# vLLM reads this when it is imported, and so do the processes that it starts.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

LAYERS = [0, 10, 20, 29]  # of 30


async def main(prompt: str, tokens: int) -> None:
    with progress("Importing vLLM"):  # some seconds, which is why these imports stand here
        import torch
        from small_models import smollm2

        from nnsight_async import VLLM

        path = smollm2()

    # Everything but `mode` is vLLM's own argument; these fit a small machine without a GPU.
    async with VLLM(path, mode="async", dtype="float32", kv_cache_memory_bytes=256 << 20, max_model_len=512) as model:
        with progress("Starting the engine, half a minute on two cores"):
            await model.ready()  # the first trace would wait for it as well

        layers = [model.model.layers[index] for index in LAYERS]  # references, which travel with the block
        decode = model.tokenizer.decode

        # One trace is one generation. `ignore_eos` makes it as many steps long as the loop below asks for.
        with model.trace(prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True) as tracer:
            residuals = [].save()
            top = [].save()
            for _ in tracer.iter[:tokens]:
                rows = []
                for layer in layers:
                    hidden, residual = layer.output  # each [rows, 576]: a row a prompt token, then one a step
                    rows.append((hidden + residual)[-1])  # the residual stream of the running token
                residuals.append(torch.stack(rows))
                probabilities = model.logits[0].softmax(-1)  # what the sampler is about to draw from
                top.append(torch.topk(probabilities, 3))

        # Leaving the block has submitted the request and not waited for it.
        begun = time.monotonic()
        print(f"\n{prompt!r}, continued greedily.")
        print("Residual norms are those of the position that the token is predicted from.\n")
        print("step  token           " + "".join(f"{'layer ' + str(index):>10}" for index in LAYERS) + "   likeliest")

        written = 0  # characters of the text so far
        async for output in tracer.backend:  # one output a step, each with what the block has saved up to then
            text = output.outputs[0].text
            norms = output.saves["residuals"][-1].norm(dim=-1).tolist()
            likeliest = output.saves["top"][-1]
            guesses = [f"{decode(i)!r} {p:.0%}" for p, i in zip(likeliest.values, likeliest.indices, strict=True)]
            columns = "".join(f"{norm:>10.1f}" for norm in norms)
            print(f"{output.step:>4}  {text[written:]!r:<16}{columns}   {', '.join(guesses)}", flush=True)
            written = len(text)
        seconds = time.monotonic() - begun

        saved = output.saves
        vectors, lists = tuple(saved["residuals"][0].shape), tuple(saved["top"][0].values.shape)
        print(f"\n{prompt}{text}\n")
        print(f"residuals  {len(saved['residuals'])} tensors of shape {vectors}: a step each, [layers, width]")
        print(f"top        {len(saved['top'])} pairs of probabilities and token ids, each of shape {lists}")
        print(f"{len(output.outputs[0].token_ids) / seconds:.1f} tokens per second, activations included")


# From here on only what keeps the terminal tidy.


@contextmanager
def progress(title: str) -> Iterator[None]:
    """A line with a spinner and the seconds gone by; without a terminal, a line before and a line after."""
    console, begun = Console(), time.monotonic()
    if console.is_terminal:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as line:
            line.add_task(title, total=None)
            yield
    else:
        print(f"{title} ...", flush=True)
        yield
    print(f"{title}: done in {time.monotonic() - begun:.0f} s.", flush=True)


@contextmanager
def errors_only() -> Iterator[None]:
    """Keep back what this process and the engine's processes write to stderr, and show it if something fails."""
    with tempfile.TemporaryFile("w+", errors="replace") as kept:
        terminal = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except Exception:
            kept.seek(0)
            os.write(terminal, kept.read().encode())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)


def token_count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= 400:
        raise argparse.ArgumentTypeError("between 1 and 400: the engine holds 512 with the prompt")
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Stream activations out of a small model while it writes.")
    parser.add_argument("--prompt", default="The capital of France is", help="what the model continues")
    parser.add_argument("--tokens", type=token_count, default=24, help="how many tokens it writes (default: 24)")
    chosen = parser.parse_args()
    with errors_only():
        asyncio.run(main(chosen.prompt, chosen.tokens))
