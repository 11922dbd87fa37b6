"""One step's output: vLLM's RequestOutput, with what the block saved."""

from __future__ import annotations

from typing import Any

from vllm.outputs import RequestOutput


class StepOutput(RequestOutput):
    """vLLM's ``RequestOutput`` of one invoke at one step, with what its block has saved up to that step.

    Attributes:
        invoke: which invoke of the trace this is, counted from 0.
        step: the step it is the output of; 0 is the prefill, which yields the first token.
        sequence: which of the ``n`` sequences of the prompt it is, counted from 0.
        saves: every saved name with its value as of this step; tensors are on the CPU. It does not change afterwards.
    """

    invoke: int
    step: int
    sequence: int
    saves: dict[str, Any]

    @classmethod
    def of(cls, output: RequestOutput, *, invoke: int, step: int, sequence: int, saves: dict[str, Any]) -> StepOutput:
        """``output`` with ``saves`` joined to it."""
        joined = cls.__new__(cls)
        joined.__dict__.update(output.__dict__)
        joined.invoke, joined.step, joined.sequence, joined.saves = invoke, step, sequence, saves
        return joined
