"""Launches of attention over pages and over latents, and of merges. Importing this module imports triton."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.call import values
from attnops.errors import InvalidInput
from attnops.kernel import deterministic
from attnops.kernels.triton.device.attend import attend
from attnops.kernels.triton.device.merge import combine, merge, merge_all
from attnops.kernels.triton.launch import grids
from attnops.kernels.triton.launch.gpu import computed_in, flat, gpu_of, launch, overlaps, ruled
from attnops.reference.rows import Rules

if TYPE_CHECKING:
    from attnops.ops import merge as merges, mla, paged

MOST_PARTS_BYTES = 1 << 29
"""The most bytes of float32 that stage one leaves for stage two. Where a fixed split would leave more, requests take turns."""

STAGE_TWO = (
    "parts_ptr", "lengths_ptr", "starts_ptr", "sinks_ptr", "out_ptr", "lse_ptr", "left", "chunk", "width", "splits", "split_keys", "rows",
    "fewest", "most", "out_t", "out_h", "out_d", "lse_t", "lse_h", "DV", "LEFT", "CHUNKED", "OVERLAP",
)  # fmt: skip
"""The arguments of stage one that stage two takes, too."""

_launches = functools.lru_cache(maxsize=4096)(grids.launches)


def attention(call: paged.PagedAttention | mla.MlaAttention, choice: grids.Choice | None = None, most: int = 0) -> None:
    """Write attention into the call's output and lse. Latents are keys and values of one head, which all query heads share.

    choice: a configuration to launch in place of the table's. most: serve only requests of at most so many queries, and leave padding
    rows alone; 0 serves all.
    """
    output, rules = call.output, Rules.of(call)
    if output.numel() == 0:
        return
    query, rope, k, _ = operands = _operands(call)
    (tokens, heads, dims), kv_heads = query.shape, k.shape[2] if rope is None else 1
    v_dims, page, gpu = output.shape[2], k.shape[1], gpu_of(output)
    block_d, block_dv, block_dr = grids.padded(dims), grids.padded(v_dims), 0 if rope is None else grids.padded(rope.shape[2])
    requests, width = call.page_table.shape
    # How many keys before its own a query may see, -1 for all.
    behind = min((n for n in (rules.left, rules.chunk - 1) if n >= 0), default=-1)
    shape = grids.Shape(
        tokens, requests, min(call.max_seqlen_q, tokens), width * page, kv_heads, heads // kv_heads, max(dims, v_dims), block_d + block_dr,
        block_d + (block_dr or block_dv), query.dtype.itemsize, k.dtype.itemsize, call.mask is not None, behind, gpu.warpgroups,
    )  # fmt: skip
    given: dict[str, Any] = _arguments(call, operands, rules) | {
        "D": dims, "DV": v_dims, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "BLOCK_DR": block_dr or 16, "PAGE": page,
        "KV_HEADS": kv_heads, "GROUP": heads // kv_heads,
    }  # fmt: skip
    for at in _launches(shape, deterministic(call.policy), gpu.multiprocessors, gpu.memory, choice):
        if most and at.most > most:
            continue
        part_bytes = at.queries * at.splits * heads * (v_dims + 1) * 4 if at.parts else 0
        turn = max(1, MOST_PARTS_BYTES // part_bytes) if part_bytes else requests
        if turn >= requests:
            _stages(at, given)
            continue
        for first in range(0, requests, turn):
            end = min(first + turn, requests)
            some = {
                "table_ptr": given["table_ptr"][first:end], "lengths_ptr": given["lengths_ptr"][first:end],
                "starts_ptr": given["starts_ptr"][first : end + 1], "requests": end - first,
            }  # fmt: skip
            _stages(grids.part_of(at, end - first, end == requests), given | some)


def few_queries(call: mla.MlaAttention) -> None:
    """Attention of the requests of at most `DECODE_QUERIES` queries. Other rows, those of no request included, are left alone."""
    attention(call, most=grids.DECODE_QUERIES)


def _operands(call: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(query, its rotated part, keys, values): pages `[P, page, H, D]`, or latents `[P, page, Dc + Dr]`, which are both."""
    if call.spec.op == "paged_attention":
        return call.query, None, call.k_pages, call.v_pages
    return call.q_nope, call.q_pe, call.latent_pages, call.latent_pages


def _arguments(call: Any, operands: tuple[Tensor, Tensor | None, Tensor, Tensor], rules: Rules) -> dict[str, Any]:
    """The arguments of `attend` that depend on neither tiles nor splits."""
    query, rope, k, v = operands
    k_scale, v_scale, warm = (call.k_scale, call.v_scale, call.temperature) if rope is None else (call.kv_scale, call.kv_scale, None)
    latent, page, mask, output, lse = rope is not None, k.shape[1], call.mask, call.output, call.lse
    table = call.page_table if call.page_table.stride(1) == 1 else call.page_table.contiguous()
    refuse_far(("latent_pages" if latent else "k_pages", k, page), ("v_pages", v, page), ("mask", mask, table.shape[1] * page))
    kind = "none" if mask is None else "additive"
    if mask is not None and mask.dtype == torch.bool:
        kind, mask = "bool", mask.view(torch.uint8)
    return {
        **ruled(rules),
        "q_ptr": query, "r_ptr": rope, "k_ptr": k, "v_ptr": v, "table_ptr": table, "mask_ptr": mask,
        "lengths_ptr": call.seq_lens.contiguous(), "starts_ptr": call.cu_seqlens_q.contiguous(),
        "sinks_ptr": flat(call.sinks), "k_scale_ptr": flat(k_scale), "v_scale_ptr": flat(v_scale), "temperature_ptr": flat(warm),
        "out_ptr": output, "lse_ptr": lse, "requests": table.shape[0], "tokens": query.shape[0], "steps": table.shape[0].bit_length(),
        "q_t": query.stride(0), "q_h": query.stride(1),
        "r_t": 0 if rope is None else rope.stride(0), "r_h": 0 if rope is None else rope.stride(1),
        "k_p": k.stride(0), "k_n": k.stride(1), "k_h": 0 if latent else k.stride(2),
        "v_p": v.stride(0), "v_n": v.stride(1), "v_h": 0 if latent else v.stride(2),
        # From one head's scale to the next; 0 where one serves all.
        "k_scale_h": int(k_scale is not None and k_scale.shape[0] > 1), "v_scale_h": int(v_scale is not None and v_scale.shape[0] > 1),
        "table_b": table.stride(0), "mask_t": 0 if mask is None else mask.stride(0), "mask_n": 0 if mask is None else mask.stride(1),
        "out_t": output.stride(0), "out_h": output.stride(1), "out_d": output.stride(2),
        "lse_t": 0 if lse is None else lse.stride(0), "lse_h": 0 if lse is None else lse.stride(1),
        "DR": 0 if rope is None else rope.shape[2], "COMPUTE": computed_in(query), "TEMPERED": warm is not None, "MASK": kind,
        "LATENT": latent,
    }  # fmt: skip


def refuse_far(*given: tuple[str, Tensor | None, int]) -> None:
    """Raise InvalidInput for a (field, tensor, keys) whose keys, along its second dim, are too far apart for offsets of 32 bits."""
    for field, x, most in given:
        if x is not None and x.stride(1) * most >= 2**31:
            raise InvalidInput(f"{field}.stride(1)", x.stride(1), f"< 2**31 / {most} (triton counts a page's keys in 32 bits)")


def _stages(at: grids.Launch, given: dict[str, Any]) -> None:
    """Launch stage one, and stage two where stage one leaves parts."""
    if at.blocks == 0:
        return
    output, dims, heads, tile = given["out_ptr"], given["DV"], given["KV_HEADS"] * given["GROUP"], at.tile
    rows = given["requests"] * at.queries * heads
    shared = {
        **given, "width": at.queries, "splits": at.splits, "split_keys": at.split_keys, "rows": rows, "fewest": at.fewest, "most": at.most,
        "parts_ptr": output.new_empty(rows * at.splits * (dims + 1), dtype=torch.float32) if at.parts else None,
        "OVERLAP": at.parts and at.overlap and overlaps(output.device),
    }  # fmt: skip
    capped = {"maxnreg": tile.registers} if tile.registers else {}
    launch(attend, (at.blocks,), {
        **shared, "tiles": at.tiles, "pads": at.pads, "each": at.each, "TILE_M": tile.rows, "TILE_N": tile.keys, "RAGGED": at.ragged,
        "SPLIT": at.parts, "PEEL": tile.rows >= 64 and given["MASK"] == "none", "num_stages": tile.stages, **capped,
    }, warps=tile.warps)  # fmt: skip
    if at.parts and rows:
        block = min(given["BLOCK_DV"], 4096 // at.at_once)
        early = {"launch_pdl": True} if shared["OVERLAP"] else {}
        launch(combine, (rows * -(-dims // block),), {
            **{name: shared[name] for name in STAGE_TWO}, "tile": tile.keys, "HEADS": heads, "BLOCK_DV": block, "AT_ONCE": at.at_once,
            **early,
        })  # fmt: skip


def merge_state(call: merges.MergeState) -> tuple[Tensor, Tensor]:
    """An empty side is not multiplied, so `stale` makes no difference."""
    return _merged(merge, values(call)[:4], tuple(call.output_a.shape), 2048)


def merge_states(call: merges.MergeStates) -> tuple[Tensor, Tensor]:
    """An empty part is not read."""
    tokens, parts, heads, dims = call.outputs.shape
    return _merged(merge_all, values(call)[:2], (tokens, heads, dims), 1024, parts)


def _merged(kernel: Any, tensors: tuple[Any, ...], shape: tuple[int, ...], numbers: int, *parts: int) -> tuple[Tensor, Tensor]:
    """(output of `shape` `[T, H, D]`, lse). tensors: outputs and lses in turn. numbers: those of one program, about."""
    output, lse = tensors[0].new_empty(shape), tensors[1].new_empty(shape[:2])
    if output.numel():
        rows, block_d = lse.numel(), grids.padded(shape[2])
        block_r = max(1, numbers // block_d)
        constants = {"HEADS": shape[1], "D": shape[2], "BLOCK_D": block_d, "BLOCK_R": block_r}
        launch(kernel, (-(-rows // block_r),), constants, (*tensors, output, lse, rows, *parts, *(n for x in tensors for n in x.stride())))
    return output, lse
