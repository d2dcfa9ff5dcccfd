"""The wrapper of FlashMLA's sparse kernels over stand-ins of the foreign ops: the whole path but the kernels themselves."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnops.core.errors import InvalidInput
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, pretend
from attnops.kernels.sgl import flashmla_sparse, sources
from attnops.ops.latent.cases import DEEPSEEK
from attnops.ops.sparse.cases import PAST
from attnops.testing import Call, Source, check_kernel, make_call
from tests.checks import right
from tests.standins import sgl_kernel_sparse as standin
from tests.standins.calls import Ops

OP = "sparse_mla_attention"
KERNEL = kernels_of(OP)["flashmla"]
SM90, SM100 = (Target("cuda", arch, assume=("sgl_kernel",)) for arch in (90, 100))
FOREIGN = {False: "sparse_prefill_fwd", True: "sparse_decode_fwd"}
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LSE = replace(DEEPSEEK, lse=True)


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    """The stand-ins' record is empty."""
    standin.CALLS.clear()


def call(counts=(128, 3), topk=128, pages=4, page=64, f=LSE, **more: Any) -> Call:
    return make_call("sparse_mla_attention", Source(0), counts, topk, (pages, page), f, **more)


def spied(a_call):
    with pretend(SM90), torch.no_grad(), Ops() as ops:
        KERNEL.run(a_call.with_(holes=False).record)
    return ops


@pytest.mark.parametrize("scale", [0.05, 0.0, -0.05])
@pytest.mark.parametrize("packed", [False, True])
def test_scales_of_every_sign(packed, scale):
    with pretend(SM90):
        right(KERNEL, call((100, 0), packed=packed, f=replace(LSE, scale=scale)))


def test_many_tokens_are_several_calls(monkeypatch):
    monkeypatch.setattr(flashmla_sparse, "MOST_TOKENS", 3)
    a_call = call((5, 0, 64, 1, 3, 128, 2), packed=True, lengths=True, f=replace(LSE, sinks=F32))
    with pretend(SM90):
        right(KERNEL, a_call)
    assert standin.CALLS == ["sparse_decode_fwd"] * 3


@pytest.mark.parametrize("base", [math.e, 10.0])
def test_the_log_base_is_one_constant(monkeypatch, base):
    monkeypatch.setattr(standin, "LOG_BASE_OF_PREFILL", base)
    with pretend(SM90), pytest.raises(AssertionError, match="lse"):
        check_kernel(KERNEL, call())
    monkeypatch.setattr(sources, "_found", lambda assume: replace(sources.SOURCES[0], lse_base=base))
    with pretend(SM90):
        right(KERNEL, call((128, 0, 3)))


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_but_the_kernel_and_a_copy_where_the_layout_permits(packed):
    spy = spied(call(packed=packed, whole=True, f=replace(DEEPSEEK, q_heads=64, lse=True)))
    lse = ["aten::nan_to_num"] if packed else ["aten::mul", "aten::nan_to_num"]  # a prefill's is to base 2
    assert spy.work == [f"sgl_kernel::{FOREIGN[packed]}", "aten::copy_", *lse]
    query = spy.given[0][0]
    assert query.stride()[-3:] == (64 * 576, 576, 1) if not packed else query.stride()[-2:] == (576, 1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("have", "want"), [(1, 64), (16, 64), (64, 64), (65, 128), (80, 128), (128, 128)])
def test_heads_are_padded(packed, have, want):
    spy = spied(call(packed=packed, f=replace(LSE, q_heads=have, sinks=BF16)))
    query, sinks = spy.given[0][0], spy.given[0][4 if packed else 5]
    assert query.shape[-2:] == (want, 576)
    assert (sinks.shape, sinks.dtype) == ((want,), F32)


@pytest.mark.parametrize(("packed", "topk", "want"), [(True, 1, 64), (True, 64, 64), (True, 65, 128), (False, 64, 128), (False, 256, 256)])
def test_lists_are_padded_with_none(packed, topk, want):
    spy = spied(call((1, 1), topk, packed=packed))
    indices = spy.given[0][2]
    assert indices.shape[-1] == want
    assert (indices[..., topk:] == -1).all()


def test_lengths_become_none_where_the_kernel_takes_no_lengths():
    packed = call((5, 0), packed=True, lengths=True)
    spy = spied(packed.with_(indices=packed.arguments["indices"].clamp(max=9)))  # slots past a list's length, too
    assert spy.given[0][3] is None
    assert (spy.given[0][2][:, 0] >= 0).sum(1).tolist() == [5, 0]
    spy = spied(call((5, 0), lengths=True))
    assert spy.given[0][6].tolist() == [5, 0]
    assert (spy.given[0][2][0, 0, 5:] == PAST).all()


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["reference", "flashmla", "another"])
def test_what_is_no_slot_is_not_seen(name, packed, lengths):
    """As if -1 stood there; the latents that nothing names are poisoned."""
    a_call = call((128, 3, 0, 70), packed=packed, lengths=lengths)
    pages, indices = a_call.arguments["latent_pages"], a_call.arguments["indices"].clone()
    slots, free = pages.shape[0] * pages.shape[1], a_call.free["latent_pages"].clone().flatten()
    for i, wrong in enumerate((slots, -2, slots + 7, 2**31 - 1, -(2**31), 2**30)):
        token, place = (0, 20 * i) if i % 2 else (3, 11 * i)
        if (at := int(indices[token, place])) >= 0:
            free[at] = True
        indices[token, place] = wrong
    for token, place in (indices >= 0).logical_and(indices < slots).nonzero().tolist():
        if not lengths or place < a_call.arguments["topk_length"][token]:
            free[int(indices[token, place])] = False
    holed = replace(a_call.with_(indices=indices), free={"latent_pages": free.view(a_call.free["latent_pages"].shape)})
    # One of another project, which knows of no holes.
    plain = kernels_of(OP)["reference"]

    def body(call):
        assert ((call.indices >= -1) & (call.indices < slots)).all()
        plain.run(call)

    kernel = replace(plain, name="another", run=body, takes=plain.takes - {"holes"}) if name == "another" else kernels_of(OP)[name]
    if name == "another" and lengths:
        holed = holed.with_(indices=indices.masked_fill(indices == PAST, -1))
    with pretend(SM90):
        right(kernel, holed)


def test_pages_that_start_askew_are_refused():
    a_call = call(packed=True)
    pages = a_call.arguments["latent_pages"]
    room = torch.zeros(pages.numel() + 8, dtype=torch.uint8)
    askew = room[8:].view(pages.shape)
    with pretend(SM90), pytest.raises(InvalidInput, match=r"^latent_pages.data_ptr\(\): got \d+, want a multiple of 16"):
        KERNEL.run(a_call.with_(latent_pages=askew).record)
    assert not standin.CALLS
