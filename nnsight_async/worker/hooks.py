"""Where a forward pass calls us: wrappers around the modules that somebody waits for, and a recording of its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from nnsight_async.errors import NeverReachedError, UnsupportedError
from nnsight_async.forward import read_forward
from nnsight_async.tree import describe, split_operation
from nnsight_async.worker.block import Key


@dataclass(frozen=True, slots=True)
class Instead:
    """An output that stands for a module's own, so that the module is not run."""

    output: Any


#: Called as ``seen(key, value)`` when the pass comes to a location. What it returns for the input of a module, if it
#: returns anything, stands for that module's output.
Seen = Callable[[Key, Any], Instead | None]


class Hooks:
    """Wrappers around the forward methods of a model's modules, put on for one location at a time.

    PyTorch's own hooks would not do. Some vLLM classes call ``forward`` past them, and a hook cannot keep a module from
    being run. A wrapper has to be there when its module's call begins, so what is around a location gets one with it:
    whoever is shown something inside a call can then ask for what comes later in it. Around a module are its ancestors
    and whatever else a recorded pass called it from (vLLM's fused experts call the shared one, which stands beside
    them).

    A module that stands at several paths (rotary embeddings, which vLLM shares between layers) is called once for each:
    only the calls from within a path's own parent are that path's.

    While ``quiet()`` says so (a block is running, and what is called is called by it) nothing is seen.
    """

    def __init__(self, modules: dict[str, nn.Module], seen: Seen, quiet: Callable[[], bool] = lambda: False) -> None:
        self._modules = modules
        self._seen = seen
        self._quiet = quiet
        self._added: set[Key] = set()
        times = Counter(map(id, modules.values()))
        self._shared = {path for path, module in modules.items() if times[id(module)] > 1}
        self._wrapped: dict[int, _Wrapped] = {}
        self._operating = False
        self._around: dict[str, set[str]] = {}

    def learn_order(self, order: Sequence[Key]) -> None:
        """Learn from a recorded pass from where each module is called."""
        inside: list[str] = []
        for path, side in order:
            if side == "in":
                self._around.setdefault(path, set()).update(inside)
                inside.append(path)
            else:
                inside.remove(path)

    def add(self, key: Key) -> None:
        """Have ``seen`` called whenever the pass comes to ``key``."""
        if key in self._added:
            return
        self._added.add(key)
        operation = split_operation(key[0])
        path = key[0] if operation is None else operation[0]
        wrapped = self._wrap(path)
        calls = wrapped.calls if operation is None else wrapped.asked.setdefault(operation[1], _Calls())
        parents = [self._wrap(parent) for parent in _parents(path)]
        for outer in self._around.get(path, ()):
            self._wrap(outer)
        see = partial(self._seen, key)
        if path in self._shared and parents:
            see = partial(_within, parents[0], see)
        (calls.before if key[1] == "in" else calls.after).append(see)

    def expect_operations(self) -> None:
        """From here on, have the modules around every location ready to show their operations.

        An operation can only be shown by a forward that was rewritten before it began, and a block may ask for one
        when it is already inside it.
        """
        if not self._operating:
            self._operating = True
            for wrapped in self._wrapped.values():
                wrapped.rewrite()

    def check_operation(self, path: str) -> None:
        """Raise if an operation cannot be seen.

        Raises:
            UnsupportedError: the module's forward cannot be rewritten.
            NeverReachedError: it has begun as it is.
        """
        operation = split_operation(path)
        if operation is None:
            return
        wrapped = self._wrap(operation[0])
        wrapped.rewrite()
        if wrapped.refusal:
            raise UnsupportedError(wrapped.refusal)
        if wrapped.running_plainly:
            raise NeverReachedError(
                f"{describe(path, 'out')} cannot be reached any more: the module's forward began before anything told "
                "that its operations would be read; write `.source` in the block itself, or read an operation of the "
                "module before anything inside it"
            )

    def clear(self) -> None:
        """Take all wrappers off."""
        for wrapped in self._wrapped.values():
            wrapped.remove()
        self._wrapped.clear()
        self._added.clear()
        self._operating = False

    def _wrap(self, path: str) -> _Wrapped:
        module = self._modules[path]
        wrapped = self._wrapped.get(id(module))
        if wrapped is None:
            wrapped = self._wrapped[id(module)] = _Wrapped(module, self._quiet)
            if self._operating:
                wrapped.rewrite()
        return wrapped


@dataclass(slots=True)
class _Calls:
    """What is called before and after something runs; more may be added while it does."""

    before: list[Callable[[Any], Instead | None]] = field(default_factory=list)
    after: list[Callable[[Any], Instead | None]] = field(default_factory=list)


class _Wrapped:
    """One module's forward method with our calls around it and, once it is rewritten, around its operations."""

    def __init__(self, module: nn.Module, quiet: Callable[[], bool]) -> None:
        self._module = module
        self._quiet = quiet
        self._plain = module.forward
        self._own = module.__dict__.get("forward")
        self._rewritten: Callable[..., Any] | None = None
        self.calls = _Calls()
        self.asked: dict[str, _Calls] = {}
        self.refusal = ""  # why its operations cannot be shown
        self.active = 0  # how many of its calls are in progress
        self.running_plainly = False  # whether one is, in the forward as it was written
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._quiet():
            return self._plain(*args, **kwargs)
        self.active += 1
        try:
            instead = None
            for call in self.calls.before:
                instead = call((args, kwargs)) or instead
            output = self._run(args, kwargs) if instead is None else instead.output
            for call in self.calls.after:
                call(output)
        finally:
            self.active -= 1
        return output

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._rewritten is not None:
            return self._rewritten(*args, **kwargs)
        self.running_plainly = True
        try:
            return self._plain(*args, **kwargs)
        finally:
            self.running_plainly = False

    def _operate(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        asked = self.asked.get(name)
        if asked is None or self._quiet():
            return function(*args, **kwargs)
        for call in asked.before:
            call((args, kwargs))
        output = function(*args, **kwargs)
        for call in asked.after:
            call(output)
        return output

    def rewrite(self) -> None:
        """Have the operations shown in calls that begin from here on; ``refusal`` says why where that cannot be."""
        if self._rewritten is not None or self.refusal:
            return
        try:
            if self._own is not None:
                raise UnsupportedError(
                    f"the operations of this {type(self._module).__name__} cannot be addressed: its forward was "
                    "replaced when the model was built; read its input and output, or its children"
                )
            self._rewritten = read_forward(self._module).bind(self._module, self._operate)
        except UnsupportedError as refusal:
            self.refusal = str(refusal)

    def remove(self) -> None:
        """Put the module's own forward back."""
        if self._own is None:
            del self._module.forward
        else:
            self._module.forward = self._own


def _within(parent: _Wrapped, see: Callable[[Any], Instead | None], value: Any) -> Instead | None:
    return see(value) if parent.active else None


def _parents(path: str) -> list[str]:
    """The paths above ``path``, the nearest first, down to ``""``, the model."""
    names = path.split(".") if path else []
    return [".".join(names[:count]) for count in range(len(names) - 1, -1, -1)]


def record(modules: dict[str, nn.Module], run: Callable[[], None], seen: Callable[[Key, Any], None]) -> None:
    """Call ``seen`` for every location that ``run``, one forward pass, comes to, in order."""
    hooks = Hooks(modules, seen)
    try:
        for path in modules:
            hooks.add((path, "in"))
            hooks.add((path, "out"))
        run()
    finally:
        hooks.clear()
