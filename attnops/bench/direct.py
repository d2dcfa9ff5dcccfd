"""Attention of vendors, of torch and of others, called as their documentation has it on the tensors of a call of ours.

The functions of DIRECT give a function of trained tensors, the others a run. Metadata of the batch alone, such as plans and block masks,
is made beforehand, as an engine or a training loop makes it once a step. Each function returns None where its peer cannot answer the call,
and raises the errors of the peer's package, an ImportError if it is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attnops.ops
from attnops.bench import Setup
from attnops.bench.rows import Row
from attnops.kernels.sgl.sources import source
from attnops.testing.calls import Call
from attnops.tune.clock import Run

Inputs = Mapping[str, Tensor]
Attend = Callable[[Inputs], Tensor]
"""From query, key, value and perhaps sinks, laid out as in the op, to the output as the op has it."""
TENSORS = ("query", "key", "value")
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
        q, k, v = (given[n].transpose(1, 2) for n in TENSORS)
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
        q, k, v = ((given[n][None] if packed(call) else given[n]).transpose(1, 2) for n in TENSORS)
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
        found = function(*(given[n] for n in TENSORS), learnable_sink=given.get("sinks"), **options)
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
    window = {"window_size": (a.get("window_left", -1), 0 if a["causal"] else -1)}
    more: dict[str, Any] = window if "window_size" in known else {"is_causal": a["causal"]}
    if groups > 1 and "enable_gqa" in known:
        more, groups = more | {"enable_gqa": True}, 1
    if (groups > 1 and not repeat) or ("window_left" in a and "window_size" not in known):
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

Make = Callable[[Call], Run]


def fa3_paged(call: Call) -> Run:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    a, out = call.arguments, torch.empty_like(call.arguments["output"])
    return lambda: flash_attn_with_kvcache(
        a["query"], a["k_pages"], a["v_pages"], cache_seqlens=a["seq_lens"], page_table=a["page_table"], cu_seqlens_q=a["cu_seqlens_q"],
        max_seqlen_q=a["max_seqlen_q"], softmax_scale=a["scale"], causal=a["causal"], out=out,
    )  # fmt: skip


def joined(call: Call) -> Call:
    """A prompt as a call of `varlen_attention`: requests one after the other."""
    a = call.arguments
    if call.op == "varlen_attention":
        return call
    (batch, queries), keys = a["query"].shape[:2], a["key"].shape[1]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=a["query"].device)
    lengths = zip(LENGTHS, (ends * queries, ends * keys, queries, keys), strict=True)
    return Call("varlen_attention", {**a, **{n: a[n].flatten(0, 1) for n in TENSORS}, **dict(lengths)})


def fa3_dense(call: Call) -> Run:
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    a = joined(call).arguments
    given = [a[n] for n in (*TENSORS, *LENGTHS)]
    return partial(flash_attn_varlen_func, *given, softmax_scale=a["scale"], causal=a["causal"])


def latents(call: Call) -> tuple[Any, Tensor, Tensor]:
    """(arguments, query `[B, 1, H, D]` in one piece, pages with a key head)."""
    a = call.arguments
    query = torch.cat([a[n].view(torch.uint8) for n in ("q_nope", "q_pe")], -1).view(a["q_nope"].dtype)
    return a, query[:, None], a["latent_pages"][:, :, None]


def flashmla(call: Call) -> Run:
    (a, query, pages), ops = latents(call), source().ops
    heads = query.shape[2]
    metadata = ops.get_mla_decoding_metadata(a["seq_lens"], heads, 1, heads, False, None)
    given = (query, pages, 512, a["seq_lens"], a["page_table"], a["scale"], False, *metadata)
    return partial(ops.dense_decode_fwd, *given)


def flashmla_fp8(call: Call) -> Run:
    (a, query, pages), ops = latents(call), source().ops
    metadata = ops.get_mla_decoding_metadata_dense_fp8(a["seq_lens"], query.shape[2], 1)
    given = (query, pages, 512, a["seq_lens"], a["page_table"], a["scale"], False, *metadata, a["q_scale"], a["kv_scale"])
    return partial(ops.fwd_kvcache_mla_fp8, *given)


def _wrapped(make: Callable[[Tensor], Any], call: Call, pages: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
    """(FlashInfer's wrapper with a workspace; the ends, ids and last lengths of the requests' pages)."""
    a = call.arguments
    indptr, indices, last = attnops.ops.kv_indices(a["page_table"], a["seq_lens"], page_size=pages.shape[1])
    return make(torch.zeros(128 << 20, dtype=torch.uint8, device=pages.device)), indptr, indices[: int(indptr[-1])], last


def flashinfer_paged(call: Call, kind: str, **options: Any) -> Run:
    """FlashInfer's wrapper for pages of keys and values. kind: "Decode" or "Prefill". options: of its constructor."""
    import flashinfer

    a, q, pages = call.arguments, call.arguments["query"], (call.arguments["k_pages"], call.arguments["v_pages"])
    made = partial(getattr(flashinfer, f"Batch{kind}WithPagedKVCacheWrapper"), kv_layout="NHD", **options)
    wrapper, *rows = _wrapped(made, call, pages[0])
    queries, more = ((a["cu_seqlens_q"],), {"causal": a["causal"]}) if kind == "Prefill" else ((), {})
    _, page, kv_heads, dim = pages[0].shape
    given = (*queries, *rows, q.shape[1], kv_heads, dim, page)
    wrapper.plan(*given, sm_scale=a["scale"], q_data_type=q.dtype, kv_data_type=q.dtype, **more)
    return partial(wrapper.run, q, pages, out=torch.empty_like(a["output"]))


def flashinfer_mla(call: Call, backend: str) -> Run:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    a, pages = call.arguments, call.arguments["latent_pages"]
    wrapper, indptr, indices, _ = _wrapped(partial(BatchMLAPagedAttentionWrapper, backend=backend), call, pages)
    wrapper.plan(
        qo_indptr=a["cu_seqlens_q"], kv_indptr=indptr, kv_indices=indices, kv_len_arr=a["seq_lens"], num_heads=a["q_nope"].shape[1],
        head_dim_ckv=512, head_dim_kpe=64, page_size=pages.shape[1], causal=False, sm_scale=a["scale"], q_data_type=pages.dtype,
        kv_data_type=pages.dtype,
    )  # fmt: skip
    query, cache = (a["q_nope"], a["q_pe"]), (pages[..., :512], pages[..., 512:])
    return partial(wrapper.run, query=query, kv_cache=cache, out=torch.empty_like(a["output"]))


OWN = {
    "flashinfer": ("flashinfer_tensor_cores", "flashinfer_fa2", "flashinfer_fa3"),
    "flashinfer_mla_fa2": ("flashinfer_fa2",), "flashinfer_mla_fa3": ("flashinfer_fa3",),
}  # fmt: skip
"""By kernel, the vendor's calls that run the same device code; of other kernels, the call of the kernel's name."""
OTHER = {"window_left", "window_right", "softcap", "sinks", "k_scale", "v_scale"}  # arguments that these calls do not support


def vendors_of(call: Call) -> dict[str, Make]:
    """The vendors' calls beside which a call of ours is measured, by name."""
    a, found = call.arguments, dict[str, Make]()
    match call.op if not OTHER & a.keys() else "":
        case "attention" | "varlen_attention":
            found = {"fa3": fa3_dense}
        case "paged_attention" if a["k_pages"].dtype != a["query"].dtype:
            pass
        case "paged_attention" if a["max_seqlen_q"] == 1:
            found = {"fa3": fa3_paged, "flashinfer_tensor_cores": partial(flashinfer_paged, kind="Decode", use_tensor_cores=True)}
        case "paged_attention":
            prefill = partial(flashinfer_paged, kind="Prefill")
            found = {"fa3": fa3_paged, **{f"flashinfer_{name}": partial(prefill, backend=name) for name in ("fa2", "fa3")}}
        case "mla_attention" if "q_scale" in a:
            found = {"flashmla_fp8": flashmla_fp8}
        case "mla_attention" if a["latent_pages"].dtype == a["q_nope"].dtype:
            found = {"flashmla": flashmla, **{f"flashinfer_{name}": partial(flashinfer_mla, backend=name) for name in ("fa2", "fa3")}}
    return {f"direct.{name}": make for name, make in found.items()}


def own_calls(way: str) -> list[str]:
    """The vendors' calls of the device code of a kernel."""
    return [f"direct.{name}" for name in OWN.get(way, (way,))]


def with_direct(rows: list[Row], calls: Callable[[str], Iterable[str]]) -> list[Row]:
    """The rows, with `of_direct` in those of a way that has `calls`: the time of the fastest of these over its own."""
    us = {row["way"]: row["median_us"] for row in rows if "median_us" in row}
    for row in rows:
        best = min((us[name] for name in calls(row["way"]) if name in us), default=None)
        row |= {"of_direct": round(best / row["median_us"], 4)} if best and "median_us" in row else {}
    return rows


def dense(call: Call) -> Call | None:
    """As a call of `attention`: whole prompts, or steps, of one length. Pages are copied into a contiguous cache. None of other calls."""
    a = call.arguments
    if "q_nope" in a or "sinks" in a:
        return None
    tensors = [a[n] for n in TENSORS if n in a]
    if call.op == "paged_attention":
        table = a["page_table"].long()
        if a["k_pages"].dtype != a["query"].dtype or not bool((a["seq_lens"] == table.shape[1] * a["k_pages"].shape[1]).all()):
            return None
        pages = [a[n][table].flatten(1, 2).transpose(1, 2).contiguous().transpose(1, 2) for n in ("k_pages", "v_pages")]
        tensors = [a["query"].unflatten(0, (table.shape[0], -1)), *pages]
    elif call.op == "varlen_attention":
        tensors = [t.unflatten(0, (a["cu_seqlens_q"].shape[0] - 1, -1)) for t in tensors]
    if (new := tensors[0].shape[1]) not in (1, tensors[1].shape[1]):
        return None
    rules = {n: a[n] for n in RULES if n in a}
    return Call("attention", {**dict(zip(TENSORS, tensors, strict=True)), **rules, "causal": a["causal"] and new > 1})


TORCH: dict[str, tuple[Callable[[Call], Call | None], Callable[[Setup, Call], Attend | None]]] = {
    "torch.sdpa": (dense, sdpa), "torch.flex": (dense, flex), "torch.varlen": (joined, partial(varlen, repeat=False)),
}  # fmt: skip
"""torch's own calls: the form in which each takes a call of ours, and the function."""


def torch_call(name: str, setup: Setup, call: Call) -> Run | None:
    """That of TORCH, or None if it cannot answer: SDPA alone answers paged calls and decode, where flex needs options for splits."""
    form, make = TORCH[name]
    if name != "torch.sdpa" and (call.op not in ("attention", "varlen_attention") or call.arguments["query"].shape[-3] == 1):
        return None
    given = form(call)
    attend = None if given is None else make(setup, given)
    return None if given is None or attend is None else partial(attend, given.arguments)
