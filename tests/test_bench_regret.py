"""The suite `regret`: the calls it draws, its figures, and the committed ones chosen for once
more."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest

from attnops.bench import choices
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Target, altered
from attnops.measured import MEASURED, Grid, costs
from attnops.measured.cost import decodes
from attnops.measured.table import from_json
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import build, lengths, problem_of
from attnops.tune import Stopwatch, sweeps_of
from tests.helpers import ROOT
from tests.measuring import SM90, SQUARE as TINY, scaled, table as table_of

FULL = sweeps_of("full")


def drawn_well(draw, count, families):
    """The calls of a seed, which bear names of their own."""
    held = draw(count)
    assert held == draw(count), "a seed gives the same calls"
    assert {h.family for h in held} == {*families}
    assert len({h.name for h in held}) == count
    return held


def test_what_is_held_out():
    held = drawn_well(choices.held_out, 240, choices.FAMILIES)
    assert Counter(h.family for h in held) == dict.fromkeys(choices.FAMILIES, 48)
    assert held != choices.held_out(240, seed=2) and held[0].name == "dense 2x1072 of 1072"
    on_grid = {(sweep.kind, *at) for sweep in FULL for at in sweep.points()}
    for h in held:
        batch, queries, keys = len(h.q_lens), max(h.q_lens), max(h.k_lens)
        assert (h.shape, batch, queries, keys / queries) not in on_grid
        assert h.shape.op != "attention" or len(set(h.q_lens)) == 1
        assert all(
            1 <= q <= k or h.shape.rules.kv_range for q, k in zip(h.q_lens, h.k_lens, strict=True)
        )
    assert {decodes(h.shape) for h in held if h.family == "dense"} == {True, False}
    assert sum(len(set(h.k_lens)) > 1 for h in held) > 60, "ragged"


def is_the_problem_of(held, op, pool):
    shape = altered(held.shape, op=op, grad=op != held.shape.op)
    built = build(shape, held.q_lens, held.k_lens, pool).problem
    assert problem_of(shape, held.q_lens, held.k_lens, Target()) == built, held


def test_the_problem_of_a_held_call_is_that_of_the_call():
    pool, held = Pool("cpu"), choices.held_out(60, seed=3)
    assert {h.family for h in held} == set(choices.FAMILIES)
    for h in held:
        is_the_problem_of(h.sized("toy"), h.shape.op, pool)


def test_regret_is_counted():
    us = {"a": 10.0, "b": 12.0}
    rows = [{"us": us, "chosen": dict.fromkeys(choices.WAYS, name)} for name in ("a", "b", "gone")]
    assert [choices.regret(one) for one in rows] == [0.0, pytest.approx(20.0), None]
    found, by_estimates = choices.summary("mla", rows)
    figures = {
        "mean_percent": 10.0,
        "worst_percent": 20.0,
        "best_chosen": 1,
        "over_10_percent": 1,
        "unanswered": 1,
    }
    assert found == {"case": "mla", "way": "automatic", "calls": 3, **figures}
    assert by_estimates == found | {"way": "by_estimates"}
    assert "mean_percent" not in next(choices.summary("mla", []))


def chosen_again(data, table):
    """The calls of a results file with the choices that are made now, by `table` and for the
    machine it is of."""
    target = replace(
        Target.parse(table.target, tuple(v.partition("==")[0] for v in data["packages"])),
        gpu=table.gpu,
    )
    known = {held.name: held for held in choices.held_out(1000)}
    rows = []
    for timed in data["calls"]:
        q, k = (dict.fromkeys(map(str, timed[n])) for n in ("queries", "keys"))
        batch = timed["batch"]
        held = known[f"{timed['family']} {batch}x{'-'.join(q)} of {'-'.join(k)}"]
        rows.append(
            timed
            | {
                "chosen": choices.choices(
                    problem_of(held.shape, held.q_lens, held.k_lens, target), table
                )
            }
        )
    return rows


def of(table, shapes):
    """The part of the table that speaks for calls of the shapes' ops without lse."""
    ops = {shape.op for shape in shapes}
    grids = tuple(g for g in table.grids if g.kind.op in ops and not g.kind.results.lse)
    timed = {f"{g.kind.op}.{name}" for g in grids for name in g.us}
    return replace(
        table, grids=grids, versions={name: table.versions[name] for name in sorted(timed)}
    )


WRITTEN_NOW = {"ac22e7358d6c": "81df9f4c668a"}
"""Digests of tables of the format before, and those of the same times as they are written now."""


def test_the_shipped_table_chooses_as_the_committed_figures_say():
    """The calls timed on an H200, chosen for once more: a change that chooses worse shows here,
    without a GPU."""
    data = json.loads((ROOT / "benchmarks" / "results" / "h200" / "regret.json").read_text())
    table = from_json((ROOT / "attnops" / "tables" / "h200.json").read_text())
    rows = chosen_again(data, table)
    assert len(rows) == len(data["calls"])
    for family, then in ({**data["families"], "all": data["all"]}).items():
        for now in choices.summary(family, [r for r in rows if family in ("all", r["family"])]):
            assert now == {
                "case": family,
                "way": now["way"],
                "calls": then["calls"],
                **then[now["way"]],
            }
    # Times of gradients were added since, and `made` is of the run that added them: the others are
    # those of then.
    made = {
        name: data["table"]["made"][name] for name in table.made if name in data["table"]["made"]
    }
    then = data["table"]["digest"]
    assert (
        WRITTEN_NOW.get(then, then)
        == replace(of(table, choices.FAMILIES.values()), made=made).digest[:12]
    )
    assert (
        data["all"]["automatic"]["mean_percent"] < 2.0 < data["all"]["by_estimates"]["mean_percent"]
    )


def test_a_kernel_that_is_wrong_is_no_candidate(monkeypatch):
    """Half as much again, which it is found to be once; later calls leave it out."""
    held, kernels = choices.Held("dense", TINY, (6, 6), (6, 6)), kernels_of("attention")
    sdpa, us = kernels["sdpa"], {"off": 1.0, "sdpa": 10.0, "reference": 30.0}
    call = build(held.shape, held.q_lens, held.k_lens, Pool("cpu"))

    wrong = replace(sdpa, name="off", run=lambda call: scaled(1.5)(call, sdpa.run), contract=2)
    assert choices.failure(sdpa, call) == "" and choices.failure(wrong, call).startswith(
        "wrong: off by"
    )
    stopwatch = Stopwatch(lambda kernel, call, run: us[kernel.name])
    checked = dict[str, list[str]]()
    some = (sdpa, wrong, kernels["reference"])
    monkeypatch.setattr(
        stopwatch, "candidates", lambda call: [(kernel, call, None) for kernel in some]
    )

    def timed():
        return list(choices.timed(held, Pool("cpu"), stopwatch, checked, None))

    found, one = timed()
    assert found["way"] == "off" and "median_us" not in found
    assert one == {
        "case": "dense 2x6 of 6",
        "way": "automatic",
        "us": {"sdpa": 10.0, "reference": 30.0},
        "chosen": dict.fromkeys(choices.WAYS, "sdpa"),
        "median_us": 10.0,
        "regret_percent": 0.0,
    }
    assert timed() == [one] and checked["sdpa"] == ["", ""]


def test_pairs_that_are_held_out():
    held = drawn_well(choices.TRAINING.held_out, 120, choices.TRAINED)
    kinds, longest = {h.shape for h in held}, [max(h.q_lens) for h in held]
    assert {kind.head_dim for kind in kinds} == {64, 96, 128, 192, 256} and {
        kind.group_size for kind in kinds
    } == {1, 2, 4, 8}
    for fact in ("sinks", "softcap", "windowed"):
        assert any(getattr(kind.rules, fact) for kind in kinds), fact
    assert min(longest) < 1024 and max(longest) > 16384
    assert sum(len(set(h.q_lens)) > 1 for h in held) > 15, "ragged"
    pool = Pool("cpu")
    for h in held[:40]:
        for op in (h.shape.op, f"{h.shape.op}_backward"):
            is_the_problem_of(h.sized("toy"), op, pool)


def test_the_regret_of_a_pair():
    held = choices.Held("dense", altered(TINY, causal=False), (6, 6), (6, 6))
    us = {
        "attention": {"aten_flash": 20.0, "reference": 30.0},
        "attention_backward": {"aten_flash": 50.0, "reference": 40.0},
    }
    stopwatch = Stopwatch(
        lambda kernel, call, run: us[kernel.op][kernel.name], names=("aten_flash", "reference")
    )
    [found] = choices.timed_pair(held, Pool("cpu"), stopwatch, {}, None)
    assert (found["forward"], found["gradient"]) == (*us.values(),)
    assert (
        found["chosen"] == dict.fromkeys(choices.WAYS, "aten_flash+aten_flash")
        and found["median_us"] == 70.0
    )
    assert found["regret_percent"] == pytest.approx(100 * (70 / 60 - 1), abs=0.01)


# Kernels made up to cross each other: their times depend on every request, which selection cannot
# know.
def moved(s, q_lens, k_lens):
    width = s.head_dim + s.v_head_dim
    stored = s.head_dim if s.rope_dim else s.kv_heads * width
    pairs = sum(
        q * (k - (q - 1) / 2 if s.rules.causal else k) for q, k in zip(q_lens, k_lens, strict=True)
    )
    return 2.0 * (
        sum(q_lens) * s.q_heads * width + sum(k_lens) * stored
    ), 2.0 * pairs * s.q_heads * width


def splitting(s, q_lens, k_lens):
    size, flops = moved(s, q_lens, k_lens)
    blocks = sum(s.kv_heads * math.ceil(q * s.q_heads / s.kv_heads / 128) for q in q_lens)
    return 8 + 7 * (blocks < 106) + max(size / 4.1e6, flops / 6e8) * (1.1 if blocks < 106 else 1.0)


def steady(s, q_lens, k_lens):
    size, flops = moved(s, q_lens, k_lens)
    return 12 + size / 3.9e6 + flops / 5e8


def quick(s, q_lens, k_lens):
    size, flops = moved(s, q_lens, k_lens)
    return 5 + size / 2.5e6 + flops / 4e8


MADE_UP = {"splitting": splitting, "steady": steady, "quick": quick}


ATTENTION = [plan for plan in FULL if plan.kind.q_heads]


def made_up_table():
    grids = []
    for plan in ATTENTION:
        at = [lengths(plan.kind, point) if plan.allows(point) else None for point in plan.points()]
        us = {
            n: tuple(a and float(f"{f(plan.kind, *a):.3g}") for a in at) for n, f in MADE_UP.items()
        }
        grids.append(Grid(plan.kind, *plan.axes, us))
    return table_of(*grids)


def test_a_table_chooses_well_between_its_points():
    """The grid is fine enough: mean and worst regret on calls that the table does not contain."""
    table, regrets = made_up_table(), []
    for held in choices.held_out(300, seed=5):
        kernels = [Kernel(n, held.shape.op, lambda call: None) for n in MADE_UP]
        us = {n: f(held.shape, held.q_lens, held.k_lens) for n, f in MADE_UP.items()}
        found = costs(problem_of(held.shape, held.q_lens, held.k_lens, SM90), kernels, table)
        assert all(c.how == MEASURED for c in found.values()), held
        regrets.append(us[min(found, key=lambda n: found[n].us)] / min(us.values()) - 1)
    # The worst are calls of some 10 us between two points where one of the kernels stops splitting.
    assert sum(regrets) / len(regrets) <= 0.01 and max(regrets) <= 0.5
    assert sum(r > 0.1 for r in regrets) <= 0.03 * len(regrets)
