"""What the compiler is told of a result is what the kernel gives: shape, stride, dtype and device, for any layout of the inputs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import attnops
from attnops.core.kernel import kernels_of
from attnops.core.op import watch
from attnops.core.problem import Extent, Target
from attnops.core.record import check, evaluate, sizes_of
from attnops.ops import OPS
from attnops.ops.sparse.cases import PACKABLE
from attnops.testing import CASES, Call, Features, Source, make_call, oracle
from attnops.testing.check import clone
from tests.ops.strategies import CALLS

INF = float("inf")
OVERLOADS = [(op, name) for op in OPS for name in ("default", *kernels_of(op))]

BY_DATA = {"request_starts": ["2 <= u0"]}
"""Ops whose data decide the size of a result, and what a graph asserts of it."""

# Layouts: the same numbers, lying elsewhere ----------------------------------------------------------------------------


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
    return torch.stack([t, t], i + 1).flatten(i, i + 1)[(slice(None),) * i + (slice(None, None, 2),)]


def expanded(t, i):
    """Stride 0 where a size is 1."""
    i = i % t.dim()
    return t.select(i, 0).unsqueeze(i).expand(t.shape) if t.shape[i] == 1 else t


LAYOUTS = [lambda t, i: t, transposed, offset, strided, expanded]


def raw(change, t, i):
    # float8 tensors can be copied and viewed, and little else.
    return change(t.view(torch.uint8), i).view(t.dtype) if t.dtype.itemsize == 1 and t.dtype != torch.bool else change(t, i)


def relaid(draw, call):
    def change(name, t):
        # What a plan op writes has no gaps, by contract.
        allowed = 1 if call.op.startswith("plan_") and name in call.mutated else 4 if name in call.mutated else len(LAYOUTS)
        return raw(draw(st.sampled_from(LAYOUTS[:allowed])), t, draw(st.integers(0, 3)))

    return call.map(change)


def described(results):
    return [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in results]


def run(op, name, call):
    """Every result of an overload, mutated arguments included."""
    returned = getattr(OPS[op].packet, name)(*call.args, **call.kwargs)
    values = returned if isinstance(returned, (tuple, list)) else () if returned is None else (returned,)
    return [*values, *(call.arguments[n] for n in call.mutated)]


@pytest.mark.parametrize("examples", [7, pytest.param(20, marks=pytest.mark.full)])
@pytest.mark.parametrize("op", list(OPS))
def test_fake_equals_real(op, examples):
    @given(data=st.data())
    @settings(max_examples=examples)
    def run_all(data):
        call = relaid(data.draw, data.draw(CALLS[op]))
        check(call.record)
        with FakeTensorMode(shape_env=ShapeEnv() if op in BY_DATA else None, static_shapes=True) as mode:
            fakes = {name: described(run(op, name, call.map(lambda _, t: mode.from_tensor(t)))) for _, name in OVERLOADS if _ == op}
        problem = call.problem
        ran = 0
        for name, fake in fakes.items():
            if name == "default" or not kernels_of(op)[name].refusals(problem):
                ran += 1
                found = described(run(op, name, call.map(lambda _, t: clone(t))))
                assert op not in BY_DATA or (isinstance(fake[0][0][0], torch.SymInt) and found[0][0][0] >= 2)
                assert [x[op in BY_DATA :] for x in found] == [x[op in BY_DATA :] for x in fake], name
        assert ran >= 2  # default and at least the reference

    run_all()


@pytest.mark.parametrize("examples", [5, pytest.param(15, marks=pytest.mark.full)])
@pytest.mark.parametrize("op", list(OPS))
def test_layout_does_not_change_the_result(op, examples):
    @given(data=st.data())
    @settings(max_examples=examples)
    def run_all(data):
        call = data.draw(CALLS[op])
        other = relaid(data.draw, call)
        if "output" in call.mutated:
            for c in (call, other):
                for n in c.mutated:
                    c.arguments[n].zero_()
        for name, kernel in kernels_of(op).items():
            if not kernel.refusals(call.problem) and not kernel.refusals(other.problem):
                for a, b in zip(run(op, name, call), run(op, name, other), strict=True):
                    if a.is_floating_point():
                        torch.testing.assert_close(b.double(), a.double(), rtol=3e-3, atol=3e-3, equal_nan=True)
                    else:
                        assert torch.equal(a, b)

    run_all()


# Zero sizes -----------------------------------------------------------------------------------------------------------

EMPTY = [
    c
    for op in ("attention", "varlen_attention", "paged_attention", "mla_attention")
    for c in CASES[op]
    if c.label.startswith(("no_", "all_empty", "nothing"))
]


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_no_keys_give_zero_and_minus_infinity(case):
    call = case.call()
    if call.op in ("paged_attention", "mla_attention"):
        call = call.with_(lse=torch.empty(call.arguments["output"].shape[:2]))
    else:
        call = call.with_(return_lse=True)
    sinks = call.arguments.get("sinks")
    results = oracle(call.with_(sinks=None))
    assert not results["output"].any()
    assert (results["lse"] == -INF).all()
    if sinks is not None and results["lse"].numel():
        # The sink's logit is all that is left of the sum.
        real = slice(int(call.arguments["cu_seqlens_q"][-1])) if call.op != "attention" else slice(None)
        assert torch.equal(oracle(call)["lse"][real], sinks.float().expand_as(results["lse"])[real])


# Symbolic sizes -------------------------------------------------------------------------------------------------------

# Sizes of a model, which may specialise. All others are free: tokens, batch, pages, lengths.
FIXED = {"Half", "Hq", "H", "Hkv", "D", "Dv", "Dc", "Dr", "In", "Inner", "Out", "E", "K", "page", "numbers", "bytes", "words", "..."}

# One call an op with every optional argument there is.
FULL = Features(causal=True, window=(3, -1), softcap=2.0, sinks=torch.float32, lse=True, mask="additive", mask_shape="b")


NO_MASK = Features(causal=True, window=(3, -1), sinks=torch.float32, lse=True)
RANGES = {"kv_start": (0, 1, 0, 2), "kv_end": (7, 6, 5, 7), "index": torch.int32}
GRADIENTS = {"mask_grad": True, "lse_grad": True}
FULL_ROWS = {
    "attention": (4, 5, 7, FULL, RANGES),
    "attention_backward": (4, 5, 7, FULL, GRADIENTS),
    "varlen_attention": ((3, 4), (5, 6), FULL),
    "varlen_attention_backward": ((3, 4), (5, 6), FULL, GRADIENTS),
    "paged_attention": ((3, 4), (5, 6), 4, replace(NO_MASK, temperature=True)),
    "write_kv": ((3, -1, 5), 4, 3, Features(kv_dtype=torch.int8)),
    "mla_attention": ((3, 4), (5, 6), 4, replace(NO_MASK, head_dim=20, kv_dtype=torch.int8, v_head_dim=16)),
    "write_latent": ((3, -1, 5), 4, 3, Features(kv_dtype=torch.int8, v_head_dim=12)),
    "sparse_mla_attention": (
        (5, 0, 7), 7, (4, 16), replace(PACKABLE, sinks=torch.float32, lse=True), {"lengths": True, "packed": True},
    ),
    "write_latent_packed": ((3, -1, 5), 4, 3, PACKABLE),
    "merge_state": ((5, 2, 4), torch.float32),
}  # fmt: skip
FULL_CASES = {"experts": "all", "mxfp4_experts": "all", "route": "all", "linear": "all_offset"}


def full_call(op) -> Call:
    if op in FULL_ROWS:
        return make_call(op, Source(0), *FULL_ROWS[op])
    label = FULL_CASES.get(op, CASES[op][0].label)
    return next(case for case in CASES[op] if case.label == label).call()


def symbolic(op, name, dynamic, call, device="cpu"):
    """(results, guards the fake installed, run-time asserts it left), with the layouts' free sizes symbolic; equal names, one symbol."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    spec, known = OPS[op].spec, sizes_of(call.record)
    named = {size.text for a in spec.args for size in a.layout if not size.options} | {a.name for a in spec.args if a.symbolic}
    letters = sorted((named & known.keys()) - FIXED)
    # Sizes no other letter has, so that no two symbols are one by chance; none is 0 or 1.
    hints = {c: 11 + 2 * i for i, c in enumerate(letters)}
    context = StatelessSymbolicContext(dynamic_sizes=[dynamic] * len(letters))
    sized = mode.from_tensor(torch.empty([hints[c] for c in letters]), symbolic_context=context, source=ConstantSource("sizes"))
    size = dict(zip(letters, sized.shape, strict=True))

    def free(n, shape):
        out = list(shape)
        for i, text in enumerate(s.text for s in spec[n].layout):
            if text != "..." and not (out[i] == 1 and "|" in text):
                out[i] = evaluate(text.removeprefix(">=").split("|")[-1], known | size)
        return out

    with mode:
        arguments = {
            n: torch.empty(free(n, v.shape), dtype=v.dtype, device="cpu" if n == "plan" else device) if isinstance(v, torch.Tensor) else v
            for n, v in call.arguments.items()
        }
        arguments |= {n: size[n] for n in arguments if n in size}
        fake = Call(op, arguments)
        before = len(env.guards)
        results = run(op, name, fake)
    asserts = [str(a.expr) for group in env.deferred_runtime_asserts.values() for a in group]
    return results, [str(g.expr) for g in env.guards[before:]], asserts


UNBACKED = getattr(DimDynamic, "SIZE_LIKE_UNBACKED", None) or DimDynamic.UNBACKED


@pytest.mark.parametrize(("op", "name"), OVERLOADS, ids=lambda v: v)
def test_dynamic_sizes_install_no_guard(op, name):
    _, guards, asserts = symbolic(op, name, DimDynamic.DYNAMIC, full_call(op))
    assert not guards
    assert asserts == BY_DATA.get(op, [])


@pytest.mark.parametrize(("op", "name"), OVERLOADS, ids=lambda v: v)
def test_unbacked_sizes_are_never_asked_for(op, name):
    _, guards, _ = symbolic(op, name, UNBACKED, full_call(op))
    assert not guards


@pytest.mark.parametrize("op", list(OPS))
def test_building_a_problem_installs_no_guard(op):
    seen = []
    end = watch(lambda an_op, problem, call: seen.append(problem))
    try:
        for dynamic in (DimDynamic.DYNAMIC, UNBACKED):
            _, guards, _ = symbolic(op, "default", dynamic, full_call(op))
            assert not guards
    finally:
        end()
    assert [p.op for p in seen] == [op, op]
    backed, unbacked = (next(e for e in (p.sizes.tokens, p.sizes.batch, p.sizes.context) if e != Extent(0, 0, 0)) for p in seen)
    assert backed.lo >= 0 and backed.hi is None
    assert unbacked.lo <= 1 and unbacked.hi is None


@pytest.mark.parametrize(("op", "name"), OVERLOADS, ids=lambda v: v)
def test_results_are_on_the_inputs_device(op, name):
    results, _, _ = symbolic(op, name, DimDynamic.DYNAMIC, full_call(op), "cuda:0")
    if op.startswith("plan_"):
        assert results.pop(0).device.type == "cpu"  # the plan; the workspace follows it
    assert {r.device for r in results} == {torch.device("cuda:0")}


def test_a_forced_kernel_is_checked_while_tracing():
    from attnops.core.errors import NoKernel

    with FakeTensorMode():
        q = torch.empty(1, 3, 2, 8)
        with pytest.raises(NoKernel, match="sinks=True"):
            attnops.attention(q, q, q, sinks=torch.empty(2), kernel="sdpa")


def test_fake_cuda_problems_are_for_cuda():
    seen = []
    end = watch(lambda op, problem, call: seen.append(problem.target))
    try:
        with FakeTensorMode():
            q = torch.empty(1, 3, 2, 8, device="cuda:0")
            attnops.attention(q, q, q)
    finally:
        end()
    assert [t.device for t in seen] == [Target("cuda").device]


@pytest.mark.parametrize("mistake", ["specialises", "branches", "forgets"])
def test_the_harness_sees(mistake):
    """The three mistakes that opcheck does not see, made by a fake of our own."""
    lib = torch.library.Library("attnops_harness", "FRAGMENT")
    lib.define(f"{mistake}(Tensor lengths) -> Tensor")

    def fake(lengths):
        if mistake == "specialises":
            return lengths.new_empty(int(lengths.shape[0]))
        if mistake == "branches" and lengths.shape[0] <= 4:
            return lengths.new_empty(3)
        return torch.empty(lengths.shape[0]) if mistake == "forgets" else lengths.new_empty(lengths.shape[0])

    torch.library.register_fake(f"attnops_harness::{mistake}", fake, lib=lib)
    op = getattr(torch.ops.attnops_harness, mistake).default
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    sized = mode.from_tensor(torch.empty(9), symbolic_context=context, source=ConstantSource("sizes"))
    with mode:
        lengths = torch.empty(sized.shape[0], device="cuda:0")
        before = len(env.guards)
        result = op(lengths)
    assert (result.device.type == "cpu") if mistake == "forgets" else len(env.guards) > before
