"""Kernels that wait for something to be built, by a command of the user: until then selection takes
the next best.

Calls look at no file: a thread does so while something is wanted, whichever process builds it, and
has them select anew once it is there. The thread ends with the last wish.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attnops.core.kernel import renew
from attnops.core.traits import Unbuilt

if TYPE_CHECKING:
    from attnops.core.kernel import Kernel
    from attnops.core.problem import Problem

PERIOD_S = 2.0
"""Seconds between two looks."""


@dataclass
class Wish:
    """What was not there when a call was selected.

    kernel: that lacks it. problem: the call. reason: what the kernel said.
    first: `op.kernel` of the kernels that calls would take, were it there.
    """

    kernel: Kernel
    problem: Problem
    reason: Unbuilt
    first: dict[str, None] = field(default_factory=dict)


_WISHES: dict[str, Wish] = {}
_LOCK = threading.Lock()
_THREADS: list[threading.Thread] = []


def _unlocked() -> None:
    """After a fork the lock may be held by a thread of the parent, which never lets it go here."""
    global _LOCK
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlocked)


def wish(kernel: Kernel, problem: Problem, reason: Unbuilt, first: bool) -> None:
    """Have calls select anew once `kernel` no longer says `reason`. first: would it be taken?"""
    with _LOCK:
        known = _WISHES.setdefault(reason.want, Wish(kernel, problem, reason))
        if first:
            known.first[f"{kernel.op}.{kernel.name}"] = None
        # A forked process has the list and not the thread.
        if not any(thread.is_alive() for thread in _THREADS):
            _THREADS[:] = [threading.Thread(target=_watch, name="attnops-builds", daemon=True)]
            with suppress(RuntimeError):  # of an interpreter that ends, which starts no threads
                _THREADS[0].start()


def _watch() -> None:
    pause = threading.Event()
    while not pause.wait(PERIOD_S):
        look()
        with _LOCK:
            if not _WISHES:
                _THREADS.clear()
                return


def look() -> None:
    """Look for what is wanted, now, and have calls select anew if some of it is there."""
    with _LOCK:
        wishes = dict(_WISHES)
    met = [want for want, w in wishes.items() if w.reason not in w.kernel.unbuilt(w.problem)]
    with _LOCK:
        for want in met:
            _WISHES.pop(want, None)
    if met:
        renew()


def notes() -> tuple[str, ...]:
    """A sentence for each kernel that calls of this process would take, were it built."""
    with _LOCK:
        wishes = [w for w in _WISHES.values() if w.first]
    return tuple(
        f"{', '.join(w.first)}: faster for some calls, and not built: {w.reason.want}"
        for w in wishes
    )
