"""The independent reference: the same checkpoint in HuggingFace transformers, float32, eager attention.

Nothing here touches vLLM or the package under test. Positions are the rows: every tensor is
`[positions, width]`, without HuggingFace's batch axis, as the block of one request sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """A checkpoint in HuggingFace transformers, to compare with. `reference(path)` shares one per path."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.model = model.eval().requires_grad_(False)

    @property
    def layers(self) -> torch.nn.ModuleList:
        """The decoder layers, whatever the architecture calls them."""
        body = self.model.base_model
        return body.h if hasattr(body, "h") else body.layers

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt, with the special tokens that vLLM would add; ids pass through."""
        return self.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)

    @torch.no_grad()
    def greedy(self, prompt_or_ids: str | Sequence[int], n: int) -> list[int]:
        """The `n` tokens that continue a prompt greedily, end-of-sequence or not (vLLM's `ignore_eos`)."""
        step = torch.tensor([self.encode(prompt_or_ids)])
        past = None
        tokens: list[int] = []
        for _ in range(n):
            out = self.model(step, past_key_values=past, use_cache=True)
            past = out.past_key_values
            step = out.logits[:, -1:].argmax(-1)
            tokens.append(int(step))
        return tokens

    def hidden_states(self, ids: Sequence[int]) -> list[Tensor]:
        """The residual stream entering layer 0, then leaving each layer: `layers + 1` `[positions, width]`.

        The last one is what enters the final norm. (HuggingFace's own `hidden_states[-1]` is what leaves it.)
        """
        stream: list[Tensor] = []

        def entering(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stream.append(_rows(args[0] if args else kwargs["hidden_states"]))

        def leaving(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            stream.append(_rows(output))

        with ExitStack() as hooks:
            hooks.enter_context(self.layers[0].register_forward_pre_hook(entering, with_kwargs=True))
            for layer in self.layers:
                hooks.enter_context(layer.register_forward_hook(leaving))
            self._forward(ids)
        return stream

    def module_outputs(self, ids: Sequence[int], names: Iterable[str]) -> dict[str, Tensor]:
        """What the named modules return (`model.layers.3.mlp`); of a tuple, the first element.

        Raises:
            AttributeError: the model has no module of that name.
            AssertionError: a named module was not called.
        """
        names = list(names)
        outputs: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[torch.nn.Module, tuple[Any, ...], Any], None]:
            def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
                outputs[name] = _rows(output)

            return hook

        with ExitStack() as hooks:
            for name in names:
                hooks.enter_context(self.model.get_submodule(name).register_forward_hook(keep(name)))
            self._forward(ids)
        missing = [name for name in names if name not in outputs]
        assert not missing, f"never called: {missing}"
        return outputs

    def logits(self, ids: Sequence[int]) -> Tensor:
        """The logits after every position, `[positions, vocabulary]`."""
        return self._forward(ids)

    @torch.no_grad()
    def _forward(self, ids: Sequence[int]) -> Tensor:
        return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]


@lru_cache
def reference(path: str) -> Reference:
    """The reference for the checkpoint at `path`, loaded once a process."""
    return Reference(path)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, as a fraction of the largest magnitude expected; NaN if either holds one."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    difference, scale = (actual - expected).abs().max(), expected.abs().max()
    return float(difference / scale) if scale > 0 else float(difference)


def close(actual: Tensor, expected: Tensor, tol: float = 1e-3) -> float:
    """Assert that `actual` is `expected` to within `tol` of its scale, and return the error measured."""
    error = relative_error(actual, expected)
    assert error <= tol, f"off by {error:.3g} of the largest value expected; at most {tol:.3g} is allowed"
    return error


def _rows(output: Any) -> Tensor:
    """A module's output without the batch axis, copied: a later layer may write into it."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    if tensor.dim() >= 3:
        assert tensor.shape[0] == 1, f"a batch of {tensor.shape[0]}"
        tensor = tensor[0]
    return tensor.detach().clone()
