"""Random calls of every op, for hypothesis: lengths from 0, every feature with every other."""

from dataclasses import replace
from functools import partial

import torch
from hypothesis import strategies as st

from attnops.core.errors import InvalidInput
from attnops.core.record import check
from attnops.ops import OPS
from attnops.ops.pages.decode_cases import Angles
from attnops.testing import CASES, Features, Pages, Source, gradient_call, make_call

FEW, LENGTH, SOURCE, FLAG = st.integers(0, 2), st.integers(0, 5), st.builds(Source, st.integers(0, 99)), st.booleans()
FLOAT = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64])
INDEX = st.sampled_from([torch.int32, torch.int64])
SCALES = st.sampled_from([0.02, 0.3, 1.0, 40.0])
PAGE = st.sampled_from([1, 2, 4])
QUANTISED = st.sampled_from([None, None, None, torch.float8_e4m3fn, torch.int8])


def made(op, *row, **named):
    """Calls of `op` of the values that these strategies give."""
    return st.builds(partial(make_call, op), SOURCE, *row, **named)


def by_lengths(op, pairs, *row, **named):
    """As `made`; pairs: (new tokens, keys) of the requests."""
    return st.builds(lambda source, lens, *row, **named: make_call(op, source, *lens, *row, **named), SOURCE, pairs, *row, **named)


def lengths(new=LENGTH, before=LENGTH, of=lambda n, m: n + m):
    """(new tokens, keys) of up to three requests."""
    return st.lists(st.tuples(new, before), max_size=3).map(lambda pairs: ([n for n, _ in pairs], [of(n, m) for n, m in pairs]))


def features(masks=True, kv=QUANTISED):
    return st.builds(
        lambda group, kv_heads, **more: Features(q_heads=group * kv_heads, kv_heads=kv_heads, **more),
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
    return replace(f, kv_dtype=kv, head_dim=f.head_dim + 2, v_head_dim=f.head_dim, window=(f.window[0], -1), chunk=0)


def of_lists(f, packed):
    dims = {"head_dim": 130, "v_head_dim": 128, "kv_dtype": None} if packed else {}
    return replace(of_latents(f), causal=False, window=(-1, -1), softcap=0.0, mask="none", **dims)


LATENT = features().map(of_latents)


def dense(kv=QUANTISED):
    def call(source, batch, queries, keys, f, ranged, index):
        limits = {"kv_start": [min(1, keys)] * batch, "kv_end": [max(keys - 1, 0)] * batch, "index": index} if ranged else {}
        return make_call("attention", source, batch, queries, keys, f, **limits)

    ranged = st.sampled_from([False, False, True]) if kv is QUANTISED else st.just(False)
    return st.builds(call, SOURCE, LENGTH, LENGTH, LENGTH, features(kv=kv), ranged, INDEX)


def varlen(kv=QUANTISED):
    padding, slack = st.sampled_from([(0, 0), (0, 2), (1, 0), (2, 1)]), st.sampled_from([0, 2])
    keys = lengths(of=lambda n, m: m)
    return by_lengths("varlen_attention", keys, features(kv=kv), padding, slack)


def paged(op, f):
    lens, one = lengths(before=st.integers(0, 6)), st.integers(0, 1)
    pages = {"padding": FEW, "slack": FEW, "pages": st.builds(Pages, one, one)}
    return by_lengths(op, lens, PAGE, f, **pages)


@st.composite
def writes(draw, op, f):
    pages, page = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    slots = draw(st.lists(st.integers(-1, pages * page - 1), unique_by=lambda s: s if s >= 0 else object(), max_size=5))
    f = draw(f)
    ready = {"quantised": f.kv_dtype is not None and f.scale_per_head} if op == "write_latent" else {}
    return make_call(op, draw(SOURCE), slots, pages, page, f, draw(INDEX), ready)


@st.composite
def decode(draw):
    f = draw(features(masks=False, kv=st.none()))
    turn = draw(st.sampled_from(["", "whole", "half"])) if f.head_dim % 2 == 0 else ""
    angles = Angles(turn, draw(FLAG), draw(st.sampled_from([(), (0,)])), draw(INDEX), draw(st.sampled_from([None, torch.float32])))
    lengths, one = draw(st.lists(st.integers(0, 9), max_size=3)), st.integers(0, 1)
    f, page = replace(f, v_head_dim=None, window=(f.window[0], -1)), draw(PAGE)
    entries = [(b, column) for b, n in enumerate(lengths) for column in range(-(-n // page))]
    holes = draw(st.none() | (st.lists(st.sampled_from(entries), unique=True, max_size=3) if entries else st.just([])))
    return make_call("decode_attention", draw(SOURCE), lengths, page, f, angles, Pages(draw(one), draw(one)), holes)


@st.composite
def sparse_mla(draw):
    packed, topk, pages = draw(FLAG), draw(st.integers(0, 6)), draw(st.integers(0, 3))
    counts = draw(st.lists(st.integers(0, topk if pages else 0), max_size=4))
    f, flags = of_lists(draw(features()), packed), {n: draw(FLAG) for n in ("lengths", "twice", "whole")}
    return make_call(
        "sparse_mla_attention", draw(SOURCE), counts, topk, (pages, draw(st.sampled_from([1, 3, 4]))), f, packed=packed, **flags
    )


def rotated():
    positions = st.lists(st.integers(0, 6), max_size=4)
    more = {"scales": st.tuples(SCALES, SCALES), "interleaved": FLAG, "index": INDEX, "fused": FLAG}
    return made("rope_quantize_latent", positions, LATENT, rows=st.just(7), **more)


def slash_indexes():
    lens = lengths(st.sampled_from([0, 1, 63, 64, 65, 130]), st.sampled_from([0, 1, 64, 90]))
    sizes = st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), FLAG, st.sampled_from([0, 70])
    return by_lengths("vertical_slash_indexes", lens, *sizes)


def slash_attention():
    f = features(masks=False, kv=st.none()).map(lambda f: replace(f, softcap=0.0, window=(-1, -1), sinks=None))
    lens, slack = lengths(st.sampled_from([0, 1, 5, 66]), st.sampled_from([0, 1, 70])), st.sampled_from([0, 1, 70])
    sizes = st.integers(1, 6), st.integers(1, 4)
    return by_lengths("vertical_slash_attention", lens, f, *sizes, slack=slack)


@st.composite
def copy(draw):
    layers, pages, page = draw(FEW), draw(st.integers(0, 3)), draw(st.integers(1, 3))
    slot = st.integers(-1, pages * page - 1)
    target = draw(st.lists(slot, unique_by=lambda s: s if s >= 0 else object(), max_size=6))
    pairs = [(draw(slot), to) for to in target]
    return make_call("copy_kv", draw(SOURCE), pairs, layers, pages, page, draw(features()), draw(INDEX), draw(FLAG))


@st.composite
def crossed(draw, op):
    """The sizes of one case of the grid with the options of two others, or without where these do not go together."""
    rows = [draw(st.sampled_from(CASES[op])).build.args[0] for _ in range(3)]
    sizes, source = [x for x in rows[0] if not isinstance(x, dict)], draw(SOURCE)
    options = {name: value for row in rows for x in row if isinstance(x, dict) for name, value in x.items()}
    call = make_call(op, source, *sizes, options)
    try:
        check(call.record)
    except InvalidInput:
        return make_call(op, source, *sizes)
    return call


def backward(forward):
    def call(source, call, lse_grad, mask_grad):
        mask = call.arguments.get("mask")
        additive = call.op == "attention" and mask is not None and mask.dtype != torch.bool
        return gradient_call(source, call, mask_grad=mask_grad and additive, lse_grad=lse_grad)

    return st.builds(call, SOURCE, forward(kv=st.none()), FLAG, FLAG)


MERGED = st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)
CALLS = {op: st.builds(lambda case, seed: case.call(seed), st.sampled_from(CASES[op]), st.integers(0, 99)) for op in OPS}
"""Ops on lengths and tables alone have calls of their grids, with other numbers."""
CALLS |= {
    "attention": dense(),
    "attention_backward": backward(dense),
    "varlen_attention": varlen(),
    "varlen_attention_backward": backward(varlen),
    "paged_attention": paged("paged_attention", features()),
    "decode_attention": decode(),
    "write_kv": writes("write_kv", features()),
    "mla_attention": paged("mla_attention", LATENT),
    "write_latent": writes("write_latent", LATENT),
    "rope_quantize_latent": rotated(),
    "sparse_mla_attention": sparse_mla(),
    "write_latent_packed": writes("write_latent_packed", features().map(lambda f: of_lists(f, True))),
    "merge_state": made("merge_state", st.tuples(LENGTH, *MERGED[1:]), FLOAT),
    "merge_states": made("merge_states", st.tuples(LENGTH, *MERGED), FLOAT, st.sampled_from([0.0, 0.4])),
    "vertical_slash_indexes": slash_indexes(),
    "vertical_slash_attention": slash_attention(),
    "copy_kv": copy(),
    **{op: crossed(op) for op in ("linear", "experts", "mxfp4_experts", "route")},
}
