"""Device functions: a round of speculation, a row a program."""

import triton
import triton.language as tl
from triton.language import constexpr

ANY = constexpr(2**63 - 1)
"""More tokens than any vocabulary has."""


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
def nodes_of(tokens_ptr, parents_ptr, tokens_n, parents_n, words, N: constexpr, NP: constexpr):
    """(0 to NP - 1, tokens, parents) of a row's nodes. The parent is -1 of a node that no way goes
    to: a child comes after its parent, so that every way ends."""
    n = tl.arange(0, NP)
    at = n.to(tl.int64)
    token = tl.load(tokens_ptr + at * tokens_n, mask=n < N, other=-1)
    parent = n - 1
    if parents_ptr is not None:
        parent = tl.load(parents_ptr + at * parents_n, mask=n < N, other=-1)
    return n, token, tl.where((token >= 0) & (token < words) & (parent < n), parent, -1)


@triton.jit
def way(n, token, parent, target, NP: constexpr):
    """(the nodes from the root along the drafts that the target chose, -1 beyond; what it chose
    after each of them; how many drafts they are)."""
    path = tl.where(n == 0, 0, -1)
    accepted = 0
    following = tl.sum(tl.where(n == 0, target, 0), 0)
    chosen = tl.where(n == 0, target, 0)
    node = tl.min(tl.where((parent == 0) & (token == following), n, NP), 0)
    while node < NP:
        accepted += 1
        path = tl.where(n == accepted, node, path)
        following = tl.sum(tl.where(n == node, target, 0), 0)
        chosen = tl.where(n == accepted, following, chosen)
        node = tl.min(tl.where((parent == node) & (token == following), n, NP), 0)
    return path, chosen, accepted


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
    if parents_ptr is not None:
        parents_ptr += row * parents_b
    n, token, parent = nodes_of(
        tokens_ptr + row * tokens_b, parents_ptr, tokens_n, parents_n, ANY, N, NP
    )
    target = tl.load(target_ptr + row * target_b + n.to(tl.int64) * target_n, mask=n < N, other=-1)
    path, chosen, accepted = way(n, token, parent, target, NP)
    tl.store(path_ptr + row * N + n, path, mask=n < N)
    tl.store(accepted_ptr + row, accepted)
    tl.store(next_ptr + row, tl.sum(tl.where(n == accepted, chosen, 0), 0))


@triton.jit
def rest_at(own_ptr, own_v, rest_ptr, fresh, v, inside):
    """What is left of a distribution at these tokens: all of it, or what was written."""
    if fresh:
        x = tl.load(own_ptr + v * own_v, mask=inside, other=0.0)
    else:
        x = tl.load(rest_ptr + v, mask=inside, other=0.0)
    return x


@triton.jit
def refuse(own_ptr, own_v, rest_ptr, fresh, total, draft_ptr, draft_v, words, BLOCK: constexpr):
    """Write what is left of a distribution after a draft; returns its sum."""
    sums = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, words, BLOCK):
        v = begin + tl.arange(0, BLOCK).to(tl.int64)
        inside = v < words
        x = rest_at(own_ptr, own_v, rest_ptr, fresh, v, inside)
        left = x / total - tl.load(draft_ptr + v * draft_v, mask=inside, other=0.0)
        left = tl.where(left > 0.0, left, 0.0)
        tl.store(rest_ptr + v, left, mask=inside)
        sums += left
    # Other threads read what these wrote.
    tl.debug_barrier()
    return tl.sum(sums, 0)


@triton.jit
def drawn(own_ptr, own_v, rest_ptr, fresh, bound, words, BLOCK: constexpr):
    """The first token up to which more than `bound` is left, or else the last that is left."""
    before = bound * 0.0
    first = words
    last = 0
    begin = 0
    while (begin < words) & (first == words):
        v = begin + tl.arange(0, BLOCK)
        x = rest_at(own_ptr, own_v, rest_ptr, fresh, v.to(tl.int64), v < words)
        x = tl.where(x > 0.0, x, 0.0)
        reached = (x > 0.0) & (before + tl.cumsum(x, 0) > bound)
        first = tl.min(tl.where(reached, v, words), 0)
        last = tl.maximum(last, tl.max(tl.where(x > 0.0, v, 0), 0))
        before += tl.sum(x, 0)
        begin += BLOCK
    return tl.where(first < words, first, last)


@triton.jit(do_not_specialize=["words"])
def accept_sampled(
    tokens_ptr,
    target_ptr,
    draft_ptr,
    noise_ptr,
    parents_ptr,
    rest_ptr,
    path_ptr,
    accepted_ptr,
    next_ptr,
    words,
    tokens_b,
    tokens_n,
    target_b,
    target_n,
    target_v,
    draft_b,
    draft_n,
    draft_v,
    noise_b,
    noise_n,
    parents_b,
    parents_n,
    N: constexpr,
    NP: constexpr,
    BLOCK: constexpr,
):
    """Grid: (batch,). path: int32 `[batch, N]`, rest: float32 `[batch, words]`, scratch; both
    contiguous. See `attnops.ops.accept_sampled`."""
    row = tl.program_id(0).to(tl.int64)
    if parents_ptr is not None:
        parents_ptr += row * parents_b
    n, token, parent = nodes_of(
        tokens_ptr + row * tokens_b, parents_ptr, tokens_n, parents_n, words, N, NP
    )
    target_ptr += row * target_b
    draft_ptr += row * draft_b
    noise_ptr += row * noise_b
    rest_ptr += row * words
    path = tl.where(n == 0, 0, -1)
    accepted = 0
    node = tl.full([], 0, tl.int64)
    left = 0.0
    child = tl.min(tl.where(parent == 0, n, NP), 0)
    while child < NP:
        own_ptr = target_ptr + node * target_n
        q_ptr = draft_ptr + child.to(tl.int64) * draft_n
        word = tl.sum(tl.where(n == child, token, 0), 0)
        total = tl.where(left > 0.0, left, 1.0)
        p = rest_at(own_ptr, target_v, rest_ptr, left == 0.0, word, word >= 0)
        q = tl.load(q_ptr + word * draft_v)
        goes = tl.load(noise_ptr + child.to(tl.int64) * noise_n) * q * total < p
        if goes:
            left = left * 0.0
        else:
            left = refuse(
                own_ptr, target_v, rest_ptr, left == 0.0, total, q_ptr, draft_v, words, BLOCK
            )
        accepted += goes.to(tl.int32)
        path = tl.where(goes & (n == accepted), child, path)
        node = tl.where(goes, child, node)
        child = tl.min(tl.where((parent == node) & (n > child), n, NP), 0)
    own_ptr = target_ptr + node * target_n
    bound = tl.load(noise_ptr + tl.full([], N, tl.int64) * noise_n)
    bound *= tl.where(left > 0.0, left, 1.0)
    following = drawn(own_ptr, target_v, rest_ptr, left == 0.0, bound, words, BLOCK)
    tl.store(path_ptr + row * N + n, path, mask=n < N)
    tl.store(accepted_ptr + row, accepted)
    tl.store(next_ptr + row, following.to(tl.int64))
