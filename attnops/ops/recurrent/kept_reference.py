"""For references of layers that carry a state: tokens that may be taken back, see
`attnops.ops.recurrent.kept`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core.record import changed

RULE_KEEPS = {"key": "kept_key", "value": "kept_value", "decay": "kept_decay", "beta": "kept_beta"}
SCAN_KEEPS = {"x": "kept_x", "dt": "kept_dt", "b": "kept_b"}
"""What is kept of a token's inputs, by the name of the input."""


def over_accepted(call: Any, **names: str) -> tuple[Any, Tensor, Tensor]:
    """(the call with the kept tokens in place of the new ones, and what `reference.rows_of` gives
    of those that are accepted, `[B, R]`).

    names: by input, the argument that keeps it. A state goes on without query or c: these may have
    the argument of another input.
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
