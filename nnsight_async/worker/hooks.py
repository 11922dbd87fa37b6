"""Where a forward pass calls us: hooks on the modules that somebody waits for, and a recording of its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from nnsight_async.worker.block import Key

#: Called as ``seen(key, value)`` when the pass comes to a location.
Seen = Callable[[Key, Any], None]


class Hooks:
    """Hooks on a model's modules, put on one location at a time.

    Two things need more than the location's own hook. A module whose call has begun without hooks does not look at
    those it gets meanwhile, so a location's ancestors get theirs with it. And a module that stands at several paths
    (rotary embeddings, which vLLM shares between layers) is called once for each: only the calls from within a path's
    own parent are that path's.
    """

    def __init__(self, modules: dict[str, nn.Module], seen: Seen) -> None:
        self._modules = modules
        self._seen = seen
        self._removers: dict[Key, Callable[[], None]] = {}
        times = Counter(map(id, modules.values()))
        self._shared = {path for path, module in modules.items() if times[id(module)] > 1}
        self._wrapped: dict[str, _Wrapped] = {}
        self._inside: set[str] = set()  # the parents of shared modules whose call is in progress
        self._at: Key = ("", "")  # the location being seen

    def add(self, key: Key) -> None:
        """Have ``seen`` called whenever the pass comes to ``key``."""
        if key in self._removers:
            return
        path = key[0]
        parents = _parents(path)
        if path in self._shared and parents:
            if self._at[0].startswith(f"{parents[0]}.") or self._at == (parents[0], "in"):
                self._inside.add(parents[0])  # its call has begun, and will not be seen to begin
            self._put((parents[0], "enter"), partial(self._enter, parents[0]))
            self._put((parents[0], "leave"), partial(self._leave, parents[0]))
            self._put(key, partial(self._seen_within, parents[0], key))
        else:
            self._put(key, partial(self._see, key))
        for parent in parents:
            self.add((parent, "out"))

    def clear(self) -> None:
        """Take all hooks off."""
        for remove in reversed(self._removers.values()):
            remove()
        self._removers.clear()
        for wrapped in self._wrapped.values():
            wrapped.remove()
        self._wrapped.clear()

    def _put(self, key: Key, call: Callable[[Any], None]) -> None:
        if key in self._removers:
            return
        module, before = self._modules[key[0]], key[1] in ("in", "enter")
        if type(module).__call__ is not nn.Module.__call__:
            # vLLM's compiled classes call forward themselves when they are not compiled, past the hooks.
            wrapped = self._wrapped.get(key[0])
            if wrapped is None:
                wrapped = self._wrapped[key[0]] = _Wrapped(module)
            (wrapped.before if before else wrapped.after).append(call)
            self._removers[key] = _nothing
        elif before:

            def pre(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                call((args, kwargs))

            self._removers[key] = module.register_forward_pre_hook(pre, with_kwargs=True).remove
        else:

            def post(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
                call(output)

            self._removers[key] = module.register_forward_hook(post).remove

    def _enter(self, path: str, _value: Any) -> None:
        self._inside.add(path)

    def _leave(self, path: str, _value: Any) -> None:
        self._inside.discard(path)

    def _seen_within(self, parent: str, key: Key, value: Any) -> None:
        if parent in self._inside:
            self._see(key, value)

    def _see(self, key: Key, value: Any) -> None:
        self._at = key
        self._seen(key, value)
        self._at = ("", "")


def _nothing() -> None:
    """A wrapped forward is taken off whole."""


def _parents(path: str) -> list[str]:
    """The paths above ``path``, the nearest first, down to ``""``, the model."""
    names = path.split(".") if path else []
    return [".".join(names[:count]) for count in range(len(names) - 1, -1, -1)]


class _Wrapped:
    """A forward method with calls before and after it, which may be added while it runs."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._inner = module.forward
        self._own = module.__dict__.get("forward")
        self.before: list[Callable[[Any], None]] = []
        self.after: list[Callable[[Any], None]] = []
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for call in self.before:
            call((args, kwargs))
        output = self._inner(*args, **kwargs)
        for call in self.after:
            call(output)
        return output

    def remove(self) -> None:
        """Put the module's own forward back."""
        if self._own is None:
            del self._module.forward
        else:
            self._module.forward = self._own


def record_order(modules: dict[str, nn.Module], run: Callable[[], None], see: Seen | None = None) -> list[Key]:
    """The locations that ``run``, one forward pass, comes to, in order; ``see`` is shown the value of each."""
    calls: list[Key] = []

    def seen(key: Key, value: Any) -> None:
        calls.append(key)
        if see is not None:
            see(key, value)

    hooks = Hooks(modules, seen)
    try:
        for path in modules:
            hooks.add((path, "in"))
            hooks.add((path, "out"))
        run()
    finally:
        hooks.clear()
    return calls
