"""The wrappers of FlashMLA and CUTLASS MLA over stand-ins of the foreign ops: the whole path but the kernels themselves."""

from dataclasses import replace

import pytest
import torch

from attnops.core.kernel import Package, kernels_of
from attnops.core.problem import Target, pretend
from attnops.kernels.sgl import cutlass_mla, flashmla, wheel
from attnops.kernels.sgl.sources import SGL as LIBRARY
from attnops.kernels.shared.memory import COUNTERS, total
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Pages
from tests.checks import right
from tests.standins import sgl_kernel_mla as standin
from tests.standins.calls import Ops, latents
from tests.standins.vendors import VENDORS

NAMES = ("flashmla", "flashmla_fp8", "cutlass_mla")
TARGETS = {name: VENDORS[name].target for name in NAMES}
KERNELS = kernels_of("mla_attention")
# By torch.allclose does test_schema see mutation, and that knows no float8.
MOST = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
CHECKS = {name: MOST if name == "flashmla_fp8" else ("test_schema", *MOST) for name in NAMES}

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
        schedule = flashmla.written(t["seq_lens"], t["q_nope"].shape[1], bool(float8)) if scheduled else None
    scales = (t["q_scale"], t["kv_scale"]) if float8 else ()
    args = (t["q_nope"], t["q_pe"], t["latent_pages"], t["page_table"].clamp(min=0), t["seq_lens"], schedule, t["scale"], *scales)
    with pretend(TARGETS[name]):
        checked = torch.library.opcheck(getattr(torch.ops.attnops, f"mla_attention__{name}").default, args, test_utils=CHECKS[name])
    assert set(checked.values()) == {"SUCCESS"}


def test_heads_are_padded_and_pages_made_whole_tiles():
    call = latents(page=16, seq_lens=(70, 3, 17), pages=Pages(wider=0))
    with pretend(TARGETS["cutlass_mla"]), Ops() as seen:
        KERNELS["cutlass_mla"].run(call.record)
    *_, args = seen.given
    out, q_nope, q_pe, _, lengths, table, workspace, scale, splits = [x.shape if isinstance(x, torch.Tensor) else x for x in args]
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


# Refusals -------------------------------------------------------------------------------------------------------------


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
