"""In what order a forward pass comes to its locations, and how far the one in progress is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nnsight_async.errors import NeverReachedError, NnsightAsyncError, OutOfOrderError
from nnsight_async.tree import describe, is_operation, split_operation
from nnsight_async.worker.block import LOGITS, SAMPLES, Block, Key

_NOWHERE: Final = -1  # before the first module of a step
_AT_LOGITS: Final = 1 << 40
_AT_SAMPLES: Final = _AT_LOGITS + 1
_AFTER: Final = _AT_SAMPLES + 1
#: The output of the model itself.
_PASS_ENDS: Final[Key] = ("", "out")


def name_of(key: Key) -> str:
    """A key as a person writes it: ``model.layers.3.output``, ``logits``."""
    path, side = key
    return describe(path, side) if side in ("in", "out") else side  # type: ignore[arg-type]


class Order:
    """The order, as recorded from a pass, and the place in it of the step in progress.

    ``at`` has the places of each location, in rising order; it is empty where no pass could be recorded.
    """

    def __init__(self) -> None:
        self.at: dict[Key, list[int]] = {}
        self.position = _NOWHERE
        self._pass_ends = _AT_LOGITS  # then the logits are computed

    def learn(self, calls: Sequence[Key]) -> None:
        """Take in the locations of a pass, in the order in which it came to them."""
        self.at = {LOGITS: [_AT_LOGITS], SAMPLES: [_AT_SAMPLES]}
        for index, key in enumerate(calls):
            self.at.setdefault(key, []).append(index)
        self._pass_ends = self.at.get(_PASS_ENDS, [_AT_LOGITS])[-1]

    def begin(self) -> None:
        """A pass begins."""
        self.position = _NOWHERE

    def come_to(self, key: Key) -> None:
        """The pass has come to a location."""
        self.position = self._occurrence(key)

    def end(self) -> None:
        """The step is over: every location has passed."""
        self.position = _AFTER

    def in_pass(self, key: Key) -> bool:
        """Whether a location is one of the forward pass, and not of what computes the logits after it."""
        if key[1] not in ("in", "out"):
            return False
        at = self.at.get(key)
        return at is None or at[0] <= self._pass_ends

    def paths(self) -> list[str]:
        """The paths of the modules that a pass calls, in order."""
        return list(dict.fromkeys(path for path, side in self.at if side == "out"))

    def check(self, block: Block, key: Key) -> None:
        """Raise where it is already certain that a location will not be reached by a block that asks for it."""
        if block.cursor < 0:
            raise OutOfOrderError(f"{name_of(key)} has passed: after tracer.result the request is over")
        if block.cursor < block.step:
            raise OutOfOrderError(f"{name_of(key)} at step {block.cursor} has passed: the request is at {block.step}")
        if not self.at:
            return
        at = self.at.get(key)
        if at is None and is_operation(key[0]):
            operation = split_operation(key[0])
            assert operation is not None
            at = self.at.get((operation[0], "out"))
        if at is None:
            raise NeverReachedError(
                f"{name_of(key)} is never reached: the forward pass does not call this module "
                "(vLLM uses its weights directly, or the model does not use it)"
            )
        if block.cursor == block.step and at[-1] <= self.position:
            raise OutOfOrderError(
                f"{name_of(key)} has passed: at step {block.step} the forward pass is already at "
                f"{self._here()}; read locations in the order in which the model comes to them"
            )

    def _here(self) -> str:
        for key, at in self.at.items():
            if self.position in at:
                return name_of(key)
        return "its end"

    def _occurrence(self, key: Key) -> int:
        """Where in the pass this visit of ``key`` is: the next of the places where its module is called.

        An operation is somewhere between its module's input and output; it counts as being at the input.
        """
        operation = split_operation(key[0])
        if operation is not None:
            calls = zip(self.at.get((operation[0], "in"), []), self.at.get((operation[0], "out"), []), strict=True)
            entered = next((begin for begin, end in calls if end > self.position), self.position)
            return max(entered, self.position)
        at = self.at.get(key, [])
        return next((index for index in at if index > self.position), at[-1] if at else self.position)


def missed(key: Key, block: Block) -> NnsightAsyncError:
    """What a block is told that waited for a location until its step was over."""
    operation = split_operation(key[0])
    why = "" if operation is None else ": the operation was not run, or had run before the block came to ask for it"
    return NeverReachedError(f"{name_of(key)} was not reached at step {block.step}{why}")
