"""Device functions: the end of a round, a row a program."""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.speculation import ANY, nodes_of, way


@triton.jit
def ends_at(token, eos_ptr, eos_e, ends):
    """Which tokens `[NP]` end a row."""
    found = token != token
    for e in range(ends):
        found = found | (token == tl.load(eos_ptr + e * eos_e))
    return found


@triton.jit
def move(ptr, count):
    tl.store(ptr, tl.load(ptr) + count)


@triton.jit(do_not_specialize=["ends", "width"])
def advance_rows(
    drafts_ptr,
    target_ptr,
    eos_ptr,
    most_ptr,
    parents_ptr,
    tokens_ptr,
    lengths_ptr,
    stored_ptr,
    position_ptr,
    unfinished_ptr,
    path_ptr,
    news_ptr,
    ends,
    width,
    drafts_b,
    drafts_n,
    target_b,
    target_n,
    eos_e,
    parents_b,
    parents_n,
    tokens_b,
    tokens_l,
    lengths_b,
    stored_b,
    position_b,
    unfinished_b,
    path_b,
    path_n,
    news_b,
    news_n,
    N: constexpr,
    NP: constexpr,
):
    """Grid: (batch,). One warp, so that no thread writes before all have read. See
    `attnops.ops.advance_rows`."""
    row = tl.program_id(0).to(tl.int64)
    if parents_ptr is not None:
        parents_ptr += row * parents_b
    n, token, parent = nodes_of(
        drafts_ptr + row * drafts_b, parents_ptr, drafts_n, parents_n, ANY, N, NP
    )
    at = n.to(tl.int64)
    target = tl.load(target_ptr + row * target_b + at * target_n, mask=n < N, other=-1)
    path, chosen, accepted = way(n, token, parent, target, NP)
    lengths_ptr += row * lengths_b
    unfinished_ptr += row * unfinished_b
    length = tl.load(lengths_ptr)
    most = tl.minimum(tl.load(most_ptr), width)
    unfinished = tl.load(unfinished_ptr)
    first = tl.min(tl.where(ends_at(chosen, eos_ptr, eos_e, ends), n + 1, NP + 1), 0)
    count = tl.minimum(tl.minimum(accepted + 1, first), tl.maximum(most - length, 0))
    count = tl.where(unfinished == 0, 0, count).to(tl.int32)
    kept = n < count
    place = length + at
    tokens_ptr += row * tokens_b
    tl.store(tokens_ptr + place * tokens_l, chosen, mask=kept & (place >= 0))
    tl.store(path_ptr + row * path_b + at * path_n, tl.where(kept, path, -1), mask=n < N)
    news_ptr += row * news_b
    tl.store(news_ptr, count.to(tl.int64))
    tl.store(news_ptr + (at + 1) * news_n, tl.where(kept, chosen, -1), mask=n < N)
    ended = (length + count >= most) | (first <= count)
    tl.store(unfinished_ptr, tl.where(ended, 0, unfinished))
    tl.store(lengths_ptr, length + count)
    move(stored_ptr + row * stored_b, count)
    move(position_ptr + row * position_b, count)


@triton.jit(do_not_specialize=["width", "words"])
def next_inputs(
    found_ptr,
    tokens_ptr,
    lengths_ptr,
    position_ptr,
    last_ptr,
    drafts_ptr,
    ids_ptr,
    positions_ptr,
    offered_ptr,
    width,
    words,
    found_b,
    found_k,
    tokens_b,
    tokens_l,
    lengths_b,
    position_b,
    last_b,
    drafts_b,
    drafts_n,
    ids_b,
    ids_n,
    positions_b,
    positions_n,
    offered_b,
    K: constexpr,
    N: constexpr,
    NP: constexpr,
):
    """Grid: (batch,). See `attnops.ops.next_inputs`."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NP).to(tl.int64)
    inside = n < N
    length = tl.load(lengths_ptr + row * lengths_b).to(tl.int64)
    at = tl.minimum(tl.maximum(length - 1, 0), width - 1)
    last = tl.load(tokens_ptr + row * tokens_b + at * tokens_l)
    there = (n > 0) & (n <= K) & inside
    draft = tl.load(found_ptr + row * found_b + (n - 1) * found_k, mask=there, other=-1)
    draft = tl.where(n == 0, last, draft)
    tl.store(drafts_ptr + row * drafts_b + n * drafts_n, draft, mask=inside)
    word = tl.minimum(tl.maximum(draft, 0), words - 1)
    tl.store(ids_ptr + row * ids_b + n * ids_n, word, mask=inside)
    position = tl.load(position_ptr + row * position_b) + n
    position = tl.minimum(position, tl.load(last_ptr + row * last_b))
    tl.store(positions_ptr + row * positions_b + n * positions_n, position, mask=inside)
    offered = tl.sum((there & (draft >= 0)).to(tl.int64), 0)
    tl.store(offered_ptr + row * offered_b, offered)
