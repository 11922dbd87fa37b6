"""Where a forward pass calls us: hooks on the modules that somebody waits for, and a recording of its order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from nnsight_async.worker.block import Key

#: Called as ``seen(key, value)`` when the pass comes to a location.
Seen = Callable[[Key, Any], None]


class Hooks:
    """Hooks on a model's modules, put on one location at a time."""

    def __init__(self, modules: dict[str, nn.Module], seen: Seen) -> None:
        self._modules = modules
        self._seen = seen
        self._removers: dict[Key, Callable[[], None]] = {}

    def add(self, key: Key) -> None:
        """Have ``seen`` called whenever the pass comes to ``key``."""
        if key in self._removers:
            return
        module, seen = self._modules[key[0]], self._seen
        if type(module).__call__ is not nn.Module.__call__:
            # vLLM's compiled classes call forward themselves when they are not compiled, past the hooks.
            self._removers[key] = _wrap_forward(module, key, seen)
        elif key[1] == "in":

            def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen(key, (args, kwargs))

            self._removers[key] = module.register_forward_pre_hook(before, with_kwargs=True).remove
        else:

            def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
                seen(key, output)

            self._removers[key] = module.register_forward_hook(after).remove

    def clear(self) -> None:
        """Take all hooks off."""
        for remove in reversed(self._removers.values()):
            remove()
        self._removers.clear()


def _wrap_forward(module: nn.Module, key: Key, seen: Seen) -> Callable[[], None]:
    inner = module.forward
    before = module.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        if key[1] == "in":
            seen(key, (args, kwargs))
            return inner(*args, **kwargs)
        output = inner(*args, **kwargs)
        seen(key, output)
        return output

    def remove() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    module.forward = forward
    return remove


def record_order(modules: dict[str, nn.Module], run: Callable[[], None]) -> list[Key]:
    """The locations that ``run``, one forward pass, comes to, in order."""
    calls: list[Key] = []
    hooks = Hooks(modules, lambda key, _: calls.append(key))
    try:
        for path in modules:
            hooks.add((path, "in"))
            hooks.add((path, "out"))
        run()
    finally:
        hooks.clear()
    return calls
