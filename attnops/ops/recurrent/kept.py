"""Tokens of a request that may still be taken back: their inputs are kept, and the state stays
before them.

The inputs of a token lie in one of R slots that a request uses in turn. A call first lets the state
go on over the accepted ones, and only then reads it with the new tokens, which become the kept
ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core.record import INT32, Sizes, arg, changed, need, place
from attnops.core.tensors import surely


def kept(dims: str, dtypes: Any) -> Any:
    """The argument for one kind of the inputs that are kept."""
    return arg(dims, dtypes, default=None, written=True, holds="states")


ACCEPTED: Any = arg("B, 2", INT32, default=None)
"""Of each request the slot of its first accepted token, and how many are accepted."""


def check_kept(call: Any, sizes: Sizes) -> None:
    """Raise InvalidInput where a part of what is kept is missing, or cannot be."""
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


# For references -----------------------------------------------------------------------------------


def over_accepted(call: Any, **names: str) -> tuple[Any, Tensor, Tensor]:
    """(the call over the tokens that are kept, and of the accepted ones what `reference.rows_of`
    gives, `[B, R]`).

    names: by the name of an input, what is kept of it, or of what stands for it where it is not
    needed.
    """
    given = {name: getattr(call, kept_name) for name, kept_name in names.items()}
    slots = next(iter(given.values())).shape[1]
    first, count = call.accepted.long().unbind(1)
    t = torch.arange(slots, device=first.device)
    requests = torch.arange(first.shape[0], device=first.device)
    rows = requests[:, None] * slots + (first[:, None] + t) % slots
    before = changed(call, **{name: x.flatten(0, 1) for name, x in given.items()})
    return before, rows, t < count[:, None]


def keep(call: Any, **names: str) -> None:
    """Keep the new tokens, behind the accepted ones. names: as `over_accepted` has them."""
    first, count = call.accepted.long().unbind(1)
    starts = call.cu_seqlens_q.long()
    for name, kept_name in names.items():
        old, x = getattr(call, kept_name), getattr(call, name)
        slots = old.shape[1]
        t = torch.arange(slots, device=old.device)
        t = (t - (first + count)[:, None]) % slots
        is_new = t < starts.diff()[:, None]
        if not x.shape[0]:
            continue
        new = x[torch.where(is_new, starts[:-1, None] + t, 0)]
        old.copy_(torch.where(is_new.view(*is_new.shape, *[1] * (old.dim() - 2)), new, old))
