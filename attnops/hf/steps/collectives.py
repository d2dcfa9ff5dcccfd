"""Steps that talk to other processes, as those of a model whose plain weights are spread over
ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from attnops.core.errors import NotCapturable, fail
from attnops.core.private_torch import TorchDispatchMode
from attnops.graphs.eager_capture import capture_mode

_WHY = (
    "its graphs are for the caller to ask for by decode=: one rank alone may fail to make "
    "them, and the others would wait for it"
)


class _Collectives(TorchDispatchMode):
    """Notes the collectives of a run. first: the name of the first one."""

    first = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.first = self.first or str(func)
        return func(*args, **(kwargs or {}))


def without_collectives(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step`, whose warm-up raises NotCapturable if it ran a collective.

    It raises at the end of the warm-up: by then every rank has run every collective.
    """

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        if alone or capture_mode() is not None:
            return step(*args, **kwargs)
        with _Collectives() as seen:
            out = step(*args, **kwargs)
        if seen.first:
            fail(NotCapturable, seen.first, _WHY)
        return out

    return run
