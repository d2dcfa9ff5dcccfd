"""The planners of FlashInfer's JIT modules (flashinfer-python 0.7.2.post1), as stand-ins: not the
kernels'.

They take from their workspaces what scheduler.cuh takes and fail where it fails.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch

from tests.standins.checks import ALL, check, laid_out

SMS = 8
BLOCKS_PER_SM = 16
HALVES, I32 = (torch.float16, torch.bfloat16), torch.int32
CALLS: list[str] = []
"""The functions called, in order: `decode.plan`, `fa2.paged_run` and so on."""


class Allocator:
    """AlignedAllocator: hands out offsets of a buffer, whose address must be aligned."""

    def __init__(self, buffer: torch.Tensor) -> None:
        check(buffer.is_contiguous() and buffer.data_ptr() % 16 == 0, "the buffer is not aligned")
        self.room, self.used = buffer.nbytes, 0

    def take(self, size: int, alignment: int, name: str) -> int:
        start = -(-self.used // alignment) * alignment
        if start + size > self.room:
            raise RuntimeError(
                f"Buffer overflow when allocating memory for {name} with size {size} and "
                f"alignment {alignment}"
            )
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


def host_ints(batch: int, **given: tuple[torch.Tensor, str]) -> None:
    """Check int32 tensors of the host by name, each with its layout."""
    check(
        all(x.device.type == "cpu" for x, _ in given.values()),
        "the planner reads tensors of the host",
    )
    laid_out(
        sizes={"batch": batch}, **{name: (x, dims, I32, ALL) for name, (x, dims) in given.items()}
    )


def least(page_size: int, most: int, fits: Callable[[int], bool]) -> int:
    """The fewest pages of a chunk that fit, between 128 tokens' and the most."""
    return bisect_left(range(most), True, max(128 // page_size, 1), most, key=fits)


def decode_plan(
    float_workspace_buffer,
    int_workspace_buffer,
    page_locked_int_workspace_buffer,
    indptr,
    batch_size,
    num_qo_heads,
    num_kv_heads,
    page_size,
    enable_cuda_graph,
    window_left,
    logits_soft_cap,
    head_dim_qk,
    head_dim_vo,
    empty_q_data,
    empty_kv_data,
):
    CALLS.append("decode.plan")
    host_ints(batch_size, indptr=(indptr, "batch + 1"))
    check(
        head_dim_qk == head_dim_vo, "CUDA cores template only supports equal head dim for QK and VO"
    )
    check(
        num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8, 16),
        f"Unsupported group_size: {num_qo_heads // num_kv_heads}",
    )
    pages = indptr.diff().tolist()
    grid = BLOCKS_PER_SM * SMS
    split, chunk, total = False, max([1, *pages]), batch_size
    if batch_size * num_kv_heads < grid:
        chunk = least(
            page_size,
            max(pages),
            lambda chunk: sum(-(-n // chunk) for n in pages) * num_kv_heads <= grid,
        )
        total = sum(-(-max(n, 1) // chunk) for n in pages)
        split = enable_cuda_graph or total != batch_size
    padded = (grid // num_kv_heads if split else batch_size) if enable_cuda_graph else total
    ints, floats = Allocator(int_workspace_buffer), Allocator(float_workspace_buffer)
    rows = [b for b, n in enumerate(pages) for _ in range(-(-max(n, 1) // chunk))]
    at = [
        ints.take(4 * padded, 16, "request_indices"),
        ints.take(4 * padded, 16, "kv_tile_indices"),
    ]
    starts = ints.take(4 * (padded + 1), 16, "o_indptr")
    size = ints.take(4, 1, "kv_chunk_size_ptr")
    check(len(rows) <= padded, "more blocks than the launch has")
    store(page_locked_int_workspace_buffer, at[0], rows)
    v = s = mask = 0
    if split:
        v = floats.take(num_qo_heads * padded * head_dim_qk * 4, 16, "tmp_v")
        s = floats.take(num_qo_heads * padded * 4, 16, "tmp_s")
        mask = ints.take(padded, 16, "block_valid_mask")
        page_locked_int_workspace_buffer[mask : mask + padded] = (
            torch.arange(padded) < len(rows)
        ).to(torch.uint8)
    upload(int_workspace_buffer, page_locked_int_workspace_buffer, ints.used)
    return [padded, v, s, *at, starts, mask, size, int(enable_cuda_graph), int(split)]


def fa2_tile(packed: int, vo: int) -> int:
    """FA2DetermineCtaTileQ on SM80 and later, head dims up to 256."""
    if packed > 64 and vo < 256:
        return 128
    return 64 if packed > 16 else 16


def fa2_plan(
    float_workspace_buffer,
    int_workspace_buffer,
    page_locked_int_workspace_buffer,
    qo_indptr,
    kv_indptr,
    kv_len_arr,
    total_num_rows,
    batch_size,
    num_qo_heads,
    num_kv_heads,
    page_size,
    enable_cuda_graph,
    head_dim_qk,
    head_dim_vo,
    causal,
    window_left,
    fixed_split_size,
    disable_split_kv,
    num_colocated_ctas=0,
    uniform_q_len=0,
):
    CALLS.append("fa2.plan")
    host_ints(
        batch_size,
        qo_indptr=(qo_indptr, "batch + 1"),
        kv_indptr=(kv_indptr, "batch + 1"),
        kv_len_arr=(kv_len_arr, "batch"),
    )
    check(
        enable_cuda_graph and fixed_split_size == -1 and num_colocated_ctas == 0,
        "this stand-in plans for CUDA graphs",
    )
    group, cap = num_qo_heads // num_kv_heads, 2 * SMS // num_kv_heads
    packed, pages = [n * group for n in qo_indptr.diff().tolist()], kv_indptr.diff().tolist()
    check(min(packed) >= 0 and min(pages) >= 0, "indptr should be non-negative")
    if uniform_q_len:
        check(
            all(n == uniform_q_len * group for n in packed),
            "uniform_q_len is not what qo_indptr gives",
        )
        tile = fa2_tile(uniform_q_len * group, head_dim_vo)
        tiles = batch_size * -(-uniform_q_len * group // tile)
    else:
        tile = fa2_tile((total_num_rows - batch_size + 1) % 2**32 * group, head_dim_vo)
        tiles = -(-total_num_rows * group // tile) + batch_size - 1
    seen = [min(-(-(window_left + tile) // page_size), n) if window_left >= 0 else n for n in pages]
    chunk, split = 2**62, False
    if not disable_split_kv:
        rows_of = [(-(-p // tile), max(n, 1)) for p, n in zip(packed, seen, strict=True)]
        chunk = least(
            page_size,
            max([1, *seen]),
            lambda chunk: sum(tiles * -(-n // chunk) for tiles, n in rows_of) <= cap,
        )
        split = True
    rows, parts = [], 0
    for b, (p, n) in enumerate(zip(packed, seen, strict=True)):
        chunks = 1 if disable_split_kv else -(-max(n, 1) // chunk)
        rows += [b] * (-(-p // tile) * chunks)
        parts += p // group * chunks
    padded = max(cap, tiles)
    check(len(rows) <= padded, "new batch size should not exceed padded batch size")
    check(qo_indptr[-1] <= total_num_rows, "more rows than planned for")
    ints, floats = Allocator(int_workspace_buffer), Allocator(float_workspace_buffer)
    at = [
        ints.take(4 * padded, 16, name)
        for name in ("request_indices", "qo_tile_indices", "kv_tile_indices")
    ]
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
    return [
        padded,
        total_num_rows,
        total,
        tile,
        *at,
        merge,
        starts,
        size,
        v,
        s,
        mask,
        1,
        int(split),
    ]


def fa3_plan(
    float_workspace_buffer,
    int_workspace_buffer,
    page_locked_int_workspace_buffer,
    qo_indptr,
    kv_indptr,
    kv_len_arr,
    total_num_rows,
    batch_size,
    num_qo_heads,
    num_kv_heads,
    page_size,
    enable_cuda_graph,
    head_dim_qk,
    head_dim_vo,
    causal,
    window_left,
):
    CALLS.append("fa3.plan")
    host_ints(
        batch_size,
        qo_indptr=(qo_indptr, "batch + 1"),
        kv_indptr=(kv_indptr, "batch + 1"),
        kv_len_arr=(kv_len_arr, "batch"),
    )
    check(enable_cuda_graph, "this stand-in plans for CUDA graphs")
    tile = 192 if head_dim_vo == 64 else 128
    per_head = -(-total_num_rows // tile) + batch_size - 1
    same = per_head > 4096
    q_lens = qo_indptr.diff().tolist()
    works = [b for b, n in enumerate(q_lens) for _ in range(-(-n // tile))]
    most = per_head if same else per_head * num_qo_heads
    check(len(works) * (1 if same else num_qo_heads) <= most, "more works than planned for")
    ints = Allocator(int_workspace_buffer)
    at = [
        ints.take(4 * most, 16, n)
        for n in ("qo_tile_indices", "qo_offset", "kv_offset", "qo_len", "kv_len", "head_indices")
    ]
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
