"""`cudnn`: the attention of cuDNN as torch has it, called below autograd for the lse and the
gradient, which SDPA hides.

Read from torch's MHA.cpp and sdp_utils.cpp: tensors come heads first, of any strides, with fewer
key heads than query heads; lse is natural, `[B, H, S, 1]`; a causal mask is top-left aligned.
Packed requests reach cuDNN through torch from 2.15 on alone, so they are not taken. cuDNN builds a
plan for each shape at its first call, in about 0.1 s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.core.kernel import (
    Kernel,
    Need,
    arch_from,
    demand,
    extent_at_least,
    multiple_of,
    one_of,
    register,
    without,
)
from attnops.core.problem import Problem, Refusal, Target
from attnops.core.tensors import compact, no_lse, without_faint
from attnops.kernels.shared.memory import in_packs
from attnops.measured import Roofline

if TYPE_CHECKING:
    from attnops.ops.attention import record as dense

_ATEN = torch.ops.aten
OLDEST = 91000
"""The first cuDNN, 9.10, of which torch lets head dims up to 256 through on Hopper."""


def attention(call: dense.Attention) -> tuple[Tensor, Tensor]:
    query, key, value = (_heads_first(x) for x in (call.query, call.key, call.value))
    output, lse = _ATEN._scaled_dot_product_cudnn_attention.default(
        query, key, value, None, call.return_lse, 0.0, call.causal, False, scale=call.scale
    )[:2]
    batch, heads, queries, _ = query.shape
    return compact(output.transpose(1, 2)), (
        compact(lse.reshape(batch, heads, queries).transpose(1, 2))
        if call.return_lse
        else no_lse(call.query)
    )


def attention_backward(
    call: dense.AttentionBackward,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = (call.grad_output.to(call.query.dtype), call.query, call.key, call.value, call.output)
    lse, seed = (
        without_faint(call.lse.transpose(1, 2))[..., None],
        torch.empty((), dtype=torch.int64, device=call.query.device),
    )
    grads = _ATEN._scaled_dot_product_cudnn_attention_backward.default(
        *map(_heads_first, given),
        lse,
        seed,
        seed,
        None,
        None,
        None,
        call.query.shape[1],
        call.key.shape[1],
        0.0,
        call.causal,
        scale=call.scale,
    )
    grad_q, grad_k, grad_v = (compact(x.transpose(1, 2)) for x in grads)
    none = call.query.new_empty(0)
    return grad_q, grad_k, grad_v, none, none.clone()


def _heads_first(x: Tensor) -> Tensor:
    """`[B, S, H, D]` -> `[B, H, S, D]`, whose rows start at multiples of 16 bytes and are nowhere
    the same memory."""
    return (x.contiguous() if 0 in x.stride() else in_packs(x)).transpose(1, 2)


def _old(target: Target) -> Refusal | None:
    """A target other than the machine at hand has a cuDNN that is new enough, as torch from 2.9 on
    brings it."""
    if target.assume is not None:
        return None
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return (
        None
        if version is not None and version >= OLDEST
        else Refusal("cudnn", version, f">= {OLDEST}")
    )


def _cost_us(p: Problem) -> float:
    """Before Hopper it is behind FlashAttention-2 (huggingface/transformers#48163)."""
    new = p.target.arch >= 90
    if p.results.grad:
        return Roofline(16.5, 0.11, 0.22 if new else 0.12, 0.04)(p)
    return Roofline(20.0, 0.7, 0.6 if new else 0.35)(p)


def _wide(p: Problem) -> bool:
    return max(p.head_dim, p.v_head_dim) <= (256 if p.target.arch == 90 else 128)


NEEDS: tuple[Need, ...] = (
    arch_from(80),
    multiple_of("head_dim", 8),
    multiple_of("v_head_dim", 8),
    demand("head_dim, v_head_dim", "<= 128, or <= 256 on sm90", _wide),
    demand(
        "sizes_equal",
        "as many keys as queries where causal",
        lambda p: not p.rules.causal or p.step.sizes_equal,
    ),
    extent_at_least("batch", 1),
    extent_at_least("queries", 2),
    extent_at_least("context", 2),
    one_of("last_dim_contiguous", True),
)
for _run, _takes, _needs, _repeats in (
    (attention, {"causal", "return_lse"}, (), ()),
    # Blocks of keys add to a query's gradient in the order in which they come, whatever torch is
    # asked for.
    (attention_backward, {"causal"}, without("lse_grad"), None),
):
    register(
        Kernel(
            "cudnn",
            _run.__name__,
            _run,
            takes=frozenset(_takes),
            dtypes=(torch.float16, torch.bfloat16),
            needs=(*NEEDS, *_needs),
            probe=_old,
            cost_us=_cost_us,
            repeats=_repeats,
            about="torch's own cuDNN attention, with lse and gradient",
        )
    )
