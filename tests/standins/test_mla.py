"""The wrappers of FlashMLA, of its sparse kernels and of CUTLASS MLA over stand-ins of the foreign
ops: all but the kernels."""

import math
from dataclasses import replace

import pytest
import torch

from attnops.core.errors import InvalidInput
from attnops.core.kernel import Package, kernels_of
from attnops.core.problem import Target, pretend
from attnops.kernels.sgl import cutlass_mla, flashmla, flashmla_sparse, sources, wheel
from attnops.kernels.sgl.sources import SGL as LIBRARY
from attnops.kernels.shared.memory import COUNTERS, total
from attnops.ops.latent.cases import DEEPSEEK
from attnops.ops.sparse.cases import PAST
from attnops.testing import Pages, Source, check_kernel, make_call
from tests.checks import right
from tests.standins import sgl_kernel_mla as standin, sgl_kernel_sparse as sparse
from tests.standins.calls import Ops, latents
from tests.standins.vendors import VENDORS

TARGETS = {name: VENDORS[name].target for name in ("flashmla", "flashmla_fp8", "cutlass_mla")}
KERNELS = kernels_of("mla_attention")
# By torch.allclose does test_schema see mutation, and that knows no float8.
MOST = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
CHECKS = {"flashmla": ("test_schema", *MOST), "flashmla_fp8": MOST}
F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def loaded():
    with standin.installed():
        yield


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", ["flashmla", "flashmla_fp8"])
def test_opcheck_of_the_core(name, scheduled):
    float8 = E4M3 if name == "flashmla_fp8" else None
    call = latents(f=replace(DEEPSEEK, q_dtype=float8, kv_dtype=float8))
    t = call.arguments
    with pretend(TARGETS[name]):
        schedule = (
            flashmla.written(t["seq_lens"], t["q_nope"].shape[1], bool(float8))
            if scheduled
            else None
        )
    scales = (t["q_scale"], t["kv_scale"]) if float8 else ()
    args = (
        t["q_nope"],
        t["q_pe"],
        t["latent_pages"],
        t["page_table"].clamp(min=0),
        t["seq_lens"],
        schedule,
        t["scale"],
        *scales,
    )
    with pretend(TARGETS[name]):
        checked = torch.library.opcheck(
            getattr(torch.ops.attnops, f"mla_attention__{name}").default,
            args,
            test_utils=CHECKS[name],
        )
    assert set(checked.values()) == {"SUCCESS"}


def test_heads_are_padded_and_pages_made_whole_tiles():
    call = latents(page=16, seq_lens=(70, 3, 17), pages=Pages(wider=0))
    with pretend(TARGETS["cutlass_mla"]), Ops() as seen:
        KERNELS["cutlass_mla"].run(call.record)
    *_, args = seen.given
    out, q_nope, q_pe, _, lengths, table, workspace, scale, splits = [
        x.shape if isinstance(x, torch.Tensor) else x for x in args
    ]
    assert (out, q_nope, q_pe) == ((3, 128, 512), (3, 128, 512), (3, 128, 64))
    assert call.arguments["page_table"].shape == (3, 5) and table == (3, 8)
    assert (lengths, scale, splits) == ((3,), 192**-0.5, 1)
    assert workspace == (3 * 128 * 513 * 4,)


def test_the_callers_workspace_is_used_behind_the_counters():
    call = latents()
    with pretend(TARGETS["cutlass_mla"]):
        size = cutlass_mla.workspace_size(4 * 64, 3)
        workspace = torch.zeros(total(size), dtype=torch.uint8)
        for given, used in ((workspace, True), (workspace[:-1], False), (None, False)):
            workspace.zero_()
            run = call.with_(workspace=given)
            right(KERNELS["cutlass_mla"], run)
            KERNELS["cutlass_mla"].run(run.record)
            assert bool(workspace[COUNTERS:].any()) == used and not workspace[:COUNTERS].any()
        workspace.zero_()
        run = call.with_(workspace=workspace, plan=torch.zeros(64, dtype=torch.int64))
        KERNELS["cutlass_mla"].run(run.record)
        assert not workspace.any()


# Refusals -----------------------------------------------------------------------------------------


def test_absent_wheels_are_named(monkeypatch):
    monkeypatch.setattr(wheel, "library", lambda pattern: None)
    assert str(wheel.lacks(Target("cuda", 90), LIBRARY)) == (
        "package=sgl_kernel without flashmla_ops.* (wants a wheel that holds flashmla_ops.*)"
    )
    monkeypatch.setattr("attnops.core.needs._installed", lambda module: True)
    here = Target("cuda", 100)
    monkeypatch.setattr(Package, "version", lambda self: "0.4.7")
    assert [str(r) for r in KERNELS["cutlass_mla"].absences(here)] == [
        "package=sgl_kernel 0.4.7 (wants >= 0.3.18, < 0.4.7 (holds cutlass_mla_decode))"
    ]


OP = "sparse_mla_attention"
SPARSE = kernels_of(OP)["flashmla"]
SM90 = TARGETS["flashmla"]
FOREIGN = {False: "sparse_prefill_fwd", True: "sparse_decode_fwd"}
LSE = replace(DEEPSEEK, lse=True)


def listed(counts=(128, 3), topk=128, pages=4, page=64, f=LSE, **more):
    return make_call("sparse_mla_attention", Source(0), counts, topk, (pages, page), f, **more)


def spied(a_call):
    with pretend(SM90), torch.no_grad(), Ops() as ops:
        SPARSE.run(a_call.with_(holes=False).record)
    return ops


@pytest.mark.parametrize("scale", [0.05, 0.0, -0.05])
@pytest.mark.parametrize("packed", [False, True])
def test_scales_of_every_sign(packed, scale):
    with pretend(SM90):
        right(SPARSE, listed((100, 0), packed=packed, f=replace(LSE, scale=scale)))


def test_many_tokens_are_several_calls(monkeypatch):
    monkeypatch.setattr(flashmla_sparse, "MOST_TOKENS", 3)
    a_call = listed((5, 0, 64, 1, 3, 128, 2), packed=True, lengths=True, f=replace(LSE, sinks=F32))
    with pretend(SM90):
        right(SPARSE, a_call)
    assert standin.CALLS == ["sparse_decode_fwd"] * 3


@pytest.mark.parametrize("base", [math.e, 10.0])
def test_the_log_base_is_one_constant(monkeypatch, base):
    monkeypatch.setattr(sparse, "LOG_BASE_OF_PREFILL", base)
    with pretend(SM90), pytest.raises(AssertionError, match="lse"):
        check_kernel(SPARSE, listed())
    monkeypatch.setattr(
        sources, "_found", lambda assume: replace(sources.SOURCES[0], lse_base=base)
    )
    with pretend(SM90):
        right(SPARSE, listed((128, 0, 3)))


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_but_the_kernel_and_a_copy_where_the_layout_permits(packed):
    spy = spied(listed(packed=packed, whole=True, f=replace(DEEPSEEK, q_heads=64, lse=True)))
    lse = (
        ["aten::nan_to_num"] if packed else ["aten::mul", "aten::nan_to_num"]
    )  # a prefill's is to base 2
    assert spy.work == [f"sgl_kernel::{FOREIGN[packed]}", "aten::copy_", *lse]
    query = spy.given[0][0]
    assert (
        query.stride()[-3:] == (64 * 576, 576, 1) if not packed else query.stride()[-2:] == (576, 1)
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("have", "want"), [(1, 64), (16, 64), (64, 64), (65, 128), (80, 128), (128, 128)]
)
def test_heads_are_padded(packed, have, want):
    spy = spied(listed(packed=packed, f=replace(LSE, q_heads=have, sinks=BF16)))
    query, sinks = spy.given[0][0], spy.given[0][4 if packed else 5]
    assert query.shape[-2:] == (want, 576)
    assert (sinks.shape, sinks.dtype) == ((want,), F32)


@pytest.mark.parametrize(
    ("packed", "topk", "want"),
    [(True, 1, 64), (True, 64, 64), (True, 65, 128), (False, 64, 128), (False, 256, 256)],
)
def test_lists_are_padded_with_none(packed, topk, want):
    spy = spied(listed((1, 1), topk, packed=packed))
    indices = spy.given[0][2]
    assert indices.shape[-1] == want
    assert (indices[..., topk:] == -1).all()


def test_lengths_become_none_where_the_kernel_takes_no_lengths():
    packed = listed((5, 0), packed=True, lengths=True)
    spy = spied(
        packed.with_(indices=packed.arguments["indices"].clamp(max=9))
    )  # slots past a list's length, too
    assert spy.given[0][3] is None
    assert (spy.given[0][2][:, 0] >= 0).sum(1).tolist() == [5, 0]
    spy = spied(listed((5, 0), lengths=True))
    assert spy.given[0][6].tolist() == [5, 0]
    assert (spy.given[0][2][0, 0, 5:] == PAST).all()


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["reference", "flashmla", "another"])
def test_what_is_no_slot_is_not_seen(name, packed, lengths):
    """As if -1 stood there; the latents that nothing names are poisoned."""
    a_call = listed((128, 3, 0, 70), packed=packed, lengths=lengths)
    pages, indices = a_call.arguments["latent_pages"], a_call.arguments["indices"].clone()
    slots = pages.shape[0] * pages.shape[1]
    for i, wrong in enumerate((slots, -2, slots + 7, 2**31 - 1, -(2**31), 2**30)):
        indices[(0, 20 * i) if i % 2 else (3, 11 * i)] = wrong
    named, free = (indices >= 0) & (indices < slots), torch.ones(slots, dtype=torch.bool)
    if lengths:
        named &= torch.arange(indices.shape[1]) < a_call.arguments["topk_length"][:, None]
    free[indices[named].long()] = False
    holed = replace(
        a_call.with_(indices=indices),
        free={"latent_pages": free.view(a_call.free["latent_pages"].shape)},
    )
    # One of another project, which knows of no holes.
    plain = kernels_of(OP)["reference"]

    def body(call):
        assert ((call.indices >= -1) & (call.indices < slots)).all()
        plain.run(call)

    kernel = (
        replace(plain, name="another", run=body, takes=plain.takes - {"holes"})
        if name == "another"
        else kernels_of(OP)[name]
    )
    if name == "another" and lengths:
        holed = holed.with_(indices=indices.masked_fill(indices == PAST, -1))
    with pretend(SM90):
        right(kernel, holed)


def test_pages_that_start_askew_are_refused():
    a_call = listed(packed=True)
    pages = a_call.arguments["latent_pages"]
    room = torch.zeros(pages.numel() + 8, dtype=torch.uint8)
    askew = room[8:].view(pages.shape)
    with (
        pretend(SM90),
        pytest.raises(
            InvalidInput, match=r"^latent_pages.data_ptr\(\): got \d+, want a multiple of 16"
        ),
    ):
        SPARSE.run(a_call.with_(latent_pages=askew).record)
    assert not standin.CALLS


@pytest.mark.parametrize("q_lens", [(0, 1, 1), (0, 0, 1), (0, 0, 0)])
@pytest.mark.parametrize("name", TARGETS)
def test_idle_requests_keep_their_places(name, q_lens):
    float8 = E4M3 if name == "flashmla_fp8" else None
    f, tokens = replace(DEEPSEEK, q_dtype=float8, kv_dtype=float8), sum(q_lens)
    call = latents(q_lens, f=f, padding=3 - tokens, slack=0 if tokens else 1)
    with pretend(TARGETS[name]):
        right(KERNELS[name], call)
