"""Measured times: what lies between points, which table is in force, and what selection makes of
it."""

import json
import re
from dataclasses import replace
from functools import reduce, wraps
from itertools import accumulate, product
from operator import getitem

import pytest
import torch
from hypothesis import given, strategies as st

import attnops
from attnops.core.errors import BadTable
from attnops.core.kernel import _REGISTRY, Kernel, Package, generation, kernels_of
from attnops.core.problem import Extent, Target, altered, pretend
from attnops.core.select import select, select_by
from attnops.lowering import cache_key
from attnops.measured import (
    ESTIMATED,
    MEASURED,
    RATES,
    Grid,
    Sizes,
    costs,
    cpu_name,
    distance,
    forget,
    in_force,
    place,
    sizes_of,
    store,
    work,
)
from attnops.measured.cost import SCALED, UNMEASURED
from attnops.measured.kind_json import kind_of, leaves_of
from attnops.measured.store import path_for, save
from attnops.measured.table import HANDICAP, TRITON_CODE, from_json, version_of
from attnops.ops.linear.timed import product as product_of
from attnops.ops.pages.timed import PAGED
from attnops.testing.timed_calls import problem_of
from attnops.tune import sweeps_of
from tests.helpers import ROOT
from tests.measuring import SQUARE, STEP, decode, square, table, tables_in, timed


def kernel(name, cost=1.0, **more):
    return Kernel(name, "paged_attention", lambda call: None, cost_us=lambda p: cost, **more)


@pytest.fixture
def cache(tmp_path):
    with tables_in(tmp_path):
        yield tmp_path


# Between the points -------------------------------------------------------------------------------

AXIS = st.lists(st.integers(1, 4096), min_size=1, max_size=4, unique=True).map(
    lambda xs: tuple(float(x) for x in sorted(xs))
)
STEPS = st.floats(0.0, 50.0)


@st.composite
def growing(draw):
    """A grid whose times grow along every axis."""
    axes = [draw(AXIS) for _ in range(3)]
    sums = [[*accumulate(draw(STEPS) for _ in axis)] for axis in axes]
    return Grid(STEP, *axes, {"k": tuple(5.0 + sum(parts) for parts in product(*sums))})


SIZE = st.floats(0.25, 20_000)


@given(growing())
def test_at_the_points_times_are_what_was_measured(grid):
    for sizes, us in zip(grid.points(), grid.us["k"], strict=True):
        assert grid.at("k", sizes) == pytest.approx(us)


@given(
    growing(), SIZE, SIZE, SIZE, st.floats(1.0, 8.0), st.sampled_from(["batch", "queries", "ratio"])
)
def test_times_grow_with_every_size(grid, batch, queries, ratio, factor, axis):
    small = Sizes(batch, queries, ratio)
    large = small._replace(**{axis: getattr(small, axis) * factor})
    a, b = grid.at("k", small), grid.at("k", large)
    assert a is not None and b is not None and 0 < a <= b * (1 + 1e-9)


def test_between_the_points():
    us = (1.0, 2.0, 4.0, 8.0, 11.0, 22.0, 44.0, 88.0)
    grid = Grid(STEP, (1.0, 3.0), (4.0, 16.0), (10.0, 20.0), {"k": us})
    for at, want in (((2, 4, 10), 6), ((1, 4, 15), 1.5), ((1, 4, 30), 3), ((0.5, 1, 1), 1)):
        assert grid.at("k", Sizes(*at)) == pytest.approx(want)
    # Four of the twelve added queries, each as many bytes.
    assert grid.at("k", Sizes(1, 8, 10)) == pytest.approx(1 + 3 * 4 / 12, rel=0.02)
    assert grid.at("k", Sizes(1, 160, 10)) > 4 + 3 * 144 / 12, "many queries wait for the products"
    assert grid.at("other", Sizes(1, 4, 10)) is None


BEYOND = [
    (STEP, (2.0,), 1.0, 100.0, (10.0,), (6, 1, 200), 60),  # a single point is scaled with the work
    (SQUARE, (1.0,), 64.0, 1.0, (10.0,), (1, 128, 1), 40),
    (
        STEP,
        (1.0, 2.0),
        1.0,
        1.0,
        (11.0, 10.0),
        (100, 1, 1),
        10,
    ),  # noise does not turn into a falling line
]


@pytest.mark.parametrize(("kind", "batch", "queries", "ratio", "us", "at", "want"), BEYOND)
def test_beyond_the_points(kind, batch, queries, ratio, us, at, want):
    assert Grid(kind, batch, (queries,), (ratio,), {"k": us}).at("k", Sizes(*at)) == pytest.approx(
        want
    )


def test_missing_points_follow_their_smaller_neighbours():
    us = {"a": (10.0, *[None] * 3), "never": (None,) * 4, "late": (None, None, 7.0, 9.0)}
    grid = Grid(STEP, (1.0, 4.0), (1.0,), (100.0, 200.0), us)
    assert grid.at("a", Sizes(4, 1, 200)) == pytest.approx(80)
    assert grid.at("never", Sizes(4, 1, 200)) is None
    assert grid.at("late", Sizes(1, 1, 100)) == pytest.approx(7)


# Shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "speaks"),
    [
        ({}, True),
        ({"dtype": torch.float16, "kv_dtype": torch.float16}, True),
        ({"plan": "host"}, True),
        ({"q_heads": 40}, True),
        ({"page_size": 256}, True),
        ({"lse": True}, True),
        ({"softcap": True}, True),
        ({"head_dim": 96}, True),
        ({"head_dim": 512}, False),
        ({"dtype": torch.float32}, False),
        ({"kv_dtype": torch.float8_e4m3fn}, False),
        ({"mask": "bool"}, False),
        ({"window": (127, -1)}, False),
        ({"queries": Extent.of(4)}, False),
        ({"op": "mla_attention", "rope_dim": 64}, False),
    ],
    ids=str,
)
def test_a_shape_speaks_for_its_neighbours(change, speaks):
    found = distance(STEP, altered(decode(), **change))
    assert (found < float("inf")) == speaks
    assert (found == 0) == (change.keys() <= {"dtype", "kv_dtype", "plan"} and speaks)


def test_a_forward_that_is_trained_has_shapes_of_its_own():
    """Kernels that return no lse do not compete there; calls without lse never go by such a
    shape."""
    plain, trained = SQUARE, altered(SQUARE, lse=True)
    call = altered(square(), lse=True)
    assert (
        distance(trained, call)
        == 0
        < distance(plain, call)
        < float("inf")
        == distance(trained, square())
    )
    assert (
        table(Grid(plain, (1.0,), (16.0,), (1.0,), {}), Grid(trained, (1.0,), (16.0,), (1.0,), {}))
        .nearest(call)[0]
        .kind
        == trained
    )


def test_dense_calls_with_and_without_a_mask_to_write_out():
    assert distance(SQUARE, square()) == 0
    assert distance(SQUARE, square(sizes_equal=False)) == float("inf")
    assert distance(altered(SQUARE, causal=False), square(causal=False, sizes_equal=False)) == 0


DIFFERENCES = [
    {"sinks": True},
    {"softcap": True},
    {"q_heads": 8, "kv_heads": 2},
    {"q_heads": 8},
    {"page_size": 64},
    {"head_dim": 96},
    {"v_head_dim": 96},
]


@pytest.mark.parametrize(
    ("change", "other"),
    [({"window": (127, -1)}, {"window": (1023, -1)}), *((change, {}) for change in DIFFERENCES)],
    ids=str,
)
def test_every_difference_counts_in_the_distance(change, other):
    """Of two shapes the one that differs in nothing is asked, wherever it stands in the table."""
    problem, near, far = decode(**change), altered(STEP, **change), altered(STEP, **other)
    assert distance(near, problem) == 0 < distance(far, problem) < float("inf")
    for shapes in ((near, far), (far, near)):
        assert nearest(shapes, problem) == near


def nearest(shapes, problem):
    """The shape of a table that is asked for a call."""
    found = table(*(Grid(s, (1.0,), (1.0,), (1.0,), {"k": (1.0,)}) for s in shapes)).nearest(
        problem
    )
    return found and found[0].kind


def test_the_nearest_shape_is_asked():
    shapes = [altered(STEP, q_heads=8 * g) for g in (1, 4, 8)] + [
        altered(STEP, page_size=256),
        altered(STEP, head_dim=64, v_head_dim=64),
    ]
    for problem, at in (
        (decode(), 1),
        (decode(q_heads=64), 2),
        (decode(q_heads=56), 2),
        (decode(page_size=128), 3),
        (decode(head_dim=64, v_head_dim=64), 4),
    ):
        assert nearest(shapes, problem) == shapes[at], problem
    assert nearest(shapes, square()) is None and nearest([], decode()) is None


def test_heads_count_as_requests():
    assert place(STEP, decode(q_heads=64, kv_heads=16)) == Sizes(16, 1, 4096)
    assert place(STEP, decode(head_dim=64, v_head_dim=64)) == Sizes(4, 1, 4096)
    less = decode(1, q_heads=8, kv_heads=2)
    assert place(STEP, less) == Sizes(1, 1, 1024), "less than a request is one with fewer keys"
    ragged = problem_of(altered(PAGED, q_heads=64), [32, 12, 10, 10], [1024] * 4, decode().target)
    assert sizes_of(ragged) == Sizes(4, 16, 32), "requests are smaller copies of the longest"
    assert place(PAGED, ragged) == Sizes(4, 32, 16), "heads of a group count as queries"
    assert place(SQUARE, square(4, 16, q_heads=8, kv_heads=4)) == Sizes(8, 16, 1)
    assert place(SQUARE, square(1, 64, q_heads=1, kv_heads=1)) == Sizes(1, 32, 1)


def test_work():
    found = work(STEP, Sizes(2, 1, 100))
    assert found.bytes == 2 * (100 * 8 * 256 * 2 + 32 * 256 * 2)
    assert found.flops == 2 * 2 * 100 * 32 * 256


@pytest.mark.parametrize(
    "queries, keys", [(1, 1), (1, 50), (7, 50), (50, 50), (43, 50), (50, 7), (2, 1)]
)
@pytest.mark.parametrize("window", [-1, 0, 4, 6, 42, 49, 80])
def test_work_of_a_window(queries, keys, window):
    seen = sum(
        max(0, keys - at if window < 0 else min(keys - at, window + 1)) for at in range(queries)
    )
    found = work(altered(SQUARE, window=(window, -1)), Sizes(3, queries, keys / queries)).flops
    assert found == pytest.approx(3 * 2 * seen * 4 * 32)


# Costs --------------------------------------------------------------------------------------------

US = {"fast": (10.0, 20.0, 30.0, 110.0), "slow": (90.0, 300.0, 900.0, 5000.0)}
GRID = Grid(STEP, (1.0, 16.0), (1.0,), (1000.0, 5000.0), US)


@pytest.mark.parametrize("promise", [0.0, 5.0])
def test_an_optimistic_formula_does_not_win(promise):
    for problem in (decode(1, 1000), decode(16, 5000), decode(4, 2000)):
        kernels = kernel("fast"), kernel("newcomer", promise)
        found = costs(problem, kernels, table(GRID))
        assert found["newcomer"].how == UNMEASURED
        assert found["newcomer"].us > found["fast"].us


def test_an_unmeasured_kernel_wins_over_a_slow_fallback_alone():
    found = costs(decode(16, 5000), (kernel("slow"), kernel("newcomer", 120.0)), table(GRID))
    assert (
        found["newcomer"] == (HANDICAP * 120.0, UNMEASURED)
        and found["newcomer"].us < found["slow"].us
    )


def test_what_no_table_covers_is_estimated():
    kernels = (kernel("a", 3.0), kernel("b", 2.0))
    for given_table in (None, table(), table(GRID)):
        assert costs(decode(), kernels, given_table) == {
            "a": (3.0, ESTIMATED),
            "b": (2.0, ESTIMATED),
        }
    assert costs(decode(mask="bool"), (kernel("fast", 3.0),), table(GRID)) == {
        "fast": (3.0, ESTIMATED)
    }


def test_another_version_is_not_what_was_timed():
    package, slow = Package("hypothesis", ("hypothesis",)), kernel("slow")
    fast, here = kernel("fast", packages=(package,)), Target("cuda", 90, gpu="Some GPU")
    versions = {"paged_attention.fast": "hypothesis==0.1", "paged_attention.slow": version_of(slow)}
    found = costs(decode(target=here), (fast, slow), table(GRID, versions=versions))
    assert found["fast"].how == UNMEASURED and found["slow"].how == MEASURED
    assumed = Target("cuda", 90, assume=("hypothesis",))
    assert table(GRID, versions=versions).speaks_for(fast, assumed), "such a target has the table's"
    assert version_of(fast) == f"hypothesis=={package.version()}"
    assert version_of(slow) == f"torch=={'.'.join(torch.__version__.split('.')[:2])}"


# The file -----------------------------------------------------------------------------------------


def full():
    us = {"a": (1.0, None, 3.25, 4000.0), "b": (2.0, None, None, None)}
    kind = altered(STEP, sinks=True)
    grid = Grid(kind, (1.0, 2.0), (1.0,), (100.0, 200.5), us, {"a": 700.0}, {"c": "why"})
    linear = Grid(product_of(32, 16), (1.0,), (1.0,), (1.0,), {"aten": (1.0,)})
    return table(GRID, grid, linear)


def test_a_table_is_its_file():
    first = full()
    again = from_json(first.to_json())
    assert again == first and hash(again) == hash(first)
    assert (again.grids, again.versions, again.made) == (first.grids, first.versions, first.made)
    assert replace(first, grids=first.grids[:1]) != first
    assert '"ratio":[100,200.5]' in first.to_json() and '"b":[2]' in first.to_json()


def test_a_kind_is_what_is_written_of_it():
    """The fields that differ from a Problem's defaults; sizes that are left open are not said."""
    for sweep in sweeps_of("full"):
        assert kind_of(json.loads(json.dumps(leaves_of(sweep.kind)))) == sweep.kind
    dims = {"q_heads": 4, "kv_heads": 2, "head_dim": 16}
    assert leaves_of(SQUARE) == {"op": "attention", **dims, "causal": True, "sizes_equal": True}


KIND, TIME, GONE = "grids.0.problem", "grids.0.us.fast.0", object()
DAMAGE = [
    ("format", 1),
    ("format", GONE),
    ("grids", GONE),
    ("grids", 3),
    ("gpu", GONE),
    (f"{KIND}.colour", "red"),
    (f"{KIND}.target", "sm90"),
    (f"{KIND}.window", [127]),
    (f"{KIND}.window", ["a", "b"]),
    (f"{KIND}.asks", [3]),
    (f"{KIND}.queries", "1"),
    (f"{KIND}.page_size", True),
    (f"{KIND}.head_dim", 10**400),
    (f"{KIND}.dtype", "nn"),
    (f"{KIND}.kv_heads", 0),
    ("grids.2.problem.in_features", 0),
    ("grids.2.problem.in_features", 1 << 40),
    ("grids.0.us.fast", [1.0] * 5),
    (TIME, -1.0),
    (TIME, 0),
    (TIME, float("inf")),
    (TIME, float("nan")),
    (TIME, 10**400),
    (TIME, "x"),
    ("grids.0.batch", [16, 1]),
    ("grids.0.batch", [1, float("inf")]),
    ("grids.0.queries", []),
    ("grids.0.ratio", [0, 5]),
    ("grids.1.plan_us.a", float("nan")),
    ("grids.1.plan_us", [1]),
]
TEXTS = {
    "empty": "",
    "cut": full().to_json()[:-30],
    "list": "[1, 2]",
    "null": "null",
    "digits": "9" * 5000,
    "brackets": "[" * 200_000,
    "nested": '{"a":' * 5000 + "1" + "}" * 5000,
}


def damaged(where, value):
    """The text of a table with another value in one place, or none there."""
    data = json.loads(full().to_json())
    *path, last = (int(part) if part.isdigit() else part for part in where.split("."))
    inner = reduce(getitem, path, data)
    inner[last] = value
    if value is GONE:
        del inner[last]
    return json.dumps(data)


BAD = {f"{where} {str(value)[:9]}": damaged(where, value) for where, value in DAMAGE} | TEXTS


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_damaged_file_is_reported_and_ignored(text, cache):
    with pytest.raises(BadTable, match=r"got .*, want"):
        from_json(text)
    path = path_for(cpu_name())
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = in_force(Target())
    assert found.table is None and [p for p, _ in found.ignored] == [path]
    assert select(square()).costs["sdpa"].how == ESTIMATED


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_writing_is_all_or_nothing(broken, cache, monkeypatch):
    path = path_for(cpu_name())
    save(timed(sdpa=1.0), path)
    before = path.read_text()
    monkeypatch.delattr(store.os, broken)
    with pytest.raises(AttributeError):
        save(timed(sdpa=2.0), path)
    assert path.read_text() == before and [*path.parent.iterdir()] == [path]


# In force -----------------------------------------------------------------------------------------


def measured(**us):
    """From now on the user's table of this CPU has these times."""
    save(timed(**us), path_for(cpu_name()))


def test_selection_follows_the_table(cache):
    assert select(square()).kernel.name == "sdpa"
    for sdpa, reference, chosen in ((9.0, 5.0, "reference"), (5.0, 9.0, "sdpa")):
        before = generation()
        measured(sdpa=sdpa, reference=reference)
        decision = select(square())
        assert generation() > before and decision.kernel.name == chosen
        assert decision.costs[chosen] == (5.0, MEASURED)
        assert f"-> {chosen}, measured" in str(decision)
    assert "not reference: can run, measured slower" in str(decision)
    assert "not flex: can run, not measured, others are" in str(decision)
    assert select(square(), "prefer=flex").kernel.name == "flex"
    assert select_by(None, square()).costs["sdpa"].how == ESTIMATED


def dense_call():
    q, k = torch.randn(1, 16, 4, 16), torch.randn(1, 16, 2, 16)
    return attnops.attention(q, k, k, causal=True)


def test_eager_calls_follow_the_table(cache, monkeypatch):
    ran = []

    def spied(found):
        @wraps(found.run)
        def run(*args, **kwargs):
            ran.append(found.name)
            return found.run(*args, **kwargs)

        return replace(found, run=run)

    for name in ("sdpa", "reference"):
        kernel = spied(kernels_of("attention")[name])
        monkeypatch.setitem(_REGISTRY.kernels["attention"], name, kernel)
    forget()
    dense_call()
    measured(sdpa=9.0, reference=5.0)
    dense_call()
    assert ran == ["sdpa", "reference"]


def test_the_cache_key_follows_the_table(cache):
    keys = [cache_key.choice_inputs()]
    for sdpa in (1.0, 2.0):
        measured(sdpa=sdpa, reference=5.0)
        keys.append(cache_key.choice_inputs())
    assert len(set(keys)) == 3
    path_for(cpu_name()).unlink()
    forget()
    assert cache_key.choice_inputs() == keys[0]
    for us in (1.0, 2.0):
        ship(cache, "h200.json", timed(H200, sdpa=us))
        for gpu in (H200, H100):
            with pretend(Target("cuda", 90, gpu=gpu)):
                keys.append(cache_key.choice_inputs())
    assert len(set(keys[3:])) == 4, "a sibling's counts"


def ship(cache, name, table):
    (cache / "shipped" / name).write_text(table.to_json())
    forget()


H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def test_which_table(cache):
    measured(sdpa=9.0)
    assert in_force(Target()).table is not None
    assert in_force(Target.parse("cpu", assume=())).table is None, "a named CPU has none"
    here, named = Target("cuda", 90, gpu="Some GPU"), Target.parse("sm90", assume=("sgl_kernel",))
    ship(cache, "some.json", table(GRID))
    ship(cache, "other.json", table(GRID, gpu="Other GPU", target="sm100"))
    for target in (here, named, Target("cuda", 90)):
        assert in_force(target).table == table(GRID) and in_force(target).shipped
    for target in (Target("cuda", 80, gpu="Third GPU"), Target.parse("sm80", assume=())):
        assert in_force(target).table is None, "another arch"
    assert in_force(Target("cuda", 100)).table.gpu == "Other GPU"
    # The user's own comes first, for this machine alone.
    mine = table(replace(GRID, plan_us={"fast": 1.0}))
    save(mine, path_for("Some GPU"))
    assert in_force(here).table == mine and not in_force(here).shipped
    assert in_force(named).table == table(GRID)
    # One that was copied from another machine is not used, and what shipped is.
    save(replace(mine, gpu="Other GPU"), path_for("Some GPU"))
    found = in_force(here)
    assert found.table == table(GRID) and "'Other GPU', want 'Some GPU'" in found.ignored[0][1]


def test_a_sibling_is_served_by_scaled_times(cache):
    """Whose bytes take longer, and products as long; a launch is a launch."""
    us = (10.0, 90.0, 90.0, None)
    made = table(Grid(STEP, (1.0, 256.0), (1.0,), (256.0, 65536.0), {"k": us}), gpu=H200)
    ship(cache, "h200.json", made)

    def found(gpu):
        return in_force(Target("cuda", 90, gpu=gpu)).table

    first, *more, none = found(H100).grids[0].us["k"]
    slower = 1 / RATES[H100].bandwidth - 1 / RATES[H200].bandwidth
    want = [90 + slower * work(STEP, at).bytes / 1e6 for at in made.grids[0].points()[1:3]]
    assert (first, more, none) == (pytest.approx(10, rel=0.02), pytest.approx(want), None)
    assert (found(H100).gpu, found(H100).source) == (H100, H200) and found(
        H100
    ).digest != made.digest
    assert found("NVIDIA H9000").grids == made.grids, (
        "of unknown rates the order is all that is known"
    )
    assert found(H200) == in_force(Target.parse("sm90", assume=())).table == made
    for target in (Target("cuda", 100, gpu="NVIDIA B200"), Target("cpu", 0)):
        assert in_force(target).table is None


def test_the_nearest_sibling_serves_and_a_table_of_its_own_wins(cache):
    for gpu in (H200, H100):
        ship(cache, f"{gpu.split()[1].lower()}.json", table(GRID, gpu=gpu))

    def source(gpu):
        return in_force(Target("cuda", 90, gpu=gpu)).table.source

    near = {"GH200 144G HBM3e": H200, "H800": H100, "H100 PCIe": H100, "H9000": H200}
    for name, sibling in near.items():
        assert source(f"NVIDIA {name}") == sibling
    assert source(H200) == source(H100) == ""
    assert in_force(Target.parse("sm90", assume=())).table.gpu == H200, "which speaks for the arch"
    save(table(GRID, gpu="NVIDIA H800"), path_for("NVIDIA H800"))
    assert source("NVIDIA H800") == ""


def explained(**more):
    return attnops.explain(dense_call, quiet=True, **more)


def test_a_sibling_speaks_for_kernels_without_a_time(cache):
    """A GPU's own times come first. Its sibling's, scaled, serve kernels and ops that its own table
    has not."""
    ship(cache, "h100.json", timed(H100, sdpa=50.0))
    alone = in_force(Target("cuda", 90, gpu=H100)).table
    ship(cache, "h200.json", timed(H200, sdpa=5.0, flex=40.0))
    target = Target("cuda", 90, assume=(), gpu=H100)
    found = in_force(target).table
    assert found.digest != alone.digest
    assert found.to_json() == alone.to_json(), "what another GPU measured is not written into it"
    [call] = explained(target=target).as_dict()["calls"]
    us = call["cost_us"]
    assert us["sdpa"] == {"us": 50.0, "how": MEASURED}
    assert us["flex"] == {"us": pytest.approx(40.0, rel=0.02), "how": f"{SCALED} {H200}"}


def test_times_with_lse_and_without_are_not_compared():
    """A GPU whose own table has no step of training goes by its sibling's, of which each kernel was
    timed with lse."""
    times = timed(H100, altered(SQUARE, lse=True), flex=50.0, reference=40.0)
    both = replace(timed(H100, flex=1.0, reference=90.0), sibling=replace(times, source=H200))
    some = [kernels_of("attention")[name] for name in ("flex", "reference")]
    for problem, us in ((square(lse=True), [50.0, 40.0]), (square(), [1.0, 90.0])):
        assert [cost.us for cost in costs(problem, some, both).values()] == us


def test_scaled_times_are_marked_and_no_measured_ones(cache):
    ship(cache, "h200.json", timed(H200, sdpa=9.0, reference=5.0))
    found = explained(target=Target("cuda", 90, assume=(), gpu=H100))
    assert found.chosen() == ("attention.sdpa",), "a scaled time does not choose the judge"
    where = f"{H200}, the table shipped with attnops, scaled to {H100}"
    assert found.times == f"measured times: {where}"
    for words in ("-> sdpa, 9", "not reference: can run, slower, 5"):
        assert re.search(rf"{words}[.\d]* us scaled from {H200}", str(found)), words


@pytest.mark.parametrize(
    "path", (ROOT / "attnops" / "tables").glob("*.json"), ids=lambda path: path.stem
)
def test_shipped_tables_are_good(path):
    found = from_json(path.read_text())
    assert path.stat().st_size < 100_000 and found.target.startswith("sm") and len(found.grids) > 10
    for grid in found.grids:
        assert set(grid.us) <= set(kernels_of(grid.kind.op)), grid.kind
    own = {
        code
        for _, is_own, code in (text.partition(";attnops==") for text in found.versions.values())
        if is_own
    }
    assert own == {TRITON_CODE}, "measure the tables anew: they do not speak for the Triton kernels"


# Told ---------------------------------------------------------------------------------------------


def test_explain_names_the_table(cache):
    assert explained().times == ""
    measured(sdpa=9.0, reference=5.0)
    found = explained()
    assert found.times == f"measured times: {cpu_name()}, this machine's table"
    assert found.times in str(found)
    ship(cache, "some.json", timed("Some GPU", sdpa=9.0, reference=5.0))
    elsewhere = explained(target="sm90")
    assert elsewhere.times == "measured times: Some GPU, the table shipped with attnops"
    assert elsewhere.chosen() == ("attention.reference",) and explained(target="sm80").times == ""
