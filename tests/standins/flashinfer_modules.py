"""Stand-ins for FlashInfer's JIT modules (flashinfer-python 0.7.2.post1): not the kernels.

The functions of `get_batch_decode_module`, `get_batch_prefill_module` and the attention-sink module
with their parameters, argument checks and planners, over a plain torch body on the CPU. The
planners take from their workspaces what scheduler.cuh takes and fail where it fails. A run reads
nothing but its arguments: which keys, from the tables and from what the plan left in the int
workspace. That a tensor is on CUDA is the one thing they do not check.
"""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from attnops.core.problem import Target
from tests.standins.body import attend, capped, logits_of, visible
from tests.standins.checks import ALL, LAST, check, laid_out
from tests.standins.flashinfer_folder import keep
from tests.standins.flashinfer_planners import (
    CALLS,
    HALVES,
    I32,
    decode_plan,
    fa2_plan,
    fa3_plan,
    ints_at,
    raw,
)
from tests.standins.libraries import packages

TILE = 128
BUILT: list[tuple[Any, ...]] = []
"""The modules built, in order."""


def launched(enable_pdl: bool, q: torch.Tensor) -> None:
    """The wrappers' own default, `device_support_pdl`: refused before SM90, and a merge that begins
    late without it from there on."""
    check(
        enable_pdl == (Target.of(q.device).arch >= 90),
        "programmatic dependent launch, from SM90 on",
    )


# Decode on CUDA cores -----------------------------------------------------------------------------


def decode_run(
    float_workspace_buffer,
    int_workspace_buffer,
    plan_info_vec,
    q,
    paged_k_cache,
    paged_v_cache,
    paged_kv_indptr,
    paged_kv_indices,
    paged_kv_last_page_len,
    o,
    maybe_lse,
    kv_layout_code,
    window_left,
    enable_pdl,
    alibi_slopes,
    logits_soft_cap,
    sm_scale,
    rope_scale,
    rope_theta,
    *,
    module,
):
    CALLS.append("decode.run")
    launched(enable_pdl, q)
    check(
        len(plan_info_vec) == 10,
        f"DecodePlanInfo::FromVector: vec.size() should be 10, but got {len(plan_info_vec)}",
    )
    check(paged_k_cache.stride() == paged_v_cache.stride(), "K/V strides differ")
    check(
        alibi_slopes is None and rope_scale == 1.0 and kv_layout_code == 0,
        "this stand-in has none of these",
    )
    padded, split = plan_info_vec[0], plan_info_vec[9]
    count = (
        int(raw(int_workspace_buffer)[plan_info_vec[6] : plan_info_vec[6] + padded].sum())
        if split
        else padded
    )
    rows = set(ints_at(int_workspace_buffer, plan_info_vec[3], count).tolist())
    check(rows == set(range(q.shape[0])), "the plan covers every row, and no other")
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    body(
        module,
        q,
        paged_k_cache,
        paged_v_cache,
        starts,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        o,
        maybe_lse,
        False,
        window_left,
        logits_soft_cap,
        sm_scale,
        None,
    )


# Prefill ------------------------------------------------------------------------------------------


def paged_run(
    float_workspace_buffer,
    int_workspace_buffer,
    plan_info_vec,
    q,
    paged_k_cache,
    paged_v_cache,
    qo_indptr,
    paged_kv_indptr,
    paged_kv_indices,
    paged_kv_last_page_len,
    o,
    maybe_lse,
    mask_mode,
    layout,
    window_left,
    enable_pdl,
    maybe_custom_mask,
    maybe_mask_indptr,
    maybe_alibi_slopes,
    maybe_prefix_len_ptr,
    maybe_token_pos_in_items_ptr,
    maybe_max_item_len_ptr,
    logits_soft_cap,
    sm_scale,
    scale_q,
    scale_k,
    scale_v,
    rope_scale,
    rope_theta,
    token_pos_in_items_len,
    workspace_size,
    num_qo_heads=None,
    num_kv_heads=None,
    block_tables=None,
    kv_lens_buffer=None,
    page_size=None,
    max_q_len=None,
    max_kv_len=None,
    batch_size=None,
    cum_seq_lens_q=None,
    cum_seq_lens_kv=None,
    sinks=None,
    key_block_scales=None,
    value_block_scales=None,
    skip_softmax_threshold_scale_factor=None,
    uses_shared_paged_kv_idx=True,
    use_fp16_softmax=None,
    uses_spcompress=None,
    multi_ctas_kv_counter_buffer=None,
    *,
    module,
):
    check(
        maybe_custom_mask is None
        and maybe_alibi_slopes is None
        and scale_v is None
        and rope_scale == 1.0,
        "not in this stand-in",
    )
    check(sinks is None, "the real function ignores sinks in silence")
    CALLS.append(f"{module.backend}.paged_run")
    launched(enable_pdl, q)
    check(not (module.backend == "fa2" and q.dtype.itemsize == 1), "fp8 query")
    covered(
        module,
        int_workspace_buffer,
        plan_info_vec,
        q,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_last_page_len,
        paged_k_cache,
    )
    if module.backend == "fa3":
        check(
            q.shape[2] == paged_v_cache.shape[3],
            "cudaErrorNotSupported: paged fa3 with unlike head dims",
        )
        check(
            paged_k_cache.stride()[:2] == paged_v_cache.stride()[:2],
            "K and V must have same page stride for sparse attention",
        )
    body(
        module,
        q,
        paged_k_cache,
        paged_v_cache,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        o,
        maybe_lse,
        mask_mode == 1,
        window_left,
        logits_soft_cap,
        sm_scale,
        None,
    )


def sink_paged_run(
    float_workspace_buffer,
    int_workspace_buffer,
    plan_info_vec,
    q,
    paged_k_cache,
    paged_v_cache,
    qo_indptr,
    paged_kv_indptr,
    paged_kv_indices,
    paged_kv_last_page_len,
    o,
    maybe_lse,
    mask_mode_code,
    layout,
    window_left,
    enable_pdl,
    sink,
    sm_scale,
    *,
    module,
):
    CALLS.append(f"{module.backend}.sink_paged_run")
    launched(enable_pdl, q)
    covered(
        module,
        int_workspace_buffer,
        plan_info_vec,
        q,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_last_page_len,
        paged_k_cache,
    )
    body(
        module,
        q,
        paged_k_cache,
        paged_v_cache,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        o,
        maybe_lse,
        mask_mode_code == 1,
        window_left,
        0.0,
        sm_scale,
        sink,
    )


def ragged_run(
    float_workspace_buffer,
    int_workspace_buffer,
    plan_info_vec,
    q,
    k,
    v,
    qo_indptr,
    kv_indptr,
    o,
    maybe_lse,
    mask_mode,
    layout,
    window_left,
    enable_pdl,
    maybe_custom_mask,
    maybe_mask_indptr,
    maybe_alibi_slopes,
    maybe_prefix_len_ptr,
    maybe_token_pos_in_items_ptr,
    maybe_max_item_len_ptr,
    logits_soft_cap,
    sm_scale,
    rope_scale,
    rope_theta,
    token_pos_in_items_len,
    maybe_k_cache_sf=None,
    maybe_v_cache_sf=None,
    scale_q=None,
    scale_k=None,
    scale_v=None,
    *,
    module,
):
    check(
        maybe_custom_mask is None
        and maybe_alibi_slopes is None
        and scale_v is None
        and rope_scale == 1.0,
        "not in this stand-in",
    )
    CALLS.append(f"{module.backend}.ragged_run")
    launched(enable_pdl, q)
    packed(
        module,
        int_workspace_buffer,
        plan_info_vec,
        q,
        k,
        v,
        qo_indptr,
        kv_indptr,
        o,
        maybe_lse,
        mask_mode == 1,
        window_left,
        logits_soft_cap,
        sm_scale,
        None,
    )


def sink_ragged_run(
    float_workspace_buffer,
    int_workspace_buffer,
    plan_info_vec,
    q,
    k,
    v,
    qo_indptr,
    kv_indptr,
    o,
    maybe_lse,
    mask_mode_code,
    layout,
    window_left,
    enable_pdl,
    sink,
    sm_scale,
    *,
    module,
):
    CALLS.append(f"{module.backend}.sink_ragged_run")
    launched(enable_pdl, q)
    packed(
        module,
        int_workspace_buffer,
        plan_info_vec,
        q,
        k,
        v,
        qo_indptr,
        kv_indptr,
        o,
        maybe_lse,
        mask_mode_code == 1,
        window_left,
        0.0,
        sm_scale,
        sink,
    )


def packed(
    module,
    ints,
    info,
    q,
    k,
    v,
    starts,
    kv_indptr,
    o,
    lse,
    causal,
    window_left,
    softcap,
    scale,
    sink,
) -> None:
    """Packed keys are pages of one token, in order. FA3's loads of values by TMA take whole tiles,
    NaN of other requests with them."""
    check(k.shape[0] > 0, "CUDA error: a tensor map of no rows")
    pages, values = k[:, None], v[:, None]
    last = (kv_indptr.diff() > 0).int()
    covered(module, ints, info, q, starts, kv_indptr, last, pages)
    order = torch.arange(k.shape[0], dtype=torch.int32)
    q_lens, k_lens = starts.diff().tolist(), kv_indptr.diff().tolist()
    check(
        module.backend == "fa3"
        or not causal
        or all(n <= m or m == 0 for n, m in zip(q_lens, k_lens, strict=True)),
        "FA2 is wrong here",
    )
    body(
        module,
        q,
        pages,
        values,
        starts,
        kv_indptr,
        order,
        last,
        o,
        lse,
        causal,
        window_left,
        softcap,
        scale,
        sink,
    )
    for b, length in enumerate(k_lens if module.backend == "fa3" else []):
        tile = v[int(kv_indptr[b]) : int(kv_indptr[b]) + -(-length // TILE) * TILE]
        if length and tile.isnan().any():
            o[int(starts[b]) : int(starts[b + 1])] = float("nan")


def covered(module, ints, info, q, qo_indptr, kv_indptr, last, pages) -> None:
    """Check that what the plan left in the int workspace is for these tables."""
    q_lens, page = qo_indptr.diff().tolist(), pages.shape[1]
    if module.backend == "fa2":
        check(
            len(info) == 15,
            f"PrefillPlanInfo::FromVector: vec.size() should be 15, but got {len(info)}",
        )
        count = int(raw(ints)[info[12] : info[12] + info[0]].sum())
        rows = ints_at(ints, info[4], count).tolist()
        check(set(rows) == {b for b, n in enumerate(q_lens) if n}, "the plan is for other queries")
        check(
            ints_at(ints, info[8], len(q_lens) + 1).equal(qo_indptr),
            "the plan is for other query starts",
        )
        return
    check(
        len(info) == 9,
        f"PrefillPlanSM90Info::FromVector: vec.size() should be 9, but got {len(info)}",
    )
    count = int(ints_at(ints, info[6], 1))
    rows = ints_at(ints, info[7], count).tolist()
    check(set(rows) == {b for b, n in enumerate(q_lens) if n}, "the plan is for other queries")
    keys = [
        0 if n == 0 else (n - 1) * page + int(last[b])
        for b, n in enumerate(kv_indptr.diff().tolist())
    ]
    check(
        ints_at(ints, info[4], count).tolist() == [keys[b] for b in rows],
        "the plan is for other lengths",
    )
    check(
        ints_at(ints, info[2], count).tolist() == [int(kv_indptr[b]) for b in rows],
        "the plan is for other pages",
    )


def body(
    module,
    q,
    k,
    v,
    starts,
    kv_indptr,
    kv_indices,
    last,
    o,
    lse,
    causal,
    window_left,
    softcap,
    scale,
    sink,
) -> None:
    """Attention of every request over its own keys alone; lse of base 2. Rows past the last request
    are left as they are."""
    laid_out(
        sizes={"dim": module.head_dim_qk, "dv": module.head_dim_vo},
        q=(q, "tokens, heads, dim", module.dtype, LAST),
        k=(k, "pages, page, kv_heads, dim", module.kv_dtype, LAST),
        v=(v, "pages, page, kv_heads, dv", module.kv_dtype, LAST),
        o=(o, "tokens, heads, dv", module.dtype, ALL),
        lse=(lse, "tokens, heads", torch.float32, ALL),
        qo_indptr=(starts, "starts", I32, ALL),
        kv_indptr=(kv_indptr, "firsts", I32, ALL),
        kv_indices=(kv_indices, "slots", I32, ALL),
        last_page_len=(last, "requests", I32, ALL),
        sink=(sink, "heads", torch.float32, ALL),
    )
    check((window_left >= 0) == module.windowed or sink is not None, "window of the module")
    check((softcap > 0) == module.softcap, "softcap of the module")
    check(
        not (q.requires_grad or k.requires_grad or v.requires_grad),
        "Can't export tensors that require gradient, use tensor.detach()",
    )
    page = k.shape[1]
    for b in range(starts.numel() - 1):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        ids = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].long()
        check(
            bool(((ids >= 0) & (ids < k.shape[0])).all()),
            "CUDA error: an illegal memory access was encountered",
        )
        keys = (len(ids) - 1) * page + int(last[b]) if len(ids) else 0
        kk, vv = (x[ids].flatten(0, 1)[:keys] for x in (k, v))
        see = visible(rows.stop - rows.start, keys, keys, window_left, 0 if causal else -1)
        logits = capped(logits_of(q[rows], kk, scale), softcap).masked_fill(~see, float("-inf"))
        found, alone, total = attend(q[rows], vv, logits, sink)
        o[rows] = found.to(o.dtype)
        if lse is not None:
            lse[rows] = (total if keys or module.backend == "fa2" else alone).T / math.log(2.0)


# The modules --------------------------------------------------------------------------------------


def _module(
    backend,
    dtype,
    kv_dtype,
    out_dtype,
    id_dtype,
    head_dim_qk,
    head_dim_vo,
    posenc,
    windowed,
    softcap,
    **functions,
):
    check(
        dtype in HALVES and out_dtype == dtype and id_dtype == torch.int32 and posenc == 0,
        "not in this stand-in",
    )
    about = SimpleNamespace(
        backend=backend,
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        windowed=windowed,
        softcap=softcap,
    )
    BUILT.append(
        (backend, dtype, kv_dtype, head_dim_qk, head_dim_vo, windowed, softcap, *sorted(functions))
    )
    name = _name(about, sink_paged_run in functions.values(), backend == "decode")
    keep(name)
    plan = {"decode": decode_plan, "fa2": fa2_plan, "fa3": fa3_plan}[backend]
    runs = {n: functools.partial(f, module=about) for n, f in functions.items()}
    return SimpleNamespace(name=name, plan=plan, **runs)


def _name(m: SimpleNamespace, sinks: bool, decode: bool) -> str:
    """As get_batch_decode_uri and its fellows make it (flashinfer/jit/attention/modules.py)."""
    short = {torch.float16: "f16", torch.bfloat16: "bf16"}[m.dtype]
    dims = f"head_dim_qk_{m.head_dim_qk}_head_dim_vo_{m.head_dim_vo}"
    types = f"dtype_q_{short}_dtype_kv_{short}_dtype_o_{short}_dtype_idx_i32_{dims}"
    sm90 = "_sm90" * (m.backend == "fa3")
    flags = f"posenc_0_use_swa_{m.windowed}_use_logits_cap_{m.softcap}"
    if decode:
        return f"batch_decode_with_kv_cache_{types}_{flags}"
    if sinks:
        return f"batch_prefill_with_attention_sink_kv_cache_{types}_use_swa_{m.windowed}_{sm90}"
    equal = "_kv_stride_equal" * (m.backend == "fa2")
    return f"batch_prefill_with_kv_cache_{types}_{flags}_f16qk_False{sm90}{equal}"


@functools.cache
def get_batch_decode_module(*args):
    check(len(args) == 9, "batch decode modules have nine parameters")
    check(args[4] == args[5] and args[4] in (64, 128, 256, 512), f"head_dim {args[4]}, {args[5]}")
    return _module("decode", *args, run=decode_run)


@functools.cache
def get_batch_prefill_module(backend, *args):
    check(
        len(args) == 10 and args[-1] is False,
        "batch prefill modules have ten parameters besides the backend",
    )
    dims = (args[4], args[5])
    check(
        backend in ("fa2", "fa3") and dims in ((64, 64), (128, 128), (256, 256), (192, 128)),
        f"{backend} {dims}",
    )
    found = _module(backend, *args[:-1], paged_run=paged_run, ragged_run=ragged_run)

    def prewarm(variant="independent"):
        CALLS.append(f"{backend}.prewarm")
        keep(found.name.removesuffix("_kv_stride_equal") + f"_paged_kv_stride_{variant}")

    found.prewarm_paged_kv_stride_variant = prewarm
    return found


def gen_batch_prefill_attention_sink_module(
    backend,
    dtype_q,
    dtype_kv,
    dtype_o,
    dtype_idx,
    head_dim_qk,
    head_dim_vo,
    pos_encoding_mode,
    use_sliding_window,
):
    check(backend in ("fa2", "fa3"), backend)
    given = (
        dtype_q,
        dtype_kv,
        dtype_o,
        dtype_idx,
        head_dim_qk,
        head_dim_vo,
        pos_encoding_mode,
        use_sliding_window,
        False,
    )
    return SimpleNamespace(
        build_and_load=lambda: _module(
            backend, *given, paged_run=sink_paged_run, ragged_run=sink_ragged_run
        )
    )


def forget() -> None:
    """No module is built, and nothing was called."""
    from attnops.kernels.flashinfer import modules as _flashinfer

    for cache in (_flashinfer.load, get_batch_decode_module, get_batch_prefill_module):
        cache.cache_clear()
    CALLS.clear()
    BUILT.clear()


@contextmanager
def installed() -> Iterator[list[str]]:
    """Within the block `import flashinfer` finds the stand-ins. Gives the record of calls."""
    sinks = "jit.attention.modules.gen_batch_prefill_attention_sink_module"
    functions = {
        "decode.get_batch_decode_module": get_batch_decode_module,
        "prefill.get_batch_prefill_module": get_batch_prefill_module,
        sinks: gen_batch_prefill_attention_sink_module,
    }
    forget()
    try:
        with packages({f"flashinfer.{path}": function for path, function in functions.items()}):
            yield CALLS
    finally:
        forget()
