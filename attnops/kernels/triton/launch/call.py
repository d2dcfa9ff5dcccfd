"""Host side: the arguments of the device functions, and their launches. Importing this imports triton."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnops.errors import InvalidInput
from attnops.kernels.triton.device.attend import attend as _attend
from attnops.kernels.triton.device.combine import combine as _combine
from attnops.kernels.triton.device.merge import merge as _merge
from attnops.kernels.triton.device.merge import merge_all as _merge_all
from attnops.kernels.triton.launch import plan

attend: Any = _attend
combine: Any = _combine
merge: Any = _merge
merge_all: Any = _merge_all
LOG2E = 1.4426950408889634
OPTIONS = {"enable_fp_fusion": True}
"""Said outright, because Triton's default changes from release to release."""

MOST_PARTS_BYTES = 1 << 29
"""Of float32 that stage one leaves for stage two. A fixed split leaves many where the page table is wide; then requests take turns."""

INTERPRETED = (4, 227 * 1024, True)
"""Multiprocessors and shared memory where there is none of either: few enough that small calls are split as large ones are."""


class Step(NamedTuple):
    """One launch of a device function."""

    kernel: Any
    blocks: int
    given: dict[str, Any]


class Keys(NamedTuple):
    """Where keys and values lie. v is None for latents, whose first `dims` numbers are the value and whose other `rope` rotate."""

    k: Tensor
    v: Tensor | None
    dims: int
    v_dims: int
    rope: int
    heads: int
    page: int
    k_scale: Tensor | None
    v_scale: Tensor | None


class Batch(NamedTuple):
    """Which keys each query sees, and where they are found. queries: an upper bound of one request's. temperature: `[T]`, or None."""

    table: Tensor
    lengths: Tensor
    starts: Tensor
    queries: int
    mask: Tensor | None
    sinks: Tensor | None
    scale: float
    causal: bool
    left: int
    right: int
    chunk: int
    softcap: float
    deterministic: bool
    temperature: Tensor | None = None

    @property
    def behind(self) -> int:
        """How many keys before its own a query may see, -1 for all."""
        return min((n for n in (self.left, self.chunk - 1) if n >= 0), default=-1)


@functools.cache
def _device(index: int) -> tuple[int, int, bool]:
    """(multiprocessors, bytes of shared memory a program may have, whether warpgroups multiply: SM90 alone)."""
    properties: Any = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin, properties.major == 9


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Can a kernel be launched while the one before it runs (programmatic dependent launch), by this Triton on this device?"""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return False
    return "launch_pdl" in CUDAOptions.__dataclass_fields__


_launches = functools.lru_cache(maxsize=4096)(plan.launches)


def attention(
    query: Tensor, rope: Tensor | None, keys: Keys, batch: Batch, output: Tensor, lse: Tensor | None, choice: plan.Choice | None = None,
    most: int = 0,
) -> None:  # fmt: skip
    """Write attention of query `[T, H, D]` (and its rotated part) into output `[T, H, Dv]` and lse `[T, H]`."""
    with torch.cuda.device_of(query):
        for step in steps(query, rope, keys, batch, output, lse, choice, most):
            step.kernel[(step.blocks,)](**step.given)


def steps(
    query: Tensor, rope: Tensor | None, keys: Keys, batch: Batch, output: Tensor, lse: Tensor | None, choice: plan.Choice | None = None,
    most: int = 0,
) -> Iterator[Step]:  # fmt: skip
    """What `attention` launches, in order; what lies between its stages is allocated on the way.

    most: only the launches for requests of at most so many queries, which leave padding rows alone; 0 for all.
    """
    tokens, heads = query.shape[:2]
    if output.numel() == 0:
        return
    sms, memory, warpgroups = _device(query.device.index) if query.is_cuda else INTERPRETED
    block_d, block_dv = plan.padded(keys.dims), plan.padded(keys.v_dims)
    block_dr = plan.padded(keys.rope) if keys.rope else 16
    shape = plan.Shape(
        tokens,
        batch.table.shape[0],
        min(batch.queries, tokens),
        batch.table.shape[1] * keys.page,
        keys.heads,
        heads // keys.heads,
        max(keys.dims, keys.v_dims),
        block_d + (block_dr if keys.v is None else 0),
        block_d + (block_dr if keys.v is None else block_dv),
        query.dtype.itemsize,
        keys.k.dtype.itemsize,
        batch.mask is not None,
        batch.behind,
        warpgroups,
    )
    fixed = _arguments(query, rope, keys, batch, output, lse)
    constants = _constants(query, keys, batch, (block_d, block_dv, block_dr))
    for launch in _launches(shape, batch.deterministic, sms, memory, choice):
        if most and launch.most > most:
            continue
        for at, some, first in _bounded(launch, shape, heads * (keys.v_dims + 1) * 4):
            given = fixed if at is launch else fixed | _requests(fixed, first, some.requests)
            yield from _stages(at, some, keys, batch, given, constants, output, lse)


def _bounded(launch: plan.Launch, shape: plan.Shape, row_bytes: int) -> Iterator[tuple[plan.Launch, plan.Shape, int]]:
    """`launch` for so many requests at a time that their parts fit into MOST_PARTS_BYTES: (launch, shape, the first request)."""
    each = launch.queries * launch.splits * row_bytes
    most = max(1, MOST_PARTS_BYTES // each) if launch.parts and each else shape.requests
    if most >= shape.requests:
        yield launch, shape, 0
        return
    for first in range(0, shape.requests, most):
        count = min(most, shape.requests - first)
        yield plan.part_of(launch, count, first + count == shape.requests), shape._replace(requests=count), first


def _requests(fixed: dict[str, Any], first: int, count: int) -> dict[str, Any]:
    """The arguments that tell of requests, from `first` on."""
    table, lengths, starts = (fixed[f"{n}_ptr"] for n in ("table", "lengths", "starts"))
    end = first + count
    return {"table_ptr": table[first:end], "lengths_ptr": lengths[first:end], "starts_ptr": starts[first : end + 1], "requests": count}


def _arguments(query: Tensor, rope: Tensor | None, keys: Keys, batch: Batch, output: Tensor, lse: Tensor | None) -> dict[str, Any]:
    """What `attend` takes whatever the launch."""
    k, v = keys.k, keys.k if keys.v is None else keys.v
    table = batch.table if batch.table.stride(1) == 1 else batch.table.contiguous()
    for field, x, most in (("k_pages", k, keys.page), ("v_pages", v, keys.page), ("mask", batch.mask, table.shape[1] * keys.page)):
        if x is not None and x.stride(1) * most >= 2**31:
            raise InvalidInput(f"{field}.stride(1)", x.stride(1), f"< 2**31 / {most} (triton counts a page's keys in 32 bits)")
    mask = batch.mask if batch.mask is None or batch.mask.dtype != torch.bool else batch.mask.view(torch.uint8)
    # A soft cap works on scale * logit / cap, and gives back logits in base 2.
    scale, cap = (batch.scale / batch.softcap, batch.softcap * LOG2E) if batch.softcap > 0 else (batch.scale * LOG2E, 0.0)
    return {
        "q_ptr": query, "r_ptr": rope, "k_ptr": k, "v_ptr": v, "table_ptr": table, "mask_ptr": mask,
        "lengths_ptr": batch.lengths.contiguous(), "starts_ptr": batch.starts.contiguous(),
        "sinks_ptr": _flat(batch.sinks), "k_scale_ptr": _flat(keys.k_scale), "v_scale_ptr": _flat(keys.v_scale),
        "temperature_ptr": _flat(batch.temperature),
        "scale": scale, "cap": cap, "left": batch.left, "right": batch.right, "chunk": batch.chunk,
        "requests": table.shape[0], "tokens": query.shape[0], "steps": table.shape[0].bit_length(),
        "q_t": query.stride(0), "q_h": query.stride(1),
        "r_t": 0 if rope is None else rope.stride(0), "r_h": 0 if rope is None else rope.stride(1),
        "k_p": k.stride(0), "k_n": k.stride(1), "k_h": k.stride(2), "v_p": v.stride(0), "v_n": v.stride(1), "v_h": v.stride(2),
        "k_scale_h": _each(keys.k_scale), "v_scale_h": _each(keys.v_scale), "table_b": table.stride(0),
        "mask_t": 0 if mask is None else mask.stride(0), "mask_n": 0 if mask is None else mask.stride(1),
    } | _results(output, lse)  # fmt: skip


def _results(output: Tensor, lse: Tensor | None) -> dict[str, Any]:
    return {
        "out_ptr": output, "out_t": output.stride(0), "out_h": output.stride(1), "out_d": output.stride(2),
        "lse_ptr": lse, "lse_t": 0 if lse is None else lse.stride(0), "lse_h": 0 if lse is None else lse.stride(1),
    }  # fmt: skip


def _constants(query: Tensor, keys: Keys, batch: Batch, blocks: tuple[int, int, int]) -> dict[str, Any]:
    """What `attend` is compiled for, whatever the launch."""
    mask = "none" if batch.mask is None else "bool" if batch.mask.dtype == torch.bool else "additive"
    # The interpreter's products take bfloat16 for integers.
    wide = query.dtype == torch.float32 or not query.is_cuda
    return {
        "D": keys.dims, "DV": keys.v_dims, "DR": keys.rope, "BLOCK_D": blocks[0], "BLOCK_DV": blocks[1], "BLOCK_DR": blocks[2],
        "PAGE": keys.page, "KV_HEADS": keys.heads, "GROUP": query.shape[1] // keys.heads,
        "COMPUTE": tl.float32 if wide else tl.float16 if query.dtype == torch.float16 else tl.bfloat16,
        "CAUSAL": batch.causal, "LEFT": batch.left >= 0, "RIGHT": batch.right >= 0 and not batch.causal, "CHUNKED": batch.chunk > 0,
        "CAP": batch.softcap > 0, "TEMPERED": batch.temperature is not None, "MASK": mask, "LATENT": keys.v is None,
    }  # fmt: skip


def _stages(
    at: plan.Launch,
    shape: plan.Shape,
    keys: Keys,
    batch: Batch,
    fixed: dict[str, Any],
    constants: dict[str, Any],
    output: Tensor,
    lse: Tensor | None,
) -> Iterator[Step]:
    if at.blocks == 0:
        return
    heads = output.shape[1]
    rows = shape.requests * at.queries * heads
    parts = output.new_empty(rows * at.splits * (keys.v_dims + 1), dtype=torch.float32) if at.parts else None
    shared = {"width": at.queries, "splits": at.splits, "split_keys": at.split_keys, "rows": rows, "fewest": at.fewest, "most": at.most}
    overlap = at.parts and at.overlap and _overlaps(output.device)
    yield Step(attend, at.blocks, {
        **fixed, **constants, **shared, "parts_ptr": parts, "tiles": at.tiles, "pads": at.pads, "each": at.each,
        "TILE_M": at.tile.rows, "TILE_N": at.tile.keys, "RAGGED": at.ragged, "SPLIT": at.parts,
        "PEEL": at.tile.rows >= 64 and batch.mask is None, "OVERLAP": overlap,
        **_options(at.tile),
    })  # fmt: skip
    if parts is not None and rows:
        block = min(constants["BLOCK_DV"], 4096 // at.at_once)
        launched = {"num_warps": 4, **({"launch_pdl": True} if overlap else {}), **OPTIONS}
        yield Step(combine, rows * -(-keys.v_dims // block), {
            "parts_ptr": parts, "lengths_ptr": fixed["lengths_ptr"], "starts_ptr": fixed["starts_ptr"], "sinks_ptr": fixed["sinks_ptr"],
            "left": batch.left, "chunk": batch.chunk, **shared, **_results(output, lse), "tile": at.tile.keys,
            "HEADS": heads, "DV": keys.v_dims, "BLOCK_DV": block, "AT_ONCE": at.at_once,
            "LEFT": batch.left >= 0, "CHUNKED": batch.chunk > 0, "OVERLAP": overlap, **launched,
        })  # fmt: skip


def _options(tile: plan.Tile) -> dict[str, Any]:
    capped = {"maxnreg": tile.registers} if tile.registers else {}
    return {"num_warps": tile.warps, "num_stages": tile.stages, **capped, **OPTIONS}


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _each(scale: Tensor | None) -> int:
    """The step from one head's scale to the next: none where one serves all."""
    return 0 if scale is None or scale.numel() == 1 else 1


def merge_state(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor, output: Tensor, lse: Tensor) -> None:
    """Write the merge of `[T, H, D]` and `[T, H]` pairs into contiguous output and lse."""
    tokens, heads, dim = output_a.shape
    if output_a.numel() == 0:
        return
    block_d = plan.padded(dim)
    block_r = max(1, 2048 // block_d)
    with torch.cuda.device_of(output_a):
        merge[(-(-tokens * heads // block_r),)](
            output_a, lse_a, output_b, lse_b, output, lse, tokens * heads,
            *output_a.stride(), *lse_a.stride(), *output_b.stride(), *lse_b.stride(),
            HEADS=heads, D=dim, BLOCK_D=block_d, BLOCK_R=block_r, num_warps=4, **OPTIONS,
        )  # fmt: skip


def merge_states(outputs: Tensor, lses: Tensor, output: Tensor, lse: Tensor) -> None:
    """Write the merge over dim 1 of `[T, N, H, D]` and `[T, N, H]` into contiguous output and lse."""
    tokens, parts, heads, dim = outputs.shape
    if outputs.numel() == 0:
        return
    block_d = plan.padded(dim)
    block_r = max(1, 1024 // block_d)
    with torch.cuda.device_of(outputs):
        merge_all[(-(-tokens * heads // block_r),)](
            outputs, lses, output, lse, tokens * heads, parts, *outputs.stride(), *lses.stride(),
            HEADS=heads, D=dim, BLOCK_D=block_d, BLOCK_R=block_r, num_warps=4, **OPTIONS,
        )  # fmt: skip
