"""`scaled_dot_product_attention` of torch by attnops, and classes whose methods call it in place of torch's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnops.ops import attention

_SERVED = "_attnops_served"
NAME = "scaled_dot_product_attention"
_TORCHS = F.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
    *, kernel: str | None = None,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention through `attnops.attention`: same arguments, layout and result.

    Calls that `attnops.attention` does not take are torch's own: dropout above 0, nested tensors, the device meta, sizes or dtypes that
    differ, a mask beside other than four dims, and those that torch refuses. A query that may see no key gives 0.

    Args:
        query: `[B, Hq, S, D]`. key, value: `[B, Hkv, K, D]`, `[B, Hkv, K, Dv]`. Hkv is Hq, or with enable_gqa a divisor of it. Without a
            mask B may be several dims, or none.
        attn_mask: bool (True: visible) or float (added to the logits), broadcast to `[B, Hq, S, K]`.
        is_causal: query i sees keys 0 to i, whatever S and K are. Not beside attn_mask.
        scale: factor on q.k; default `1 / sqrt(D)`.
        kernel: force a kernel by name.

    Returns:
        `[B, Hq, S, Dv]`, as the query.

    Raises:
        UnknownKernel, NoKernel: `kernel` cannot run. RuntimeError, ValueError: torch's own.
    """
    mask = attn_mask
    odd = dropout_p > 0.0 or query.is_nested or key.is_nested or query.is_meta or (is_causal and mask is not None)
    if not odd and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
    if not odd and mask is None and query.dim() not in (2, 4) and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        q, k, v = (x.flatten(0, -4) if x.dim() > 4 else x[:, None] for x in (query, key, value))
        joined = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, kernel=kernel)
        return joined.reshape(*query.shape[:-1], value.shape[-1])
    if odd or not _served(query, key, value, mask, enable_gqa):
        return _TORCHS(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    queries, keys = query.shape[2], key.shape[2]
    if is_causal and keys > queries:
        key, value = key[:, :, :queries], value[:, :, :queries]
    elif is_causal and keys < queries:
        mask, is_causal = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(), False
    elif mask is not None and mask.shape[-1] != keys:
        mask = mask.expand(*mask.shape[:-1], keys)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return attention(query, key, value, mask=mask, causal=is_causal, scale=scale, kernel=kernel).transpose(1, 2)


def _served(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    if not query.dim() == key.dim() == value.dim() == 4 or not query.is_floating_point():
        return False
    if mask is not None and not (2 <= mask.dim() <= 4 and (mask.dtype == torch.bool or mask.is_floating_point())):
        return False
    heads, kv_heads = query.shape[1], key.shape[1]
    grouped = heads == kv_heads or (enable_gqa and kv_heads > 0 and heads % kv_heads == 0)
    alike = query.dtype == key.dtype == value.dtype and query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
    return grouped and alike and key.shape[:3] == value.shape[:3]


class Ours(TorchFunctionMode):
    """Within the block torch's `scaled_dot_product_attention` is ours."""

    def __init__(self, kernel: str | None) -> None:
        super().__init__()
        self.kernel = kernel

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _TORCHS:
            return scaled_dot_product_attention(*args, **(kwargs or {}), kernel=self.kernel)
        if func is Tensor.unflatten:
            func = torch.unflatten  # Dynamo does not trace the `super()` of the other one
        return func(*args, **(kwargs or {}))


@functools.cache
def served(cls: Any, method: str, kernel: str | None) -> type:
    """A subclass of `cls` with its name, whose `method` calls our `scaled_dot_product_attention`. Its objects can be copied and pickled."""
    own: Callable[..., Any] = getattr(cls, method)

    @functools.wraps(own)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Ours(kernel):
            return own(self, *args, **kwargs)

    def reduce(self: Any, protocol: int) -> Any:
        return (_blank, (cls, method, kernel), *cls.__reduce_ex__(self, protocol)[2:])

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, method: call, "__reduce_ex__": reduce, _SERVED: True})


def is_served(cls: Any) -> bool:
    """Is it a class that `served` made, or a subclass of one?"""
    return hasattr(cls, _SERVED)


def _blank(cls: Any, method: str, kernel: str | None) -> Any:
    return object.__new__(served(cls, method, kernel))


@functools.cache
def calls_sdpa(cls: Any) -> bool:
    """Does the code of a class call `scaled_dot_product_attention`, itself or through functions of its package?"""
    packages = {base.__module__.partition(".")[0] for base in cls.__mro__} - {"torch", "builtins"}
    waiting: list[Any] = [f for base in cls.__mro__ for name, f in vars(base).items() if name != "__init__"]
    seen: set[CodeType] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if not isinstance(function, FunctionType) or function.__module__.partition(".")[0] not in packages or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = set(_names(function.__code__))
        if NAME in names:
            return True
        waiting += [function.__globals__.get(name) for name in names]
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
