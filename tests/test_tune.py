"""`attnops tune`: what is timed, what is left out and why, and the command."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch._dynamo.utils import counters

from attnops.core import kernel as registry_module
from attnops.core.kernel import Capture, Core, Inline, Kernel, Registry, kernels_of, without
from attnops.core.problem import Refusal, Target, altered
from attnops.core.record import FLOATS, check
from attnops.measured import Grid, Sizes, cpu_name, distance, forget, in_force, place, store
from attnops.measured.cost import decodes
from attnops.measured.store import path_for
from attnops.measured.table import from_json
from attnops.ops import OPS
from attnops.ops.attention.timed import DENSE, DENSE_GRADIENT
from attnops.ops.pages.timed import PAGED
from attnops.ops.sweeps import Sweep, decoding, toy
from attnops.testing import check_kernel
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import build, call_of, lengths
from attnops.tune import GRIDS, Stopwatch, clock_for, measure, run, sweeps_of
from attnops.tune.clock import GraphClock, Timed, host_clock
from tests.measuring import table, tables_in, timed

CPU = torch.device("cpu")
KIND = toy(DENSE)
STEP = altered(decoding(toy(PAGED)), page_size=4)
PLAN = Sweep(KIND, (1.0, 2.0), (4.0, 8.0, 16.0), (1.0,))


def needs_plan(p):
    return None if p.step.plan == "host" else Refusal("plan", p.step.plan, "host")


def work(call):
    return torch.zeros(1)


def fails(call):
    raise RuntimeError("no such\nluck")


def runs_out(call):
    raise torch.OutOfMemoryError("too large")


@pytest.fixture
def lab(monkeypatch):
    """A registry of our own: what is added to it is all there is to time."""
    lab = Registry(generation=1 << 40)
    monkeypatch.setattr(registry_module, "_REGISTRY", lab)

    def add(name, run=work, op="attention", **more):
        lab.kernels.setdefault(op, {})[name] = Kernel(
            name, op, run, **{"takes": frozenset({"causal"}), "dtypes": FLOATS, **more}
        )

    return add


def clock_of(us):
    """A clock that takes its times from a function of the kernel's name and the call's tokens."""

    def clock(kernel, call, run):
        batch, queries = call.arguments["query"].shape[:2]
        return us(kernel.name, batch * queries)

    return clock


LINEAR = {"a": 10.0, "b": 12.0, "c": 500.0}


def linear(name, tokens):
    return LINEAR[name] + tokens


def measured(*plans, us=linear, **more):
    """The table and the report of a run with made-up times. more: of the stopwatch."""
    return measure(plans or [PLAN], Stopwatch(clock_of(us), **more), CPU)


# Calls --------------------------------------------------------------------------------------------


def smallest(plan):
    return Sizes(plan.batch[0], plan.queries[0], plan.ratio[0])


PLANS = [
    pytest.param(p, id=f"{name}-{i}-{p.kind.op}")
    for name in GRIDS
    for i, p in enumerate(sweeps_of(name))
    if not OPS[p.kind.op].spec.weights  # tests/test_tune_linears.py has the others
]


@pytest.mark.sweep(20)
@pytest.mark.parametrize("plan", PLANS)
def test_every_timed_call_keeps_the_contract_and_lies_in_its_shape(plan):
    at = smallest(plan)._replace(batch=min(plan.batch[-1], 2.0))
    call = build(plan.kind, *lengths(plan.kind, at), Pool("cpu"))
    check(call.record)
    assert distance(plan.kind, call.problem) == 0
    placed = place(plan.kind, call.problem)
    assert placed.batch == at.batch and placed.queries == pytest.approx(at.queries)
    assert at.ratio <= placed.ratio <= at.ratio * 9 / 8 + plan.kind.page_size / at.queries


def test_a_timed_call_is_right():
    """The tensors lie in one pool and do not overlap: a kernel's results on them are the
    reference's."""
    pool = Pool("cpu")
    for plan in sweeps_of("tiny"):
        q_lens, k_lens = ([5, 5], [5, 5]) if plan.kind.step.sizes_equal else ([3, 2], [7, 3])
        call = build(plan.kind, [1, 1] if decodes(plan.kind) else q_lens, k_lens, pool)
        spans = sorted(
            (t.data_ptr(), t.data_ptr() + t.nbytes)
            for t in call.tensors().values()
            if t.is_floating_point()
        )
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        for name, kernel in kernels_of(call.op).items():
            if not kernel.refusals(call.problem):
                assert check_kernel(kernel, call.map(lambda _, t: t.clone())).worst <= 1, name


def test_pages_lie_in_random_order_and_are_whose_they_should_be():
    call = build(STEP, [1] * 3, [33, 9, 4], Pool("cpu"))
    rows = zip(
        call.arguments["page_table"].tolist(), call.arguments["seq_lens"].tolist(), strict=True
    )
    used = [page for row, length in rows for page in row[: -(-length // 4)]]
    assert sorted(used) == list(range(13)) and used != sorted(used)


def test_a_pool_grows_and_is_dealt_out_again():
    pool = Pool("cpu")
    first, second = (pool.take(count, dtype=torch.float32) for count in (15, 300))
    assert first.data_ptr() != second.data_ptr() and first.std() > 0.3
    pool.reset()
    assert pool.take(7, dtype=torch.float32).data_ptr() == second.data_ptr() - 256 * 4
    assert pool.take(5000, dtype=torch.float8_e4m3fn).float().isfinite().all()


def count(sweeps):
    return sum(sweep.allowed for sweep in sweeps)


def test_plans():
    full, brief = sweeps_of("full"), sweeps_of("brief")
    assert {p.kind.op for p in sweeps_of("full", ("mla_attention",))} == {"mla_attention"}
    assert len({p.kind for p in full}) == len(full), "every shape once"
    assert min(p.allowed for p in full) > 5
    assert count(full) < 4150, "about 30 ms for every point of them"
    window = next(p for p in full if p.kind.page_size and p.kind.rules.window[0] >= 0)
    assert not window.allows(Sizes(64.0, 2048.0, 4096.0)), (
        "what a window does not read must be held"
    )
    assert [p.kind for p in brief] == [p.kind for p in full] and count(brief) < 2050
    for few, all_ in zip(brief, full, strict=True):
        for axis, whole in zip(few.axes, all_.axes, strict=True):
            assert set(axis) <= set(whole) and (axis[0], axis[-1]) == (whole[0], whole[-1])


# Measuring ----------------------------------------------------------------------------------------


def test_what_is_measured_is_in_the_table(lab):
    lab("a")
    lab("b", needs=without("causal"))
    assert measured()[0].grids == (), "one kernel is no choice"
    lab("c")
    lab("inlined", inline=Inline())
    table, report = measured()
    [grid] = table.grids
    assert grid.us["a"] == (14.0, 18.0, 26.0, 18.0, 26.0, 42.0)
    assert grid.us["c"] == (504.0, *(None,) * 5), (
        "eight times slower than the best is not timed at larger sizes"
    )
    assert set(grid.us) == {"a", "c"} and table.gpu == cpu_name() and table.target == "cpu"
    assert set(table.versions) == {"attention.a", "attention.c"}
    assert report.points == 6 and not report.late
    assert report.timings == table.made["timings"] == 7
    assert not measured(names=("a", "b"))[0].grids, "names narrow the field"


def picky(call):
    """Raises at one of the sizes."""
    if call.query.shape[0] == 2:
        raise ValueError("one only")


@pytest.mark.parametrize(
    ("body", "reason", "broken"),
    [
        (fails, "RuntimeError: no such", ["attention.c"]),
        (picky, "ValueError: one only", ["attention.c"]),
        (runs_out, "out of memory", []),
    ],
)
def test_a_kernel_that_fails_is_named_and_trusted_at_no_size(lab, body, reason, broken):
    lab("a")
    lab("b")
    lab("c", body)
    table, report = measured(us=lambda name, tokens: 10.0 + tokens)
    [grid] = table.grids
    assert set(grid.us) == {"a", "b"} and grid.skipped["c"] == reason
    assert [*report.broken] == broken


@pytest.fixture
def now(monkeypatch):
    """The time, a list of one number that tests move on."""
    now = [0.0]
    for clock in ("perf_counter", "monotonic"):
        monkeypatch.setattr(run.time, clock, lambda: now[0])
    return now


def taking(now, *seconds):
    """A body whose calls take so long, the last of `seconds` again and again."""
    left = list(seconds)

    def body(call):
        now[0] += left.pop(0) if len(left) > 1 else left[0]

    return body


def flat(name, tokens):
    return 10.0


def test_a_kernel_that_compiles_at_every_call_is_left_out(lab, now):
    lab("a")
    lab("b")
    lab("slow", taking(now, 5.0))
    lab("once", taking(now, 30.0, 0.0))
    other = replace(PLAN, kind=altered(KIND, causal=False))
    table, _ = measured(PLAN, other, us=flat, first_calls_s=12.0)
    for grid in (
        table.grids
    ):  # half of its sizes were timed in the first: what the others would take is unknown
        assert "slow" not in grid.us
        assert grid.skipped["slow"] == "its first calls took over 12 s"
    # The second size tells that the first one's wait was for all of them.
    assert table.grids[0].us["once"] == (10.0,) * 6


def test_what_is_built_ahead_goes_on():
    stopwatch = Stopwatch(first_calls_s=10.0)

    def given_up(*calls):
        """The kinds that the kernel is not started at, after first calls of some kinds."""
        for kind, first_s in calls:
            stopwatch.first_s.setdefault("k", {}).setdefault(kind, []).append(first_s)
        return {kind for kind in range(1, 6) if stopwatch._given_up("k", kind)}

    assert not given_up((1, 0.1), (2, 0.1), (3, 12.0), (3, 0.1)), "two kinds of three began at once"
    assert given_up((4, 5.0)) == {5}
    assert given_up((4, 5.0)) == {4, 5}
    assert given_up((6, 0.1), (7, 0.1), (8, 0.1), (9, 0.1)) == {4}
    assert given_up((9, 10.0)) == {4, 5}, "three times what it may take"


def test_plans_and_workspaces_are_made_and_their_time_kept_apart(lab, now, monkeypatch):
    lab("a", op="paged_attention")
    lab("planner", op="paged_attention", needs=(needs_plan,))
    lab("hopeless", op="paged_attention", needs=(needs_plan, *without("causal")))
    made = []
    buffers_of = {
        "plan": torch.zeros(4, dtype=torch.int64),
        "workspace": torch.zeros(8, dtype=torch.uint8),
    }

    def equip(kernel, call):
        made.append(kernel.name)
        now[0] += 1.0
        return call.with_(**buffers_of)

    def planned(kernel, call, buffers):
        assert buffers == (*buffers_of.values(),)
        now[0] += 7e-4

    def clock(kernel, call, run):
        return 11.0 if "plan" in call.arguments else 10.0

    monkeypatch.setattr(run, "planned", planned)
    sweep = Sweep(STEP, (1.0, 2.0), (1.0,), (8.0,))
    [grid] = measure([sweep], Stopwatch(clock, equip=equip), CPU)[0].grids
    assert grid.us == {"a": (10.0, 10.0), "planner": (11.0, 11.0)} and set(made) == {"planner"}
    assert grid.plan_us == {"planner": 700.0}, "the plan alone, not its buffers"
    # Nobody makes plans: the kernel is no candidate.
    bare = Stopwatch(clock, equip=lambda kernel, call: call)
    assert measure([sweep], bare, CPU)[0].grids == ()


@pytest.mark.full
def test_a_foreign_call_amid_torch_is_timed_compiled(monkeypatch):
    """On a CPU: the reference of paged attention, said to be lowered in place around a foreign
    call."""
    real = kernels_of("paged_attention")["reference"]
    kernel = replace(real, inline=Inline(core=Core("(Tensor q) -> Tensor", work, work)))
    monkeypatch.setitem(registry_module._REGISTRY.kernels["paged_attention"], "reference", kernel)
    forget()
    try:
        shape, before = sweeps_of("tiny")[2].kind, counters["stats"]["unique_graphs"]
        stopwatch = Stopwatch(clock_for(CPU))
        for q_lens, k_lens in (([1, 1], [7, 5]), ([1, 1, 1], [17, 9, 5])):
            call = build(shape, q_lens, k_lens, Pool("cpu"))
            assert "reference" in [k.name for k, _, _ in stopwatch.candidates(call)]
            assert stopwatch.time(kernel, call, "kind").us
            assert counters["stats"]["unique_graphs"] == before + 1, "sizes are symbolic"
        assert not stopwatch.first_s, "its compilation is not held against it"
        want = call.map(lambda _, t: t.clone())
        real.run(want.record)
        torch.testing.assert_close(run.runner(kernel, call)(), want.arguments["output"])
    finally:
        monkeypatch.undo()
        forget()


def test_the_budget_ends_it(lab, now):
    lab("a")
    lab("b")

    def clock(kernel, call, run):
        now[0] += 1.0
        return 10.0

    plans = [PLAN, replace(PLAN, kind=altered(KIND, causal=False))]
    table, report = measure(plans, Stopwatch(clock), CPU, budget_s=16.0)
    # The first shape may take a good half of it, the second gets the rest: both are there.
    assert report.late == 3
    assert [sum(t is not None for t in g.us["a"]) for g in table.grids] == [6, 3]
    table, report = measure(plans, Stopwatch(clock), CPU, budget_s=12.0)
    assert [g.kind for g in table.grids] == [KIND], "two sizes of six say nothing of the others"
    assert report.late == 5


def test_a_run_that_is_cut_off_leaves_a_table_of_what_it_had(lab):
    lab("a")
    lab("b")
    seen, lines = [], []

    def keep(table):
        seen.append(table)
        if len(seen) == 2:
            raise KeyboardInterrupt

    plans = [replace(PLAN, kind=altered(KIND, q_heads=n)) for n in (4, 8, 16)]
    with pytest.raises(KeyboardInterrupt):
        measure(plans, Stopwatch(clock_of(linear)), CPU, progress=lines.append, keep=keep)
    assert [[g.kind.q_heads for g in t.grids] for t in seen] == [[4], [4, 8]]
    assert seen[-1].versions.keys() == {"attention.a", "attention.b"}
    assert lines[0] == "attention: 1 of 18 sizes" and lines[-1] == "attention: 12 of 18 sizes"


def test_a_call_that_does_not_fit_is_left_out(lab, monkeypatch):
    """The table keeps what was measured before."""
    lab("a")
    lab("b")
    made = []

    def once(*args):
        made.append(args)
        if len(made) == 3:
            raise torch.OutOfMemoryError("too large")
        return call_of(*args)

    monkeypatch.setattr(run, "call_of", once)
    table, report = measured(us=flat)
    assert report.late == 1 and table.grids[0].us["a"] == (10.0, 10.0, None, 10.0, 10.0, 10.0)


def test_a_plan_that_cannot_be_made_leaves_its_kernel_out(lab):
    lab("a")
    lab("b")
    lab("planned", needs=(needs_plan,))
    table, report = measured(equip=lambda kernel, call: fails(call))
    assert set(table.grids[0].us) == {"a", "b"}
    assert report.broken == {"plan of planned": "RuntimeError: no such"}
    assert measured(equip=lambda kernel, call: runs_out(call))[1].late == 6


def test_first_calls_do_not_go_on_for_ever(lab, now):
    lab("a", taking(now, 5.0))
    lab("b", taking(now, 5.0))
    stopwatch = Stopwatch(clock_of(flat), first_calls_s=1e9)
    report = measure([PLAN], stopwatch, CPU, budget_s=20.0)[1]
    assert (report.points, report.late) == (3, 3), (
        "24 seconds hold three sizes of two kernels at five seconds"
    )


def test_kernels_are_called_ahead_at_every_kind_of_size(lab):
    seen = []
    lab("a", run=lambda call: seen.append(call.query.shape[:2]))
    lab("b", run=fails)
    assert run.compile_for([PLAN], ("a",), CPU) == 6 and seen == [
        (b, q) for q in (4, 8, 16) for b in (1, 2)
    ]
    assert run.compile_for([PLAN], ("b",), CPU) == 0
    long = replace(PLAN, queries=(float(1 << 20),))
    assert list(run.kinds(long)) == [], "only small calls"


def test_compiling_ahead_ends():
    """Processes of its own, here with nothing to compile."""
    assert (
        run.compile_ahead("tiny", CPU, ("attention",), ("reference",), workers=1, limit_s=100) > 0
    )
    assert run.compile_ahead("tiny", CPU, (), ("unknown",), workers=1, limit_s=100) == 0


def test_the_host_clock_is_a_median(now):
    taken = iter((9e-3, 2e-3, 2e-3, 3e-3, 1e-3, 2e-3, 5e-3))
    call, sdpa = build(KIND, [4], [4], Pool("cpu")), kernels_of("attention")["sdpa"]

    def waits():
        now[0] += next(taken)

    assert host_clock(sdpa, call, waits) == 2000.0
    count = []

    def slow():
        count.append(1)
        now[0] += 1.0

    host_clock(sdpa, call, slow)
    assert len(count) == 3 and clock_for(CPU) is host_clock, (
        "three at least, and no more of what is slow"
    )


class FakeCuda:
    """Streams and graphs that keep a record; a replay takes 25 us, a launch 100."""

    def __init__(self, monkeypatch):
        self.log, self.capturing, self.uncapturable = [], False, None
        graph = SimpleNamespace(
            capture_begin=self.begin, capture_end=self.end, replay=lambda: self.log.append("replay")
        )
        answers = {"CUDAGraph": graph, "graph_pool_handle": (0, 1)}
        answers |= dict.fromkeys(("Stream", "current_stream", "stream"), MagicMock())
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.log.append("spin"))
        monkeypatch.setattr(pytest.importorskip("triton.testing"), "do_bench", self.do_bench)

    def begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local" and not self.capturing
        self.capturing = True

    def end(self):
        self.capturing = False

    def do_bench(self, run, warmup, rep, return_mode):
        assert return_mode == "all"
        for _ in range(8):
            run()
        return [{"replay": 0.025, "launched": 0.1}[self.log[-1]]] * 3

    def run(self):
        self.log.append("captured" if self.capturing else "launched")
        if self.capturing and self.uncapturable:
            raise self.uncapturable


def test_the_graph_clock_replays_what_it_captured(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    clock = GraphClock("cpu")
    assert clock.launch_us == pytest.approx(25.0)
    sdpa, call = kernels_of("attention")["sdpa"], build(KIND, [4], [4], Pool("cpu"))

    def timed(kernel=sdpa):
        cuda.log.clear()
        return clock(kernel, call, cuda.run), Counter(cuda.log)

    assert timed() == (pytest.approx(25.0), {"launched": 1, "captured": 1, "replay": 8})
    # The device waits once until the host has launched all.
    assert timed(replace(sdpa, capture=Capture.NEVER)) == (
        pytest.approx(100.0),
        {"launched": 8, "spin": 1},
    )
    cuda.uncapturable = RuntimeError("not in a graph")
    assert timed()[0] == pytest.approx(100.0) and not cuda.capturing
    cuda.uncapturable = torch.OutOfMemoryError("too large")
    with pytest.raises(torch.OutOfMemoryError):
        timed()


def test_the_graph_clock_takes_turns(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    clock, steps = GraphClock("cpu"), {"a": Timed(cuda.run), "b": Timed(cuda.run)}
    assert clock.in_turn(steps, rounds=3) == dict.fromkeys("ab", [pytest.approx(25.0)] * 9)
    launched = dict.fromkeys("ab", [pytest.approx(100.0)] * 6)
    assert clock.in_turn(steps, rounds=2, launched=True) == launched
    cuda.uncapturable = ValueError("not in a graph")
    assert clock.in_turn(steps, rounds=2) == launched


def test_a_real_table_of_this_cpu():
    table, report = measure(sweeps_of("tiny"), Stopwatch(clock_for(CPU), first_calls_s=0.5), CPU)
    assert not report.broken
    assert {g.kind.op for g in table.grids} >= {
        "attention",
        "varlen_attention",
        "paged_attention",
        "attention_backward",
        "gated_delta_rule",
        "mamba2_scan",
    }
    assert all(
        "reference" in g.us and {"sdpa", "aten_flash", "aten"} & g.us.keys() for g in table.grids
    )
    assert from_json(table.to_json()) == table


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path):
    with tables_in(tmp_path):
        yield tmp_path


def command(*arguments):
    pytest.importorskip("typer", reason="the extra `cli` brings typer and rich")
    from typer.testing import CliRunner

    from attnops.cli.app import app

    return CliRunner().invoke(app, [str(a) for a in arguments])


def told_of_the_table():
    """What doctor says of it."""
    return json.loads(command("doctor", "--json").stdout)["table"]


def tuned(*arguments):
    result = command("tune", "--grid", "tiny", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_tune_and_doctor(cache):
    assert told_of_the_table() == {"path": None, "shipped": False, "ignored": []}
    assert "attnops tune" in command("doctor", "--all").stdout
    report = tuned("--ops", "attention", "--ops", "paged_attention,varlen_attention")
    assert (
        report["path"] == str(path_for(cpu_name()))
        and report["points"] == 12
        and report["timings"] >= 20
    )
    table = in_force(Target()).table
    assert {g.kind.op for g in table.grids} == {"attention", "paged_attention", "varlen_attention"}
    assert table.digest == report["digest"]
    told = told_of_the_table()
    assert told["path"] == report["path"] and told["gpu"] == cpu_name() and told["sizes"] == 12
    assert not told["other_versions"] and "attention.sdpa" not in told["unmeasured"]
    again = tuned("--ops", "varlen_attention", "--kernels", "sdpa,reference")
    kept = in_force(Target()).table
    assert kept.digest == again["digest"]
    assert kept.grids[:-1] == tuple(g for g in table.grids if g.kind.op != "varlen_attention")
    assert kept.grids[-1].kind.op == "varlen_attention" and set(kept.grids[-1].us) == {
        "sdpa",
        "reference",
    }


def test_ops_that_are_timed_anew_keep_the_others():
    """The forward of a training step is timed with its gradient, and its op's other shapes are
    not."""
    from attnops.cli.tune import joined, without

    def grid(kind, **us):
        return Grid(kind, (1.0,), (8.0,), (1.0,), {name: (time,) for name, time in us.items()})

    def table_of(*grids, version="1"):
        return table(
            *grids, versions={f"{g.kind.op}.{name}": version for g in grids for name in g.us}
        )

    plain = grid(DENSE, a=1.0, b=2.0)
    step = grid(altered(DENSE, lse=True), a=3.0), grid(DENSE_GRADIENT, a=5.0)
    assert without(table_of(plain, *step), ("attention",)).grids == step
    rest = without(table_of(plain, *step), ("attention_backward",))
    assert rest.grids == (plain,) and set(rest.versions) == {"attention.a", "attention.b"}
    assert joined(rest, table_of(*step)).grids == (plain, *step)
    # One version is kept of each kernel, so that times of another are not mistaken for its.
    newer = joined(rest, table_of(*step, version="2"))
    assert newer.grids == (grid(DENSE, b=2.0), *step)
    assert newer.versions == {"attention.a": "2", "attention.b": "1", "attention_backward.a": "2"}
    assert joined(table_of(plain), table_of(plain, version="2")).grids == (plain,), (
        "a shape without times leaves"
    )


def test_doctor_tells_what_a_table_lacks(cache):
    made = timed(sdpa=1.0, reference=2.0)
    store.save(
        replace(made, versions={**made.versions, "attention.sdpa": "torch==1.0"}),
        path_for(cpu_name()),
    )
    told = told_of_the_table()
    assert (
        told["other_versions"]["attention.sdpa"]["timed"] == "torch==1.0"
        and "attention.flex" in told["unmeasured"]
    )
    text = command("doctor", "--all").stdout
    assert "was timed as torch==1.0" in text and "without times: " in text
    path_for(cpu_name()).write_text("{")
    forget()
    assert "no JSON" in told_of_the_table()["ignored"][0]["reason"]
    assert "ignored" in command("doctor", "--all").stdout


def test_tune_writes_where_it_is_told(cache):
    path = cache / "deep" / "table.json"
    tuned("--ops", "paged_attention", "--output", path)
    table = from_json(path.read_text())
    assert table.grids and not path_for(cpu_name()).exists()
    assert table.made["bandwidth_tb_s"] > 0 and table.made["matmul_tflop_s"] > 0


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("ops", "nothing", "ops: got nothing"),
        ("kernels", "fa9,sdpa", "kernels: got fa9"),
        ("kernels", "reference", "kernels: got reference, want two or more"),
        ("grid", "huge", "grid: got 'huge', want full | brief | cpu | tiny"),
        ("budget-s", "0", "budget_s: got 0"),
    ],
)
def test_bad_arguments(cache, option, value, says):
    result = command("tune", "--ops", "attention", "--grid", "tiny", f"--{option}", value)
    assert result.exit_code == 2 and says in result.stderr and "Traceback" not in result.output
    assert not path_for(cpu_name()).exists()
