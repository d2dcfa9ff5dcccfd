"""torch.use_deterministic_algorithms: kernels whose bits differ from run to run say so, and are not
chosen under it."""

import ast
import warnings
from contextlib import contextmanager

import pytest
import torch

import attnops
from attnops.cli.features import problems
from attnops.core.errors import NoKernel, RegistrationError, StaleGraph
from attnops.core.kernel import Kernel, _drop, all_kernels, kernels_of, register
from attnops.core.problem import Target, altered
from attnops.core.select import select
from attnops.graphs.stale import Guard
from attnops.lowering.cache_key import choice_inputs
from attnops.ops import OPS
from tests.helpers import ROOT, sources
from tests.lowering.models import compiled_code, kernel_calls

ASSUMED = tuple(p.module for k in all_kernels() for p in k.packages)
GPUS = [Target.parse(name, ASSUMED) for name in ("h200", "h100", "a100", "sm80", "sm90", "sm100")]
GRADIENTS = ("attention_backward", "varlen_attention_backward")


@contextmanager
def asked(mode):
    """Torch's flag: "no", "warn" or "must"."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode({"no": 0, "warn": 1, "must": 2}[mode])
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


# The choice, by every table -----------------------------------------------------------------------


@pytest.mark.parametrize("target", GPUS, ids=str)
@pytest.mark.parametrize("mode", ["warn", "must"])
@pytest.mark.parametrize("op", GRADIENTS)
def test_gradients_repeat_their_bits_on_every_gpu(op, mode, target):
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    changes = (
        {},
        {"window": (1023, -1)},
        {"softcap": True},
        {"mask": "additive"},
        {"lse_grad": True},
    )
    for dtype in dtypes:
        for change in changes:
            problem = altered(problems(op, target)[0], dtype=dtype, kv_dtype=dtype, **change)
            free, found = select(problem), select(altered(problem, repeatable=mode))
            assert (
                free.kernel is not None
                and found.kernel is not None
                and not found.kernel.unrepeated(found.problem)
            )


NEVER = {
    "attention_backward.cudnn",
    "paged_attention.trtllm",
    "varlen_attention.trtllm",
    "mla_attention.trtllm_mla",
}
TORCHS = {
    "attention_backward.aten_flash",
    "varlen_attention_backward.aten_flash",
    "attention_backward.mem_efficient",
}
TURNS = {"attention_backward.fa4", "varlen_attention_backward.fa4"}


@pytest.mark.parametrize(
    ("target", "mode", "want"),
    [
        ("sm90", "must", NEVER),
        ("sm90", "warn", NEVER | TORCHS),  # torch's own kernels take no turns then
        ("sm100", "must", NEVER | TURNS),  # turns were read in SM90's kernel
        ("sm90", "no", set()),
        ("cpu", "warn", NEVER | TURNS),
    ],
)
def test_whose_bits_differ_from_run_to_run(target, mode, want):
    found = set()
    for kernel in all_kernels():
        if kernel.run.__module__.startswith("attnops."):  # none that another test registers
            asked = altered(problems(kernel.op, Target.parse(target, ASSUMED))[0], repeatable=mode)
            found |= {f"{kernel.op}.{kernel.name}"} if kernel.unrepeated(asked) else set()
    assert found == want


def test_cudnn_loses_its_gradients_where_it_is_the_fastest():
    """Or the test above would prove nothing. Neither do forwards pay for the flag."""
    problem = altered(problems("attention_backward", GPUS[0])[0], repeatable="must")
    assert [r.field for r in select(problem).refused["cudnn"]] == ["repeatable"]
    others = [
        k.name for k in kernels_of(problem.op).values() if k.name not in ("cudnn", "reference")
    ]
    usual = altered(problem, repeatable="no")
    policy = f"deny={','.join(others)}"
    assert (
        select(usual, policy).kernel.name == "cudnn"
        and select(problem, policy).kernel.name == "reference"
    )


def test_the_time_of_turns_ranks_fa4():
    problem = problems("attention_backward", GPUS[0])[0]
    free, steady = (select(altered(problem, repeatable=mode)).costs for mode in ("no", "must"))
    fa4 = kernels_of("attention_backward")["fa4"]
    assert steady["fa4"].us / free["fa4"].us == pytest.approx(
        fa4.steady_us(problem) / fa4.cost_us(problem)
    )
    assert "scaled from its time without turns" in str(steady["fa4"])
    assert steady["triton"] == free["triton"]


@pytest.mark.parametrize("op", [op for op in OPS if op not in GRADIENTS])
def test_forwards_choose_as_without_the_flag(op):
    """But for kernels that do not repeat their bits."""
    for target in (*GPUS, Target("cpu", 0, ASSUMED)):
        for problem in problems(op, target):
            free, found = select(problem), select(altered(problem, repeatable="must"))
            if free.kernel is not None and free.kernel.repeats == ():
                assert (
                    found.kernel is free.kernel
                    and found.costs[free.kernel.name] == free.costs[free.kernel.name]
                )


def test_our_own_device_functions_add_nothing_by_atomics():
    """Kernels of these promise equal bits. A counter says which program is the last, and adds up no
    results."""
    folder, found = ROOT / "attnops" / "kernels" / "triton", []
    for module, path in sources().items():
        for node in ast.walk(ast.parse(path.read_text())) if path.is_relative_to(folder) else ():
            if isinstance(node, ast.Call) and "atomic" in (text := ast.unparse(node.func)):
                found.append((module.rpartition(".")[2], text, ast.unparse(node.args[0])))
    assert found == [("decode", "tl.atomic_add", "counters_ptr + at")]
    assert all(k.repeats == () for k in all_kernels() if k.name == "triton")


def test_what_a_kernel_says_is_checked():
    for wrong in ("never", (1,), [lambda p: None]):
        with pytest.raises(RegistrationError, match="kernel mine: repeats got"):
            register(
                Kernel(
                    "mine", "attention", lambda call: None, dtypes=(torch.float32,), repeats=wrong
                )
            )
    failing = Kernel("mine", "attention", lambda call: None, repeats=(lambda p: 1 / 0,))
    problem = altered(problems("attention", GPUS[0])[0], repeatable="must")
    assert "ZeroDivisionError" in str(failing.unrepeated(problem)[0])


# Calls --------------------------------------------------------------------------------------------


def forward(call):
    return torch.full_like(call.query, 7.0), call.query.new_empty(0)


def backward(call):
    grads = (torch.full_like(x, 7.0) for x in (call.query, call.key, call.value))
    return *grads, call.query.new_empty(0), call.query.new_empty(0)


@pytest.fixture(scope="module")
def hasty():
    """The fastest kernels of a forward and of its gradient on this CPU. Neither repeats its
    bits."""
    made = [
        register(
            Kernel(
                "hasty",
                op,
                run,
                takes=frozenset({"causal"}),
                dtypes=(torch.float32,),
                cost_us=lambda p: 0.0,
                repeats=None,
            )
        )
        for op, run in (("attention", forward), ("attention_backward", backward))
    ]
    yield
    _drop(made)


ALONE = {"kernel": {"attention": "hasty"}}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_calls_follow_the_flag(hasty, compiled):
    def call(x):
        return attnops.attention(x, x, x) + 0.0

    query = torch.randn(1, 5, 2, 8)
    torch._dynamo.reset()
    run = torch.compile(call, fullgraph=True) if compiled else call
    with torch.no_grad():
        for mode in ("no", "must", "no", "warn", "must", "no"):
            with asked(mode):
                assert bool((run(query) == 7.0).all()) == (mode == "no"), mode


def test_gradients_follow_the_flag_when_they_are_made(hasty):
    """As those of torch's own attention do."""
    query = torch.randn(1, 5, 2, 8, requires_grad=True)
    with attnops.use({"attention": "aten_flash"}):
        output = attnops.attention(query, query, query).sum()
        for mode in ("no", "must", "no"):
            with asked(mode):
                (grad,) = torch.autograd.grad(output, query, retain_graph=True)
                assert bool((grad == 21.0).all()) == (mode == "no")


@pytest.mark.full
def test_compiled_steps_of_training_follow_the_flag(hasty):
    query = torch.randn(1, 5, 2, 8, requires_grad=True)

    def step(x):
        with attnops.use({"attention": "aten_flash"}):
            return attnops.attention(x, x, x).sum()

    def compiled():
        torch._dynamo.reset()
        loss = torch.compile(step, fullgraph=True)(query)
        return torch.autograd.grad(loss, query)[0]

    for mode in ("no", "must"):
        with asked(mode):
            grad, code = compiled_code(compiled)
            assert ("attention_backward.hasty" in kernel_calls(code)) == (mode == "no")
            assert bool((grad == 21.0).all()) == (mode == "no")


def test_without_another_kernel_the_call_is_refused_or_warned_of(hasty):
    query = torch.randn(1, 5, 2, 8)
    with torch.no_grad(), attnops.use(**ALONE):
        with asked("must"), pytest.raises(NoKernel, match=r"not hasty: repeatable=must \(wants no"):
            attnops.attention(query, query, query)
        with (
            asked("warn"),
            pytest.warns(
                UserWarning, match=r"^attention.hasty may give other bits at the next run"
            ),
        ):
            attnops.attention(query, query, query)
        with asked("no"), warnings.catch_warnings():
            warnings.simplefilter("error")
            attnops.attention(query, query, query)


def test_explain_says_what_the_flag_does(hasty):
    query = torch.randn(1, 5, 2, 8)
    with torch.no_grad():
        for mode, kernel in (("no", "hasty"), ("must", "sdpa"), ("warn", "sdpa")):
            with asked(mode):
                found = attnops.explain(lambda: attnops.attention(query, query, query), quiet=True)
                assert f"-> {kernel}" in str(found)
        with asked("warn"), attnops.use(**ALONE):
            found = attnops.explain(lambda: attnops.attention(query, query, query), quiet=True)
            assert "its bits may differ from run to run" in str(found)


# What outlives a call -----------------------------------------------------------------------------


def test_keys_of_compile_caches_have_the_flag():
    keys = []
    for mode in ("no", "warn", "must"):
        with asked(mode):
            keys.append(choice_inputs())
    assert len({*keys}) == 3


def test_a_captured_graph_is_stale_under_another_flag():
    guard = Guard({}, {}, 0)
    guard.check({})
    with asked("must"), pytest.raises(StaleGraph, match=r"repeatable .*got must, want no"):
        guard.check({})
    guard.check({})
