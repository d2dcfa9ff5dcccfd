"""Rules that layouts cannot say, shared by the records of several ops. They look at shapes, dtypes
and numbers only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import FURTHEST as FURTHEST
from attnops.core.errors import InvalidInput, fail
from attnops.core.problem import bytes_of
from attnops.core.record import (
    FLOAT32,
    FLOATS,
    INDEX,
    INT32,
    KW_ONLY,
    MASK,
    QUANTISED,
    Call,
    Fact,
    Result,
    Sizes,
    arg,
    group,
    name,
    need,
    place,
)
from attnops.core.tensors import refuse_plan_of_holes

UNBOUNDED = (-1, -1)
"""The default window."""

SOFTEST = 1e30
"""The largest soft cap. Products of it with logits stay finite in float32."""

HEADS = {"Hkv": ">= 1 head", "D": ">= 1", "Dv": ">= 1"}
"""The least sizes of attention."""

SCALE = "1 | Hkv"


def _one_query(p: Any) -> bool:
    return bool(p.sizes.queries.hi == 1)


def _is_causal(p: Any) -> bool:
    return bool(p.rules.causal)


def _is_given(x: Any) -> bool:
    return x is not None and x is not False


def _is_on(number: float) -> bool:
    return number > 0


def _mask(mask: Tensor | None) -> str:
    return "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive"


def _dtype(x: Any) -> torch.dtype | None:
    return x.dtype if isinstance(x, Tensor) else None


def _by_head(scale: Tensor | None) -> bool:
    return scale is not None and scale.shape[0] != 1


def _plan(plan: Tensor | None) -> str:
    return "none" if plan is None else "host" if plan.dtype == torch.int64 else "device"


# What a Problem says of the arguments of attention, and the arguments that several records have.
CAUSAL = (Fact("causal", unless=_one_query),)
WINDOW_LEFT = (Fact("window", part=0, refused="windowed"),)
WINDOW_RIGHT = (Fact("window", part=1, refused="windowed", unless=_is_causal),)
SOFTCAP = (Fact("softcap", _is_on),)
_SIDE = arg(default=-1, least=-1, most=FURTHEST)
LEFT, RIGHT = replace(_SIDE, facts=WINDOW_LEFT), replace(_SIDE, facts=WINDOW_RIGHT)
LEFT_OF_ANY_KERNEL, RIGHT_OF_ANY_KERNEL = replace(LEFT, always=True), replace(RIGHT, always=True)
CAP = arg(default=0.0, least=0, most=SOFTEST, facts=SOFTCAP)
MASK_FACTS = (Fact("mask", _mask),)
MASK_OF_PAGES = arg("T, >= max_pages * page", MASK, default=None, facts=MASK_FACTS)
SINKS = (Fact("sinks", _is_given), Fact("sinks_dtype", _dtype, feature=False))
SINK_LOGITS = arg("Hq", FLOATS, default=None, facts=SINKS)
LATENT_SINK_LOGITS = replace(SINK_LOGITS, dims="H")
KV_RANGE = (Fact("kv_range", _is_given),)
KV_SCALE = (Fact("kv_scales", _is_given),)
KV_SCALES = (*KV_SCALE, Fact("per_head_scales", _by_head, feature=False))
LSE = (Fact("lse", _is_given),)
RETURN_LSE = arg(default=False, facts=LSE)
WRITTEN_LSE = arg("T, Hq", FLOAT32, default=None, written=True, facts=LSE)
WRITTEN_LATENT_LSE = replace(WRITTEN_LSE, dims="T, H")
FIRST_KEYS = arg("B", INDEX, default=None, facts=KV_RANGE, holds="first_keys")
ENDS_OF_KEYS = replace(FIRST_KEYS, holds="ends_of_keys")
KEY_SCALE = arg(SCALE, FLOAT32, default=None, facts=KV_SCALES, holds="scale_of_keys")
QUERY_SCALE = arg(SCALE, FLOAT32, default=None, facts=KV_SCALE, holds="scale_of_query")
LATENT_SCALE = arg("1", FLOAT32, default=None, facts=KV_SCALE, holds="scale_of_keys")
LATENT_QUERY_SCALE = replace(QUERY_SCALE, dims="1")
TEMPERATURE = arg(
    "T", FLOAT32, default=None, facts=(Fact("temperature", _is_given),), holds="factors"
)
GRADIENT = (Fact("grad", _is_given),)
LSE_GRAD = (Fact("lse_grad", _is_given),)
PADDED = arg(default=True, hint=True, facts=(Fact("padded", feature=False),))
HOLES = (Fact("holes", feature=False),)
PLAN = arg(
    "words",
    INDEX,
    default=None,
    hint=True,
    any_device=True,
    facts=(Fact("plan", _plan, feature=False),),
)
WORKSPACE = arg(
    "bytes",
    (torch.uint8,),
    default=None,
    written=True,
    hint=True,
    facts=(Fact("workspace", bytes_of, feature=False),),
)


@group
class Queries(Call):
    """The longest request's query tokens, at most."""

    _: KW_ONLY
    max_seqlen_q: int = arg(least=0, symbolic=True, holds="most_queries")


@group
class Lengths(Queries):
    """The longest request's tokens, at most."""

    _: KW_ONLY
    max_seqlen_k: int = arg(least=0, symbolic=True, holds="most_keys")


@group
class Paged(Call):
    """The pages of each request, and which tokens are its own."""

    page_table: Tensor = arg("B, max_pages", INT32, holds="page_ids")
    seq_lens: Tensor = arg("B", INT32, holds="lengths_of_keys")
    cu_seqlens_q: Tensor = arg("B + 1", INT32, holds="starts_of_queries")


@group
class Visible(Call):
    """The rules that say which keys a query sees, and the form of the logits."""

    _: KW_ONLY
    scale: float = arg(holds="scale_of_logits")
    causal: bool = arg(default=False, facts=CAUSAL)
    window_left: int = LEFT
    window_right: int = RIGHT
    softcap: float = CAP
    attention_chunk: int = arg(default=0, least=0, most=FURTHEST, facts=(Fact("attention_chunk"),))


def gradients(*of: str) -> tuple[Result, ...]:
    """The results of a gradient; that of a mask is worked out where `mask_grad` asks for it."""
    return tuple(
        Result(f"grad_{name}", like=name, when="mask_grad" * (name == "mask")) for name in of
    )


def heads_divide(call: Any, sizes: Sizes) -> None:
    """Each key head serves as many query heads as another."""
    heads, kv_heads = sizes["Hq"], sizes["Hkv"]
    divides = heads % kv_heads == 0
    if divides is not True:
        want = f"a multiple of the key's {kv_heads} heads"
        need(divides, place(call.spec, "Hq"), heads, want)


def attention(call: Any, sizes: Sizes) -> None:
    """Heads divide, and the query's and the key's dtypes come with the scales they need, which a
    gradient has not."""
    heads_divide(call, sizes)
    q_scale(call.query, getattr(call, "q_scale", None))
    key = "key" if "key" in call.spec.names else "k_pages"
    kv_scales(
        call.query,
        key,
        getattr(call, key),
        getattr(call, "k_scale", None),
        getattr(call, "v_scale", None),
    )


def q_scale(query: Tensor, given: Tensor | None) -> None:
    """A quantised query comes with a scale, another without."""
    if (query.dtype == torch.float8_e4m3fn) != (given is not None):
        got, want = ("None", "a scale") if given is None else ("a tensor", "None")
        fail(InvalidInput, "q_scale", got, f"{want}, because the query is {name(query.dtype)}")


def kv_scales(
    query: Tensor,
    field: str,
    key: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    of: str = "query",
) -> None:
    """Keys have the query's dtype, or a quantised one that comes with scales. of: the argument that
    the query is."""
    if key.dtype != query.dtype or key.dtype not in FLOATS:
        if key.dtype not in QUANTISED:
            want = f"{name(query.dtype)} (the {of}'s) or {' | '.join(map(name, QUANTISED))}"
            fail(InvalidInput, f"{field}.dtype", name(key.dtype), want)
        if k_scale is None or v_scale is None:
            fail(
                InvalidInput,
                "k_scale, v_scale",
                "None",
                f"both, because {field} is {name(key.dtype)}",
            )


def plan(call: Any) -> None:
    """A plan is made on the device for the device (int32), or by the host for the host (int64). A
    workspace has no gaps."""
    contiguous("workspace", call.workspace)
    given, device = call.plan, call[0].device
    if given is None or (given.dtype, given.device.type) == (torch.int64, "cpu"):
        return
    refuse_plan_of_holes(call)
    if given.dtype != torch.int32 or given.device != device:
        got = f"{name(given.dtype)} on {given.device}"
        fail(
            InvalidInput,
            "plan",
            got,
            f"int32 on {device}, or int64 on cpu: the result of a plan op",
        )


def contiguous(field: str, given: Tensor | None) -> None:
    """A buffer has no gaps."""
    if given is not None:
        need(given.is_contiguous(), f"{field}.stride()", given.stride(), "(1,)")


def result_dtype(call: Any) -> torch.dtype:
    """The output's dtype: the query's, bfloat16 for a quantised one."""
    return call.query.dtype if call.query.dtype in FLOATS else torch.bfloat16


def result_dtypes(call: Any) -> tuple[torch.dtype, ...]:
    """As `result_dtype`, for an output that the caller brings."""
    return (result_dtype(call),)
