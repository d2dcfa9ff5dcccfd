"""`route`: the experts that its reference chooses, against plain Python, and numbers that are
none."""

import math
from collections import Counter
from itertools import product

import pytest
import torch

from attnops import ops
from attnops.core.errors import InvalidInput
from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Target, altered
from attnops.core.select import select
from attnops.ops.experts.cases import V3
from attnops.ops.experts.route import Route, is_allowed
from tests.checks import case_of
from tests.mates import POLICY
from tests.triton.checks import SM90

NAN, INF = math.nan, math.inf
RULES = {n: v for n, v in V3.items() if n != "bias"}


def in_python(row, k, bias, groups, top, best):
    """The choice by sigmoid scores of one token."""
    value = [1 / (1 + math.exp(-x)) + b for x, b in zip(row, bias, strict=True)]
    size = len(row) // groups
    score = [sum(sorted(value[g * size : (g + 1) * size])[-best:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: (-score[g], g))[:top]
    return sorted((e for e in range(len(row)) if e // size in kept), key=lambda e: (-value[e], e))[
        :k
    ]


@pytest.mark.parametrize("ties", [False, True])
def test_the_choice_of_deepseek_v3(ties):
    torch.manual_seed(0)
    logits = torch.randn(50, 24, dtype=torch.float64)
    bias = torch.randn(24, dtype=torch.float64) / 4
    if ties:
        logits, bias = logits.round(), (bias * 4).round() / 4
    weights, index = ops.route(logits, 4, bias, **RULES)
    want = [in_python(row, 4, bias.tolist(), 4, 2, 2) for row in logits.tolist()]
    assert index.tolist() == want
    picked = logits.gather(1, index).sigmoid()
    torch.testing.assert_close(weights, 2.5 * picked / picked.sum(1, keepdim=True))


def test_equal_experts_and_groups_come_in_order():
    for more in ({}, {"groups": 4, "top_groups": 2}, RULES):
        weights, index = ops.route(
            torch.zeros(2, 8), 4, torch.zeros(8) if more is RULES else None, **more
        )
        assert index.tolist() == [[0, 1, 2, 3]] * 2
        assert weights.unique().numel() == 1
    assert ops.route(torch.tensor([[0.0, -0.0, 0.0, -0.0]]), 3)[1].tolist() == [[0, 1, 2]]


def test_logits_that_round_to_one_score_are_told_apart():
    logits = torch.tensor([[20.0, 30.0, 25.0, -200.0, -190.0]])
    assert logits.sigmoid()[0, :3].unique().numel() == 1
    for scoring in ("sigmoid", "softmax"):
        assert ops.route(logits, 4, scoring=scoring)[1].tolist() == [[1, 2, 0, 4]]


@pytest.mark.parametrize("name", ["reference", "aten"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("normalize", "eps", "scale"),
    [(True, 0.5, 1.0), (True, 0.0, 2.5), (True, 0.5, 2.5), (False, 0.0, 2.5)],
)
def test_the_weights_are_those_of_the_formula(name, scoring, normalize, eps, scale):
    logits = torch.randn(7, 12, dtype=torch.float64)
    rules = {"scoring": scoring, "normalize": normalize, "eps": eps, "scale": scale}
    weights, index = ops.route(logits, 3, kernel=name, **rules)
    for row, got, chosen in zip(logits.tolist(), weights.tolist(), index.tolist(), strict=True):
        total = sum(map(math.exp, row))
        scores = [
            math.exp(x) / total if scoring == "softmax" else 1 / (1 + math.exp(-x)) for x in row
        ]
        assert chosen == sorted(range(12), key=lambda e: -row[e])[:3]
        divisor = sum(scores[e] for e in chosen) + eps if normalize else 1.0
        assert got == pytest.approx([scale * scores[e] / divisor for e in chosen], rel=1e-12)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"normalize": True},
        {"normalize": True, "eps": 0.1},
        {"scoring": "sigmoid"},
        RULES,
        {"groups": 4, "top_groups": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "row", [[NAN] * 8, [INF] * 8, [-INF] * 8, [1.0, NAN, 2.0, INF, -INF, 0.0, NAN, 3.0]], ids=str
)
def test_every_number_is_an_expert(row, more):
    """One that comes once, whatever the logits are; their row alone has such weights."""
    logits = torch.tensor([[*map(float, range(8))], row])
    bias = torch.zeros(8) if more is RULES else None
    weights, index = ops.route(logits, 4, bias, **more)
    assert all(len(set(e)) == 4 and min(e) >= 0 and max(e) < 8 for e in index.tolist())
    assert weights[0].isfinite().all()
    if row[1] != row[1]:
        assert index[1, 0] == (0 if row[0] != row[0] else 1)
        assert weights[1].isnan().all() or (
            more == {"scoring": "sigmoid"} and weights[1, 0].isnan()
        )


@pytest.mark.parametrize("name", ["reference", "aten"])
def test_a_token_does_not_see_its_mates(name):
    call = case_of("route", "ties-all")
    whole = [t.clone() for t in run(call, name)]
    for t in range(9):
        alone = run(call.map(lambda n, x, t=t: x if n == "bias" else x[t : t + 1].clone()), name)
        assert all(torch.equal(a[t : t + 1], b) for a, b in zip(whole, alone, strict=True))


def run(call, name):
    kernels_of("route")[name].run(call.record._replace(policy=POLICY))
    return call.arguments["weights"], call.arguments["index"]


@pytest.mark.parametrize(
    ("target", "change", "chosen"),
    [
        (SM90, {}, "triton"),
        (SM90, {"tokens": Extent(1, None, 8)}, "triton"),
        (SM90, {"experts": 1024}, "aten"),
        (Target("cuda", 90, ()), {}, "aten"),
        (Target(), {}, "aten"),
    ],
)
def test_which_kernel_is_chosen(target, change, chosen):
    problem = case_of("route", "deepseek_v3").problem
    assert select(altered(problem, target=target, **change)).kernel.name == chosen


def test_the_op_takes_the_numbers_that_is_allowed_takes():
    """Patched models ask for rules of routers before they have tensors."""
    logits, allowed = torch.randn(2, 8), Counter()
    names = "groups", "top_groups", "group_best", "normalize", "eps"
    numbers = product((1, 2, 3, 4), (1, 2, 4), (1, 2, 4), (False, True), (0.0, 1e-6))
    for given, top_k in product(
        (dict(zip(names, each, strict=True)) for each in numbers), (1, 4, 8)
    ):
        try:
            index = ops.route(logits, top_k, **given)[1]
        except InvalidInput:
            index = None
        taken = is_allowed(Route(**given), logits.shape[1], top_k)
        assert taken == (index is not None), (given, top_k)
        allowed[taken] += 1
    assert min(allowed[False], allowed[True]) > 20
