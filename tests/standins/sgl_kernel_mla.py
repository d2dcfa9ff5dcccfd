"""Stand-ins for the MLA ops of the sgl_kernel wheel (sglang-kernel 0.4.3): not the kernels.

The same schema strings, argument checks and shapes, over a plain torch body on the CPU, so that a
wrapper's whole path runs where the wheel cannot. Like the wheel they register one backend and no
fake. Where the real kernels read unpredictably or return garbage, these raise or return NaN. That a
tensor is on CUDA is the one thing they do not check.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import torch

from attnops.kernels.sgl import wheel
from tests.standins.checks import ALL, LAST, architecture, check, laid_out
from tests.standins.libraries import register
from tests.standins.schemas import (
    CUTLASS_DECODE,
    CUTLASS_SIZE,
    DECODE_FP8,
    DENSE_DECODE,
    METADATA_DENSE,
    METADATA_FP8,
)

CALLS: list[str] = []
"""The stand-ins called, in order."""


@contextmanager
def installed() -> Iterator[list[str]]:
    """Within the block the wheel counts as loaded; gives the record of calls."""
    CALLS.clear()
    with patch.object(wheel, "load", lambda op, pattern: None):
        yield CALLS


HALVES, I32 = (torch.float16, torch.bfloat16), torch.int32
SM_PARTS, METADATA_INTS = 132, 8


def keys_of(
    pages: torch.Tensor, table: torch.Tensor, length: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`[length, D]` latents of one request. A page id outside the pool is what the GPU calls an
    illegal memory access."""
    page = pages.shape[1]
    ids = table[: -(-length // page)]
    check(
        bool(((ids >= 0) & (ids < pages.shape[0])).all()),
        "CUDA error: an illegal memory access was encountered",
    )
    keys = pages[ids.long()].flatten(0, 1)[:length]
    return (keys if dtype is None else keys.view(dtype)).float()


def decoded(q, kcache, seqlens_k, block_table, dtypes) -> tuple[int, int, int]:
    """(batch, queries, heads) of a decode step: the checks that both dense ops make."""
    s = laid_out(
        q=(q, "batch_size, queries, heads, dim", dtypes, LAST),
        kcache=(kcache, "num_blocks, page, num_heads_k, dim", q.dtype, LAST),
        seqlens_k=(seqlens_k, "batch_size", I32, ALL),
        block_table=(block_table, "batch_size, max_num_blocks_per_seq", I32, LAST),
    )
    check(s.batch_size > 0, "batch size must be positive")
    check(s.page == 64, "Currently page_block_size must be 64")
    check(
        s.heads % s.num_heads_k == 0,
        "Number of heads in key/value must divide number of heads in query",
    )
    check(s.num_heads_k == 1 and s.queries == 1, "this stand-in takes one key head and one query")
    return s.batch_size, s.queries, s.heads


def dense_decode_fwd(
    q,
    kcache,
    head_size_v,
    seqlens_k,
    block_table,
    softmax_scale,
    is_causal,
    tile_scheduler_metadata,
    num_splits,
):
    check(architecture() == 90, "Dense decode MLA is only supported on SM90a architecture")
    batch, queries, heads = decoded(q, kcache, seqlens_k, block_table, HALVES)
    check(
        q.shape[3] in (576, 512) and head_size_v == 512,
        "head_size_k must be 576 or 512, head_size_v must be 512",
    )
    parts = parts_of(heads)
    if tile_scheduler_metadata is None:
        tile_scheduler_metadata, num_splits = schedule(seqlens_k, parts)
    else:
        check(num_splits is not None, "bad optional access")
        laid_out(
            sizes={"batch_size": batch, "num_sm_parts": parts},
            num_splits=(num_splits, "batch_size+1", I32, ALL),
            tile_scheduler_metadata=(
                tile_scheduler_metadata,
                f"num_sm_parts, {METADATA_INTS}",
                I32,
                ALL,
            ),
        )
        follows(seqlens_k, tile_scheduler_metadata, num_splits)
    out = q.new_empty(batch, queries, heads, head_size_v)
    lse = torch.empty(batch, heads, queries)
    for b, length in enumerate(seqlens_k.tolist()):
        keys = keys_of(kcache[:, :, 0], block_table[b], length)
        scores = q[b, 0].float() @ keys.T * softmax_scale
        # Without keys the accumulator is 0 and what it is divided by is set to 1.
        out[b, 0] = (torch.softmax(scores, -1) @ keys[:, :head_size_v]).to(q.dtype)
        lse[b, :, 0] = torch.logsumexp(scores, -1) if length else float("inf")
    return out, lse, tile_scheduler_metadata, num_splits


def parts_of(heads: int) -> int:
    return max(SM_PARTS // -(-heads // 64), 1)


def schedule(
    lengths: torch.Tensor, parts: int, float8: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Not the real numbers, but like those they follow from the lengths and the number of parts."""
    # The last words of an entry are not written: 3 for float8, 1 else.
    tiles = torch.randint(1 << 30, (parts, METADATA_INTS), dtype=torch.int32)
    tiles[:, 2 : 5 if float8 else 7] = 0
    tiles[:, 0] = torch.arange(parts)
    tiles[:, 1] = int(lengths.sum())
    return tiles, torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])


def follows(
    lengths: torch.Tensor, tiles: torch.Tensor, splits: torch.Tensor, float8: bool = False
) -> None:
    """The GPU would share out other keys than there are: results would be wrong, or memory read
    where there is none."""
    check(tiles.data_ptr() % (4 * METADATA_INTS) == 0, "CUDA error: misaligned address")
    own, ends = schedule(lengths, tiles.shape[0], float8)
    read = 5 if float8 else 7
    fits = torch.equal(tiles[:, :read], own[:, :read]) and torch.equal(splits, ends)
    check(
        fits, "CUDA error: an illegal memory access was encountered (a schedule of other lengths)"
    )


def get_mla_decoding_metadata(seqlens_k, num_q_tokens_per_head_k, h_k, h_q, is_fp8_kvcache, topk):
    check(seqlens_k.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(seqlens_k.is_contiguous(), "seqlens_k must be contiguous")
    check(seqlens_k.shape[0] > 0, "batch size must be positive")
    check(not is_fp8_kvcache, "Use get_mla_decoding_metadata_dense_fp8 for dense fp8 metadata")
    check(
        topk is None and h_k == 1 and h_q in (None, num_q_tokens_per_head_k),
        "this stand-in takes one key head and one query",
    )
    return list(schedule(seqlens_k, parts_of(num_q_tokens_per_head_k)))


def get_mla_decoding_metadata_dense_fp8(seqlens_k, num_heads_per_head_k, num_heads_k):
    check(
        seqlens_k.is_contiguous() and seqlens_k.dtype == torch.int32,
        "seqlens_k must be contiguous int32",
    )
    check(seqlens_k.shape[0] < 4096, "params.batch_size < MaxBatchSize")
    parts = SM_PARTS // num_heads_k // -(-num_heads_per_head_k // 64)
    return list(schedule(seqlens_k, parts, True))


def fwd_kvcache_mla_fp8(
    q,
    kcache,
    head_size_v,
    seqlens_k,
    block_table,
    softmax_scale,
    is_causal,
    tile_scheduler_metadata,
    num_splits,
    descale_q,
    descale_k,
):
    check(architecture() == 90, "Dense FP8 MLA is only supported on SM90")
    batch, queries, heads = decoded(q, kcache, seqlens_k, block_table, torch.float8_e4m3fn)
    check(q.shape[3] == 576 and head_size_v == 512, "Only head_size_k == 576 is supported")
    check(
        descale_q is not None and descale_k is not None,
        "descale is required when input dtype is fp8",
    )
    laid_out(
        sizes={"batch_size": batch, "num_sm_parts": parts_of(heads)},
        num_splits=(num_splits, "batch_size+1", I32, ALL),
        tile_scheduler_metadata=(
            tile_scheduler_metadata,
            f"num_sm_parts, {METADATA_INTS}",
            I32,
            ALL,
        ),
        descale_q=(descale_q, "1", torch.float32, LAST),
        descale_k=(descale_k, "1", torch.float32, LAST),
    )
    follows(seqlens_k, tile_scheduler_metadata, num_splits, True)
    check(
        bool((seqlens_k > 0).all()),
        "CUDA error: an illegal memory access was encountered (a page table is read at -1)",
    )
    out = torch.empty(batch, queries, heads, head_size_v, dtype=torch.bfloat16)
    lse = torch.empty(batch, heads, queries)
    for b, length in enumerate(seqlens_k.tolist()):
        keys = (
            keys_of(kcache[:, :, 0].view(torch.uint8), block_table[b], length, kcache.dtype)
            * descale_k
        )
        scores = q[b, 0].float() @ keys.T * (softmax_scale * descale_q)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        found = weights.to(q.dtype).float() @ keys[:, :head_size_v] / weights.sum(-1, keepdim=True)
        out[b, 0] = found.to(torch.bfloat16)
        lse[b, :, 0] = torch.logsumexp(scores, -1)
    return [out, lse]


def cutlass_mla_get_workspace_size(
    max_seq_len: int, num_batches: int, sm_count: int, num_kv_splits: int
) -> int:
    """The accumulators and sums of every split, float32: what is known of the formula."""
    return num_batches * num_kv_splits * 128 * (512 + 1) * 4


def cutlass_mla_decode(
    out, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, sm_scale, num_kv_splits
):
    sm = architecture()
    check(
        sm == 100,
        "cutlass_mla_decode is only supported on compute capability 10.0, but found sm version "
        f"{sm}",
    )
    batch, page, dtype = q_nope.shape[0], kv_c_and_k_pe_cache.shape[1], q_nope.dtype
    # The first group is asserted by the wheel's Python around the op; the kernel itself takes it on
    # trust.
    laid_out(
        q_nope=(q_nope, "batch, 128, 512", HALVES, ALL),
        q_pe=(q_pe, "batch, 128, 64", dtype, ALL),
        cache=(kv_c_and_k_pe_cache, "pages, page, 576", dtype, LAST),
        out=(out, "batch, 128, 512", dtype, ALL),
        seq_lens=(seq_lens, "batch", I32, ALL),
        page_table=(page_table, "batch, columns", I32, ALL),
        workspace=(workspace, "bytes", torch.uint8, ALL),
    )
    assert (
        page_table.shape[1] > 0
        and page_table.shape[1] % (128 / page) == 0
        and page in (1, 2, 4, 8, 16, 32, 64, 128)
    )
    check(num_kv_splits == 1, "the real kernel hangs or gives wrong results with more splits")
    size = cutlass_mla_get_workspace_size(page_table.shape[1] * page, batch, 0, num_kv_splits)
    check(
        workspace.numel() >= size,
        f"CUDA error: an illegal memory access was encountered (workspace of {size} bytes)",
    )
    workspace.fill_(0xFF)
    for b, length in enumerate(seq_lens.tolist()):
        # Whole tiles of 128 keys are fetched, so every page id in them must exist.
        tile = keys_of(kv_c_and_k_pe_cache, page_table[b], -(-length // 128) * 128)[:length]
        scores = (
            q_nope[b].float() @ tile[:, :512].T + q_pe[b].float() @ tile[:, 512:].T
        ) * sm_scale
        out[b] = (
            (torch.softmax(scores, -1) @ tile[:, :512]).to(out.dtype) if length else float("nan")
        )


BODIES = {
    DENSE_DECODE: dense_decode_fwd,
    METADATA_DENSE: get_mla_decoding_metadata,
    METADATA_FP8: get_mla_decoding_metadata_dense_fp8,
    DECODE_FP8: fwd_kvcache_mla_fp8,
    CUTLASS_DECODE: cutlass_mla_decode,
}
LIBRARY = register("sgl_kernel", BODIES, CALLS)
if not find_spec("sgl_kernel") and not hasattr(
    torch.ops.sgl_kernel, "cutlass_mla_get_workspace_size"
):
    LIBRARY.define(CUTLASS_SIZE)
    LIBRARY.impl(
        "cutlass_mla_get_workspace_size",
        cutlass_mla_get_workspace_size,
        "CompositeImplicitAutograd",
    )
