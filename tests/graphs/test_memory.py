"""What graphs take is measured and bounded before a capture, told afterwards, and given back."""

from dataclasses import replace

import pytest
import torch

from attnops.core.errors import BatchTooLarge, NotCapturable, OverBudget, ReplayMismatch, StaleGraph
from attnops.graphs import Buckets, bar, breakable, piecewise
from attnops.graphs.stale import compare
from tests.graphs.helpers import Pair, both_modes, buckets_of, whole_and_split
from tests.graphs.models import BOUNDARY
from tests.graphs.standin import storage


def test_capture_of_all_buckets_is_largest_first_and_told():
    pair, told = Pair(breakable), []
    report = pair.step.capture(**pair.example(), progress=lambda *at: told.append(at))
    names = ["mixed 32 tokens x4", "mixed 16 tokens x4", "decode x4", "decode x2", "decode x1"]
    assert told == [(i, 5, name) for i, name in enumerate(names, 1)]
    assert [r.bytes for r in report.rows] == sorted(
        (r.bytes for r in report.rows), reverse=True
    ) and report.graph_bytes > 0
    assert (
        report.graph_bytes == pair.device.used() and report.input_bytes == pair.step._inputs.bytes
    )
    pytest.importorskip("rich", reason="rich draws the bar")
    with bar() as progress:  # again: nothing is left to do
        assert pair.step.capture(**pair.example(), progress=progress) == report


@both_modes
def test_memory_of_pieces_serves_later_ones(mode):
    """What a graph no longer needs is free for the next, within a bucket and between buckets, and
    results hold all the same."""
    pair = Pair(mode, Buckets(decode=(2, 4)), kernel=BOUNDARY, layers=2)
    pair.step.capture(**pair.example())
    first, *rest = pair.device.graphs
    assert not first.over and all(g.over for g in rest[1:])
    large, _ = pair.step._entries.values()
    assert storage(large.outputs[0]) in {storage(t) for t in rest[-1].over}  # results too
    assert [len(row.bytes_of) for row in pair.step.report().rows] == [3, 3]
    for names in ("abcd", "ab", "abc", "a"):
        pair.agree(names)


@pytest.mark.parametrize(("needs", "held"), [((4000, 9000), (0, 0)), ((10, 10), (0, 8001))])
def test_over_the_budget_raises_with_the_figures(needs, held):
    """What is held counts, too."""
    needs, taken = iter(needs), iter(held)
    pair = Pair(breakable, Buckets(decode=(2, 4)), budget_bytes=8000, need=lambda: next(needs))
    pair.device.used = lambda: next(taken)
    with pytest.raises(
        OverBudget, match=r"decode x2: got a need of .* held by graphs, want at most 8000"
    ) as e:
        pair.step.capture(**pair.example())
    assert (e.value.need, e.value.held, e.value.budget) == (
        (9000, 0, 8000) if held[1] == 0 else (10, 8001, 8000)
    )
    assert buckets_of(pair.step) == ["decode x4"] and pair.device.calls == ["begin", "end"]


@pytest.mark.parametrize("over", ["raise", "eager"])
def test_over_the_budget_drops_the_largest(over):
    need = iter((9000, 8000, 2))
    pair = Pair(
        breakable,
        Buckets(decode=(1, 2, 4), over=over),
        budget_bytes=8000,
        over_budget="drop",
        need=lambda: next(need),
    )
    report = pair.step.capture(**pair.example())
    assert [str(b) for b in report.dropped] == ["decode x4"] and buckets_of(pair.step) == [
        "decode x2",
        "decode x1",
    ]
    assert "dropped, over the memory budget: decode x4" in str(report)
    if over == "raise":
        with pytest.raises(BatchTooLarge, match="got 3, want at most 2"):
            pair.step(**pair.example("xyz"))
    else:
        pair.agree("abc")
        assert pair.step.report().eager_calls == 1
    pair.agree("b")


def test_dropped_at_its_first_call():
    need = iter((9000, 1))
    pair = Pair(
        breakable,
        Buckets(decode=(2, 4)),
        budget_bytes=100,
        over_budget="drop",
        need=lambda: next(need),
    )
    pair.device.used = lambda: 0
    pair.agree("a")  # the bucket of 2 is dropped, that of 4 answers
    assert buckets_of(pair.step) == ["decode x4"]


@both_modes
def test_free_gives_everything_back_and_a_call_captures_anew(mode):
    pair = Pair(mode)
    pair.agree("ab")
    pair.step.free()
    assert pair.device.calls[-2:] == ["settle", "release"]
    assert (
        pair.device.used() == 0
        and not pair.step.report().rows
        and not pair.step.report().input_bytes
    )
    pair.agree("ab")
    # What was stale may be captured with now.
    pair.step.free()
    pair.step(**{**pair.example(), "k_pages": tuple(p.clone() for p in pair.cache.k_pages)})
    if mode is piecewise:
        assert pair.step.runner.traces == {"decode": 1}


@both_modes
def test_every_so_many_replays_are_compared(mode):
    """Lengths past the width of the table are seen, too."""
    pair = Pair(mode, check_every=2)
    for _ in range(4):
        pair.agree("ab")
    assert pair.step.report().compared == 2 and "2 replays were compared" in str(pair.step.report())
    # Weights in another place are what no address check sees: a graph reads the old ones.
    pair.model.head.weight = torch.nn.Parameter(torch.randn_like(pair.model.head.weight))
    pair.step(**pair.example())
    with pytest.raises(ReplayMismatch, match=r"decode x2, output 0: got an error of") as e:
        pair.step(**pair.example())
    assert e.value.error > e.value.allowed > 0
    pair.step(**pair.example())
    long = replace(pair.example()["batch"], seq_lens=torch.tensor([3, 33], dtype=torch.int32))
    with pytest.raises(StaleGraph, match=r"batch.seq_lens: got 33 tokens, want at most 32"):
        pair.give(long)


def test_lost_numbers_are_a_mismatch():
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([1.0, nan, inf, -inf])
    compare("b", {"a": x, "n": 1}, {"a": x.clone(), "n": 1}, None)
    compare("b", torch.tensor([1.05]), torch.tensor([1.0]), 0.1)
    for bad in (
        [1.0, 2.0, inf, -inf],
        [nan, nan, inf, -inf],
        [1.0, nan, -inf, -inf],
        [1.1, nan, inf, -inf],
        [1.0, nan],
    ):
        with pytest.raises(ReplayMismatch, match="b, output"):
            compare("b", {"a": torch.tensor(bad)}, {"a": x}, None)


@both_modes
def test_a_capture_that_fails_leaves_nothing_behind(mode):
    pair, fail = Pair(mode), [True]
    forward = pair.device.call

    def failing(*args):
        if fail:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return forward(*args)

    pair.device.call = failing
    with pytest.raises(NotCapturable, match=r"operation not permitted when stream is capturing$"):
        pair.step(**pair.example())
    assert (
        not pair.step.report().rows
        and pair.device.open is None
        and pair.device.calls == ["begin", "abort"]
    )
    fail.clear()
    pair.agree("ab")


@pytest.mark.sweep(2)
@whole_and_split
def test_what_is_held_does_not_grow_with_layers(kernel):
    """A value that no later layer reads gives its memory back within the graph, and when a bucket
    runs without one."""
    pair = Pair(piecewise, Buckets(decode=(2,)), kernel=kernel, layers=4)
    held, forward = [], pair.device.call

    def call(op, args, kwargs):
        if op.name() == "attnops::rotate_and_write_kv":
            held.append(
                sum(
                    any(ref() is not None for ref in holders)
                    for _, holders in pair.device.made.values()
                )
            )
        return forward(op, args, kwargs)

    pair.device.call = call
    pair.step.capture(**pair.example())
    assert len(held) == 4 and held[1] == held[-1] > 0
