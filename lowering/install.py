"""Registers a lowering for every op, once a process. Runs when a compiler first traces an op, so that `import attnops` stays light."""

import threading

from ..ops import OPS
from . import cache_key
from .choose import lowering_of

_LOCK = threading.Lock()
_REGISTERED: set[str] = set()


def install() -> None:
    """Register the lowerings and the cache key. Idempotent; leaves a user's own passes and lowerings as they are."""
    from torch._inductor.lowering import add_needs_realized_inputs, register_lowering

    with _LOCK:
        for op in OPS.values():
            if op.name not in _REGISTERED:
                add_needs_realized_inputs(op.packet.default)
                register_lowering(op.packet.default, type_promotion_kind=None)(lowering_of(op))
                _REGISTERED.add(op.name)
        cache_key.install()
