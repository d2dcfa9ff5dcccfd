"""`fa3` through a stand-in of the op it wraps: layouts, lse, padding, refusals, and the code that a
compiled model gets."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import attnops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Problem, Target, altered, pretend
from attnops.core.record import changed
from attnops.core.select import Policy, active_policy, select
from attnops.kernels.sgl import fa3 as kernel, wheel
from attnops.ops import OPS
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Features, Source, check_kernel, make_call
from tests.checks import right
from tests.standins.calls import Ops, latents
from tests.standins.schemas import FWD as SCHEMA
from tests.standins.sgl_kernel_fa3 import SCHEMA_37, installed
from tests.standins.vendors import VENDORS, half

NAME = "fa3"
SM90 = VENDORS[NAME].target
BF16, F16 = torch.bfloat16, torch.float16


def fa3(op):
    return kernels_of(op)["fa3"]


def half_features(**more):
    return Features(dtype=BF16, causal=True, **more)


@pytest.mark.parametrize("given", [torch.float32, F16])
def test_wider_sinks_are_rounded(standin, given):
    right(fa3("attention"), make_call("attention", Source(3), 2, 5, 9, half_features(sinks=given)))


@pytest.mark.parametrize(
    ("op", "f"), [("paged_attention", half_features(head_dim=128)), ("mla_attention", DEEPSEEK)]
)
def test_one_split_under_a_deterministic_policy(standin, op, f):
    call = make_call(op, Source(5), (1, 1), (9, 30), 64, f, 0)
    for policy, splits in (
        ("", 0),
        ("deterministic", 1),
        ("kernel=fa3;deterministic", 1),
        ("prefer=fa3", 0),
    ):
        fa3(op).run(changed(call.record, policy=policy))
        assert standin[-1]["num_splits"] == splits
        assert op == "paged_attention" or (standin[-1]["leftpad_k"] is not None) == bool(splits)
    assert select(call.problem, Policy(deterministic=True)).kernel is fa3(op)


def test_tiles_do_not_follow_from_mates_under_a_deterministic_policy(standin):
    """What the kernel picks its tiles by: the longest request, where a window ends, whether keys
    are said to end."""
    alone = make_call(
        "varlen_attention", Source(5), (1,), (9,), half_features(window=(30, -1)), padding=(0, 0)
    )
    among = make_call(
        "varlen_attention",
        Source(5),
        (1, 7),
        (9, 90),
        half_features(window=(30, -1)),
        padding=(0, 0),
    )
    for call in (alone, among):
        fa3("varlen_attention").run(changed(call.record, policy="deterministic"))
        assert standin[-1]["max_seqlen_q"] > 1 and standin[-1]["max_seqlen_k"] > 31
    fa3("varlen_attention").run(alone.record)
    assert (standin[-1]["max_seqlen_q"], standin[-1]["max_seqlen_k"]) == (1, 9)
    paged = make_call("paged_attention", Source(5), (1,), (9,), 4, half_features(), padding=0)
    fa3("paged_attention").run(changed(paged.record, policy="deterministic"))
    assert standin[-1]["max_seqlen_q"] > 1
    for more in ({}, {"kv_end": (9, 5)}, {"kv_start": (0, 3)}):
        dense = make_call(
            "attention", Source(5), 2, 1, 9, half_features(), index=torch.int32, **more
        )
        fa3("attention").run(changed(dense.record, policy="deterministic"))
        assert standin[-1]["page_table"] is not None
    problem = altered(paged.problem, head_dim=256, v_head_dim=256, window=(30, -1))
    assert [r.field for r in fa3("paged_attention").varies(problem)] == ["window"]
    assert not fa3("paged_attention").varies(replace(problem, head_dim=128, v_head_dim=128))
    for op in ("varlen_attention", "paged_attention"):
        assert [
            r.field
            for r in fa3(op).varies(
                altered(problem, op=op, head_dim=64, v_head_dim=64, window=(-1, -1))
            )
        ] == ["head_dim"]


def test_the_longer_schema_gets_its_two_arguments():
    if find_spec("sgl_kernel"):
        pytest.skip("sgl_kernel is installed, and a stand-in under its name would hide it")
    case = make_call(
        "varlen_attention", Source(6), (3, 1), (5, 4), Features(dtype=F16, causal=True)
    )
    with installed(SCHEMA_37) as calls, pretend(SM90):
        right(fa3("varlen_attention"), case)
        assert calls[-1]["sparse_mask_fine"] is None and calls[-1]["only_qv"] is False
    strange = SCHEMA.replace(", Tensor? sinks)", ")")
    with (
        installed(strange),
        pretend(SM90),
        pytest.raises(RuntimeError, match="got 34 arguments, want 35"),
    ):
        check_kernel(fa3("varlen_attention"), case)


# What is spent beyond the kernel ------------------------------------------------------------------


@pytest.mark.parametrize("lse", [False, True])
def test_a_static_caches_decode_copies_no_value(standin, lse):
    f = Features(dtype=BF16, head_dim=64, q_heads=8, causal=True, lse=lse)
    for start in (None, (3, 0, 40)):
        call = make_call(
            "attention",
            Source(0),
            3,
            1,
            50,
            f,
            kv_start=start,
            kv_end=(9, 50, 33),
            index=torch.int32,
        )
        right(fa3("attention"), call)
        assert standin[-1]["page_table"].shape == (3, 1)
        assert standin[-1]["v"].data_ptr() != 0 and standin[-1]["v"].isnan().any()
    prefill = make_call("attention", Source(0), 3, 50, 60, f, kv_end=(9, 50, 60), index=torch.int32)
    right(fa3("attention"), prefill)
    assert standin[-1]["page_table"] is None and not standin[-1]["v"].isnan().any()


def test_scales_are_read_where_they_lie(standin):
    f = Features(dtype=BF16, q_dtype=torch.float8_e4m3fn, kv_dtype=torch.float8_e4m3fn, head_dim=64)
    for one, strides in ((True, (0, 0)), (False, (0, 1))):
        call = make_call("attention", Source(0), 3, 2, 9, replace(f, scale_per_head=not one))
        right(fa3("attention"), call)
        assert [standin[-1][f"{n}_descale"].stride() for n in "qkv"] == [strides] * 3


LLAMA = Problem.of(
    "paged_attention",
    SM90,
    dtype=BF16,
    kv_dtype=BF16,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    page_size=16,
    causal=True,
    tokens=Extent.of(8),
    batch=Extent.of(8),
    queries=Extent.of(1),
    context=Extent.of(4096),
)


def test_a_package_without_the_library_is_named(monkeypatch):
    monkeypatch.setattr(wheel, "library", lambda pattern: None)
    assert kernel.missing(SM90) is None, "the probe looks for no package that the target assumes"
    assert "without flash_ops.abi3.so" in str(kernel.missing(Target("cuda", 90)))


@pytest.mark.gpu
@pytest.mark.skipif(
    find_spec("sgl_kernel") is None,
    reason="sgl_kernel is not installed, so its schema cannot be compared",
)
def test_the_stand_in_has_the_wheels_schema():
    if refused := fa3("paged_attention").absences(Target.of(torch.device("cuda", 0))):
        pytest.skip("; ".join(map(str, refused)))
    fwd, tail = kernel.raw_op()
    with_tail = SCHEMA_37 if tail else SCHEMA
    assert str(fwd._schema) == str(torch._C.parse_schema(f"sgl_kernel::{with_tail}"))


@torch.no_grad()
def test_a_repeated_promised_call_is_the_raw_op_alone(standin):
    """The eager cache serves calls like an earlier one, and no other."""
    call = half(
        make_call(
            "paged_attention", Source(3), (1, 1), (5, 9), 4, Features(head_dim=128), padding=None
        )
    )
    others = ({"padded": True}, {"holes": True}, {"lse": torch.empty(2, 4)})
    for asked in ({}, {}, *others, {}):
        with Ops() as seen, attnops.use(kernel={"paged_attention": "fa3"}):
            OPS["paged_attention"].run(changed(call.with_(**asked).record, policy=active_policy()))
        same_table = standin[-1]["page_table"].data_ptr() == call.arguments["page_table"].data_ptr()
        assert (seen.work == ["sgl_kernel::fwd"] and same_table) == (not asked), asked
    for policy in ("", "deterministic"):
        OPS["paged_attention"].run(changed(call.record, policy=policy))
        assert standin[-1]["num_splits"] == (policy == "deterministic")


@torch.no_grad()
def test_heads_first_is_the_raw_op_on_views(standin):
    """Of all keys and without sinks, for any number of keys; the same tensors with heads last give
    the same."""
    call = half(
        make_call("attention", Source(3), 2, 1, 9, Features(head_dim=64, causal=True))
    ).with_(window_left=3)
    given = {n: call.arguments[n] for n in ("query", "key", "value")}
    for keys in (9, 7):
        last = {n: x if n == "query" else x[:, :keys] for n, x in given.items()}
        first = {n: x.transpose(1, 2).contiguous() for n, x in last.items()}
        with Ops() as seen:
            got = fa3("attention").run(
                call.with_(**{n: x.transpose(1, 2) for n, x in first.items()}).record
            )[0]
        assert seen.work == ["sgl_kernel::fwd"]
        assert {n: standin[-1][n[0]].data_ptr() for n in first} == {
            n: x.data_ptr() for n, x in first.items()
        }, "nothing is copied"
        assert torch.equal(got, fa3("attention").run(call.with_(**last).record)[0])


# Latents ------------------------------------------------------------------------------------------

LATENTS = kernels_of("mla_attention")["fa3"]


def test_parts_of_the_pages_are_views_and_the_output_is_written_in_place(standin):
    given = latents((1, 2, 1))
    LATENTS.run(given.record)
    seen, pages = standin[-1], given.arguments["latent_pages"]
    assert (seen["k"].shape[2:], seen["v"].shape[2:]) == ((1, 64), (1, 512))
    assert (seen["v"].data_ptr(), seen["k"].data_ptr()) == (
        pages.data_ptr(),
        pages[..., 512:].data_ptr(),
    )
    assert seen["q_v"] is given.arguments["q_nope"] and seen["q"] is given.arguments["q_pe"]
    assert seen["out"] is given.arguments["output"] and seen["max_seqlen_q"] == 2
    assert (seen["softmax_scale"], seen["is_causal"], seen["num_splits"]) == (192**-0.5, True, 0)


def test_tma_is_avoided_where_it_would_load_stale_rows(standin):
    for page, heads, padded in (
        (64, 128, True),
        (64, 16, False),
        (16, 128, False),
        (96, 128, False),
        (128, 64, True),
    ):
        given = latents((1, 2, 1), page=page, f=replace(DEEPSEEK, q_heads=heads))
        LATENTS.run(given.record)
        assert (standin[-1]["leftpad_k"] is not None) == padded, (page, heads)


def test_prefill_is_its_own(standin):
    # FlashMLA takes one query a request at a time; of more, fa3 reads the latents once for all.
    many = latents((300, 70), (300, 170), f=replace(DEEPSEEK, q_heads=128))
    assert select(many.problem).kernel is LATENTS
