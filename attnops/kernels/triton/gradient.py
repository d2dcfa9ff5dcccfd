"""`triton` for gradients: attnops' own backward kernels, with every rule of visibility, soft caps, sinks and ranges of keys.

Tiles follow from head dims and the GPU, and no two programs add to one number, so that a request's gradients do not depend on its batch
mates: a deterministic policy has them. `launch/gradient.py` holds the launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.kernel import Invariant, Kernel, at_most, register, without
from attnops.kernels.torch.aten_flash_cuda import BACKWARD
from attnops.kernels.triton.attention import ATTENTION, PACKAGE
from attnops.problem import Problem
from attnops.reference.attention import Rules


def attention_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_start: Tensor | None = None,
    kv_end: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    attention_chunk: int = 0,
    mask_grad: bool = False,
    policy: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradient of `attention`; see `attnops.reference.attention.attention_backward`."""
    batch, queries, keys = *query.shape[:2], key.shape[1]
    at = torch.arange(batch, device=query.device)
    low = torch.zeros_like(at) if kv_start is None else kv_start.clamp(min=0)
    end = torch.full_like(at, keys) if kv_end is None else kv_end
    bounds = torch.stack([at * queries, torch.full_like(at, queries), at * keys, low, end.clamp(max=keys), end - queries])
    flat = [x.flatten(0, 1) for x in (grad_output, query, key, value, output, lse)]
    rules = Rules(scale, causal, window_left, window_right, softcap, attention_chunk)
    z = None if grad_lse is None else grad_lse.flatten(0, 1)
    covered = kv_start is None and kv_end is None
    found, grad_sinks = _gradients(flat, z, sinks, bounds, (queries, keys), covered, rules)
    grads = [x.view(like.shape) for x, like in zip(found, (query, key, value), strict=True)]
    return grads[0], grads[1], grads[2], query.new_empty(0), grad_sinks


def varlen_attention_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    attention_chunk: int = 0,
    padded: bool = True,
    policy: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of `varlen_attention`; see `attnops.reference.packed.varlen_attention_backward`."""
    queries, keys = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    bounds = torch.stack([cu_seqlens_q[:-1], queries, cu_seqlens_k[:-1], torch.zeros_like(keys), keys, keys - queries])
    rules = Rules(scale, causal, window_left, window_right, softcap, attention_chunk)
    flat = [grad_output, query, key, value, output, lse]
    found, grad_sinks = _gradients(flat, grad_lse, sinks, bounds, (max_seqlen_q, max_seqlen_k), not padded, rules)
    return found[0], found[1], found[2], grad_sinks


def _gradients(
    flat: list[Tensor], grad_lse: Tensor | None, sinks: Tensor | None, bounds: Tensor, longest: tuple[int, int], covered: bool, rules: Rules
) -> tuple[list[Tensor], Tensor]:
    from attnops.kernels.triton.launch.gradient import Packed, gradients

    grad_output, query, key, value, output, lse = flat
    if not (query.numel() and key.numel() and value.numel() and bounds.shape[1] and min(longest) > 0):
        none = query.new_empty(0) if sinks is None else torch.zeros_like(sinks, memory_format=torch.contiguous_format)
        return [x.new_zeros(x.shape) for x in (query, key, value)], none
    grad_output, output = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_output, output))
    given = Packed(grad_output, grad_lse, query, key, value, output, lse, sinks, bounds.int(), longest, covered)
    *found, grad_sinks = gradients(given, rules)
    return [x for x in found if x is not None], query.new_empty(0) if grad_sinks is None else grad_sinks


def _cost_us(p: Problem) -> float:
    """Seven products where FlashAttention-2's backward makes five."""
    return 10.0 + 1.4 * BACKWARD(p)


for _op, _run in (("attention_backward", attention_backward), ("varlen_attention_backward", varlen_attention_backward)):
    register(
        Kernel(
            "triton",
            _op,
            _run,
            needs=(
                *ATTENTION,
                at_most("head_dim", 256),
                at_most("v_head_dim", 256),
                *without("mask", "mask_grad"),
            ),
            packages=(PACKAGE,),
            cost_us=_cost_us,
            invariant=Invariant(),
            about="attnops' own gradient",
        )
    )
