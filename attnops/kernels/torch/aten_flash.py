"""`aten_flash`: the FlashAttention inside torch, called below autograd for the lse and the gradient, which SDPA's public function hides.

CPU: dense calls with any mask, float32, float64 and half types; heads are repeated for grouped queries.
CUDA: FlashAttention-2 (https://arxiv.org/abs/2307.08691) for dense and packed calls, half types, windows, no mask; see `aten_flash_cuda`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.kernel import Invariant, Kernel, Need, demand, device, register, without
from attnops.kernels.torch import aten_flash_cuda as cuda
from attnops.measured import Roofline
from attnops.problem import Problem
from attnops.reference.attention import Rules, compact, dense_visible, no_lse, wide

if TYPE_CHECKING:
    from attnops.ops.dense import Attention, AttentionBackward
    from attnops.ops.varlen import VarlenAttention, VarlenAttentionBackward

_ATEN = torch.ops.aten


def attention(call: Attention) -> tuple[Tensor, Tensor]:
    """See `attnops.attention`."""
    if call.query.numel() == 0 or call.key.numel() == 0:
        return _zeros(call)
    if not on_cpu(call.query):
        return cuda.attention(call)
    q, k, v = _heads_first(call)
    top_left, bias = _bias(call)
    output, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, top_left, attn_mask=bias, scale=call.scale)
    lse = compact(lse.transpose(1, 2).float()) if call.return_lse else no_lse(call.query)
    return compact(output.transpose(1, 2)), lse


def attention_backward(call: AttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradient of `attention`; see `attnops.reference.attention.attention_backward`."""
    none = call.query.new_empty(0)
    if call.query.numel() == 0 or call.key.numel() == 0:
        return *_zero_gradients(call), none, none.clone()
    if not on_cpu(call.query):
        return *cuda.backward(call, cuda.dense(call)), none, none.clone()
    q, k, v = _heads_first(call)
    g, o, z = call.grad_output.transpose(1, 2), call.output.transpose(1, 2), call.lse.transpose(1, 2).contiguous()
    top_left, bias = _bias(call)
    z = z.to(torch.float64) if call.query.dtype == torch.float64 else z
    grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        g.contiguous(), q, k, v, o, z, 0.0, top_left, attn_mask=bias, scale=call.scale
    )
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
    return compact(grad_q), _sum_groups(grad_k, call.key), _sum_groups(grad_v, call.value), none, none.clone()


def varlen_attention(call: VarlenAttention) -> tuple[Tensor, Tensor]:
    """See `attnops.varlen_attention`."""
    if _empty(call):
        return _zeros(call)
    output, lse = cuda.forward(call, cuda.varlen(call))
    if call.padded:
        cu_seqlens = call.cu_seqlens_q
        cuda.clear((cu_seqlens, output, 0.0), *([(cu_seqlens, lse, -cuda.INF)] if call.return_lse else []))
    return output, lse


def varlen_attention_backward(call: VarlenAttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of `varlen_attention`; see `attnops.reference.packed.varlen_attention_backward`."""
    if _empty(call):
        return *_zero_gradients(call), call.query.new_empty(0)
    grad_q, grad_k, grad_v = cuda.backward(call, cuda.varlen(call))
    if call.padded:
        cuda.clear((call.cu_seqlens_q, grad_q, 0.0), (call.cu_seqlens_k, grad_k, 0.0), (call.cu_seqlens_k, grad_v, 0.0))
    return grad_q, grad_k, grad_v, call.query.new_empty(0)


def on_cpu(x: Tensor) -> bool:
    """Does torch's CPU kernel take the tensor, and not the CUDA kernel?"""
    return x.device.type == "cpu"


def _empty(call: VarlenAttention | VarlenAttentionBackward) -> bool:
    lengths = call.max_seqlen_q and call.max_seqlen_k and call.cu_seqlens_q.shape[0] > 1
    return not (call.query.numel() and call.key.numel() and lengths)


def _zeros(call: Attention | VarlenAttention) -> tuple[Tensor, Tensor]:
    """The results where no query sees a key."""
    rows = call.query.shape[:-1]
    lse = call.query.new_full(rows if call.return_lse else (0,), float("-inf"), dtype=torch.float32)
    return call.query.new_zeros((*rows, call.value.shape[-1])), lse


def _zero_gradients(call: AttentionBackward | VarlenAttentionBackward) -> tuple[Tensor, Tensor, Tensor]:
    return call.query.new_zeros(call.query.shape), call.key.new_zeros(call.key.shape), call.value.new_zeros(call.value.shape)


def _heads_first(call: Attention | AttentionBackward) -> tuple[Tensor, Tensor, Tensor]:
    group = call.query.shape[2] // call.key.shape[2]
    # The CPU kernel takes the value's last stride for 1 without looking.
    q, k, v = (x.transpose(1, 2) if x.stride(-1) == 1 else x.contiguous().transpose(1, 2) for x in (call.query, call.key, call.value))
    return (q, k, v) if group == 1 else (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


def _sum_groups(grad: Tensor, like: Tensor) -> Tensor:
    """`[B, K, Hq, D]` -> `[B, K, Hkv, D]`: the gradients of repeated heads belong to one head."""
    b, n, hkv, d = like.shape
    if grad.shape[2] == hkv:
        return compact(grad)
    return compact(wide(grad.reshape(b, n, hkv, -1, d)).sum(3).to(like.dtype))


def _bias(call: Attention | AttentionBackward) -> tuple[bool, Tensor | None]:
    """(use the kernel's own top-left causal mask, additive `[B or 1, Hq or 1, S, K]` bias)."""
    query, key, mask = call.query, call.key, call.mask
    bounded = call.window_left >= 0 or (call.window_right >= 0 and not call.causal)
    if mask is None and not bounded and (not call.causal or query.shape[1] == key.shape[1]):
        return call.causal, None
    see = dense_visible(query, key, None, None, Rules.of(call))
    bias = query.new_zeros((1, 1, query.shape[1], key.shape[1]))
    if see is not None:
        bias = bias.masked_fill(~see[:, None], float("-inf"))
    if mask is not None:
        bias = bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask.to(bias.dtype)
    return False, bias


ON_CPU = Roofline(25.0, 0.7, 0.55)


def _cost_us(p: Problem) -> float:
    return cuda.cost_us(p) if p.target.device == "cuda" else ON_CPU(p)


HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)
RULES = frozenset({"causal", "window_left", "window_right"})
ONE_DIM = demand("v_head_dim", "{p.head_dim}, the query's", lambda p: p.v_head_dim == p.head_dim)
# On a CPU a row that sees no key comes back with lse 0, not -inf; without a mask and with as many keys as queries there is none.
ALL_SEE = (
    demand("mask", "none (a query might see no key)", lambda p: p.mask == "none", on="cpu"),
    demand("window", "no right bound (a query might see no key)", lambda p: p.causal or p.window[1] < 0, on="cpu"),
    demand(
        "sizes_equal",
        "as many keys as queries (a query might see no key)",
        lambda p: p.sizes_equal or p.queries.hi == 1 or not (p.causal or p.windowed),
        on="cpu",
    ),
)
DENSE: tuple[Need, ...] = (ONE_DIM, *ALL_SEE, *cuda.LIMITS)
PACKED: tuple[Need, ...] = (device("cuda"), ONE_DIM, *cuda.LIMITS)
for _op, _run, _takes, _dtypes, _needs in (
    ("attention", attention, {"mask", "return_lse"}, (*HALF_AND_SINGLE, torch.float64), DENSE),
    # The saved lse is float32, too coarse for a float64 gradient.
    ("attention_backward", attention_backward, {"mask"}, HALF_AND_SINGLE, (*DENSE, *without("lse_grad"))),
    ("varlen_attention", varlen_attention, {"return_lse"}, HALF_AND_SINGLE, PACKED),
    ("varlen_attention_backward", varlen_attention_backward, (), HALF_AND_SINGLE, (*PACKED, *without("lse_grad"))),
):
    register(
        Kernel(
            "aten_flash",
            _op,
            _run,
            takes=RULES.union(_takes),
            dtypes=_dtypes,
            needs=_needs,
            cost_us=_cost_us,
            # Gradients of the query are added up in the order in which blocks come.
            invariant=None if _op.endswith("backward") else Invariant(cuda.STEADY),
            about="torch's own FlashAttention, with lse and gradient",
        )
    )
