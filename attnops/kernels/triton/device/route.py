"""Device functions: the routing of a mixture, a token a program of one warp, which holds the
numbers of all experts in registers.

Numbers are compared as int32 that sort as they do, so that equal ones are equal bits, NaN has a
place, and a warp reduces them in one instruction.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from attnops.kernels.triton.device.memory import await_previous, floats

NONE = constexpr(-(2**31))
"""Below the key of every number: experts and groups that there are not, or that are taken."""
MOST = constexpr(2**31 - 1)


@triton.jit
def key_of(x):
    """int32 that sorts as float32 `x` does: 0 and -0 are equal, NaN is above all numbers."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, MOST, tl.where(bits < 0, bits ^ MOST, bits))


@triton.jit
def number_of(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ MOST, key).to(tl.float32, bitcast=True)


@triton.jit
def largest(key, number, AXIS: constexpr):
    """(the largest key, the lowest `number` that has it)."""
    top = tl.max(key, AXIS)
    return top, tl.min(tl.where(key == tl.expand_dims(top, AXIS), number, MOST), AXIS)


@triton.jit
def kept_groups(key, place, GROUPS: constexpr, TOP_GROUPS: constexpr, BEST: constexpr):
    """bool `[groups]`: the best groups of `key` `[groups, experts of a group]`."""
    group = tl.arange(0, key.shape[0])
    best = tl.zeros([key.shape[0]], tl.float32)
    left = key
    for _ in tl.static_range(BEST):
        top, first = largest(left, place, 1)
        best += number_of(top)
        left = tl.where(place == first[:, None], NONE, left)
    left = tl.where(group < GROUPS, key_of(best), NONE)
    kept = group < 0
    for _ in range(TOP_GROUPS):
        _top, at = largest(left, group, 0)
        kept = kept | (group == at)
        left = tl.where(group == at, NONE, left)
    return kept


@triton.jit
def route(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    index_ptr,
    eps,
    scale,
    logits_t,
    logits_e,
    weights_t,
    weights_k,
    index_t,
    index_k,
    GROUPS: constexpr,
    GROUP: constexpr,
    GROUPS_P: constexpr,
    GROUP_P: constexpr,
    TOP_GROUPS: constexpr,
    BEST: constexpr,
    K: constexpr,
    KP: constexpr,
    SOFTMAX: constexpr,
    BY_LOGITS: constexpr,
    NORMALIZE: constexpr,
    WHOLE: constexpr,
    CANCELS: constexpr,
    OVERLAP: constexpr,
):
    """Grid: tokens. BY_LOGITS: experts are compared by their logits. WHOLE: the softmax of all
    logits is needed. CANCELS: weights are the softmax of the chosen logits, whose exponentials may
    be 0 beside the largest of all.

    OVERLAP: this kernel is launched while the one before it runs.
    """
    await_previous(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    logits_ptr += t * logits_t
    group, place = tl.arange(0, GROUPS_P)[:, None], tl.arange(0, GROUP_P)[None, :]
    expert = group * GROUP + place
    real = (group < GROUPS) & (place < GROUP)
    value = tl.load(logits_ptr + expert.to(tl.int64) * logits_e, mask=real, other=float("-inf")).to(
        tl.float32
    )
    top, total = 0.0, 1.0
    if WHOLE:
        top = tl.max(tl.max(value, 1), 0)
        total = tl.sum(tl.sum(tl.exp(value - top), 1), 0)
    if not BY_LOGITS:
        if SOFTMAX:
            value = tl.exp(value - top) / total
        else:
            value = tl.sigmoid(value)
        if bias_ptr is not None:
            value += floats(bias_ptr + expert, real)
    key = tl.where(real, key_of(value), NONE)
    if GROUPS > 1:
        key = tl.where(kept_groups(key, place, GROUPS, TOP_GROUPS, BEST)[:, None], key, NONE)

    key, expert = tl.reshape(key, [GROUPS_P * GROUP_P]), tl.reshape(expert, [GROUPS_P * GROUP_P])
    k = tl.arange(0, KP)
    chosen = tl.zeros([KP], tl.int32)
    for i in range(K):
        _top, at = largest(key, expert, 0)
        chosen = tl.where(k == i, at, chosen)
        key = tl.where(expert == at, NONE, key)

    here = k < K
    picked = tl.load(
        logits_ptr + chosen.to(tl.int64) * logits_e, mask=here, other=float("-inf")
    ).to(tl.float32)
    if SOFTMAX:
        if CANCELS:
            top = tl.max(picked, 0)
        weight = tl.exp(picked - top)
        if not CANCELS:
            weight /= total
    else:
        weight = tl.sigmoid(picked)
    if NORMALIZE:
        weight /= tl.sum(tl.where(here, weight, 0.0), 0) + eps
    weight *= scale
    at = k.to(tl.int64)
    tl.store(weights_ptr + t * weights_t + at * weights_k, weight, mask=here)
    tl.store(index_ptr + t * index_t + at * index_k, chosen.to(tl.int64), mask=here)
