"""Teaches Inductor every op, once a process. Called when an op is first traced by a compiler, so that `import attnops` stays light."""

import threading

from ..ops import OPS
from . import key
from .choose import lowering_of

_LOCK = threading.Lock()
_DONE: set[str] = set()


def install() -> None:
    """Register a lowering for every op and the cache key. Idempotent; composes with any user's own passes and lowerings."""
    from torch._inductor.lowering import add_needs_realized_inputs, register_lowering

    with _LOCK:
        for op in OPS.values():
            if op.name not in _DONE:
                default = op.packet.default
                add_needs_realized_inputs(default)
                register_lowering(default, type_promotion_kind=None)(lowering_of(op))
                _DONE.add(op.name)
        key.install()
