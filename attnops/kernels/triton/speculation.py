"""`triton`, of a round of speculation: one launch each, a row a program."""

from __future__ import annotations

import torch

from attnops.core.problem import Problem
from attnops.kernels.triton.attention import launched, own


def _cost_us(p: Problem) -> float:
    """A launch, and one program's passes over a text or a vocabulary; not measured."""
    return 4.0 + max(p.sizes.context.hint, 1) / 4096


IDS, INT32 = (torch.int64,), (torch.int32,)
for _op, _dtypes in (
    ("lookup_drafts", IDS),
    ("accept", IDS),
    ("advance_rows", IDS),
    ("next_inputs", IDS),
    ("accept_sampled", IDS),
    ("build_tree", IDS),
    ("tree_mask", INT32),
):
    own(_op, launched("speculation", _op), _cost_us, "one launch", dtypes=_dtypes)
