"""Random calls of every op, for hypothesis: lengths from 0, every feature with every other."""

import random
from dataclasses import replace
from functools import partial

import torch
from hypothesis import strategies as st

from attnops.core.arguments import FLOATS
from attnops.core.errors import InvalidInput
from attnops.core.record import check
from attnops.ops import OPS
from attnops.ops.pages.decode_cases import Angles
from attnops.testing import CASES, Features, Pages, Source, make_call
from tests import fuzz

ONE, FEW, LENGTH = (st.integers(0, most) for most in (1, 2, 5))
SOURCE, FLAG = st.builds(Source, st.integers(0, 99)), st.booleans()
FLOAT = st.sampled_from(
    [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]
)
INDEX = st.sampled_from([torch.int32, torch.int64])
SCALES = st.sampled_from([0.02, 0.3, 1.0, 40.0])
PAGE = st.sampled_from([1, 2, 4])
QUANTISED = st.sampled_from([None, None, None, torch.float8_e4m3fn, torch.int8])


def made(op, *row, **named):
    """Calls of `op` of what these strategies give: features and values by name, or one value."""
    return st.builds(partial(make_call, op), SOURCE, *row, **named)


def lengths(new=LENGTH, before=LENGTH, of=lambda n, m: n + m):
    """New tokens and keys of up to three requests."""
    pairs = st.lists(st.tuples(new, before), max_size=3)
    return pairs.map(
        lambda pairs: {"q_lens": [n for n, _ in pairs], "k_lens": [of(n, m) for n, m in pairs]}
    )


def features(masks=True, kv=QUANTISED):
    return st.builds(
        lambda group, kv_heads, **more: Features(
            q_heads=group * kv_heads, kv_heads=kv_heads, **more
        ),
        st.sampled_from([1, 2, 3]),
        st.sampled_from([1, 2]),
        dtype=FLOAT,
        kv_dtype=kv,
        head_dim=st.sampled_from([1, 4, 8]),
        v_head_dim=st.sampled_from([None, None, 2]),
        causal=FLAG,
        window=st.sampled_from([(-1, -1), (-1, -1), (2, -1), (1, 1)]),
        chunk=st.sampled_from([0, 0, 0, 2, 3]),
        softcap=st.sampled_from([0.0, 0.0, 2.0]),
        sinks=st.sampled_from([None, None, torch.float32]),
        mask=st.sampled_from(["none", "none", "bool", "additive"] if masks else ["none"]),
        mask_shape=st.sampled_from(["bhq", "b", "h", "q", ""]),
        scale_per_head=FLAG,
        lse=FLAG,
        temperature=FLAG,
    )


def of_latents(f):
    """The query's head dim is the latent and the rotated key, the value's the latent alone."""
    kv = f.kv_dtype if f.dtype != torch.float64 else None
    return replace(
        f,
        kv_dtype=kv,
        head_dim=f.head_dim + 2,
        v_head_dim=f.head_dim,
        window=(f.window[0], -1),
        chunk=0,
    )


def of_lists(f, packed):
    dims = {"head_dim": 130, "v_head_dim": 128, "kv_dtype": None} if packed else {}
    return replace(of_latents(f), causal=False, window=(-1, -1), softcap=0.0, mask="none", **dims)


LATENT = features().map(of_latents)


def dense():
    def sizes(batch, queries, keys, ranged):
        limits = (
            {"kv_start": [min(1, keys)] * batch, "kv_end": [max(keys - 1, 0)] * batch}
            if ranged
            else {}
        )
        return {"B": batch, "S": queries, "K": keys, **limits}

    ranged = st.sampled_from([False, False, True])
    return made(
        "attention", st.builds(sizes, LENGTH, LENGTH, LENGTH, ranged), features(), index=INDEX
    )


def paged(op, f):
    return made(
        op,
        lengths(before=st.integers(0, 6)),
        f,
        page=PAGE,
        padding=FEW,
        slack=FEW,
        pages=st.builds(Pages, ONE, ONE),
    )


@st.composite
def slots(draw):
    """Some slots of a pool, of which none is given twice, but for those that are none."""
    pages, page = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    slot = st.integers(-1, pages * page - 1)
    return {
        "P": pages,
        "page": page,
        "slots": draw(st.lists(slot, unique_by=lambda s: s if s >= 0 else object(), max_size=6)),
    }


@st.composite
def copied(draw):
    pool = draw(slots())
    slot = st.integers(-1, pool["P"] * pool["page"] - 1)
    return {"pairs": [(draw(slot), to) for to in pool.pop("slots")], **pool}


@st.composite
def step(draw):
    f = draw(features(masks=False, kv=st.none()))
    page = draw(PAGE)
    k_lens = draw(st.lists(st.integers(0, 9), max_size=3))
    turn = draw(st.sampled_from(["", "whole", "half"])) if f.head_dim % 2 == 0 else ""
    angles = Angles(
        turn,
        draw(FLAG),
        draw(st.sampled_from([(), (0,)])),
        draw(INDEX),
        draw(st.sampled_from([None, torch.float32])),
    )
    entries = [(b, column) for b, n in enumerate(k_lens) for column in range(-(-n // page))]
    holes = draw(
        st.none()
        | (st.lists(st.sampled_from(entries), unique=True, max_size=3) if entries else st.just([]))
    )
    f = replace(f, v_head_dim=None, window=(f.window[0], -1))
    return {"k_lens": k_lens, "page": page, "f": f, "angles": angles, "missing": holes}


@st.composite
def listed(draw):
    packed, topk, pages = draw(FLAG), draw(st.integers(0, 6)), draw(st.integers(0, 3))
    counts = draw(st.lists(st.integers(0, topk if pages else 0), max_size=4))
    pool = pages, draw(st.sampled_from([1, 3, 4]))
    return {
        "counts": counts,
        "topk": topk,
        "pool": pool,
        "packed": packed,
        "f": of_lists(draw(features()), packed),
    }


@st.composite
def crossed(draw, op):
    """The sizes of one case of the grid with the options of two others, or without where these do
    not go together."""
    rows = [draw(st.sampled_from(CASES[op])).build.args[0] for _ in range(3)]
    sizes, source = [x for x in rows[0] if not isinstance(x, dict)], draw(SOURCE)
    options = {
        name: value for row in rows for x in row if isinstance(x, dict) for name, value in x.items()
    }
    call = make_call(op, source, *sizes, options)
    try:
        check(call.record)
    except InvalidInput:
        return make_call(op, source, *sizes)
    return call


def backward(op):
    """As of tests/ops/test_random_gradients.py."""

    def call(seed):
        draw = random.Random(seed)
        f = fuzz.features(draw, FLOATS, (1, 4, 8))
        return fuzz.drawn(draw, Source(seed), f, fuzz.SHORT, op, fewest=0)

    return st.integers(0, 9999).map(call)


MERGED = (st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
FEW_KEYS = st.sampled_from([0, 1, 70])
SLASHED = features(masks=False, kv=st.none()).map(
    lambda f: replace(f, softcap=0.0, window=(-1, -1), sinks=None)
)
CALLS = {
    op: st.builds(
        lambda case, seed: case.call(seed), st.sampled_from(CASES[op]), st.integers(0, 99)
    )
    for op in OPS
}
"""Ops on lengths and tables alone have calls of their grids, with other numbers."""
CALLS |= {
    "attention": dense(),
    "attention_backward": backward("attention_backward"),
    "varlen_attention": made(
        "varlen_attention",
        lengths(of=lambda n, m: m),
        features(),
        padding=st.sampled_from([(0, 0), (0, 2), (1, 0), (2, 1)]),
        slack=st.sampled_from([0, 2]),
    ),
    "varlen_attention_backward": backward("varlen_attention_backward"),
    "paged_attention": paged("paged_attention", features()),
    "decode_attention": made(
        "decode_attention", step(), pages=st.builds(Pages, ONE, ONE, shared=st.just(False))
    ),
    "write_kv": made("write_kv", slots(), features(), index=INDEX),
    "mla_attention": paged("mla_attention", LATENT),
    "write_latent": made("write_latent", slots(), LATENT, index=INDEX, quantised=FLAG),
    "rope_quantize_latent": made(
        "rope_quantize_latent",
        LATENT,
        positions=st.lists(st.integers(0, 6), max_size=4),
        rows=st.just(7),
        scales=st.tuples(SCALES, SCALES),
        interleaved=FLAG,
        index=INDEX,
        fused=FLAG,
    ),
    "sparse_mla_attention": made(
        "sparse_mla_attention", listed(), lengths=FLAG, twice=FLAG, whole=FLAG
    ),
    "write_latent_packed": made(
        "write_latent_packed", slots(), features().map(lambda f: of_lists(f, True)), index=INDEX
    ),
    "merge_state": made("merge_state", shape=st.tuples(LENGTH, *MERGED[1:]), dtype=FLOAT),
    "merge_states": made(
        "merge_states",
        shape=st.tuples(LENGTH, *MERGED),
        dtype=FLOAT,
        empty=st.sampled_from([0.0, 0.4]),
    ),
    "vertical_slash_indexes": made(
        "vertical_slash_indexes",
        lengths(st.sampled_from([0, 1, 63, 64, 65, 130]), st.sampled_from([0, 1, 64, 90])),
        H=st.integers(1, 3),
        V=st.integers(1, 9),
        S=st.integers(1, 9),
        counted=FLAG,
        slack=st.sampled_from([0, 70]),
    ),
    "vertical_slash_attention": made(
        "vertical_slash_attention",
        lengths(st.sampled_from([0, 1, 5, 66]), FEW_KEYS),
        SLASHED,
        verticals=st.integers(1, 6),
        slashes=st.integers(1, 4),
        slack=FEW_KEYS,
    ),
    "copy_kv": made("copy_kv", copied(), features(), L=FEW, index=INDEX, latents=FLAG),
    **{op: crossed(op) for op in ("linear", "rms_norm", "experts", "mxfp4_experts", "route")},
}
