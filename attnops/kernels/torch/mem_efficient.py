"""`mem_efficient`: torch's memory-efficient attention (CUTLASS), called below autograd for the lse,
the gradient and that of a mask.

https://arxiv.org/abs/2112.05682, as torch has it from xFormers. Read from torch's attention.cu and
attention_backward.cu: tokens first, as many key heads as query heads; lse is natural, heads first,
of queries rounded up to 32, and has to be inf in the rows past the last. A bias has the query's
dtype, one row a query, and rows that start at multiples of 16 bytes. What a query that sees no key
gets is nowhere written down, so it is set here.

A causal mask without anything else is the kernel's own. Other rules are written into one bias with
the mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.core.kernel import Kernel, Need, arch_from, demand, one_of, register, without
from attnops.core.problem import Problem
from attnops.core.tensors import LEAST, Rules, compact, dense_visible, no_lse, without_faint
from attnops.kernels.shared.memory import PACK, in_packs
from attnops.kernels.shared.parts import FEW_HEADS, in_turns
from attnops.kernels.torch.aten_flash import TORCH_REPEATS, sum_groups, zero_gradients, zeros
from attnops.measured import Roofline
from attnops.ops.attention.reference import reduce_to

if TYPE_CHECKING:
    from attnops.ops.attention import record as dense

_ATEN = torch.ops.aten
INF = float("inf")
ALL_KEYS, BOTTOM_RIGHT = 0, 2
"""Torch's CustomMaskType."""
ROWS = 32
"""Queries that an lse is padded to a multiple of."""


@in_turns
def attention(call: dense.Attention) -> tuple[Tensor, Tensor]:
    query = call.query
    if query.numel() == 0 or call.key.numel() == 0:
        return zeros(call)
    bias = _bias(call)
    q, k, v = _given(call, bias)
    output, lse = _ATEN._efficient_attention_forward.default(
        q,
        k,
        v,
        _widened(bias, call),
        None,
        None,
        None,
        None,
        0.0,
        _own_causal(call),
        call.return_lse,
        scale=call.scale,
    )[:2]
    blind = None if bias is None else (bias == -INF).all(-1).transpose(1, 2)
    output = (
        output.to(query.dtype)
        if blind is None
        else output.to(query.dtype).masked_fill(blind[..., None], 0.0)
    )
    if not call.return_lse:
        return compact(output), no_lse(query)
    lse = lse[..., : query.shape[1]].transpose(1, 2)
    return compact(output), compact(lse if blind is None else lse.masked_fill(blind, -INF))


@in_turns
def attention_backward(
    call: dense.AttentionBackward,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, graded = call.query, call.mask if call.mask_grad else None
    none = query.new_empty(0)
    if query.numel() == 0 or call.key.numel() == 0:
        return (
            *zero_gradients(call),
            none if graded is None else graded.new_zeros(graded.shape),
            none.clone(),
        )
    bias = _bias(call)
    q, k, v = _given(call, bias)
    batch, queries, heads, _ = query.shape
    lse = torch.full((batch, heads, -(-queries // ROWS) * ROWS), INF, device=query.device)
    lse[..., :queries] = without_faint(call.lse).transpose(1, 2)
    seed = torch.empty((), dtype=torch.int64, device=query.device)  # read only where dropout is on
    grad_output, output = (x.to(q.dtype).contiguous() for x in (call.grad_output, call.output))
    grad_q, grad_k, grad_v, grad_bias = _ATEN._efficient_attention_backward.default(
        grad_output,
        q,
        k,
        v,
        _widened(bias, call),
        output,
        None,
        None,
        queries,
        call.key.shape[1],
        lse,
        0.0,
        seed,
        seed,
        _own_causal(call),
        graded is not None,
        scale=call.scale,
    )
    of_mask = none if graded is None else reduce_to(grad_bias.float(), graded)
    return (
        compact(grad_q.to(query.dtype)),
        sum_groups(grad_k, call.key),
        sum_groups(grad_v, call.value),
        of_mask,
        none.clone(),
    )


def _own_causal(call: dense.Attention | dense.AttentionBackward) -> int:
    return BOTTOM_RIGHT if call.causal and _bare(call) else ALL_KEYS


def _bare(call: dense.Attention | dense.AttentionBackward) -> bool:
    """Are there no rules, or the causal one alone, under which every query sees a key?"""
    others = (
        call.window_left >= 0
        or (call.window_right >= 0 and not call.causal)
        or call.attention_chunk > 0
    )
    return not (
        others or call.mask is not None or (call.causal and call.query.shape[1] > call.key.shape[1])
    )


def _bias(call: dense.Attention | dense.AttentionBackward) -> Tensor | None:
    """What is added to the logits, `[1 | B, 1 | Hq, S, K]`, with aligned rows."""
    if _bare(call):
        return None
    query, mask, queries, keys = call.query, call.mask, call.query.shape[1], call.key.shape[1]
    added = mask is not None and mask.dtype != torch.bool
    dtype = (
        torch.promote_types(query.dtype, mask.dtype) if mask is not None and added else query.dtype
    )
    dtype = (
        torch.float32 if dtype == torch.float64 else dtype
    )  # of a mask; torch's kernels take none
    see = dense_visible(query, call.key, None, None, Rules.of(call))
    requests = max(1 if x is None else x.shape[0] for x in (see, mask))
    unit = PACK // dtype.itemsize
    found = query.new_zeros(
        (requests, 1 if mask is None else mask.shape[1], queries, -(-keys // unit) * unit),
        dtype=dtype,
    )[..., :keys]
    if mask is not None:
        found = found.copy_(_finite(mask)) if added else found.masked_fill_(~mask, -INF)
    if see is not None:
        found.masked_fill_(~see[:, None], -INF)
    return found


def _finite(mask: Tensor) -> Tensor:
    """An additive mask whose finite numbers stay finite in base 2, in which the kernel adds
    them."""
    if mask.dtype == torch.float16:
        return mask  # whose least number is above LEAST
    return torch.where(mask == -INF, mask, mask.clamp(min=LEAST))


def _widened(bias: Tensor | None, call: dense.Attention | dense.AttentionBackward) -> Tensor | None:
    """The bias of every request and head, in the memory that it has."""
    batch, queries, heads, _ = call.query.shape
    return None if bias is None else bias.expand(batch, heads, queries, call.key.shape[1])


def _given(
    call: dense.Attention | dense.AttentionBackward, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of the bias's dtype, with a key head for each query head."""
    group, dtype = (
        call.query.shape[2] // call.key.shape[2],
        call.query.dtype if bias is None else bias.dtype,
    )
    key, value = (x.to(dtype) for x in (call.key, call.value))
    if group > 1:
        key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
    query, key, value = (in_packs(x) for x in (call.query.to(dtype), key, value))
    return query, key, value


# Not fitted. On an H200 both were slower than every other kernel of the same calls
# (training_regret.json).
FORWARD, BACKWARD = Roofline(80.0, 0.05, 0.08), Roofline(150.0, 0.05, 0.05)


def _cost_us(p: Problem) -> float:
    return (BACKWARD if p.results.grad else FORWARD)(p)


def _aligned(p: Problem) -> bool:
    return not any(d * p.dtype.itemsize % PACK for d in (p.head_dim, p.v_head_dim))


NEEDS: tuple[Need, ...] = (
    arch_from(80),
    demand("head_dim, v_head_dim", "rows of a multiple of 16 bytes", _aligned),
    one_of("last_dim_contiguous", True),
    FEW_HEADS,
)
RULES = frozenset({"mask", "causal", "window_left", "window_right", "attention_chunk"})
for _run, _takes, _needs, _repeats in (
    (attention, {"return_lse"}, (), ()),
    # Splits of the keys add to a query's gradient in the order in which they come.
    (attention_backward, {"mask_grad"}, without("lse_grad"), TORCH_REPEATS),
):
    register(
        Kernel(
            "mem_efficient",
            _run.__name__,
            _run,
            takes=RULES | _takes,
            dtypes=(torch.float16, torch.bfloat16, torch.float32),
            needs=(*NEEDS, *_needs),
            cost_us=_cost_us,
            repeats=_repeats,
            about="torch's memory-efficient attention, with lse and the gradient of a mask",
        )
    )
