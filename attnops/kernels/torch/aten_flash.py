"""`aten_flash`: the FlashAttention inside torch, called below autograd for the lse and the
gradient, which SDPA's public function hides.

CPU: dense calls with any mask, float32, float64 and half types; heads are repeated for grouped
queries.

CUDA: FlashAttention-2 (https://arxiv.org/abs/2307.08691) for dense and packed calls, half types,
windows, no mask, by torch's `_flash_attention_forward` and `_flash_attention_backward`. Both take
tokens first, strided, and fewer key heads than query heads; causal and windows are bottom-right
aligned. Read from torch's flash_api.cpp: lse comes heads first, natural, +inf for a query that sees
no key; rows of no request are not written.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.core.kernel import Invariant, Kernel, demand, deterministic, device, register, without
from attnops.core.problem import Problem
from attnops.core.record import changed
from attnops.core.tensors import Rules, compact, dense_visible, no_lse, without_faint
from attnops.kernels.shared import parts
from attnops.kernels.shared.memory import in_packs
from attnops.kernels.shared.parts import in_turns, packed_in_turns
from attnops.kernels.shared.tokens import clear, runs
from attnops.measured import Roofline

if TYPE_CHECKING:
    from attnops.ops.attention import record as dense, varlen

_ATEN = torch.ops.aten
INF = float("inf")


def _indexed(call: dense.AttentionBackward) -> int:
    """Requests of one launch: its sums of the query's gradient, of padded rows, have offsets of 32
    bits."""
    _, queries, heads, dims = call.query.shape
    unit = 32 if dims <= 128 else 64
    numbers = -(-queries // 128) * 128 * heads * -(-dims // unit) * unit
    return max(1, min(parts.MOST_REQUESTS, 2**31 // max(numbers, 1)))


@in_turns
def attention(call: dense.Attention) -> tuple[Tensor, Tensor]:
    """On CUDA a deterministic call goes as packed requests, whose keys are never split; the splits
    of a dense call follow from its rows."""
    query, key = call.query, call.key
    if query.numel() == 0 or key.numel() == 0:
        return zeros(call)
    if on_cpu(query):
        q, k, v = _heads_first(call)
        top_left, bias = _bias(call)
        output, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, top_left, attn_mask=bias, scale=call.scale
        )
        return compact(output.transpose(1, 2)), compact(
            lse.transpose(1, 2).float()
        ) if call.return_lse else no_lse(query)
    if not deterministic(call.policy):
        return forward(call, _lengths(call))
    at = torch.arange(query.shape[0] + 1, device=query.device, dtype=torch.int32)
    lengths = _packed(call, at * query.shape[1], at * key.shape[1], query.shape[1], key.shape[1])
    output, lse = forward(
        changed(
            call, query=query.flatten(0, 1), key=key.flatten(0, 1), value=call.value.flatten(0, 1)
        ),
        lengths,
    )
    return output.view(*query.shape[:3], -1), lse.view(query.shape[:3]) if call.return_lse else lse


@functools.partial(in_turns, most=_indexed)
def attention_backward(
    call: dense.AttentionBackward,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    none = call.query.new_empty(0)
    if call.query.numel() == 0 or call.key.numel() == 0:
        return *zero_gradients(call), none, none.clone()
    if not on_cpu(call.query):
        return *backward(call, _lengths(call)), none, none.clone()
    q, k, v = _heads_first(call)
    g, o, z = (
        call.grad_output.transpose(1, 2),
        call.output.transpose(1, 2),
        without_faint(call.lse.transpose(1, 2)),
    )
    top_left, bias = _bias(call)
    z = z.to(torch.float64) if call.query.dtype == torch.float64 else z
    grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        g.contiguous(), q, k, v, o, z, 0.0, top_left, attn_mask=bias, scale=call.scale
    )
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
    return (
        compact(grad_q),
        sum_groups(grad_k, call.key),
        sum_groups(grad_v, call.value),
        none,
        none.clone(),
    )


@packed_in_turns
def varlen_attention(call: varlen.VarlenAttention) -> tuple[Tensor, Tensor]:
    if not runs(call):
        return zeros(call)
    output, lse = forward(call, _lengths(call))
    if call.padded:
        clear(
            (call.cu_seqlens_q, output, 0.0),
            *([(call.cu_seqlens_q, lse, -INF)] if call.return_lse else []),
        )
    return output, lse


@packed_in_turns
def varlen_attention_backward(
    call: varlen.VarlenAttentionBackward,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not runs(call):
        return *zero_gradients(call), call.query.new_empty(0)
    grad_q, grad_k, grad_v = backward(call, _lengths(call))
    if call.padded:
        clear(
            (call.cu_seqlens_q, grad_q, 0.0),
            (call.cu_seqlens_k, grad_k, 0.0),
            (call.cu_seqlens_k, grad_v, 0.0),
        )
    return grad_q, grad_k, grad_v, call.query.new_empty(0)


def on_cpu(x: Tensor) -> bool:
    """Does torch's CPU kernel take the tensor, and not the CUDA kernel?"""
    return x.device.type == "cpu"


def zeros(call: dense.Attention | varlen.VarlenAttention) -> tuple[Tensor, Tensor]:
    """The results where no query sees a key."""
    rows = call.query.shape[:-1]
    lse = call.query.new_full(rows if call.return_lse else (0,), -INF, dtype=torch.float32)
    return call.query.new_zeros((*rows, call.value.shape[-1])), lse


def zero_gradients(
    call: dense.AttentionBackward | varlen.VarlenAttentionBackward,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value where no query sees a key."""
    return (
        call.query.new_zeros(call.query.shape),
        call.key.new_zeros(call.key.shape),
        call.value.new_zeros(call.value.shape),
    )


# On a CPU -----------------------------------------------------------------------------------------


def _heads_first(call: dense.Attention | dense.AttentionBackward) -> tuple[Tensor, Tensor, Tensor]:
    group = call.query.shape[2] // call.key.shape[2]
    # The CPU kernel takes the value's last stride for 1 without looking.
    q, k, v = (
        x.transpose(1, 2) if x.stride(-1) == 1 else x.contiguous().transpose(1, 2)
        for x in (call.query, call.key, call.value)
    )
    return (
        (q, k, v)
        if group == 1
        else (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )


def sum_groups(grad: Tensor, like: Tensor) -> Tensor:
    """`[B, K, Hq, D]` -> `[B, K, Hkv, D]`: the gradients of repeated heads belong to one head."""
    if grad.shape[2] != like.shape[2]:
        grad = grad.unflatten(2, (like.shape[2], -1)).sum(
            3, dtype=torch.promote_types(grad.dtype, torch.float32)
        )
    return compact(grad.to(like.dtype))


def _bias(call: dense.Attention | dense.AttentionBackward) -> tuple[bool, Tensor | None]:
    """(use the kernel's own top-left causal mask, additive `[B or 1, Hq or 1, S, K]` bias)."""
    query, key, mask = call.query, call.key, call.mask
    bounded = call.window_left >= 0 or (call.window_right >= 0 and not call.causal)
    if mask is None and not bounded and (not call.causal or query.shape[1] == key.shape[1]):
        return call.causal, None
    see = dense_visible(query, key, None, None, Rules.of(call))
    bias = query.new_zeros((1, 1, query.shape[1], key.shape[1]))
    if see is not None:
        bias = bias.masked_fill(~see[:, None], -INF)
    if mask is not None:
        bias = (
            bias.masked_fill(~mask, -INF)
            if mask.dtype == torch.bool
            else bias + mask.to(bias.dtype)
        )
    return False, bias


# On CUDA ------------------------------------------------------------------------------------------


Lengths = tuple[Tensor | None, Tensor | None, int, int, int]
"""The lengths of a call as aten takes them: cumulative lengths of queries and of keys (None for a
dense call), queries and keys of the longest request, and the window's right side."""


def _lengths(call: Any) -> Lengths:
    if hasattr(call, "cu_seqlens_q"):
        return _packed(
            call, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k
        )
    return None, None, call.query.shape[1], call.key.shape[1], call.window_right


def _packed(
    call: dense.Attention | varlen.VarlenAttention | varlen.VarlenAttentionBackward,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
) -> Lengths:
    left, right = call.window_left, call.window_right
    if deterministic(call.policy):
        max_k = max(
            max_k, left + 2
        )  # the kernel drops a window that reaches past all keys, and then has other tiles
    if right >= 0 and not call.causal:
        # aten drops a window as wide as the longest request, although it still hides keys from a
        # query before the first key.
        right = -1 if right >= max_q + max_k else right
        max_k = max(max_k, right + 1)
    if left >= 0 and right < 0 and not call.causal:
        # aten takes an open right side for a window of the longest request's keys, which ends early
        # for a query before the first key.
        max_k += max_q
    # With one query a request aten counts requests instead of tokens, and some requests may have no
    # token.
    return cu_q.contiguous(), cu_k.contiguous(), max(max_q, 2), max_k, right


def forward(
    call: dense.Attention | varlen.VarlenAttention, lengths: Lengths
) -> tuple[Tensor, Tensor]:
    """(output, lse), contiguous."""
    q, k, v = in_packs(call.query), in_packs(call.key), in_packs(call.value)
    output, lse = _ATEN._flash_attention_forward.default(
        q,
        k,
        v,
        *lengths[:4],
        0.0,
        call.causal,
        False,
        scale=call.scale,
        window_size_left=call.window_left,
        window_size_right=lengths[4],
    )[:2]
    return _plain(output), _turned(lse) if call.return_lse else no_lse(call.query)


def backward(
    call: dense.AttentionBackward | varlen.VarlenAttentionBackward, lengths: Lengths
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, contiguous."""
    given = (call.grad_output.to(call.query.dtype), call.query, call.key, call.value, call.output)
    seed = torch.empty(
        2, dtype=torch.uint64, device=call.query.device
    )  # read only where dropout is on
    grad_q, grad_k, grad_v = _ATEN._flash_attention_backward.default(
        *map(in_packs, given),
        without_faint(call.lse.transpose(-1, -2)),
        *lengths[:4],
        0.0,
        call.causal,
        seed,
        seed,
        scale=call.scale,
        window_size_left=call.window_left,
        window_size_right=lengths[4],
    )
    return _plain(grad_q), _plain(grad_k), _plain(grad_v)


def _plain(x: Tensor) -> Tensor:
    """`compact`, at less cost for a tensor that is so already."""
    return x if x.is_contiguous() and min(x.shape) > 1 else compact(x)


def _turned(lse: Tensor) -> Tensor:
    """`[..., Hq, S]` of the kernel as `[..., S, Hq]`, contiguous, -inf for a query without keys."""
    turned = lse.transpose(-1, -2)
    return torch.nan_to_num(
        turned, nan=float("nan"), posinf=-INF, neginf=-INF, out=lse.new_empty(turned.shape)
    )


ON_CPU = Roofline(25.0, 0.7, 0.55)
FORWARD, BACKWARD = Roofline(15.0, 0.7, 0.43), Roofline(13.6, 0.067, 0.13, 0.055, 4700)


def _cost_us(p: Problem) -> float:
    """With a pass that clears padding rows."""
    if p.target.device != "cuda":
        return ON_CPU(p)
    return (BACKWARD if p.results.grad else FORWARD)(p) + 5.0 * (
        p.step.padded and p.op.startswith("varlen")
    )


def _lined_up(p: Problem) -> bool:
    """Is no window counted before the first key?"""
    fewer = p.sizes.queries.hi is not None and p.sizes.queries.hi <= p.sizes.context.lo
    return (
        p.op.startswith("varlen")
        or p.rules.window == (-1, -1)
        or p.rules.causal
        or p.step.sizes_equal
        or fewer
    )


HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)
RULES = frozenset({"causal", "window_left", "window_right"})
LIMITS = (
    demand("v_head_dim", "{p.head_dim}, the query's", lambda p: p.v_head_dim == p.head_dim),
    demand("target", ">= sm80", lambda p: p.target.arch >= 80, on="cuda"),
    demand(
        "dtype",
        "float16 | bfloat16 (CUDA)",
        lambda p: p.dtype in (torch.float16, torch.bfloat16),
        on="cuda",
    ),
    demand(
        "head_dim",
        "a multiple of 8, <= 256 (CUDA)",
        lambda p: p.head_dim % 8 == 0 and p.head_dim <= 256,
        on="cuda",
    ),
    demand("mask", "none (CUDA)", lambda p: p.rules.mask == "none", on="cuda"),
    parts.FEW_HEADS,
    demand("window", "no window with more queries than keys (CUDA)", _lined_up, on="cuda"),
)
# Torch's ops of the same name for AMD GPUs have other limits, which are not written down here.
TRIED = device("cpu", "cuda")
# On a CPU a row that sees no key comes back with lse 0, not -inf; without a mask and with as many
# keys as queries there is none.
ALL_SEE = (
    demand("mask", "none (a query might see no key)", lambda p: p.rules.mask == "none", on="cpu"),
    demand(
        "window",
        "no right bound (a query might see no key)",
        lambda p: p.rules.causal or p.rules.window[1] < 0,
        on="cpu",
    ),
    demand(
        "sizes_equal",
        "as many keys as queries (a query might see no key)",
        lambda p: (
            p.step.sizes_equal
            or p.sizes.queries.hi == 1
            or not (p.rules.causal or p.rules.windowed)
        ),
        on="cpu",
    ),
)
# Under a deterministic policy tiles do not follow from the longest request.
_causal = demand(
    "window",
    "none, or causal (policy.deterministic)",
    lambda p: p.rules.causal or not p.rules.windowed,
)
STEADY = Invariant((device("cuda"), _causal))
_without_warn_only = demand(
    "repeatable",
    "must (with warn_only=True torch's own kernels take no turns)",
    lambda p: p.step.repeatable == "must",
    on="cuda",
)
TORCH_REPEATS = (_without_warn_only,)
"""Of torch's own gradients: their kernels ask for the flag when they are called."""
for _run, _takes, _dtypes, _needs in (
    (attention, {"mask", "return_lse"}, (*HALF_AND_SINGLE, torch.float64), (TRIED, *ALL_SEE)),
    # The saved lse is float32, too coarse for a float64 gradient.
    (attention_backward, {"mask"}, HALF_AND_SINGLE, (TRIED, *ALL_SEE, *without("lse_grad"))),
    (varlen_attention, {"return_lse"}, HALF_AND_SINGLE, (device("cuda"),)),
    (
        varlen_attention_backward,
        set[str](),
        HALF_AND_SINGLE,
        (device("cuda"), *without("lse_grad")),
    ),
):
    register(
        Kernel(
            "aten_flash",
            _run.__name__,
            _run,
            takes=RULES | _takes,
            dtypes=_dtypes,
            needs=(*LIMITS, *_needs),
            cost_us=_cost_us,
            # Gradients of the query are added up in the order in which blocks come.
            invariant=None if _run.__name__.endswith("backward") else STEADY,
            repeats=TORCH_REPEATS if _run.__name__.endswith("backward") else (),
            about="torch's own FlashAttention, with lse and gradient",
        )
    )
