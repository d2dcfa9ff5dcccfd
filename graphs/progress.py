"""A progress bar for captures, where rich is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar() -> Iterator[Callable[[int, int, str], None]]:
    """Draws what `Graphed.capture(progress=...)` tells. Raises ImportError where rich is not installed."""
    from rich.progress import Progress

    with Progress() as drawn:
        task = drawn.add_task("capture", total=None)

        def tell(done: int, total: int, bucket: str) -> None:
            drawn.update(task, completed=done, total=total, description=bucket)

        yield tell
