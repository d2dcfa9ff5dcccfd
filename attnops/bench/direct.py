"""Attention that others train with, called as their documentation has it: functions of trained tensors, without attnops.

Each function returns None where its peer cannot answer the call, and raises the errors of the peer's package, an ImportError if it is
missing. Block masks are made beforehand, as a training loop makes them once a step.
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

from attnops.bench import Setup
from attnops.inputs import Call

Inputs = Mapping[str, Tensor]
Attend = Callable[[Inputs], Tensor]
"""From query, key, value and perhaps sinks, laid out as in the op, to the output as the op has it."""
RULES = ("scale", "causal", "window_left", "softcap", "attention_chunk")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def packed(call: Call) -> bool:
    """Are its requests one after the other?"""
    return call.op == "varlen_attention"


def sdpa(setup: Setup, call: Call, backends: Any = ()) -> Attend | None:
    """`scaled_dot_product_attention`, by the backends if given: dense calls, causal or not, perhaps with an additive mask."""
    a = call.arguments
    left_out = {"window_left", "softcap", "sinks", "attention_chunk"} | ({"mask"} if backends else set())
    if packed(call) or left_out & a.keys() or (backends == SDPBackend.CUDNN_ATTENTION and not setup.on_gpu):
        return None
    hidden = torch.ones(a["mask"].shape[-2:], dtype=torch.bool, device=a["mask"].device).triu(1) if "mask" in a and a["causal"] else None

    def run(given: Inputs) -> Tensor:
        q, k, v = (given[n].transpose(1, 2) for n in ("query", "key", "value"))
        bias = given.get("mask")
        bias = bias.masked_fill(hidden, float("-inf")) if bias is not None and hidden is not None else bias
        more: dict[str, Any] = {"is_causal": a["causal"] and bias is None, "enable_gqa": q.shape[1] != k.shape[1]}
        with sdpa_kernel(backends) if backends else nullcontext():
            out = scaled_dot_product_attention(q, k, v, bias, scale=a["scale"], **more)
        return out.transpose(1, 2)

    return run


def flex(setup: Setup, call: Call) -> Attend:
    """`flex_attention`, compiled, with a block mask. Sinks: the output times the share of the keys, which follows from the lse."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    a, tokens = call.arguments, call.arguments["query"].shape[-3]
    left, cap, device, chunk = a.get("window_left", -1), a.get("softcap", 0.0), a["query"].device, a.get("attention_chunk", 0)
    document = torch.searchsorted(a["cu_seqlens_q"][1:], torch.arange(tokens, device=device), right=True) if packed(call) else None

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        visible = (k <= q) if a["causal"] else (k >= 0)
        visible = visible & (q - k <= left) if left >= 0 else visible
        visible = visible & (q // chunk == k // chunk) if chunk else visible
        return visible & (document[q] == document[k]) if document is not None else visible

    def capped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return cap * torch.tanh(score / cap)

    mask = create_block_mask(seen, None, None, tokens, tokens, device=str(device))
    compiled = setup.compiled(flex_attention, dynamic=False)
    options: dict[str, Any] = {"score_mod": capped if cap else None, "block_mask": mask, "scale": a["scale"], "enable_gqa": True}

    def run(given: Inputs) -> Tensor:
        q, k, v = (given[n][None] if packed(call) else given[n] for n in ("query", "key", "value"))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if "mask" in given:  # it is added to the logits, and gets a gradient
            bias = given["mask"]
            out = compiled(q, k, v, **{**options, "score_mod": lambda score, b, h, q, k: score + bias[0, h, q, k]})
        elif "sinks" in given:
            out, aux = compiled(q, k, v, return_aux=AuxRequest(lse=True), **options)
            out = out * torch.sigmoid(aux.lse - given["sinks"].float()[:, None])[..., None].to(out.dtype)
        else:
            out = compiled(q, k, v, **options)
        turned: Tensor = out.transpose(1, 2)
        return turned[0] if packed(call) else turned

    return run


def fa4(setup: Setup, call: Call, deterministic: bool = False) -> Attend | None:
    """FlashAttention-4's `flash_attn_func` and `flash_attn_varlen_func`, of a GPU."""
    if not setup.on_gpu or {"mask", "attention_chunk"} & call.arguments.keys():
        return None
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    a = call.arguments
    window = (a["window_left"], 0 if a["causal"] else None) if "window_left" in a else (None, None)
    options: dict[str, Any] = {"softmax_scale": a["scale"], "causal": a["causal"], "window_size": window, "softcap": a.get("softcap", 0.0)}
    options |= {"deterministic": True} if deterministic else {}
    function: Any = flash_attn_func
    if packed(call):
        function = partial(flash_attn_varlen_func, **{n: a[n] for n in LENGTHS})

    def run(given: Inputs) -> Tensor:
        found = function(*(given[n] for n in ("query", "key", "value")), learnable_sink=given.get("sinks"), **options)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return run


def varlen(setup: Setup, call: Call, repeat: bool = True) -> Attend | None:
    """`torch.nn.attention.varlen.varlen_attn`. Where this torch has no grouped heads there, key heads are repeated, or it is left out."""
    a = call.arguments
    if not setup.on_gpu or not packed(call) or {"softcap", "sinks", "attention_chunk"} & a.keys():
        return None
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    function: Any = varlen_attn
    groups = a["query"].shape[1] // a["key"].shape[1]
    more: dict[str, Any] = {"window_size": (a.get("window_left", -1), 0 if a["causal"] else -1)} if "window_size" in known else {}
    if "window_size" not in known:
        if "window_left" in a:
            return None
        more = {"is_causal": a["causal"]}
    if groups > 1 and "enable_gqa" in known:
        more, groups = more | {"enable_gqa": True}, 1
    if groups > 1 and not repeat:
        return None

    def run(given: Inputs) -> Tensor:
        keys = (given[n].repeat_interleave(groups, 1) if groups > 1 else given[n] for n in ("key", "value"))
        out: Tensor = function(given["query"], *keys, *(a[n] for n in LENGTHS), scale=a["scale"], **more)
        return out

    return run


DIRECT: Mapping[str, Callable[[Setup, Call], Attend | None]] = {
    "torch": sdpa,
    "cudnn": partial(sdpa, backends=SDPBackend.CUDNN_ATTENTION),
    "flash2": partial(sdpa, backends=SDPBackend.FLASH_ATTENTION),
    "varlen_attn": varlen,
    "fa4": fa4,
    "fa4_deterministic": partial(fa4, deterministic=True),
    "flex": flex,
}
"""By way. `torch` is SDPA by the kernel that torch chooses."""
