"""Device functions: a round of speculation, a row a program."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit(do_not_specialize=["most"])
def lookup_drafts(
    tokens_ptr,
    lengths_ptr,
    drafts_ptr,
    counts_ptr,
    most,
    tokens_b,
    tokens_l,
    lengths_b,
    NGRAM: constexpr,
    K: constexpr,
    KP: constexpr,
    BLOCK: constexpr,
):
    """Grid: (batch,). drafts: int64 `[batch, K]`, contiguous. See `attnops.ops.lookup_drafts`."""
    row = tl.program_id(0).to(tl.int64)
    tokens_ptr += row * tokens_b
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + row * lengths_b), 0), most).to(tl.int64)
    best = tl.zeros([BLOCK], tl.int64) - 1
    for begin in range(0, length - 1, BLOCK):
        end = begin + tl.arange(0, BLOCK)
        matches = end < length - 1
        matched = tl.zeros([BLOCK], tl.int32)
        for n in tl.static_range(NGRAM):
            # Not masked by the matches so far, so that no load waits for another.
            here = (end < length - 1) & (end >= n)
            token = tl.load(tokens_ptr + (end - n) * tokens_l, mask=here, other=0)
            last = tl.load(tokens_ptr + (length - 1 - n) * tokens_l, mask=length > n, other=0)
            matches = matches & here & (token == last)
            matched += matches.to(tl.int32)
        best = tl.maximum(best, tl.where(matched > 0, matched.to(tl.int64) * most + end, -1))
    top = tl.max(best, 0)
    k = tl.arange(0, KP)
    place = tl.where(top >= 0, top % most + 1, length) + k
    there = (k < K) & (place < length)
    draft = tl.load(tokens_ptr + place * tokens_l, mask=there, other=-1)
    tl.store(drafts_ptr + row * K + k, draft, mask=k < K)
    tl.store(counts_ptr + row, tl.sum(there.to(tl.int32), 0))


@triton.jit
def accept(
    tokens_ptr,
    target_ptr,
    parents_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    tokens_b,
    tokens_n,
    target_b,
    target_n,
    parents_b,
    parents_n,
    N: constexpr,
    NP: constexpr,
):
    """Grid: (batch,). path: int32 `[batch, N]`, contiguous. See `attnops.ops.accept`."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NP)
    at = n.to(tl.int64)
    token = tl.load(tokens_ptr + row * tokens_b + at * tokens_n, mask=n < N, other=-1)
    target = tl.load(target_ptr + row * target_b + at * target_n, mask=n < N, other=-1)
    parent = n - 1
    if parents_ptr is not None:
        parent = tl.load(parents_ptr + row * parents_b + at * parents_n, mask=n < N, other=-1)
    # A child comes after its parent: the loop below ends.
    parent = tl.where((token >= 0) & (parent < n), parent, -1)
    path = tl.where(n == 0, 0, -1)
    accepted = 0
    following = tl.sum(tl.where(n == 0, target, 0), 0)
    node = tl.min(tl.where((parent == 0) & (token == following), n, NP), 0)
    while node < NP:
        accepted += 1
        path = tl.where(n == accepted, node, path)
        following = tl.sum(tl.where(n == node, target, 0), 0)
        node = tl.min(tl.where((parent == node) & (token == following), n, NP), 0)
    tl.store(path_ptr + row * N + n, path, mask=n < N)
    tl.store(accepted_ptr + row, accepted)
    tl.store(next_ptr + row, following)
