"""Selection: pure, memoised, steered by policies; registration that leaves no trace of a bad
kernel; kernels of third parties."""

import itertools
import os
import re
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

import attnops
from attnops.core import kernel as registry_module
from attnops.core.errors import (
    AttnopsError,
    ContractMismatch,
    InvalidInput,
    NoKernel,
    RegistrationError,
    UnknownKernel,
)
from attnops.core.kernel import (
    CONTRACT,
    Invariant,
    Kernel,
    Package,
    Registry,
    all_kernels,
    all_of,
    arch,
    at_most,
    broken_kernels,
    device,
    dtypes,
    extent_at_least,
    extent_at_most,
    generation,
    kernel_names,
    kernels_of,
    multiple_of,
    one_of,
    register,
    without,
)
from attnops.core.problem import (
    LEAVES,
    ONE,
    Extent,
    Problem,
    Refusal,
    Target,
    altered,
    leaf,
    pretend,
    pretended,
)
from attnops.core.record import FLOATS
from attnops.core.select import (
    Policy,
    active_policy,
    choose,
    key_for,
    parse_policy,
    select,
    select_by,
    use,
)
from attnops.lowering.explain import packages_of_kernels
from attnops.measured import Grid, Table
from attnops.ops import OPS
from attnops.testing import CASES
from tests.graphs.models import BOUNDARY
from tests.helpers import ROOT, ready_process, torch_process

F64 = torch.float64
DECODE = altered(
    Problem(
        "paged_attention",
        Target("cuda", 90),
        torch.bfloat16,
        torch.bfloat16,
        32,
        8,
        128,
        128,
        page_size=16,
    ),
    causal=True,
    tokens=Extent.of(8),
    batch=Extent.of(8),
    queries=Extent.of(1),
    context=Extent.of(4096),
)
SINKS = Problem.of(
    "attention", Target(), q_heads=4, kv_heads=2, head_dim=8, v_head_dim=8, sinks=True, softcap=True
)

_unique = itertools.count(-1, -1)


def nothing(call):
    raise AssertionError("selection runs no kernel")


def idle(name, op="attention", **more):
    """A kernel that is not run."""
    takes = frozenset({"causal", "softcap", "sinks"}) if op == "attention" else frozenset()
    return Kernel(name, op, nothing, **{"takes": takes, "dtypes": FLOATS, **more})


@pytest.fixture
def lab(monkeypatch):
    """A registry of our own for the op `attention`: `slow`, `fast`, which refuses sinks, and
    `steady`, which is batch invariant."""
    lab = Registry(generation=next(_unique))
    monkeypatch.setattr(registry_module, "_REGISTRY", lab)
    parse_policy.cache_clear()
    kernels = (
        idle("slow", cost_us=lambda p: 100.0),
        idle("fast", needs=without("sinks", "softcap"), cost_us=lambda p: 1.0),
        idle("steady", cost_us=lambda p: 50.0, invariant=Invariant()),
        idle("other", "varlen_attention"),
    )
    for kernel in kernels:
        lab.kernels.setdefault(kernel.op, {})[kernel.name] = kernel
    yield lab
    parse_policy.cache_clear()


PLAIN = Problem("attention", Target(), q_heads=4, kv_heads=2, head_dim=8, v_head_dim=8)


# Pure ---------------------------------------------------------------------------------------------


def test_a_laptop_answers_for_any_machine():
    code = """
import sys, torch, attnops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Problem, Target
from attnops.core.select import select
for text in ("cpu", "sm80", "sm90", "sm100", "sm120"):
    for op in ("attention", "paged_attention", "write_kv"):
        heads = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
        problem = Problem.of(op, Target.parse(text, assume=()), **heads, page_size=16, causal=True, context=Extent.of(4096))
        decision = select(problem)
        names = [decision.kernel.name, *decision.passed_over, *decision.refused]
        assert sorted(names) == sorted(kernels_of(op)), (text, op, names)
        print(text, op)
assert not torch.cuda.is_initialized()
foreign = {"triton", "transformers", "flashinfer", "sgl_kernel", "torch._inductor", "torch._dynamo"} & set(sys.modules)
assert not foreign, foreign
"""  # noqa: E501
    printed = torch_process(code, env={"CUDA_VISIBLE_DEVICES": ""}).splitlines()
    assert len(printed) == 15


def test_a_new_kernel_is_asked(lab):
    assert choose(PLAIN).name == "fast"
    register(idle("faster", cost_us=lambda p: 0.5))
    assert choose(PLAIN).name == "faster"


def test_selection_has_no_side_effects_and_is_remembered(lab):
    asked = []
    lab.kernels["attention"]["curious"] = idle(
        "curious", needs=(lambda p: asked.append(p),), cost_us=lambda p: 70.0
    )
    before = Problem.of(**{n: leaf(PLAIN, n) for n in LEAVES})
    decision = select(PLAIN)
    assert decision is select(before) is not select(PLAIN, "prefer=slow")
    assert asked == [PLAIN, PLAIN] and before == PLAIN
    assert decision.passed_over == ("steady", "curious", "slow")


def test_a_kernel_that_failed_is_asked_again_where_torch_only_warns(lab):
    """Its cost fails for the call as it is, and for the one that need not repeat its bits."""
    left = [1, 1]

    def cost_us(problem):
        if left:
            left.pop()
            raise RuntimeError("the GPU is busy")
        return 1.0

    lab.kernels["attention"]["flaky"] = idle("flaky", cost_us=cost_us, repeats=None)
    problem, policy = altered(PLAIN, repeatable="warn"), Policy(kernel=("attention:flaky",))
    chosen = [select(problem, policy).kernel for _ in range(4)]
    assert chosen[0] is None and chosen[-1] is not None and chosen[-1].name == "flaky"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("op", list(OPS))
def test_every_op_has_a_reference_for_cpu(op):
    for case in CASES[op]:
        assert select(case.call().problem).kernel is not None, str(case)


# Forced, allowed, denied, preferred ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        (Policy(), "fast"),
        (Policy(kernel=("attention:slow",)), "slow"),
        (Policy(kernel=("other",)), "fast"),
        (Policy(kernel=("varlen_attention:other", "slow")), "slow"),
        (Policy(allow=("slow", "steady")), "steady"),
        (Policy(allow=("other",)), "fast"),
        (Policy(deny=("attention:fast", "steady")), "slow"),
        (Policy(prefer=("slow", "fast")), "slow"),
        (Policy(prefer=("attention:steady",)), "steady"),
        (Policy(prefer=("fast",), deny=("fast",)), "steady"),
        (Policy(deterministic=True, prefer=("fast",)), "steady"),
    ],
    ids=lambda v: v.key if isinstance(v, Policy) else v,
)
def test_policy(lab, policy, chosen):
    assert choose(PLAIN, policy).name == chosen
    assert choose(PLAIN, policy.key).name == chosen


def test_a_kernel_that_cannot_run_is_passed_by(lab):
    assert choose(SINKS).name == "steady"
    assert choose(SINKS, Policy(prefer=("fast",))).name == "steady"


@pytest.mark.parametrize(
    ("policy", "reasons"),
    [
        (
            Policy(kernel=("fast",)),
            [
                "'fast' was asked for",
                "not fast: sinks=True (wants no); softcap=True (wants no)",
                "policy.kernel",
            ],
        ),
        (
            Policy(deny=("slow", "steady")),
            ["no kernel can run", "not slow: policy.deny=slow,steady", "not steady: policy.deny"],
        ),
        (
            Policy(allow=("fast",)),
            ["not fast: sinks=True", "not slow: policy.allow=fast (wants to hold slow)"],
        ),
        (
            Policy(deterministic=True, deny=("steady",)),
            ["not slow: batch_invariant=False", "not fast: sinks=True (wants no);"],
        ),
    ],
    ids=lambda v: v.key if isinstance(v, Policy) else "",
)
def test_when_nothing_fits_every_reason_is_told(lab, policy, reasons):
    assert select(SINKS, policy).kernel is None
    with pytest.raises(NoKernel) as caught:
        choose(SINKS, policy)
    for reason in reasons:
        assert reason in str(caught.value)
    assert set(caught.value.decision.refused) == {"slow", "fast", "steady"}
    assert str(caught.value).count("\n  not ") == 3


GPU = Problem(
    "attention", Target("cuda", 90, assume=()), q_heads=4, kv_heads=2, head_dim=8, v_head_dim=8
)


def judged(lab, **us):
    """The lab with a judge that promises to be the fastest by far, and a table that holds these
    times."""
    lab.kernels["attention"]["plain"] = idle(
        "plain", cost_us=lambda p: 1e-3, judge=True, invariant=Invariant()
    )
    kind = Problem.kind("attention", q_heads=4, kv_heads=2, head_dim=8, v_head_dim=8, queries=ONE)
    grid = Grid(kind, (1.0,), (1.0,), (1.0,), {n: (t,) for n, t in us.items()})
    return Table("Some GPU", "sm90", {f"attention.{n}": "any" for n in us}, (grid,)) if us else None


@pytest.mark.parametrize(
    ("us", "policy", "chosen", "says"),
    [
        ({}, "", "fast", ""),
        ({}, "deny=fast", "steady", ""),
        ({}, "deny=fast,slow,steady", "plain", "no kernel can run this call"),
        ({}, "allow=plain", "plain", "no kernel can run this call"),
        ({}, "prefer=plain", "plain", "asked for"),
        ({}, "kernel=plain", "plain", "asked for"),
        ({}, "deterministic", "steady", ""),
        (
            {"plain": 5.0, "fast": 9.0, "slow": 9.0, "steady": 9.0},
            "",
            "plain",
            "the fastest measured",
        ),
        ({"plain": 9.0, "fast": 5.0}, "", "fast", ""),
        ({"plain": 5.0}, "", "fast", ""),  # no time of another is measured
        ({"slow": 5.0}, "", "slow", ""),
        (
            {"plain": 300.0, "slow": 2000.0},
            "",
            "fast",
            "",
        ),  # the best of the others, 4 times its estimate, is not measured
    ],
)
def test_no_estimate_chooses_the_judge_on_a_gpu(lab, us, policy, chosen, says):
    decision = select_by(judged(lab, **us), GPU, policy)
    assert decision.kernel.name == chosen and decision.by_judge == says
    head = str(decision).splitlines()[0]
    assert head.endswith(f"-> {chosen}{decision.measured}" + f": {says}" * bool(says))
    if "plain" in decision.passed_over and "plain" not in us:
        assert "not plain: can run, on a GPU only where nothing else can" in str(decision)
    on_cpu = select_by(None, replace(GPU, target=Target()), policy)
    assert on_cpu.by_judge == "" and (policy or on_cpu.kernel.name == "plain"), (
        "a CPU goes by estimates"
    )


def test_a_judge_ranks_behind_every_kernel(lab):
    judged(lab)
    plain, slow = select_by(None, GPU, "allow=plain"), select_by(None, GPU, "allow=slow")
    assert slow.rank < plain.rank < select_by(None, GPU, "kernel=slow;deny=slow").rank
    assert select_by(None, replace(GPU, target=Target()), "allow=plain").rank < slow.rank


@pytest.mark.sweep(6)
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("op", list(OPS))
def test_every_reference_is_lowered_in_place_or_judges(op, arch):
    """Whatever the sizes: the reference of an op is chosen on a GPU only where it is alone, or
    where the compiler fuses it."""
    plain = kernels_of(op)["reference"]
    assert plain.judge != bool(plain.inline)
    for case in CASES[op]:
        problem = replace(
            case.call().problem, target=Target("cuda", arch, assume=packages_of_kernels())
        )
        # An op on floats is asked in bfloat16; one on integers, or on bytes, has no other dtype.
        wide = {
            n: torch.bfloat16
            for n in ("dtype", "kv_dtype")
            if getattr(problem, n) in (torch.float32, torch.float64)
        }
        for size in (1, 4096):
            sizes = {n: Extent.of(size) for n in ("tokens", "batch", "queries", "context")}
            found = select_by(None, altered(problem, **wide, **sizes))
            if found.kernel is not None and found.kernel.judge:
                # Tests of graphs in this process leave a kernel of theirs behind.
                others = {*found.passed_over} - {BOUNDARY}
                assert not others and found.by_judge, (str(case), str(found))


def test_policies_name_kernels_that_exist():
    for policy in ("kernel=fa9", "allow=fa9", "deny=fa9", "prefer=fa9", "kernel=merge_state:sdpa"):
        with pytest.raises(UnknownKernel, match=r"kernel: got '(fa9|sdpa)', want one of"):
            parse_policy(policy)
    with pytest.raises(
        UnknownKernel, match=r"kernel: got 'fa9', want one of .*, triton, triton_aten \(op linear\)"
    ):
        parse_policy("kernel=linear:fa9")
    with pytest.raises(
        InvalidInput,
        match=r"policy: got 'linar:triton', want an op before the colon: accept \| .* \| "
        r"linear \| ",
    ):
        parse_policy("kernel=linar:triton")
    for policy in ("kernel", "kernel=", "speed=fast", "deterministic=yes", "reference"):
        with pytest.raises(InvalidInput, match="policy: got"):
            parse_policy(policy)


ENTRY = st.one_of(
    st.sampled_from(kernel_names()),
    st.sampled_from([f"{k.op}:{k.name}" for k in all_kernels()]),
)
ENTRIES = st.lists(ENTRY, max_size=3).map(tuple)


@given(ENTRIES, ENTRIES, ENTRIES, ENTRIES, st.booleans())
def test_a_policy_is_its_key(kernel, allow, deny, prefer, deterministic):
    policy = Policy(kernel, allow, deny, prefer, deterministic)
    assert parse_policy(policy.key) == policy
    assert (policy.key == "") == (policy == Policy())


@pytest.mark.parametrize(
    "region", [{"deny": ("flex",)}, {"deterministic": True}, {"kernel": "reference"}], ids=str
)
def test_a_forced_call_keeps_the_rest_of_the_region(region):
    with use(**region):
        parsed = parse_policy(key_for("attention", "sdpa"))
    assert parsed == Policy(**region | {"kernel": ("attention:sdpa",)})


# The policy in force ------------------------------------------------------------------------------


def test_use_nests_and_restores():
    before = active_policy()
    with pytest.raises(ZeroDivisionError), use("reference"):
        with use({"attention": "sdpa"}, deny=("flex",)):
            assert parse_policy(active_policy()) == Policy(("attention:sdpa",), deny=("flex",))
        assert active_policy() == "kernel=reference"
        raise ZeroDivisionError
    with pytest.raises(UnknownKernel), use("fa9"):
        raise AssertionError("never entered")
    assert active_policy() == before


def test_use_is_of_one_thread():
    seen = {}
    inside, done = threading.Event(), threading.Event()

    def other():
        inside.wait(10)
        seen["other"] = active_policy()
        with use(deny=("sdpa",)):
            seen["own"] = active_policy()
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with use("reference"):
        inside.set()
        assert done.wait(10)
        seen["here"] = active_policy()
    thread.join()
    assert seen == {"other": "", "own": "deny=sdpa", "here": "kernel=reference"}


def test_use_steers_eager_calls():
    q = torch.randn(1, 3, 2, 8)
    with use("reference"):
        by_region = attnops.attention(q, q, q)
    assert torch.equal(by_region, attnops.attention(q, q, q, kernel="reference"))
    with use(kernel={"attention": "sdpa"}), pytest.raises(NoKernel):
        attnops.attention(q, q, q, softcap=1.0)
    with use("sdpa"):
        # The call's own word is the last one.
        attnops.attention(q, q, q, softcap=1.0, kernel="reference")


def test_the_environment_gives_the_first_policy():
    code = """
import threading, attnops
from attnops.core.select import active_policy
print(active_policy())
t = threading.Thread(target=lambda: print(active_policy())); t.start(); t.join()
with attnops.use():
    print(repr(active_policy()))
"""
    assert ready_process(code, env={"ATTNOPS_POLICY": "deny=sdpa"}).split() == [
        "deny=sdpa",
        "deny=sdpa",
        "''",
    ]


# Registration -------------------------------------------------------------------------------------


def trace():
    """All that a kernel leaves behind."""
    overloads = {name: tuple(op.packet.overloads()) for name, op in OPS.items()}
    tables = {op: tuple(table) for op, table in registry_module._REGISTRY.kernels.items()}
    return tables, kernel_names(), generation(), overloads, dict(broken_kernels())


@pytest.mark.parametrize(
    ("kernel", "error", "text"),
    [
        (
            idle("reference"),
            RegistrationError,
            "got 'reference', want one not yet registered for attention",
        ),
        (
            idle("mine", contract=CONTRACT + 1),
            ContractMismatch,
            f"contract got {CONTRACT + 1}, want {CONTRACT}",
        ),
        (
            idle("mine", contract=1),
            ContractMismatch,
            f"kernel mine: contract got 1, want {CONTRACT}",
        ),
        (
            idle("mine", "convolution"),
            RegistrationError,
            "kernel mine: op got 'convolution', want one of ",
        ),
        *(
            (idle(name), RegistrationError, f"kernel name: got {name!r}, want lower-case")
            for name in (
                "",
                "Mine",
                "my-kernel",
                "1st",
                "a.b",
                "a b",
                "default",
                "kernel;deny=sdpa",
                "a:b",
                "mine\n",
            )
        ),
        # These would be overloads that no code can name: attributes of every torch op, and words of
        # Python.
        *(
            (idle(name), RegistrationError, f"kernel name: got {name!r}, want no word of Python")
            for name in ("overloads", "op", "import", "is", "lambda")
        ),
    ],
    ids=lambda v: repr(v.name) if isinstance(v, Kernel) else "",
)
def test_a_bad_kernel_leaves_no_trace(kernel, error, text):
    before = trace()
    with pytest.raises(error) as caught:
        register(kernel)
    assert text in str(caught.value)
    assert isinstance(caught.value, AttnopsError)
    assert trace() == before


def test_kernels_declare_what_tables_show():
    for kernel in all_kernels():
        if not kernel.run.__module__.startswith("attnops."):
            continue  # one that another test of this process registers
        assert kernel.about, kernel
        assert kernel.tolerance.factor > 0
        assert kernel.cost_us(DECODE) >= 0


# Third parties ------------------------------------------------------------------------------------


def installed(folder, module, source):
    """A distribution in `folder` whose one module is named in the entry-point group. Returns the
    environment that finds it."""
    (folder / f"{module}.py").write_text(textwrap.dedent(source))
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attnops.kernels]\n{module} = {module}\n")
    path = os.pathsep.join(
        p for p in (str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")) if p
    )
    return {"PYTHONPATH": path}


# At most 60 lines: what adding a kernel takes.
SCRATCH = '''
"""A kernel of a third party: decode and extend, one request after the other."""

import torch

from attnops.core.kernel import Kernel, register


def paged_attention(call):
    output, lse, starts = call.output, call.lse, call.cu_seqlens_q
    output.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
    for b, length in enumerate(call.seq_lens.tolist()):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        pages = call.page_table[b, : -(-length // call.k_pages.shape[1])].long()
        wide = torch.float64 if call.query.dtype == torch.float64 else torch.float32
        k, v = (p[pages].flatten(0, 1)[:length].to(wide) for p in (call.k_pages, call.v_pages))
        q = call.query[rows].to(wide)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        s = torch.einsum("nhd,lhd->hnl", q, k) * call.scale
        position = torch.arange(q.shape[0], device=q.device)[:, None] + length - q.shape[0]
        if call.causal:
            s = s.masked_fill(torch.arange(length, device=q.device) > position, float("-inf"))
        if length:
            z = torch.logsumexp(s, -1)
            p = torch.exp(s - torch.where(z == float("-inf"), 0.0, z)[..., None])
            output[rows] = torch.einsum("hnl,lhd->nhd", p, v).to(output.dtype)
            if lse is not None:
                lse[rows] = z.T.float()


register(
    Kernel(
        "scratchpad",
        "paged_attention",
        paged_attention,
        takes=frozenset({"causal", "lse"}),
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        cost_us=lambda p: 5e5,
        about="a loop over requests",
    )
)
'''


@pytest.mark.slow
def test_a_kernel_in_a_scratch_file_is_everywhere(tmp_path):
    """Registry, decisions, doctor, and the tests of numerics, opcheck and fakes, without touching
    another file."""
    assert len(SCRATCH.strip().splitlines()) <= 60
    env = installed(tmp_path, "scratch_kernels", SCRATCH)
    code = """
import torch, attnops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target
from attnops.testing import CASES
cases = {c.label: c.call() for c in CASES["paged_attention"]}
t = cases["plain"].arguments
names = ("query", "k_pages", "v_pages", "page_table", "seq_lens", "cu_seqlens_q")
call = lambda **more: attnops.paged_attention(*(t[n] for n in names), max_seqlen_q=4, **more)
from attnops.cli.doctor import examine
print(list(kernels_of("paged_attention"))[-1])
print("scratchpad" in str(examine()))
for more in ({}, {"softcap": 1.0}):
    print(" ".join(str(attnops.explain(lambda: call(**more), quiet=True)).split()))
"""
    last, listed, decision, refused = ready_process(code, env=env).splitlines()
    assert (last, listed) == ("scratchpad", "True")
    assert "not scratchpad: can run, estimated slower" in decision
    assert "not scratchpad: softcap=True (wants no)" in refused
    files = [f"tests/ops/test_{n}.py" for n in ("numerics", "opcheck", "fakes")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "scratchpad",
        *files,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-4000:]
    [passed] = map(int, re.findall(r"(\d+) passed", done.stdout))
    assert passed >= 50, done.stdout[-2000:]


# Extents, targets, needs --------------------------------------------------------------------------


@given(st.integers(0, 2**40))
def test_an_extent_holds_its_size(n):
    extent = Extent.of(n)
    assert extent.hi is not None
    assert extent.lo <= n <= extent.hi
    assert extent.lo <= extent.hint <= extent.hi
    # Exact up to 2, and then as coarse as a factor of two: sizes 1 and 2 are what kernels tell
    # apart.
    assert (extent.lo == extent.hi) if n <= 2 else (extent.hi < 2 * extent.lo)
    # What costs are estimated from is finer.
    assert n <= extent.hint <= n * 9 / 8


@given(st.integers(3, 2**20), st.integers(0, 2**20))
def test_extents_are_equal_or_apart(a, b):
    x, y = Extent.of(a), Extent.of(b)
    assert (x.lo, x.hi) == (y.lo, y.hi) or (x.hi or 0) < y.lo or (y.hi or 0) < x.lo


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("cpu", ("cpu", 0)),
        ("sm90", ("cuda", 90)),
        ("sm_100", ("cuda", 100)),
        ("sm90a", ("cuda", 90)),
        ("gfx90a", ("hip", 0x90A)),
    ],
)
def test_targets_are_parsed(text, target):
    parsed = Target.parse(text)
    assert (parsed.device, parsed.arch) == target
    assert Target.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text",
    ["", "gpu", "sm", "sm9", "90", "sm90x", "SM90", "cuda", "sm1000", "gfx", "gfx9z2", "h-200"],
)
def test_other_targets_are_refused(text):
    with pytest.raises(InvalidInput, match=r"target: got .*h200.*, smNN such as sm80"):
        Target.parse(text)


def test_pretending_nests_and_restores():
    assert pretended() is None
    with pretend(Target.parse("sm90")):
        assert str(Target.of(torch.device("cpu"))) == "sm90"
        with pretend(None):
            assert str(Target.of(torch.device("cpu"))) == "cpu"
        assert str(pretended()) == "sm90"
    assert pretended() is None


@pytest.mark.parametrize(
    ("need", "field", "met", "broken", "refusal"),
    [
        (one_of("head_dim", 64, 128), "head_dim", 64, 96, "head_dim=96 (wants 64 | 128)"),
        (
            dtypes(torch.bfloat16, torch.float32),
            "dtype",
            torch.float32,
            F64,
            "kv_dtype=float32 (wants the query's float64)",
        ),
        (dtypes(torch.bfloat16), "kv_dtype", None, torch.float32, "dtype=float32 (wants bfloat16)"),
        (at_most("head_dim", 256), "head_dim", 256, 257, "head_dim=257 (wants <= 256)"),
        (
            multiple_of("page_size", 16),
            "page_size",
            32,
            24,
            "page_size=24 (wants a multiple of 16)",
        ),
        (
            extent_at_most("queries", 8),
            "queries",
            Extent.of(8),
            Extent(0, None),
            "queries=0.. (wants <= 8)",
        ),
        (
            extent_at_most("queries", 8),
            "queries",
            Extent.of(1),
            Extent.of(9),
            "queries=9..16 (wants <= 8)",
        ),
        (
            extent_at_least("context", 1),
            "context",
            Extent(1, None),
            Extent(0, 4),
            "context=0..4 (wants >= 1)",
        ),
        (
            arch(90, 100),
            "target",
            Target("cuda", 100),
            Target("cuda", 80),
            "target=sm80 (wants sm90 | sm100)",
        ),
        (arch(90), "target", Target("cuda", 90), Target(), "target=cpu (wants sm90)"),
        (device("cuda"), "target", Target("cuda", 75), Target(), "device=cpu (wants cuda)"),
        (without("mask")[0], "mask", "none", "bool", "mask=bool (wants none)"),
        (without("windowed")[0], "window", (-1, 3), (3, -1), "windowed=True (wants no)"),
        (
            without("sinks_dtype")[0],
            "sinks_dtype",
            None,
            torch.float32,
            "sinks_dtype=float32 (wants no)",
        ),
        (all_of(without("lse", "sinks")), "sinks", False, True, "sinks=True (wants no)"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_needs(need, field, met, broken, refusal):
    given = {"target": Target(), "causal": True}
    assert met is None or need(Problem.of("attention", **given | {field: met})) is None
    assert str(need(Problem.of("attention", **given | {field: broken}))) == refusal


def test_packages_are_looked_for_without_import():
    here = Package("hypothesis", ("hypothesis",))
    away = Package("surely_not_installed", ("surely-not",), at_least="2")
    assert here.missing(Target()) is None and here.version()
    assert away.missing(Target()) == Refusal(
        "package", "surely_not_installed missing", "pip install 'surely-not>=2'"
    )
    assert str(replace(here, at_least="999.0").missing(Target())).endswith("(wants >= 999.0)")
    # A list of assumed packages is the whole list, whatever is installed here.
    assert here.missing(Target("cuda", 90, assume=())) is not None
    assert away.missing(Target("cuda", 90, assume=("surely_not_installed",))) is None


def test_a_probe_is_asked_only_where_the_packages_are():
    asked = []
    kernel = idle(
        "mine",
        probe=lambda target: asked.append(target) or Refusal("driver", "none", "a driver"),
        needs=without("sinks"),
    )
    away = replace(kernel, packages=(Package("surely_not_installed", ("surely-not",)),))
    assert [r.field for r in away.refusals(SINKS)] == ["package", "sinks"] and not asked
    assert [r.field for r in kernel.refusals(SINKS)] == ["driver", "sinks"] and asked == [Target()]
