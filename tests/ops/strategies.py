"""Random calls of every op, for hypothesis: lengths from 0, every feature with every other."""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from attnops.testing import CASES, Features, Source, builders, latent, moves, rope_quantize, sparse, vertical_slash

LENGTH = st.integers(0, 5)
LENGTHS = st.lists(st.integers(0, 5), max_size=3)
FLOAT = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64])
INDEX = st.sampled_from([torch.int32, torch.int64])
SCALES = st.sampled_from([0.02, 0.3, 1.0, 40.0])
QUANTISED = st.sampled_from([None, None, None, torch.float8_e4m3fn, torch.int8])


@st.composite
def features(draw, masks=True, kv=QUANTISED, head_dims=(1, 4, 8)):
    group = draw(st.sampled_from([1, 2, 3]))
    kv_heads = draw(st.sampled_from([1, 2]))
    return Features(
        dtype=draw(FLOAT),
        kv_dtype=draw(kv),
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from(head_dims)),
        v_head_dim=draw(st.sampled_from([None, None, 2])),
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([(-1, -1), (-1, -1), (2, -1), (1, 1)])),
        chunk=draw(st.sampled_from([0, 0, 0, 2, 3])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        sinks=draw(st.sampled_from([None, None, torch.float32])),
        mask=draw(st.sampled_from(["none", "none", "bool", "additive"])) if masks else "none",
        mask_shape=draw(st.sampled_from(["bhq", "b", "h", "q", ""])),
        scale_per_head=draw(st.booleans()),
        lse=draw(st.booleans()),
    )


@st.composite
def dense(draw, **more):
    batch, queries, keys = draw(LENGTH), draw(LENGTH), draw(LENGTH)
    ranged = draw(st.sampled_from([False, False, True])) and "kv" not in more
    limits = {"start": [min(1, keys)] * batch, "end": [max(keys - 1, 0)] * batch, "range_dtype": draw(INDEX)} if ranged else {}
    return builders.dense(source(draw), batch, queries, keys, draw(features(**more)), **limits)


@st.composite
def varlen(draw, **more):
    q_lens = draw(LENGTHS)
    k_lens = [draw(LENGTH) for _ in q_lens]
    padding = draw(st.sampled_from([(0, 0), (0, 2), (1, 0), (2, 1)]))
    return builders.varlen(source(draw), q_lens, k_lens, draw(features(**more)), padding, draw(st.sampled_from([0, 2])))


@st.composite
def paged(draw):
    q_lens = draw(LENGTHS)
    lens = [draw(st.integers(n, n + 6)) for n in q_lens]
    return builders.paged(
        source(draw), q_lens, lens, draw(st.sampled_from([1, 2, 4])), replace(draw(features()), temperature=draw(st.booleans())),
        padding=draw(st.integers(0, 2)), spare=draw(st.integers(0, 1)), wider=draw(st.integers(0, 1)), slack=draw(st.integers(0, 2)),
    )  # fmt: skip


@st.composite
def write(draw):
    pages, page = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    slots = draw(st.lists(st.integers(-1, pages * page - 1), unique_by=lambda s: s if s >= 0 else object(), max_size=5))
    return builders.write(source(draw), slots, pages, page, draw(features()), draw(INDEX))


@st.composite
def latent_features(draw):
    f = draw(features())
    # The query's head dim is the latent and the rotated key, the value's the latent alone.
    kv = f.kv_dtype if f.dtype != torch.float64 else None
    return replace(f, kv_dtype=kv, head_dim=f.head_dim + 2, v_head_dim=f.head_dim, window=(f.window[0], -1), chunk=0)


@st.composite
def mla(draw):
    q_lens = draw(LENGTHS)
    lens = [draw(st.integers(n, n + 6)) for n in q_lens]
    return latent.mla(
        source(draw), q_lens, lens, draw(st.sampled_from([1, 2, 4])), draw(latent_features()),
        padding=draw(st.integers(0, 2)), spare=draw(st.integers(0, 1)), wider=draw(st.integers(0, 1)), slack=draw(st.integers(0, 2)),
    )  # fmt: skip


@st.composite
def write_latent(draw):
    pages, page = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    slots = draw(st.lists(st.integers(-1, pages * page - 1), unique_by=lambda s: s if s >= 0 else object(), max_size=5))
    f = draw(latent_features())
    quantised = f.kv_dtype is not None and draw(st.booleans())
    return latent.write_latent(source(draw), slots, pages, page, f, draw(INDEX), quantised)


@st.composite
def rotated(draw):
    f = draw(latent_features())
    positions = draw(st.lists(st.integers(0, 6), max_size=4))
    return rope_quantize.rope_quantize(
        source(draw), positions, f, rows=7, scales=(draw(SCALES), draw(SCALES)), interleaved=draw(st.booleans()), index=draw(INDEX),
        fused=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def sparse_features(draw, packed):
    f = draw(latent_features())
    dims = {"head_dim": 130, "v_head_dim": 128, "kv_dtype": None} if packed else {}
    return replace(f, causal=False, window=(-1, -1), softcap=0.0, mask="none", **dims)


@st.composite
def sparse_mla(draw):
    packed, topk = draw(st.booleans()), draw(st.integers(0, 6))
    pages = draw(st.integers(0, 3))
    counts = draw(st.lists(st.integers(0, topk if pages else 0), max_size=4))
    return sparse.sparse(
        source(draw), counts, topk, pages, draw(st.sampled_from([1, 3, 4])), draw(sparse_features(packed)),
        lengths=draw(st.booleans()), packed=packed, twice=draw(st.booleans()), whole=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def write_packed(draw):
    pages, page = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    slots = draw(st.lists(st.integers(-1, pages * page - 1), unique_by=lambda s: s if s >= 0 else object(), max_size=5))
    return sparse.write_packed(source(draw), slots, pages, page, draw(sparse_features(True)), draw(INDEX))


@st.composite
def merge(draw):
    return builders.merge(source(draw), draw(LENGTH), draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(FLOAT))


@st.composite
def merge_states(draw):
    sizes = (draw(LENGTH), draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    return builders.merge_states(source(draw), *sizes, draw(FLOAT), draw(st.sampled_from([0.0, 0.4])))


@st.composite
def vertical_slash_indexes(draw):
    q_lens = draw(st.lists(st.sampled_from([0, 1, 63, 64, 65, 130]), max_size=3))
    k_lens = [n + draw(st.sampled_from([0, 1, 64, 90])) for n in q_lens]
    heads, verticals, slashes = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return vertical_slash.indexes(
        source(draw), q_lens, k_lens, heads, verticals, slashes, draw(st.booleans()), draw(st.sampled_from([0, 70]))
    )


@st.composite
def vertical_slash_attention(draw):
    q_lens = draw(st.lists(st.sampled_from([0, 1, 5, 66]), max_size=3))
    k_lens = [n + draw(st.sampled_from([0, 1, 70])) for n in q_lens]
    f = replace(draw(features(masks=False, kv=st.none())), softcap=0.0, window=(-1, -1), sinks=None)
    return vertical_slash.attention(
        source(draw), q_lens, k_lens, f, draw(st.integers(1, 6)), draw(st.integers(1, 4)), slack=draw(st.sampled_from([0, 1, 70]))
    )


@st.composite
def copy(draw):
    layers, pages, page = draw(st.integers(0, 2)), draw(st.integers(0, 3)), draw(st.integers(1, 3))
    slot = st.integers(-1, pages * page - 1)
    target = draw(st.lists(slot, unique_by=lambda s: s if s >= 0 else object(), max_size=6))
    pairs = [(draw(slot), to) for to in target]
    return moves.copy(source(draw), pairs, layers, pages, page, draw(features()), draw(INDEX), draw(st.booleans()))


@st.composite
def metadata(draw, op):
    return draw(st.sampled_from(CASES[op])).call(draw(st.integers(0, 99)))


def backward(forward):
    def build(draw):
        call = draw(forward(kv=st.none()))
        more = {"mask_grad": True} if call.op == "attention" and draw(st.booleans()) and _additive(call) else {}
        return builders.backward(source(draw), call, lse_grad=draw(st.booleans()), **more)

    return st.composite(build)()


def _additive(call):
    return "mask" in call.arguments and call.arguments["mask"].dtype != torch.bool


def source(draw):
    return Source(draw(st.integers(0, 99)))


CALLS = {
    "attention": dense(),
    "attention_backward": backward(dense),
    "varlen_attention": varlen(),
    "varlen_attention_backward": backward(varlen),
    "paged_attention": paged(),
    "write_kv": write(),
    "mla_attention": mla(),
    "write_latent": write_latent(),
    "rope_quantize_latent": rotated(),
    "sparse_mla_attention": sparse_mla(),
    "write_latent_packed": write_packed(),
    "merge_state": merge(),
    "merge_states": merge_states(),
    "vertical_slash_indexes": vertical_slash_indexes(),
    "vertical_slash_attention": vertical_slash_attention(),
    **{
        op: metadata(op)
        for op in (
            "cu_seqlens",
            "token_rows",
            "slot_mapping",
            "kv_indices",
            "decode_rows",
            "named_pages",
        )
    },
    "copy_kv": copy(),
    "fa3_schedule": metadata("fa3_schedule"),
    **{op: metadata(op) for op in ("plan_paged_attention", "plan_mla_attention")},
}
