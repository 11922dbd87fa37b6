"""Other packages that look into vLLM, run on the workloads that they can do.

Each adapter is a module of this package, imported only where its package is installed, and only in a process of its
own: some of them change settings or vLLM itself for the whole process. An adapter has

* ``async def start(settings: Settings) -> Any``, which starts an engine,
* ``WORKLOADS``, from the names in ``benchmarks.workloads.WORKLOADS`` to what runs a job on that engine, and
* ``async def close(engine) -> None``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Settings:
    """What an adapter is told: the model, vLLM's own engine arguments, and which layers are going to be read."""

    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    layer: int = 0
    layers: int = 0
    eager: bool = False


@dataclass(frozen=True)
class Peer:
    """A package and its adapter, both by name, and the variables that its process runs with."""

    distribution: str
    module: str
    adapter: str
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str | None:
        """The installed version; None where the package is not there."""
        if importlib.util.find_spec(self.module) is None:
            return None
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    def load(self) -> ModuleType:
        """Import the adapter, and with it the package."""
        return importlib.import_module(self.adapter)


_V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}

PEERS: dict[str, Peer] = {
    "nnsight": Peer("nnsight", "nnsight", "benchmarks.peers.nnsight", _V1),
    "interp-engine": Peer("interp-engine", "interp_engine", "benchmarks.peers.interp_engine"),
    "vllm-lens": Peer("vllm-lens", "vllm_lens", "benchmarks.peers.vllm_lens", {**_V1, "VLLM_LENS_DISABLE": "0"}),
}


def installed() -> dict[str, Peer]:
    """The peers whose packages are there."""
    return {name: peer for name, peer in PEERS.items() if peer.version is not None}
