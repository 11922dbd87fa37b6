"""Messages applied to one request: stop, forced samples, edited logits, live values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from nnsight_async.errors import ArgumentError
from nnsight_async.protocol import EditLogits, ForceSamples, Message, SetLive, Stop


class Controls:
    """What the messages of one request have set, and how it acts on the request's steps.

    It does not matter who sent a message. At each step the edited logits come first, then the block sees and may change
    them, then the sampler draws; a forced token replaces what it drew before the block sees it. ``live`` holds what
    ``tracer.live`` returns. ``unpack`` makes values of a message's bytes.
    """

    def __init__(self, vocabulary: int, unpack: Callable[[bytes], dict[str, Any]]) -> None:
        self._vocabulary = vocabulary
        self._unpack = unpack
        self.live: dict[str, Any] = {}
        self._forced: deque[int] = deque()
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        self.stopped = False

    @property
    def active(self) -> bool:
        """Whether there is anything to do at the logits or the samples."""
        return bool(self._forced) or self._bias is not None

    def apply(self, message: Message) -> None:
        """Take a message in; it holds from the next logits or samples on.

        Raises:
            ArgumentError: it names a token id outside the vocabulary.
        """
        match message:
            case Stop():
                self.stopped = True
            case ForceSamples(token_ids):
                self._check(token_ids)
                self._forced.extend(token_ids)
            case EditLogits(bias):
                self._check(bias)
                self._bias = (torch.tensor(list(bias)), torch.tensor(list(bias.values()))) if bias else None
            case SetLive(values):
                self.live.update(self._unpack(values))

    def on_logits(self, row: torch.Tensor) -> None:
        """Edit the request's logits ``[1, vocab]`` in place."""
        if self._bias is not None:
            ids, values = self._bias
            row.index_add_(1, ids.to(row.device), values.to(row.device, row.dtype)[None])

    def on_samples(self, row: torch.Tensor) -> None:
        """Replace the request's sampled id ``[1, 1]`` in place."""
        if self._forced:
            row.fill_(self._forced.popleft())

    def _check(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocabulary:
                raise ArgumentError(outside_vocabulary(token_id, self._vocabulary))


def outside_vocabulary(token_id: int, vocabulary: int) -> str:
    """What whoever names a token that there is not is told."""
    return f"token id {token_id} is outside the vocabulary of {vocabulary} tokens"
