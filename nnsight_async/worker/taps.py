"""Which locations a step's blocks are going to wait for, and which graphs are worth having for that.

What a program reads cannot be told from its text in general, and need not be: it is noted while the program runs. The
locations of a request's step are expected to be those that its program has come to in such steps before, of prompts or
of single tokens. Where that was wrong, the pass is run once more (see :mod:`nnsight_async.worker.journal`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from nnsight_async.worker.block import Key

#: What a graph is captured for: ``(path, side)`` breaks it at a location, ``(path, side, COPIED)`` has it leave a copy.
Tap = tuple[str, ...]
Taps = frozenset[Tap]
COPIED: Final = "copied"
Size = TypeVar("Size", bound=Hashable)
Graph = TypeVar("Graph")


class Places:
    """The locations that one program has come to, apart for the steps of prompts and those of single tokens.

    ``irregular`` is set by what no graph can serve (a module that is skipped, an operation inside one), and
    ``prefilled`` once the program has been through a prompt.
    """

    def __init__(self) -> None:
        self.prefill: set[Key] = set()
        self.decode: set[Key] = set()
        self.irregular = False
        self.prefilled = False

    def expected(self, *, prompt: bool = False) -> set[Key] | None:
        """Where a step is expected to be looked at; None where nothing is known.

        Before the first decode step that is where the prompt's was; of the first prompt nothing is known.
        """
        if prompt:
            return self.prefill if self.prefilled and not self.irregular else None
        return None if self.irregular else self.decode or self.prefill


#: How often a set of locations is asked for, at one size, before a graph is captured for it ...
_RECURS: Final = 2
#: ... and how often where a graph with more locations, or for more tokens, serves it meanwhile.
_RECURS_SERVED: Final = 16
#: After how many steps without a graph one is captured for all that they asked for.
_MISSES: Final = 8


class Shelf(Generic[Size, Graph]):
    """Captured graphs, by the locations that they break at and by their size; the least recently used go first.

    Args:
        capture: captures a graph that breaks at the locations, of the size; None where that cannot be done.
        most: how many graphs are kept.
    """

    def __init__(self, capture: Callable[[Taps, Size], Graph | None], most: int) -> None:
        self._capture = capture
        self._most = most
        self._graphs: OrderedDict[tuple[Taps, Size], Graph] = OrderedDict()
        self._asked: Counter[tuple[Taps, Size]] = Counter()
        self._missed: deque[Taps] = deque(maxlen=_MISSES)
        self._refused: set[tuple[Taps, Size]] = set()

    def __iter__(self) -> Iterator[tuple[Taps, Size]]:
        return iter(self._graphs)

    def pick(self, keys: Taps, sizes: Iterable[Size]) -> tuple[Size, Graph] | None:
        """A graph that breaks at least at ``keys``: of the first of ``sizes``, which fits best, or of another.

        It is captured here once it is certain to be worth it. None where there is none yet.
        """
        best, *larger = sizes
        exact = self._graphs.get((keys, best))
        if exact is not None:
            self._graphs.move_to_end((keys, best))
            return best, exact
        served = self._stand_in(keys, best, larger)
        self._asked[keys, best] += 1
        if len(self._asked) > 64 * self._most:
            self._asked.clear()
        if self._asked[keys, best] >= (_RECURS if served is None else _RECURS_SERVED):
            return self.add(keys, best) or served
        if served is None:
            self._missed.append(keys)
            if len(self._missed) == _MISSES:
                union = frozenset().union(*self._missed)
                self._missed.clear()
                return self.add(union, best)
        return served

    def add(self, keys: Taps, size: Size) -> tuple[Size, Graph] | None:
        """Capture a graph and keep it; None where that cannot be done, which is not tried again."""
        if (keys, size) in self._refused:
            return None
        graph = self._capture(keys, size)
        if graph is None:
            self._refused.add((keys, size))
            return None
        self._graphs[keys, size] = graph
        while len(self._graphs) > self._most:
            self.drop_oldest()
        return size, graph

    def drop_oldest(self) -> bool:
        """Let go of the graph that was not used for longest; False where there is none."""
        if not self._graphs:
            return False
        dropped, _ = self._graphs.popitem(last=False)
        del self._asked[dropped]
        return True

    def _stand_in(self, keys: Taps, best: Size, larger: Iterable[Size]) -> tuple[Size, Graph] | None:
        fitting = [known for known in self._graphs if keys <= known[0]]
        for size in (best, *larger):
            known = min((one for one in fitting if one[1] == size), key=lambda one: len(one[0]), default=None)
            if known is not None:
                self._graphs.move_to_end(known)
                return size, self._graphs[known]
        return None
