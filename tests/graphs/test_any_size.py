"""Recordings of a layer for some sizes serve others, and no code, kernel or number that depends on
the size is carried over."""

from functools import partial

import pytest
import torch
from torch import nn

import attnops
from attnops.core.kernel import kernels_of
from attnops.core.op import watch
from attnops.graphs import any_size, graph_breaks, kinds as kinds_of_layers
from attnops.graphs.any_size import AnySize
from attnops.graphs.kinds import Kinds
from attnops.graphs.per_layer import NotRegional

close = partial(torch.allclose, atol=1e-5)


class Layer(nn.Module):
    """compute: of the module and its input."""

    def __init__(self, compute):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.compute, self.layer_idx = nn.Linear(4, 4), compute, 0

    def forward(self, x, **more):
        return self.compute(self, x, **more)


@pytest.fixture
def recorded(monkeypatch):
    """The rows of each recording."""
    found, real = [], kinds_of_layers.record

    def record(module, args, kwargs):
        found.append(args[0].shape[0])
        return real(module, args, kwargs)

    monkeypatch.setattr(kinds_of_layers, "record", record)
    return found


def same(kinds, compute, *sizes, given=lambda rows: {}, alike=torch.equal):
    """The layer's own numbers, at its first call of a size and at the next one."""
    layer = Layer(compute)
    for rows in sizes:
        for _ in range(2):
            x, more = torch.randn(rows, 4), given(rows)
            kinds.begin()
            with torch.no_grad():
                got = kinds(layer, rows, (x,), more)
                assert alike(got, layer(x, **more)), rows


def plain(self, x):
    return self.linear(x).relu()


def by_sizes(self, x):
    """Literal sizes of views, new tensors, slices, and multiples of the size."""
    rows = x.shape[0]
    at = torch.arange(rows)[:, None].expand(rows, 4)
    wide = torch.cat((x, x)).view(2 * rows, 2, 2)[:rows].reshape(rows, -1)
    return self.linear(x) * at + wide + x.view(-1).narrow(0, 0, 4 * rows).view(rows, 4)


@pytest.mark.parametrize("compute", [plain, by_sizes])
def test_two_sizes_serve_others(recorded, compute):
    same(Kinds(), compute, 3, 5, 7, 2, 9, 1)
    assert recorded == [3, 5]


def power(self, x):
    """A buffer of the next power of two."""
    room = 1 << (x.shape[0] - 1).bit_length()
    return torch.zeros(room, 4)[: x.shape[0]] + self.linear(x)


def one_more(self, x):
    return torch.ones(x.shape[0] + 1, 4)[1:] + x


def capped(self, x):
    return x[: min(x.shape[0], 6)].sum(0) + x


@pytest.mark.parametrize(
    ("compute", "sizes", "recordings"),
    [
        (power, (4, 8, 6, 16), [4, 8, 6]),
        (one_more, (3, 5, 7), [3, 5, 7]),
        (capped, (3, 5, 4, 8, 9, 10), [3, 5, 8, 9]),
    ],
)
def test_what_is_no_multiple_of_the_size_is_recorded_anew(recorded, compute, sizes, recordings):
    same(Kinds(), compute, *sizes)
    assert recorded == recordings


def other_way(self, x):
    """Not told by the numbers of equal rows."""
    return x.flip(0) * 2 if x.shape[0] > 6 else x + x


def test_code_that_goes_another_way(recorded):
    kinds, layer = Kinds(), Layer(other_way)
    for rows in (3, 5, 8, 4, 9, 12):
        x = torch.ones(rows, 4)
        kinds.begin()
        assert torch.equal(kinds(layer, rows, (x,), {}), layer(x))
    assert recorded == [3, 5, 8, 9]


def reads(self, x):
    return x + 1 if x.shape[0] < 6 or x.sum() > 0 else x - 1


def counted(self, x):
    if x.shape[0] > 6:
        self.linear.seen = x.shape[0]
    return self.linear(x)


def by_number(self, x):
    return x * 2 if x.shape[0] < 6 else x * (2 + self.layer_idx)


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (reads, "DataDependentOutputException"),
        (counted, "it sets linear.seen"),
        (by_number, "TypeError: unsupported operand type"),
    ],
)
def test_code_of_a_later_size_that_cannot_be_recorded(compute, why):
    """Though its numbers are those of the sizes before."""
    kinds = Kinds()
    same(kinds, compute, 3, 5, 4)
    with pytest.raises(NotRegional, match=why), torch.no_grad():
        kinds(Layer(compute), 8, (torch.ones(8, 4),), {})


def test_a_later_size_that_writes_what_it_is_given():
    """It is refused before it writes."""

    def counted(self, x):
        if x.shape[0] > 6:
            self.linear.count += 1
        return self.linear(x)

    layer, kinds = Layer(counted), Kinds()
    layer.linear.register_buffer("count", torch.zeros(1))
    with torch.no_grad():
        for rows in (3, 5):
            kinds(layer, rows, (torch.ones(rows, 4),), {})
        with pytest.raises(NotRegional, match="it writes l_call_modules_linear_buffers_count_"):
            kinds(layer, 8, (torch.ones(8, 4),), {})
    assert layer.linear.count == 0


def test_a_number_of_another_tensor():
    """Equal code reads a constant at some sizes, and data at others."""

    def scaled(self, x, scale):
        one = torch.tensor(1.0)
        return self.linear(x) * (one if x.shape[0] < 6 else scale).item()

    kinds, given = Kinds(), {"scale": torch.tensor(1.0)}
    same(kinds, scaled, 3, 5, 4, given=lambda rows: given)
    with pytest.raises(NotRegional, match="DataDependentOutputException"), torch.no_grad():
        kinds(Layer(scaled), 8, (torch.ones(8, 4),), given)


def test_what_is_served_ahead_is_followed_at_its_first_run(recorded):
    kinds = Kinds()
    same(kinds, other_way, 3, 5)
    with kinds.way("ahead"), torch.no_grad():
        kinds(Layer(other_way), 8, (torch.ones(8, 4),), {})
    assert recorded == [3, 5]
    same(kinds, other_way, 8)
    assert recorded == [3, 5, 8]


def attends(self, x):
    q = x.view(1, -1, 1, 4)
    return torch.ops.attnops.attention(q, q, q, scale=0.5, causal=True)[0].reshape(-1, 4)


def by_size(problem):
    """Another kernel of attention for more than 16 tokens."""
    few = problem.sizes.queries.hint <= 16
    return kernels_of("attention")["reference" if few else "sdpa"]


@pytest.fixture
def chosen_by_size(monkeypatch):
    monkeypatch.setattr(graph_breaks, "choose", lambda problem, policy: by_size(problem))
    monkeypatch.setattr(any_size, "_kernel", lambda call, problem: by_size(problem))


def test_a_kernel_is_chosen_for_each_size(recorded, chosen_by_size):
    """One that is chosen for some sizes is not called for others."""
    same(Kinds(), attends, 4, 8, 6, 24, 48, 32, 12, alike=close)
    assert recorded == [4, 8, 24, 48]


def test_nothing_is_built_for_sizes_that_are_not_served(recorded, chosen_by_size, monkeypatch):
    """As where another call would get another kernel."""

    def twice(self, x):
        q, wide = x.view(1, -1, 1, 4), torch.cat((x, x)).view(1, -1, 1, 4)
        out = torch.ops.attnops.attention(q, q, q, scale=0.5)[0].reshape(-1, 4)
        torch.ops.attnops.attention(wide, wide, wide, scale=0.5)
        return out

    begun = []
    monkeypatch.setattr(any_size, "begin", lambda kernel, call: begun.append(call.query.shape[1]))
    kinds = Kinds()
    same(kinds, twice, 3, 5, 7, alike=close)
    assert recorded == [3, 5] and begun == [7, 14]
    same(kinds, twice, 12, alike=close)
    assert recorded == [3, 5, 12] and begun == [7, 14]


@pytest.mark.parametrize("other", ["sdpa", ""])
def test_kernels_that_are_others_by_now(recorded, monkeypatch, other):
    """Such as one that was being compiled while the layer was recorded: it is not known for which
    sizes the one in its place would be chosen."""
    monkeypatch.setattr(graph_breaks, "choose", lambda *_: kernels_of("attention")["reference"])
    found = kernels_of("attention").get(other)
    monkeypatch.setattr(any_size, "_kernel", lambda *_: found)
    same(Kinds(), attends, 4, 8, 6, alike=close)
    assert recorded == [4, 8, 6]


def test_calls_that_others_watch(recorded):
    """A watcher sees what a pass asks for, and the choices of the layer stay the same."""

    def asks(gm):
        x = next(iter(gm.graph.nodes)).meta["example_value"]
        with x.fake_mode:
            q = x.view(1, -1, 2, 2)
            torch.ops.attnops.attention(q, q, q, scale=0.5)

    kinds = Kinds([asks])
    same(kinds, attends, 4)
    end = watch(lambda *_: None)
    try:
        same(kinds, attends, 8)
    finally:
        end()
    same(kinds, attends, 6)
    assert recorded == [4, 8]


def test_those_that_serve_are_kept(recorded, monkeypatch):
    monkeypatch.setattr(kinds_of_layers, "MOST_KEPT", 6)
    same(Kinds(), plain, 3, 5, *range(6, 24))
    assert recorded == [3, 5]


def test_own_code_runs_once_for_all_that_may_serve(monkeypatch):
    """As recordings of each way that code takes may."""
    followed, real = [], kinds_of_layers.follow
    monkeypatch.setattr(kinds_of_layers, "follow", lambda *x: followed.append(x[1]) or real(*x))
    kinds = Kinds()
    same(kinds, capped, 3, 5, 8, 9, 10)
    followed.clear()
    same(kinds, capped, 2)
    assert len(followed) == 1


def test_equal_layers_that_are_served_ahead_are_looked_up_once(monkeypatch):
    kinds, looked, real = Kinds(), [], AnySize.sizes
    same(kinds, plain, 3, 5)
    monkeypatch.setattr(AnySize, "sizes", lambda *given: looked.append(1) or real(*given))
    x = torch.randn(8, 4)
    for _ in range(2):
        kinds.begin()
        looked.clear()
        with kinds.way("ahead"), torch.no_grad():
            for _ in range(3):
                x = kinds(Layer(plain), 8, (x,), {})
        assert len(looked) == 1
    same(kinds, plain, 8)
    assert len(looked) == 2


@pytest.mark.parametrize("name", ["__init__", "_chooses"])
def test_an_error_of_ours_loses_no_layer(recorded, monkeypatch, caplog, name):
    """It is logged, and sizes are recorded each."""

    def fails(*_):
        raise TypeError("a test's")

    monkeypatch.setattr(AnySize, name, fails)
    with caplog.at_level("DEBUG", logger=kinds_of_layers.__name__):
        same(Kinds(), plain, 3, 5, 7)
    assert recorded == [3, 5, 7] and "a test's" in caplog.text


def with_pages(self, x, pages):
    return self.linear(x) + pages.view(pages.shape[0] * 4)[:4]


def test_other_sizes_of_arguments_vary_too(recorded):
    """Each from the recording on that has another one."""
    kinds, pages = Kinds(), {3: 2, 5: 2, 7: 3, 9: 5, 4: 8}

    def given(rows):
        return {"pages": torch.randn(pages[rows], 4)}

    same(kinds, with_pages, *pages, given=given)
    assert recorded == [3, 5, 7]


def views_of(memory, *names):
    """By name: views of the memory, each a tensor of its own."""
    return {name: memory.detach() for name in names}


def all_of(self, x, p, q, t, u):
    return self.linear(x) + p + q + t + u


def test_aliases_are_no_size(recorded):
    """Recordings that differ in them serve no others."""

    def given(rows):
        found = {name: torch.randn(4) for name in "pqtu"}
        shared = {5: "pq", 7: "tu"}.get(rows, "")
        return found | views_of(torch.randn(4), *shared)

    same(Kinds(), all_of, 3, 5, 7, given=given)
    assert recorded == [3, 5, 7]


def test_alignment_is_no_size(recorded):
    """In bytes past a multiple of 16: 0, 4 and 8."""

    def given(rows):
        at = {3: 0, 5: 1, 7: 2}[rows]
        return {name: torch.randn(4) for name in "pqt"} | {"u": torch.randn(9)[at : at + 4]}

    same(Kinds(), all_of, 3, 5, 7, given=given)
    assert recorded == [3, 5, 7]


def attends_around_a_write(self, x, p, q, t, u, slots):
    """Equal calls are one in the graph where the write is to other memory than they read."""
    keys, query = x.view(-1, 1, 4), torch.ones(1, 1, 1, 4)
    before = torch.ops.attnops.attention(query, t, t, scale=0.5)[0]
    torch.ops.attnops.write_kv(keys, keys, u, p, slots)
    after = torch.ops.attnops.attention(query, t, t, scale=0.5)[0]
    return self.linear(x) + q.sum() * 0 + (after - before).sum()


def test_pages_that_are_written_are_told_from_those_that_are_not():
    kinds, layer = Kinds(), Layer(attends_around_a_write)
    for rows, shared, written in ((3, "", False), (5, "pq", False), (7, "tu", False), (7, "tu", 1)):
        pages = {name: torch.zeros(1, 16, 1, 4) for name in "pqtu"}
        pages |= views_of(torch.zeros(1, 16, 1, 4), *shared)
        slots, x = torch.arange(rows) if written else torch.full((rows,), -1), torch.ones(rows, 4)
        kinds.begin()
        with torch.no_grad():
            got = kinds(layer, rows, (x,), {**pages, "slots": slots})
            for each in pages.values():
                each.zero_()
            assert torch.equal(got, layer(x, **pages, slots=slots)), (rows, written)


def rows_beside_pages(self, x, pages):
    return x.view(x.shape[0], 4) + pages[0]


def test_sizes_that_samples_do_not_tell_apart(recorded):
    """What is twice the pages there may be the rows."""
    pages = {4: 2, 8: 4, 12: 6, 6: 5, 10: 7}

    def given(rows):
        return {"pages": torch.randn(pages[rows], 4)}

    same(Kinds(), rows_beside_pages, *pages, given=given)
    assert recorded == [4, 8, 6]


def test_the_policy_in_force_is_that_of_the_samples(recorded):
    kinds = Kinds()
    same(kinds, plain, 3, 5, 7)
    with attnops.use(kernel={"rms_norm": "reference"}):
        same(kinds, plain, 9)
    assert recorded == [3, 5, 9]
