"""What a block sees in the worker where the caller's code says ``model`` and ``tracer``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nnsight_async.errors import NO_BARRIER, ArgumentError, UnsupportedError
from nnsight_async.saving import CacheMark
from nnsight_async.tree import ModuleRef
from nnsight_async.worker.block import LOGITS, SAMPLES, StopRequest
from nnsight_async.worker.interleaver import Interleaver


class ModelFace:
    """The model as a block sees it: the worker's modules, the logits, the samples and the tokenizer."""

    __slots__ = ("_interleaver", "_root", "_tokenizer")

    def __init__(self, root: ModuleRef, interleaver: Interleaver, tokenizer: Any) -> None:
        self._root = root
        self._interleaver = interleaver
        self._tokenizer = tokenizer

    @property
    def logits(self) -> Any:
        """What the sampler is about to draw from at this step, ``[1, vocab]``, in the model's type."""
        return self._interleaver.wait_for(LOGITS)

    @logits.setter
    def logits(self, value: Any) -> None:
        self._interleaver.replace(LOGITS, value)

    @property
    def samples(self) -> Any:
        """The token id drawn at this step, ``[1, 1]``."""
        return self._interleaver.wait_for(SAMPLES)

    @samples.setter
    def samples(self, value: Any) -> None:
        self._interleaver.replace(SAMPLES, value)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._tokenizer()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a block is one trace already."""
        raise UnsupportedError("model.trace cannot be opened inside a block: open several invokes in one trace instead")

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a block runs inside a generation."""
        raise UnsupportedError("model.generate cannot be called inside a block: call it before or after the trace")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, as for every module that holds an attention layer."""
        return self._root(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._root, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ModelFace.__slots__ or name in ("logits", "samples"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._root, name, value)

    def __repr__(self) -> str:
        return repr(self._root)


class Steps:
    """``tracer.iter``: indexed with a step, a slice of steps or a list of them, it is a loop over those steps."""

    __slots__ = ("_interleaver",)

    def __init__(self, interleaver: Interleaver) -> None:
        self._interleaver = interleaver

    def __getitem__(self, steps: int | slice | Sequence[int]) -> Iterator[int]:
        return self._loop(_chosen(steps))

    def __iter__(self) -> Iterator[int]:
        return self[:]

    def _loop(self, chosen: Iterator[int]) -> Iterator[int]:
        for step in chosen:
            self._interleaver.wait_for_step(step)
            yield step


def _chosen(steps: int | slice | Sequence[int]) -> Iterator[int]:
    if isinstance(steps, slice):
        start, stop, stride = steps.start or 0, steps.stop, 1 if steps.step is None else steps.step
        if start < 0 or stride < 1 or (stop is not None and stop < 0):
            raise ArgumentError(
                f"tracer.iter[{steps.start}:{steps.stop}:{steps.step}]: steps are counted from 0, the prefill, "
                "upwards; how many there will be is not known beforehand"
            )
        return iter(range(start, 1 << 60 if stop is None else stop, stride))
    numbers = [steps] if isinstance(steps, int) else list(steps)
    for before, number in zip([-1, *numbers], numbers, strict=False):
        if not isinstance(number, int) or number <= before:
            raise ArgumentError(f"tracer.iter[{steps!r}]: steps are counted from 0, the prefill, in rising order")
    return iter(numbers)


class TracerFace:
    """The tracer as a block sees it."""

    __slots__ = ("_interleaver",)

    def __init__(self, interleaver: Interleaver) -> None:
        self._interleaver = interleaver

    @property
    def iter(self) -> Steps:
        """Steps to loop over: ``for step in tracer.iter[:8]``."""
        return Steps(self._interleaver)

    def all(self) -> Iterator[int]:
        """Every step of the request; the loop ends with the request, and what follows it does not run."""
        return self.iter[:]

    @property
    def result(self) -> Any:
        """vLLM's RequestOutput of the finished request; waits for the request's end."""
        return self._interleaver.wait_for_result()

    def live(self, name: str, default: Any = None) -> Any:
        """What the caller has last set for ``name`` with ``stream.set``, else ``default``; it changes between steps."""
        return self._interleaver.running.controls.live.get(name, default)

    def cache(
        self,
        modules: Any = None,
        *,
        include_inputs: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> CacheMark:
        """Capture modules' outputs at every step; see :meth:`nnsight_async.client.tracer.Tracer.cache`."""
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(f"dtype={dtype!r} is no floating-point type of torch's")
        where = "" if device is None or torch.device(device).type == "cpu" else str(torch.device(device))
        return self._interleaver.open_cache(modules, include_inputs=include_inputs, device=where, dtype=dtype)

    def stop(self) -> None:
        """End the request at this step and leave the block."""
        raise StopRequest

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: an invoke is opened beside another one, not in it."""
        raise UnsupportedError("tracer.invoke cannot be opened inside a block: open it in a trace without a prompt")

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: requests never share a forward pass for certain, so they cannot wait for one another."""
        raise UnsupportedError(NO_BARRIER)
