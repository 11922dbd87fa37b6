"""One worker among the ranks of a tensor-parallel group.

Every rank runs every block, on the same values, so that all of them come to the same collectives in the same order. At
a location that a block waits for, the shares are put together before the blocks see them and taken apart again after.
Whenever blocks have run, the ranks compare where they stand: a block that is not at the same place on all of them is
ended there, before a collective that only some ranks come to could hang.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed

from nnsight_async.errors import RanksDifferError
from nnsight_async.worker.block import LOGITS, Block, Key
from nnsight_async.worker.layouts import Layouts
from nnsight_async.worker.order import name_of
from nnsight_async.worker.rows import tensors_of
from nnsight_async.worker.shards import Plain, Sharded, assemble, scatter, settle

_SEED: Final = 0


class Ranks:
    """This rank's side of what the ranks do together. ``group`` is vLLM's tensor-parallel group."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.rank: int = group.rank_in_group
        self.count: int = group.world_size
        self._group = group
        self._layouts: Mapping[Key, Layouts] = {}
        self._gathered: list[Gathered] = []
        self._logits_shown = False
        self._numbers = _RandomNumbers(device)

    def learn_layouts(self, layouts: Mapping[Key, Layouts]) -> None:
        """Take in how the locations' tensors are split."""
        self._layouts = layouts

    def splits(self, key: Key) -> bool:
        """Whether each rank has only its part of a location's value."""
        return any(layout is not Plain.WHOLE for layout in self._layouts.get(key, ()))

    def enter(self, key: Key | None = None, value: Any = None) -> Any:
        """Before blocks run: ``value`` with its tensors put together."""
        self._logits_shown |= key == LOGITS
        layouts = self._layouts.get(key) if key is not None else None
        if layouts is not None:
            value = self._put_together(value, layouts)
        self._numbers.swap()
        return value

    def leave(self, blocks: Sequence[Block]) -> list[tuple[Block, RanksDifferError]]:
        """After ``blocks`` have run: what they wrote is put back; returns those that the ranks differ in, and why."""
        self._numbers.swap()
        for gathered in self._gathered:
            gathered.put_back(self.rank, self.count)
        self._gathered.clear()
        return self._compare(blocks)

    def share_draws(self, samples: torch.Tensor) -> None:
        """Where blocks may have written logits, make all ranks go on with the ids that rank 0 has drawn."""
        if self._logits_shown:
            self._logits_shown = False
            self.share(samples)

    def share(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with rank 0's."""
        self._group.broadcast(tensor, src=0)

    # Values.

    def _put_together(self, value: Any, layouts: Layouts) -> Any:
        remaining = iter(layouts)
        known: dict[tuple[Any, ...], torch.Tensor] = {}

        def walk(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                layout = next(remaining, Plain.WHOLE)
                if layout is Plain.WHOLE:
                    return item
                # One tensor given twice has to stay one, or what is written to one of the two is lost.
                same = (item.data_ptr(), item.shape, item.stride())
                if same not in known:
                    gathered = Gathered(item, layout, self._group)
                    self._gathered.append(gathered)
                    known[same] = gathered.whole
                return known[same]
            if type(item) is tuple:
                return tuple(walk(part) for part in item)
            if isinstance(item, list):
                return [walk(part) for part in item]
            if isinstance(item, dict):
                return {name: walk(part) for name, part in item.items()}
            for _ in tensors_of(item):
                next(remaining, None)
            return item

        return walk(value)

    # Agreement.

    def _compare(self, blocks: Sequence[Block]) -> list[tuple[Block, RanksDifferError]]:
        if not blocks:
            return []
        own = [_status(block) for block in blocks]
        text = "\n".join([*own, self._numbers.fingerprint()])
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        digests = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        torch.distributed.all_gather(digests, torch.tensor([digest], dtype=torch.int64), group=self._group.cpu_group)
        if all(int(other) == digest for other in digests):
            return []
        mine = [(status, _in_words(block)) for status, block in zip(own, blocks, strict=True)]
        every: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(every, mine, group=self._group.cpu_group)
        self._numbers.reset()
        differing = []
        for block, places in zip(blocks, zip(*every, strict=True), strict=True):
            if len({status for status, _ in places}) > 1:
                differing.append((block, _difference([words for _, words in places])))
        return differing


class Gathered:
    """A tensor put together from all ranks, and the engine's own tensor that it stands for."""

    def __init__(self, own: torch.Tensor, layout: Plain | Sharded, group: Any) -> None:
        self._layout = layout
        self._heads = 0
        if isinstance(layout, Sharded) and layout.flattened:
            own = own.unflatten(0, (-1, layout.flattened))
        self._own = own
        self._before: torch.Tensor | None = None
        if isinstance(layout, Sharded):
            # vLLM's gather puts the ranks' shares one after the other in dimension 1.
            shares = group.all_gather(own.contiguous(), dim=1).unflatten(1, (group.world_size, own.shape[1]))
            self.whole = assemble(shares, layout)
            if layout.flattened:
                self._heads = self.whole.shape[1]
                self.whole = self.whole.flatten(0, 1)
        else:
            self.whole = group.all_reduce(own.clone(memory_format=torch.contiguous_format))
            self._before = self.whole.clone()

    def put_back(self, rank: int, ranks: int) -> None:
        """Write this rank's part of the whole over the engine's tensor."""
        if isinstance(self._layout, Sharded):
            whole = self.whole.unflatten(0, (-1, self._heads)) if self._heads else self.whole
            scatter(whole, self._own, self._layout, rank, ranks)
        else:
            assert self._before is not None
            settle(self.whole, self._before, self._own, rank)


class _RandomNumbers:
    """The default generators while blocks run: every rank's give the same numbers, and the engine's stay its own.

    vLLM's sampler draws from the same generators, in step on all ranks; a block may not bring them out of step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._resets = 0
        self._other = self._state()  # the generators' state that is not in use
        self.reset()

    def swap(self) -> None:
        """Exchange the state of PyTorch's generators for the one that is not in use."""
        state = self._state()
        torch.set_rng_state(self._other[0])
        if self._device is not None:
            torch.cuda.set_rng_state(self._other[1], self._device)
        self._other = state

    def reset(self) -> None:
        """Begin anew, with the same numbers on every rank; not while blocks run."""
        self._resets += 1
        seed = _SEED + self._resets
        random.seed(seed)
        np.random.seed(seed)
        engine = self._state()
        torch.manual_seed(seed)
        self._other = engine
        self.swap()
        # Swapped once: the engine's state is in use again, and the blocks' is the other.

    def fingerprint(self) -> str:
        """Tells generators of blocks that are out of step."""
        return hashlib.blake2b(b"".join(part.numpy().tobytes() for part in self._other), digest_size=8).hexdigest()

    def _state(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device is not None:
            states.append(torch.cuda.get_rng_state(self._device))
        return states


def _status(block: Block) -> str:
    """Where a block stands, in what has to be equal on all ranks."""
    if block.failure is not None:
        return f"{block.request_id} failed {block.failure.type_name} {block.failure.where}"
    waiting = block.waiting
    if block.ended or waiting is None:
        return f"{block.request_id} ended {block.state}"
    return f"{block.request_id} waits {waiting.key} {waiting.step} {waiting.result}"


def _in_words(block: Block) -> str:
    """Where a block stands, for a person."""
    if block.failure is not None:
        where = f" at {block.failure.where}" if block.failure.where else ""
        return f"raised {block.failure.type_name}: {block.failure.message}{where}"
    waiting = block.waiting
    if block.ended or waiting is None:
        return "has ended"
    if waiting.result:
        return f"waits for the result at {block.line()}"
    what = f"step {waiting.step}" if waiting.key is None else f"{name_of(waiting.key)} of step {waiting.step}"
    return f"waits for {what} at {block.line()}"


def _difference(places: Sequence[str]) -> RanksDifferError:
    ranks: dict[str, list[str]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(str(rank))
    told = "; ".join(f"on rank {' and '.join(numbers)} it {place}" for place, numbers in ranks.items())
    return RanksDifferError(
        f"the block does not do the same on every tensor-parallel rank: {told}. Let nothing it branches on differ "
        "between processes: seed its random numbers, and leave out the time, process ids and the order of sets"
    )
