"""A stand-in for `trtllm_batch_decode_with_kv_cache_mla` of flashinfer 0.7.2.post1 with
`backend="trtllm-gen"`. Not the kernel.

The same parameters, refusals in the package's words and shape rules, over a float32 body on the
CPU. What the real kernel takes on trust is asserted; counters must be zero at every call, the
scratch is soiled, a row without keys gives NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.standins.checks import ALL, architecture, check, laid_out
from tests.standins.flashinfer_trtllm import (
    E4M3,
    F32,
    I32,
    SM_COUNT,
    Called,
    _function,
    _keys,
    _number,
    _soil,
    _trust,
    counter_bytes,
    stats_bytes,
)
from tests.standins.libraries import packages

NAME = "trtllm_batch_decode_with_kv_cache_mla"
SIGNATURE = (
    "query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, "
    "block_tables, seq_lens, max_seq_len, "
    "sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, "
    "skip_softmax_threshold_scale_factor=None, "
    "enable_pdl=None, backend='auto', is_var_seq=True, uses_shared_paged_kv_idx=True, lse=None, "
    "return_lse=False, "
    "cute_dsl_impl='auto', kv_scale_format='auto', cum_seq_lens_q=None, max_q_len=None, "
    "multi_ctas_kv_counter_buffer=None, "
    "sparse_mla_top_k_lens=None, enable_dcp=False, cp_world=1, cp_rank=0, "
    "causal_seqlens_kv_global=None, use_fp16_softmax=None, "
    "return_lse_base=None"
)
"""Read from the package's source; annotations left out."""


def _decode(**a: Any) -> Any:
    query, pages, out, lse, table, lens = (
        a[n] for n in ("query", "kv_cache", "out", "lse", "block_tables", "seq_lens")
    )
    base, sinks = a["return_lse_base"], a["sinks"]
    check(
        base in ("basee", "base2", None),
        f"return_lse_base must be 'basee', 'base2', or None; got {base!r}",
        ValueError,
    )
    for name in ("bmm1_scale", "bmm2_scale"):
        if isinstance(a[name], Tensor):
            check(a[name].dtype == F32, f"{name} tensor must have dtype torch.float32", TypeError)
    assert (
        a["backend"] == "trtllm-gen"
        and a["sparse_mla_top_k"] == 0
        and a["cum_seq_lens_q"] is None
        and a["max_q_len"] is None
    )
    counters = a["multi_ctas_kv_counter_buffer"]
    needed = counter_bytes(query.shape[0] * query.shape[2])
    s = laid_out(
        sizes={"needed": needed},
        query=(query, "batch, 1, heads, 576", (torch.bfloat16, E4M3), ALL),
        kv_cache=(pages, "pages, page, 576", query.dtype, ALL),
        out=(out, "batch, 1, heads, 512", torch.bfloat16, ALL),
        lse=(lse if a["return_lse"] else None, "batch, heads", F32, ""),
        block_tables=(table, "batch, columns", I32, ALL),
        seq_lens=(lens, "batch", I32, ALL),
        sinks=(sinks, "heads", F32, ""),
        counters=(counters, ">= needed", torch.uint8, ""),
    )
    batch = s.batch
    heads = s.heads
    page = s.page
    latent = a["kv_lora_rank"]
    rope = a["qk_rope_head_dim"]
    text = (
        f"trtllm-gen MLA decode does not support 64 < num_heads_q < 128; got num_heads_q={heads}. "
    )
    check(not 64 < heads < 128, text, ValueError)
    check(page in (32, 64), f"trtllm-gen requires block_size in (32, 64), got {page}", ValueError)
    check(
        (latent, rope) == (512, 64),
        f"Unsupported MLA dimensions, got kv_lora_rank={latent} and qk_rope_head_dim={rope}",
        ValueError,
    )
    check(architecture() in (100, 103), "Missing TRTLLM-GEN kernel (decode)")
    _trust(heads <= 64 or heads == 128, "heads it has no kernel for")
    _trust(
        table.shape[1] % (128 // page) == 0 and a["max_seq_len"] == table.shape[1] * page,
        "a table of whole tiles",
    )
    _trust(
        bool((lens > 0).all()) and bool((table >= 0).all()),
        "requests without keys, pages that are none",
    )
    _trust(not (a["return_lse"] and sinks is not None), "whether lse holds the sinks")
    stats = stats_bytes(heads, batch, 1) if a["return_lse"] else 0
    _soil(counters, a["workspace_buffer"], needed, stats + SM_COUNT * 256 * (2 * 512 + 8))
    scale, v_scale = _number(a["bmm1_scale"]), _number(a["bmm2_scale"])
    out.fill_(float("nan"))
    for b, length in enumerate(lens.tolist()):
        keys = _keys(pages[:, :, None], table[b], length)[:, 0].float()
        logits = query[b, 0].float() @ keys.T * scale
        total = torch.logsumexp(logits, -1)
        whole = total if sinks is None else torch.logaddexp(total, sinks)
        weights = torch.exp(logits - whole[:, None])
        if pages.dtype == E4M3:
            top = weights.amax(-1, keepdim=True)
            weights = (weights / top).to(E4M3).float() * top
        out[b, 0] = (weights @ keys[:, :512] * v_scale).to(out.dtype)
        if a["return_lse"]:
            lse.view(batch, heads)[b] = total / (
                1.0 if base == "basee" else torch.log(torch.tensor(2.0))
            )
    return (out, lse) if a["return_lse"] else out


@contextmanager
def installed() -> Iterator[Called]:
    """`from flashinfer.mla import ...` finds the stand-in within the block; yields the calls, each
    with its arguments by name."""
    calls: Called = []
    with packages({f"flashinfer.mla.{NAME}": _function(NAME, SIGNATURE, _decode, calls)}):
        yield calls
