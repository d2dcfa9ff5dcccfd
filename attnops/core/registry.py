"""`Registry`: all kernels by op and name, and who wants to know of new ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnops.core.kernel import Kernel


@dataclass
class Registry:
    """All kernels by op and name, and the checks and listeners for new ones. waiting: kernels of an open `together`.

    Calls of other threads read `kernels` at any time, so a registration replaces it, under `lock`, and changes no dict in place.
    """

    kernels: dict[str, dict[str, Kernel]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    checks: list[Callable[[Kernel], None]] = field(default_factory=list)
    listeners: list[Callable[[Kernel], None]] = field(default_factory=list)
    waiting: list[Kernel] | None = None
    generation: int = 0
    lock: RLock = field(default_factory=RLock)

    def add(self, kernel: Kernel) -> None:
        """Add a kernel."""
        with self.lock:
            table = {**self.kernels.get(kernel.op, {}), kernel.name: kernel}
            self.kernels = {**self.kernels, kernel.op: table}
            self.generation += 1

    def remove(self, kernel: Kernel) -> None:
        """Remove a kernel, and the table of its op with the last one."""
        with self.lock:
            table = {n: k for n, k in self.kernels.get(kernel.op, {}).items() if n != kernel.name}
            others = {op: kernels for op, kernels in self.kernels.items() if op != kernel.op}
            self.kernels = {**others, kernel.op: table} if table else others
            self.generation += 1
