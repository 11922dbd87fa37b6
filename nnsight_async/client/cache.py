"""What ``tracer.cache`` captured, as its caller sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nnsight_async.wire import Loader, RowsOf

#: What a caller writes before a path of the tree: the variable that holds the model.
_ROOT = "model"


class CapturedStep:
    """What was captured in one step, of several requests; put together when it is first asked for."""

    def __init__(self, values: bytes, tensor_bytes: Any) -> None:
        self._packed: tuple[bytes, Any] | None = (values, tensor_bytes)
        self._values: dict[tuple[str, str], tuple[bool, Any]] = {}
        self._lock = threading.Lock()

    @property
    def values(self) -> Mapping[tuple[str, str], tuple[bool, Any]]:
        """By path and side: whether tensors have one row a request, and the value."""
        with self._lock:
            if self._packed is not None:
                for path, side, each, value in Loader().load_captured(*self._packed):
                    self._values[path, side] = (each, value)
                self._packed = None
        return self._values


class Share(NamedTuple):
    """One request's part of a step: which of the requests it is, and where its rows are."""

    step: CapturedStep
    position: int
    start: int
    stop: int

    def of(self, path: str, side: str, device: str) -> Any:
        """The request's rows of what was captured at a location."""
        each, value = self.step.values[path, side]
        start, stop = (self.position, self.position + 1) if each else (self.start, self.stop)
        return _take(value, start, stop, device)


def _take(value: Any, start: int, stop: int, device: str) -> Any:
    if isinstance(value, RowsOf):
        rows = value.tensor[start:stop]
        return rows.to(device) if device else rows
    if isinstance(value, torch.Tensor):
        return value.to(device) if device else value
    if isinstance(value, (tuple, list)):
        return type(value)(_take(item, start, stop, device) for item in value)
    if isinstance(value, dict):
        return {name: _take(item, start, stop, device) for name, item in value.items()}
    return value


class Capture:
    """One module in one step."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read

    @property
    def output(self) -> Any:
        """What the module returned: tensors ``[rows, ...]``, in a tuple if it returned one."""
        return self._read("out")

    @property
    def inputs(self) -> Any:
        """What it was called with, as ``(args, kwargs)``.

        Raises:
            AttributeError: the cache was opened without ``include_inputs=True``.
        """
        return self._read("in")

    @property
    def input(self) -> Any:
        """Its first argument; see :attr:`inputs`."""
        args, kwargs = self.inputs
        return args[0] if args else next(iter(kwargs.values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_describe(self.output)})"


class Captures(list[Capture]):
    """One module at every step, a :class:`Capture` each."""

    @property
    def output(self) -> list[Any]:
        """What the module returned at each step."""
        return [capture.output for capture in self]

    @property
    def inputs(self) -> list[Any]:
        """What it was called with at each step."""
        return [capture.inputs for capture in self]

    @property
    def input(self) -> list[Any]:
        """Its first argument at each step."""
        return [capture.input for capture in self]


class Cache(Mapping[str, Any]):
    """Captures by module, in the order in which the forward pass comes to them.

    A key is a path as one writes it: ``"model.model.layers.12.mlp"``, where the first name is the model's; without that
    name it is found too. Where the request generates one token, a value is a :class:`Capture`; else it is a list of
    them, one a step (:class:`Captures`).

    Tensors show the shared memory that the worker wrote, together with those of the other requests that were captured
    in the step: memory goes when nothing of that step is held any more. ``clone()`` what is to outlive the rest.
    """

    def __init__(self, shares: Sequence[Share], *, single: bool, device: str = "") -> None:
        self._shares = shares
        self._single = single
        self._device = device

    def _paths(self) -> dict[str, None]:
        return dict.fromkeys(path for share in self._shares for path, _ in share.step.values)

    def __iter__(self) -> Iterator[str]:
        return iter([f"{_ROOT}.{path}" if path else _ROOT for path in self._paths()])

    def __len__(self) -> int:
        return len(self._paths())

    def __getitem__(self, key: str) -> Any:
        known = self._paths()
        path = "" if key == _ROOT and "" in known else key.removeprefix(f"{_ROOT}.")
        if path not in known:
            path = key
        if path not in known:
            raise KeyError(
                f"{key!r} was not captured; what was: {', '.join(list(self)[:8])}{', ...' * (len(self) > 8)}"
            )
        captures = Captures(self._capture(share, path) for share in self._shares if _has(share, path))
        return captures[0] if self._single else captures

    def _capture(self, share: Share, path: str) -> Capture:
        device = self._device

        def read(side: str) -> Any:
            if (path, side) not in share.step.values:
                raise AttributeError(f"the inputs of {path} were not captured: open the cache with include_inputs=True")
            return share.of(path, side, device)

        return Capture(read)

    def __repr__(self) -> str:
        return f"Cache({len(self)} modules, {len(self._shares)} steps)"

    def __reduce__(self) -> tuple[Any, ...]:
        steps = []
        for share in self._shares:
            values = {(path, side): (False, share.of(path, side, "")) for path, side in share.step.values}
            steps.append(values)
        return (_restore, (_cloned(steps), self._single, self._device))


def _has(share: Share, path: str) -> bool:
    return (path, "out") in share.step.values


def _restore(steps: list[dict[tuple[str, str], tuple[bool, Any]]], single: bool, device: str) -> Cache:
    """A cache from its pickle, in which each request's rows are by themselves."""
    shares = []
    for values in steps:
        step = CapturedStep(b"", None)
        step._packed, step._values = None, values
        shares.append(Share(step, 0, 0, 0))
    return Cache(shares, single=single, device=device)


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()  # or the pickle would hold the rows of all requests
    if isinstance(value, (tuple, list)):
        return type(value)(map(_cloned, value))
    if isinstance(value, dict):
        return {name: _cloned(item) for name, item in value.items()}
    return value


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_describe, value))})"
    return type(value).__name__
