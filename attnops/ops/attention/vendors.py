"""Attention of torch and of others, called as their documentation has it on the tensors of a call
of ours.

VENDORS has, by op, the calls by name: functions of the op's record and of a compiler. Each gives a
run, or None where its peer cannot answer the call; those of a gradient take the record of the
forward, and give a function of its trained tensors. Metadata of the batch alone, such as plans and
block masks, is made beforehand, as an engine or a training loop makes it once a step. The errors of
a peer's package are raised, an ImportError if it is missing. `torch.*` are torch's own calls, and
`direct.*` those of a vendor's kernel, on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnops.core.record import Call, asked
from attnops.ops.attention.record import Attention
from attnops.ops.attention.varlen import VarlenAttention

Inputs = Mapping[str, Tensor]
Attend = Callable[[Inputs], Tensor]
"""From query, key, value and perhaps mask and sinks, laid out as in the op, to the output as the op
has it."""
Compiler = Callable[..., Any]
"""`torch.compile`, or a function like it."""
Run = Callable[[], Any]
Vendor = Callable[[Any, Compiler], "Run | None"]

TENSORS = ("query", "key", "value")
TRAINED = (*TENSORS, "sinks", "mask")
RULES = ("scale", "causal", "window_left", "softcap", "attention_chunk")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
OTHER = frozenset({"window_left", "window_right", "softcap", "sinks", "k_scale", "v_scale"})
"""What the direct calls do not support."""


def packed(c: Call) -> bool:
    """Are its requests one after the other?"""
    return isinstance(c, VarlenAttention)


def given(c: Call, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the arguments that are not None."""
    return {n: x for n in names if (x := getattr(c, n)) is not None}


def public(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an op as its public function takes them, which has both sides of the window
    as one."""
    given = dict(arguments)
    sides = given.pop("window_left", -1), given.pop("window_right", -1)
    return given | {"window": sides}


def on_gpu(c: Any) -> bool:
    """Is the query on a GPU?"""
    return bool(c.query.is_cuda)


def sdpa(c: Any, compiler: Compiler | None = None, backends: Any = ()) -> Attend | None:
    """`scaled_dot_product_attention`, by the backends if given: dense calls, causal or not, perhaps
    with an additive mask."""
    left_out = {"window_left", "softcap", "sinks", "attention_chunk"} | (
        {"mask"} if backends else set()
    )
    if (
        packed(c)
        or left_out & asked(c)
        or (backends == SDPBackend.CUDNN_ATTENTION and not on_gpu(c))
    ):
        return None
    causal, scale, masked = c.causal, c.scale, c.mask is not None
    hidden = (
        torch.ones(c.mask.shape[-2:], dtype=torch.bool, device=c.mask.device).triu(1)
        if masked and causal
        else None
    )

    def run(given: Inputs) -> Tensor:
        q, k, v = (given[n].transpose(1, 2) for n in TENSORS)
        bias = given.get("mask")
        bias = (
            bias.masked_fill(hidden, float("-inf"))
            if bias is not None and hidden is not None
            else bias
        )
        more: dict[str, Any] = {
            "is_causal": causal and bias is None,
            "enable_gqa": q.shape[1] != k.shape[1],
        }
        with sdpa_kernel(backends) if backends else nullcontext():
            out = scaled_dot_product_attention(q, k, v, bias, scale=scale, **more)
        return out.transpose(1, 2)

    return run


def flex(c: Any, compiler: Compiler) -> Attend:
    """`flex_attention`, compiled, with a block mask. Sinks: the output times the share of the keys,
    which follows from the lse."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    tokens, device, flat = c.query.shape[-3], c.query.device, packed(c)
    causal, left, cap, chunk = c.causal, c.window_left, c.softcap, c.attention_chunk
    document = (
        torch.searchsorted(c.cu_seqlens_q[1:], torch.arange(tokens, device=device), right=True)
        if flat
        else None
    )

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        visible = (k <= q) if causal else (k >= 0)
        visible = visible & (q - k <= left) if left >= 0 else visible
        visible = visible & (q // chunk == k // chunk) if chunk else visible
        return visible & (document[q] == document[k]) if document is not None else visible

    def capped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return cap * torch.tanh(score / cap)

    mask = create_block_mask(seen, None, None, tokens, tokens, device=str(device))
    compiled = compiler(flex_attention, dynamic=False)
    options: dict[str, Any] = {
        "score_mod": capped if cap else None,
        "block_mask": mask,
        "scale": c.scale,
        "enable_gqa": True,
    }

    def run(given: Inputs) -> Tensor:
        q, k, v = ((given[n][None] if flat else given[n]).transpose(1, 2) for n in TENSORS)
        if "mask" in given:  # it is added to the logits, and gets a gradient
            bias = given["mask"]
            out = compiled(
                q,
                k,
                v,
                **{**options, "score_mod": lambda score, b, h, q, k: score + bias[0, h, q, k]},
            )
        elif "sinks" in given:
            out, aux = compiled(q, k, v, return_aux=AuxRequest(lse=True), **options)
            out = out * torch.sigmoid(aux.lse - given["sinks"].float()[:, None])[..., None].to(
                out.dtype
            )
        else:
            out = compiled(q, k, v, **options)
        turned: Tensor = out.transpose(1, 2)
        return turned[0] if flat else turned

    return run


def fa4(c: Any, compiler: Compiler | None = None, deterministic: bool = False) -> Attend | None:
    """FlashAttention-4's `flash_attn_func` and `flash_attn_varlen_func`, of a GPU."""
    if not on_gpu(c) or {"mask", "attention_chunk"} & asked(c):
        return None
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    window = (c.window_left, 0 if c.causal else None) if c.window_left >= 0 else (None, None)
    options: dict[str, Any] = {
        "softmax_scale": c.scale,
        "causal": c.causal,
        "window_size": window,
        "softcap": c.softcap,
    }
    options |= {"deterministic": True} if deterministic else {}
    function: Any = (
        partial(flash_attn_varlen_func, **given(c, LENGTHS)) if packed(c) else flash_attn_func
    )

    def run(given: Inputs) -> Tensor:
        found = function(*(given[n] for n in TENSORS), learnable_sink=given.get("sinks"), **options)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return run


def varlen(c: Any, compiler: Compiler | None = None, repeat: bool = True) -> Attend | None:
    """`torch.nn.attention.varlen.varlen_attn`. Where this torch has no grouped heads there, key
    heads are repeated, or it is left out."""
    if not on_gpu(c) or not packed(c) or {"softcap", "sinks", "attention_chunk"} & asked(c):
        return None
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    function: Any = varlen_attn
    groups, scale, lengths = c.query.shape[1] // c.key.shape[1], c.scale, given(c, LENGTHS).values()
    window = {"window_size": (c.window_left, 0 if c.causal else -1)}
    more: dict[str, Any] = window if "window_size" in known else {"is_causal": c.causal}
    if groups > 1 and "enable_gqa" in known:
        more, groups = more | {"enable_gqa": True}, 1
    if (groups > 1 and not repeat) or (c.window_left >= 0 and "window_size" not in known):
        return None

    def run(given: Inputs) -> Tensor:
        keys = (
            given[n].repeat_interleave(groups, 1) if groups > 1 else given[n]
            for n in ("key", "value")
        )
        out: Tensor = function(given["query"], *keys, *lengths, scale=scale, **more)
        return out

    return run


def dense(c: Any) -> Attention | None:
    """As a call of `attention`: whole prompts, or steps, of one length. None of other calls."""
    if c.sinks is not None:
        return None
    tensors = [getattr(c, n) for n in TENSORS]
    if packed(c):
        tensors = [t.unflatten(0, (c.cu_seqlens_q.shape[0] - 1, -1)) for t in tensors]
    return of_one_length(c, tensors)


def of_one_length(c: Any, tensors: list[Tensor]) -> Attention | None:
    """The rules of `c` over query, key and value of requests of one length: prompts, or steps. None
    of others."""
    if (new := tensors[0].shape[1]) not in (1, tensors[1].shape[1]):
        return None
    return Attention(
        **{
            **given(c, RULES),
            **dict(zip(TENSORS, tensors, strict=True)),
            "causal": c.causal and new > 1,
        }
    )


def joined(c: Any) -> VarlenAttention:
    """A prompt as a call of `varlen_attention`: requests one after the other."""
    if isinstance(c, VarlenAttention):
        return c
    (batch, queries), keys = c.query.shape[:2], c.key.shape[1]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=c.query.device)
    lengths = zip(LENGTHS, (ends * queries, ends * keys, queries, keys), strict=True)
    return VarlenAttention(
        **given(c, (*RULES, "sinks")),
        **{n: getattr(c, n).flatten(0, 1) for n in TENSORS},
        **dict(lengths),
    )


def bound(
    make: Callable[[Any, Compiler], Attend | None], form: Callable[[Any], Any] = dense
) -> Vendor:
    """A peer that is a function of tensors, on those of the call in a form that it takes."""

    def run(c: Any, compiler: Compiler) -> Run | None:
        taken = form(c)
        if taken is None:
            return None
        attend = make(taken, compiler)
        return None if attend is None else partial(attend, given(taken, TRAINED))

    return run


def prompt(make: Vendor) -> Vendor:
    """For calls of more than one new token: a step would need the peer's options for splits."""
    return lambda c, compiler: None if c.query.shape[-3] == 1 else make(c, compiler)


def fa3(c: Any, compiler: Compiler | None = None) -> Run | None:
    """FlashAttention-3, as sgl-kernel has it."""
    if OTHER & asked(c):
        return None
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    c = joined(c)
    return partial(
        flash_attn_varlen_func,
        *given(c, (*TENSORS, *LENGTHS)).values(),
        softmax_scale=c.scale,
        causal=c.causal,
    )


FORWARD: dict[str, Vendor] = {
    "torch.sdpa": bound(sdpa),
    "torch.flex": prompt(bound(flex)),
    "torch.varlen": prompt(bound(partial(varlen, repeat=False), joined)),
    "direct.fa3": fa3,
}
TRAINING: dict[str, Callable[[Any, Compiler], Attend | None]] = {
    "torch": sdpa,  # by the kernel that torch chooses
    "cudnn": partial(sdpa, backends=SDPBackend.CUDNN_ATTENTION),
    "flash2": partial(sdpa, backends=SDPBackend.FLASH_ATTENTION),
    "varlen_attn": varlen,
    "fa4": fa4,
    "fa4_deterministic": partial(fa4, deterministic=True),
    "flex": flex,
}
VENDORS: dict[str, Mapping[str, Callable[[Any, Compiler], Any]]] = {
    "attention": FORWARD,
    "varlen_attention": FORWARD,
    "attention_backward": TRAINING,
    "varlen_attention_backward": TRAINING,
}
