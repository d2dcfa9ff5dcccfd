"""Measured times: what lies between points, which table is in force, and what selection makes of it."""

import json
import re
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from attnops.core.errors import BadTable
from attnops.core.kernel import Kernel, Package, generation, kernels_of
from attnops.core.problem import Extent, Problem, Target, altered, pretend
from attnops.core.select import select, select_by
from attnops.measured import (
    ESTIMATED,
    MEASURED,
    RATES,
    Grid,
    Sizes,
    Table,
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
from attnops.ops.attention.timed import DENSE
from attnops.ops.pages.timed import PAGED
from attnops.ops.sweeps import decoding, toy
from attnops.tune import sweeps_of
from tests.helpers import ROOT

F32, BF16 = torch.float32, torch.bfloat16
SM90 = Target("cuda", 90, assume=())
STEP, SQUARE = decoding(PAGED), toy(DENSE)


def decode(batch=8, context=4096, **more):
    sizes = {"tokens": batch, "batch": batch, "queries": 1, "context": context}
    given = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "page_size": 16, "causal": True}
    given |= {"dtype": BF16, "kv_dtype": BF16}
    return Problem.of("paged_attention", **{"target": SM90, **given, **{n: Extent.of(x) for n, x in sizes.items()}, **more})


def square(batch=1, length=16, target=None, **more):
    sizes = {"tokens": batch * length, "batch": batch, "queries": length, "context": length}
    given = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "v_head_dim": 16, "causal": True, "sizes_equal": True}
    return Problem.of("attention", **{"target": target or Target(), **given, **{n: Extent.of(x) for n, x in sizes.items()}, **more})


def table(*grids, gpu="Some GPU", target="sm90", versions=None):
    names = {f"{g.kind.op}.{n}": "" for g in grids for n in g.us}
    return Table(gpu, target, names if versions is None else versions, grids, {"date": "2026-01-01"})


def cpu_table(**us):
    """Times of CPU kernels of square dense calls, by this machine's versions."""
    kernels = kernels_of("attention")
    grid = Grid(SQUARE, (1.0, 4.0), (8.0, 32.0), (1.0,), {n: tuple(t * x for x in (1, 2, 3, 4)) for n, t in us.items()})
    return table(grid, gpu=cpu_name(), target="cpu", versions={f"attention.{n}": version_of(kernels[n]) for n in us})


def kernel(name, cost=1.0, **more):
    return Kernel(name, "paged_attention", lambda call: None, cost_us=lambda p: cost, **more)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of our own and no shipped tables."""
    monkeypatch.setenv("ATTNOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


# Between the points ---------------------------------------------------------------------------------------------------

AXIS = st.lists(st.integers(1, 4096), min_size=1, max_size=4, unique=True).map(lambda xs: tuple(float(x) for x in sorted(xs)))
STEPS = st.floats(0.0, 50.0)


@st.composite
def growing(draw):
    """A grid whose times grow along every axis."""
    axes = [draw(AXIS) for _ in range(3)]
    parts = [[draw(STEPS) for _ in axis] for axis in axes]
    total = 5.0
    us = []
    for i in range(len(axes[0])):
        for j in range(len(axes[1])):
            for k in range(len(axes[2])):
                us.append(total + sum(parts[0][: i + 1]) + sum(parts[1][: j + 1]) + sum(parts[2][: k + 1]))
    return Grid(STEP, *axes, {"k": tuple(us)})


SIZE = st.floats(0.25, 20_000)


@given(growing())
def test_at_the_points_times_are_what_was_measured(grid):
    for sizes, us in zip(grid.points(), grid.us["k"], strict=True):
        assert grid.at("k", sizes) == pytest.approx(us)


@given(growing(), SIZE, SIZE, SIZE, st.floats(1.0, 8.0), st.sampled_from(["batch", "queries", "ratio"]))
def test_times_grow_with_every_size(grid, batch, queries, ratio, factor, axis):
    small = Sizes(batch, queries, ratio)
    large = small._replace(**{axis: getattr(small, axis) * factor})
    a, b = grid.at("k", small), grid.at("k", large)
    assert a is not None and b is not None and 0 < a <= b * (1 + 1e-9)


def test_between_the_points():
    grid = Grid(STEP, (1.0, 3.0), (4.0, 16.0), (10.0, 20.0), {"k": (1.0, 2.0, 4.0, 8.0, 11.0, 22.0, 44.0, 88.0)})
    assert grid.at("k", Sizes(2, 4, 10)) == pytest.approx(6)
    assert grid.at("k", Sizes(1, 4, 15)) == pytest.approx(1.5)
    assert grid.at("k", Sizes(1, 8, 10)) == pytest.approx(1 + 3 * 4 / 12, rel=0.02), "four of the twelve added queries, each as many bytes"
    assert grid.at("k", Sizes(1, 4, 30)) == pytest.approx(3), "on along the line"
    assert grid.at("k", Sizes(1, 28, 10)) == pytest.approx(7, rel=0.02)
    assert grid.at("k", Sizes(1, 160, 10)) > 4 + 3 * 144 / 12, "many queries wait for the products"
    assert grid.at("k", Sizes(0.5, 1, 1)) == pytest.approx(1), "the first point"
    assert grid.at("other", Sizes(1, 4, 10)) is None


def test_one_point_is_scaled_with_the_work():
    grid = Grid(STEP, (2.0,), (1.0,), (100.0,), {"k": (10.0,)})
    assert grid.at("k", Sizes(6, 1, 200)) == pytest.approx(60) and grid.at("k", Sizes(1, 1, 50)) == pytest.approx(10)
    prompt = Grid(SQUARE, (1.0,), (64.0,), (1.0,), {"k": (10.0,)})
    assert prompt.at("k", Sizes(1, 128, 1)) == pytest.approx(40)


def test_noise_does_not_turn_into_a_falling_line():
    grid = Grid(STEP, (1.0, 2.0), (1.0,), (1.0,), {"k": (11.0, 10.0)})
    assert grid.at("k", Sizes(100, 1, 1)) == pytest.approx(10)


def test_missing_points_follow_their_smaller_neighbours():
    us = {"a": (10.0, None, None, None), "b": (20.0, None, None, None), "never": (None,) * 4, "late": (None, None, 7.0, 9.0)}
    grid = Grid(STEP, (1.0, 4.0), (1.0,), (100.0, 200.0), us)
    large = Sizes(4, 1, 200)
    assert grid.at("a", large) == pytest.approx(80)
    assert grid.at("b", large) / grid.at("a", large) == pytest.approx(2), "kernels keep their order"
    assert grid.at("never", large) is None
    assert grid.at("late", Sizes(1, 1, 100)) == pytest.approx(7)


# Shapes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "speaks"),
    [
        ({}, True),
        ({"q_heads": 40}, True),
        ({"dtype": torch.float16, "kv_dtype": torch.float16}, True),
        ({"page_size": 256}, True),
        ({"plan": "host"}, True),
        ({"lse": True}, True),
        ({"softcap": True}, True),
        ({"head_dim": 96, "v_head_dim": 96}, True),
        ({"head_dim": 512, "v_head_dim": 512}, False),
        ({"dtype": F32, "kv_dtype": F32}, False),
        ({"kv_dtype": torch.float8_e4m3fn}, False),
        ({"mask": "bool"}, False),
        ({"window": (127, -1)}, False),
        ({"queries": Extent.of(4)}, False),
        ({"op": "mla_attention", "rope_dim": 64}, False),
        ({"dtype": None}, False),
    ],
    ids=str,
)
def test_a_shape_speaks_for_its_neighbours(change, speaks):
    found = distance(STEP, altered(decode(), **change))
    assert (found < float("inf")) == speaks
    same = ({}, {"dtype": torch.float16, "kv_dtype": torch.float16}, {"plan": "host"})
    assert (found == 0) == (change in same)


def test_a_forward_that_is_trained_has_shapes_of_its_own():
    """Kernels that return no lse do not compete there; calls without lse never go by such a shape."""
    plain, trained = SQUARE, altered(SQUARE, lse=True)
    call = altered(square(), lse=True)
    assert distance(trained, call) == 0 < distance(plain, call) < float("inf") == distance(trained, square())
    assert table(Grid(plain, (1.0,), (16.0,), (1.0,), {}), Grid(trained, (1.0,), (16.0,), (1.0,), {})).nearest(call)[0].kind == trained


def test_dense_calls_with_and_without_a_mask_to_write_out():
    assert distance(SQUARE, square()) == 0
    assert distance(SQUARE, altered(square(), sizes_equal=False)) == float("inf")
    assert distance(altered(SQUARE, causal=False), altered(square(), causal=False, sizes_equal=False)) == 0


DIFFERENCES = {
    "window": ({"window": (127, 0)}, {"window": (127, -1)}, {"window": (1023, -1)}),
    "sinks": ({"sinks": True}, {"sinks": True}, {}),
    "softcap": ({"softcap": True}, {"softcap": True}, {}),
    "kv_heads": ({"q_heads": 8, "kv_heads": 2}, {"q_heads": 8, "kv_heads": 2}, {}),
    "group": ({"q_heads": 8}, {"q_heads": 8}, {}),
    "page_size": ({"page_size": 64}, {"page_size": 64}, {}),
    "head_dim": ({"head_dim": 96}, {"head_dim": 96}, {}),
    "v_head_dim": ({"v_head_dim": 96}, {"v_head_dim": 96}, {}),
}


@pytest.mark.parametrize(("change", "same", "other"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_every_difference_counts_in_the_distance(change, same, other):
    """Of two shapes the one that differs in nothing is asked, wherever it stands in the table."""
    problem, near, far = altered(decode(), **change), altered(STEP, **same), altered(STEP, **other)
    assert distance(near, problem) == 0 < distance(far, problem) < float("inf")
    for shapes in ((near, far), (far, near)):
        found = table(*(Grid(s, (1.0,), (1.0,), (1.0,), {"k": (1.0,)}) for s in shapes)).nearest(problem)
        assert found is not None and found[0].kind == near


def test_the_nearest_shape_is_asked():
    near = [altered(STEP, q_heads=8 * g) for g in (1, 4, 8)] + [altered(STEP, page_size=256), altered(STEP, head_dim=64, v_head_dim=64)]
    grids = [Grid(s, (1.0,), (1.0,), (1.0,), {"k": (1.0,)}) for s in near]
    for problem, shape in (
        (decode(), near[1]),
        (decode(q_heads=64), near[2]),
        (decode(q_heads=56), near[2]),
        (decode(page_size=128), near[3]),
        (decode(head_dim=64, v_head_dim=64), near[4]),
    ):
        found = table(*grids).nearest(problem)
        assert found is not None and found[0].kind == shape, problem
    assert table(*grids).nearest(square()) is None and table().nearest(decode()) is None


def test_heads_count_as_requests():
    assert place(STEP, decode(8, 4096)) == Sizes(8, 1, 4096)
    assert place(STEP, decode(8, 4096, q_heads=64, kv_heads=16)) == Sizes(16, 1, 4096)
    assert place(STEP, decode(8, 4096, head_dim=64, v_head_dim=64)) == Sizes(4, 1, 4096)
    assert place(STEP, decode(1, 4096, q_heads=8, kv_heads=2)) == Sizes(1, 1, 1024), "less than a request is one with fewer keys"
    more = {"tokens": Extent.of(64), "queries": Extent.of(32), "batch": 4, "context": 1024}
    assert sizes_of(decode(**more)) == Sizes(4, 16, 32), "requests are smaller copies of the longest"
    assert place(PAGED, decode(**more, q_heads=64)) == Sizes(4, 32, 16), "heads of a group count as queries"
    assert place(SQUARE, square(4, 16, q_heads=8, kv_heads=4)) == Sizes(8, 16, 1)
    assert place(SQUARE, square(1, 64, q_heads=1, kv_heads=1)) == Sizes(1, 32, 1)


def test_work():
    found = work(STEP, Sizes(2, 1, 100))
    assert found.bytes == 2 * (100 * 8 * 256 * 2 + 32 * 256 * 2)
    assert found.flops == 2 * 2 * 100 * 32 * 256
    assert work(altered(STEP, window=(9, -1)), Sizes(2, 1, 100)).flops == found.flops / 10
    assert work(SQUARE, Sizes(1, 100, 1)).flops == 2 * (100 * 101 / 2) * 4 * 32


@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 50), (7, 50), (50, 50), (43, 50), (50, 7), (2, 1)])
@pytest.mark.parametrize("window", [-1, 0, 4, 6, 42, 49, 80])
def test_work_of_a_window(queries, keys, window):
    seen = sum(max(0, keys - at if window < 0 else min(keys - at, window + 1)) for at in range(queries))
    found = work(altered(SQUARE, window=(window, -1)), Sizes(3, queries, keys / queries)).flops
    assert found == pytest.approx(3 * 2 * seen * 4 * 32)


# Costs ----------------------------------------------------------------------------------------------------------------

GRID = Grid(STEP, (1.0, 16.0), (1.0,), (1000.0, 5000.0), {"fast": (10.0, 20.0, 30.0, 110.0), "slow": (90.0, 300.0, 900.0, 5000.0)})


def test_measured_times_rank_measured_kernels():
    found = costs(decode(16, 5000), (kernel("fast", 1e6), kernel("slow", 0.0)), table(GRID))
    assert {n: c.how for n, c in found.items()} == {"fast": MEASURED, "slow": MEASURED}
    # Selection knows the context up to an eighth.
    assert 110 <= found["fast"].us <= 110 * 9 / 8 and found["fast"].us < found["slow"].us


@pytest.mark.parametrize("promise", [0.0, 1.0, 5.0])
def test_an_optimistic_formula_does_not_win(promise):
    for problem in (decode(1, 1000), decode(16, 5000), decode(4, 2000)):
        found = costs(problem, (kernel("fast"), kernel("newcomer", promise)), table(GRID))
        assert found["newcomer"].how == UNMEASURED and found["newcomer"].us > found["fast"].us


def test_an_unmeasured_kernel_wins_over_a_slow_fallback_alone():
    found = costs(decode(16, 5000), (kernel("slow"), kernel("newcomer", 120.0)), table(GRID))
    assert found["newcomer"] == (HANDICAP * 120.0, UNMEASURED) and found["newcomer"].us < found["slow"].us


def test_what_no_table_covers_is_estimated():
    kernels = (kernel("a", 3.0), kernel("b", 2.0))
    for given_table in (None, table(), table(GRID)):
        assert costs(decode(), kernels, given_table) == {"a": (3.0, ESTIMATED), "b": (2.0, ESTIMATED)}
    assert costs(decode(mask="bool"), (kernel("fast", 3.0),), table(GRID)) == {"fast": (3.0, ESTIMATED)}


def test_another_version_is_not_what_was_timed():
    package = Package("hypothesis", ("hypothesis",))
    timed = table(GRID, versions={"paged_attention.fast": "hypothesis==0.1", "paged_attention.slow": version_of(kernel("slow"))})
    fast, here = kernel("fast", 7.0, packages=(package,)), Target("cuda", 90, gpu="Some GPU")
    assert not timed.speaks_for(fast, here) and timed.speaks_for(kernel("slow"), here)
    assert timed.speaks_for(fast, Target("cuda", 90, assume=("hypothesis",))), "a target that assumes its packages has the table's"
    found = costs(decode(target=here), (fast, kernel("slow")), timed)
    assert found["fast"].how == UNMEASURED and found["slow"].how == MEASURED
    assert version_of(fast) == f"hypothesis=={package.version()}"
    assert version_of(kernel("x")) == f"torch=={'.'.join(torch.__version__.split('.')[:2])}"


# The file -------------------------------------------------------------------------------------------------------------


def full():
    us = {"a": (1.0, None, 3.25, 4000.0), "b": (2.0, None, None, None)}
    grid = Grid(altered(STEP, sinks=True), (1.0, 2.0), (1.0,), (100.0, 200.5), us, {"a": 700.0}, {"c": "why"})
    return table(GRID, grid)


def test_a_table_is_its_file():
    first = full()
    again = from_json(first.to_json())
    assert again == first and again.digest == first.digest and hash(again) == hash(first)
    assert again.grids == first.grids and again.versions == first.versions and again.made == first.made
    other = replace(first, grids=first.grids[:1])
    assert other != first and other.digest != first.digest
    assert len(first.to_json().splitlines()) < 30 and '"ratio":[100,200.5]' in first.to_json()
    assert '"b":[2]' in first.to_json()


def test_a_kind_is_what_is_written_of_it():
    """The fields that differ from a Problem's defaults; sizes that are left open are not said."""
    for sweep in sweeps_of("full"):
        written = json.loads(json.dumps(leaves_of(sweep.kind)))
        assert kind_of(written) == sweep.kind and written["op"] == sweep.kind.op
    assert leaves_of(SQUARE) == {
        "op": "attention", "q_heads": 4, "kv_heads": 2, "head_dim": 16, "causal": True, "sizes_equal": True,
    }  # fmt: skip
    assert leaves_of(STEP)["queries"] == 1 and leaves_of(STEP)["dtype"] == "bfloat16"


def test_a_table_of_the_format_before_says_what_to_do():
    old = json.loads(full().to_json()) | {"format": 1}
    with pytest.raises(BadTable, match="format: got 1, want 2: run `attnops tune` again"):
        from_json(json.dumps(old))


def damaged():
    good = json.loads(full().to_json())

    def changed(change):
        data = json.loads(json.dumps(good))
        change(data)
        return json.dumps(data)

    first = lambda d: d["grids"][0]  # noqa: E731
    return {
        "empty": "",
        "cut": full().to_json()[:-30],
        "no object": "[1, 2]",
        "null": "null",
        "other format": changed(lambda d: d.update(format=99)),
        "no format": changed(lambda d: d.pop("format")),
        "no grids": changed(lambda d: d.pop("grids")),
        "no gpu": changed(lambda d: d.pop("gpu")),
        "grids no list": changed(lambda d: d.update(grids=3)),
        "unknown field of a shape": changed(lambda d: first(d)["problem"].update(colour="red")),
        "a target of a shape": changed(lambda d: first(d)["problem"].update(target="sm90")),
        "window of one side": changed(lambda d: first(d)["problem"].update(window=[127])),
        "window of words": changed(lambda d: first(d)["problem"].update(window=["a", "b"])),
        "asks for no names": changed(lambda d: first(d)["problem"].update(asks=[3])),
        "sizes of no number": changed(lambda d: first(d)["problem"].update(queries="1")),
        "a bool for a number": changed(lambda d: first(d)["problem"].update(page_size=True)),
        "wrong type in a shape": changed(lambda d: first(d)["problem"].update(q_heads="many")),
        "no such dtype": changed(lambda d: first(d)["problem"].update(dtype="nn")),
        "no heads": changed(lambda d: first(d)["problem"].update(kv_heads=0)),
        "too many times": changed(lambda d: first(d)["us"]["fast"].append(1.0)),
        "negative time": changed(lambda d: first(d)["us"]["fast"].__setitem__(0, -1.0)),
        "zero time": changed(lambda d: first(d)["us"]["fast"].__setitem__(0, 0)),
        "endless time": changed(lambda d: first(d)["us"]["fast"].__setitem__(0, float("inf"))),
        "no number": changed(lambda d: first(d)["us"]["fast"].__setitem__(0, "x")),
        "falling axis": changed(lambda d: first(d).update(batch=[16, 1])),
        "empty axis": changed(lambda d: first(d).update(queries=[])),
        "axis below one": changed(lambda d: first(d).update(ratio=[0, 5])),
    }


@pytest.mark.parametrize("text", damaged().values(), ids=damaged())
def test_a_damaged_file_is_reported_and_ignored(text, cache):
    with pytest.raises(BadTable, match=r"got .*, want"):
        from_json(text)
    path = path_for(cpu_name())
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = in_force(Target())
    assert found.table is None and [p for p, _ in found.ignored] == [path]
    assert select(square()).costs["sdpa"].how == ESTIMATED


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: p.write_bytes(b"\xff\xfe"), lambda p: p.write_text("[" * 200_000)])
def test_what_is_no_file_of_text(make, cache):
    path = path_for(cpu_name())
    path.parent.mkdir(parents=True)
    make(path)
    assert in_force(Target()).table is None and in_force(Target()).ignored


def test_writing_is_all_or_nothing(cache, monkeypatch):
    path = path_for(cpu_name())
    save(cpu_table(sdpa=1.0, reference=2.0), path)
    before = path.read_text()

    def full_disk(*_):
        raise OSError("no space left")

    for broken in ("replace", "fsync"):
        with monkeypatch.context() as m:
            m.setattr(store.os, broken, full_disk)
            with pytest.raises(OSError, match="no space"):
                save(cpu_table(sdpa=2.0, reference=1.0), path)
        assert path.read_text() == before and [p.name for p in path.parent.iterdir()] == [path.name]


# In force -------------------------------------------------------------------------------------------------------------


def test_selection_follows_the_table(cache):
    assert select(square()).kernel.name == "sdpa"
    for sdpa, reference, chosen in ((9.0, 5.0, "reference"), (5.0, 9.0, "sdpa")):
        before = generation()
        save(cpu_table(sdpa=sdpa, reference=reference), path_for(cpu_name()))
        decision = select(square())
        assert generation() > before and decision.kernel.name == chosen
        assert decision.costs[chosen] == (pytest.approx(5.0, rel=0.8), MEASURED)
        assert f"-> {chosen}, measured" in str(decision)
    assert "not reference: can run, measured slower" in str(decision)
    assert "not flex: can run, not measured, others are" in str(decision)
    assert select(square(), "prefer=flex").kernel.name == "flex"
    assert select_by(None, square()).costs["sdpa"].how == ESTIMATED


def test_eager_calls_follow_the_table(cache, monkeypatch):
    import attnops

    ran = []
    for name in ("sdpa", "reference"):
        found = kernels_of("attention")[name]
        spied = wraps(found.run)(lambda *a, name=name, run=found.run, **k: (ran.append(name), run(*a, **k))[1])
        spy = replace(found, run=spied)
        monkeypatch.setitem(attnops.core.kernel._REGISTRY.kernels["attention"], name, spy)
    forget()
    q, k = torch.randn(1, 16, 4, 16), torch.randn(1, 16, 2, 16)
    attnops.attention(q, k, k, causal=True)
    save(cpu_table(sdpa=9.0, reference=5.0), path_for(cpu_name()))
    attnops.attention(q, k, k, causal=True)
    assert ran == ["sdpa", "reference"]


def test_the_cache_key_follows_the_table(cache):
    from attnops.lowering import cache_key

    keys = [cache_key.choice_inputs()]
    for sdpa in (1.0, 2.0):
        save(cpu_table(sdpa=sdpa, reference=5.0), path_for(cpu_name()))
        keys.append(cache_key.choice_inputs())
    assert len(set(keys)) == 3
    path_for(cpu_name()).unlink()
    forget()
    assert cache_key.choice_inputs() == keys[0]


def ship(cache, name, text):
    (cache / "shipped" / name).write_text(text)
    forget()


def test_which_table(cache):
    here, named = Target("cuda", 90, gpu="Some GPU"), Target.parse("sm90", assume=("sgl_kernel",))
    ship(cache, "some.json", table(GRID).to_json())
    ship(cache, "other.json", table(GRID, gpu="Other GPU", target="sm100").to_json())
    for target in (here, named, Target("cuda", 90)):
        assert in_force(target).table == table(GRID) and in_force(target).shipped
    assert in_force(Target("cuda", 80, gpu="Third GPU")).table is None, "a GPU of another arch"
    assert in_force(Target.parse("sm80", assume=())).table is None
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


H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def test_a_sibling_is_served_by_scaled_times(cache):
    """On an H100 bytes take 1.42 times as long and products as long; a launch is a launch."""
    steps = Grid(STEP, (1.0, 256.0), (1.0,), (256.0, 65536.0), {"lean": (10.0, 90.0, 90.0, None), "light": (5.0, 95.0, 95.0, 20_000.0)})
    prompts = Grid(SQUARE, (1.0, 64.0), (512.0, 8192.0), (1.0,), {"lean": (10.0, 300.0, 600.0, 20_000.0)})
    made = table(steps, prompts, gpu=H200)
    ship(cache, "h200.json", made.to_json())
    found = in_force(Target("cuda", 90, gpu=H100))
    assert found.shipped and (found.table.gpu, found.table.source) == (H100, H200)
    decode_us, prompt_us = (g.us for g in found.table.grids)
    bytes_us = [work(STEP, at).bytes / 1e6 for at in steps.points()]
    longer = [x / RATES[H100].bandwidth - x / RATES[H200].bandwidth for x in bytes_us]
    assert decode_us["lean"] == (pytest.approx(10, rel=0.02), *(pytest.approx(90 + x) for x in longer[1:3]), None)
    assert decode_us["light"][1:] == tuple(pytest.approx(t + x) for t, x in zip((95, 95, 20_000), longer[1:], strict=True))
    assert prompt_us["lean"][3] == pytest.approx(20_000, rel=0.02), "as many operations a second"
    assert found.table.digest != made.digest and from_json(made.to_json()).source == ""
    # Of a GPU whose rates are not known the order is all that is known.
    other = in_force(Target("cuda", 90, gpu="NVIDIA H9000")).table
    assert [g.us for g in other.grids] == [g.us for g in made.grids] and other.source == H200
    assert in_force(Target("cuda", 90, gpu=H200)).table == made and in_force(Target.parse("sm90", assume=())).table == made
    assert in_force(Target("cuda", 100, gpu="NVIDIA B200")).table is None and in_force(Target("cpu", 0)).table is None


def test_the_nearest_sibling_serves_and_a_table_of_its_own_wins(cache):
    for gpu in (H200, H100, "NVIDIA H77"):
        ship(cache, f"{gpu.split()[1].lower()}.json", table(GRID, gpu=gpu).to_json())

    def source(gpu):
        return in_force(Target("cuda", 90, gpu=gpu)).table.source

    assert [source(g) for g in ("NVIDIA GH200 144G HBM3e", "NVIDIA H800", "NVIDIA H100 PCIe", "NVIDIA H9000")] == [H200, H100, H100, H200]
    assert [source(g) for g in (H200, H100, "NVIDIA H77")] == ["", "", ""]
    assert in_force(Target.parse("sm90", assume=())).table.gpu == H200, "which speaks for the arch"
    save(table(GRID, gpu="NVIDIA H800"), path_for("NVIDIA H800"))
    assert source("NVIDIA H800") == "" and not in_force(Target("cuda", 90, gpu="NVIDIA H800")).shipped


def test_a_sibling_speaks_for_kernels_without_a_time(cache):
    """A GPU's own times come first. Its sibling's, scaled, serve kernels and ops that its own table has not."""
    import attnops

    kernels = kernels_of("attention")
    versions = {f"attention.{n}": version_of(kernels[n]) for n in ("sdpa", "flex")}
    own = Grid(SQUARE, (1.0,), (16.0,), (1.0,), {"sdpa": (50.0,)})
    both = Grid(SQUARE, (1.0,), (16.0,), (1.0,), {"sdpa": (5.0,), "flex": (40.0,)})
    ship(cache, "h100.json", table(own, gpu=H100, versions=versions).to_json())
    alone = in_force(Target("cuda", 90, gpu=H100)).table
    ship(cache, "h200.json", table(both, gpu=H200, versions=versions).to_json())
    target = Target("cuda", 90, assume=(), gpu=H100)
    found = in_force(target).table
    assert (found.gpu, found.source, found.sibling.source) == (H100, "", H200) and found.digest != alone.digest
    assert found.to_json() == alone.to_json(), "what another GPU measured is not written into a GPU's own table"
    q, k = torch.randn(1, 16, 4, 16), torch.randn(1, 16, 2, 16)
    explained = attnops.explain(lambda: attnops.attention(q, k, k, causal=True), target=target, quiet=True)
    costs_us = explained.as_dict()["calls"][0]["cost_us"]
    assert (costs_us["sdpa"]["us"], costs_us["sdpa"]["how"]) == (50.0, MEASURED)
    assert costs_us["flex"]["us"] == pytest.approx(40.0, rel=0.02) and costs_us["flex"]["how"] == f"{SCALED} {H200}"


def test_times_with_lse_and_without_are_not_compared(cache):
    """A GPU whose own table has no step of training goes by its sibling's, of which each kernel was timed with lse."""
    kernels = kernels_of("attention")
    versions = {f"attention.{n}": version_of(kernels[n]) for n in ("flex", "reference")}
    plain, trained = SQUARE, altered(SQUARE, lse=True)
    own = table(Grid(plain, (1.0,), (16.0,), (1.0,), {"flex": (1.0,), "reference": (90.0,)}), gpu=H100, versions=versions)
    times = Grid(trained, (1.0,), (16.0,), (1.0,), {"flex": (50.0,), "reference": (40.0,)})
    both = replace(own, sibling=replace(table(times, gpu=H100, versions=versions), source=H200))
    some = [kernels["flex"], kernels["reference"]]
    assert {n: c.us for n, c in costs(altered(square(), lse=True), some, both).items()} == {"flex": 50.0, "reference": 40.0}
    assert {n: c.us for n, c in costs(square(), some, both).items()} == {"flex": 1.0, "reference": 90.0}


def test_scaled_times_are_marked_and_no_measured_ones(cache):
    import attnops

    kernels = kernels_of("attention")
    versions = {f"attention.{n}": version_of(kernels[n]) for n in ("sdpa", "reference")}
    grid = Grid(SQUARE, (1.0,), (16.0,), (1.0,), {"sdpa": (9.0,), "reference": (5.0,)})
    ship(cache, "h200.json", table(grid, gpu=H200, versions=versions).to_json())
    q, k = torch.randn(1, 16, 4, 16), torch.randn(1, 16, 2, 16)
    target = Target("cuda", 90, assume=(), gpu=H100)
    found = attnops.explain(lambda: attnops.attention(q, k, k, causal=True), target=target, quiet=True)
    assert found.chosen() == ("attention.sdpa",), "a scaled time does not choose the judge"
    assert found.times == f"measured times: {H200}, the table shipped with attnops, scaled to {H100}"
    for words in ("-> sdpa, 9", "not reference: can run, slower, 5"):
        assert re.search(rf"{words}[.\d]* us scaled from {H200}", str(found)), words
    assert found.as_dict()["calls"][0]["cost_us"]["sdpa"]["how"] == f"{SCALED} {H200}"


def test_the_cache_key_knows_of_a_sibling(cache):
    from attnops.lowering import cache_key

    keys = []
    for us in (1.0, 2.0):
        ship(cache, "h200.json", table(replace(GRID, us={"fast": (us,) * len(GRID.us["fast"])}), gpu=H200).to_json())
        for gpu in (H200, H100):
            with pretend(Target("cuda", 90, gpu=gpu)):
                keys.append(cache_key.choice_inputs())
    assert len(set(keys)) == 4


def test_a_named_cpu_has_no_table(cache):
    save(cpu_table(sdpa=9.0, reference=5.0), path_for(cpu_name()))
    assert in_force(Target()).table is not None
    assert in_force(Target.parse("cpu", assume=())).table is None


def test_shipped_tables_are_good():
    for path in (ROOT / "attnops" / "tables").glob("*.json"):
        found = from_json(path.read_text())
        assert path.stat().st_size < 100_000, path
        assert found.target.startswith("sm") and len(found.grids) > 10
        for grid in found.grids:
            assert set(grid.us) <= set(kernels_of(grid.kind.op)), grid.kind
        own = {text.partition(";attnops==")[2] for text in found.versions.values() if ";attnops==" in text}
        assert own == {TRITON_CODE}, "measure the tables anew: they do not speak for the Triton kernels"


def test_a_gpu_says_its_name(monkeypatch):
    from attnops.core import problem

    answers = {"is_available": True, "get_device_capability": (9, 0), "get_device_properties": SimpleNamespace(name="Some GPU")}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    problem._target_of.cache_clear()
    try:
        assert Target.of(torch.device("cuda", 0)) == Target("cuda", 90, gpu="Some GPU")
    finally:
        problem._target_of.cache_clear()


# Told -----------------------------------------------------------------------------------------------------------------


def test_explain_names_the_table(cache):
    import attnops

    q, k = torch.randn(1, 16, 4, 16), torch.randn(1, 16, 2, 16)

    def explained(**more):
        return attnops.explain(lambda: attnops.attention(q, k, k, causal=True), quiet=True, **more)

    assert explained().times == "" and explained().as_dict()["times"] == ""
    save(cpu_table(sdpa=9.0, reference=5.0), path_for(cpu_name()))
    found = explained()
    assert found.times == f"measured times: {cpu_name()}, this machine's table" and found.times in str(found)
    assert found.as_dict()["calls"][0]["cost_us"]["reference"]["how"] == MEASURED
    kernels = kernels_of("attention")
    versions = {f"attention.{n}": version_of(kernels[n]) for n in ("sdpa", "reference")}
    grid = Grid(SQUARE, (1.0,), (16.0,), (1.0,), {"sdpa": (9.0,), "reference": (5.0,)})
    ship(cache, "some.json", table(grid, versions=versions).to_json())
    elsewhere = explained(target="sm90")
    assert elsewhere.times == "measured times: Some GPU, the table shipped with attnops"
    assert explained(target="sm80").times == "" and elsewhere.chosen() == ("attention.reference",)
    with pretend(Target("cuda", 80)):
        assert select(square(target=Target("cuda", 80))).costs["sdpa"].how == ESTIMATED
