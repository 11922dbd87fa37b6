"""Whether what blocks have left as sampled ids is in the vocabulary, found out without waiting for a device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nnsight_async.errors import ArgumentError
from nnsight_async.worker.block import Block
from nnsight_async.worker.controls import outside_vocabulary


class DrawCheck:
    """A look at the ids that blocks have been at.

    One outside the vocabulary, which the model cannot embed, is put back to what was drawn at once, on the device. Its
    block fails when it is known whose it is: :meth:`failures` says so, on whatever thread waits for copies.

    Args:
        samples: the ids ``[requests, 1]``, written to where one is wrong.
        drawn: what they were before.
        blocks: by row, the blocks that have been at the ids.
        vocabulary: how many tokens there are.
    """

    def __init__(
        self, samples: torch.Tensor, drawn: torch.Tensor, blocks: Mapping[int, Block], vocabulary: int
    ) -> None:
        self._blocks = blocks
        self._vocabulary = vocabulary
        wrong = (samples < 0) | (samples >= vocabulary)
        found = torch.cat([wrong.to(torch.int64), samples.to(torch.int64)], dim=1)
        samples.copy_(torch.where(wrong, drawn, samples))
        self._copied: torch.cuda.Event | None = None
        self._found = found
        if samples.is_cuda:
            self._found = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._found.copy_(found, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()

    def failures(self) -> dict[str, bytes]:
        """Fail the blocks that left a wrong id; by request, what they are told, pickled."""
        if self._copied is not None:
            self._copied.synchronize()
        told = {}
        for row, (wrong, token_id) in enumerate(self._found.tolist()):
            block = self._blocks.get(row)
            if wrong and block is not None:
                block.fail(ArgumentError(outside_vocabulary(token_id, self._vocabulary)))
                told[block.request_id] = block.pickled_failure()
        return told
