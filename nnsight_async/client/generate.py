"""``model.generate``: plain requests, nothing traced."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from nnsight_async.client.connection import Connection
from nnsight_async.client.invoke import Invoke
from nnsight_async.client.sampling import make_params


async def generate(
    connection: Connection, prompts: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], *, progress: bool
) -> list[RequestOutput]:
    """Run every prompt as a request of its own, all at once; returns their finished outputs in the prompts' order.

    Raises:
        NnsightAsyncError: a request failed; the others are aborted.
    """
    params = make_params(settings, output_kind=RequestOutputKind.FINAL_ONLY)
    invokes = [Invoke(number, prompt, params, None) for number, prompt in enumerate(prompts)]
    columns = (TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        done = bar.add_task("", total=len(invokes))

        async def run(invoke: Invoke) -> None:
            await invoke.run(connection)
            if invoke.error is not None:
                raise invoke.error
            bar.advance(done)

        try:
            async with asyncio.TaskGroup() as group:
                for invoke in invokes:
                    group.create_task(run(invoke))
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
    return [invoke.result for invoke in invokes]
