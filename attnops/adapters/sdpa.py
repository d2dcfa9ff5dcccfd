"""`scaled_dot_product_attention` of torch by attnops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.adapters.callers import TORCHS
from attnops.errors import InvalidInput, fail
from attnops.kernel import check_kernel
from attnops.ops import attention
from attnops.ops.bias import is_bias, is_lower_right
from attnops.subclasses import is_foreign
from attnops.tracers import is_recorded


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
    *, kernel: str | None = None,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention through `attnops.attention`: same arguments, same result.

    Calls that `attnops.attention` does not take are torch's own: dropout above 0, nested and distributed tensors, tensors of a class with
    a `__torch_function__` of its own, the device meta, sizes or dtypes that differ, a mask beside other than four dims, a scale that is a
    tensor, calls under torch.jit.trace, and those that torch refuses. A query that may see no key gives 0.

    Args:
        query: `[B, Hq, S, D]`. key, value: `[B, Hkv, K, D]`, `[B, Hkv, K, Dv]`. Hkv is Hq, or with enable_gqa a divisor of it. Without a
            mask B may be several dims, or none.
        attn_mask: bool (True: visible) or float (added to the logits), broadcast to `[B, Hq, S, K]`; or a causal bias of
            torch.nn.attention.bias, which means what it means to torch.
        is_causal: query i sees keys 0 to i, whatever S and K are. Not beside attn_mask.
        scale: factor on q.k; default `1 / sqrt(D)`.
        kernel: force a kernel by name, but for calls with dropout.

    Returns:
        `[B, Hq, S, Dv]`, as the query.

    Raises:
        UnknownKernel, NoKernel: `kernel` cannot run. InvalidInput: `kernel`, for a call that is torch's. RuntimeError, ValueError: torch's.
    """
    if dropout_p != 0.0 or is_recorded(query):
        return TORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    mask, causal, why = attn_mask, is_causal, _why_torchs(query, key, value, attn_mask, is_causal, scale)
    if not why and is_bias(mask):
        mask, causal, why = _rule(mask, query, key)
    if not why:
        q, k, v = _autocast(query, key, value)
        if mask is None and q.dim() not in (2, 4) and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
            joined = _attend(*map(_four_dims, (q, k, v)), None, causal, scale, kernel)
            return joined.reshape(*q.shape[:-1], v.shape[-1])
        why = _why_refused(q, k, v, mask, enable_gqa)
        if not why:
            return _attend(q, k, v, mask, causal, scale, kernel)
    if kernel is not None:
        check_kernel(kernel, ("attention",))
        fail(InvalidInput, "kernel", repr(kernel), f"None: attnops.attention does not take {why}")
    return TORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _why_torchs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: Any) -> str:
    """What makes a call torch's own, whatever its sizes and dtypes are; "": nothing."""
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    for x in tensors:
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
    # Of this variant, and where its own two sizes are equal, torch does not look at the sizes.
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


def _four_dims(x: Tensor) -> Tensor:
    """`[..., H, S, D]` or `[B, S, D]` as `[B, H, S, D]`."""
    return x.flatten(0, -4) if x.dim() > 4 else x[:, None]


def _why_refused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> str:
    """What of the sizes and dtypes `attnops.attention` does not take; "": nothing."""
    shapes = [list(x.shape) for x in (query, key, value)]
    if not query.dim() == key.dim() == value.dim() == 4 or not query.is_floating_point():
        return f"query, key and value of shapes {shapes} and {query.dtype}"
    if mask is not None and not (2 <= mask.dim() <= 4 and mask.dtype in (torch.bool, torch.float32, query.dtype)):
        return f"a mask of shape {list(mask.shape)} and {mask.dtype} beside a query of {query.dtype}"
    heads, kv_heads = query.shape[1], key.shape[1]
    grouped = heads == kv_heads or (enable_gqa and kv_heads > 0 and heads % kv_heads == 0)
    alike = query.dtype == key.dtype == value.dtype and query.shape[0] == key.shape[0] and 0 < query.shape[3] == key.shape[3]
    if grouped and alike and key.shape[:3] == value.shape[:3]:
        return ""
    return f"query, key and value of shapes {shapes} and {[x.dtype for x in (query, key, value)]}"


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, kernel: str | None
) -> Tensor:
    """`[B, Hq, S, Dv]` of a call that `attnops.attention` takes."""
    queries, keys = query.shape[2], key.shape[2]
    if is_causal and keys > queries:
        key, value = key[:, :, :queries], value[:, :, :queries]
    elif is_causal and keys < queries:
        mask, is_causal = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(), False
    elif mask is not None and mask.shape[-1] != keys:
        mask = mask.expand(*mask.shape[:-1], keys)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return attention(query, key, value, mask=mask, causal=is_causal, scale=scale, kernel=kernel).transpose(1, 2)
