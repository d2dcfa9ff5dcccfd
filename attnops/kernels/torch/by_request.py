"""The reference under a deterministic policy: every request by itself, at its own lengths.

A matrix product's order of summation may follow from the sizes of the whole batch, and from how far a request is padded. Lengths are
read on the host, so this serves tensors on the CPU only.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnops.kernel import deterministic

Run = Callable[..., Any]
Given = dict[str, Any]


def by_request(op: str, run: Run) -> Run:
    """`run`, a reference body of `op`, that takes the requests one by one where the policy is deterministic."""
    loop = LOOPS[op]
    signature = inspect.signature(run)

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not deterministic(kwargs.get("policy", "")):
            return run(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return loop(run, dict(bound.arguments))

    return call


def _dense(run: Run, given: Given) -> tuple[Tensor, ...]:
    """Keys outside of a request's range are left out, so that its sums do not depend on the longest request."""
    batch = given["query"].shape[0]
    if batch == 0:
        return run(**given)  # type: ignore[no-any-return]
    names = ("query", "key", "value", "mask", "kv_start", "kv_end", "grad_output", "grad_lse", "output", "lse")
    # Copies, because a product may also depend on where its operands begin.
    rows = [{n: _copy(x, b, batch) for n in names if isinstance(x := given.get(n), Tensor)} for b in range(batch)]
    backward = "grad_output" in given
    found = [run(**given | (row if backward else _in_range(given | row))) for row in rows]
    first = tuple(torch.cat(part) for part in list(zip(*found, strict=True))[: 3 if backward else 1])
    if not backward:
        return *first, torch.cat([f[1] for f in found]) if given["return_lse"] else found[0][1]
    mask = given["mask"]
    whole = mask is not None and mask.shape[0] == batch > 1 and found[0][3].numel() > 0
    return *first, torch.cat([f[3] for f in found]) if whole else _sum(f[3] for f in found), _sum(f[4] for f in found)


def _copy(x: Tensor, b: int, batch: int) -> Tensor:
    return x[b : b + 1].clone(memory_format=torch.contiguous_format) if x.shape[0] == batch else x


def _in_range(given: Given) -> Given:
    """One request's call without the keys outside of its range. Chunks are counted from the first key, so that it stays."""
    start, end, keys = given["kv_start"], given["kv_end"], given["key"].shape[1]
    first = 0 if start is None or given["attention_chunk"] else min(max(int(start), 0), keys)
    last = keys if end is None else min(max(int(end), 0), keys)
    if last <= first:
        return given
    short = {n: given[n][:, first:last].contiguous() for n in ("key", "value")}
    if given["mask"] is not None:
        short["mask"] = given["mask"][..., first:last]
    moved = {n: x - first for n, x in (("kv_start", start), ("kv_end", end)) if x is not None}
    return given | short | moved


def _requests(given: Given) -> Iterator[tuple[slice, slice, int, Given]]:
    """(tokens, keys, number, arguments) of every request with tokens. Calls on pages have no keys of their own to slice."""
    starts = given["cu_seqlens_q"].tolist()
    key_starts = given["cu_seqlens_k"].tolist() if "cu_seqlens_k" in given else [0] * len(starts)
    for b, (begin, end) in enumerate(itertools.pairwise(starts)):
        if begin == end:
            continue
        tokens, keys = slice(begin, end), slice(key_starts[b], key_starts[b + 1])
        mine = dict(given)
        for name in ("query", "q_nope", "q_pe", "mask", "temperature", "output", "lse", "grad_output", "grad_lse"):
            if isinstance(given.get(name), Tensor):
                mine[name] = given[name][tokens]
        mine |= {"cu_seqlens_q": given["cu_seqlens_q"].new_tensor([0, end - begin]), "max_seqlen_q": end - begin}
        if "cu_seqlens_k" in given:
            count = keys.stop - keys.start
            mine |= {n: given[n][keys] for n in ("key", "value")}
            mine |= {"cu_seqlens_k": given["cu_seqlens_k"].new_tensor([0, count]), "max_seqlen_k": max(count, 1)}
        yield tokens, keys, b, mine


def _packed(run: Run, given: Given) -> tuple[Tensor, Tensor]:
    query, value = given["query"], given["value"]
    output, lse = None, query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
    nothing = None
    for tokens, _, _, mine in _requests(given):
        part, nothing = run(**mine)
        output = part.new_zeros((*query.shape[:2], value.shape[2])) if output is None else output
        output[tokens] = part
        if given["return_lse"]:
            lse[tokens] = nothing
    if output is None or nothing is None:
        return run(**given)  # type: ignore[no-any-return]
    return output, lse if given["return_lse"] else nothing


def _packed_backward(run: Run, given: Given) -> tuple[Tensor, ...]:
    grads = tuple(torch.zeros_like(given[n], memory_format=torch.contiguous_format) for n in ("query", "key", "value"))
    sinks = []
    for tokens, keys, _, mine in _requests(given):
        found = run(**mine)
        for grad, where, part in zip(grads, (tokens, keys, keys), found, strict=False):
            grad[where] = part
        sinks.append(found[3])
    return *grads, _sum(sinks) if sinks else run(**given)[3]


def _sum(parts: Any) -> Tensor:
    stacked = torch.stack(list(parts))
    return stacked.sum(0, dtype=torch.promote_types(stacked.dtype, torch.float32)).to(stacked.dtype)


def _paged(run: Run, given: Given) -> None:
    """`paged_attention` and `mla_attention`: no page past a request's end is gathered."""
    page = given["k_pages" if "k_pages" in given else "latent_pages"].shape[1]
    _clear(given)
    lengths = given["seq_lens"].tolist()
    for _, _, b, mine in _requests(given):
        pages = max(-(-lengths[b] // page), 1)
        mine |= {"page_table": given["page_table"][b : b + 1, :pages], "seq_lens": given["seq_lens"][b : b + 1]}
        run(**mine)


def _vertical_slash(run: Run, given: Given) -> None:
    _clear(given)
    for _, _, b, mine in _requests(given):
        lists = ("block_count", "block_offset", "column_count", "column_index")
        run(**mine | {n: given[n][b : b + 1] for n in lists})


def _sparse(run: Run, given: Given) -> None:
    """A token has a list of its own, and so is a request of its own."""
    names = ("q_nope", "q_pe", "indices", "topk_length", "output", "lse")
    _clear(given)
    for t in range(given["q_nope"].shape[0]):
        run(**given | {n: given[n][t : t + 1] for n in names if given[n] is not None})


def _clear(given: Given) -> None:
    given["output"].zero_()
    if given["lse"] is not None:
        given["lse"].fill_(float("-inf"))


LOOPS: dict[str, Callable[[Run, Given], Any]] = {
    "attention": _dense,
    "attention_backward": _dense,
    "varlen_attention": _packed,
    "varlen_attention_backward": _packed_backward,
    "paged_attention": _paged,
    "mla_attention": _paged,
    "sparse_mla_attention": _sparse,
    "vertical_slash_attention": _vertical_slash,
}
"""The ops that multiply matrices. What is pointwise or counts in integers does not depend on the batch."""
