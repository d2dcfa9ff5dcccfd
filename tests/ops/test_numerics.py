"""Every kernel on every point of the grid, against the exact result; and the reference against loops that know nothing of it."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

import attnops
from attnops import ops
from attnops.core.kernel import Kernel, Tolerance, all_kernels, kernels_of
from attnops.core.record import changed
from attnops.ops import OPS
from attnops.ops.attention import reference as formulas
from attnops.ops.experts.cases import OSS
from attnops.testing import CASES, Call, Features, Mismatch, Pages, Source, check_kernel, gradient_call, make_call, oracle
from attnops.testing.check import clone, fill
from tests.checks import right_or_skipped
from tests.ops.strategies import CALLS

INF = float("inf")


def points(kernel):
    """The cases of its op; the first alone, for its text, where the machine is what the kernel refuses, and not the case."""
    cases = CASES[kernel.op]
    return cases[:1] if {r.field for r in kernel.refusals(cases[0].call().problem)} & {"package", "target"} else cases


GRID = [pytest.param(k, c, id=f"{c.op}-{k.name}-{c.label}") for k in all_kernels() for c in points(k)]


@pytest.mark.sweep(7)
@pytest.mark.parametrize(("kernel", "case"), GRID)
def test_kernel(kernel, case):
    right_or_skipped(kernel, case.call())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("op", list(OPS))
@pytest.mark.parametrize("examples", [15, pytest.param(30, marks=pytest.mark.full)])
def test_random_calls(op, examples):
    """Features the grid does not combine, on lengths it does not have."""

    @given(data=st.data())
    @settings(max_examples=examples)
    def run(data):
        call = data.draw(CALLS[op])
        for kernel in kernels_of(op).values():
            assert check_kernel(kernel, call).worst <= 1.0

    run()


def test_every_op_has_a_grid():
    assert set(CASES) == set(OPS)
    for op, cases in CASES.items():
        labels = [c.label for c in cases]
        assert len(set(labels)) == len(labels), op


def test_every_grid_point_is_answered():
    # An op whose reference refuses a point would leave it untested without a word.
    for cases in CASES.values():
        for case in cases:
            assert not kernels_of(case.op)["reference"].refusals(case.call().problem), str(case)


# The reference itself -------------------------------------------------------------------------------------------------


def requests(call):
    """(query [n, Hq, D], key [L, Hkv, D], value, mask [n, Hq, L] or None, start, where in the result) of every request."""
    t = dict(call.arguments)

    def scaled(x, scale):
        return x.double() if scale is None else x.double() * scale.double().reshape(-1, 1)

    if "query" in t and "q_scale" in t:
        t["query"] = scaled(t["query"], t["q_scale"].repeat_interleave(t["query"].shape[-2] // t["q_scale"].shape[0]))

    if call.op == "attention":
        for b in range(t["query"].shape[0]):
            end = int(t["kv_end"][b]) if "kv_end" in t else t["key"].shape[1]
            mask = t.get("mask")
            if mask is not None:
                mask = mask.expand(t["query"].shape[0], t["query"].shape[2], t["query"].shape[1], -1)[b].transpose(0, 1)[..., :end]
            key, value = scaled(t["key"], t.get("k_scale"))[b, :end], scaled(t["value"], t.get("v_scale"))[b, :end]
            yield t["query"][b], key, value, mask, int(t["kv_start"][b]) if "kv_start" in t else 0, b
        return
    starts = t["cu_seqlens_q"].tolist()
    query = t["query"] if "query" in t else torch.cat([scaled(t[n], t.get("q_scale")) for n in ("q_nope", "q_pe")], -1)
    for b, (q0, q1) in enumerate(pairwise(starts)):
        if call.op == "varlen_attention":
            k0, k1 = t["cu_seqlens_k"].tolist()[b : b + 2]
            key, value = scaled(t["key"], t.get("k_scale"))[k0:k1], scaled(t["value"], t.get("v_scale"))[k0:k1]
        elif call.op == "mla_attention":
            pages, length = scaled(t["latent_pages"], t.get("kv_scale")), int(t["seq_lens"][b])
            slots = [(int(t["page_table"][b, j // pages.shape[1]]), j % pages.shape[1]) for j in range(length)]
            key = torch.stack([pages[p, o] for p, o in slots])[:, None] if slots else pages.new_zeros((0, 1, pages.shape[2]))
            value = key[..., : t["q_nope"].shape[2]]
        else:
            page, length = t["k_pages"].shape[1], int(t["seq_lens"][b])
            slots = [(int(t["page_table"][b, j // page]), j % page) for j in range(length)]
            key, value = (
                torch.stack([pages[p, o] for p, o in slots]) if slots else pages.new_zeros((0, *pages.shape[2:]))
                for pages in (scaled(t["k_pages"], t.get("k_scale")), scaled(t["v_pages"], t.get("v_scale")))
            )
        mask = t.get("mask")
        if mask is not None:
            mask = mask[q0:q1, None, : key.shape[0]].expand(-1, query.shape[1], -1)
        yield query[q0:q1], key, value, mask, 0, slice(q0, q1)


def by_hand(query, key, value, mask, start, t, temperature=None):
    """One request, one query, one head at a time, in Python floats."""
    n, heads, _ = query.shape
    keys, group = key.shape[0], heads // key.shape[1]
    output = torch.zeros(n, heads, value.shape[2], dtype=torch.float64)
    lse = torch.full((n, heads), -INF, dtype=torch.float64)
    q, k, v = query.tolist(), key.tolist(), value.tolist()
    left, right, cap = t.get("window_left", -1), t.get("window_right", -1), t.get("softcap", 0.0)
    chunk = t.get("attention_chunk", 0)
    for i in range(n):
        position = keys - n + i
        for h in range(heads):
            logits = {}
            for j in range(start, keys):
                if (t["causal"] and j > position) or (left >= 0 and j < position - left) or (right >= 0 and j > position + right):
                    continue
                if chunk and j // chunk != position // chunk:
                    continue
                s = t["scale"] * math.fsum(a * b for a, b in zip(q[i][h], k[j][h // group], strict=True))
                s = cap * math.tanh(s / cap) if cap else s
                s = s if temperature is None else s * float(temperature[i])
                if mask is not None and mask.dtype == torch.bool:
                    s = s if mask[i, h, j] else -INF
                elif mask is not None:
                    s += float(mask[i, h, j])
                if s > -INF:
                    logits[j] = s
            terms = [*logits.values()] + ([float(t["sinks"][h])] if "sinks" in t else [])
            if terms:
                top = max(terms)
                total = math.fsum(math.exp(s - top) for s in terms)
                lse[i, h] = top + math.log(total)
                for j, s in logits.items():
                    output[i, h] += math.exp(s - top) / total * torch.tensor(v[j][h // group], dtype=torch.float64)
    return output, lse


# What a Python loop can do in a moment.
LARGE = ("d64", "d128", "long", "page_64", "deepseek")
DECIDED_BY_LOOPS = ("attention", "varlen_attention", "paged_attention", "mla_attention")
SMALL = [c for op in DECIDED_BY_LOOPS for c in CASES[op] if not any(word in c.label for word in LARGE)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_reference_equals_loops(case):
    call = case.call()
    clean = call.map(lambda n, t: fill(clone(t), call.free[n], False) if n in call.free else t)
    got = oracle(clean)
    wanted = torch.zeros_like(got["output"])
    lse = torch.full(wanted.shape[:-1], -INF, dtype=torch.float64)
    for query, key, value, mask, start, where in requests(clean):
        factors, rules = clean.arguments.get("temperature"), {**clean.arguments, "causal": clean.record.causal}
        wanted[where], lse[where] = by_hand(query, key, value, mask, start, rules, None if factors is None else factors[where])
    torch.testing.assert_close(got["output"], wanted, rtol=1e-12, atol=1e-12)
    if "lse" in call.arguments or "return_lse" in call.arguments:
        torch.testing.assert_close(got["lse"].double(), lse, rtol=1e-6, atol=1e-6)


# The check itself -----------------------------------------------------------------------------------------------------


def spoilt(op, run, **more):
    """A kernel that claims to take every argument: it is run, and not refused."""
    known = kernels_of(op)["reference"]
    takes = {"takes": OPS[op].spec.optional, "dtypes": known.dtypes, "kv_dtypes": known.kv_dtypes}
    return Kernel("spoilt", op, run, **takes, **more)


# The reference, run on another call than it was given: what it changes in the call.
OTHER_CALLS = [
    ("attention", "causal", lambda c: {"causal": False}),
    ("attention", "causal", lambda c: {"causal": False, "window_right": 1}),
    ("attention", "window_left", lambda c: {"window_left": c.window_left - 1}),
    ("attention", "window_both", lambda c: {"window_right": c.window_right + 1}),
    ("attention", "chunk", lambda c: {"attention_chunk": c.attention_chunk + 1}),
    ("attention", "float8_query", lambda c: {"q_scale": c.q_scale * 4}),
    ("attention", "softcap", lambda c: {"softcap": 0.0}),
    ("attention", "scale", lambda c: {"scale": 0.25}),
    ("attention", "sinks", lambda c: {"sinks": None}),
    ("attention", "mask_additive", lambda c: {"mask": c.mask * 1.01}),
    ("attention", "group_3", lambda c: {"key": c.key.flip(2), "value": c.value.flip(2)}),
    ("attention", "float8", lambda c: {"v_scale": c.k_scale}),
    ("attention", "range-plain", lambda c: {"value": c.value.nan_to_num(), "kv_start": None, "kv_end": None}),
    (
        "varlen_attention", "causal",
        lambda c: {"key": c.key.nan_to_num(), "value": c.value.nan_to_num(), "cu_seqlens_k": c.cu_seqlens_k + 1},
    ),
    ("paged_attention", "temperature", lambda c: {"temperature": None}),
    ("paged_attention", "temperature_all", lambda c: {"query": c.query * c.temperature[:, None, None], "temperature": None}),
    ("paged_attention", "lse", lambda c: {"lse": None}),
    ("mla_attention", "plain", lambda c: {"scale": 20**-0.5 / 1.02}),
    ("mla_attention", "plain", lambda c: {"causal": False}),
    ("mla_attention", "window", lambda c: {"window_left": c.window_left + 1}),
    ("mla_attention", "float8", lambda c: {"kv_scale": c.kv_scale * 1.1}),
    ("mla_attention", "deepseek-lse", lambda c: {"q_pe": c.q_pe * 0.9}),
    ("write_latent", "plain", lambda c: {"latent": c.latent.nan_to_num(), "k_pe": c.k_pe.nan_to_num(), "slots": c.slots.clamp(min=0)}),
    ("write_latent", "int8", lambda c: {"kv_scale": c.kv_scale * 1.07}),
    ("write_latent", "quantised", lambda c: {"latent": c.latent.float() * 1.07, "k_pe": c.k_pe.float(), "kv_scale": torch.ones(1)}),
    ("rope_quantize_latent", "plain", lambda c: {"interleaved": True}),
    ("rope_quantize_latent", "interleaved", lambda c: {"interleaved": False}),
    ("rope_quantize_latent", "plain", lambda c: {"positions": c.positions + 1 - (c.positions == 8).long()}),
    ("rope_quantize_latent", "plain", lambda c: {"cos_sin": c.cos_sin.flip(1)}),
    ("rope_quantize_latent", "plain", lambda c: {"q_scale": c.kv_scale}),
    ("rope_quantize_latent", "deepseek", lambda c: {"q_nope": c.q_nope.nextafter(c.q_nope * 2) * 1.02}),
    ("sparse_mla_attention", "plain", lambda c: {"latent_pages": c.latent_pages.nan_to_num(), "indices": c.indices.clamp(min=0)}),
    ("sparse_mla_attention", "sinks_lse", lambda c: {"sinks": None}),
    (
        "sparse_mla_attention", "lengths",
        lambda c: {"latent_pages": c.latent_pages.nan_to_num(), "indices": c.indices % 64, "topk_length": None},
    ),
    ("sparse_mla_attention", "packed_float32", lambda c: {"q_pe": c.q_pe * 1.1}),
    ("sparse_mla_attention", "packed_lse", lambda c: {"q_pe": c.q_pe * 1.1}),
    (
        "write_latent_packed", "plain",
        lambda c: {"latent": c.latent.nan_to_num(), "k_pe": c.k_pe.nan_to_num(), "slots": c.slots.clamp(min=0)},
    ),
    ("write_latent_packed", "plain", lambda c: {"latent": c.latent * 1.07}),
    ("write_latent_packed", "plain", lambda c: {"k_pe": c.k_pe * 1.02}),
    ("write_latent_packed", "edge", lambda c: {"latent": c.latent.nextafter(c.latent * 2)}),
    ("decode_attention", "whole", lambda c: {"sin": -c.sin}),
    ("decode_attention", "half", lambda c: {"cos": c.cos.flip(1)}),
    ("decode_attention", "norms", lambda c: {"k_norm": None}),
    ("decode_attention", "norms", lambda c: {"eps": 0.26}),
    ("decode_attention", "window", lambda c: {"window_left": c.window_left - 1}),
    ("decode_attention", "sinks", lambda c: {"sinks": None}),
    ("decode_attention", "softcap", lambda c: {"softcap": 0.0}),
    ("decode_attention", "skipped", lambda c: {"slots": c.slots.clamp(min=0)}),
    ("decode_attention", "plain", lambda c: {"seq_lens": c.seq_lens - 1}),
    ("decode_attention", "holes", lambda c: {"page_table": c.page_table.clamp(0, 3)}),
    ("write_kv", "plain", lambda c: {"key": c.key.nan_to_num(), "value": c.value.nan_to_num(), "slots": c.slots.clamp(min=0)}),
    ("write_kv", "float8", lambda c: {"k_scale": c.k_scale * 1.07}),
    ("vertical_slash_indexes", "ragged", lambda c: {"k_lens": c.k_lens - (c.k_lens > c.q_lens).int()}),
    ("vertical_slash_indexes", "counted", lambda c: {"vertical_counts": None, "slash_counts": None}),
    ("vertical_slash_attention", "plain", lambda c: {"column_count": c.column_count * 0}),
    ("vertical_slash_attention", "many_slashes", lambda c: {"block_count": (c.block_count - 1).clamp(min=0)}),
]  # fmt: skip


def on_another_call(op, change):
    return lambda c: OPS[op].reference(changed(c, **change(c)))


def typical_mistakes():
    for op, label, change in OTHER_CALLS:
        yield op, label, on_another_call(op, change)
    dense, varlen, paged, write, mla, rope, sparse = (
        OPS[n].reference
        for n in (
            "attention", "varlen_attention", "paged_attention", "write_kv", "mla_attention", "rope_quantize_latent", "sparse_mla_attention",
        )
    )  # fmt: skip

    def narrow_sum(c):
        # Weights and sum in the dtype itself: what a kernel without wide accumulation does.
        query, key, value = (x.transpose(1, 2) for x in (c.query[:, :, :4], c.key.repeat_interleave(2, 2), c.value.repeat_interleave(2, 2)))
        p = torch.softmax((query @ key.mT) * c.scale, -1)
        out = torch.zeros_like(query)
        for j in range(key.shape[2]):
            out = out + p[..., j, None] * value[:, :, j, None]
        return out.transpose(1, 2).contiguous(), c.query.new_empty(0, dtype=torch.float32)

    def of_float32(c):
        narrow = dense(changed(c, query=c.query.float(), key=c.key.float(), value=c.value.float()))
        return narrow[0].double(), dense(c)[1]

    def leaves_padding(c):
        kept = c.output.clone()
        paged(c)
        end = int(c.cu_seqlens_q[-1])
        c.output[end:] = kept[end:]

    def touches_skipped(c):
        write(c)
        c.k_pages[-1, -1] = 0

    def touches_others(c):
        write(c)
        c.k_pages[1, 1] = 0

    def wraps(c):
        for rows, pages, scale in ((c.key, c.k_pages, c.k_scale), (c.value, c.v_pages, c.v_scale)):
            at = c.slots >= 0
            stored = (rows / scale[:, None]).round().to(torch.int64).to(torch.int8)
            pages[c.slots[at] // pages.shape[1], c.slots[at] % pages.shape[1]] = stored[at]

    def scribbles(c):
        out = dense(c)
        c.query.zero_()
        return out

    def base_2(run):
        return lambda c: (run(c), c.lse.div_(math.log(2)))[0]

    yield "attention", "lse", lambda c: (dense(c)[0], dense(c)[1] / math.log(2))
    yield "attention", "tall-lse_causal", lambda c: (dense(c)[0], dense(c)[1].nan_to_num(neginf=-1e9))
    yield "attention", "plain", lambda c: tuple(x.half().to(x.dtype) for x in dense(c))
    yield "attention", "float64", of_float32
    yield "attention", "long-bfloat16_d64", narrow_sum
    yield "attention", "plain", lambda c: (dense(c)[0].transpose(1, 2).contiguous().transpose(1, 2), c.query.new_empty(0))
    yield "attention", "lse", lambda c: (dense(c)[0], dense(c)[1].double())
    yield "attention", "plain", lambda c: dense(c)[:1]
    yield "attention", "mha", lambda c: (c.query, dense(c)[1])
    yield "attention", "plain", scribbles
    yield "varlen_attention", "plain", lambda c: (varlen(c)[0] + c.query.nan_to_num() * 1e-3, c.query.new_empty(0))
    yield "paged_attention", "plain", leaves_padding
    yield "paged_attention", "plain", lambda c: c.output
    yield "mla_attention", "lse", base_2(mla)
    yield "sparse_mla_attention", "lse", base_2(sparse)
    yield "rope_quantize_latent", "saturated", lambda c: [x.float().clamp(-240, 240).to(x.dtype) for x in rope(c)]
    yield "write_kv", "plain", touches_skipped
    yield "write_kv", "plain", touches_others
    yield "write_kv", "int8", wraps
    yield "merge_states", "some_empty", lambda c: (c.outputs.nan_to_num().mean(1), c.lses.logsumexp(1))
    yield "merge_states", "all_empty", lambda c: (torch.einsum("tnhd,tnh->thd", c.outputs, c.lses.softmax(1)), c.lses.logsumexp(1))
    yield "merge_state", "plain", lambda c: ((c.output_a + c.output_b) / 2, torch.logaddexp(c.lse_a, c.lse_b))
    yield "request_starts", "as_many_as_keys", lambda c: torch.cat([c.begins.flatten().nonzero()[:, 0], torch.tensor([4])]).int()
    yield "cu_seqlens", "ragged-int32", lambda c: torch.cumsum(c.lengths, 0).to(torch.int32)
    yield "cu_seqlens", "ragged-int64", lambda c: torch.nn.functional.pad(torch.cumsum(c.lengths, 0), (1, 0))


@pytest.mark.parametrize(("op", "label", "run"), [pytest.param(*m, id=f"{i}-{m[0]}-{m[1]}") for i, m in enumerate(typical_mistakes())])
def test_the_check_sees(op, label, run):
    [case] = [c for c in CASES[op] if c.label == label]
    with pytest.raises(Mismatch):
        check_kernel(spoilt(op, run), case.call())


def test_the_check_reports_refusals_and_runs_nothing():
    from attnops.core.kernel import without

    kernel = spoilt("attention", lambda call: pytest.fail("ran"), needs=without("sinks", "softcap"))
    [case] = [c for c in CASES["attention"] if c.label == "all"]
    figures = check_kernel(kernel, case.call())
    assert [r.field for r in figures.refused] == ["sinks", "softcap"]
    assert "refused: sinks=True" in str(figures)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.01), (torch.float16, 0.02), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("more", [{}, OSS], ids=["plain", "all"])
@pytest.mark.parametrize("fault", ["dropped", "wrong", "doubled"])
def test_one_choice_of_a_mixture_is_seen(fault, more, dtype, share):
    """Of one token, among eight experts; also where its weight is a small share of all."""
    call = make_call("experts", Source(0), 3, (256, 128, 256, 16, 8), dtype, **more)
    index, weights = call.arguments["top_k_index"], torch.full((3, 8), (1 - share) / 7)
    weights[:, 0] = share

    def run(honest):
        chosen, by = honest.top_k_index.clone(), honest.top_k_weights.clone()
        if fault == "wrong":
            chosen[1, 0] = next(e for e in range(16) if e not in index[1])
        by[1, 0] *= {"dropped": 0.0, "wrong": 1.0, "doubled": 2.0}[fault]
        kernels_of("experts")["aten"].run(changed(honest, top_k_index=chosen, top_k_weights=by))

    call = call.with_(top_k_weights=weights)
    aten = kernels_of("experts")["aten"]
    assert 0.0 < check_kernel(aten, call).worst <= 0.5
    with pytest.raises(Mismatch, match="output"):
        check_kernel(replace(aten, run=run), call)


@pytest.mark.parametrize("more", [{}, {"norm": 0.0, "activation": "silu"}, {"bias": True, "residual": True}], ids=str)
def test_a_dropped_block_of_columns_is_seen(more):
    """A 32nd of a row of Llama's width, in bfloat16."""
    call = make_call("linear", Source(0), 3, 4096, 64, torch.bfloat16, **more)

    def run(honest):
        x = honest.x.clone()
        x[:, 1024:1152] = 0.0
        kernels_of("linear")["aten"].run(changed(honest, x=x))

    aten = kernels_of("linear")["aten"]
    assert 0.0 < check_kernel(aten, call).worst <= 0.5
    with pytest.raises(Mismatch, match="output"):
        check_kernel(replace(aten, run=run), call)


def test_tolerance_multiplies_the_budget():
    [case] = [c for c in CASES["attention"] if c.label == "plain"]

    def rounded(call):
        return tuple(x.bfloat16().float() for x in OPS["attention"].reference(call))

    with pytest.raises(Mismatch, match="allowed"):
        check_kernel(spoilt("attention", rounded), case.call())
    assert check_kernel(spoilt("attention", rounded, tolerance=Tolerance(2.0**16)), case.call()).worst < 1.0


# merge_state ----------------------------------------------------------------------------------------------------------

MERGES = [k.name for k in kernels_of("merge_state").values() if not k.packages]
"""Those of packages have dtypes and head dims of their own; see tests/standins."""


@pytest.mark.parametrize("kernel", MERGES)
def test_merge_with_one_empty_side_is_the_other(kernel):
    out, lse = torch.randn(3, 2, 4), torch.randn(3, 2)
    nothing, none = torch.full_like(out, float("nan")), torch.full_like(lse, -INF)
    for merged in (
        attnops.merge_state(out, lse, nothing, none, kernel=kernel),
        attnops.merge_state(nothing, none, out, lse, kernel=kernel),
    ):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)


@pytest.mark.parametrize("kernel", MERGES)
def test_merge_of_nothing_is_nothing(kernel):
    nothing, none = torch.full((3, 2, 4), float("nan")), torch.full((3, 2), -INF)
    out, lse = attnops.merge_state(nothing, none, nothing, none, kernel=kernel)
    assert torch.equal(out, torch.zeros(3, 2, 4))
    assert torch.equal(lse, none)


@pytest.mark.parametrize("kernel", MERGES)
def test_merge_of_far_apart_sides_does_not_overflow(kernel):
    a, b = torch.ones(1, 1, 4), -torch.ones(1, 1, 4)
    out, lse = attnops.merge_state(a, torch.tensor([[1e30]]), b, torch.tensor([[-1e30]]), kernel=kernel)
    assert torch.equal(out, a)
    assert lse.item() == pytest.approx(1e30)


@given(st.data())
@settings(max_examples=25)
def test_merge_of_two_halves_is_the_whole(data):
    tokens, keys = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 6))
    cut = data.draw(st.integers(0, keys))
    source = Source(data.draw(st.integers(0, 99)))
    q = source.normal(1, tokens, 4, 8, dtype=torch.float64)
    k, v = (source.normal(1, keys, 2, 8, dtype=torch.float64) for _ in range(2))
    whole, lse = attnops.attention(q, k, v, return_lse=True)
    a, la = attnops.attention(q, k[:, :cut], v[:, :cut], return_lse=True)
    b, lb = attnops.attention(q, k[:, cut:], v[:, cut:], return_lse=True)
    merged, merged_lse = attnops.merge_state(a[0], la[0], b[0], lb[0])
    torch.testing.assert_close(merged, whole[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merged_lse, lse[0], rtol=1e-6, atol=1e-6)


# write_kv -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", list(kernels_of("write_kv")))
@pytest.mark.parametrize(("dtype", "top"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0), (torch.int8, 127.0)])
def test_quantised_stores_saturate(kernel, dtype, top):
    pages = torch.zeros(2, 2, 1, 2, dtype=torch.uint8).view(dtype)
    values = torch.tensor([1e30, -1e30]).reshape(1, 1, 2)
    one = torch.ones(1)
    arguments = {"key": values, "value": values, "k_pages": pages, "v_pages": pages.clone(), "slots": torch.tensor([3])}
    arguments |= {"k_scale": one, "v_scale": one}
    if refused := kernels_of("write_kv")[kernel].refusals(Call("write_kv", arguments).problem):
        pytest.skip("; ".join(map(str, refused)))
    attnops.write_kv(**arguments, kernel=kernel)
    assert pages.double()[1, 1, 0].tolist() == [top, -top]
    assert not pages.double()[0].any()


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        ([[1, 0, 0, 1]], [0, 3, 4]), ([[1, 1, 0], [1, 0, 0]], [0, 1, 3, 6]), ([[1, 0, 0]], [0, 3]), ([[1], [1]], [0, 1, 2]),
        ([[1, 1, 0]], [0, 1, 3, 3]), ([[1, 0], [1, 0]], [0, 2, 4]), ([[]], [0, 0]),
    ],
)  # fmt: skip
def test_request_starts(rows, want):
    """The length of a result is never that of a row, nor 1."""
    got = ops.request_starts(torch.tensor(rows, dtype=torch.bool))
    assert got.dtype == torch.int32 and got.tolist() == want and len(want) not in (1, len(rows[0]))


@pytest.mark.parametrize("kernel", list(kernels_of("write_kv")))
def test_nothing_is_written_when_all_is_skipped(kernel):
    for dtype in (torch.float32, torch.bfloat16):
        k_pages, v_pages = torch.randn(3, 2, 1, 4).to(dtype), torch.full((3, 2, 1, 4), float("nan"), dtype=dtype)
        before = k_pages.clone()
        rows = torch.full((3, 1, 4), float("nan"), dtype=dtype)
        given = {"key": rows, "value": rows, "k_pages": k_pages, "v_pages": v_pages, "slots": torch.tensor([-1, -1, -5])}
        if refused := kernels_of("write_kv")[kernel].refusals(Call("write_kv", given).problem):
            pytest.skip("; ".join(map(str, refused)))
        attnops.write_kv(**given, kernel=kernel)
        assert torch.equal(k_pages, before)
        assert v_pages.isnan().all()


@given(st.data())
@settings(max_examples=25)
def test_written_keys_are_read_back(data):
    """slot_mapping, write_kv and paged_attention agree on where a token lies."""
    page = data.draw(st.sampled_from([1, 2, 3, 16]))
    lens = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    source = Source(data.draw(st.integers(0, 99)))
    f = Features(dtype=torch.float64)
    call = make_call("paged_attention", source, lens, lens, page, f, padding=0, pages=Pages(spare=1))
    t = dict(call.arguments)
    total = sum(lens)
    key, value = source.normal(total, 2, 16, dtype=torch.float64), source.normal(total, 2, 16, dtype=torch.float64)
    rows = ops.token_rows(t["cu_seqlens_q"], total)
    positions = torch.arange(total) - t["cu_seqlens_q"].long()[rows.long()]
    slots = ops.slot_mapping(positions, rows, t["page_table"], page_size=page)
    k_pages, v_pages = torch.full_like(t["k_pages"], float("nan")), torch.full_like(t["v_pages"], float("nan"))
    attnops.write_kv(key, value, k_pages, v_pages, slots)
    out = attnops.paged_attention(t["query"], k_pages, v_pages, t["page_table"], t["seq_lens"], t["cu_seqlens_q"], max_seqlen_q=max(lens))
    want = attnops.varlen_attention(
        t["query"], key, value, t["cu_seqlens_q"], t["cu_seqlens_q"], max_seqlen_q=max(lens), max_seqlen_k=max(lens), causal=True
    )
    torch.testing.assert_close(out, want)


# Metadata against plain Python ----------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(0, 40), max_size=6)
DTYPES = st.sampled_from([torch.int32, torch.int64])
PAGES = st.sampled_from([1, 2, 3, 16])


@given(LENGTHS, DTYPES)
@settings(max_examples=30)
def test_cu_seqlens(lens, dtype):
    got = ops.cu_seqlens(torch.tensor(lens, dtype=dtype))
    assert (got.dtype, got.tolist()) == (torch.int32, [sum(lens[:i]) for i in range(len(lens) + 1)])


@given(LENGTHS, st.integers(0, 5))
@settings(max_examples=30)
def test_token_rows(lens, more):
    got = ops.token_rows(ops.cu_seqlens(torch.tensor(lens, dtype=torch.int32)), sum(lens) + more)
    assert (got.dtype, got.tolist()) == (torch.int32, [b for b, n in enumerate(lens) for _ in range(n)] + [-1] * more)


@given(LENGTHS)
@settings(max_examples=15)
def test_token_rows_of_fewer_tokens_than_the_requests_have(lens):
    whole = [b for b, n in enumerate(lens) for _ in range(n)]
    got = ops.token_rows(ops.cu_seqlens(torch.tensor(lens, dtype=torch.int32)), len(whole) // 2)
    assert got.tolist() == whole[: len(whole) // 2]


@given(st.data(), DTYPES, PAGES)
@settings(max_examples=40)
def test_slot_mapping(data, dtype, page):
    batch, width, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 8))
    table = [[data.draw(st.integers(-1, 9)) for _ in range(width)] for _ in range(batch)]
    positions = [data.draw(st.integers(-2, page * 4)) for _ in range(tokens)]
    rows = [data.draw(st.integers(-1, batch - 1)) for _ in range(tokens)]

    def slot(position, row):
        if position < 0 or row < 0 or position // page >= width or table[row][position // page] < 0:
            return -1
        return table[row][position // page] * page + position % page

    got = ops.slot_mapping(
        torch.tensor(positions, dtype=dtype),
        torch.tensor(rows, dtype=dtype),
        torch.tensor(table, dtype=torch.int32).reshape(batch, width),
        page_size=page,
    )
    assert (got.dtype, got.tolist()) == (torch.int64, [slot(*pair) for pair in zip(positions, rows, strict=True)])


@given(st.data(), DTYPES, PAGES)
@settings(max_examples=40)
def test_kv_indices(data, dtype, page):
    batch, width = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
    table = [[data.draw(st.integers(0, 99)) for _ in range(width)] for _ in range(batch)]
    lens = [data.draw(st.integers(0, width * page)) for _ in range(batch)]
    counts = [-(-n // page) for n in lens]
    used = [p for row, n in zip(table, counts, strict=True) for p in row[:n]]
    indptr, indices, last = ops.kv_indices(
        torch.tensor(table, dtype=torch.int32).reshape(batch, width), torch.tensor(lens, dtype=dtype), page_size=page
    )
    assert indptr.tolist() == [sum(counts[:i]) for i in range(batch + 1)]
    assert indices.tolist() == used + [0] * (batch * width - len(used))
    assert last.tolist() == [(n - 1) % page + 1 if n else 0 for n in lens]
    assert {t.dtype for t in (indptr, indices, last)} == {torch.int32}


# Other promises of the public functions -------------------------------------------------------------------------------


def test_default_scale_is_one_over_root_d():
    q, k, v = (torch.randn(1, 3, 2, 9) for _ in range(3))
    assert torch.equal(attnops.attention(q, k, v), attnops.attention(q, k, v, scale=1 / 3))


def test_paged_attention_writes_into_what_it_is_given():
    [case] = [c for c in CASES["paged_attention"] if c.label == "lse"]
    t = dict(case.call().arguments)
    output, lse = t.pop("output"), t.pop("lse")
    lse.fill_(float("nan"))
    names = ("query", "k_pages", "v_pages", "page_table", "seq_lens", "cu_seqlens_q")
    asked = {"max_seqlen_q": 4, "causal": False, "kernel": "reference"}
    returned = attnops.paged_attention(*(t[n] for n in names), **asked, output=output, lse=lse)
    assert returned.data_ptr() == output.data_ptr()
    assert not lse.isnan().any()
    assert torch.equal(output, attnops.paged_attention(*(t[n] for n in names), **asked))


@pytest.mark.parametrize("kernel", list(kernels_of("paged_attention")))
def test_a_request_does_not_depend_on_its_neighbours(kernel):
    f = replace(Features(), dtype=torch.float64)
    call = make_call("paged_attention", Source(3), (1, 2, 1), (5, 9, 3), 4, f, padding=0)
    if refused := kernels_of("paged_attention")[kernel].refusals(call.problem):
        pytest.skip("; ".join(map(str, refused)))
    t = dict(call.arguments)
    names = ("query", "k_pages", "v_pages", "page_table", "seq_lens", "cu_seqlens_q")
    whole = attnops.paged_attention(*(t[n] for n in names), max_seqlen_q=2, kernel=kernel)
    one = attnops.paged_attention(
        t["query"][1:3], t["k_pages"], t["v_pages"], t["page_table"][1:2], t["seq_lens"][1:2], torch.tensor([0, 2], dtype=torch.int32),
        max_seqlen_q=2, kernel=kernel,
    )  # fmt: skip
    torch.testing.assert_close(whole[1:3], one)


def loud(op, sign, sinks):
    """A call whose logits are about 46,000, of one sign, and differ by little."""
    f = Features(dtype=torch.float64, q_heads=2, kv_heads=1, head_dim=4, causal=True, sinks=torch.float64 if sinks else None)
    if op == "attention":
        call = make_call("attention", Source(0), 1, 3, 5, f)
    elif op == "varlen_attention":
        call = make_call("varlen_attention", Source(0), (2, 3), (4, 3), f, padding=(0, 0))
    elif op == "paged_attention":
        call = make_call("paged_attention", Source(0), (1, 2), (5, 4), 2, f, padding=0, pages=Pages(wider=0, spare=0))
    else:
        call = make_call(
            "mla_attention", Source(0), (1, 2), (5, 4), 2, replace(f, q_heads=2, head_dim=4, v_head_dim=3), 0, pages=Pages(wider=0, spare=0)
        )

    def change(n, t):
        t = t.double() if t.is_floating_point() else t
        if n in ("query", "q_nope", "q_pe"):
            return (1 + t / 64).round(decimals=2)
        if n in ("key", "k_pages", "latent_pages"):
            return sign * 23_000.0 * (1 + (t * 16).round() / 2**18)
        return t.sign() * 46_000 * sign + t if n == "sinks" else t

    return call.map(change).with_(scale=0.5)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("op", DECIDED_BY_LOOPS)
def test_the_reference_is_exact_at_large_logits(op, sign, sinks):
    """In float32, too, whose steps at 46,000 are 1 / 256: exp(logit - lse) would be off by as much."""
    call = loud(op, sign, sinks)
    narrow = call.map(lambda n, t: t.float() if t.is_floating_point() else t)
    # Of float32's own products and sums nothing is asked here: both are given the same logits.
    exact = narrow.map(lambda n, t: t.double() if t.is_floating_point() else t)
    found = formulas.scores

    def of_float32(query, key, see, mask, rules, temperature=None):
        return found(query.double(), key.double(), see, mask, rules, temperature).float().to(query.dtype)

    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formulas, "scores", of_float32)
        for one in (narrow, exact):
            given = one.map(lambda n, t: t.clone())
            returned = OPS[op].reference(given.record)
            results.append(given.arguments["output"] if returned is None else returned[0])
    torch.testing.assert_close(results[0].double(), results[1].double(), rtol=0, atol=2e-6 * float(results[1].abs().max() + 1))
    assert all(float(i[0].abs().amax() * i[1].abs().amax()) * 4 * 0.5 > 40_000 for i in requests(exact))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_reference_is_that_of_loops_at_large_logits(sign):
    for op in DECIDED_BY_LOOPS:
        call = loud(op, sign, False)
        given = call.map(lambda n, t: t.clone())
        returned = OPS[op].reference(given.record)
        got = given.arguments["output"] if returned is None else returned[0]
        for query, key, value, mask, start, rows in requests(call):
            want, _ = by_hand(query, key, value, mask, start, {**call.arguments, "causal": call.record.causal})
            torch.testing.assert_close(got[rows], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_references_gradient_is_exact_at_large_logits(sign, sinks):
    call = loud("attention", sign, sinks).map(lambda n, t: t.float().double() if t.is_floating_point() else t)
    back = gradient_call(Source(1), call)
    exact = OPS["attention_backward"].reference(back.record)
    # The gradient by finite differences of what the loops decide.
    names = ["query", "key", "value", *(["sinks"] if sinks else [])]
    leaves = [call.arguments[n].clone().requires_grad_() for n in names]

    def plain(q, k, v, sink=None):
        k, v = (x.repeat_interleave(2, 2) for x in (k, v))
        s = torch.einsum("bshd,bkhd->bhsk", q, k) * 0.5
        hidden = torch.arange(5) > torch.arange(3)[:, None] + 2
        s = s.masked_fill(hidden, -INF)
        s = s if sink is None else torch.cat([s, sink[None, :, None, None].expand(1, 2, 3, 1)], -1)
        return torch.einsum("bhsk,bkhd->bshd", torch.softmax(s, -1)[..., :5], v)

    wanted = torch.autograd.grad((plain(*leaves) * back.arguments["grad_output"]).sum(), leaves)
    got = [exact[0], exact[1], exact[2], *([exact[4]] if sinks else [])]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max() + 1))
    # A saved lse of float32 says nothing: one that is off changes nothing.
    off = back.with_(lse=back.arguments["lse"] + 0.01)
    for a, b in zip(OPS["attention_backward"].reference(off.record), exact, strict=True):
        assert torch.equal(a, b)
    narrow = back.map(lambda n, t: t.float() if t.is_floating_point() else t)
    values = OPS["attention_backward"].reference(narrow.record)[2]
    assert torch.isfinite(values).all()
