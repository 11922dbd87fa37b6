"""Runs the blocks of a step's requests between the modules of its forward pass.

A step is ``begin`` (every block runs up to its first location), then one ``visit`` for each location that somebody
waits for, in the order the model comes to them, then ``finish``. A location nobody waits for costs a dictionary look-up
where its module has a hook, and nothing where it has none: hooks are put on modules when a block first asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnsight_async.errors import OutOfOrderError, OutsideBlockError
from nnsight_async.protocol import BlockState, Entry
from nnsight_async.saving import CacheMark
from nnsight_async.tree import is_operation
from nnsight_async.worker.block import LOGITS, SAMPLES, Block, Key, RequestOver, Waiting
from nnsight_async.worker.caching import CacheSpec, Caching, chosen_paths, open_cache
from nnsight_async.worker.copies import Copies
from nnsight_async.worker.draws import DrawCheck
from nnsight_async.worker.gathering import Gathering, Plan, take
from nnsight_async.worker.joined import Joiner
from nnsight_async.worker.journal import Journal
from nnsight_async.worker.keep import Shown
from nnsight_async.worker.order import Order, missed, name_of
from nnsight_async.worker.rows import Rows, Spans, assign, tensors_of
from nnsight_async.worker.slabs import Slabs
from nnsight_async.worker.taps import COPIED, Places, Tap, Taps

if TYPE_CHECKING:
    from nnsight_async.worker.ranks import Ranks


class Interleaver:
    """The blocks of one worker, and who of them waits for what. ``ranks`` is None where the worker is the only one."""

    def __init__(self, need_hook: Callable[[Key], None], ranks: Ranks | None = None, vocabulary: int = 1 << 31) -> None:
        self.blocks: dict[str, Block] = {}
        self._need_hook = need_hook
        self._ranks = ranks
        self._vocabulary = vocabulary
        self.draws: DrawCheck | None = None  # of the step in progress
        self._waiting: dict[Key, list[Block]] = {}
        self._running: Block | None = None
        self._rows: dict[str, Rows] = {}
        self._tokens = 0
        self._requests = 0
        self._in_forward = False
        self.order = Order()
        self._journal = Journal()
        self._noting = False  # whether the pass in progress is one that may have to be run again
        self._again = False  # whether it is being run again
        self.caching = Caching()
        self.slabs = Slabs()
        self.joiner = Joiner()
        self._joining = False
        self._shown: Shown | None = None
        self._spans: tuple[list[Block], Spans] | None = None

    # The forward thread's side: begin, visit, finish.

    def begin(self, rows: Mapping[str, Rows], tokens: int, requests: int) -> None:
        """Start a step of ``tokens`` tokens of ``requests`` requests; ``rows`` says which are the traced ones'."""
        self._rows = dict(rows)
        self._tokens = tokens
        self._requests = requests
        self._in_forward = True
        self.order.begin()
        self._noting = self._again = False
        self.draws = None
        self._waiting.clear()
        self._spans = None
        step = []
        for request_id, place in rows.items():
            block = self.blocks[request_id]
            block.rows, block.index = (place.start, place.stop), place.index
            step.append(block)
        before = [block for block in step if block.ended]
        self._enter()
        for block, place in zip(step, rows.values(), strict=True):
            block.step += 1
            block.noted = block.places.decode if place.stop - place.start == 1 else block.places.prefill
            if block.ended:
                continue
            waiting = block.waiting
            if not block.started or (waiting and waiting.key is None and waiting.step <= block.step):
                self._run(block)
            elif waiting and waiting.key is not None and waiting.step == block.step:
                self._queue(block, waiting.key)
        self._leave(step, before)
        for key in self.caching.begin(step, self._rows):
            self._need_hook(key)

    def wanted(self) -> Taps | None:
        """What the coming forward pass is going to be looked at for, as far as can be told.

        None where it has to be run in a way that shows any location at any time.
        """
        looked: set[Key] = set()
        programs: set[tuple[Places, bool]] = set()
        plans: set[Plan] = set()
        for key, blocks in self._waiting.items():
            if self.order.in_pass(key):
                looked.add(key)
                programs.update([(block.places, block.noted is block.places.prefill) for block in blocks])
                plans.update([loop.plan for block in blocks if (loop := block.gathering) is not None])
        for plan in plans:
            looked.update(plan.keys)
        for places, prompt in programs:
            expected = places.expected(prompt=prompt)
            if expected is None:
                return None
            looked |= expected
        if any(is_operation(path) for path, _ in looked):
            return None
        taps: set[Tap] = {key for key in looked if self.order.in_pass(key)}
        taps.update(
            [(*key, COPIED) for key in self.caching.locations() if key not in looked and self.order.in_pass(key)]
        )
        return frozenset(taps)

    def note_pass(self) -> None:
        """The coming forward pass shows only what was expected, so it may have to be run again."""
        self._noting = True
        self._journal.begin()

    def unserved(self) -> bool:
        """Whether, at the end of a forward pass, somebody waits for a location that it went by without showing it."""
        return any(self.order.in_pass(key) for key in self._waiting)

    def begin_again(self) -> None:
        """The forward pass is run once more, and shows everything."""
        self._noting, self._again = False, True
        self._journal.begin_again()
        self.caching.begin_again()
        self.order.begin()

    def end_forward(self) -> None:
        """From here on, what is visited has one row a request: the logits and the modules that compute them."""
        self._in_forward = self._noting = self._again = False
        self._spans = None

    def visit(self, key: Key, value: Any) -> None:
        """Show a location's value to the blocks that wait for it, each its own rows, one after the other."""
        if self._again:
            self._journal.put_back(key, list(tensors_of(value)), self._tokens)
        blocks = self._waiting.pop(key, None)
        captures = self.caching.wants(key)
        if blocks is None:
            if self._noting:
                self._journal.note(key, (), ())
            if captures:
                self._capture(key, self._enter(key, value))
                self._leave(())
            return
        self.order.come_to(key)
        value = self._enter(key, value)
        blocks = self._gather(value, blocks)
        if blocks:
            self._show(key, value, blocks)
        if self._noting:
            writers = [self._rows[block.request_id] for block in blocks if block.edits]
            self._journal.note(key, list(tensors_of(value)), writers)
        if captures:
            self._capture(key, value)
        self._leave(blocks)

    def _show(self, key: Key, value: Any, blocks: list[Block]) -> None:
        """Run blocks at a location, each with its own rows."""
        shown = self._shown = Shown(key, value, self._spans_of(blocks), self.slabs)
        self._joining = len(blocks) > 1 and self._ranks is None and key[1] in ("in", "out")
        for index, block in enumerate(blocks):
            shown.turn(index)
            self._run(block, shown)
        self._shown = None
        try:
            shown.settle()
        except Exception as error:  # the memory for it, say: then what they kept is nothing
            for block in blocks:
                self._end(block, error)
        if self._joining:
            self._run_calls(blocks)

    def _run_calls(self, blocks: list[Block]) -> None:
        """Run the calls that blocks have parked in, those of a kind together, until none is left."""
        calling = [block for block in blocks if block.calling is not None]
        began = list(calling)
        while calling:
            self._joining = len(calling) > 1
            calls = [block.calling for block in calling if block.calling is not None]
            for group in self.joiner.groups(calls):
                self._running = calling[group[0]]  # what is called is called by a block, and no visit
                try:
                    results = self.joiner.run([calls[place] for place in group])
                finally:
                    self._running = None
                for place, result in zip(group, results, strict=True):
                    self._run(calling[place], value=result)
            calling = [block for block in calling if block.calling is not None]
        for block in began:
            block.again = None
        self._joining = False

    def _gather(self, value: Any, blocks: list[Block]) -> list[Block]:
        """Do the turn of the loops at a location that need no block to run; returns the blocks that have to."""
        loops: dict[tuple[Plan, int], list[Block]] = {}
        running = []
        for block in blocks:
            loop = block.gathering
            if loop is None:
                running.append(block)
            else:
                loops.setdefault((loop.plan, loop.done), []).append(block)
        for (plan, done), members in loops.items():
            try:
                taken = take(value, plan.form, self._spans_of(members))
            except Exception as error:  # the memory for it, say
                for block in members:
                    self._end(block, error)
                continue
            if taken is None:
                running += members
                continue
            values, refs = taken
            for block, kept in zip(members, values, strict=True):
                loop = block.gathering
                assert loop is not None
                loop.target.append(kept)
                loop.done = done + 1
            self.slabs.add(refs)
            self._go_on(members, plan.keys[done + 1], last=done + 2 == len(plan.keys))
        return running

    def _go_on(self, blocks: list[Block], key: Key, *, last: bool) -> None:
        """Have loops wait for their next location; at the ``last`` one, and where it has passed, the blocks run."""
        at = self.order.at.get(key)
        if at is None or at[-1] <= self.order.position:
            for block in blocks:
                self._run(block)
            return
        for block in blocks:
            waiting = block.waiting
            assert waiting is not None
            waiting.key = key
            if last:
                block.gathering = None
            block.noted.add(key)
        queue = self._waiting.get(key)
        if queue is not None:
            queue += blocks
            return
        self._need_hook(key)
        self._waiting[key] = list(blocks)

    def _spans_of(self, blocks: list[Block]) -> Spans:
        """Where the rows of blocks are at this point of the step."""
        known = self._spans
        # Mostly they are the same, in the same order, at one location after the other.
        if known is None or known[0] != blocks:
            if self._in_forward:
                spans = Spans([block.rows for block in blocks], self._tokens)
            else:
                spans = Spans([(block.index, block.index + 1) for block in blocks], self._requests)
            known = self._spans = (blocks, spans)
        return known[1]

    def settle(self) -> None:
        """Copy now what blocks hold of the location that is being shown, because its memory may be written over."""
        if self._shown is not None:
            self._shown.settle()

    def _capture(self, key: Key, value: Any) -> None:
        size = self._tokens if self._in_forward else self._requests
        self.caching.capture(key, value, size, by_index=not self._in_forward)

    def take_copies(self, copies: Copies) -> None:
        """Capture what a graph has copied of the locations that nobody else looked at."""
        self.caching.take_copies(copies, self._tokens)

    def visit_logits(self, logits: torch.Tensor) -> None:
        """Edit the logits ``[requests, vocab]`` as messages say, then show each request its own."""
        for block, row in self._controlled(logits):
            block.controls.on_logits(row)
        self.visit(LOGITS, logits)

    def visit_samples(self, samples: torch.Tensor) -> None:
        """Force the samples ``[requests, 1]`` as messages say, then show each request its own.

        A block that leaves an id outside the vocabulary fails, and the id is put back; with one rank that is left to
        ``draws``, which somebody else asks when it is there.
        """
        for block, row in self._controlled(samples):
            block.controls.on_samples(row)
        if self._ranks is not None:
            self._ranks.share_draws(samples)
        waiting = self._waiting.get(SAMPLES)
        if not waiting:
            return
        drawn, blocks = samples.clone(), list(waiting)
        self.visit(SAMPLES, samples)
        if self._ranks is not None:
            self._ranks.share(samples)
        places = {self._rows[block.request_id].index: block for block in blocks}
        self.draws = DrawCheck(samples, drawn, places, self._vocabulary)
        if self._ranks is not None:
            self.draws.failures()  # every rank has to know, and only one of them posts
            self.draws = None

    def _controlled(self, rows: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
        """The step's blocks that messages act on, each with its row of the logits or samples."""
        for request_id, place in self._rows.items():
            block = self.blocks[request_id]
            if block.controls.active:
                yield block, rows[place.index : place.index + 1]

    def finish(self) -> list[Block]:
        """End the step: blocks that still wait for a location of this step are told; returns the step's blocks."""
        self.order.end()  # a block that goes on from here finds every location of this step passed
        step = [self.blocks[request_id] for request_id in self._rows]
        for block in step:
            if block.noted is block.places.prefill:
                block.places.prefilled = True
        waited = bool(self._waiting)
        if waited:
            self._enter()
        while self._waiting:
            key, blocks = self._waiting.popitem()
            for block in blocks:
                self._throw(block, missed(key, block))
        if waited:
            self._leave(step)
        self._rows = {}
        self._spans = None  # blocks that are over are not to be held until there is another step
        self.slabs.tidy()
        return step

    def resolve_result(self, request_id: str, result: Any) -> Block | None:
        """Give a block that waits for its request's result what it waits for."""
        block = self.blocks.get(request_id)
        if block is not None and block.waiting is not None and block.waiting.result:
            block.result = result
            self._enter()
            self._run(block, value=result)
            if not block.ended:
                self._throw(block, RequestOver())
            self._leave([block])
        return block

    def drop(self, request_ids: Iterable[str], *, keep_for_result: bool = False) -> None:
        """Forget requests that are over: their blocks are unwound and freed.

        With ``keep_for_result``, a block that waits for its result stays until that comes.
        """
        for request_id in request_ids:
            block = self.blocks.get(request_id)
            if block is None or (keep_for_result and block.waiting is not None and block.waiting.result):
                continue
            if block.started and not block.ended:
                self._throw(block, RequestOver())
            del self.blocks[request_id]
            self.slabs.requests_ended()

    def _enter(self, key: Key | None = None, value: Any = None) -> Any:
        """Before blocks run: ``value`` as they are to see it, whole where ranks share it."""
        return value if self._ranks is None else self._ranks.enter(key, value)

    def _leave(self, blocks: Sequence[Block], over: Sequence[Block] = ()) -> None:
        """After ``blocks`` have run: what they wrote is put back, and those that ranks differ in are ended.

        Those in ``over`` had ended before, and keep what they ended with.
        """
        for block, error in self._ranks.leave(blocks) if self._ranks is not None else ():
            if block not in over:
                self._end(block, error)

    def _end(self, block: Block, error: BaseException) -> None:
        """Unwind a block that is parked, and end it because of an error that is not its own code's."""
        waiting = {key: [other for other in queue if other is not block] for key, queue in self._waiting.items()}
        self._waiting = {key: queue for key, queue in waiting.items() if queue}
        if block.started and not block.ended:
            self._throw(block, RequestOver())
        block.fail(error)

    def _run(self, block: Block, visit: Shown | None = None, value: Any = None) -> None:
        before, self._running = self._running, block
        try:
            block.resume(value, visit)
        except Exception as error:  # ours, not the block's: it must not take the engine down
            block.fail(error)
        finally:
            self._running = before
        self._park(block)

    def _throw(self, block: Block, error: BaseException) -> None:
        before, self._running = self._running, block
        try:
            block.throw(error)
        finally:
            self._running = before
        if not block.ended and not isinstance(error, RequestOver):
            self._park(block)

    def _park(self, block: Block) -> None:
        waiting = block.waiting
        if waiting is not None and waiting.key is not None and waiting.step == block.step and block.state is None:
            self._queue(block, waiting.key)

    def _queue(self, block: Block, key: Key) -> None:
        block.noted.add(key)
        queue = self._waiting.get(key)
        if queue is not None:
            queue.append(block)
            return
        if key[1] in ("in", "out"):
            self._need_hook(key)
        self._waiting[key] = [block]

    # The block's side: called in its greenlet.

    @property
    def busy(self) -> bool:
        """Whether a block's code is running now: whatever is called then is called by it."""
        return self._running is not None

    @property
    def running(self) -> Block:
        """The block whose code is running now."""
        if self._running is None:
            raise OutsideBlockError("a location can only be read in a running block")
        return self._running

    def span(self, block: Block) -> tuple[int, int, int]:
        """Where a block's rows are at this point of the step: how many rows there are, its first, and its last + 1."""
        rows = self._rows[block.request_id]
        if self._in_forward:
            return self._tokens, rows.start, rows.stop
        return self._requests, rows.index, rows.index + 1

    @property
    def alone(self) -> bool:
        """Whether the model is on one rank."""
        return self._ranks is None

    @property
    def joining(self) -> bool:
        """Whether other blocks may be about to make the same call as the running one, which then may wait for them.

        One that edits may not: what it has been shown is not live any more when it goes on.
        """
        return self._joining and not self.running.edits

    def splits(self, key: Key) -> bool:
        """Whether each rank has only its part of a location's value."""
        return self._ranks is not None and self._ranks.splits(key)

    def wait_for(self, key: Key) -> Any:
        """Wait for ``key`` at the block's step; the same location read again in the same visit is the same object."""
        block = self._running
        if block is None:
            block = self.running  # raises
        shown, again, cursor = block.visit, block.again, block.cursor
        if shown is not None and shown.key == key and cursor == block.step:
            return shown.value
        if again is not None and again[0] == key and cursor == block.step:
            return again[1]
        at = self.order.at.get(key)
        if at is None or cursor != block.step or at[-1] <= self.order.position:
            self.order.check(block, key)
        return block.park(Waiting(key, cursor))

    def wait_for_all(self, plan: Plan, target: list[Any]) -> int:
        """Wait until a loop has come to where its block has to run; returns how many of its turns are done."""
        block = self.running
        key, shown = plan.keys[0], block.visit
        at = self.order.at.get(key)
        if at is None or at[-1] <= self.order.position or (shown is not None and shown.key == key):
            return 0
        block.gathering = loop = Gathering(plan, target)
        try:
            block.park(Waiting(key, block.cursor))
        finally:
            block.gathering = None
        return loop.done

    def replace(self, key: Key, value: Any) -> None:
        """Wait for ``key`` and write ``value`` over the request's rows of it."""
        assign(self.wait_for(key), value, name_of(key))

    def wait_for_step(self, step: int) -> None:
        """Move the block to ``step``, waiting until it begins."""
        block = self.running
        if block.cursor < 0:
            raise OutOfOrderError(f"step {step} has passed: after tracer.result the request is over")
        if step < block.step or (step == block.step and block.cursor > step):
            raise OutOfOrderError(f"step {step} has passed: the request is at step {block.step}")
        block.cursor = step
        if step > block.step:
            block.park(Waiting(None, step))

    def move_to_end(self) -> None:
        """Move the block past the last step, where only the result is left to read."""
        self.running.cursor = -1

    def wait_for_result(self) -> Any:
        """Wait until the request is over and return its RequestOutput."""
        block = self.running
        block.cursor = -1
        if block.result is not None:
            return block.result
        return block.park(Waiting(None, 1 << 62, result=True))

    def open_cache(self, modules: Any, *, include_inputs: bool, device: str, dtype: torch.dtype | None) -> CacheMark:
        """Have the running block's request captured at every step: the outputs of modules, and their inputs."""
        spec = CacheSpec(chosen_paths(modules, self.order.paths()), include_inputs, dtype)
        return open_cache(self.running, self.caching.known(spec), device)

    # What a step did.

    def entry(self, block: Block, changes: bytes, *, final: bool = False) -> Entry:
        """The post's entry of one block."""
        state, where = block.state, ""
        if state is None:
            assert block.waiting is not None
            state = BlockState.WANTS_RESULT if block.waiting.result else BlockState.LOOPING
            where = block.line()
        return Entry(block.request_id, block.step, state, changes, where, block.pickled_failure(), final)
