"""How saved values cross to the client: MessagePack, with the bytes of tensors beside it.

An entry's changes are one MessagePack map. Numbers, strings, lists and dicts are themselves; a tuple is an extension
that holds its items. A tensor is an extension that says where its bytes are in the entry's block of tensor bytes, and
of what type and shape it is, so its bytes are copied once, off the device or out of the block's memory, and are never
pickled. A list of tensors that are alike, as the hidden states of every layer, is one such extension. Anything else (an
array, an object of the user's) is an extension that holds a pickle; tensors in it are beside the message too, and
modules of the model travel as their paths.
"""

from __future__ import annotations

import io
import itertools
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeGuard

import cloudpickle
import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext

from nnsight_async.changes import Change, Grow, Merge, Set

#: Bytes: what the widest vector load wants, and a multiple of every element's size.
ALIGN: Final = 64

_TENSOR: Final = 1
_PICKLE: Final = 2
_TUPLE: Final = 3
_ROWS: Final = 4
_ALIKE: Final = 5
_PLACE: Final = struct.Struct("<QBB")  # offset in bytes, type, number of dimensions; the dimensions follow
_PLACES: Final = struct.Struct("<QQQBB")  # offset, bytes from one to the next, how many; type and dimensions as above
_DTYPES: Final = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
#: The types of arrays that tensors are made of, which is cheaper than to make them of a buffer.
_ARRAYS: Final[dict[torch.dtype, np.dtype[Any]]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.bool: np.dtype(np.bool_),
}
#: For the types that arrays do not have (bfloat16), arrays of a type of the same size.
_STAND_INS: Final[dict[int, np.dtype[Any]]] = {1: np.dtype(np.uint8), 2: np.dtype(np.int16), 4: np.dtype(np.int32)}
_INT64: Final = range(-(1 << 63), 1 << 63)

#: Maps an object to what travels in its place, or None where the object itself travels.
Reference = Callable[[object], "tuple[Any, ...] | None"]
#: The inverse: finds the object that a reference stands for.
Resolve = Callable[["tuple[Any, ...]"], object]


@dataclass(frozen=True, slots=True)
class RowsOf:
    """A tensor that holds rows of several requests."""

    tensor: torch.Tensor


class Tensors(Protocol):
    """Where a writer puts the bytes of tensors."""

    def add(self, tensor: torch.Tensor) -> tuple[int, torch.dtype]:
        """Take a tensor in; returns its offset in the entry's bytes, and the type it will have there."""

    def add_alike(self, tensors: Sequence[torch.Tensor]) -> tuple[int, torch.dtype]:
        """Take in tensors of one type and shape, on one device; returns the first one's offset, and their type there.

        Each is followed by the next at :func:`step_of` bytes.
        """


def step_of(count: int, dtype: torch.dtype) -> int:
    """Bytes that so many elements take up, with what aligns the next tensor."""
    return -(-count * dtype.itemsize // ALIGN) * ALIGN


def dumps(changes: dict[str, Change], tensors: Tensors, reference: Reference) -> bytes:
    """The changes as MessagePack, their tensors put into ``tensors``."""
    packer = _Packer(tensors, reference)
    return _ENCODER.encode({name: packer.change(change) for name, change in changes.items()})


def dumps_captured(captured: Sequence[tuple[str, str, bool, Any]], tensors: Tensors) -> bytes:
    """What was captured at locations, as ``(path, side, one row a request, value)``; see :class:`RowsOf`."""
    packer = _Packer(tensors, _nothing_travels)
    packer.place([tensor for _, _, _, value in captured for tensor in _captured_tensors(value)])
    return _ENCODER.encode([(path, side, each, packer.value(value)) for path, side, each, value in captured])


def _captured_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, RowsOf):
        return [value.tensor]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _captured_tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _captured_tensors(item)]
    return []


class _Packer:
    """Makes values into what MessagePack has, once for an entry."""

    def __init__(self, tensors: Tensors, reference: Reference) -> None:
        self._tensors = tensors
        self._reference = reference
        # A tensor saved twice is sent once. It is kept too, or another could come to have its identity meanwhile.
        self._known: dict[int, tuple[torch.Tensor, Ext]] = {}
        # Those that were sent together with others like them: where they are and as what, and what holds them.
        self._placed: dict[int, tuple[int, torch.dtype]] = {}
        self._alike: list[list[torch.Tensor]] = []

    def place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put tensors that are going to be met in values where they go, together those that are alike."""
        kinds: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
        for (shape, _), alike in kinds.items():
            if not self._are_alike(alike):
                continue
            offset, dtype = self._tensors.add_alike(alike)
            step = step_of(alike[0].numel(), dtype)
            rest = struct.pack(f"<BB{len(shape)}q", _CODES[dtype], len(shape), *shape)
            for index, tensor in enumerate(alike):
                self._known[id(tensor)] = (tensor, Ext(_TENSOR, struct.pack("<Q", offset + step * index) + rest))

    def change(self, change: Change) -> Change:
        if isinstance(change, Grow):
            return Grow({i: self.change(item) for i, item in change.items.items()}, self.items(change.tail))
        if isinstance(change, Set):
            return Set(self.value(change.value))
        return Merge([(self.value(key), self.change(item)) for key, item in change.entries])

    def value(self, value: Any) -> Any:
        kind = type(value)
        if _is_plain_tensor(value):
            return self.tensor(value)
        if kind is float or kind is bool or value is None or kind is bytes:
            return value
        elif kind is int:
            if value in _INT64:
                return value
        elif kind is str:
            if value.isascii() or _is_unicode(value):
                return value
        elif kind is list:
            return self.items(value)
        elif kind is tuple:
            return Ext(_TUPLE, _ENCODER.encode([self.value(item) for item in value]))
        elif kind is RowsOf:
            return Ext(_ROWS, self.tensor(value.tensor).data)
        elif kind is dict and all(type(key) is str and _is_unicode(key) for key in value):
            return {key: self.value(item) for key, item in value.items()}
        return Ext(_PICKLE, self._pickle(value))

    def items(self, items: list[Any]) -> Any:
        """A list's items: as one, where they are tensors that are alike."""
        if items and type(items[0]) is torch.Tensor and self._are_alike(items):
            identities = list(map(id, items))
            new = self._known.keys().isdisjoint(identities) and self._placed.keys().isdisjoint(identities)
            if new and len(set(identities)) == len(identities):
                offset, dtype = self._tensors.add_alike(items)
                shape, step = items[0].shape, step_of(items[0].numel(), dtype)
                places = zip(itertools.count(offset, step), itertools.repeat(dtype), strict=False)
                self._placed.update(zip(identities, places, strict=False))
                self._alike.append(items)
                place = _PLACES.pack(offset, step, len(items), _CODES[dtype], len(shape))
                return Ext(_ALIKE, place + struct.pack(f"<{len(shape)}q", *shape))
        return [self.value(item) for item in items]

    @staticmethod
    def _are_alike(items: list[Any]) -> bool:
        first = items[0]
        if not _is_plain_tensor(first) or first.requires_grad or not (first.is_cpu or first.is_cuda):
            return False
        if len(items) == 1:
            return True
        shape, dtype, is_cpu, plain, strided = first.shape, first.dtype, first.is_cpu, torch.Tensor, torch.strided
        for item in items:
            if type(item) is not plain or item.dtype is not dtype or item.layout is not strided or item.is_nested:
                return False
            if item.shape != shape or item.is_cpu is not is_cpu or item.requires_grad or item.is_meta:
                return False
        return True

    def tensor(self, tensor: torch.Tensor) -> Ext:
        known = self._known.get(id(tensor))
        if known is None:
            offset, dtype = self._placed.get(id(tensor)) or self._tensors.add(tensor)
            shape = tensor.shape
            place = _PLACE.pack(offset, _CODES[dtype], len(shape)) + struct.pack(f"<{len(shape)}q", *shape)
            known = self._known[id(tensor)] = (tensor, Ext(_TENSOR, place))
        return known[1]

    def _pickle(self, value: Any) -> bytes:
        out = io.BytesIO()
        _Pickler(out, self).dump(value)
        return out.getvalue()

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        return ("tensor", self.tensor(obj).data) if _is_plain_tensor(obj) else self._reference(obj)


def _is_plain_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a tensor is its bytes: sparse, quantised and nested ones, and other classes, pickle themselves."""
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        return False
    assert isinstance(value, torch.Tensor)
    return value.layout is torch.strided and not value.is_quantized and not value.is_nested


def _is_unicode(text: str) -> bool:
    """Whether a string can be UTF-8: one with a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, packer: _Packer) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._packer = packer

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        return self._packer.persistent_id(obj)


class Loader:
    """Puts entries' changes together again, one after the other."""

    def __init__(self) -> None:
        self._resolve: Resolve = _resolve_nothing
        self._device: torch.device | None = None
        self._bytes: Any = None
        self._known: dict[bytes, torch.Tensor] = {}
        self._runs: list[tuple[int, int, list[torch.Tensor]]] = []
        self._decoder = msgspec.msgpack.Decoder(dict[str, Change], ext_hook=self._extension)
        self._list_decoder = msgspec.msgpack.Decoder(list[Any], ext_hook=self._extension)

    def load(
        self, data: bytes, tensor_bytes: Any, resolve: Resolve, device: torch.device | None = None
    ) -> dict[str, Change]:
        """The changes that :func:`dumps` packed.

        ``tensor_bytes`` is a buffer that holds the bytes of the entry's tensors, and writable. Tensors are views of it
        and keep it alive, unless a ``device`` is given that they are copied to. ``resolve`` finds what references stand
        for.
        """
        self._bytes, self._resolve, self._device = tensor_bytes, resolve, device
        try:
            return self._decoder.decode(data)
        finally:
            self._bytes, self._resolve = None, _resolve_nothing
            self._known.clear()
            self._runs.clear()

    def load_captured(self, data: bytes, tensor_bytes: Any) -> list[list[Any]]:
        """What :func:`dumps_captured` packed; ``tensor_bytes`` as for :meth:`load`."""
        self._bytes, self._device = tensor_bytes, None
        try:
            return self._list_decoder.decode(data)
        finally:
            self._bytes = None
            self._known.clear()
            self._runs.clear()

    def _extension(self, code: int, data: memoryview) -> object:
        if code == _ALIKE:
            return self._tensors(data)
        if code == _TENSOR:
            return self._tensor(bytes(data))
        if code == _ROWS:
            return RowsOf(self._tensor(bytes(data)))
        if code == _TUPLE:
            return tuple(self._list_decoder.decode(data))
        return _Unpickler(io.BytesIO(data), self).load()

    def _tensor(self, place: bytes) -> torch.Tensor:
        known = self._known.get(place)
        if known is None and self._runs:
            known = self._in_run(place)
        if known is None:
            offset, code, dims = _PLACE.unpack_from(place)
            shape, dtype = struct.unpack_from(f"<{dims}q", place, _PLACE.size), _DTYPES[code]
            count = 1
            for size in shape:
                count *= size
            if count:
                known = torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=offset).view(shape)
            else:
                known = torch.empty(shape, dtype=dtype)
            if self._device is not None:
                known = known.to(self._device)
            self._known[place] = known
        return known

    def _tensors(self, places: memoryview) -> list[torch.Tensor]:
        offset, step, count, code, dims = _PLACES.unpack_from(places)
        shape, dtype = places[_PLACES.size :], _DTYPES[code]
        sizes, elements = struct.unpack(f"<{dims}q", shape), 1
        for size in sizes:
            elements *= size
        tensors: list[torch.Tensor]
        kind = _ARRAYS.get(dtype) or _STAND_INS.get(dtype.itemsize)
        if self._device is None and elements and dims and kind is not None:
            # Each has a storage of its own, so that whoever saves or pickles one does not take the others along.
            width = step // dtype.itemsize
            # Of an array an array would hold only what that one shows, and not the array itself.
            array = np.frombuffer(memoryview(self._bytes), kind, width * count, offset)
            if width != elements:
                array = array.reshape(count, width)[:, :elements]
            tensors = list(map(torch.from_numpy, array.reshape(count, *sizes)))
            if dtype not in _ARRAYS:
                tensors = [tensor.view(dtype) for tensor in tensors]
        else:
            place = _PLACE.pack(0, code, dims)[8:] + shape
            tensors = [self._tensor(struct.pack("<Q", offset + step * index) + place) for index in range(count)]
        self._runs.append((offset, step, tensors))
        return tensors

    def _in_run(self, place: bytes) -> torch.Tensor | None:
        """A tensor that came among others like it, and is met again by itself."""
        offset: int = _PLACE.unpack_from(place)[0]
        for first, step, tensors in self._runs:
            if first <= offset < first + max(step, 1) * len(tensors) and step:
                return tensors[(offset - first) // step]
        return None

    def persistent(self, pid: tuple[Any, ...]) -> object:
        """What a pickle's persistent id stands for."""
        return self._tensor(pid[1]) if pid[0] == "tensor" else self._resolve(pid)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, loader: Loader) -> None:
        super().__init__(file)
        self._loader = loader

    def persistent_load(self, pid: tuple[Any, ...]) -> object:
        return self._loader.persistent(pid)


def _nothing_travels(value: object) -> tuple[Any, ...] | None:
    return None


def _resolve_nothing(reference: tuple[Any, ...]) -> object:
    raise LookupError(f"nobody is there to say what {reference} stands for")


_ENCODER: Final = msgspec.msgpack.Encoder()
