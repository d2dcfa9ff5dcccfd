"""Compiled code calls a kernel's Python function directly, and the dispatcher where anything else
has to see the call."""

from contextlib import nullcontext

import pytest
import torch
from torch._inductor.ir import FallbackKernel
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import attnops
from attnops.core.eager_cache import direct
from attnops.core.kernel import all_kernels
from attnops.lowering.choose import as_dispatched
from attnops.ops import OPS
from tests.lowering.models import PagedModel, compiled_code, decode

KERNEL = "paged_attention:reference"


@pytest.mark.full
@pytest.mark.parametrize("named", [True, False])
def test_compiled_code_names_its_kernel_and_a_profiler_sees_it(named, monkeypatch):
    """An IR node that has another name keeps the dispatcher."""

    def set_name(self, name):
        self.python_kernel_name = f"(torch.ops.{self.op_overload})"

    if not named:
        monkeypatch.setattr(FallbackKernel, "set_python_kernel_name", set_name)
    model, given = PagedModel(2).eval(), decode()
    with attnops.use(kernel=KERNEL), torch._inductor.config.patch(force_disable_caches=True):
        want = model(*given)
        compiled = torch.compile(model, fullgraph=True)
        _, code = compiled_code(lambda: compiled(*given))
        assert (
            code.count(
                "paged_attention.reference.run("
                if named
                else "(torch.ops.attnops.paged_attention.reference)("
            )
            == 2
        )
        assert "sinks" not in code or not named, "arguments at their defaults are left out"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.testing.assert_close(compiled(*given), want)
    assert [e.name for e in profile.events() or [] if e.name == "attnops::paged_attention"] == [
        "attnops::paged_attention"
    ] * 2


@pytest.mark.parametrize(
    "watcher",
    [
        nullcontext,
        torch.enable_grad,
        TorchDispatchMode,
        lambda: torch.device("cpu"),
        forward_ad.dual_level,
        torch.profiler.profile,
    ],
    ids=["none", "grad", "dispatch mode", "function mode", "forward mode", "profiler"],
)
def test_a_watched_call_takes_the_dispatcher(watcher):
    call = direct(lambda x: "dispatcher", lambda x: "kernel")
    with watcher():
        assert call(1) == ("kernel" if watcher is nullcontext else "dispatcher")
        assert (
            watcher is not nullcontext
            or torch.vmap(direct(torch.exp, torch.sin))(torch.zeros(1)) == 1
        )


def test_every_kernel_can_be_called_directly():
    assert all(callable(getattr(OPS[k.op].packet, k.name).run) for k in all_kernels())


class Recording(TorchDispatchMode):
    """given: the arguments of the call that it ends, as the dispatcher hands them on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.given = args, kwargs
        raise InterruptedError


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("given", ["all", "required", "defaults"])
def test_a_kernel_gets_the_arguments_that_the_dispatcher_would_give(name, given):
    op, kwargs = OPS[name], {}
    values = {
        "Tensor": torch.zeros(1),
        "Optional[Tensor]": torch.zeros(1),
        "int": 3,
        "float": 7,
        "str": "x",
    }
    for a in op.packet.default._schema.arguments:
        if given == "defaults" and a.has_default_value():
            kwargs[a.name] = a.default_value
        elif given == "all" or not a.has_default_value():
            kwargs[a.name] = not a.default_value if str(a.type) == "bool" else values[str(a.type)]
    with (
        torch._C._AutoDispatchBelowAutograd(),
        pytest.raises(InterruptedError),
        Recording() as recorded,
    ):
        op.packet.default(**kwargs)
    args, named = as_dispatched(op, (), kwargs)
    want, want_named = recorded.given
    assert (*args, *named.values()) == (*want, *want_named.values()) and [*named] == [*want_named]
    assert [*map(type, named.values())] == [*map(type, want_named.values())]
