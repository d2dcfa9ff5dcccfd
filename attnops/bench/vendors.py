"""The vendors' own calls of their kernels on the tensors of a call of ours, as their documentation has them.

Metadata of the batch alone is made beforehand, as an engine makes it once a step. Each function raises the errors of the vendor's package,
an ImportError if it is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import attnops.ops
from attnops.inputs import Call

Run = Callable[[], Any]
Make = Callable[[Call], Run]
WORKSPACE_BYTES = 128 << 20


def fa3_paged(call: Call) -> Run:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    a, out = call.arguments, torch.empty_like(call.arguments["output"])
    return lambda: flash_attn_with_kvcache(
        a["query"], a["k_pages"], a["v_pages"], cache_seqlens=a["seq_lens"], page_table=a["page_table"], cu_seqlens_q=a["cu_seqlens_q"],
        max_seqlen_q=a["max_seqlen_q"], softmax_scale=a["scale"], causal=a["causal"], out=out,
    )  # fmt: skip


def fa3_dense(call: Call) -> Run:
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    a = call.arguments
    query, key, value = (a[n] for n in ("query", "key", "value"))
    if call.op == "varlen_attention":
        lengths = tuple(a[n] for n in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"))
    else:
        (batch, queries), keys = query.shape[:2], key.shape[1]
        ends = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        lengths = (ends * queries, ends * keys, queries, keys)
        query, key, value = (t.flatten(0, 1) for t in (query, key, value))
    return lambda: flash_attn_varlen_func(query, key, value, *lengths, softmax_scale=a["scale"], causal=a["causal"])


def _mla_query(a: Any) -> torch.Tensor:
    return torch.cat([a["q_nope"], a["q_pe"]], -1)[:, None]


def flashmla(call: Call) -> Run:
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    a, query, pages = call.arguments, _mla_query(call.arguments), call.arguments["latent_pages"][:, :, None]
    tiles, splits = get_mla_metadata(a["seq_lens"], query.shape[2], 1)
    return lambda: flash_mla_with_kvcache(
        query, pages, a["page_table"], a["seq_lens"], 512, tiles, splits, softmax_scale=a["scale"], causal=False
    )  # fmt: skip


def flashmla_with_metadata(call: Call) -> Run:
    import sgl_kernel.flash_mla  # noqa: F401, loads the ops

    a, query, pages = call.arguments, _mla_query(call.arguments), call.arguments["latent_pages"][:, :, None]
    op = torch.ops.sgl_kernel.dense_decode_fwd.default
    return lambda: op(query, pages, 512, a["seq_lens"], a["page_table"], a["scale"], False, None, None)


def _float8(call: Call) -> tuple[Callable[[], tuple[torch.Tensor, torch.Tensor]], Callable[..., Any]]:
    """(its metadata, the call of them) of FlashMLA's dense decode in float8, as `sgl_kernel.flash_mla` calls its ops."""
    import sgl_kernel.flash_mla  # noqa: F401, loads the ops

    a, ops = call.arguments, torch.ops.sgl_kernel
    heads, pages = a["q_nope"].shape[1], a["latent_pages"][:, :, None]
    query = torch.cat([a[n].view(torch.uint8) for n in ("q_nope", "q_pe")], -1).view(pages.dtype)[:, None]
    given = (query, pages, 512, a["seq_lens"], a["page_table"], a["scale"], False)
    return (
        lambda: ops.get_mla_decoding_metadata_dense_fp8(a["seq_lens"], heads, 1),
        lambda tiles, splits: ops.fwd_kvcache_mla_fp8(*given, tiles, splits, a["q_scale"], a["kv_scale"]),
    )


def flashmla_fp8(call: Call) -> Run:
    metadata, run = _float8(call)
    made = metadata()
    return lambda: run(*made)


def flashmla_fp8_with_metadata(call: Call) -> Run:
    metadata, run = _float8(call)
    return lambda: run(*metadata())


def _sides(call: Call) -> tuple[torch.Tensor, ...]:
    return tuple(call.arguments[n] for n in ("output_a", "lse_a", "output_b", "lse_b"))


def sgl_merge(call: Call) -> Run:
    import sgl_kernel  # noqa: F401, loads the ops

    sides = _sides(call)
    return lambda: torch.ops.sgl_kernel.merge_state_v2(*sides, torch.empty_like(sides[0]), torch.empty_like(sides[1]))


def flashinfer_merge(call: Call) -> Run:
    """Its logs are of base 2: the same work, other numbers."""
    from flashinfer import merge_state

    sides = _sides(call)
    return lambda: merge_state(*sides)


def _rows(a: Any, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    indptr, indices, last = attnops.ops.kv_indices(a["page_table"], a["seq_lens"], page_size=page)
    return indptr, indices[: int(indptr[-1])], last


def flashinfer_decode(tensor_cores: bool) -> Make:
    def make(call: Call) -> Run:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        a, q, pages = call.arguments, call.arguments["query"], (call.arguments["k_pages"], call.arguments["v_pages"])
        space = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=tensor_cores)
        _, page, kv_heads, dim = pages[0].shape
        wrapper.plan(
            *_rows(a, page), q.shape[1], kv_heads, dim, page, q_data_type=q.dtype, kv_data_type=q.dtype, sm_scale=a["scale"]
        )  # fmt: skip
        out = torch.empty_like(a["output"])
        return lambda: wrapper.run(q, pages, out=out)

    return make


def flashinfer_prefill(backend: str) -> Make:
    def make(call: Call) -> Run:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        a, q, pages = call.arguments, call.arguments["query"], (call.arguments["k_pages"], call.arguments["v_pages"])
        space = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=backend)
        _, page, kv_heads, dim = pages[0].shape
        wrapper.plan(
            a["cu_seqlens_q"], *_rows(a, page), q.shape[1], kv_heads, dim, page, causal=a["causal"], sm_scale=a["scale"],
            q_data_type=q.dtype, kv_data_type=q.dtype,
        )  # fmt: skip
        out = torch.empty_like(a["output"])
        return lambda: wrapper.run(q, pages, out=out)

    return make


def flashinfer_mla(backend: str) -> Make:
    def make(call: Call) -> Run:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        a, pages = call.arguments, call.arguments["latent_pages"]
        space = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pages.device)
        wrapper = BatchMLAPagedAttentionWrapper(space, backend=backend)
        indptr, indices, _ = _rows(a, pages.shape[1])
        wrapper.plan(
            qo_indptr=a["cu_seqlens_q"], kv_indptr=indptr, kv_indices=indices, kv_len_arr=a["seq_lens"], num_heads=a["q_nope"].shape[1],
            head_dim_ckv=512, head_dim_kpe=64, page_size=pages.shape[1], causal=False, sm_scale=a["scale"], q_data_type=pages.dtype,
            kv_data_type=pages.dtype,
        )  # fmt: skip
        out = torch.empty_like(a["output"])
        query, cache = (a["q_nope"], a["q_pe"]), (pages[..., :512], pages[..., 512:])
        return lambda: wrapper.run(query=query, kv_cache=cache, out=out)

    return make


DECODE: dict[str, Make] = {
    "fa3": fa3_paged,
    "flashinfer_cuda_cores": flashinfer_decode(False),
    "flashinfer_tensor_cores": flashinfer_decode(True),
}
EXTEND: dict[str, Make] = {"fa3": fa3_paged, "flashinfer_fa2": flashinfer_prefill("fa2"), "flashinfer_fa3": flashinfer_prefill("fa3")}
PREFILL: dict[str, Make] = {"fa3": fa3_dense}
LATENT: dict[str, Make] = {
    "flashmla": flashmla,
    "flashmla_with_metadata": flashmla_with_metadata,
    "flashinfer_fa2": flashinfer_mla("fa2"),
    "flashinfer_fa3": flashinfer_mla("fa3"),
}
FLOAT8_LATENT: dict[str, Make] = {"flashmla_fp8": flashmla_fp8, "flashmla_fp8_with_metadata": flashmla_fp8_with_metadata}
MERGE: dict[str, Make] = {"sgl_merge": sgl_merge, "flashinfer_merge": flashinfer_merge}
OTHER = {"window_left", "window_right", "softcap", "sinks", "k_scale", "v_scale", "kv_scale"}
"""Arguments that these calls do not support."""

LEFT_OUT = {"flashinfer_cuda_cores", "flashmla_with_metadata"}
"""One builds a module that no kernel of ours shares; the other differs from `flashmla` in its metadata alone."""


def vendors_of(call: Call) -> dict[str, Make]:
    """The vendors' calls beside which a call of ours is measured, by name. FlashInfer's of prompts over pages: its backend fa2 alone."""
    a, found = call.arguments, dict[str, Make]()
    if OTHER & a.keys():
        return found
    match call.op:
        case "attention" | "varlen_attention":
            found = PREFILL
        case "paged_attention" if a["k_pages"].dtype == a["query"].dtype:
            found = DECODE if a["max_seqlen_q"] == 1 else {n: EXTEND[n] for n in ("fa3", "flashinfer_fa2")}
        case "mla_attention" if a["latent_pages"].dtype == a["q_nope"].dtype:
            found = LATENT
    return {f"direct.{name}": make for name, make in found.items() if name not in LEFT_OUT}
