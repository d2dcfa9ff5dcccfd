"""A kernel that has never met its hardware says so wherever it is named to a user."""

import io
import json
from dataclasses import replace

import pytest
import torch

import attnops
from attnops.cli.features import ops_of_kernels, problems
from attnops.core.kernel import Kernel, _drop, kernels_of, register
from attnops.core.problem import Target
from attnops.core.select import select, select_by
from attnops.lowering.cache_key import choice_inputs
from attnops.lowering.explain import packages_of_kernels
from attnops.measured import NOWHERE, Grid, Table, never_run, store
from attnops.measured.table import version_of
from attnops.ops.latent.timed import MLA
from attnops.ops.sweeps import decoding
from attnops.testing import Features, Source, make_call
from tests.helpers import where_kernels_ran

SM90, SM100 = Target.parse("sm90"), Target.parse("sm100")


@pytest.fixture
def file():
    """The file, as if all of paged_attention but fa3 had run on two GPUs, and fa4 on none."""
    ran = {f"paged_attention.{n}": ["sm90", "sm100"] for n in kernels_of("paged_attention")}
    ran["paged_attention.fa3"] = ["sm90"]
    del ran["paged_attention.fa4"]
    with where_kernels_ran(json.dumps(ran)):
        yield


def test_what_is_said_of_a_kernel(file):
    assert never_run("paged_attention", "fa3", SM90) == never_run("paged_attention", "fa3", Target("cpu")) == ""
    assert never_run("paged_attention", "fa3", SM100) == "never run on sm100"
    assert never_run("paged_attention", "fa4", SM100) == "never run on hardware"
    assert never_run("paged_attention", "of_another_package", SM100) == ""


def explained(target):
    call = make_call(
        "paged_attention",
        Source(0),
        (1,) * 4,
        (300,) * 4,
        64,
        Features(dtype=torch.bfloat16, head_dim=128, q_heads=8),
        padding=0,
    )
    return attnops.explain(lambda: attnops.ops.paged_attention(*call.args, max_seqlen_q=1), target=target, quiet=True)


def test_explain_says_it(file):
    pytest.importorskip("rich", reason="the cli extra prints tables")
    from rich.console import Console

    from attnops.cli import tables

    for target in ("sm90", "sm100"):
        found = explained(target)
        console = Console(width=200, record=True, file=io.StringIO())
        tables.show_explanation(found, console)
        for text in (str(found), console.export_text()):
            assert text.count("never run on") == 1 and "; never run on hardware" in next(x for x in text.splitlines() if "fa4" in x)
        [call] = found.as_dict()["calls"]
        assert call["never_run"] == ["fa4"]


# The choice -------------------------------------------------------------------------------------------------------------

GPUS = tuple(Target.parse(name, packages_of_kernels()) for name in ("a100", "h100", "h200", "b200"))
B200 = GPUS[-1]
DECODE = next(p for p in problems("mla_attention", B200) if p.sizes.queries.hi == 1)
"""A decode step over latents, whose least estimate is that of a kernel that has run nowhere."""


def test_no_estimate_prefers_a_kernel_that_ran_nowhere():
    """Of all typical calls on all GPUs: the committed results decide which kernels those are."""
    asked = [p for op in ops_of_kernels() for target in GPUS for p in problems(op, target)]
    passed_over = set()
    for problem in asked:
        for policy in ("", "deterministic"):
            decision = select(problem, policy)
            if decision.kernel is None:
                continue
            rivals = {n for n in decision.costs if not kernels_of(problem.op)[n].judge}
            proven = {n for n in rivals if never_run(problem.op, n, problem.target) != NOWHERE}
            assert decision.kernel.name in (proven or rivals or decision.costs), decision
            least = min(rivals or decision.costs, key=lambda n: decision.costs[n].us)
            passed_over |= {least} - {decision.kernel.name}
    assert passed_over, "the rule changes some choice"


def test_explain_says_which_kernel_ran_instead():
    decision = select(DECODE)
    cheaper = min(decision.costs, key=lambda n: decision.costs[n].us)
    assert decision.kernel.name == "triton" and cheaper == "cutlass_mla"
    line = next(x for x in str(decision).splitlines() if x.startswith(f"  not {cheaper}:"))
    assert line.endswith("us, but triton ran on sm90; never run on hardware") and "can run, estimated" in line


def test_compiled_code_is_not_found_again_where_other_kernels_have_run(file):
    here = choice_inputs()
    store.HARDWARE.write_text(store.HARDWARE.read_text().replace('["sm90"]', '["sm100"]'))
    store.forget()
    assert choice_inputs() != here


def test_it_can_be_asked_for():
    for policy in ("kernel=mla_attention:cutlass_mla", "prefer=cutlass_mla"):
        assert select(DECODE, policy).kernel.name == "cutlass_mla"


def test_a_measured_time_makes_it_ordinary():
    kind = decoding(MLA)
    names = ("cutlass_mla", "triton")
    versions = {f"mla_attention.{n}": version_of(kernels_of("mla_attention")[n]) for n in names}
    for us, chosen in (
        ({"cutlass_mla": 20.0, "triton": 30.0}, "cutlass_mla"),
        ({"cutlass_mla": 40.0, "triton": 30.0}, "triton"),
    ):
        grid = Grid(kind, (8.0,), (1.0,), (4096.0,), {n: (t,) for n, t in us.items()})
        table = Table("NVIDIA B200", "sm100", versions, (grid,))
        assert select_by(table, DECODE).kernel.name == chosen
        # The times of a sibling were taken of a kernel that ran there.
        assert select_by(replace(table, source="NVIDIA B300"), DECODE).kernel.name == chosen


def test_a_kernel_of_another_package_has_no_record_and_ranks_by_its_cost(file):
    def run(call):
        raise NotImplementedError

    triton, us = kernels_of("paged_attention")["triton"], [1.0]
    name = "of_another_package"
    other = Kernel(
        name,
        "paged_attention",
        run,
        takes=triton.takes,
        dtypes=triton.dtypes,
        cost_us=lambda p: us[0],
    )
    problem = problems("paged_attention", B200)[0]
    policy = f"allow={name},paged_attention:triton"
    register(other)
    try:
        assert select(problem, policy).kernel is other and never_run(other.op, name, B200) == ""
        us[0] = 1e9
        store.forget()
        assert select(problem, policy).kernel is triton
    finally:
        _drop([other])


def test_where_all_ran_nowhere_their_estimates_decide_and_the_reference_stays_the_last(file):
    store.HARDWARE.write_text(json.dumps({"mla_attention.reference": ["sm90"]}))
    store.forget()
    decision = select(DECODE)
    assert decision.kernel.name == "cutlass_mla" and decision.passed_over[-1] == "reference"
