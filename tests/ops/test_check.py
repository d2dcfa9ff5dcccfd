"""What `attnops.testing` sees: arguments that a kernel leaves out of account, memory that is not
its own, and sums that fall short."""

from dataclasses import replace

import pytest
import torch

from attnops.core.arguments import REQUIRED
from attnops.core.kernel import Kernel, Tolerance, kernels_of, without
from attnops.core.record import changed
from attnops.ops import OPS
from attnops.ops.experts.cases import OSS
from attnops.testing import CASES, Mismatch, Source, check_kernel, make_call
from tests.checks import case_of


def spoilt(op, run, **more):
    """A kernel that claims to take every argument: it is run, and not refused."""
    known = kernels_of(op)["reference"]
    takes = {"takes": OPS[op].spec.optional, "dtypes": known.dtypes, "kv_dtypes": known.kv_dtypes}
    return Kernel("spoilt", op, run, **takes, **more)


def numbered(rows):
    return [pytest.param(*row, id=f"{i}-{row[0]}-{row[1]}") for i, row in enumerate(rows)]


# Arguments ----------------------------------------------------------------------------------------

UNSEEN = {
    *(("linear", name) for name in ("norm_eps", "activation")),
    *((op, "lse") for op in ("attention_backward", "varlen_attention_backward")),
    *(
        ("decode_attention", "holes"),
        ("sparse_mla_attention", "topk_length"),
        ("vertical_slash_indexes", "slash_counts"),
        ("rms_norm", "wide_gain"),
        ("build_tree", "scores"),
    ),
}
"""Numbers that are small, that decide a shape, a rounding or an order alone, or that the reference
does not read; and lists that end, or are empty, without a length."""


def is_float(value):
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1
    )


def counts(op, a):
    if (
        a.hint
        or a.written
        or a.name == "policy"
        or op.startswith("plan_")
        or (op, a.name) in UNSEEN
    ):
        return False
    return a.default is not REQUIRED or is_float(CASES[op][0].call().arguments.get(a.name))


ARGUMENTS = [
    pytest.param(op, a, id=f"{op}-{a.name}")
    for op in OPS
    for a in OPS[op].spec.args
    if counts(op, a)
]


def is_seen(op, a, case):
    """Is a kernel refused that has every number of the argument a tenth larger, or does not know
    the argument?"""
    value = case.call().arguments.get(a.name)
    if value is None or (a.default is REQUIRED and not is_float(value)):
        return False
    wrong = (value * 1.1).to(value.dtype) if is_float(value) else a.default
    kernel = spoilt(op, lambda call: OPS[op].reference(changed(call, **{a.name: wrong})))
    try:
        check_kernel(kernel, case.call())
    except Mismatch:
        return True
    return False


@pytest.mark.parametrize(("op", "a"), ARGUMENTS)
def test_an_argument_left_out_of_account_is_seen(op, a):
    assert any(is_seen(op, a, case) for case in CASES[op])


# What a kernel computes with other integers, or reads where nothing is: what it changes in the
# call.
OTHER_CALLS = [
    ("attention", "window_left", lambda c: {"window_left": c.window_left - 1}),
    ("attention", "window_both", lambda c: {"window_right": c.window_right + 1}),
    ("attention", "chunk", lambda c: {"attention_chunk": c.attention_chunk + 1}),
    ("attention", "group_3", lambda c: {"key": c.key.flip(2), "value": c.value.flip(2)}),
    (
        "attention",
        "range-plain",
        lambda c: {"value": c.value.nan_to_num(), "kv_start": None, "kv_end": None},
    ),
    (
        "paged_attention",
        "temperature_all",
        lambda c: {"query": c.query * c.temperature[:, None, None], "temperature": None},
    ),
    ("mla_attention", "plain", lambda c: {"causal": False}),
    ("mla_attention", "plain", lambda c: {"scale": 20**-0.5 / 1.02}),
    (
        "write_latent",
        "plain",
        lambda c: {
            "latent": c.latent.nan_to_num(),
            "k_pe": c.k_pe.nan_to_num(),
            "slots": c.slots.clamp(min=0),
        },
    ),
    (
        "rope_quantize_latent",
        "plain",
        lambda c: {"positions": c.positions + 1 - (c.positions == 8).long()},
    ),
    (
        "sparse_mla_attention",
        "plain",
        lambda c: {"latent_pages": c.latent_pages.nan_to_num(), "indices": c.indices.clamp(min=0)},
    ),
    (
        "sparse_mla_attention",
        "lengths",
        lambda c: {
            "latent_pages": c.latent_pages.nan_to_num(),
            "indices": c.indices % 64,
            "topk_length": None,
        },
    ),
    ("write_latent_packed", "edge", lambda c: {"latent": c.latent.nextafter(c.latent * 2)}),
    ("decode_attention", "skipped", lambda c: {"slots": c.slots.clamp(min=0)}),
    ("decode_attention", "plain", lambda c: {"seq_lens": c.seq_lens - 1}),
    ("decode_attention", "holes", lambda c: {"page_table": c.page_table.clamp(0, 3)}),
    (
        "vertical_slash_indexes",
        "ragged",
        lambda c: {"k_lens": c.k_lens - (c.k_lens > c.q_lens).int()},
    ),
    ("vertical_slash_attention", "plain", lambda c: {"column_count": c.column_count * 0}),
    (
        "vertical_slash_attention",
        "many_slashes",
        lambda c: {"block_count": (c.block_count - 1).clamp(min=0)},
    ),
]


@pytest.mark.parametrize(("op", "label", "change"), numbered(OTHER_CALLS))
def test_another_call_is_seen(op, label, change):
    kernel = spoilt(op, lambda call: OPS[op].reference(changed(call, **change(call))))
    with pytest.raises(Mismatch):
        check_kernel(kernel, case_of(op, label))


# Results ------------------------------------------------------------------------------------------


def leaves_padding(c):
    kept, end = c.output.clone(), int(c.cu_seqlens_q[-1])
    OPS["paged_attention"].reference(c)
    c.output[end:] = kept[end:]


def touches_a_slot(page):
    def run(c):
        OPS["write_kv"].reference(c)
        c.k_pages[page, page] = 0

    return run


def scribbles(c):
    out = dense(c)
    c.query.zero_()
    return out


def chooses_another(c):
    OPS["route"].reference(c)
    c.index[0, 3] = next(e for e in range(24) if e not in c.index[0])


dense = OPS["attention"].reference
MISTAKES = [
    ("attention", "tall-lse_causal", lambda c: (dense(c)[0], dense(c)[1].nan_to_num(neginf=-1e9))),
    ("attention", "plain", lambda c: tuple(x.half().to(x.dtype) for x in dense(c))),
    (
        "attention",
        "plain",
        lambda c: (dense(c)[0].transpose(1, 2).contiguous().transpose(1, 2), c.query.new_empty(0)),
    ),
    ("attention", "lse", lambda c: (dense(c)[0], dense(c)[1].double())),
    ("attention", "plain", lambda c: dense(c)[:1]),
    ("attention", "plain", scribbles),
    ("paged_attention", "plain", leaves_padding),
    ("paged_attention", "plain", lambda c: c.output),
    ("write_kv", "plain", touches_a_slot(-1)),
    ("write_kv", "plain", touches_a_slot(1)),
    ("cu_seqlens", "ragged-int32", lambda c: torch.cumsum(c.lengths, 0).to(torch.int32)),
    (
        "cu_seqlens",
        "ragged-int64",
        lambda c: torch.nn.functional.pad(torch.cumsum(c.lengths, 0), (1, 0)),
    ),
    ("route", "all", chooses_another),
]


@pytest.mark.parametrize(("op", "label", "run"), numbered(MISTAKES))
def test_a_wrong_result_is_seen(op, label, run):
    with pytest.raises(Mismatch):
        check_kernel(spoilt(op, run), case_of(op, label))


def test_refusals_are_reported_and_nothing_runs():
    kernel = spoilt("attention", lambda call: pytest.fail("ran"), needs=without("sinks", "softcap"))
    figures = check_kernel(kernel, case_of("attention", "all"))
    assert [r.field for r in figures.refused] == ["sinks", "softcap"]
    assert "refused: sinks=True" in str(figures)


def test_tolerance_multiplies_the_budget():
    call = case_of("attention", "plain")

    def rounded(call):
        return tuple(x.bfloat16().float() for x in dense(call))

    with pytest.raises(Mismatch, match="allowed"):
        check_kernel(spoilt("attention", rounded), call)
    assert (
        check_kernel(spoilt("attention", rounded, tolerance=Tolerance(2.0**16)), call).worst < 1.0
    )


# Sums ---------------------------------------------------------------------------------------------


def is_told_from(spoil, call):
    """Well within the budget as it is, and past it with another call in its place."""
    aten = kernels_of(call.op)["aten"]
    assert 0.0 < check_kernel(aten, call).worst <= 0.5
    with pytest.raises(Mismatch, match="output"):
        check_kernel(replace(aten, run=lambda honest: aten.run(spoil(honest))), call)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float32, 0.01), (torch.float16, 0.02), (torch.bfloat16, 0.1)]
)
@pytest.mark.parametrize("more", [{}, OSS], ids=["plain", "all"])
@pytest.mark.parametrize("fault", ["dropped", "wrong", "doubled"])
def test_one_choice_of_a_mixture_is_seen(fault, more, dtype, share):
    """Of one token, among eight experts; also where its weight is a small share of all."""
    call = make_call("experts", Source(0), 3, (256, 128, 256, 16, 8), dtype, **more)
    weights = torch.full((3, 8), (1 - share) / 7)
    weights[:, 0] = share

    def spoil(honest):
        chosen, by = honest.top_k_index.clone(), honest.top_k_weights.clone()
        if fault == "wrong":
            chosen[1, 0] = next(e for e in range(16) if e not in chosen[1])
        by[1, 0] *= {"dropped": 0.0, "wrong": 1.0, "doubled": 2.0}[fault]
        return changed(honest, top_k_index=chosen, top_k_weights=by)

    is_told_from(spoil, call.with_(top_k_weights=weights))


@pytest.mark.parametrize(
    "more", [{}, {"norm": 0.0, "activation": "silu"}, {"bias": True, "residual": True}], ids=str
)
def test_a_dropped_block_of_columns_is_seen(more):
    """A 32nd of a row of Llama's width, in bfloat16."""

    def spoil(honest):
        x = honest.x.clone()
        x[:, 1024:1152] = 0.0
        return changed(honest, x=x)

    is_told_from(spoil, make_call("linear", Source(0), 3, 4096, 64, torch.bfloat16, **more))
