"""A kernel that has never met its hardware says so wherever it is named to a user."""

import io
import json
from dataclasses import replace
from itertools import product

import pytest
import torch

import attnops
from attnops.cli.features import ops_of_kernels, problems
from attnops.core.kernel import Kernel, _drop, kernels_of, register
from attnops.core.problem import Target
from attnops.core.select import select, select_by
from attnops.lowering.cache_key import choice_inputs
from attnops.lowering.explain import packages_of_kernels
from attnops.measured import NOWHERE, never_run, store
from attnops.ops.latent.timed import MLA
from attnops.ops.sweeps import decoding
from attnops.testing import Features, Source, make_call
from tests.helpers import where_kernels_ran
from tests.measuring import timed

SM90, SM100 = Target.parse("sm90"), Target.parse("sm100")


@pytest.fixture
def file():
    """The file, as if all of paged_attention but fa3 had run on two GPUs, and fa4 on none."""
    ran = {f"paged_attention.{n}": ["sm90", "sm100"] for n in kernels_of("paged_attention")}
    ran["paged_attention.fa3"] = ["sm90"]
    del ran["paged_attention.fa4"]
    with where_kernels_ran(json.dumps(ran)):
        yield


@pytest.mark.parametrize(
    ("kernel", "target", "text"),
    [
        ("fa3", SM90, ""),
        ("fa3", Target("cpu"), ""),
        ("fa3", SM100, "never run on sm100"),
        ("fa4", SM100, NOWHERE),
        ("of_another_package", SM100, ""),
    ],
)
def test_what_is_said_of_a_kernel(file, kernel, target, text):
    assert never_run("paged_attention", kernel, target) == text


@pytest.fixture
def decode_step():
    features = Features(dtype=torch.bfloat16, head_dim=128, q_heads=8)
    call = make_call("paged_attention", Source(0), (1,) * 4, (300,) * 4, 64, features, padding=0)
    return lambda: attnops.ops.paged_attention(*call.args, max_seqlen_q=1)


@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_explain_says_it(file, decode_step, target):
    pytest.importorskip("rich", reason="the cli extra prints tables")
    from rich.console import Console

    from attnops.cli import tables

    found = attnops.explain(decode_step, target=target, quiet=True)
    console = Console(width=200, record=True, file=io.StringIO())
    tables.show_explanation(found, console)
    for text in (str(found), console.export_text()):
        [line] = [line for line in text.splitlines() if "never run on" in line]
        assert "fa4" in line and "; never run on hardware" in line
    assert found.as_dict()["calls"][0]["never_run"] == ["fa4"]


# The choice ---------------------------------------------------------------------------------------

GPUS = tuple(Target.parse(name, packages_of_kernels()) for name in ("a100", "h100", "h200", "b200"))
B200 = GPUS[-1]
DECODE = next(p for p in problems("mla_attention", B200) if p.sizes.queries.hi == 1)
"""A decode step over latents, whose least estimate is that of a kernel that has run nowhere."""


def test_no_estimate_prefers_a_kernel_that_ran_nowhere():
    """Of all typical calls on all GPUs: the committed results decide which kernels those are."""
    passed_over = set()
    asked = [p for op in ops_of_kernels() for target in GPUS for p in problems(op, target)]
    for problem, policy in product(asked, ("", "deterministic")):
        decision = select(problem, policy)
        if decision.kernel is None:
            continue
        rivals = {n for n in decision.costs if not kernels_of(problem.op)[n].judge} or {
            *decision.costs
        }
        proven = {n for n in rivals if never_run(problem.op, n, problem.target) != NOWHERE}
        assert decision.kernel.name in (proven or rivals), decision
        least = min(rivals, key=lambda n: decision.costs[n].us)
        passed_over |= {least} - {decision.kernel.name}
    assert passed_over, "the rule changes some choice"


def test_explain_says_which_kernel_ran_instead():
    decision = select(DECODE)
    cheaper = min(decision.costs, key=lambda n: decision.costs[n].us)
    assert decision.kernel.name == "triton" and cheaper == "cutlass_mla"
    line = next(x for x in str(decision).splitlines() if x.startswith(f"  not {cheaper}:"))
    assert (
        line.endswith("us, but triton ran on sm90; never run on hardware")
        and "can run, estimated" in line
    )


def test_compiled_code_is_not_found_again_where_other_kernels_have_run(file):
    here = choice_inputs()
    store.HARDWARE.write_text(store.HARDWARE.read_text().replace('["sm90"]', '["sm100"]'))
    store.forget()
    assert choice_inputs() != here


def test_it_can_be_asked_for():
    for policy in ("kernel=mla_attention:cutlass_mla", "prefer=cutlass_mla"):
        assert select(DECODE, policy).kernel.name == "cutlass_mla"


@pytest.mark.parametrize(("us", "chosen"), [(20.0, "cutlass_mla"), (40.0, "triton")])
def test_a_measured_time_makes_it_ordinary(us, chosen):
    found = timed("NVIDIA B200", decoding(MLA), cutlass_mla=us, triton=30.0)
    # The times of a sibling were taken of a kernel that ran there.
    for table in (found, replace(found, source="NVIDIA B300")):
        assert select_by(table, DECODE).kernel.name == chosen


def test_a_kernel_of_another_package_has_no_record_and_ranks_by_its_cost(file):
    triton, us = kernels_of("paged_attention")["triton"], [1.0]
    facts = {"takes": triton.takes, "dtypes": triton.dtypes, "cost_us": lambda p: us[0]}
    other = register(Kernel("of_another_package", "paged_attention", lambda call: None, **facts))
    problem = problems("paged_attention", B200)[0]
    policy = f"allow={other.name},paged_attention:triton"
    try:
        assert select(problem, policy).kernel is other
        us[0] = 1e9
        store.forget()
        assert select(problem, policy).kernel is triton
    finally:
        _drop([other])


def test_where_all_ran_nowhere_their_estimates_decide_and_the_reference_stays_the_last():
    with where_kernels_ran(json.dumps({"mla_attention.reference": ["sm90"]})):
        decision = select(DECODE)
    assert decision.kernel.name == "cutlass_mla" and decision.passed_over[-1] == "reference"
