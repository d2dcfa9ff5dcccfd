"""What the compiler is told of a result is what the kernel gives: shape, stride, dtype and device,
for any layout of the inputs."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import attnops
from attnops.core.errors import NoKernel
from attnops.core.kernel import kernels_of
from attnops.core.op import watch
from attnops.core.problem import Extent
from attnops.core.record import check, evaluate, sizes_of
from attnops.ops import OPS
from attnops.testing import CASES, Call
from attnops.testing.check import clone
from tests.ops.calls import OVERLOADS
from tests.ops.strategies import CALLS

BY_DATA = {"request_starts": ["2 <= u0"]}
"""Ops whose data decide the size of a result, and what a graph asserts of it."""

# Layouts: the same numbers, lying elsewhere -------------------------------------------------------


def transposed(t, i):
    """The dims i and i + 1 lie the other way round."""
    i = i % max(t.dim() - 1, 1)
    return t.transpose(i, i + 1).contiguous().transpose(i, i + 1) if t.dim() > 1 else t


def offset(t, i):
    """A view into the middle of a larger buffer."""
    room = t.new_zeros((t.shape[0] + 2, *t.shape[1:]))
    room[1 : 1 + t.shape[0]] = t
    return room[1 : 1 + t.shape[0]]


def strided(t, i):
    """Every second entry of a buffer, along one dim."""
    i = i % t.dim()
    return torch.stack([t, t], i + 1).flatten(i, i + 1)[
        (slice(None),) * i + (slice(None, None, 2),)
    ]


def expanded(t, i):
    """Stride 0 where a size is 1."""
    i = i % t.dim()
    return t.select(i, 0).unsqueeze(i).expand(t.shape) if t.shape[i] == 1 else t


LAYOUTS = [lambda t, i: t, transposed, offset, strided, expanded]


def raw(change, t, i):
    # float8 tensors can be copied and viewed, and little else.
    return (
        change(t.view(torch.uint8), i).view(t.dtype)
        if t.dtype.itemsize == 1 and t.dtype != torch.bool
        else change(t, i)
    )


def relaid(draw, call):
    def change(name, t):
        # What a plan op writes has no gaps, by contract.
        allowed = (
            1
            if call.op.startswith("plan_") and name in call.mutated
            else 4
            if name in call.mutated
            else len(LAYOUTS)
        )
        return raw(draw(st.sampled_from(LAYOUTS[:allowed])), t, draw(st.integers(0, 3)))

    return call.map(change)


def described(results):
    return [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in results]


def run(op, name, call):
    """Every result of an overload, mutated arguments included."""
    returned = getattr(OPS[op].packet, name)(*call.args, **call.kwargs)
    values = (
        returned if isinstance(returned, (tuple, list)) else () if returned is None else (returned,)
    )
    return [*values, *(call.arguments[n] for n in call.mutated)]


def fakes(op, call):
    """What each overload of the op says of its results, by its name."""
    with FakeTensorMode(
        shape_env=ShapeEnv() if op in BY_DATA else None, static_shapes=True
    ) as mode:
        return {
            name: described(run(op, name, call.map(lambda _, t: mode.from_tensor(t))))
            for name in ("default", *kernels_of(op))
        }


def same_numbers(found, other):
    for a, b in zip(found, other, strict=True):
        if a.is_floating_point():
            torch.testing.assert_close(b.double(), a.double(), rtol=3e-3, atol=3e-3, equal_nan=True)
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("examples", [7, pytest.param(20, marks=pytest.mark.full)])
@pytest.mark.parametrize("op", list(OPS))
def test_fake_equals_real_in_any_layout(op, examples):
    """And numbers are those of the call as it was drawn. What nothing writes is 0 beforehand."""

    @given(data=st.data())
    @settings(max_examples=examples)
    def run_all(data):
        call = data.draw(CALLS[op]).map(lambda n, t: torch.zeros_like(t) if n == "output" else t)
        other, problem, ran = relaid(data.draw, call), call.problem, 0
        check(other.record)
        for name, fake in fakes(op, other).items():
            kernel = None if name == "default" else kernels_of(op)[name]
            if kernel is not None and kernel.refusals(other.problem):
                continue
            ran += 1
            found = run(op, name, other.map(lambda _, t: clone(t)))
            assert op not in BY_DATA or (
                isinstance(fake[0][0][0], torch.SymInt) and found[0].shape[0] >= 2
            )
            assert described(found)[op in BY_DATA :] == fake[op in BY_DATA :], name
            if kernel is not None and not kernel.refusals(problem):
                same_numbers(run(op, name, call.map(lambda _, t: clone(t))), found)
        assert ran >= 2  # default and at least the reference

    run_all()


# Symbolic sizes -----------------------------------------------------------------------------------

# Sizes of a model, which may specialise. All others are free: tokens, batch, pages, lengths.
FIXED = {
    "Half",
    "Hq",
    "H",
    "Hkv",
    "Hk",
    "Hv",
    "D",
    "Dk",
    "Dv",
    "Dc",
    "Dr",
    "C",
    "W",
    "In",
    "Inner",
    "Out",
    "E",
    "K",
    "page",
    "numbers",
    "bytes",
    "words",
    "...",
}


def full_call(op) -> Call:
    """The call of the grid with the most arguments."""
    return max((case.call() for case in CASES[op]), key=lambda call: len(call.arguments))


def symbolic(op, name, dynamic, call, device="cpu"):
    """(results, guards the fake installed, run-time asserts it left), with the layouts' free sizes
    symbolic; equal names, one symbol."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    spec, known = OPS[op].spec, sizes_of(call.record)
    named = {size.text for a in spec.args for size in a.layout if not size.options} | {
        a.name for a in spec.args if a.symbolic
    }
    letters = sorted((named & known.keys()) - FIXED)
    # Sizes no other letter has, so that no two symbols are one by chance; none is 0 or 1.
    hints = {c: 11 + 2 * i for i, c in enumerate(letters)}
    context = StatelessSymbolicContext(dynamic_sizes=[dynamic] * len(letters))
    sized = mode.from_tensor(
        torch.empty([hints[c] for c in letters]),
        symbolic_context=context,
        source=ConstantSource("sizes"),
    )
    size = dict(zip(letters, sized.shape, strict=True))

    def free(n, shape):
        out = list(shape)
        for i, text in enumerate(s.text for s in spec[n].layout):
            if text != "..." and not (out[i] == 1 and "|" in text):
                out[i] = evaluate(text.removeprefix(">=").split("|")[-1], known | size)
        return out

    with mode:
        arguments = {
            n: torch.empty(free(n, v.shape), dtype=v.dtype, device="cpu" if n == "plan" else device)
            if isinstance(v, torch.Tensor)
            else v
            for n, v in call.arguments.items()
        }
        arguments |= {n: size[n] for n in arguments if n in size}
        fake = Call(op, arguments)
        before = len(env.guards)
        results = run(op, name, fake)
    asserts = [str(a.expr) for group in env.deferred_runtime_asserts.values() for a in group]
    return results, [str(g.expr) for g in env.guards[before:]], asserts


UNBACKED = getattr(DimDynamic, "SIZE_LIKE_UNBACKED", None) or DimDynamic.UNBACKED


@pytest.fixture
def problems():
    """The problems of the calls of a test."""
    seen = []
    end = watch(lambda op, problem, call: seen.append(problem))
    yield seen
    end()


@pytest.mark.parametrize("dynamic", [DimDynamic.DYNAMIC, UNBACKED], ids=["dynamic", "unbacked"])
@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(*found, marks=[pytest.mark.full] * (found[1] not in ("default", "reference")))
        for found in OVERLOADS
    ],
)
def test_free_sizes_install_no_guard(op, name, dynamic, problems):
    """Neither the fake nor the op's Problem asks for one. Results are on the inputs' device.

    The kernels of an op share a fake.
    """
    results, guards, asserts = symbolic(op, name, dynamic, full_call(op), "cuda:0")
    assert not guards
    if dynamic == DimDynamic.DYNAMIC:
        assert asserts == BY_DATA.get(op, [])
    if op.startswith("plan_"):
        assert results.pop(0).device.type == "cpu"  # the plan; the workspace follows it
    assert {r.device for r in results} == {torch.device("cuda:0")}
    if name == "default":
        [problem] = problems
        sizes = problem.sizes
        extent = next(e for e in (sizes.tokens, sizes.batch, sizes.context) if e != Extent(0, 0, 0))
        assert problem.op == op and problem.target.device == "cuda"
        assert extent.hi is None and (dynamic == DimDynamic.DYNAMIC or extent.lo <= 1)


def test_a_forced_kernel_is_checked_while_tracing():
    with FakeTensorMode():
        q = torch.empty(1, 3, 2, 8)
        with pytest.raises(NoKernel, match="sinks=True"):
            attnops.attention(q, q, q, sinks=torch.empty(2), kernel="sdpa")
