"""Calls of other projects' tests: selection chooses what the committed table says.

Few kinds of them are left to the plain body, each with a reason.
"""

import json
from dataclasses import replace

import pytest

from attnops.core.kernel import _REGISTRY, kernels_of, renew
from benchmarks.choices import kinds
from tests.helpers import ROOT

COMMITTED = json.loads(kinds.FILE.read_text())
PAGE = (ROOT / "docs" / "kernels.md").read_text()


@pytest.fixture(scope="module")
def made():
    """The decisions, made anew."""
    return [*kinds.decisions()]


@pytest.fixture
def found(made):
    """The rows of the table."""
    return kinds.rows(made)


def test_the_table_is_what_is_chosen(found):
    assert found == COMMITTED, "run `make docs`, and look at what changed"
    assert kinds.FILE.read_text() == kinds.text(COMMITTED)


def test_few_kinds_are_left_to_the_plain_body(found):
    left = kinds.left(found)
    assert left == set(kinds.REASONS) and len(left) <= kinds.MOST_LEFT
    assert all(f"| {kind} | {kinds.REASONS[kind]} |" in PAGE for kind in left)


def test_every_call_of_the_table_can_run_and_is_another(made):
    """Two equal Problems would be one row twice."""
    problems = [decision.problem for _, _, by_target in made for decision in by_target.values()]
    assert not any(kernels_of(problem.op)["reference"].unmet(problem) for problem in problems)
    assert len({*problems}) == len(problems)


@pytest.fixture
def exchange(monkeypatch):
    """A function that puts a kernel in the place of the one of its name, until the test ends."""

    def put(kernel):
        monkeypatch.setitem(_REGISTRY.kernels[kernel.op], kernel.name, kernel)
        renew()

    yield put
    monkeypatch.undo()
    renew()


@pytest.mark.parametrize(
    ("op", "name", "features", "kind"),
    [
        ("attention", "triton", (), "head dims 2 and 3, trained"),
        ("varlen_attention", "triton", ("mask",), "mask and soft cap, head dim 256, packed"),
        ("paged_attention", "triton", ("q_scale", "softcap", "lse"), "head dim 512 over pages"),
        ("sparse_mla_attention", "flashmla", ("sinks",), "packed latents, rows between pages"),
    ],
)
def test_a_kernel_that_takes_less_changes_the_table(exchange, op, name, features, kind):
    """The table can fail: without the features, or but one dtype, the kind would be left to the
    plain body."""
    kernel = kernels_of(op)[name]
    exchange(
        replace(
            kernel,
            takes=kernel.takes.difference(features),
            dtypes=kernel.dtypes[: None if features else 1],
        )
    )
    answers = {
        d.kernel.name
        for _, _, by_target in kinds.decisions({kind: kinds.KINDS[kind]})
        for d in by_target.values()
    }
    assert "reference" in answers
