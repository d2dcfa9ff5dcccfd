"""Where a traced model is cut, and which pieces are the same."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import attnops
from attnops.core.errors import NotCapturable
from attnops.graphs import Buckets, breakable, compile_pieces, outside, piecewise
from attnops.graphs.compile_pieces import compile_parts, eager
from attnops.graphs.split import split
from attnops.ops import OPS
from tests.graphs.helpers import Pair, both_modes, close, graphed
from tests.graphs.models import BOUNDARY, decoder


def splits(pair, names="ab", new=1):
    pair.agree(names, new)
    return {kind: program.split for kind, program in pair.step.runner.programs.items()}


def test_at_every_call_that_may_not_be_captured():
    pair = Pair(piecewise, kernel=BOUNDARY, layers=3)
    assert_expected_inline(
        str(splits(pair)["decode"]),
        """\
submod_0: captured, 16 operations
submod_1: paged_attention.uncapturable
submod_2: captured, 19 operations
submod_3: paged_attention.uncapturable
submod_4: captured, 19 operations
submod_5: paged_attention.uncapturable
submod_6: captured, 5 operations""",
    )
    report = pair.step.report()
    assert report.compiled == {"decode": 3} and report.parts == {"decode": 4}


def test_for_the_compiler_alone_where_every_kernel_may_be_captured(monkeypatch):
    """The graph is compiled but for its attention calls, which run the chosen kernel by its
    name. Its capture needs no interpreter."""
    monkeypatch.setattr(compile_pieces, "_Run", None)
    pair = Pair(piecewise, layers=4)
    found = splits(pair)["decode"]
    assert [part.calls for part in found.parts] == [(), ("paged_attention.sdpa",)] * 4 + [()]
    report = pair.step.report()
    assert report.modes == {"decode": "whole"} and pair.device.calls == ["begin", "end", "replay"]
    assert report.compiled == {"decode": 3} and report.parts == {"decode": 5}
    # In the order of the model, with nothing between that the model does not do.
    [graph] = pair.device.graphs
    ours = [name for name, _ in graph.log if name.startswith("attnops::")]
    assert ours == ["attnops::rotate_and_write_kv", "attnops::paged_attention"] * 4
    nodes = [
        n
        for part in found.parts
        for n in part.module.graph.nodes
        if str(n.target).startswith("attnops.")
    ]
    assert [n.kwargs["policy"] for n in nodes] == [
        "kernel=rotate_and_write_kv:reference",
        "kernel=paged_attention:sdpa",
    ] * 4


def test_every_attention_is_a_cut():
    """A new op of attention has to be named, and what only serves one may not be."""
    assert {n for n, op in OPS.items() if op.per_layer} == {
        n for n in OPS if n.endswith("attention") and not n.startswith("plan_")
    }


@pytest.mark.full
def test_by_kind_where_it_is_asked_for():
    """Whole steps for decode, pieces for the rest; neighbours that are both outside are one
    part."""
    pair = Pair(piecewise, layers=2, eager={"mixed": ("rotate_and_write_kv", "paged_attention")})
    splits(pair, "ab", [2, 5])
    found = splits(pair)
    outside_calls = "rotate_and_write_kv.reference, paged_attention.sdpa"
    lines = [line.partition(": ")[2] for line in str(found["mixed"]).splitlines()]
    assert (
        lines[1::2] == [outside_calls] * 2
        and all("captured" in line for line in lines[::2])
        and len(lines) == 5
    )
    assert pair.step.report().modes == {"mixed": "piecewise", "decode": "whole"}
    # The buffer that attention writes was allocated before the boundary, at a fixed address, and
    # not between the two calls.
    calls = [n for n in found["mixed"].parts[1].module.graph.nodes if n.op == "call_function"]
    assert [str(n.target) for n in calls] == [
        "attnops.rotate_and_write_kv.default",
        "attnops.paged_attention.default",
    ]


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


@pytest.mark.parametrize("what", ["blocks", "numbers"])
def test_layers_that_differ_are_compiled_each(what):
    factors = iter((2.0, 2.0, 3.0, 2))
    model = decoder(
        4, kernel=BOUNDARY, mlp=(lambda: Times(next(factors))) if what == "numbers" else None
    )
    if what == "blocks":
        model.layers[2].attention.scale = 0.5  # which is the boundary's
        model.mlps[1] = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    pair = Pair(piecewise, model=model)
    splits(pair)
    # First, last, and the two between.
    assert pair.step.report().compiled == {"decode": 4}


class Rows(nn.Module):
    """Adds to the rows that are positive, found by their indices."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        y = self.up(x)
        return y.index_add(0, rows, x[rows] * 2)


def test_what_depends_on_data_lies_outside():
    pair = Pair(piecewise, model=decoder(1, mlp=Rows))
    assert_expected_inline(
        str(splits(pair, "abc")["decode"]),
        """\
submod_0: captured, 16 operations
submod_1: captured, paged_attention.sdpa
submod_2: captured, 3 operations
submod_3: nonzero, getitem
submod_4: captured, 1 operations
submod_5: getitem, mul, index_add
submod_6: captured, 2 operations""",
    )
    # The number of rows changes with the batch, and passes from one part outside to the next.
    for names in ("abc", "bc", "abcd", "d", "abd"):
        pair.agree(names)
    assert pair.step.runner.traces == {"decode": 1}
    pair = Pair(breakable, model=decoder(1, mlp=Rows))
    with pytest.raises(
        NotCapturable, match=r"aten.nonzero.default: cannot be captured, .*attnops.graphs.outside"
    ):
        pair.go("ab")
    assert pair.device.calls == ["begin", "abort"]


class Mine(Exception):
    pass


def raises(tokens):
    if tokens.shape[0] > 2:
        raise Mine
    return tokens * 2


@both_modes
def test_an_error_of_the_model_is_the_callers(mode):
    """Dynamo fails where the model raises. The model's own error is reported, or else that of
    Dynamo."""
    step = graphed(mode, raises, Buckets(tokens=(4,)))
    with pytest.raises(Mine):
        step(torch.ones(3))
    assert not step.report().rows and step.graphs.open is None
    if mode is piecewise:
        step = graphed(
            mode, lambda tokens: tokens * 2 if tokens.sum() > 3 else tokens, Buckets(tokens=(4,))
        )
        with pytest.raises(
            NotCapturable, match="the model: cannot be captured, it cannot be traced whole"
        ):
            step(torch.ones(3))


@both_modes
def test_functions_marked_outside(mode):
    seen = []

    def rows(x):
        seen.append(int((x[:, 0] > 0).sum()))  # asks for a value
        return x * 2 if seen[-1] > 1 else x * 3

    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = outside(rows)

        def forward(self, x):
            return self.rows(x + 1)

    pair = Pair(mode, model=decoder(1, mlp=Marked))
    for names in ("abc", "ab", "abcd", "a"):
        pair.agree(names)
    [breaks] = {r.breaks for r in pair.step.report().rows}
    assert [b.why for b in breaks] == ["marked outside"] and "rows" in str(breaks[0])
    assert torch.equal(outside(rows)(torch.ones(1, 1)), torch.full((1, 1), 3.0))


@both_modes
def test_a_marked_function_of_another_result(mode):
    marked = outside(
        lambda x: (x.sum(1), x.amax(1).double()),
        fake=lambda x: (x.new_empty(x.shape[0]), x.new_empty(x.shape[0], dtype=torch.float64)),
    )

    def forward(tokens):
        total, top = marked(tokens * 2)
        return total + top.float()

    step = graphed(mode, forward, Buckets(tokens=(2, 4)))
    for n in (3, 2, 4):
        x = torch.randn(n, 5)
        close(step(x), forward(x))


@pytest.mark.parametrize(
    "result", [lambda x: 3, lambda x: x[x > 0]], ids=["a number", "another length"]
)
def test_breakable_refuses_results_a_graph_cannot_follow(result):
    marked = outside(result)

    def forward(tokens):
        out = marked(tokens)
        return tokens + (out if isinstance(out, int) else out.sum())

    step = graphed(breakable, forward, Buckets(tokens=(2,)))
    with pytest.raises(NotCapturable, match="cannot be captured, it"):
        step(torch.ones(2))
        step(-torch.ones(2))


def product(x, weight, kernel="reference", **more):
    return attnops.ops.linear(x.reshape(-1, 8), weight, kernel=kernel, **more).view(
        *x.shape[:-1], 8
    )


FUSIBLE = {
    "kernels": (
        lambda x, w: product(product(x, w)[:, None], w, residual=x[:, None].flatten(0, 1))[:, 0],
        0,
    ),
    "no copies": (
        lambda x, w: product(x.to(x.dtype).contiguous(), w.as_strided((8, 8), (8, 1))).narrow(
            1, 0, 4
        ),
        0,
    ),
    "an operation": (lambda x, w: {"a": product(x + 1, w), "b": (x, 3)}, 1),
    "a write": (lambda x, w: product(x, w).mul_(2), 1),
    "a copy": (lambda x, w: product(x.to(torch.float64).to(x.dtype), w), 1),
    "an inlined kernel": (lambda x, w: product(product(x, w), w, "aten"), 1),
}


@pytest.mark.parametrize("name", FUSIBLE)
@pytest.mark.parametrize("dynamic", [False, True], ids=["sizes", "symbols"])
def test_a_piece_of_kernels_alone_is_not_compiled(name, dynamic):
    forward, count = FUSIBLE[name]
    x, weight, compiled = torch.randn(3, 8), torch.randn(8, 8), []

    def inner(module, examples):
        compiled.append(module)
        return eager(module, examples)

    def backend(gm, _):
        program = compile_parts(split(gm), inner)
        return lambda *flat: program.run(flat)

    with torch.no_grad():
        want, given = forward(x.clone(), weight), x.clone()
        if dynamic:
            torch._dynamo.mark_dynamic(given, 0)
        got = torch.compile(forward, backend=backend, fullgraph=True)(given, weight)
    assert len(compiled) == count
    close(got, want)
