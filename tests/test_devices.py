"""Several GPUs, on a CPU: fake tensors lie on them, and a fake of torch's guard says which is the
current one."""

from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnops
from attnops.core import adapt
from attnops.core.kernel import Core, Inline, Kernel, _drop, all_kernels, kernels_of, register
from attnops.core.precompile import begin
from attnops.core.problem import Target
from attnops.kernels.flash_attn4 import fa4
from attnops.kernels.shared.launch import rows
from attnops.ops import OPS
from attnops.testing import CASES, Source
from tests.lowering.models import compiled_code, kernel_calls


@pytest.fixture
def entered(monkeypatch):
    """The GPUs that were made the current one, in order. GPU 0 is it at first."""
    current, found = [0], []

    @contextmanager
    def device(wanted):
        found.append(torch.device(wanted).index)
        current.append(torch.device(wanted).index)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(adapt, "current_device", lambda: current[-1])
    yield found
    assert current == [0]


def on(device):
    with FakeTensorMode():
        return torch.empty(2, 3, device=device)


def test_a_guard_is_entered_for_another_gpu_alone(entered, monkeypatch):
    for device in ("cpu", "meta", "cuda:0"):
        with adapt.on_device_of(on(device)):
            assert not adapt.elsewhere(on(device))
    assert entered == []
    with adapt.on_device_of(on("cuda:1")):
        assert adapt.elsewhere(on("cuda:0")) and not adapt.elsewhere(on("cuda:1"))
        with adapt.on_device_of(on("cuda:1")):
            pass
    assert entered == [1]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not adapt.elsewhere(on("cuda:1")), (
        "only fake tensors can be there, and asking would initialise CUDA"
    )


FOREIGN = [k for k in all_kernels() if k.packages]


@pytest.mark.parametrize("kernel", FOREIGN, ids=lambda k: f"{k.op}.{k.name}")
def test_every_foreign_kernel_runs_on_the_gpu_of_its_tensors(kernel, entered):
    for device, want in (("cuda:0", []), ("cuda:1", [1])):
        with suppress(AttributeError):  # there is nothing in the call but its first tensor
            kernel.run((on(device),))
        assert entered == want
        entered.clear()


def test_kernels_of_torch_ops_alone_enter_nothing():
    plain = [
        k for k in all_kernels() if not k.packages and str(k.run.__module__).startswith("attnops.")
    ]
    assert plain and not [k for k in plain if getattr(k.run, "placed", None)]


def test_a_kernel_is_compiled_ahead_on_the_gpu_of_its_call(entered):
    seen = []
    kernel = Kernel(
        "mine",
        "attention",
        lambda call: None,
        dtypes=(torch.float32,),
        ahead=lambda call: seen.append((call, *entered)),
    )
    kernel.ahead(None)
    assert seen == [(None,)]
    with FakeTensorMode():
        query = torch.empty(1, 2, 3, 4, device="cuda:1")
        begin(kernel, OPS["attention"].call(query, query, query, scale=1.0))
    assert seen[1][1:] == (1,)


def test_rows_are_cleared_on_their_gpu(entered, monkeypatch):
    """Kernels of torch's own ops ask for it."""
    monkeypatch.setattr(adapt, "elsewhere", lambda x: True)
    monkeypatch.setattr(rows, "launch", lambda *given: entered.append("launched"))
    rows.clear_rows(((torch.zeros(2), torch.zeros(2, 3), 0.0),))
    assert entered == [None, "launched"]


# Every way to a kernel ----------------------------------------------------------------------------


GUARDS, SEEN = list[torch.device](), list[tuple[str, int]]()
"""The guards that are entered just now, and how many were when a kernel ran or a core."""


def note(what, query):
    SEEN.append((what, len(GUARDS)))
    return torch.zeros_like(query)


def run(call):
    return note("run", call.query), call.query.new_empty(0)


def inlined(call):
    return torch.ops.attnops.attention__cored.default(call.query), call.query.new_empty(0)


@pytest.fixture(scope="module")
def kernels():
    """A kernel that is called, and one whose core is."""
    core = Core("(Tensor query) -> Tensor", partial(note, "core"), torch.empty_like)
    more = {"theirs": (run, None), "cored": (inlined, Inline(when=lambda p: True, core=core))}
    made = [
        register(
            Kernel(
                name,
                "attention",
                run,
                dtypes=(torch.float32,),
                cost_us=lambda p: 1e9,
                inline=inline,
            )
        )
        for name, (run, inline) in more.items()
    ]
    yield
    _drop(made)


@pytest.fixture
def away(kernels, monkeypatch):
    """As if all tensors lay on a GPU that is not the current one."""

    @contextmanager
    def device(wanted):
        GUARDS.append(wanted)
        try:
            yield
        finally:
            GUARDS.pop()

    SEEN.clear()
    monkeypatch.setattr(adapt, "elsewhere", lambda x: not GUARDS)
    monkeypatch.setattr(torch.cuda, "device", device)


def attend(query, name):
    return attnops.attention(query, query, query, kernel=name)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["theirs", "cored"])
def test_eager_and_compiled_calls_are_guarded(away, name, compiled):
    query, call = torch.randn(1, 2, 3, 4), partial(attend, name=name)
    with torch.no_grad():
        if compiled:
            _, code = compiled_code(lambda: torch.compile(call, fullgraph=True)(query))
            assert (
                "attention__cored" in code
                if name == "cored"
                else kernel_calls(code) == ["attention.theirs"]
            )
        else:
            call(query)
            call(query)
    assert {*SEEN} == {("run" if name == "theirs" else "core", 1)} and not GUARDS, (
        "one guard, whoever called whom"
    )


def test_a_kernel_made_of_another_is_guarded_once(away):
    first = kernels_of("attention")["theirs"].run
    again = Kernel("again", "attention", first, dtypes=(torch.float32,))
    assert again.run is first
    again.run(CASES["attention"][0].build(Source(0)).record)
    assert SEEN == [("run", 1)]


# What is asked once -------------------------------------------------------------------------------


def test_a_device_without_a_number_is_the_current_one(entered, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr("attnops.core.problem._target_of", lambda kind, index: (kind, index))
    assert Target.of(torch.device("cuda")) == ("cuda", 1) and Target.of(torch.device("cuda:0")) == (
        "cuda",
        0,
    )


@pytest.mark.parametrize(
    ("gpus", "refused"),
    [([(9, 0), (9, 0)], ""), ([(8, 9), (9, 0)], ""), ([(9, 0), (10, 0)], "sm90 and sm100")],
)
def test_fa4_refuses_gpus_of_two_architectures_that_it_serves(gpus, refused, monkeypatch):
    """It asks for one once. Another GPU beside it is no reason, for the guard keeps the package
    from asking that one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index])
    found = fa4.one_family(Target("cuda", 90, gpu="NVIDIA H200"))
    assert (found.got if found else "") == refused
    assert fa4.one_family(Target("cuda", 90, assume=())) is None, "another machine"
