"""Kernels of third parties that raise, lie, or take in what they do not know: each is a refusal, or
an error of its own."""

import ast
import functools
import itertools
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version as Theirs

import attnops
from attnops.core import eager_cache, kernel as registry_module
from attnops.core.errors import NoKernel, RegistrationError, WrongResult
from attnops.core.kernel import (
    Core,
    Inline,
    Kernel,
    Package,
    Plan,
    Registry,
    Tolerance,
    all_kernels,
    at_most,
    demand,
    device,
    dtypes,
    extent_at_most,
    kernels_of,
    multiple_of,
    one_of,
    register,
    together,
    without,
)
from attnops.core.needs import features, parse, within
from attnops.core.problem import Problem, Refusal, Target
from attnops.core.select import choose, select, workspace_bytes
from attnops.core.traits import Built
from attnops.testing import CASES
from tests.helpers import ready_process, torch_process
from tests.test_select import installed

PLAIN = Problem("attention", Target(), q_heads=4, kv_heads=2, head_dim=8, v_head_dim=8)
REFERENCE = kernels_of("attention")["reference"]
_unique = itertools.count(-1_000_000, -1000)  # the registrations of one registry lie between


class Evil(Exception):
    """An error whose text cannot be made."""

    def __str__(self):
        raise RuntimeError("no text")


def run(call):
    """Knows no feature."""
    raise AssertionError("selection runs no kernel")


def theirs(name="theirs", op="attention", **more):
    """Register a kernel of a third party."""
    return register(
        Kernel(**{"name": name, "op": op, "run": run, "dtypes": (torch.float32,)} | more)
    )


def raises(error):
    def function(*_, **__):
        raise error

    return function


@pytest.fixture
def lab(monkeypatch):
    """A registry with one kernel that can run everything, `good`."""
    lab = Registry(generation=next(_unique))
    monkeypatch.setattr(registry_module, "_REGISTRY", lab)
    monkeypatch.setattr(eager_cache, "_REGISTRY", lab)
    register(
        replace(kernels_of_real["reference"], name="good", judge=False, cost_us=lambda p: 100.0)
    )
    return lab


kernels_of_real = dict(kernels_of("attention"))

PLACES = {
    "needs": lambda f: {"needs": (f,)},
    "probe": lambda f: {"probe": f},
    "cost_us": lambda f: {"cost_us": f},
    "workspace_bytes": lambda f: {"workspace_bytes": f},
    "inline.when": lambda f: {"inline": Inline(f)},
}
ERRORS = [
    ValueError("boom"),
    KeyError(3),
    SystemExit(3),
    Evil(),
    RecursionError(),
    MemoryError(),
    AttributeError("head_dims"),
    AssertionError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("place", PLACES)
def test_a_kernel_that_raises_refuses(lab, place, error):
    theirs(**PLACES[place](raises(error)))
    decision = select(PLAIN)
    assert decision.kernel.name == "good"
    (reason,) = decision.refused["theirs"]
    assert reason.field == f"theirs.{place}"
    assert type(error).__name__ in str(reason) and str(reason) in str(decision)
    with pytest.raises(NoKernel, match=r"theirs\.") as caught:
        choose(PLAIN, "kernel=theirs")
    assert type(error).__name__ in str(caught.value)
    assert workspace_bytes(PLAIN) == 0


@pytest.mark.parametrize("place", PLACES)
def test_a_user_may_stop_it(lab, place):
    theirs(**PLACES[place](raises(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        select(PLAIN)


NO_TIMES = (math.nan, math.inf, -1.0, "1", None, True, 10**400, torch.tensor(1.0), [1.0], 1j)
NO_SIZES = (-1, 1.5, None, "8", math.nan)


@pytest.mark.parametrize(
    ("field", "value"),
    [*(("cost_us", us) for us in NO_TIMES), *(("workspace_bytes", size) for size in NO_SIZES)],
    ids=lambda v: repr(v)[:20],
)
def test_a_number_that_is_none_is_a_refusal(lab, field, value):
    theirs(**{field: lambda p: value})
    decision = select(PLAIN)
    assert decision.kernel.name == "good" and [r.field for r in decision.refused["theirs"]] == [
        f"theirs.{field}"
    ]


@pytest.mark.parametrize("answer", [True, False, "no", 0, ()], ids=repr)
@pytest.mark.parametrize("place", ["needs", "probe"])
def test_an_answer_that_is_no_refusal_is_one(lab, place, answer):
    theirs(**PLACES[place](lambda _: answer))
    assert [r.field for r in select(PLAIN).refused["theirs"]] == [f"theirs.{place}"]


def test_what_failed_is_asked_again_and_what_answered_is_not(lab):
    asked = []

    def need(p):
        asked.append(p)
        if len(asked) == 1:
            raise OSError("too many open files")

    theirs(needs=(need,), cost_us=lambda p: 1.0)
    assert select(PLAIN).kernel.name == "good"
    assert select(PLAIN).kernel.name == "theirs"
    assert select(PLAIN) is select(PLAIN) and len(asked) == 2


def test_a_plan_is_priced_with_the_call(lab):
    theirs(
        cost_us=lambda p: 1.0 if p.step.plan == "none" else math.nan,
        plan=Plan(device=raises(ValueError())),
    )
    assert [r.field for r in select(PLAIN).refused["theirs"]] == ["theirs.cost_us"]


# Misspelt -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda: one_of("head_dims", 64),
        lambda: one_of("dtype", "bfloat16"),
        lambda: dtypes("float32"),
        lambda: at_most("mask", 4),
        lambda: multiple_of("queries", 4),
        lambda: extent_at_most("head_dim", 4),
        lambda: demand("head_dim, v_dim", "64", lambda p: True),
        lambda: without("mask", "sink"),
        lambda: device("gpu"),
        lambda: Package("theirs", ("theirs",), below="1.x"),
    ],
)
def test_a_misspelt_need_is_an_error_where_it_is_built(build):
    with pytest.raises(
        RegistrationError, match=r"(need|package theirs): .*got .*, (which is of type .*, )?want "
    ):
        build()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("needs", one_of("head_dim", 64)),
        ("needs", (without("mask"),)),
        ("packages", ("torch",)),
        ("run", None),
        ("run", type),
        ("capture", "never"),
        ("tolerance", Tolerance(0.0)),
        ("tolerance", 1.0),
        ("cost_us", 1.0),
        ("probe", True),
        ("inline", True),
        ("workspace_bytes", 8),
        ("dtypes", ()),
        ("dtypes", ("float32",)),
        ("kv_dtypes", ()),
        ("takes", ("mask",)),
        ("built", Built(3, str)),
        ("built", Built(str, "no")),
    ],
)
def test_a_field_of_another_kind_is_an_error_at_registration(lab, field, value):
    before = {op: dict(table) for op, table in lab.kernels.items()}
    with pytest.raises(RegistrationError, match=f"kernel theirs: {field}[.a-z]* got "):
        theirs(**{field: value})
    assert lab.kernels == before


def test_a_core_that_is_no_schema_leaves_no_trace():
    before = tuple(kernels_of("merge_state")), torch.ops.attnops.merge_state.overloads()
    with pytest.raises(RegistrationError, match=r"core\.schema got '\(Tensor -> ', want a schema"):
        theirs(op="merge_state", inline=Inline(core=Core("(Tensor -> ", run, run)))
    assert (tuple(kernels_of("merge_state")), torch.ops.attnops.merge_state.overloads()) == before


# Beside calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["attention", "merge_state"])
def test_a_kernel_may_be_registered_while_a_call_selects(lab, op):
    """As by another thread: the selection that is under way reads the kernels that there were."""
    arrived = []

    def need(problem):
        if not arrived:
            arrived.append(theirs("late", op))

    theirs("asks", needs=(need,))
    before = all_kernels()
    tables = iter(lab.kernels.values())
    decision = select(PLAIN)
    assert {decision.kernel.name, *decision.passed_over} == {"good", "asks"}
    assert [k for table in tables for k in table.values()] == list(before)
    assert all_kernels() == (*before, *arrived)


# All or none --------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["in the module", "in a listener"])
@pytest.mark.parametrize(
    "error",
    [ValueError("later"), SystemExit(1), KeyboardInterrupt()],
    ids=lambda e: type(e).__name__,
)
def test_kernels_of_one_module_count_together(lab, error, late):
    heard = []
    lab.listeners.append(raises(error) if late else lambda k: heard.append(k.name))
    with pytest.raises(type(error)), together():
        theirs("first")
        theirs("second", "merge_state")
        assert "first" in kernels_of("attention")
        if not late:
            raise error
    assert (
        list(kernels_of("attention")) == ["good"]
        and not kernels_of("merge_state")
        and not heard
        and lab.waiting is None
    )
    lab.listeners[-1] = lambda k: heard.append(k.name)
    with together():
        theirs("first")
        assert not heard
    assert list(kernels_of("attention")) == ["good", "first"] and heard == ["first"]


HEAD = """import torch
from attnops.core.kernel import *
from attnops.core.kernel import Kernel, register
def run(call): return call.query, call.query
def theirs(name, op="attention", **more): register(Kernel(name, op, run, dtypes=(torch.float32,), **more))
"""  # noqa: E501
BROKEN = {
    "two_then_raises": (
        HEAD + "theirs('one_t')\ntheirs('two', 'merge_state')\n1 / 0  # [/t]",
        "ZeroDivisionError",
    ),
    "two_then_exits": (
        HEAD + "theirs('one_e')\ntheirs('two')\nraise SystemExit(3)",
        "SystemExit: 3",
    ),
    "second_is_misspelt": (
        HEAD + "theirs('one_m')\ntheirs('two_m', 'atention')",
        "RegistrationError: kernel two_m: op got",
    ),
    "need_is_misspelt": (
        HEAD + "theirs('one_n', needs=without('soft_cap'))",
        "RegistrationError: need",
    ),
    "wants_a_package": (
        "import surely_not_installed",
        "ModuleNotFoundError: No module named 'surely_not_installed'",
    ),
    "wrong_contract": (
        HEAD + "theirs('old', contract=99)",
        "ContractMismatch: kernel old: contract got 99, want",
    ),
    "taken_name": (HEAD + "theirs('sdpa')", "RegistrationError: kernel name: got 'sdpa'"),
    "syntax": ("def f(:", "SyntaxError"),
}
"""Modules that cannot be loaded, and why."""
FAILING = {
    "in_needs": (HEAD + "def f(p): raise SystemExit\ntheirs('in_needs', needs=(f,))", "needs"),
    "in_cost": (HEAD + "theirs('in_cost', cost_us=lambda p: 1 / 0)", "cost_us"),
    "in_probe": (
        HEAD + "def f(t): raise OSError('no [/driver]')\ntheirs('in_probe', probe=f)",
        "probe",
    ),
    "priceless": (HEAD + "theirs('priceless', cost_us=lambda p: float('nan'))", "cost_us"),
}
"""Kernels that fail when they are asked, and where."""


def test_installed_plugins_that_fail_harm_no_call_no_doctor_and_no_import(tmp_path):
    for name, (source, _) in (BROKEN | FAILING).items():
        env = installed(tmp_path, name, source)
    installed(tmp_path, "no_text", "")
    (tmp_path / "no_text-1.0.dist-info" / "entry_points.txt").write_text(
        "[attnops.kernels]\nnothing_here = :::\n"
    )
    code = """
import json, torch, attnops
from attnops.cli import doctor
from attnops.cli.tables import new_console, show_explanation
from attnops.core.kernel import broken_kernels, kernels_of
from attnops.lowering import cache_key
from attnops.core.select import select
q = torch.randn(1, 3, 2, 8)
attnops.attention(q, q, q)
torch.compile(lambda q: attnops.attention(q, q, q), backend="aot_eager", fullgraph=True)(q)
found = attnops.explain(lambda: attnops.attention(q, q, q), quiet=True)
assert len(cache_key.choice_inputs()) > 5
report = doctor.examine()
json.dumps(report)
doctor.show(report, new_console())
show_explanation(found, new_console())
print('names')
print(list(kernels_of("attention")), list(kernels_of("merge_state")))
print(dict(broken_kernels()))
print(json.dumps({n: [r.field for r in rs] for n, rs in found.sites[0].decision.refused.items()}))
"""
    names, broken, refused = ready_process(code, env=env).rpartition("names\n")[2].splitlines()
    attention, merge = ast.literal_eval(names.replace("] [", "], ["))
    assert sorted(attention) == sorted([*kernels_of_real, *FAILING]) and merge == list(
        kernels_of("merge_state")
    )
    texts = {name.partition(" ")[0]: text for name, text in ast.literal_eval(broken).items()}
    assert texts.keys() == {*BROKEN, "nothing_here"}
    assert all(texts[name].startswith(reason) for name, (_, reason) in BROKEN.items()), texts
    reasons = json.loads(refused)
    assert all(f"{name}.{place}" in reasons[name] for name, (_, place) in FAILING.items()), reasons


# Results ------------------------------------------------------------------------------------------


def right(call):
    return torch.zeros_like(call.query), call.query.new_empty(0)


PROMISES_BROKEN = {
    "result got a tensor, want a tuple of 2: output, lse": (
        "attention",
        lambda call: right(call)[0],
    ),
    "result got a tuple of 3, want a tuple of 2: output, lse": (
        "attention",
        lambda call: (*right(call), None),
    ),
    "output.shape got (3, 2, 8), want (1, 3, 2, 8)": (
        "attention",
        lambda call: (call.query[0].clone(), right(call)[1]),
    ),
    "output.dtype got float64, want float32": (
        "attention",
        lambda call: (right(call)[0].double(), right(call)[1]),
    ),
    "output.stride() got (48, 8, 24, 1), want (48, 16, 8, 1)": (
        "attention",
        lambda call: (torch.zeros(1, 2, 3, 8).transpose(1, 2), right(call)[1]),
    ),
    "output.device got meta, want cpu": (
        "attention",
        lambda call: (right(call)[0].to("meta"), right(call)[1]),
    ),
    "result got a tensor, want None, because the op writes into its arguments": (
        "write_kv",
        lambda call: call.k_pages,
    ),
}


@pytest.mark.parametrize("text", PROMISES_BROKEN)
def test_results_that_the_op_does_not_promise_are_refused_by_name(lab, text):
    op, wrong = PROMISES_BROKEN[text]
    theirs(op=op, run=wrong, cost_us=lambda p: 1.0)
    q, pages = torch.randn(1, 3, 2, 8), torch.zeros(2, 4, 2, 8)
    for _ in range(2):
        with pytest.raises(WrongResult, match=re.escape(f"{op}.theirs: {text};")):
            if op == "attention":
                attnops.attention(q, q, q)
            else:
                attnops.write_kv(q[0], q[0], pages, pages.clone(), torch.arange(3))


def test_a_kernel_whose_first_results_were_right_is_not_checked_again(lab):
    results = [right, lambda call: ("unchecked", None)]
    theirs(run=lambda call: results.pop(0)(call), cost_us=lambda p: 1.0)
    q = torch.randn(1, 3, 2, 8)
    attnops.attention(q, q, q)
    assert attnops.attention(q, q, q) == "unchecked"


# Features that a plug-in does not know ------------------------------------------------------------


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    "case",
    [c for op in ("attention", "varlen_attention", "paged_attention") for c in CASES[op]],
    ids=str,
)
def test_a_kernel_that_lists_nothing_knows_nothing(case):
    problem = case.call().problem
    asked = {refusal.field for refusal, _ in features(problem)}
    known = replace(kernels_of(case.op)["reference"], name="theirs")
    swallower = Kernel("theirs", case.op, run, dtypes=known.dtypes, kv_dtypes=known.kv_dtypes)
    assert {r.field for r in swallower.refusals(problem)} == asked
    # The same with the names: it knows them all.
    assert not known.unmet(problem)


@pytest.mark.parametrize(
    "options",
    [{"softcap": 30.0}, {"window": (1, -1)}, {"mask": torch.ones(1, 1, 3, 3, dtype=torch.bool)}],
    ids=lambda o: next(iter(o)),
)
def test_it_is_never_handed_what_it_does_not_know(lab, options):
    handed = []

    def taking(call):
        handed.append(call)
        return call.query.clone(), call.query.new_empty(0, dtype=torch.float32)

    register(Kernel("theirs", "attention", taking, dtypes=(torch.float32,), cost_us=lambda p: 1.0))
    q = torch.randn(1, 3, 2, 8)
    for _ in range(3):
        attnops.attention(q, q, q, **options)
    assert not handed
    for _ in range(3):
        attnops.attention(q, q, q)
    assert len(handed) == 3 and all(
        call.softcap == 0 and call.sinks is call.mask is None for call in handed
    )


# Versions -----------------------------------------------------------------------------------------

VERSIONS = [
    "0.4.0rc1",
    "0.4.0",
    "0.4",
    "0.4.0.post1",
    "0.4.0.dev3",
    "0.4.0rc1.dev2",
    "0.4.0b2.post3",
    "0.4.0+cu130",
    "0.4.0rc1+cu130",
    "1!0.1",
    "4.0.0b36",
    "4.0.0",
    "v1.0",
    "1.0-1",
    "1.0.post1.dev2",
    "2.11.0a0+git1",
    "10.0",
    "9.9",
    "0.4.7rc1",
    "1",
    "1.0c1",
    " 1.0 ",
    "0",
]
WRONG = ("", "unknown", "1.x", "1.0+", "1.0 beta", "==1.0", "1" * 300, "١.٠")


@pytest.mark.parametrize("a", VERSIONS)
def test_versions_lie_in_bounds_as_packaging_says(a):
    for bound in map(Theirs, VERSIONS):
        public = str(bound.public)
        assert within(a, public, "") == SpecifierSet(f">={public}", prereleases=True).contains(a), (
            a,
            public,
        )
        if not bound.is_postrelease:  # about whose pre-releases packaging has changed its mind
            assert within(a, "", public) == SpecifierSet(f"<{public}", prereleases=True).contains(
                a
            ), (a, public)


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_version_lies_in_no_bounds(text):
    assert parse(text) is None or len(text) > 100
    assert not within(text, "0.1", "") and not within(text, "", "9") and within(text, "", "")


def test_a_pre_release_is_older_than_its_release(monkeypatch):
    monkeypatch.setattr("attnops.core.needs._installed", lambda module: True)
    monkeypatch.setattr("attnops.core.needs._version", lambda dist: "0.4.0rc1")
    assert Package("theirs", ("theirs",), "0.4.0").missing(Target()) == Refusal(
        "package", "theirs 0.4.0rc1", ">= 0.4.0"
    )
    assert Package("theirs", ("theirs",), "0.4.0rc1").missing(Target()) is None


def test_versions_compare_where_torch_has_no_copy_of_packaging():
    block = "import sys, torch; sys.modules['torch._vendor.packaging.version'] = None; "
    compared = "within('0.4.0rc1', '0.3', '0.4'), within('0.3', '0.3', '')"
    code = (
        f"{block}from attnops.core.needs import Version, within; print(Version.__module__, "
        f"{compared})"
    )
    assert torch_process(code).split() == ["packaging.version", "False", "True"]


def test_a_kernel_that_wraps_a_reference_runs(lab):
    """functools.wraps takes over what the reference carries."""
    reference, handed = REFERENCE, []
    register(reference)

    @functools.wraps(reference.run)
    def wrapping(call):
        handed.append(call)
        return reference.run(call)

    theirs(run=wrapping, takes=reference.takes)
    query = torch.randn(1, 3, 2, 8)
    want = attnops.attention(query, query, query, kernel="reference")
    for calls in (1, 2):
        got = attnops.attention(query, query, query, kernel="theirs")
        assert torch.equal(got, want)
        assert len(handed) == calls
