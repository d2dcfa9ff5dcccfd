"""`scaled_dot_product_attention` of torch by attnops, and classes whose methods call it in place of torch's."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnops.errors import InvalidInput, fail
from attnops.kernel import check_kernel
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

    Calls that `attnops.attention` does not take are torch's own: dropout above 0, nested and distributed tensors, the device meta, sizes or
    dtypes that differ, a mask beside other than four dims, a scale that is a tensor, calls under torch.jit.trace, and those that torch
    refuses. A query that may see no key gives 0.

    Args:
        query: `[B, Hq, S, D]`. key, value: `[B, Hkv, K, D]`, `[B, Hkv, K, Dv]`. Hkv is Hq, or with enable_gqa a divisor of it. Without a
            mask B may be several dims, or none.
        attn_mask: bool (True: visible) or float (added to the logits), broadcast to `[B, Hq, S, K]`.
        is_causal: query i sees keys 0 to i, whatever S and K are. Not beside attn_mask.
        scale: factor on q.k; default `1 / sqrt(D)`.
        kernel: force a kernel by name, but for calls with dropout.

    Returns:
        `[B, Hq, S, Dv]`, as the query.

    Raises:
        UnknownKernel, NoKernel: `kernel` cannot run. InvalidInput: `kernel`, for a call that is torch's. RuntimeError, ValueError: torch's.
    """
    mask = attn_mask
    odd = dropout_p > 0.0 or isinstance(scale, Tensor) or query.is_nested or key.is_nested or query.is_meta or torch.jit.is_tracing()  # type: ignore[attr-defined]
    # Those of DTensor, which knows no sharding of our ops.
    odd = odd or (is_causal and mask is not None) or hasattr(query, "placements") or hasattr(key, "placements")
    if not odd and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
    if not odd and mask is None and query.dim() not in (2, 4) and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        q, k, v = (x.flatten(0, -4) if x.dim() > 4 else x[:, None] for x in (query, key, value))
        joined = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, kernel=kernel)
        return joined.reshape(*query.shape[:-1], value.shape[-1])
    if odd or not _served(query, key, value, mask, enable_gqa):
        if kernel is not None and dropout_p == 0.0:
            check_kernel(kernel, ("attention",))
            fail(InvalidInput, "kernel", repr(kernel), f"None: attnops.attention does not take this call, of a query {list(query.shape)}")
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
    if mask is not None and not (2 <= mask.dim() <= 4 and mask.dtype in (torch.bool, torch.float32, query.dtype)):
        return False
    heads, kv_heads = query.shape[1], key.shape[1]
    grouped = heads == kv_heads or (enable_gqa and kv_heads > 0 and heads % kv_heads == 0)
    alike = query.dtype == key.dtype == value.dtype and query.shape[0] == key.shape[0] and 0 < query.shape[3] == key.shape[3]
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
    """A subclass of `cls` with its name, whose methods that call `scaled_dot_product_attention`, or else `method`, call ours.

    Its objects can be copied and pickled.
    """

    def ours(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with Ours(kernel):
                return own(self, *args, **kwargs)

        return call

    def reduce(self: Any, protocol: int) -> Any:
        return (_blank, (cls, method, kernel), *cls.__reduce_ex__(self, protocol)[2:])

    switched = {name: ours(getattr(cls, name)) for name in callers(cls) or (method,)}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **switched, "__reduce_ex__": reduce, _SERVED: True})


def is_served(cls: Any) -> bool:
    """Is it a class that `served` made, or a subclass of one?"""
    return hasattr(cls, _SERVED)


def _blank(cls: Any, method: str, kernel: str | None) -> Any:
    return object.__new__(served(cls, method, kernel))


@functools.cache
def callers(cls: Any) -> tuple[str, ...]:
    """The methods of a class whose code calls torch's `scaled_dot_product_attention`, itself or through functions of its package.

    `forward` speaks for static methods and class methods.
    """
    packages = {base.__module__.partition(".")[0] for base in cls.__mro__} - {"torch", "builtins"}
    # Of every base: a method may call the one that it overrides.
    methods = [(name, method) for base in reversed(cls.__mro__) for name, method in vars(base).items() if name != "__init__"]
    found = [name if isinstance(method, FunctionType) else "forward" for name, method in methods if _calls(method, packages)]
    return tuple(dict.fromkeys(found))


def calls_sdpa(cls: Any) -> bool:
    """Does the code of a class call torch's `scaled_dot_product_attention`?"""
    return bool(callers(cls))


def _calls(function: Callable[..., Any], packages: set[str]) -> bool:
    waiting: list[Any] = [function]
    seen: set[CodeType] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if not isinstance(function, FunctionType) or function.__module__.partition(".")[0] not in packages or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        found = list(_named(function.__code__, function.__globals__))
        if any(each is _TORCHS for each in found):
            return True
        waiting += found
    return False


def _named(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """The globals that a code reads, the attributes of modules among them, and `scaled_dot_product_attention` of local names but `self`."""
    before: Any = None  # the object that the last instruction read, or the name of a local variable, which may be a module too
    for step in dis.get_instructions(code):
        name, read = step.argval, None
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read = names.get(name)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(before, ModuleType):
            read = getattr(before, name, None)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(before, str) and before != "self":
            read = _TORCHS if name == NAME else before
        elif step.opname == "IMPORT_FROM" and name == NAME and "torch.nn.functional" in code.co_names:
            read = _TORCHS
        elif step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            read = name[-1] if isinstance(name, tuple) else name
        if read is not None and not isinstance(read, str):
            yield read
        before = read
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant, names)
