"""How values cross a process: pickled, with the bytes of tensors beside the pickle in one slab a step.

A tensor in a value becomes a reference into the slab (offset, type, shape), so its bytes are copied once into the slab
and once out of it, and never through the pickle. Modules of the model travel as their paths.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, Final

import cloudpickle
import torch

_ALIGN: Final = 64  # bytes: what the widest vector load wants, and a multiple of every element's size

#: Maps an object to what travels in its place, or None where the object itself travels.
Reference = Callable[[object], "tuple[Any, ...] | None"]
#: The inverse: finds the object that a reference stands for.
Resolve = Callable[["tuple[Any, ...]"], object]


class SlabWriter:
    """Gathers the tensors of one step's post, in order, at aligned offsets."""

    def __init__(self) -> None:
        self._tensors: list[tuple[int, torch.Tensor]] = []
        self._size = 0

    def add(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Take a tensor in; returns its reference: ``("tensor", offset, dtype, shape)``, the offset in bytes."""
        offset = self._size
        self._tensors.append((offset, tensor))
        nbytes = tensor.numel() * tensor.element_size()
        self._size = offset + -(-nbytes // _ALIGN) * _ALIGN
        return ("tensor", offset, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def finish(self) -> memoryview:
        """All tensors' bytes as one buffer on the host."""
        slab = torch.empty(self._size, dtype=torch.uint8)
        for offset, tensor in self._tensors:
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes:
                slab[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return slab.numpy().data


def dumps(value: Any, slab: SlabWriter, reference: Reference) -> bytes:
    """Pickle ``value``, its tensors into ``slab``."""
    out = io.BytesIO()
    _Pickler(out, slab, reference).dump(value)
    return out.getvalue()


def loads(data: bytes, slab: memoryview, resolve: Resolve) -> Any:
    """The value that :func:`dumps` pickled; its tensors are copies of their bytes in ``slab``, on the host."""
    return _Unpickler(io.BytesIO(data), slab, resolve).load()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, slab: SlabWriter, reference: Reference) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._slab = slab
        self._reference = reference

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        # Parameters travel as plain tensors; other subclasses, and sparse, quantised and nested tensors, know how to
        # pickle themselves.
        if type(obj) in (torch.Tensor, torch.nn.Parameter):
            assert isinstance(obj, torch.Tensor)
            if obj.layout is torch.strided and not obj.is_quantized and not obj.is_nested:
                return self._slab.add(obj.detach())
        return self._reference(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, slab: memoryview, resolve: Resolve) -> None:
        super().__init__(file)
        self._slab = slab
        self._resolve = resolve

    def persistent_load(self, pid: tuple[Any, ...]) -> object:
        if pid[0] != "tensor":
            return self._resolve(pid)
        _, offset, name, shape = pid
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            tensor.view(-1).view(torch.uint8).numpy().data[:] = self._slab[offset : offset + nbytes]
        return tensor
