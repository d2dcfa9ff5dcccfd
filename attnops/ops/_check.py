"""Checks shared by the ops. They work on real, fake and symbolic sizes and install no guard that a size's equality does not need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput, fail
from attnops.ops.layouts import described
from attnops.problem import Extent

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
INDEX = (torch.int32, torch.int64)
QUERY = (*FLOATS, torch.float8_e4m3fn)


def need(ok: Any, field: str, got: object, want: str) -> None:
    """Raise InvalidInput unless `ok`. A symbolic `ok` that is not known yet becomes a check at run time."""
    if isinstance(ok, bool):
        if not ok:
            fail(InvalidInput, field, got, want)
        return
    # Only sizes under a compiler are not bools, and it has paid for this import already.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if not statically_known_true(ok):
        if statically_known_true(torch.sym_not(ok)):
            fail(InvalidInput, field, got, want)
        try:
            torch._check(ok, lambda: f"{field}: got {got}, want {want}")
        except RuntimeError:
            fail(InvalidInput, field, got, want)


def tensor(field: str, value: Any, ndim: int | tuple[int, ...], dtypes: tuple[torch.dtype, ...], layout: str) -> Tensor:
    """`value` is a tensor of `ndim` dimensions and one of `dtypes`."""
    if not isinstance(value, Tensor):
        fail(InvalidInput, field, type(value).__name__, f"a tensor {layout}")
    if value.layout != torch.strided or value.is_nested:
        fail(InvalidInput, field, described(value), f"a plain strided tensor {layout}")
    dims = (ndim,) if isinstance(ndim, int) else ndim
    if value.dim() not in dims:
        fail(InvalidInput, field, f"shape {shape(value)}", layout)
    if value.dtype not in dtypes:
        fail(InvalidInput, f"{field}.dtype", name(value.dtype), " | ".join(name(d) for d in dtypes))
    return value


def same_device(query: Tensor, **others: Tensor | None) -> None:
    """Every tensor lies on the device of the first."""
    for field, value in others.items():
        if value is not None and value.device != query.device:
            fail(InvalidInput, f"{field}.device", value.device, f"{query.device}, as the first argument")


def plan(device: torch.device, given: Tensor | None) -> None:
    """Made on the device for the device (int32), or by the host for the host (int64)."""
    if given is None or (given.dtype, given.device.type) == (torch.int64, "cpu"):
        return
    if given.dtype != torch.int32 or given.device != device:
        fail(InvalidInput, "plan", f"{name(given.dtype)} on {given.device}", f"int32 on {device}, or int64 on cpu: what a plan op returned")


def workspace(given: Tensor | None) -> None:
    """Scratch is uint8 `[bytes]`, without gaps."""
    if given is not None:
        tensor("workspace", given, 1, (torch.uint8,), "[bytes]")
        need(given.is_contiguous(), "workspace.stride()", given.stride(), "(1,)")


def workspace_bytes(given: Tensor | None) -> int:
    """As a Problem says it: the size if it is known, else the least it may be; no guard is installed."""
    if given is None:
        return 0
    size = given.numel()
    return size if isinstance(size, int) else Extent.of(size).lo


def plan_kind(given: Tensor | None) -> str:
    """As a Problem says it."""
    return "none" if given is None else "host" if given.dtype == torch.int64 else "device"


def equal(field: str, got: Any, want: Any, meaning: str) -> None:
    """Two sizes are the same."""
    need(got == want, field, got, f"{want} ({meaning})")


def heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Last dims agree, key and value share heads, and they divide the query's."""
    equal("key.shape[-1]", key.shape[-1], query.shape[-1], "the query's head dim")
    equal("value.shape[-2]", value.shape[-2], key.shape[-2], "the key's heads")
    hq, hkv = query.shape[-2], key.shape[-2]
    need(hkv >= 1, "key.shape[-2]", hkv, ">= 1 head")
    need(hq % hkv == 0, "query.shape[-2]", hq, f"a multiple of the key's {hkv} heads")
    need(query.shape[-1] >= 1, "query.shape[-1]", query.shape[-1], ">= 1")
    need(value.shape[-1] >= 1, "value.shape[-1]", value.shape[-1], ">= 1")


def q_scale(query: Tensor, given: Tensor | None) -> None:
    """A quantised query comes with a scale, another without."""
    if (query.dtype == torch.float8_e4m3fn) != (given is not None):
        got, want = ("None", "a scale") if given is None else ("a tensor", "None")
        fail(InvalidInput, "q_scale", got, f"{want}, because the query is {name(query.dtype)}")


def result_dtype(query: Tensor) -> torch.dtype:
    """The output's: the query's, bfloat16 for a quantised one."""
    return query.dtype if query.dtype in FLOATS else torch.bfloat16


def kv_dtype(query: Tensor, key: Tensor, value: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Key and value share a dtype: the query's, or a quantised one that comes with scales."""
    if key.dtype != value.dtype:
        fail(InvalidInput, "value.dtype", name(value.dtype), f"{name(key.dtype)}, as the key")
    if key.dtype != query.dtype or key.dtype not in FLOATS:
        if key.dtype not in QUANTISED:
            fail(InvalidInput, "key.dtype", name(key.dtype), f"{name(query.dtype)} (the query's) or {' | '.join(map(name, QUANTISED))}")
        if k_scale is None or v_scale is None:
            fail(InvalidInput, "k_scale, v_scale", "None", f"both, because the key is {name(key.dtype)}")


def scales(num_kv_heads: Any, **given: Tensor | None) -> None:
    """Scales are float32 `[1]` or `[Hkv]`."""
    for field, value in given.items():
        if value is not None:
            tensor(field, value, 1, (torch.float32,), "[1] or [Hkv]")
            n = value.shape[0]
            need(n == 1 if isinstance(n, int) and n == 1 else n == num_kv_heads, f"{field}.shape[0]", n, f"1 or {num_kv_heads} (key heads)")


def sinks(value: Tensor | None, num_q_heads: Any) -> None:
    """Sinks are `[Hq]`, float."""
    if value is not None:
        tensor("sinks", value, 1, FLOATS, "[Hq]")
        equal("sinks.shape[0]", value.shape[0], num_q_heads, "one logit a query head")


def numbers(scale: float, window_left: int, window_right: int, softcap: float, attention_chunk: int = 0) -> None:
    """The scalars every attention op takes."""
    if not isinstance(scale, (int, float)) or scale != scale or scale in (float("inf"), float("-inf")):
        fail(InvalidInput, "scale", scale, "a finite number")
    if softcap < 0 or softcap != softcap or softcap == float("inf"):
        fail(InvalidInput, "softcap", softcap, ">= 0 (0: off), finite")
    for field, value in (("window_left", window_left), ("window_right", window_right)):
        if value < -1:
            fail(InvalidInput, field, value, ">= -1 (-1: unbounded)")
    if attention_chunk < 0:
        fail(InvalidInput, "attention_chunk", attention_chunk, ">= 0 (0: off)")


def mask(value: Any) -> Tensor:
    """A mask is a tensor. Of a function, as flex_attention takes one, the error says what to do."""
    if isinstance(value, Tensor):
        return value
    want = "a tensor, bool or additive"
    if callable(value) or type(value).__name__ == "BlockMask":
        want += "; write a mask_mod or score_mod out as one, or call torch.nn.attention.flex_attention, which takes functions"
    fail(InvalidInput, "mask", type(value).__name__, want)


def window(value: Any) -> tuple[int, int]:
    """(left, right)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        fail(InvalidInput, "window", value, "(left, right) in keys, -1: unbounded")
    return value[0], value[1]


def one_of(field: str, value: object, allowed: tuple[object, ...]) -> None:
    """`value` is among `allowed`."""
    if value not in allowed:
        fail(InvalidInput, field, repr(value), " | ".join(map(str, allowed)))


def shape(value: Tensor) -> tuple[Any, ...]:
    """The shape as a plain tuple, for messages."""
    return tuple(value.shape)


def name(dtype: torch.dtype) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
