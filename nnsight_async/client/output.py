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
        saves: every saved name with its value as of this step, as ``outputs[0].text`` is the text as of this step. It
            does not change afterwards. Tensors are on the CPU unless the trace's ``device`` says otherwise; they show
            the memory that the worker wrote, without a copy, and give it back when the last of them is gone.
        new: what this step added to them: of a list that grew, the items it grew by; of a dict, the entries that are
            new; of anything else that changed, its value. A name that did not change is not in it.
    """

    invoke: int
    step: int
    sequence: int
    saves: dict[str, Any]
    new: dict[str, Any]

    @classmethod
    def of(
        cls,
        output: RequestOutput,
        *,
        invoke: int,
        step: int,
        sequence: int,
        saves: dict[str, Any],
        new: dict[str, Any],
    ) -> StepOutput:
        """``output`` with what was saved joined to it."""
        joined = cls.__new__(cls)
        joined.__dict__.update(output.__dict__)
        joined.invoke, joined.step, joined.sequence, joined.saves, joined.new = invoke, step, sequence, saves, new
        return joined
