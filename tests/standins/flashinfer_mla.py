"""Stand-ins for FlashInfer's JIT modules for latents (flashinfer-python 0.7.2.post1): not the
kernels.

What `gen_batch_mla_module` loads, with its parameters and checks: a planner that takes from its
workspaces what MLAPlan of scheduler.cuh takes, and a run over a plain torch body on the CPU. The
run finds rows, keys and where the page table starts in what the plan left in the int workspace, as
the real one does. Kept because the wrapper must cope with it: room for pieces of work is not
checked, and a causal tile that ends amid a query's heads loses a key. That a tensor is on CUDA or
pinned is the one thing they do not check.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.standins.checks import ALL, LAST, architecture, check, laid_out
from tests.standins.flashinfer_folder import keep
from tests.standins.flashinfer_planners import (
    HALVES,
    I32,
    SMS,
    Allocator,
    host_ints,
    ints_at,
    store,
    upload,
)
from tests.standins.libraries import packages

TILE, TILE_KV, WORKS = 64, 64, 16384
ARRAYS = ("q_indptr", "kv_indptr", "partial_indptr")
MERGES = ("packed_start", "packed_end", "partial_start", "partial_end", "partial_stride")
REST = ("q_len", "kv_len", "q_start", "kv_start", "kv_end", "work_indptr")

CALLS: list[str] = []
"""The functions called, in order: `fa2.plan`, `fa3.run` and so on."""
BUILT: list[tuple[Any, ...]] = []
"""The modules built, in order."""


class Module:
    def __init__(self, backend: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        self.backend, self.dtype, self.kv_dtype = backend, dtype, kv_dtype

    def plan_with_staged_workspace_bytes(
        self,
        float_workspace,
        int_workspace,
        page_locked,
        qo_indptr,
        kv_indptr,
        kv_len,
        num_heads,
        head_dim_o,
        causal,
    ):
        CALLS.append(f"{self.backend}.plan")
        batch = kv_len.numel()
        check(batch > 0, "integer division by zero")
        host_ints(
            batch,
            qo_indptr=(qo_indptr, ">= batch + 1"),
            kv_indptr=(kv_indptr, ">= batch + 1"),
            kv_len=(kv_len, "batch"),
        )
        q_lens = qo_indptr.diff().tolist()
        check(min(q_lens) >= 0, "qo_indptr should be non-negative")
        cluster = 2 if sum(q_lens) * num_heads // batch > TILE else 1
        clusters, tile = SMS // cluster, cluster * TILE
        tiles = [
            (b, t, -(-q_lens[b] * num_heads // tile))
            for b in range(batch)
            for t in range(-(-q_lens[b] * num_heads // tile))
        ]

        def seen(b: int, t: int, count: int) -> int:
            keys = int(kv_len[b])
            if not causal or t + 1 == count:
                return keys
            return max(min(keys - q_lens[b] + -(-(t + 1) * tile // num_heads), keys), 0)

        average = max(-(-sum(seen(*x) for x in tiles) // clusters), 1)
        part = next(
            (n for most, n in ((8, 32), (16, 64), (32, 128), (64, 192)) if average <= most),
            -(-average // 256) * 256,
        )
        works = [(b, t, lo) for b, t, n in tiles for lo in range(0, max(seen(b, t, n), 1), part)]
        assert len(works) <= WORKS, "the real planner writes past its arrays"
        ints, floats, at = Allocator(int_workspace), Allocator(float_workspace), {}
        for names, count in ((ARRAYS, WORKS), (MERGES, SMS), (REST, WORKS)):
            at |= {n: ints.take(4 * count, 16, f"mla_{n}") for n in names}
        values = {
            "q_indptr": [int(qo_indptr[b]) for b, _, _ in works],
            "kv_indptr": [int(kv_indptr[b]) for b, _, _ in works],
            "q_len": [q_lens[b] for b, _, _ in works],
            "kv_len": [int(kv_len[b]) for b, _, _ in works],
            "q_start": [t * tile for _, t, _ in works],
            "work_indptr": [0, len(works)],
        }
        for name, numbers in values.items():
            store(page_locked, at[name], numbers)
        upload(int_workspace, page_locked, ints.used)
        partial = [
            floats.take(2 * clusters * tile * n, 16, f"mla_partial_{x}")
            for n, x in ((2 * head_dim_o, "o"), (4, "lse"))
        ]
        return [cluster, clusters, *at.values(), *partial], ints.used

    def run(
        self,
        float_workspace,
        int_workspace,
        plan_info_vec,
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        kv_indices,
        o,
        maybe_lse,
        mask_mode_code,
        num_heads,
        page_size,
        sm_scale,
        return_lse_base_on_e,
        ckv_scale,
        kpe_scale,
        maybe_ckv_scale_arr,
    ):
        CALLS.append(f"{self.backend}.run")
        check(
            len(plan_info_vec) == 18,
            f"MLAPlanInfo::FromVector: vec.size() should be 18, but got {len(plan_info_vec)}",
        )
        laid_out(
            sizes={"heads": num_heads, "page": page_size},
            q_nope=(q_nope, "tokens, heads, 512", self.dtype, LAST),
            q_pe=(q_pe, "tokens, heads, 64", self.dtype, LAST),
            o=(o, "tokens, heads, 512", self.dtype, LAST),
            ckv_cache=(ckv_cache, "pages, page, 512", self.kv_dtype, LAST),
            kpe_cache=(kpe_cache, "pages, page, 64", self.kv_dtype, LAST),
            kv_indices=(kv_indices, "slots", I32, ALL),
            maybe_lse=(maybe_lse, "tokens, heads", torch.float32, ALL),
        )
        check(
            ckv_scale == kpe_scale == 1.0 and maybe_ckv_scale_arr is None and return_lse_base_on_e,
            "this stand-in has none of these",
        )
        at = dict(zip((*ARRAYS, *MERGES, *REST), plan_info_vec[2:16], strict=True))
        count = int(ints_at(int_workspace, at["work_indptr"], 2)[1])
        column = {
            n: ints_at(int_workspace, at[n], count).tolist()
            for n in ("q_indptr", "kv_indptr", "q_len", "kv_len", "q_start")
        }
        rows = sorted(
            set(
                zip(*(column[n] for n in ("q_indptr", "kv_indptr", "q_len", "kv_len")), strict=True)
            )
        )
        check(
            sum(n for _, _, n, _ in rows) == q_nope.shape[0],
            "the plan covers every row, and no other",
        )
        tile = TILE * plan_info_vec[0]
        for start, first, n, keys in rows:
            ids = kv_indices[first : first + -(-keys // page_size)].long()
            check(
                bool(((ids >= 0) & (ids < ckv_cache.shape[0])).all()),
                "CUDA error: an illegal memory access was encountered",
            )
            c, k = (x[ids].flatten(0, 1)[:keys].float() for x in (ckv_cache, kpe_cache))
            i = slice(start, start + n)
            s = (
                torch.einsum("qhd,kd->qhk", q_nope[i].float(), c)
                + torch.einsum("qhd,kd->qhk", q_pe[i].float(), k)
            ) * sm_scale
            if mask_mode_code == 1:
                s = s.masked_fill(lost(n, num_heads, keys, tile), float("-inf"))
            z = torch.logsumexp(s, -1)
            o[i] = (torch.exp(s - torch.where(z == float("-inf"), 0.0, z)[..., None]) @ c).to(
                o.dtype
            )
            if maybe_lse is not None:
                maybe_lse[i] = z


def lost(n: int, heads: int, keys: int, tile: int) -> torch.Tensor:
    """bool `[n, H, keys]`: what a causal query does not see, whole tiles of keys past its tile's
    bound among it."""
    q, h, j = torch.meshgrid(
        torch.arange(n), torch.arange(heads), torch.arange(keys), indexing="ij"
    )
    end = (q * heads + h) // tile * tile + tile
    bound = keys - n + end // heads
    bound = torch.where(end >= n * heads, keys, bound)
    return (j > keys - n + q) | (j >= -(-bound // TILE_KV) * TILE_KV)


def gen_batch_mla_module(
    backend, dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_ckv, head_dim_kpe, use_profiler
):
    check(backend in ("fa2", "fa3"), f"Unsupported backend: {backend}")
    check(
        dtype_q in HALVES and dtype_q == dtype_o and dtype_idx == torch.int32,
        "not in this stand-in",
    )
    if dtype_kv != dtype_q:
        check(dtype_kv == torch.float8_e4m3fn, "dtype_map_kv has none of this")
        check(
            dtype_q == torch.bfloat16,
            "FP8 kv_data_type for MLA currently only supports q_data_type=torch.bfloat16",
        )
        check(architecture() == 90, "FP8 kv_data_type for MLA requires an SM90 (Hopper) device")
    check((head_dim_ckv, head_dim_kpe, use_profiler) == (512, 64, False), "not in this stand-in")

    class Spec:
        def build_and_load(self) -> Module:
            BUILT.append(
                (backend, dtype_q) if dtype_kv == dtype_q else (backend, dtype_q, dtype_kv)
            )
            keep(_name(backend, dtype_q, dtype_kv))
            return Module(backend, dtype_q, dtype_kv)

    return Spec()


def _name(backend, dtype, kv_dtype) -> str:
    """As get_batch_mla_uri makes it (flashinfer/jit/attention/modules.py)."""
    short = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}
    types = f"dtype_q_{short[dtype]}_dtype_kv_{short[kv_dtype]}_dtype_o_{short[dtype]}"
    dims = "dtype_idx_i32_head_dim_ckv_512_head_dim_kpe_64"
    sm90 = "_sm90" * (backend == "fa3")
    return f"batch_mla_attention_{types}_{dims}_profiler_False_planabi2{sm90}"


@contextmanager
def installed() -> Iterator[list[str]]:
    """Within the block `import flashinfer` finds the stand-ins. Gives the record of calls."""
    from attnops.kernels.flashinfer import mla as _flashinfer_mla

    _flashinfer_mla.load.cache_clear()
    CALLS.clear()
    BUILT.clear()
    try:
        with packages({"flashinfer.jit.gen_batch_mla_module": gen_batch_mla_module}):
            yield CALLS
    finally:
        _flashinfer_mla.load.cache_clear()
