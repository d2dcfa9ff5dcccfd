"""`aten_flash`: the FlashAttention inside torch, called below autograd, for what SDPA's public function hides: lse and the gradient.

CPU: dense calls with any mask, float32, float64 and half types; heads are repeated for grouped queries.
CUDA: FlashAttention-2 (https://arxiv.org/abs/2307.08691) for dense and packed calls, half types, windows, no mask; see `aten_flash_cuda`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.kernel import Invariant, Kernel, Need, deterministic, device, dtypes, register, without
from attnops.kernels.torch import aten_flash_cuda as cuda
from attnops.measured import Roofline
from attnops.problem import Problem, Refusal
from attnops.reference.attention import Rules, compact, dense_visible, no_lse, wide

_ATEN = torch.ops.aten


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_start: Tensor | None = None,
    kv_end: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_lse: bool = False,
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.attention`."""
    if query.numel() == 0 or key.numel() == 0:
        lse = query.new_full(query.shape[:3] if return_lse else (0,), float("-inf"), dtype=torch.float32)
        return query.new_zeros((*query.shape[:3], value.shape[3])), lse
    if not on_cpu(query):
        forward = cuda.row_by_row if deterministic(policy) else cuda.forward
        output, lse = forward(query, key, value, (scale, causal, window_left, window_right))
        return output, cuda.tokens_first(lse) if return_lse else no_lse(query)
    q, k, v = _heads_first(query, key, value)
    top_left, bias = _bias(query, key, mask, Rules(scale, causal, window_left, window_right, softcap))
    output, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, top_left, attn_mask=bias, scale=scale)
    lse = compact(lse.transpose(1, 2).float()) if return_lse else query.new_empty(0, dtype=torch.float32)
    return compact(output.transpose(1, 2)), lse


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
    mask_grad: bool = False,
    policy: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradient of `attention`; see `attnops.reference.attention.attention_backward`."""
    none = query.new_empty(0)
    if query.numel() == 0 or key.numel() == 0:
        return query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape), none, none.clone()
    if not on_cpu(query):
        found = cuda.backward(grad_output, query, key, value, output, lse, (scale, causal, window_left, window_right))
        return *found, none, none.clone()
    q, k, v = _heads_first(query, key, value)
    g, o, z = grad_output.transpose(1, 2), output.transpose(1, 2), lse.transpose(1, 2).contiguous()
    top_left, bias = _bias(query, key, mask, Rules(scale, causal, window_left, window_right, softcap))
    z = z.to(torch.float64) if query.dtype == torch.float64 else z
    grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        g.contiguous(), q, k, v, o, z, 0.0, top_left, attn_mask=bias, scale=scale
    )
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
    return compact(grad_q), _sum_groups(grad_k, key), _sum_groups(grad_v, value), none, none.clone()


def on_cpu(x: Tensor) -> bool:
    """Which of torch's two kernels takes it?"""
    return x.device.type == "cpu"


def _heads_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    group = query.shape[2] // key.shape[2]
    # The CPU kernel takes the value's last stride for 1 without looking.
    q, k, v = (x.transpose(1, 2) if x.stride(-1) == 1 else x.contiguous().transpose(1, 2) for x in (query, key, value))
    return (q, k, v) if group == 1 else (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


def _sum_groups(grad: Tensor, like: Tensor) -> Tensor:
    """`[B, K, Hq, D]` -> `[B, K, Hkv, D]`: the repeated heads' gradients belong to one head."""
    b, n, hkv, d = like.shape
    if grad.shape[2] == hkv:
        return compact(grad)
    return compact(wide(grad.reshape(b, n, hkv, -1, d)).sum(3).to(like.dtype))


def _bias(query: Tensor, key: Tensor, mask: Tensor | None, rules: Rules) -> tuple[bool, Tensor | None]:
    """(use the kernel's own top-left causal mask, additive `[B or 1, Hq or 1, S, K]` bias)."""
    square = query.shape[1] == key.shape[1]
    plain = rules.left < 0 and (rules.right < 0 or rules.causal)
    if mask is None and plain and (not rules.causal or square):
        return rules.causal, None
    see = dense_visible(query, key, None, None, rules)
    bias = query.new_zeros((1, 1, query.shape[1], key.shape[1]))
    if see is not None:
        bias = bias.masked_fill(~see[:, None], float("-inf"))
    if mask is not None:
        bias = bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask.to(bias.dtype)
    return False, bias


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_lse: bool = False,
    padded: bool = True,
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.varlen_attention`."""
    if not (query.numel() and key.numel() and max_seqlen_q and max_seqlen_k and cu_seqlens_q.shape[0] > 1):
        lse = query.new_full(query.shape[:2] if return_lse else (0,), float("-inf"), dtype=torch.float32)
        return query.new_zeros((*query.shape[:2], value.shape[2])), lse
    rules = (scale, causal, window_left, window_right)
    longest = (max_seqlen_q, cuda.keys_of(max_seqlen_k, rules) if deterministic(policy) else max_seqlen_k)
    output, raw = cuda.forward(query, key, value, rules, (cu_seqlens_q, cu_seqlens_k), longest)
    lse = cuda.tokens_first(raw) if return_lse else no_lse(query)
    if padded:
        cuda.clear((cu_seqlens_q, output, 0.0), *([(cu_seqlens_q, lse, -cuda.INF)] if return_lse else []))
    return output, lse


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
    padded: bool = True,
    policy: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of `varlen_attention`; see `attnops.reference.packed.varlen_attention_backward`."""
    none = query.new_empty(0)
    if not (query.numel() and key.numel() and max_seqlen_q and max_seqlen_k and cu_seqlens_q.shape[0] > 1):
        return query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape), none
    rules, cu, longest = (scale, causal, window_left, window_right), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    grad_q, grad_k, grad_v = cuda.backward(grad_output, query, key, value, output, lse, rules, cu, longest)
    if padded:
        cuda.clear((cu_seqlens_q, grad_q, 0.0), (cu_seqlens_k, grad_k, 0.0), (cu_seqlens_k, grad_v, 0.0))
    return grad_q, grad_k, grad_v, none


ON_CPU = Roofline(25.0, 0.7, 0.55)


def _cost_us(p: Problem) -> float:
    return cuda.cost_us(p) if p.target.device == "cuda" else ON_CPU(p)


def _one_head_dim(p: Problem) -> Refusal | None:
    return None if p.v_head_dim == p.head_dim else Refusal("v_head_dim", p.v_head_dim, f"{p.head_dim}, the query's")


def _all_rows_see(p: Problem) -> Refusal | None:
    # On a CPU a row that sees nothing comes back with lse 0, not -inf; without a mask and with as many keys as queries there is none.
    if p.target.device != "cpu":
        return None
    if p.mask != "none" or (p.window[1] >= 0 and not p.causal):
        return Refusal("mask", p.mask if p.mask != "none" else f"window {p.window}", "none (a query might see no key)")
    if (p.causal or p.windowed) and not p.sizes_equal and p.queries.hi != 1:
        return Refusal("sizes_equal", p.sizes_equal, "as many keys as queries (a query might see no key)")
    return None


HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)
WITHOUT: tuple[Need, ...] = (*without("softcap", "sinks", "kv_scales", "kv_range", "mask_grad", "lse_grad"), _one_head_dim)
NEEDS: tuple[Need, ...] = (*WITHOUT, _all_rows_see, cuda.limits)
PACKED_NEEDS: tuple[Need, ...] = (device("cuda"), dtypes(*HALF_AND_SINGLE), *WITHOUT, cuda.limits)
ABOUT = "torch's own FlashAttention, with lse and gradient"
FORWARD_NEEDS = (dtypes(*HALF_AND_SINGLE, torch.float64), *NEEDS)
# The saved lse is float32, too coarse for a float64 gradient.
BACKWARD_NEEDS = (dtypes(*HALF_AND_SINGLE), *NEEDS)
for _op, _run, _needs in (
    ("attention", attention, FORWARD_NEEDS),
    ("attention_backward", attention_backward, BACKWARD_NEEDS),
    ("varlen_attention", varlen_attention, PACKED_NEEDS),
    ("varlen_attention_backward", varlen_attention_backward, PACKED_NEEDS),
):
    # Gradients of the query are added up in the order in which blocks come.
    _alone = not _op.endswith("backward")
    register(
        Kernel(
            "aten_flash", _op, _run, needs=_needs, cost_us=_cost_us, invariant=Invariant((cuda.steady,)) if _alone else None, about=ABOUT
        )
    )
