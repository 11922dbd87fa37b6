"""Every message that crosses a process, and nothing else.

Down, from the client to the worker: a :class:`Traced` rides in ``SamplingParams.extra_args`` of its request; its
program goes before the first request that needs it, and a :class:`Message` goes to a request that runs, both through
``AsyncLLM.collective_rpc``. Up, from the worker to the client: one :class:`Post` a step, a ZeroMQ message of two
frames, the post itself and the bytes of small tensors; larger ones are in shared memory
(:mod:`nnsight_async.segments`). All of it is MessagePack, through msgspec.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

#: The key of ``SamplingParams.extra_args`` under which a request carries its block.
EXTRA_ARG: Final = "nnsight_async"
#: The key beside it, there if the block may change keys and values: such a request is never preempted.
EDITS_ARG: Final = "nnsight_async_edits"
#: The key of ``VllmConfig.additional_config`` under which the worker finds its :class:`WorkerSettings`.
CONFIG_KEY: Final = "nnsight_async"

#: How many programs the client takes the worker to have. The worker keeps several times as many, since requests may
#: wait for long between the two.
KNOWN_PROGRAMS: Final = 1024

#: ``stop_reason`` of a request that its block ended with ``tracer.stop()``.
STOPPED_BY_TRACER: Final = "tracer.stop"
#: ``stop_reason`` of a request that ended because its block failed.
STOPPED_BY_ERROR: Final = "tracer.error"


class WorkerSettings(msgspec.Struct, frozen=True):
    """What the client tells the worker when it starts.

    ``mailbox`` is the ZeroMQ address at which the client takes posts in. ``taps`` are sets of locations, each a
    module's path and side, for which graphs are captured at the start.
    """

    mailbox: str
    taps: list[list[tuple[str, str]]] = []


class TierCounts(msgspec.Struct):
    """How a worker's steps were run; see :class:`nnsight_async.client.connection.TierStats`.

    ``graphs`` are the tapped graphs: what they are tapped for (:mod:`nnsight_async.worker.taps`), the numbers of tokens
    that there is one for, and whether it is for steps with prompts in them.
    """

    whole: int = 0
    plain: int = 0
    tapped: int = 0
    eager: int = 0
    again: int = 0
    captured: int = 0
    capture_seconds: float = 0.0
    refused: int = 0
    graphs: list[tuple[list[tuple[str, ...]], list[int], bool]] = []


class Traced(msgspec.Struct, frozen=True):
    """A traced request's block: which program, and the pickled values that the program reads from the caller.

    ``digest`` names a program that the worker has been sent, ``dtype`` the type in which floating-point tensors are
    sent back (``float32``), if not in their own.
    """

    digest: str
    values: bytes
    dtype: str = ""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the request at this step, whatever its sampling settings say."""


class ForceSamples(msgspec.Struct, frozen=True, tag="force"):
    """Draw these tokens at this step and the ones after it, in order, instead of the sampler's own."""

    token_ids: list[int]


class EditLogits(msgspec.Struct, frozen=True, tag="edit"):
    """Add these numbers to the logits of these token ids at this step and all after it; empty clears.

    ``-inf`` bans a token. The numbers replace those of an earlier message.
    """

    bias: dict[int, float]


class SetLive(msgspec.Struct, frozen=True, tag="live"):
    """Have ``tracer.live(name, default)`` return these values from this step on; a pickled dict, by name."""

    values: bytes


#: What goes into the engine loop for one request, whoever sends it.
Message = Stop | ForceSamples | EditLogits | SetLive


class BlockState(IntEnum):
    """Where a block stands when a step's post is written."""

    #: Waits for a step to begin, in a loop over steps (``tracer.iter``, ``tracer.all()``).
    LOOPING = 0
    #: Waits for the request's result.
    WANTS_RESULT = 1
    #: Has run to its end.
    DONE = 2
    #: Has raised; the entry's ``error`` says what.
    FAILED = 3
    #: Ended its own request with ``tracer.stop()``.
    STOPPED = 4


class Entry(msgspec.Struct, array_like=True):
    """What one request's block did in one step.

    ``step`` counts the request's own steps from 0, the prefill. ``changes`` is what happened to the saved values since
    the last entry (see :mod:`nnsight_async.changes`), empty where nothing did. The bytes of its tensors, ``nbytes`` of
    them, are in the second frame from ``offset`` on where ``segment`` is -1, else in that segment from page ``offset``
    on. ``where`` says what the block waits for, in words; ``error`` is a pickled
    :class:`nnsight_async.errors.BlockFailure`.
    """

    request: str
    step: int
    state: BlockState
    changes: bytes = b""
    where: str = ""
    error: bytes = b""
    final: bool = False
    segment: int = -1
    offset: int = 0
    nbytes: int = 0


class CachedRows(msgspec.Struct, array_like=True, frozen=True):
    """One request's part of what was captured in a step: its rows, from ``start`` to before ``stop``."""

    request: str
    step: int
    start: int
    stop: int


class Captured(msgspec.Struct, array_like=True):
    """What ``tracer.cache`` captured in a step, of all requests that have declared the same.

    ``number`` says which of each request's caches it is for. ``requests`` are in the order of their rows; in tensors of
    one row a request, the first has the first. ``values`` is a list of ``[path, side, one row a request, value]``; the
    bytes of its tensors are where those of an :class:`Entry` would be.
    """

    number: int
    requests: list[CachedRows]
    values: bytes
    segment: int = -1
    offset: int = 0
    nbytes: int = 0


class SegmentOpened(msgspec.Struct, array_like=True, frozen=True):
    """A new segment of shared memory: its number, the file to map, and how many pages it has."""

    number: int
    path: str
    pages: int


class Post(msgspec.Struct, array_like=True):
    """One step's entries, of every traced request that ran in it; a first one without any says that the way is open.

    ``opened`` are the segments that its entries, or later ones, are in.
    """

    entries: list[Entry]
    opened: list[SegmentOpened] = []
    captured: list[Captured] = []
