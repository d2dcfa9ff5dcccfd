"""Tokens of a request that may still be taken back: their inputs are kept, and the state stays
before them.

The inputs of a token lie in one of R slots that a request uses in turn. A call first lets the state
go on over the accepted ones, and only then reads it with the new tokens, which become the kept
ones.
"""

from __future__ import annotations

from typing import Any

from attnops.core.record import INT32, Sizes, arg, need, place
from attnops.core.tensors import surely


def kept(dims: str, dtypes: Any) -> Any:
    """The argument for one kind of the inputs that are kept."""
    return arg(dims, dtypes, default=None, written=True, holds="states")


ACCEPTED: Any = arg("B, 2", INT32, default=None)
"""Of each request the slot of its first accepted token, and how many are accepted."""


def check_kept(call: Any, sizes: Sizes) -> None:
    """Raise InvalidInput for a part of what is kept without the rest, and for a call that cannot
    keep its tokens."""
    names = [a.name for a in call.spec.args if a.name.startswith("kept_")]
    accepts = call.accepted is not None
    for name in names:
        there = getattr(call, name) is not None
        got = "a tensor" if there else "None"
        want = "a tensor, because accepted is one" if accepts else "None, because accepted is None"
        need(there is accepts, name, got, want)
    if not accepts:
        return
    need(not call.fresh, "fresh", True, "False, because accepted tokens come before these")
    slots, most = sizes["R"], call.max_seqlen_q
    want = f"at most {slots} (R, as {place(call.spec, 'R')})"
    need(not surely(most > slots), "max_seqlen_q", most, want)
