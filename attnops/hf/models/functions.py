"""What functions that take the place of transformers' own share: whether an op serves a call, its
requests, and the numbers of a trial."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.core.select import active_policy
from attnops.hf.models.chosen import Sizes, is_ours


def is_served(op: str, x: Tensor, sizes: Sizes, asks: tuple[str, ...] = ()) -> bool:
    """Does a kernel of attnops answer? x: a tensor of the call. sizes, asks: see `is_ours`."""
    if type(x) is not Tensor or torch.is_autocast_enabled(x.device.type) or not x.numel():
        return False
    policy = active_policy()
    return bool(is_ours(op, policy, x.device, x.dtype, None, sizes, asks))


def starts_of(x: Tensor, rows: int, tokens: int) -> Tensor:
    """int32 `[rows + 1]` on the device of `x`, of requests of as many tokens."""
    return torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=x.device)


def numbers(*shape: int) -> Tensor:
    """Some numbers from -1 to 1, always the same."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1.0, count + 1).square() * 0.37).view(shape)
