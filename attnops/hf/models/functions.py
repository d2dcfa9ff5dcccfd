"""What functions that take the place of transformers' own share: whether an op serves a call, its
requests, and the numbers of a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnops.core.private_torch import FakeTensor
from attnops.core.select import active_policy
from attnops.hf.models.chosen import Sizes, is_ours

Function = Callable[..., Any]
Make = Callable[[Function, Any], Function]
"""Of transformers' function and of a layer's part of a step in a graph, or None outside of graphs:
what takes the place of the function. In a graph it serves every call, and it writes the states of
the step."""


def is_served(op: str, x: Tensor, sizes: Sizes, asks: tuple[str, ...] = ()) -> bool:
    """Does a kernel of attnops answer? x: a tensor of the call. sizes, asks: see `is_ours`."""
    plain = type(x) in (Tensor, FakeTensor)  # explain asks with fake tensors
    if not plain or torch.is_autocast_enabled(x.device.type) or not x.numel():
        return False
    policy = active_policy()
    return bool(is_ours(op, policy, x.device, x.dtype, None, sizes, asks))


def requests_of(view: Any, x: Tensor, rows: int, tokens: int, fresh: bool) -> dict[str, Any]:
    """Arguments of an op: the requests of a step in a graph, else rows of as many tokens.

    view: the layer's part of the step; None outside of graphs. x: a tensor of the call. fresh: have
    the rows no tokens before these?
    """
    if view is not None:
        batch = view.batch
        known = {"cu_seqlens_q": batch.cu_seqlens_q, "max_seqlen_q": batch.max_seqlen_q}
        return {**known, "fresh": view.fresh, "padded": False}
    ends = (rows + 1) * tokens
    starts = torch.arange(0, ends, tokens, dtype=torch.int32, device=x.device)
    return {"cu_seqlens_q": starts, "max_seqlen_q": tokens, "fresh": fresh, "padded": False}


def numbers(*shape: int) -> Tensor:
    """Some numbers from -1 to 1, always the same."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1.0, count + 1).square() * 0.37).view(shape)
