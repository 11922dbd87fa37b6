"""Look inside a language model, and change it, while vLLM serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_async.saving import save

if TYPE_CHECKING:
    from nnsight_async.client.output import StepOutput
    from nnsight_async.client.stream import Stream
    from nnsight_async.client.tracer import Tracer
    from nnsight_async.model import VLLM
    from nnsight_async.tree import ModuleRef

__version__ = "0.1.0"
__all__ = ["VLLM", "ModuleRef", "StepOutput", "Stream", "Tracer", "save"]

_HOMES = {
    "VLLM": "nnsight_async.model",
    "ModuleRef": "nnsight_async.tree",
    "StepOutput": "nnsight_async.client.output",
    "Stream": "nnsight_async.client.stream",
    "Tracer": "nnsight_async.client.tracer",
}


def __getattr__(name: str) -> Any:
    # Importing vLLM takes ten seconds, and the worker imports this package too and wants none of the client.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
