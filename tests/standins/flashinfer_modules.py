"""Stand-ins for FlashInfer's JIT modules (flashinfer-python 0.7.2.post1): not the kernels.

The functions of `get_batch_decode_module`, `get_batch_prefill_module` and the attention-sink module with their parameters, argument
checks and planners, over a plain torch body on the CPU. The planners take from their workspaces what scheduler.cuh takes and fail where
it fails. A run reads nothing but its arguments: which keys, from the tables and from what the plan left in the int workspace.
That a tensor is on CUDA is the one thing they do not check.
"""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from attnops.core.problem import Target
from tests.helpers import importable
from tests.standins.body import attend, capped, logits_of, visible
from tests.standins.checks import ALL, LAST, check, laid_out

SMS = 8
BLOCKS_PER_SM = 16
TILE = 128
HALVES, I32 = (torch.float16, torch.bfloat16), torch.int32


CALLS: list[str] = []
"""The functions called, in order: `decode.plan`, `fa2.paged_run` and so on."""
BUILT: list[tuple[Any, ...]] = []
"""The modules built, in order."""


class Allocator:
    """AlignedAllocator: hands out offsets of a buffer, whose address must be aligned."""

    def __init__(self, buffer: torch.Tensor) -> None:
        check(buffer.is_contiguous() and buffer.data_ptr() % 16 == 0, "the buffer is not aligned")
        self.room, self.used = buffer.nbytes, 0

    def take(self, size: int, alignment: int, name: str) -> int:
        start = -(-self.used // alignment) * alignment
        if start + size > self.room:
            raise RuntimeError(f"Buffer overflow when allocating memory for {name} with size {size} and alignment {alignment}")
        self.used = start + size
        return start


def raw(buffer: torch.Tensor) -> torch.Tensor:
    """Its bytes: a workspace may be of any dtype."""
    return buffer.view(torch.uint8)


def ints_at(buffer: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    return raw(buffer)[offset : offset + 4 * count].view(torch.int32)


def store(buffer: torch.Tensor, offset: int, values: list[int]) -> None:
    ints_at(buffer, offset, len(values)).copy_(torch.tensor(values, dtype=torch.int32))


def upload(ints: torch.Tensor, locked: torch.Tensor, size: int) -> None:
    """The copy of all that was taken, whatever the planner left unwritten in it."""
    check(locked.nbytes >= size, "the page-locked buffer is as large as the int workspace")
    raw(ints)[:size].copy_(raw(locked)[:size])


def launched(enable_pdl: bool, q: torch.Tensor) -> None:
    """The wrappers' own default, `device_support_pdl`: refused before SM90, and a merge that begins late without it from there on."""
    check(enable_pdl == (Target.of(q.device).arch >= 90), "programmatic dependent launch, from SM90 on")


def host_ints(batch: int, **given: tuple[torch.Tensor, str]) -> None:
    """Check int32 tensors of the host by name, each with its layout."""
    check(all(x.device.type == "cpu" for x, _ in given.values()), "the planner reads tensors of the host")
    laid_out(sizes={"batch": batch}, **{name: (x, dims, I32, ALL) for name, (x, dims) in given.items()})


# Decode on CUDA cores -------------------------------------------------------------------------------------------------


def decode_plan(
    float_workspace_buffer, int_workspace_buffer, page_locked_int_workspace_buffer, indptr, batch_size, num_qo_heads, num_kv_heads,
    page_size, enable_cuda_graph, window_left, logits_soft_cap, head_dim_qk, head_dim_vo, empty_q_data, empty_kv_data,
):  # fmt: skip
    CALLS.append("decode.plan")
    host_ints(batch_size, indptr=(indptr, "batch + 1"))
    check(head_dim_qk == head_dim_vo, "CUDA cores template only supports equal head dim for QK and VO")
    check(num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8, 16), f"Unsupported group_size: {num_qo_heads // num_kv_heads}")
    pages = indptr.diff().tolist()
    grid = BLOCKS_PER_SM * SMS
    split, chunk, total = False, max([1, *pages]), batch_size
    if batch_size * num_kv_heads < grid:
        low, high = max(128 // page_size, 1), max(pages)
        while low < high:
            mid = (low + high) // 2
            if sum(-(-n // mid) for n in pages) * num_kv_heads > grid:
                low = mid + 1
            else:
                high = mid
        chunk, total = low, sum(-(-max(n, 1) // low) for n in pages)
        split = enable_cuda_graph or total != batch_size
    padded = (grid // num_kv_heads if split else batch_size) if enable_cuda_graph else total
    ints, floats = Allocator(int_workspace_buffer), Allocator(float_workspace_buffer)
    rows = [b for b, n in enumerate(pages) for _ in range(-(-max(n, 1) // chunk))]
    at = [ints.take(4 * padded, 16, "request_indices"), ints.take(4 * padded, 16, "kv_tile_indices")]
    starts = ints.take(4 * (padded + 1), 16, "o_indptr")
    size = ints.take(4, 1, "kv_chunk_size_ptr")
    check(len(rows) <= padded, "more blocks than the launch has")
    store(page_locked_int_workspace_buffer, at[0], rows)
    v = s = mask = 0
    if split:
        v = floats.take(num_qo_heads * padded * head_dim_qk * 4, 16, "tmp_v")
        s = floats.take(num_qo_heads * padded * 4, 16, "tmp_s")
        mask = ints.take(padded, 16, "block_valid_mask")
        page_locked_int_workspace_buffer[mask : mask + padded] = (torch.arange(padded) < len(rows)).to(torch.uint8)
    upload(int_workspace_buffer, page_locked_int_workspace_buffer, ints.used)
    return [padded, v, s, *at, starts, mask, size, int(enable_cuda_graph), int(split)]


def decode_run(
    float_workspace_buffer, int_workspace_buffer, plan_info_vec, q, paged_k_cache, paged_v_cache, paged_kv_indptr, paged_kv_indices,
    paged_kv_last_page_len, o, maybe_lse, kv_layout_code, window_left, enable_pdl, alibi_slopes, logits_soft_cap, sm_scale, rope_scale,
    rope_theta, *, module,
):  # fmt: skip
    CALLS.append("decode.run")
    launched(enable_pdl, q)
    check(len(plan_info_vec) == 10, f"DecodePlanInfo::FromVector: vec.size() should be 10, but got {len(plan_info_vec)}")
    check(paged_k_cache.stride() == paged_v_cache.stride(), "K/V strides differ")
    check(alibi_slopes is None and rope_scale == 1.0 and kv_layout_code == 0, "this stand-in has none of these")
    padded, split = plan_info_vec[0], plan_info_vec[9]
    count = int(raw(int_workspace_buffer)[plan_info_vec[6] : plan_info_vec[6] + padded].sum()) if split else padded
    rows = set(ints_at(int_workspace_buffer, plan_info_vec[3], count).tolist())
    check(rows == set(range(q.shape[0])), "the plan covers every row, and no other")
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    body(
        module, q, paged_k_cache, paged_v_cache, starts, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, o, maybe_lse, False,
        window_left, logits_soft_cap, sm_scale, None,
    )  # fmt: skip


# Prefill --------------------------------------------------------------------------------------------------------------


def fa2_tile(packed: int, vo: int) -> int:
    """FA2DetermineCtaTileQ on SM80 and later, head dims up to 256."""
    if packed > 64 and vo < 256:
        return 128
    return 64 if packed > 16 else 16


def fa2_plan(
    float_workspace_buffer, int_workspace_buffer, page_locked_int_workspace_buffer, qo_indptr, kv_indptr, kv_len_arr, total_num_rows,
    batch_size, num_qo_heads, num_kv_heads, page_size, enable_cuda_graph, head_dim_qk, head_dim_vo, causal, window_left,
    fixed_split_size, disable_split_kv, num_colocated_ctas=0, uniform_q_len=0,
):  # fmt: skip
    CALLS.append("fa2.plan")
    host_ints(batch_size, qo_indptr=(qo_indptr, "batch + 1"), kv_indptr=(kv_indptr, "batch + 1"), kv_len_arr=(kv_len_arr, "batch"))
    check(enable_cuda_graph and fixed_split_size == -1 and num_colocated_ctas == 0, "this stand-in plans for CUDA graphs")
    group, cap = num_qo_heads // num_kv_heads, 2 * SMS // num_kv_heads
    packed, pages = [n * group for n in qo_indptr.diff().tolist()], kv_indptr.diff().tolist()
    check(min(packed) >= 0 and min(pages) >= 0, "indptr should be non-negative")
    if uniform_q_len:
        check(all(n == uniform_q_len * group for n in packed), "uniform_q_len is not what qo_indptr gives")
        tile = fa2_tile(uniform_q_len * group, head_dim_vo)
        tiles = batch_size * -(-uniform_q_len * group // tile)
    else:
        tile = fa2_tile((total_num_rows - batch_size + 1) % 2**32 * group, head_dim_vo)
        tiles = -(-total_num_rows * group // tile) + batch_size - 1
    seen = [min(-(-(window_left + tile) // page_size), n) if window_left >= 0 else n for n in pages]
    chunk, split = 2**62, False
    if not disable_split_kv:
        low, high = max(128 // page_size, 1), max([1, *seen])
        while low < high:
            mid = (low + high) // 2
            if sum(-(-p // tile) * -(-max(n, 1) // mid) for p, n in zip(packed, seen, strict=True)) > cap:
                low = mid + 1
            else:
                high = mid
        chunk, split = low, True
    rows, parts = [], 0
    for b, (p, n) in enumerate(zip(packed, seen, strict=True)):
        chunks = 1 if disable_split_kv else -(-max(n, 1) // chunk)
        rows += [b] * (-(-p // tile) * chunks)
        parts += p // group * chunks
    padded = max(cap, tiles)
    check(len(rows) <= padded, "new batch size should not exceed padded batch size")
    check(qo_indptr[-1] <= total_num_rows, "more rows than planned for")
    ints, floats = Allocator(int_workspace_buffer), Allocator(float_workspace_buffer)
    at = [ints.take(4 * padded, 16, name) for name in ("request_indices", "qo_tile_indices", "kv_tile_indices")]
    starts = ints.take(4 * (batch_size + 1), 16, "o_indptr")
    size = ints.take(4, 1, "kv_chunk_size_ptr")
    total = ints.take(4, 16, "total_num_rows")
    v = s = merge = 0
    if split:
        most = -(-padded * tile // group)
        check(parts <= most, "batch_prefill partial outputs need more rows than the plan reserved")
        v = floats.take(num_qo_heads * most * head_dim_vo * 4, 16, "tmp_v")
        s = floats.take(num_qo_heads * most * 4, 16, "tmp_s")
        merge = ints.take(4 * (total_num_rows + 1), 16, "merge_indptr")
    mask = ints.take(padded, 16, "block_valid_mask")
    locked = page_locked_int_workspace_buffer
    store(locked, at[0], rows)
    store(locked, starts, qo_indptr.tolist())
    store(locked, total, [int(qo_indptr[-1])])
    locked[mask : mask + padded] = (torch.arange(padded) < len(rows)).to(torch.uint8)
    upload(int_workspace_buffer, locked, ints.used)
    return [padded, total_num_rows, total, tile, *at, merge, starts, size, v, s, mask, 1, int(split)]


def fa3_plan(
    float_workspace_buffer, int_workspace_buffer, page_locked_int_workspace_buffer, qo_indptr, kv_indptr, kv_len_arr, total_num_rows,
    batch_size, num_qo_heads, num_kv_heads, page_size, enable_cuda_graph, head_dim_qk, head_dim_vo, causal, window_left,
):  # fmt: skip
    CALLS.append("fa3.plan")
    host_ints(batch_size, qo_indptr=(qo_indptr, "batch + 1"), kv_indptr=(kv_indptr, "batch + 1"), kv_len_arr=(kv_len_arr, "batch"))
    check(enable_cuda_graph, "this stand-in plans for CUDA graphs")
    tile = 192 if head_dim_vo == 64 else 128
    per_head = -(-total_num_rows // tile) + batch_size - 1
    same = per_head > 4096
    q_lens = qo_indptr.diff().tolist()
    works = [b for b, n in enumerate(q_lens) for _ in range(-(-n // tile))]
    most = per_head if same else per_head * num_qo_heads
    check(len(works) * (1 if same else num_qo_heads) <= most, "more works than planned for")
    ints = Allocator(int_workspace_buffer)
    at = [ints.take(4 * most, 16, n) for n in ("qo_tile_indices", "qo_offset", "kv_offset", "qo_len", "kv_len", "head_indices")]
    work = ints.take(4 * (SMS + 1), 16, "work_indptr")
    batch = ints.take(4 * most, 16, "batch_indices")
    locked = page_locked_int_workspace_buffer
    # The real kernel takes starts and lengths from here, not from the tables it is given.
    store(locked, at[1], [int(qo_indptr[b]) for b in works])
    store(locked, at[2], [int(kv_indptr[b]) for b in works])
    store(locked, at[3], [q_lens[b] for b in works])
    store(locked, at[4], [int(kv_len_arr[b]) for b in works])
    store(locked, work, [len(works)])
    store(locked, batch, works)
    upload(int_workspace_buffer, locked, ints.used)
    return [*at, work, batch, int(same)]


def paged_run(
    float_workspace_buffer, int_workspace_buffer, plan_info_vec, q, paged_k_cache, paged_v_cache, qo_indptr, paged_kv_indptr,
    paged_kv_indices, paged_kv_last_page_len, o, maybe_lse, mask_mode, layout, window_left, enable_pdl, maybe_custom_mask,
    maybe_mask_indptr, maybe_alibi_slopes, maybe_prefix_len_ptr, maybe_token_pos_in_items_ptr, maybe_max_item_len_ptr, logits_soft_cap,
    sm_scale, scale_q, scale_k, scale_v, rope_scale, rope_theta, token_pos_in_items_len, workspace_size, num_qo_heads=None,
    num_kv_heads=None, block_tables=None, kv_lens_buffer=None, page_size=None, max_q_len=None, max_kv_len=None, batch_size=None,
    cum_seq_lens_q=None, cum_seq_lens_kv=None, sinks=None, key_block_scales=None, value_block_scales=None,
    skip_softmax_threshold_scale_factor=None, uses_shared_paged_kv_idx=True, use_fp16_softmax=None, uses_spcompress=None,
    multi_ctas_kv_counter_buffer=None, *, module,
):  # fmt: skip
    check(maybe_custom_mask is None and maybe_alibi_slopes is None and scale_v is None and rope_scale == 1.0, "not in this stand-in")
    check(sinks is None, "the real function ignores sinks in silence")
    CALLS.append(f"{module.backend}.paged_run")
    launched(enable_pdl, q)
    check(not (module.backend == "fa2" and q.dtype.itemsize == 1), "fp8 query")
    tables = covered(module, int_workspace_buffer, plan_info_vec, q, qo_indptr, paged_kv_indptr, paged_kv_last_page_len, paged_k_cache)
    if module.backend == "fa3":
        check(q.shape[2] == paged_v_cache.shape[3], "cudaErrorNotSupported: paged fa3 with unlike head dims")
        check(paged_k_cache.stride()[:2] == paged_v_cache.stride()[:2], "K and V must have same page stride for sparse attention")
    body(
        module, q, paged_k_cache, paged_v_cache, tables[0], paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, o, maybe_lse,
        mask_mode == 1, window_left, logits_soft_cap, sm_scale, None,
    )  # fmt: skip


def sink_paged_run(
    float_workspace_buffer, int_workspace_buffer, plan_info_vec, q, paged_k_cache, paged_v_cache, qo_indptr, paged_kv_indptr,
    paged_kv_indices, paged_kv_last_page_len, o, maybe_lse, mask_mode_code, layout, window_left, enable_pdl, sink, sm_scale, *, module,
):  # fmt: skip
    CALLS.append(f"{module.backend}.sink_paged_run")
    launched(enable_pdl, q)
    tables = covered(module, int_workspace_buffer, plan_info_vec, q, qo_indptr, paged_kv_indptr, paged_kv_last_page_len, paged_k_cache)
    body(
        module, q, paged_k_cache, paged_v_cache, tables[0], paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, o, maybe_lse,
        mask_mode_code == 1, window_left, 0.0, sm_scale, sink,
    )  # fmt: skip


def ragged_run(
    float_workspace_buffer, int_workspace_buffer, plan_info_vec, q, k, v, qo_indptr, kv_indptr, o, maybe_lse, mask_mode, layout,
    window_left, enable_pdl, maybe_custom_mask, maybe_mask_indptr, maybe_alibi_slopes, maybe_prefix_len_ptr,
    maybe_token_pos_in_items_ptr, maybe_max_item_len_ptr, logits_soft_cap, sm_scale, rope_scale, rope_theta, token_pos_in_items_len,
    maybe_k_cache_sf=None, maybe_v_cache_sf=None, scale_q=None, scale_k=None, scale_v=None, *, module,
):  # fmt: skip
    check(maybe_custom_mask is None and maybe_alibi_slopes is None and scale_v is None and rope_scale == 1.0, "not in this stand-in")
    CALLS.append(f"{module.backend}.ragged_run")
    launched(enable_pdl, q)
    packed(module, int_workspace_buffer, plan_info_vec, q, k, v, qo_indptr, kv_indptr, o, maybe_lse, mask_mode == 1, window_left,
           logits_soft_cap, sm_scale, None)  # fmt: skip


def sink_ragged_run(
    float_workspace_buffer, int_workspace_buffer, plan_info_vec, q, k, v, qo_indptr, kv_indptr, o, maybe_lse, mask_mode_code, layout,
    window_left, enable_pdl, sink, sm_scale, *, module,
):  # fmt: skip
    CALLS.append(f"{module.backend}.sink_ragged_run")
    launched(enable_pdl, q)
    packed(module, int_workspace_buffer, plan_info_vec, q, k, v, qo_indptr, kv_indptr, o, maybe_lse, mask_mode_code == 1, window_left,
           0.0, sm_scale, sink)  # fmt: skip


def packed(module, ints, info, q, k, v, starts, kv_indptr, o, lse, causal, window_left, softcap, scale, sink) -> None:
    """Packed keys are pages of one token, in order. FA3's loads of values by TMA take whole tiles, NaN of other requests with them."""
    check(k.shape[0] > 0, "CUDA error: a tensor map of no rows")
    pages, values = k[:, None], v[:, None]
    last = (kv_indptr.diff() > 0).int()
    covered(module, ints, info, q, starts, kv_indptr, last, pages)
    order = torch.arange(k.shape[0], dtype=torch.int32)
    q_lens, k_lens = starts.diff().tolist(), kv_indptr.diff().tolist()
    check(module.backend == "fa3" or not causal or all(n <= m or m == 0 for n, m in zip(q_lens, k_lens, strict=True)), "FA2 is wrong here")
    body(module, q, pages, values, starts, kv_indptr, order, last, o, lse, causal, window_left, softcap, scale, sink)
    for b, length in enumerate(k_lens if module.backend == "fa3" else []):
        tile = v[int(kv_indptr[b]) : int(kv_indptr[b]) + -(-length // TILE) * TILE]
        if length and tile.isnan().any():
            o[int(starts[b]) : int(starts[b + 1])] = float("nan")


def covered(module, ints, info, q, qo_indptr, kv_indptr, last, pages) -> tuple[torch.Tensor]:
    """The query starts; checks that what the plan left in the int workspace is for these tables."""
    q_lens, page = qo_indptr.diff().tolist(), pages.shape[1]
    if module.backend == "fa2":
        check(len(info) == 15, f"PrefillPlanInfo::FromVector: vec.size() should be 15, but got {len(info)}")
        count = int(raw(ints)[info[12] : info[12] + info[0]].sum())
        rows = ints_at(ints, info[4], count).tolist()
        check(set(rows) == {b for b, n in enumerate(q_lens) if n}, "the plan is for other queries")
        check(ints_at(ints, info[8], len(q_lens) + 1).equal(qo_indptr), "the plan is for other query starts")
        return (qo_indptr,)
    check(len(info) == 9, f"PrefillPlanSM90Info::FromVector: vec.size() should be 9, but got {len(info)}")
    count = int(ints_at(ints, info[6], 1))
    rows = ints_at(ints, info[7], count).tolist()
    check(set(rows) == {b for b, n in enumerate(q_lens) if n}, "the plan is for other queries")
    keys = [0 if n == 0 else (n - 1) * page + int(last[b]) for b, n in enumerate(kv_indptr.diff().tolist())]
    check(ints_at(ints, info[4], count).tolist() == [keys[b] for b in rows], "the plan is for other lengths")
    check(ints_at(ints, info[2], count).tolist() == [int(kv_indptr[b]) for b in rows], "the plan is for other pages")
    return (qo_indptr,)


def body(module, q, k, v, starts, kv_indptr, kv_indices, last, o, lse, causal, window_left, softcap, scale, sink) -> None:
    """Attention of every request over its own keys alone; lse of base 2. Rows past the last request are left as they are."""
    laid_out(
        sizes={"dim": module.head_dim_qk, "dv": module.head_dim_vo}, q=(q, "tokens, heads, dim", module.dtype, LAST),
        k=(k, "pages, page, kv_heads, dim", module.kv_dtype, LAST), v=(v, "pages, page, kv_heads, dv", module.kv_dtype, LAST),
        o=(o, "tokens, heads, dv", module.dtype, ALL), lse=(lse, "tokens, heads", torch.float32, ALL),
        qo_indptr=(starts, "starts", I32, ALL), kv_indptr=(kv_indptr, "firsts", I32, ALL), kv_indices=(kv_indices, "slots", I32, ALL),
        last_page_len=(last, "requests", I32, ALL), sink=(sink, "heads", torch.float32, ALL),
    )  # fmt: skip
    check((window_left >= 0) == module.windowed or sink is not None, "window of the module")
    check((softcap > 0) == module.softcap, "softcap of the module")
    check(not (q.requires_grad or k.requires_grad or v.requires_grad), "Can't export tensors that require gradient, use tensor.detach()")
    page = k.shape[1]
    for b in range(starts.numel() - 1):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        ids = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].long()
        check(bool(((ids >= 0) & (ids < k.shape[0])).all()), "CUDA error: an illegal memory access was encountered")
        keys = (len(ids) - 1) * page + int(last[b]) if len(ids) else 0
        kk, vv = (x[ids].flatten(0, 1)[:keys] for x in (k, v))
        see = visible(rows.stop - rows.start, keys, keys, window_left, 0 if causal else -1)
        logits = capped(logits_of(q[rows], kk, scale), softcap).masked_fill(~see, float("-inf"))
        found, alone, total = attend(q[rows], vv, logits, sink)
        o[rows] = found.to(o.dtype)
        if lse is not None:
            lse[rows] = (total if keys or module.backend == "fa2" else alone).T / math.log(2.0)


# The modules ----------------------------------------------------------------------------------------------------------


def _module(backend, dtype, kv_dtype, out_dtype, id_dtype, head_dim_qk, head_dim_vo, posenc, windowed, softcap, **functions):
    check(dtype in HALVES and out_dtype == dtype and id_dtype == torch.int32 and posenc == 0, "not in this stand-in")
    about = SimpleNamespace(
        backend=backend, dtype=dtype, kv_dtype=kv_dtype, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo, windowed=windowed,
        softcap=softcap,
    )  # fmt: skip
    BUILT.append((backend, dtype, kv_dtype, head_dim_qk, head_dim_vo, windowed, softcap, *sorted(functions)))
    plan = {"decode": decode_plan, "fa2": fa2_plan, "fa3": fa3_plan}[backend]
    return SimpleNamespace(plan=plan, **{n: functools.partial(f, module=about) for n, f in functions.items()})


@functools.cache
def get_batch_decode_module(*args):
    check(len(args) == 9, "batch decode modules have nine parameters")
    check(args[4] == args[5] and args[4] in (64, 128, 256, 512), f"head_dim {args[4]}, {args[5]}")
    return _module("decode", *args, run=decode_run)


@functools.cache
def get_batch_prefill_module(backend, *args):
    check(len(args) == 10 and args[-1] is False, "batch prefill modules have ten parameters besides the backend")
    dims = (args[4], args[5])
    check(backend in ("fa2", "fa3") and dims in ((64, 64), (128, 128), (256, 256), (192, 128)), f"{backend} {dims}")
    found = _module(backend, *args[:-1], paged_run=paged_run, ragged_run=ragged_run)
    found.prewarm_paged_kv_stride_variant = lambda variant="independent": CALLS.append(f"{backend}.prewarm")
    return found


def gen_batch_prefill_attention_sink_module(
    backend, dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_qk, head_dim_vo, pos_encoding_mode, use_sliding_window
):
    check(backend in ("fa2", "fa3"), backend)
    given = (dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_qk, head_dim_vo, pos_encoding_mode, use_sliding_window, False)
    return SimpleNamespace(build_and_load=lambda: _module(backend, *given, paged_run=sink_paged_run, ragged_run=sink_ragged_run))


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
    modules = {n: ModuleType(f"flashinfer{n}") for n in ("", ".decode", ".prefill", ".jit", ".jit.attention", ".jit.attention.modules")}
    modules[".decode"].get_batch_decode_module = get_batch_decode_module  # type: ignore[attr-defined]
    modules[".prefill"].get_batch_prefill_module = get_batch_prefill_module  # type: ignore[attr-defined]
    modules[".jit.attention.modules"].gen_batch_prefill_attention_sink_module = gen_batch_prefill_attention_sink_module  # type: ignore[attr-defined]
    forget()
    try:
        with importable({f"flashinfer{n}": m for n, m in modules.items()}):
            yield CALLS
    finally:
        forget()
