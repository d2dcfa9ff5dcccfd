"""Reference of the routing of a mixture: the experts of each token, then their weights, in float32
or float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.core.tensors import wide

if TYPE_CHECKING:
    from attnops.ops.experts.route import Route


def route(call: Route) -> None:
    """The reference of `attnops.ops.route`."""
    logits = wide(call.logits)
    index = chosen(call, logits, call.bias, call.index.shape[1])
    call.index.copy_(index)
    call.weights.copy_(weighed(call, logits, index))


def by_logits(call: Route, bias: object) -> bool:
    """Do logits sort experts and groups as their scores do?"""
    return bias is None and (call.groups == 1 or call.group_best == 1)


def values(call: Route, logits: Tensor, bias: Tensor | None) -> Tensor:
    """The numbers by which experts are chosen, `[T, E]`. call: its tensors are not read."""
    if by_logits(call, bias):
        return logits
    scores = logits.sigmoid() if call.scoring == "sigmoid" else logits.softmax(-1)
    return scores if bias is None else scores + bias.to(scores.dtype)


def chosen(call: Route, logits: Tensor, bias: Tensor | None, top_k: int) -> Tensor:
    """int64 `[T, K]`, the experts of each token."""
    value = values(call, logits, bias)
    number = torch.arange(value.shape[1], device=value.device).expand(value.shape)
    if call.groups > 1:
        # No masks: an expert of another group would be as good as one of -inf.
        parts, numbers = (t.unflatten(1, (call.groups, -1)) for t in (value, number))
        best = parts.sort(-1, descending=True).values[..., : call.group_best].sum(-1)
        kept = (
            _first(best, call.top_groups).sort(-1).values[..., None].expand(-1, -1, parts.shape[2])
        )
        value, number = parts.gather(1, kept).flatten(1), numbers.gather(1, kept).flatten(1)
    return number.gather(1, _first(value, top_k))


def weighed(call: Route, logits: Tensor, index: Tensor) -> Tensor:
    """`[T, K]`, the weights of these experts."""
    picked, scale = logits.gather(1, index), float(call.scale)
    if call.scoring == "sigmoid":
        weights = picked.sigmoid()
    elif call.normalize and not call.eps:
        return picked.softmax(-1) * scale  # the other logits cancel
    else:
        weights = logits.softmax(-1).gather(1, index)
    return (
        weights / (weights.sum(-1, keepdim=True) + float(call.eps)) * scale
        if call.normalize
        else weights * scale
    )


def _first(x: Tensor, n: int) -> Tensor:
    """The places of the n largest numbers of each row: NaN first, and of equal ones the first."""
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :n]
