"""Starting vLLM's AsyncLLM, and having each request's outputs put where we want them."""

from __future__ import annotations

import asyncio
import multiprocessing.spawn
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

from vllm.config import VllmConfig
from vllm.inputs import split_enc_dec_input
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from nnsight_async.protocol import STOPPED_BY_TRACER

#: Seconds that the engine's processes are given to end by themselves: one that is killed leaves shared memory behind.
_PATIENCE: Final = 30


class Sink(Protocol):
    """Takes in one request's outputs, one after the other, as vLLM's output loop makes them."""

    def put(self, output: RequestOutput | Exception) -> None:
        """Take in an output, or the error that ended the engine."""

    def registered(self, internal_id: str, index: int) -> None:
        """Learn the id by which the worker knows sequence ``index`` of the request."""


class _Collector(RequestOutputCollector):
    """vLLM's collector merges outputs that nobody has fetched yet; this one hands every single one on."""

    def __init__(self, sink: Sink, plain: RequestOutputCollector) -> None:
        self.__dict__.update(plain.__dict__)
        self._sink = sink

    def put(self, output: Any) -> None:
        self._sink.put(output)


class _Outputs(OutputProcessor):
    """vLLM's output processor, with the collectors of announced requests replaced."""

    sinks: dict[str, Sink]

    def process_outputs(self, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if output.finish_reason is not None and output.stop_reason == STOPPED_BY_TRACER:
                # vLLM leaves the token that a request stops at out of the text; here it is no stop token.
                state = self.request_states.get(output.request_id)
                if state is not None and state.detokenizer is not None:
                    state.detokenizer.include_stop_str_in_output = True
        return super().process_outputs(engine_core_outputs, *args, **kwargs)

    def add_request(
        self,
        request: Any,
        prompt: str | None,
        parent_req: Any = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        sink = self.sinks.get(request.external_req_id)
        if sink is not None and queue is not None:
            sink.registered(request.request_id, request_index)
            queue = _Collector(sink, queue)
        super().add_request(request, prompt, parent_req, request_index, queue)


def start_engine(config: VllmConfig, *, log_stats: bool = False) -> tuple[AsyncLLM, dict[str, Sink]]:
    """Start an engine; blocks until it is ready. Call it on the event loop that will drive the engine.

    Returns the engine and the table in which a request id is announced with the sink of its outputs.
    """
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(_PATIENCE))
    with _main_module_left_alone():
        engine = AsyncLLM.from_vllm_config(config, disable_log_stats=not log_stats)
    processor = engine.output_processor
    processor.__class__ = _Outputs
    assert isinstance(processor, _Outputs)
    processor.sinks = {}
    return engine, processor.sinks


async def stop_engine(engine: AsyncLLM) -> None:
    """Shut an engine down in good order; holds the loop up for some seconds, on which nothing else is left to run.

    (An interpreter that is exiting gives out no threads to wait in.)
    """
    handler = engine.output_handler
    if handler is not None:
        handler.cancel()  # first, or it takes the end of the engine's process for a crash
        await asyncio.gather(handler, return_exceptions=True)
    engine.shutdown(timeout=_PATIENCE)


def watch_end(engine: AsyncLLM, ended: Callable[[], None]) -> None:
    """Have ``ended`` called, on the engine's loop, when no more outputs will come: the engine has died.

    vLLM tells that to the requests that it still knows, and to nobody who waits for an answer from the worker.
    """
    assert engine.output_handler is not None  # started with the engine, on the loop that runs
    engine.output_handler.add_done_callback(lambda _: ended())


async def settle(engine: AsyncLLM) -> None:
    """Have the outputs that have come from the engine so far put into their sinks."""
    outputs = getattr(engine.engine_core, "outputs_queue", None)
    while outputs is not None and not outputs.empty():  # noqa: ASYNC110  # vLLM's queue tells nobody when it is empty
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # the loop that takes them out may hold one


async def render_prompt(engine: AsyncLLM, prompt: Mapping[str, Any]) -> Any:
    """A prompt dict as the engine takes it in: tokenized, and checked against the model's length and vocabulary."""
    parsed = parse_model_prompt(engine.model_config, prompt)
    (rendered,) = await engine.renderer.render_cmpl_async([parsed])
    # Checked when the request is added as well, where it could not be told from a refusal of its settings.
    engine.input_processor._validate_model_inputs(*split_enc_dec_input(rendered))
    return rendered


@contextmanager
def _main_module_left_alone() -> Iterator[None]:
    """Keep the engine's processes from importing the user's main module.

    A spawned process runs the main script again, up to ``if __name__ == "__main__"``: a script or notebook without
    that line would start an engine in its engine. Nothing in those processes needs the main module.
    """
    original = multiprocessing.spawn.get_preparation_data
    here = threading.get_ident()

    def without_main(name: str) -> dict[str, Any]:
        data = original(name)
        if threading.get_ident() == here:
            data.pop("init_main_from_name", None)
            data.pop("init_main_from_path", None)
        return data

    multiprocessing.spawn.get_preparation_data = without_main
    try:
        yield
    finally:
        multiprocessing.spawn.get_preparation_data = original
