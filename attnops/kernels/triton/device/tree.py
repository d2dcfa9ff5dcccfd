"""Device functions: trees of drafts, in the registers of a program."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def candidates_at(
    begin, tokens_ptr, scores_ptr, parents_ptr, tokens_m, scores_m, parents_m, M, BLOCK: constexpr
):
    """(numbers, scores, which are candidates) of a block."""
    m = begin + tl.arange(0, BLOCK)
    at = m.to(tl.int64)
    token = tl.load(tokens_ptr + at * tokens_m, mask=m < M, other=-1)
    score = tl.load(scores_ptr + at * scores_m, mask=m < M, other=float("-inf"))
    parent = tl.load(parents_ptr + at * parents_m, mask=m < M, other=-2)
    return m, score, (token >= 0) & (score > float("-inf")) & (parent >= -1) & (parent < m)


@triton.jit
def chosen_by(index, values, n):
    """`values[index]`, -1 where there is no such entry. All three are `[NP]`, n counts them."""
    found = index[:, None] == n[None, :]
    return tl.max(tl.where(found, values[None, :], -1), 1)


@triton.jit
def build_tree(
    tokens_ptr,
    scores_ptr,
    parents_ptr,
    root_ptr,
    nodes_ptr,
    before_ptr,
    depths_ptr,
    candidates_ptr,
    tokens_b,
    tokens_m,
    scores_b,
    scores_m,
    parents_b,
    parents_m,
    root_b,
    M: constexpr,
    N: constexpr,
    NP: constexpr,
    BLOCK: constexpr,
):
    """Grid: (batch,). The results are `[batch, N]`, contiguous. See `attnops.ops.build_tree`."""
    row = tl.program_id(0).to(tl.int64)
    tokens_ptr += row * tokens_b
    scores_ptr += row * scores_b
    parents_ptr += row * parents_b
    n = tl.arange(0, NP)
    index = tl.zeros([NP], tl.int32) + M
    count = 0
    for begin in range(0, M, BLOCK):
        m, score, usable = candidates_at(
            begin, tokens_ptr, scores_ptr, parents_ptr, tokens_m, scores_m, parents_m, M, BLOCK
        )
        better = tl.zeros([BLOCK], tl.int32)
        for at in range(0, M, BLOCK):
            other, rival, real = candidates_at(
                at, tokens_ptr, scores_ptr, parents_ptr, tokens_m, scores_m, parents_m, M, BLOCK
            )
            level = (rival[None, :] == score[:, None]) & (other[None, :] < m[:, None])
            wins = real[None, :] & ((rival[None, :] > score[:, None]) | level)
            better += tl.sum(wins.to(tl.int32), 1)
        kept = (usable & (better < N - 1)).to(tl.int32)
        place = count + tl.cumsum(kept, 0)
        here = (kept[:, None] > 0) & (place[:, None] == n[None, :])
        index = tl.minimum(index, tl.min(tl.where(here, m[:, None], M), 0))
        count += tl.sum(kept, 0)
    there = index < M
    at = index.to(tl.int64)
    token = tl.load(tokens_ptr + at * tokens_m, mask=there, other=-1)
    token = tl.where(n == 0, tl.load(root_ptr + row * root_b), token)
    before = tl.load(parents_ptr + at * parents_m, mask=there, other=-2)
    same = before[:, None] == index[None, :]
    parent = tl.max(tl.where(same, n[None, :], -1), 1)
    parent = tl.where(before == -1, 0, parent)
    depth = tl.zeros([NP], tl.int32)
    above = parent
    while tl.max(above, 0) >= 0:
        depth += (above >= 0).to(tl.int32)
        above = chosen_by(above, parent, n)
    out = row * N + n
    tl.store(nodes_ptr + out, token, mask=n < N)
    tl.store(before_ptr + out, parent, mask=n < N)
    tl.store(depths_ptr + out, depth, mask=n < N)
    tl.store(candidates_ptr + out, tl.where(there, index, -1), mask=n < N)


@triton.jit(do_not_specialize=["width"])
def tree_mask(
    parents_ptr,
    lengths_ptr,
    mask_ptr,
    width,
    parents_b,
    parents_n,
    lengths_b,
    N: constexpr,
    NP: constexpr,
    BLOCK: constexpr,
    WINDOW: constexpr,
):
    """Grid: (batch * N, cdiv(width, BLOCK)). mask: bytes `[batch * N, width]`, contiguous. See
    `attnops.ops.tree_mask`."""
    row = (tl.program_id(0) // N).to(tl.int64)
    key = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_tree = key - (tl.load(lengths_ptr + row * lengths_b).to(tl.int64) - N)
    seen = of_tree < 0
    if (WINDOW > 0) | (tl.max(of_tree, 0) >= 0):
        n = tl.arange(0, NP)
        parent = tl.load(
            parents_ptr + row * parents_b + n.to(tl.int64) * parents_n, mask=n < N, other=-1
        )
        parent = tl.where(parent < n, parent, -1)
        node = tl.program_id(0) % N
        way = 0
        while node >= 0:
            inside = (WINDOW == 0) | (way < WINDOW)
            seen = seen | ((of_tree == node) & inside)
            node = tl.sum(tl.where(n == node, parent, 0), 0)
            way += 1
        # `way` tokens lie between the keys before the tree and the next.
        if WINDOW > 0:
            seen = seen & ((of_tree >= 0) | (of_tree >= way - WINDOW))
    out = mask_ptr + tl.program_id(0).to(tl.int64) * width + key
    tl.store(out, seen.to(tl.uint8), mask=key < width)
