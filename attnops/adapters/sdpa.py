"""`scaled_dot_product_attention` of torch by attnops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.adapters.callers import TORCHS
from attnops.core.checks import is_foreign
from attnops.core.errors import InvalidInput, fail
from attnops.core.kernel import check_kernel
from attnops.core.tensors import surely
from attnops.core.tracers import is_recorded
from attnops.ops import attention
from attnops.ops.attention.bias import is_bias

_HALVES = (torch.float16, torch.bfloat16)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: str | None = None,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention through `attnops.attention`.

    Same arguments, same result. Calls that `attnops.attention` does not take are torch's own:
    dropout above 0, nested and distributed tensors, tensors of a class with a
    `__torch_function__` of its own, the device meta, sizes or dtypes that differ, a mask beside
    other than four dims, a scale that is a tensor, calls that torch.jit.trace, torch.fx or
    torch.onnx records, and those that torch refuses. A query that may see no key gives 0.

    Args:
        query: `[B, Hq, S, D]`. Without a mask B may be several dims, or none.
        key, value: `[B, Hkv, K, D]`, `[B, Hkv, K, Dv]`. Hkv is Hq, or with enable_gqa a divisor.
        attn_mask: bool (True: visible) or float (added to the logits), broadcast to
            `[B, Hq, S, K]`; or a causal bias of torch.nn.attention.bias.
        is_causal: query i sees keys 0 to i, whatever S and K are. Not beside attn_mask.
        scale: factor on q.k; default `1 / sqrt(D)`.
        kernel: force a kernel by name, but for calls with dropout.

    Returns:
        `[B, Hq, S, Dv]`, laid out in memory as torch's own result: with heads or tokens first, as
        in the query. On CUDA beside a mask, in float32 and in float64 tokens come first (torch's
        memory-efficient kernel). On a CPU heads come first where Dv is not D or the mask requires
        grad (torch's plain one).

    Raises:
        UnknownKernel, NoKernel: `kernel` cannot run.
        InvalidInput: `kernel`, for a call that is torch's.
        RuntimeError, ValueError: torch's.
    """
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if dropout_p != 0.0 or is_recorded(query):
        return TORCHS(query, key, value, attn_mask, dropout_p, is_causal, **options)
    mask, causal = attn_mask, is_causal
    why = _why_torchs(query, key, value, mask, causal, scale)
    if not why and is_bias(mask):
        mask, causal, why = _rule(mask, query, key)
    if not why:
        q, k, v = _autocast(query, key, value)
        if mask is None and _is_joined(q, k, v):
            q4, k4, v4 = map(_four_dims, (q, k, v))
            joined = _attend(q4, k4, v4, None, causal, scale, kernel)
            return joined.contiguous().reshape(*q.shape[:-1], v.shape[-1])
        why = _why_refused(q, k, v, mask, enable_gqa)
        if not why:
            return _attend(q, k, v, mask, causal, scale, kernel)
    if kernel is not None:
        check_kernel(kernel, ("attention",))
        want = f"None: attnops.attention does not take {why}"
        fail(InvalidInput, "kernel", repr(kernel), want)
    return TORCHS(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _why_torchs(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: Any
) -> str:
    """What makes a call torch's own, whatever its sizes and dtypes are; "": nothing."""
    for x in (query, key, value) if mask is None else (query, key, value, mask):
        if not isinstance(x, Tensor):
            return f"a {type(x).__name__}"
        if is_bias(x):
            continue
        if is_foreign(type(x)):
            return f"a {type(x).__name__}, which has a __torch_function__ of its own"
        if x.is_nested:
            return "a nested tensor"
        if hasattr(x, "placements"):
            return "a distributed tensor: DTensor knows no sharding of this op"
    if query.is_meta:
        return "the device meta"
    if isinstance(scale, Tensor):
        return "a scale that is a tensor"
    return "is_causal beside attn_mask" if is_causal and mask is not None else ""


def _rule(bias: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool, str]:
    """(mask, is_causal, "") of a causal bias, or what makes the call torch's own."""
    # torch looks at the sizes of a bias only where it is lower right and they differ.
    if bias.variant.name == "UPPER_LEFT" or bias.seq_len_q == bias.seq_len_kv:
        return None, True, ""
    fits = (bias.seq_len_q, bias.seq_len_kv) == (query.shape[-2], key.shape[-2])
    return bias, False, "" if fits else "a CausalBias of other sizes"


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype that autocast gives torch's own."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _is_joined(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Are the dims before tokens and width no batch and heads, but alike?"""
    alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    return query.dim() not in (2, 4) and alike


def _four_dims(x: Tensor) -> Tensor:
    """`[..., H, S, D]` or `[B, S, D]` as `[B, H, S, D]`."""
    return x.flatten(0, -4) if x.dim() > 4 else x[:, None]


def _why_refused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> str:
    """What of the sizes and dtypes `attnops.attention` does not take; "": nothing."""
    if not query.dim() == key.dim() == value.dim() == 4 or not query.is_floating_point():
        return _described(query, key, value)
    if mask is not None:
        known = mask.dtype in (torch.bool, torch.float32, query.dtype)
        if not known or not 2 <= mask.dim() <= 4:
            return f"a mask {list(mask.shape)} of {mask.dtype} beside a query of {query.dtype}"
    heads, kv_heads = query.shape[1], key.shape[1]
    group = heads // max(kv_heads, 1) if enable_gqa else 1
    dtypes = query.dtype == key.dtype == value.dtype
    sizes = query.shape[0] == key.shape[0] and 0 < query.shape[3] == key.shape[3]
    served = dtypes and sizes and heads == kv_heads * group
    if served and key.shape[:3] == value.shape[:3]:
        return ""
    return _described(query, key, value)


def _described(*tensors: Tensor) -> str:
    of_each = (f"{list(x.shape)} of {x.dtype}" for x in tensors)
    return f"query, key and value {', '.join(of_each)}"


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    kernel: str | None,
) -> Tensor:
    """`[B, Hq, S, Dv]` of a call that `attnops.attention` takes."""
    queries, keys = query.shape[2], key.shape[2]
    if is_causal and keys > queries:
        key, value = key[:, :, :queries], value[:, :, :queries]
    elif is_causal and keys < queries:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        mask, is_causal = seen.tril(), False
    elif mask is not None and mask.shape[-1] != keys:
        mask = mask.expand(*mask.shape[:-1], keys)
    heads_first = _heads_first(query, value, mask)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    tokens_first = attention(q, k, v, mask=mask, causal=is_causal, scale=scale, kernel=kernel)
    output = tokens_first.transpose(1, 2)
    return output.contiguous() if heads_first else output


def _heads_first(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Do heads come before tokens in the memory of torch's own result?

    A view that a model takes of it may need that.
    """
    if query.is_cuda and (mask is not None or query.dtype not in _HALVES):
        return False
    by_plain_ops = query.shape[3] != value.shape[3] or (mask is not None and mask.requires_grad)
    if by_plain_ops and not query.is_cuda:
        return True
    return surely(query.stride(1) > query.stride(2))
