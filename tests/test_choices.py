"""Calls of other projects' tests: the committed table is what selection chooses, and few of them are left to the plain body."""

import json
from dataclasses import replace

import pytest

from attnops.kernel import _REGISTRY, kernels_of
from attnops.select import select
from benchmarks.choices import kinds
from tests.helpers import ROOT

COMMITTED = json.loads(kinds.FILE.read_text())
PAGE = (ROOT / "docs" / "kernels.md").read_text()


@pytest.fixture(scope="module")
def found():
    """The rows of the table, chosen anew."""
    return kinds.rows()


def test_the_table_is_what_is_chosen(found):
    assert found == COMMITTED, "run `make docs`, and look at what changed"
    assert kinds.FILE.read_text() == kinds.text(COMMITTED)


def test_few_kinds_are_left_to_the_plain_body(found):
    left = kinds.left(found)
    assert left == set(kinds.REASONS) and len(left) <= kinds.MOST_LEFT
    assert all(f"| {kind} | {kinds.REASONS[kind]} |" in PAGE for kind in left)


def test_every_call_of_the_table_keeps_the_contract_and_is_another():
    """The grid's builders check nothing; two equal Problems would be one row twice."""
    problems = []
    for _, case, by_target in kinds.decisions():
        for decision in by_target.values():
            assert decision.problem.op == case.op
            assert not kernels_of(case.op)["reference"].unmet(decision.problem)
        problems.append(decision.problem)
    assert len(set(problems)) == len(problems)


@pytest.mark.parametrize(
    ("op", "name", "without", "kind"),
    [
        ("attention", "triton", {"dtypes": ()}, "head dims 2 and 3, trained"),
        ("varlen_attention", "triton", {"takes": {"mask"}}, "mask and soft cap, head dim 256, packed"),
        ("paged_attention", "triton", {"takes": {"q_scale", "softcap", "lse"}}, "head dim 512 over pages"),
        ("sparse_mla_attention", "flashmla", {"takes": {"sinks"}}, "packed latents, rows between pages"),
    ],
)
def test_a_kernel_that_takes_less_changes_the_table(monkeypatch, op, name, without, kind):
    """The table can fail: without the feature the kind would be left to the plain body."""
    kernel = kernels_of(op)[name]
    takes, dtypes = kernel.takes - without.get("takes", set()), without.get("dtypes", kernel.dtypes)
    less = replace(kernel, takes=frozenset(takes), dtypes=dtypes or kernel.dtypes[:1])
    monkeypatch.setitem(_REGISTRY.kernels[op], name, less)
    monkeypatch.setattr(_REGISTRY, "generation", _REGISTRY.generation + 1)
    answers = {select(d.problem).kernel.name for k, _, by in kinds.decisions() if k == kind for d in by.values()}
    assert "reference" in answers
