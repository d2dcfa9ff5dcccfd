"""The reference under a deterministic policy: every request by itself, at its own lengths.

A matrix product's order of summation may follow from the sizes of the whole batch, and from how far a request is padded. The loops read
lengths on the host, so this serves tensors on the CPU only.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnops.call import changed
from attnops.kernel import deterministic
from attnops.kernels.shared.tokens import see_nothing

Run = Callable[[Any], Any]


def by_request(op: str, run: Run) -> Run:
    """`run`, a reference body of `op`, that takes the requests one by one where the policy is deterministic."""
    loop = LOOPS[op]

    @functools.wraps(run)
    def either(call: Any) -> Any:
        return loop(run, call) if deterministic(call.policy) else run(call)

    return either


def _sliced(call: Any, names: Iterable[str], part: Callable[[Tensor], Tensor]) -> Any:
    """The call with a part of each of these arguments that it has."""
    return changed(call, **{n: part(x) for n in names if isinstance(x := getattr(call, n, None), Tensor)})


def _rows(call: Any) -> Iterator[Any]:
    """The call of each request of a dense batch. Copies, because a product may also depend on the alignment of its operands."""
    batch = call.query.shape[0]
    names = ("query", "key", "value", "mask", "kv_start", "kv_end", "grad_output", "grad_lse", "output", "lse")
    for b in range(batch):

        def row(x: Tensor, b: int = b) -> Tensor:
            return x[b : b + 1].clone(memory_format=torch.contiguous_format) if x.shape[0] == batch else x

        yield _sliced(call, names, row)


def _dense(run: Run, call: Any) -> tuple[Tensor, ...]:
    if call.query.shape[0] == 0:
        return run(call)  # type: ignore[no-any-return]
    found = [run(_in_range(row)) for row in _rows(call)]
    return torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found]) if call.return_lse else found[0][1]


def _dense_backward(run: Run, call: Any) -> tuple[Tensor, ...]:
    batch, mask = call.query.shape[0], call.mask
    if batch == 0:
        return run(call)  # type: ignore[no-any-return]
    *grads, masks, sinks = zip(*(run(row) for row in _rows(call)), strict=True)
    whole = mask is not None and mask.shape[0] == batch > 1 and masks[0].numel() > 0
    return *map(torch.cat, grads), torch.cat(masks) if whole else _sum(masks), _sum(sinks)


def _in_range(call: Any) -> Any:
    """One request's call without the keys outside of its range, so that its sums do not depend on the longest request."""
    start, end, keys = call.kv_start, call.kv_end, call.key.shape[1]
    # Chunks are counted from the first key, which then stays.
    first = 0 if start is None or call.attention_chunk else min(max(int(start), 0), keys)
    last = keys if end is None else min(max(int(end), 0), keys)
    if last <= first:
        return call
    short = _sliced(call, ("key", "value"), lambda x: x[:, first:last].contiguous())
    short = _sliced(short, ("mask",), lambda x: x[..., first:last])
    return _sliced(short, ("kv_start", "kv_end"), lambda x: x - first)


def _requests(call: Any) -> Iterator[tuple[slice, slice, int, Any]]:
    """(tokens, keys, number, call) of every request with tokens. Calls on pages have no keys of their own to slice."""
    starts, packed = call.cu_seqlens_q.tolist(), hasattr(call, "cu_seqlens_k")
    key_starts = call.cu_seqlens_k.tolist() if packed else [0] * len(starts)
    names = ("query", "q_nope", "q_pe", "mask", "temperature", "output", "lse", "grad_output", "grad_lse")
    for b, (begin, end) in enumerate(itertools.pairwise(starts)):
        if begin == end:
            continue
        tokens, keys = slice(begin, end), slice(key_starts[b], key_starts[b + 1])
        mine = _sliced(call, names, lambda x, tokens=tokens: x[tokens])  # type: ignore[misc]
        mine = changed(mine, cu_seqlens_q=call.cu_seqlens_q.new_tensor([0, end - begin]), max_seqlen_q=end - begin)
        if packed:
            count = keys.stop - keys.start
            own = {"key": call.key[keys], "value": call.value[keys], "cu_seqlens_k": call.cu_seqlens_k.new_tensor([0, count])}
            mine = changed(mine, **own, max_seqlen_k=max(count, 1))
        yield tokens, keys, b, mine


def _varlen(run: Run, call: Any) -> tuple[Tensor, Tensor]:
    query, value = call.query, call.value
    output, lse = None, query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
    own = None
    for tokens, _, _, mine in _requests(call):
        part, own = run(mine)
        output = part.new_zeros((*query.shape[:2], value.shape[2])) if output is None else output
        output[tokens] = part
        if call.return_lse:
            lse[tokens] = own
    if output is None or own is None:
        return run(call)  # type: ignore[no-any-return]
    return output, lse if call.return_lse else own


def _varlen_backward(run: Run, call: Any) -> tuple[Tensor, ...]:
    grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (call.query, call.key, call.value))
    sinks = []
    for tokens, keys, _, mine in _requests(call):
        found = run(mine)
        for grad, where, part in zip(grads, (tokens, keys, keys), found, strict=False):
            grad[where] = part
        sinks.append(found[3])
    return *grads, _sum(sinks) if sinks else run(call)[3]


def _sum(parts: Iterable[Tensor]) -> Tensor:
    stacked = torch.stack(list(parts))
    return stacked.sum(0, dtype=torch.promote_types(stacked.dtype, torch.float32)).to(stacked.dtype)


def _paged(run: Run, call: Any) -> None:
    """`paged_attention` and `mla_attention`: no page past a request's end is gathered."""
    page = (call.k_pages if hasattr(call, "k_pages") else call.latent_pages).shape[1]
    see_nothing(call.output, call.lse)
    lengths = call.seq_lens.tolist()
    for _, _, b, mine in _requests(call):
        pages = max(-(-lengths[b] // page), 1)
        run(changed(mine, page_table=call.page_table[b : b + 1, :pages], seq_lens=call.seq_lens[b : b + 1]))


def _vertical_slash(run: Run, call: Any) -> None:
    see_nothing(call.output, call.lse)
    lists = ("block_count", "block_offset", "column_count", "column_index")
    for _, _, b, mine in _requests(call):
        run(_sliced(mine, lists, lambda x, b=b: x[b : b + 1]))  # type: ignore[misc]


def _sparse(run: Run, call: Any) -> None:
    """A token has a list of its own, and so is a request of its own."""
    see_nothing(call.output, call.lse)
    names = ("q_nope", "q_pe", "indices", "topk_length", "output", "lse")
    for t in range(call.q_nope.shape[0]):
        run(_sliced(call, names, lambda x, t=t: x[t : t + 1]))  # type: ignore[misc]


LOOPS: dict[str, Callable[[Run, Any], Any]] = {
    "attention": _dense,
    "attention_backward": _dense_backward,
    "varlen_attention": _varlen,
    "varlen_attention_backward": _varlen_backward,
    "paged_attention": _paged,
    "mla_attention": _paged,
    "sparse_mla_attention": _sparse,
    "vertical_slash_attention": _vertical_slash,
}
"""The ops that multiply matrices. Pointwise ops and those that count in integers do not depend on the batch."""
