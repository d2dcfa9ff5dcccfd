"""Launches of attention, over pages, over latents and of dense and packed calls, and of merges.

Importing this module imports triton.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput
from attnops.core.kernel import deterministic
from attnops.core.record import values
from attnops.core.tensors import Rules, no_lse
from attnops.kernels.shared.launch.gpu import (
    computed_in,
    flat,
    gpu_of,
    launch,
    masked,
    overlaps,
    ruled,
    strides,
)
from attnops.kernels.shared.sizes import padded
from attnops.kernels.shared.tokens import fresh
from attnops.kernels.triton.device.attend import attend
from attnops.kernels.triton.device.merge import combine, merge, merge_all
from attnops.kernels.triton.launch import grids

if TYPE_CHECKING:
    from attnops.ops.attention import merge as merges, record as dense, varlen
    from attnops.ops.latent import record as mla
    from attnops.ops.pages import record as paged

MOST_PARTS_BYTES = 1 << 29
"""The most bytes of float32 that stage one leaves for stage two. Where a fixed split would leave
more, requests take turns."""

STAGE_TWO = (
    "parts_ptr",
    "lengths_ptr",
    "starts_ptr",
    "sinks_ptr",
    "out_ptr",
    "lse_ptr",
    "left",
    "chunk",
    "width",
    "splits",
    "split_keys",
    "rows",
    "fewest",
    "most",
    "out_t",
    "out_h",
    "out_d",
    "lse_t",
    "lse_h",
    "DV",
    "OVERLAP",
)
"""The arguments of stage one that stage two takes, too."""

BY_REQUEST = ("table_ptr", "lengths_ptr", "first_ptr")
"""The arguments of stage one that have a row for each request."""

_launches = functools.lru_cache(maxsize=4096)(grids.launches)


class Batch(NamedTuple):
    """Requests, and where their queries and keys begin.

    Tensors are int32, and contiguous within a row; `first` may be int64.

    starts: `[B + 1]`, of queries. lengths: `[B]`, keys.
    table: `[B, M]`, the page table; or without pages `[B, 1]`, as `attend` reads it.
    queries, capacity: queries and keys of one request at most.
    page: keys of a page; 0: there are none. first: `[B]`, the first key that may be seen.
    """

    starts: Tensor
    lengths: Tensor
    table: Tensor
    queries: int
    capacity: int
    page: int = 0
    first: Tensor | None = None


class Operands(NamedTuple):
    """What is multiplied, and where results go.

    query: `[..., Hq, D]`. key, value: `[..., Hkv, D]`, or latents, which are both.
    rest: the query against a key's numbers after the first D, where there are more. Those of a
    latent
        are its rotated part.
    output, lse: by token.
    """

    query: Tensor
    rest: Tensor | None
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor | None
    latent: bool = False


def attention(
    call: paged.PagedAttention | mla.MlaAttention,
    choice: grids.Choice | None = None,
    most: int = 0,
) -> None:
    """Write attention into the call's output and lse.

    Latents are keys and values of one head, which all query heads share.

    choice: a configuration to launch in place of the table's.
    most: serve only requests of at most so many queries, and leave padding rows alone; 0 serves
    all.
    """
    if call.output.numel() == 0:
        return
    given = _over_pages(call)
    table = call.page_table if call.page_table.stride(1) == 1 else call.page_table.contiguous()
    page = given.key.shape[1]
    refuse_far(("latent_pages" if given.latent else "k_pages", given.key, page))
    refuse_far(("v_pages", given.value, page), ("mask", call.mask, table.shape[1] * page))
    batch = Batch(
        call.cu_seqlens_q.contiguous(),
        call.seq_lens.contiguous(),
        table,
        min(call.max_seqlen_q, given.query.shape[0]),
        table.shape[1] * page,
        page,
    )
    _attend(call, batch, given, choice, most)


def few_queries(call: mla.MlaAttention) -> None:
    """Attention of the requests of at most `DECODE_QUERIES` queries. No other row is touched."""
    attention(call, most=grids.DECODE_QUERIES)


def dense_attention(call: dense.Attention) -> tuple[Tensor, Tensor]:
    """Every row of the batch is a request, whose keys follow one another."""
    (requests, queries), keys = call.query.shape[:2], call.key.shape[1]
    output, lse = fresh(call)
    if output.numel() == 0:
        return output, no_lse(output) if lse is None else lse
    at = torch.arange(requests + 1, dtype=torch.int32, device=output.device)
    if call.kv_end is None:
        lengths = torch.full((requests,), keys, dtype=torch.int32, device=output.device)
    else:
        lengths = call.kv_end.to(torch.int32).contiguous()
    refuse_far(("mask", call.mask, keys))
    batch = Batch(at * queries, lengths, at[:-1, None], queries, keys, first=flat(call.kv_start))
    by_token = output.flatten(0, 1), None if lse is None else lse.flatten(0, 1)
    given = _in_parts(call.query, call.key, call.value, *by_token)
    _attend(call, batch, given)
    return output, no_lse(output) if lse is None else lse


def varlen_attention(call: varlen.VarlenAttention) -> tuple[Tensor, Tensor]:
    """The keys of a request begin where `cu_seqlens_k` says."""
    output, lse = fresh(call)
    if output.numel() == 0:
        return output, no_lse(output) if lse is None else lse
    begins, most = call.cu_seqlens_k.contiguous(), call.max_seqlen_k
    refuse_far(("mask", call.mask, most))
    batch = Batch(
        call.cu_seqlens_q.contiguous(),
        begins[1:] - begins[:-1],
        begins[:-1, None],
        min(call.max_seqlen_q, call.query.shape[0]),
        most,
    )
    given = _in_parts(call.query, call.key, call.value, output, lse)
    _attend(call, batch, given)
    return output, no_lse(output) if lse is None else lse


def _over_pages(call: Any) -> Operands:
    """Pages are `[P, page, Hkv, D]`, or of latents `[P, page, Dc + Dr]`."""
    if call.spec.op == "paged_attention":
        return _in_parts(call.query, call.k_pages, call.v_pages, call.output, call.lse)
    pages = call.latent_pages
    return Operands(call.q_nope, call.q_pe, pages, pages, call.output, call.lse, latent=True)


def _in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor | None,
) -> Operands:
    """A head dim above 256 that is no power of two is read in two parts.

    576 is 512 + 64, where the next power of two would not fit.
    """
    dims = grids.first_part(query.shape[-1])
    if dims == query.shape[-1]:
        return Operands(query, None, key, value, output, lse)
    return Operands(query[..., :dims], query[..., dims:], key, value, output, lse)


def _attend(
    call: Any,
    batch: Batch,
    given: Operands,
    choice: grids.Choice | None = None,
    most: int = 0,
) -> None:
    """Launch all that a call needs."""
    output, rules, gpu = given.output, Rules.of(call), gpu_of(given.output)
    heads, dims = given.query.shape[-2:]
    kv_heads, v_dims = 1 if given.latent else given.key.shape[-2], output.shape[2]
    block_d, block_dv = padded(dims), padded(v_dims)
    block_dr = 0 if given.rest is None else padded(given.rest.shape[-1])
    requests, group = batch.table.shape[0], heads // kv_heads
    shape = grids.Shape(
        tokens=output.shape[0],
        requests=requests,
        queries=batch.queries,
        capacity=batch.capacity,
        kv_heads=kv_heads,
        group=group,
        head_dim=max(dims, v_dims),
        q_width=block_d + block_dr,
        width=block_d + block_dr + (0 if given.latent else block_dv),
        itemsize=_multiplied(given).dtype.itemsize,
        stored=given.key.dtype.itemsize,
        masked=call.mask is not None,
        left=_left(rules),
        warpgroups=gpu.warpgroups,
        wide=not given.latent and max(dims, v_dims) > 256,
        odd=_odd(given.key, given.value),
    )
    arguments: dict[str, Any] = {
        **_arguments(call, batch, given, rules),
        **masked(call.mask, batch.queries),
        "D": dims,
        "DV": v_dims,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "BLOCK_DR": block_dr or 16,
        "KV_HEADS": kv_heads,
        "GROUP": group,
    }
    for at in _launches(shape, deterministic(call.policy), gpu.multiprocessors, gpu.memory, choice):
        if most and at.most > most:
            continue
        part_bytes = at.queries * at.splits * heads * (v_dims + 1) * 4 if at.parts else 0
        turn = max(1, MOST_PARTS_BYTES // part_bytes) if part_bytes else requests
        if turn >= requests:
            _stages(at, arguments)
        else:
            _in_turns(at, arguments, turn)


def _in_turns(at: grids.Launch, arguments: dict[str, Any], turn: int) -> None:
    """Launch the stages for `turn` requests at once."""
    requests = arguments["requests"]
    for first in range(0, requests, turn):
        end = min(first + turn, requests)
        some = {n: x[first:end] for n in BY_REQUEST if (x := arguments[n]) is not None}
        some |= {
            "starts_ptr": arguments["starts_ptr"][first : end + 1],
            "requests": end - first,
        }
        _stages(grids.part_of(at, end - first, end == requests), arguments | some)


def _left(rules: Rules) -> int:
    """How many keys before its own a query may see, -1 for all."""
    return min((n for n in (rules.left, rules.chunk - 1) if n >= 0), default=-1)


def _odd(key: Tensor, value: Tensor) -> bool:
    key_bytes = key.shape[-1] * key.dtype.itemsize
    value_bytes = value.shape[-1] * value.dtype.itemsize
    return key_bytes % 16 > 0 or value_bytes % 16 > 0


def _arguments(call: Any, batch: Batch, given: Operands, rules: Rules) -> dict[str, Any]:
    """The arguments of `attend` that depend on neither tiles nor splits, but for the mask."""
    query, rest, k, v, output, lse, latent = given
    of_keys = (call.kv_scale, call.kv_scale) if latent else (call.k_scale, call.v_scale)
    # Packed keys are the rows of one tensor, others have a dim for pages or requests before that.
    row = 0 if batch.page == 0 and k.dim() == 3 else 1
    requests, table = batch.table.shape[0], batch.table
    return {
        **ruled(rules),
        **_scaled(q_scale=call.q_scale, k_scale=of_keys[0], v_scale=of_keys[1]),
        **strides(q=query),
        **(strides(r=rest) if rest is not None else {"r_b": 0, "r_t": 0, "r_h": 0}),
        "q_ptr": query,
        "r_ptr": rest,
        "k_ptr": k,
        "v_ptr": v,
        "out_ptr": output,
        "lse_ptr": lse,
        "table_ptr": table,
        "first_ptr": batch.first,
        "lengths_ptr": batch.lengths,
        "starts_ptr": batch.starts,
        "sinks_ptr": flat(call.sinks),
        "temperature_ptr": flat(getattr(call, "temperature", None)),
        "requests": requests,
        "tokens": output.shape[0],
        "steps": requests.bit_length(),
        "capacity": batch.capacity,
        "k_p": k.stride(0),
        "k_n": k.stride(row),
        "k_h": 0 if latent else k.stride(-2),
        "v_p": v.stride(0),
        "v_n": v.stride(row),
        "v_h": 0 if latent else v.stride(-2),
        "table_b": table.stride(0),
        "out_t": output.stride(0),
        "out_h": output.stride(1),
        "out_d": output.stride(2),
        "lse_t": 0 if lse is None else lse.stride(0),
        "lse_h": 0 if lse is None else lse.stride(1),
        "DR": 0 if rest is None else rest.shape[-1],
        "COMPUTE": computed_in(_multiplied(given)),
        "PAGE": batch.page,
        "LATENT": latent,
    }


def _multiplied(given: Operands) -> Tensor:
    """A tensor of the dtype of matrix products: one byte a number would round the weights of
    keys."""
    return given.output if given.query.dtype.itemsize == 1 else given.query


def _scaled(**given: Tensor | None) -> dict[str, Any]:
    """Scales `[1]` or `[Hkv]` by name: where each lies, and how far it is from one key head's to
    the next."""
    found: dict[str, Any] = {}
    for name, scale in given.items():
        by_head = scale is not None and scale.shape[0] > 1
        found |= {f"{name}_ptr": flat(scale), f"{name}_h": int(by_head)}
    return found


def refuse_far(*given: tuple[str, Tensor | None, int]) -> None:
    """Raise InvalidInput for a (field, tensor, keys) whose keys lie too far apart.

    Their offsets have 32 bits. Keys are the second dim of pages, and the last one of a mask.
    """
    for field, x, most in given:
        if x is None:
            continue
        dim = x.dim() - 1 if field == "mask" else 1
        if x.stride(dim) * most >= 2**31:
            want = f"< 2**31 / {most} (triton counts a page's keys in 32 bits)"
            raise InvalidInput(f"{field}.stride({dim})", x.stride(dim), want)


def _stages(at: grids.Launch, given: dict[str, Any]) -> None:
    """Launch stage one, and stage two where stage one leaves parts."""
    if at.blocks == 0:
        return
    output, dims = given["out_ptr"], given["DV"]
    heads = given["KV_HEADS"] * given["GROUP"]
    tile, parts = at.tile, at.parts
    rows = given["requests"] * at.queries * heads
    shared = {
        **given,
        "width": at.queries,
        "splits": at.splits,
        "split_keys": at.split_keys,
        "rows": rows,
        "fewest": at.fewest,
        "most": at.most,
        "parts_ptr": output.new_empty(rows * at.splits * (dims + 1), dtype=torch.float32)
        if parts
        else None,
        "OVERLAP": parts and at.overlap and overlaps(output.device),
    }
    capped = {"maxnreg": tile.registers} if tile.registers else {}
    launch(
        attend,
        (at.blocks,),
        {
            **shared,
            "tiles": at.tiles,
            "pads": at.pads,
            "each": at.each,
            "TILE_M": tile.rows,
            "TILE_N": tile.keys,
            "RAGGED": at.ragged,
            "SPLIT": parts,
            "PEEL": tile.rows >= 64 and given["MASK"] == "none",
            "num_stages": tile.stages,
            **capped,
        },
        warps=tile.warps,
    )
    if parts and rows:
        at_once = at.at_once
        block = min(given["BLOCK_DV"], 4096 // at_once)
        early = {"launch_pdl": True} if shared["OVERLAP"] else {}
        launch(
            combine,
            (rows * -(-dims // block),),
            {
                **{name: shared[name] for name in STAGE_TWO},
                "tile": tile.keys,
                "HEADS": heads,
                "BLOCK_DV": block,
                "AT_ONCE": at_once,
                **early,
            },
        )


def merge_state(call: merges.MergeState) -> tuple[Tensor, Tensor]:
    """An empty side is not multiplied, so `stale` makes no difference."""
    return _merged(merge, values(call)[:4], tuple(call.output_a.shape), 2048)


def merge_states(call: merges.MergeStates) -> tuple[Tensor, Tensor]:
    """An empty part is not read."""
    tokens, parts, heads, dims = call.outputs.shape
    return _merged(merge_all, values(call)[:2], (tokens, heads, dims), 1024, parts)


def _merged(
    kernel: Any, tensors: tuple[Any, ...], shape: tuple[int, ...], numbers: int, *parts: int
) -> tuple[Tensor, Tensor]:
    """(output of `shape` `[T, H, D]`, lse). tensors: outputs and lses in turn. numbers: those of
    one program, about."""
    output, lse = tensors[0].new_empty(shape), tensors[1].new_empty(shape[:2])
    if output.numel():
        rows, block_d = lse.numel(), padded(shape[2])
        block_r = max(1, numbers // block_d)
        constants = {"HEADS": shape[1], "D": shape[2], "BLOCK_D": block_d, "BLOCK_R": block_r}
        launch(
            kernel,
            (-(-rows // block_r),),
            constants,
            (*tensors, output, lse, rows, *parts, *(n for x in tensors for n in x.stride())),
        )
    return output, lse
