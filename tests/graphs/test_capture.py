"""What a capture of many buckets does once, and what it does for each: counted, not timed."""

from contextlib import contextmanager

import pytest
import torch
from torch._inductor import config
from torch._inductor.graph import GraphLowering

from attnops.graphs import Buckets, breakable, eager_capture, piecewise, traced
from tests.graphs.helpers import Pair, both_modes, buckets_of, close, graphed
from tests.graphs.standin import StandIn

BUCKETS = Buckets(decode=(1, 2, 4, 8), tokens=(16, 32), requests=8)
SIX = len(BUCKETS.all())


class Counting(StandIn):
    """outer: sessions that lie in no other. inner: those that do. warm_runs: those before
    captures."""

    def __init__(self, *given):
        super().__init__(*given)
        self.depth = self.outer = self.inner = self.warm_runs = 0

    @contextmanager
    def session(self):
        self.outer, self.inner = self.outer + (self.depth == 0), self.inner + (self.depth > 0)
        self.depth += 1
        try:
            with super().session():
                yield
        finally:
            self.depth -= 1

    def warm(self, run):
        self.warm_runs += 1
        super().warm(run)


def rows_of(mode, device, forward=lambda x: x * 2, sizes=(1, 2, 4, 8), **more):
    return graphed(mode, forward, Buckets(tokens=sizes), tokens=("x",), graphs=device, **more)


def test_a_model_that_is_set_up_by_its_second_run():
    """What that reads of data is none of the capture's."""

    class Model(torch.nn.Module):
        runs = 0

        def forward(self, x):
            self.runs += 1
            if self.runs == 2:
                self.most = float(x.max().item())
            return x + 1

    step = rows_of(breakable, StandIn(), Model(), sizes=(4,))
    close(step(torch.ones(4)), torch.full((4,), 2.0))
    assert step.captured == 1


@pytest.mark.sweep(2)
@both_modes
def test_all_buckets_share_a_session_and_what_was_compiled(mode, monkeypatch):
    device, prepared = Counting(), []
    pair = Pair(mode, BUCKETS, layers=2)
    runner, real = pair.step.runner, pair.step.runner.prepare
    monkeypatch.setattr(
        runner,
        "prepare",
        lambda step, bucket, given: prepared.append(bucket.trace) or real(step, bucket, given),
    )
    pair.step.graphs = pair.device = device
    report = pair.step.capture(**(given := pair.example("ab")))
    assert len(report.rows) == SIX and sorted(prepared) == ["decode", "mixed"]
    # One for each kind, which is compiled, and one for all captures.
    assert (device.outer, device.inner, device.warm_runs) == (3, SIX, SIX)
    if mode is piecewise:
        assert pair.step.runner.traces == {"decode": 1, "mixed": 1}
    pair.agree("cd")
    pair.step.capture(**given)
    assert device.outer == 3, "nothing was left to capture"


def test_a_size_told_apart_is_one_more_trace_and_none_of_its_need():
    """A run that compiles is none to take memory by: what is compared with a budget is what the
    bucket takes."""
    device, compiled = Counting(), []

    def inner(module, examples):
        compiled.append(module)
        return module

    needs = []
    device.need = lambda: needs.append(len(compiled)) or 0
    step = rows_of(
        piecewise,
        device,
        lambda x: x * (2 if x.shape[0] > 1 else 3),
        one_differs=True,
        inner=inner,
        budget_bytes=1 << 30,
    )
    step.capture(torch.ones(2, 3))
    assert step.runner.traces == {"mixed": 2} and len(compiled) == 2
    assert needs == [1, 1, 1, 2, 2], "the last bucket is measured once more, after it was compiled"
    close(step(torch.ones(1, 3)), torch.full((1, 3), 3.0))
    close(step(torch.ones(2, 3)), torch.full((2, 3), 2.0))


@both_modes
def test_what_progress_does_stays_done(mode):
    """It is called between captures, which put back state and do not capture what is captured."""
    state = torch.zeros(())

    def forward(x):
        state.add_(1)
        return x * 2

    step = rows_of(mode, StandIn(), forward, sizes=(2, 4), state=(state,))

    def progress(done, of, bucket):
        step(torch.ones(2))

    report = step.capture(torch.ones(4), progress=progress)
    assert [(str(row.bucket), row.replays) for row in report.rows] == [
        ("mixed 4 tokens x0", 0),
        ("mixed 2 tokens x0", 2),
    ]
    assert float(state) == 2


@both_modes
def test_a_capture_that_fails_on_its_way_keeps_what_it_has(mode):
    device = Counting()
    real = device.warm

    def short(run):
        real(run)
        if device.warm_runs == 3:
            raise torch.OutOfMemoryError("no more")

    device.warm = short
    step = rows_of(mode, device)
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        step.capture(torch.ones(2))
    assert buckets_of(step) == ["mixed 8 tokens x0", "mixed 4 tokens x0"] and device.depth == 0
    close(step(torch.ones(3)), torch.full((3,), 2.0))
    assert len(step.capture(torch.ones(2)).rows) == 4


def test_an_op_of_torch_is_kept_out_where_that_is_asked_for():
    step = rows_of(
        breakable,
        StandIn(),
        lambda x: x.sin().exp() + 1,
        sizes=(2,),
        eager={"mixed": ("aten::exp",)},
    )
    close(step(torch.ones(2)), torch.ones(2).sin().exp() + 1)
    [row] = step.report().rows
    assert [str(each) for each in row.breaks] == ["aten.exp.default"] and row.graphs == 2


class Seen(Exception):
    pass


def raising(error):
    """A method that raises an error, of those left if it is a list."""

    def method(*_):
        raise error.pop(0) if isinstance(error, list) else error

    return method


def test_pieces_are_tuned_as_torch_compile_tunes(monkeypatch):
    """At their first run. Compile-time tuning makes tensors like all inputs, pages among them, and
    compiles every kernel twice."""
    found = []

    def codegen(self):
        found.append(config.triton.autotune_at_compile_time)
        raise Seen

    monkeypatch.setattr(GraphLowering, "codegen", codegen)
    step = rows_of(piecewise, StandIn(), lambda x: x * 2 + 1, inner="inductor")
    with torch._inductor.utils.fresh_cache(), pytest.raises(Exception, match="Seen"):
        step(torch.ones(2))
    assert found == [None]


@pytest.mark.parametrize(
    ("inner", "gpu"), [("inductor", True), ("tuned", True), ("eager", True), ("inductor", False)]
)
def test_workers_for_gpus_start_before_the_model_is_traced(inner, gpu, monkeypatch):
    from torch._inductor import async_compile

    told, real = [], traced.start_workers

    def start(inner):
        with monkeypatch.context() as now:
            now.setattr(torch.cuda, "is_available", lambda: gpu)
            real(inner)

    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: told.append("workers"))
    monkeypatch.setattr(traced, "start_workers", start)
    monkeypatch.setattr(
        traced.Traced, "_backend", lambda *_: (told.append("traced"), raising(Seen())())
    )
    with pytest.raises(Exception, match="Seen"):
        rows_of(piecewise, StandIn(), inner=inner)(torch.ones(2))
    assert told == ["workers"] * (gpu and inner != "eager") + ["traced"]


def test_an_error_of_the_second_trace_is_raised_as_it_is(monkeypatch):
    """The first trace specialises a size, and the second fails for a reason of its own."""
    monkeypatch.setattr(
        traced.Traced,
        "_backend",
        raising([traced._SizeSpecialises(), RuntimeError("out of memory")]),
    )
    with pytest.raises(Exception, match="out of memory"):
        rows_of(piecewise, StandIn())(torch.ones(2))


def test_an_op_is_asked_once_whether_it_may_be_captured(monkeypatch):
    asked, real = [], eager_capture.break_of

    def break_of(func, *given):
        asked.append(str(func))
        return real(func, *given)

    monkeypatch.setattr(eager_capture, "break_of", break_of)
    rows_of(breakable, StandIn(), lambda x: x.sin().sin().sin(), sizes=(2,))(torch.ones(2))
    assert asked.count("aten.sin.default") == 1
