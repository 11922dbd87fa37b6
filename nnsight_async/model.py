"""``VLLM``: a model to look into, and the engine that serves it."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar

import torch

from nnsight_async.client.connection import Connection, Stats
from nnsight_async.client.generate import generate
from nnsight_async.client.ledger import DEFAULT_LIMIT
from nnsight_async.client.map import Map
from nnsight_async.client.prompts import split_prompts
from nnsight_async.client.sampling import check_settings
from nnsight_async.client.tiers import find_taps
from nnsight_async.client.tracer import Tracer
from nnsight_async.engine.arguments import build_config
from nnsight_async.engine.meta import build_meta_model
from nnsight_async.errors import NO_SCAN, ArgumentError, OutsideBlockError, UnsupportedError
from nnsight_async.tree import ModuleRef

T = TypeVar("T")


class VLLM:
    """A language model served by vLLM, whose every location can be read while it serves.

    The module tree is there at once, on the meta device: ``print(model)`` shows it, and
    ``model.model.layers[10].mlp`` is a reference into it. The engine starts with the first trace, or at once with
    ``dispatch=True`` (in sync mode the constructor then waits for it; in async mode it starts in the background, and
    ``await model.ready()`` or the first trace waits).

    Args:
        model: the name or the folder of a model, as vLLM takes it.
        mode: ``"sync"``: after a block the saved names hold their values; ``"async"``: ``tracer.backend`` streams.
        dispatch: start the engine now.
        mailbox_bytes: how many bytes of saved values may wait to be read, all requests of the model together (1 GiB). A
            request whose caller is too slow for its share is ended with a :class:`MailboxFullError`; the others and the
            engine never wait for it. What has been taken out of a stream, and what a trace that is waited for gathers,
            does not count.
        graphs: ``"auto"``: on a GPU steps run in CUDA graphs and compiled code wherever blocks let them, see
            :meth:`tier_stats`; ``"off"``: all steps are run by Python, which a CPU's always are. It starts faster.
        taps: sets of locations that graphs are captured for when the engine starts, each a location
            (``"model.layers.10.output"``), a pattern (``"model.layers.*.output"``) or a collection of those. Others get
            theirs when they are first read often enough; any location can be read in any case.
        engine_arguments: vLLM's own engine arguments (``dtype``, ``max_model_len``, ``gpu_memory_utilization``, ...),
            passed on untouched.

    Raises:
        ArgumentError: an argument that vLLM does not have.
        UnsupportedError: an engine argument that contradicts what tracing needs; the message says why.
        LocationError: ``taps`` names what the model does not have.
        EngineError: with ``dispatch=True`` in sync mode, the engine could not start.

    Example::

        with VLLM("Qwen/Qwen3-8B") as model:
            with model.trace("The capital of France is", temperature=0.0):
                hidden = model.model.layers[10].output[0].save()
    """

    def __init__(
        self,
        model: str,
        *,
        mode: Literal["sync", "async"] = "sync",
        dispatch: bool = False,
        mailbox_bytes: int = DEFAULT_LIMIT,
        graphs: Literal["auto", "off"] = "auto",
        taps: Sequence[str | Iterable[str]] = (),
        **engine_arguments: Any,
    ) -> None:
        if mode not in ("sync", "async"):
            raise ArgumentError(f'mode is "sync" or "async", not {mode!r}')
        if mailbox_bytes < 1:
            raise ArgumentError(f"mailbox_bytes is a number of bytes, at least 1, not {mailbox_bytes!r}")
        self.mode = mode
        self._config = build_config(model, engine_arguments, graphs)
        tree = build_meta_model(self._config)
        self._root = ModuleRef(tree)
        found = find_taps(taps, (path for path, _ in tree.named_modules(remove_duplicate=False)))
        self._loaded_tokenizer: Any = None
        log_stats = engine_arguments.get("disable_log_stats") is False
        self._connection = Connection(self._config, log_stats=log_stats, mailbox_bytes=mailbox_bytes, taps=found)
        weakref.finalize(self, self._connection.close).atexit = False  # a model that is collected frees its engine
        if dispatch:
            if mode == "sync":
                self._connection.call(self._connection.ready())
            else:
                self._connection.start(self._connection.ready())

    # Tracing.

    def trace(
        self,
        prompt: Any = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        **sampling: Any,
    ) -> Tracer:
        """Trace one generation: ``with model.trace(prompt, temperature=0.0, max_tokens=8) as tracer:``.

        Args:
            prompt: a string, a list of token ids, a tokenizer's dict, or one of vLLM's prompt dicts. Without one, the
                body opens ``tracer.invoke(prompt)`` for each prompt.
            device: where saved tensors are put in this process; the CPU by default.
            dtype: the type in which saved floating-point tensors travel and arrive; their own by default.
            sampling: anything ``vllm.SamplingParams`` takes, with vLLM's defaults; ``max_new_tokens`` is understood.

        Raises:
            ArgumentError: a misspelled or impossible setting.
            PromptError: an empty prompt, or a list of several.
        """
        return Tracer(self, prompt, sampling, device=device, dtype=dtype)

    def generate(self, prompts: Any, *, progress: bool = True, **sampling: Any) -> Any:
        """Generate without tracing anything.

        Args:
            prompts: one prompt, in any of the forms that :meth:`trace` takes, or a list of prompts.
            progress: show a progress bar on stderr.
            sampling: anything ``vllm.SamplingParams`` takes.

        Returns:
            vLLM's ``RequestOutput`` of each prompt, in order; in async mode an awaitable of that.

        Raises:
            ArgumentError: a misspelled or impossible setting.
            PromptError: a prompt that is empty, too long, or no prompt.
        """
        settings = check_settings(sampling, self._config)
        work = generate(self._connection, split_prompts(prompts), settings, progress=progress)
        return self._connection.call(work) if self.mode == "sync" else self._connection.wait(work)

    def map(
        self,
        function: Callable[[Any], Awaitable[T]],
        prompts: Iterable[Any] | AsyncIterable[Any],
        *,
        concurrency: int = 64,
    ) -> Map[T]:
        """Call ``function(prompt)`` for each prompt, so many at once; the results in the prompts' order.

        For batch jobs in the async form, in which a function opens a trace for its prompt and returns what it found::

            async def probe(prompt):
                async with model.trace(prompt, max_tokens=1):
                    resid = model.model.layers[10].output[0][-1].save()
                return resid

            async with model.map(probe, prompts, concurrency=256) as results:
                async for resid in results:
                    ...

        Args:
            function: a coroutine function of one argument.
            prompts: any iterable, also an asynchronous one; its items are taken as there is room for them.
            concurrency: how many calls run at once, or have results that nobody has taken yet.

        Raises:
            UnsupportedError: the model is in sync mode.
            ArgumentError: ``concurrency`` is less than 1.
        """
        if self.mode != "async":
            raise UnsupportedError('model.map runs coroutines: it needs VLLM(..., mode="async")')
        if concurrency < 1:
            raise ArgumentError(f"concurrency is at least 1, not {concurrency!r}")
        return Map(function, prompts, concurrency)

    def scan(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: vLLM's modules cannot run on shapes alone.

        Raises:
            UnsupportedError: always; the message says what to do instead.
        """
        raise UnsupportedError(NO_SCAN)

    @property
    def logits(self) -> Any:
        """In a block: what the sampler is about to draw from at this step, ``[1, vocab]``."""
        raise OutsideBlockError("model.logits can only be read in a block: write it inside `with model.trace(...):`")

    @property
    def samples(self) -> Any:
        """In a block: the token id drawn at this step, ``[1, 1]``."""
        raise OutsideBlockError("model.samples can only be read in a block: write it inside `with model.trace(...):`")

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as vLLM loads it."""
        if self._loaded_tokenizer is None:
            from vllm.tokenizers import cached_tokenizer_from_config

            self._loaded_tokenizer = cached_tokenizer_from_config(self._config.model_config)
        return self._loaded_tokenizer

    # Life.

    async def ready(self) -> None:
        """Start the engine if it is not started, and wait until it is.

        Raises:
            EngineError: it could not start.
            ClosedError: the model is closed.
        """
        await self._connection.wait(self._connection.ready())

    async def live(self) -> int:
        """How many traced requests the worker holds at this moment."""
        return (await self.stats()).live

    async def stats(self) -> Stats:
        """What the model's traced requests take up at this moment."""
        return await self._connection.wait(self._connection.stats())

    def tier_stats(self) -> Any:
        """How the engine's steps were run so far: in whole graphs, in graphs with breaks, or eagerly.

        Returns:
            A :class:`~nnsight_async.client.tiers.TierStats`; in async mode an awaitable of one.

        Raises:
            EngineError: the engine could not start.
            ClosedError: the model is closed.
        """
        work = self._connection.tier_stats()
        return self._connection.call(work) if self.mode == "sync" else self._connection.wait(work)

    def close(self) -> None:
        """Abort what is running and shut the engine down. Closing twice does nothing."""
        self._connection.close()

    async def aclose(self) -> None:
        """Like :meth:`close`, without holding up the event loop."""
        import anyio.to_thread

        await anyio.to_thread.run_sync(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        if self.mode != "async":
            raise UnsupportedError('`async with VLLM(...)` needs mode="async"; use `with` here')
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    # The tree.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._root, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._root)})

    def __repr__(self) -> str:
        return repr(self._root)
