"""Speculative shapes over latents: drafts verified, 1 to 8 tokens of every request, and drafts
extended by what was accepted of each.

Every kernel that is here, Triton's through its interpreter, the foreign ones over stand-ins: not
the kernels.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from attnops.cache import PagedBatch, Planner
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, pretend
from attnops.graphs import Buckets, breakable
from attnops.kernels.flashinfer import trtllm
from attnops.ops import latent_layers, mla_attention
from attnops.ops.latent.cases import DEEPSEEK, SMALL
from attnops.testing import Call, Pages, Source, make_call
from tests.checks import right
from tests.graphs.standin import StandIn
from tests.standins import flashinfer_trtllm_mla
from tests.standins.vendors import VENDORS
from tests.triton.process import interpreted

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
KERNELS = kernels_of("mla_attention")
HERE = (
    "reference",
    "flashmla",
    "flashmla_fp8",
    "fa3",
    "flashinfer_mla_fa2",
    "flashinfer_mla_fa3",
    "cutlass_mla",
    "trtllm_mla",
)

WIDE = 8
ACCEPTED = ((1, 8, 3, 0), (2, 2, 2, 2), (8, 1, 1, 5), (0, 0, 0, 1))
LENGTHS = (70, 8, 130, 65)


@contextmanager
def ready(name: str) -> Iterator[None]:
    """As on a machine that has the kernel; with stand-ins for what is foreign in it."""
    with ExitStack() as stack:
        if name == "trtllm_mla":
            # A GPU of few multiprocessors wants little scratch.
            stack.enter_context(patch.object(trtllm, "SMS", 16))
            stack.enter_context(patch.object(flashinfer_trtllm_mla, "SM_COUNT", 16))
        if name in VENDORS:
            stack.enter_context(VENDORS[name].running())
        else:
            stack.enter_context(
                pretend(Target("cuda", 90, ("triton",)) if name == "triton" else Target())
            )
        yield


def call(name: str, q_lens, seq_lens, padding=0, **more) -> Call:
    """A call that the kernel takes."""
    if name in ("reference", "triton"):
        return make_call(
            "mla_attention",
            Source(0),
            q_lens,
            seq_lens,
            16,
            replace(SMALL, dtype=BF16),
            padding,
            **more,
        )
    f = replace(DEEPSEEK, q_dtype=E4M3, kv_dtype=E4M3) if name == "flashmla_fp8" else DEEPSEEK
    return make_call("mla_attention", Source(0), q_lens, seq_lens, 64, f, padding, **more)


def test_every_kernel_is_here():
    assert {*HERE, "triton", "fa3_triton"} == set(KERNELS), (
        "fa3_triton calls two of these, and tests/triton/test_fa3_triton.py that"
    )


def check(name: str, given: Call) -> None:
    with ready(name):
        right(KERNELS[name], given)


# Verification: as many tokens of every request ----------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("n", range(1, WIDE + 1))
@pytest.mark.parametrize("name", HERE)
def test_verify(name, n):
    """The last query of a request stands at its last key, the others before it; one request has
    drafts alone."""
    check(name, call(name, (n, n, n), (60 + n, n, 130)))


@pytest.mark.sweep(9)
@pytest.mark.parametrize(
    "q_lens", [*((n, n, n, n) for n in range(1, WIDE + 1)), *ACCEPTED], ids=str
)
@interpreted
def test_in_triton(q_lens):
    check(
        "triton",
        call("triton", q_lens, LENGTHS, padding=4 * WIDE - sum(q_lens), slack=WIDE - max(q_lens)),
    )


# Drafts: as many tokens as were accepted of each --------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("accepted", ACCEPTED, ids=str)
@pytest.mark.parametrize("name", HERE)
def test_draft_extend(name, accepted):
    """In a rectangle of drafts, whose sizes do not tell what was accepted."""
    check(
        name,
        call(name, accepted, LENGTHS, padding=4 * WIDE - sum(accepted), slack=WIDE - max(accepted)),
    )


@pytest.mark.parametrize("name", HERE)
def test_verify_steps_in_graphs(name):
    """Captured for 4 requests of 4 drafts: 4 queries of a request, not 16. Then other lengths,
    fewer drafts, fewer requests."""

    def step(q_nope, q_pe, batch, latent_pages, kv_scale, q_scale):
        t = {
            "kv_scale": kv_scale,
            "q_scale": q_scale,
            "max_seqlen_q": batch.max_seqlen_q,
            "scale": 192**-0.5,
        }
        t |= {"plan": batch.plan, "workspace": batch.workspace}
        return mla_attention(
            q_nope,
            q_pe,
            latent_pages,
            batch.page_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            **t,
            kernel=name,
        )

    page, fixed, kernel = 16 if name == "reference" else 64, {}, KERNELS[name]
    with ready(name):
        spec = latent_layers(q_heads=16, page_size=64, dtype=BF16)
        sizes = {"max_tokens": 16, "max_requests": 4, "max_pages": 10, "num_pages": 30}
        planner = (
            Planner(spec, **sizes, device="cpu", kernel=name)
            if name.startswith("flashinfer")
            else None
        )
        scratch = torch.zeros(2**24, dtype=torch.uint8) if kernel.workspace_bytes else None
    buckets = Buckets(decode=(2, 4), verify=(4,))
    graphed = breakable(step, buckets, tokens=("q_nope", "q_pe"), graphs=StandIn(), prepare=planner)
    for q_lens, seq_lens in (
        ((4, 4, 4, 4), (70, 9, 130, 64)),
        ((4, 1, 3), (66, 130, 3)),
        ((3, 3), (64, 65)),
    ):
        used = [-(-n // page) for n in seq_lens]
        t = call(
            name, q_lens, seq_lens, pages=Pages(spare=30 - sum(used), wider=10 - max(used))
        ).arguments
        for n in ("latent_pages", "kv_scale", "q_scale"):
            fixed[n] = t.get(n) if fixed.get(n) is None else fixed[n].copy_(t[n])
        none = torch.zeros(sum(q_lens), dtype=torch.int64)
        batch = PagedBatch(
            t["page_table"], t["seq_lens"], t["cu_seqlens_q"], none - 1, none, 4, workspace=scratch
        )
        given = {"q_nope": t["q_nope"], "q_pe": t["q_pe"], "batch": batch, **fixed}
        with ready(name), torch.no_grad():
            got = graphed(**given).clone()
            want = step(**given | {"batch": planner(batch) if planner else batch})
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)
    assert [str(r.bucket) for r in graphed.report().rows] == ["verify 4 x4", "verify 4 x2"]
