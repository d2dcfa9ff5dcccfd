"""`ChoiceGraphs`: the captured graphs of what follows the model in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnops.cache.paged import ordinary
from attnops.core.errors import NotCapturable
from attnops.graphs.cuda_graphs import CAPTURING, Device, Recorded, frozen
from attnops.hf.steps.captures import Failures, passing


class ChoiceGraphs:
    """Graphs of code that follows a step: one for each argument of it, such as the number of tokens
    of a row.

    failures: why there are none, so that operations are launched one by one.
    """

    def __init__(self) -> None:
        self._recorded: dict[Any, Recorded] = {}
        self.failures = Failures[str]()

    @property
    def reason(self) -> str:
        """Why there is no graph; "" where there is."""
        return self.failures.why("")

    @property
    def nbytes(self) -> int:
        """Bytes of the graphs."""
        return sum(sum(each.bytes_of) for each in self._recorded.values())

    def capture(
        self,
        device: Device,
        sizes: Sequence[Any],
        clear: Callable[[], None],
        choose: Callable[[Any], None],
    ) -> None:
        """Run and capture `choose` for each size, a number of tokens or what else it takes. It
        draws no random number.

        clear: makes the buffers as if no text had been in them; the last one may have filled them.
        """
        recorded = dict[Any, Recorded]()
        try:
            with CAPTURING, frozen(), device.session(), ordinary():
                clear()
                for size in sizes:
                    choose(size)
                    graph = recorded[size] = Recorded(device)
                    graph.current = "the choice of a token"
                    with graph.whole():
                        graph.begin()
                        choose(size)
        except Exception as error:
            if not (isinstance(error, NotCapturable) or passing(error)):
                raise
            self.failures.note("", error)
            return
        self._recorded = recorded
        self.failures.done("")

    def run(self, size: Any, choose: Callable[[Any], None]) -> None:
        """Replay the graph of a size. Without one, `choose` runs."""
        graph = self._recorded.get(size)
        if graph is None:
            choose(size)
            return
        graph.device.follow()
        for step in graph.steps:
            step()

    def reset(self) -> None:
        """Free the graphs."""
        for graph in self._recorded.values():
            graph.device.settle()
            graph.reset()
        self._recorded = {}
