"""Eager calls of experts like one before go straight to the compiled kernels, with their own
memory. Here Triton's interpreter runs in place of compiled kernels."""

import os
import sys
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

import attnops
from attnops.core.kernel import kernels_of
from attnops.ops.experts.cases import OSS
from attnops.ops.experts.record import EXPERTS, experts
from tests.triton.checks import mode
from tests.triton.process import interpreted

CASES = {
    "one token": (1, {}),
    "one token, rows next to each other": (1, OSS),
    "few tokens": (3, {}),
    "few tokens, rows next to each other": (3, OSS),
}
SIZES = 6, 32, 16, 24
"""Experts, In, Inner, Out."""


class Searched:
    """In place of Triton's function. launches: of those that search for the compiled kernel."""

    pre_run_hooks: tuple[object, ...] = ()

    def __init__(self, kernel, memory):
        self.kernel, self.memory, self.arg_names = kernel, memory, kernel.arg_names
        self.launches = self.repeats = 0

    def __getitem__(self, grid):
        def launch(*args, **given):
            self.launches += 1
            self.kernel[grid](*args, **given)
            return Compiled(self)

        return launch


class Compiled:
    """In place of a compiled kernel. A descriptor of an address alone reads the weight there."""

    def __init__(self, searched):
        self.searched = searched

    def __getitem__(self, grid):
        def launch(*values):
            self.searched.repeats += 1
            self.searched.kernel[grid](*map(self.read, values))

        return launch

    def read(self, x):
        at = getattr(getattr(x, "base", None), "address", None)
        return x if at is None else replace(x, base=self.searched.memory[at])


class Calls:
    """Calls of a case, and of what they launch."""

    def __init__(self, case, memory):
        self.tokens, self.more = CASES[case]
        self.memory, self.source = memory, torch.Generator().manual_seed(1)
        count, columns, inner, outs = SIZES
        self.gate_up, self.down = (
            self.weight(count, 2 * inner, columns),
            self.weight(count, outs, inner),
        )
        self.biases = ()
        if self.more:
            self.biases = self.random(count, 2 * inner), self.random(count, outs)

    def random(self, *shape):
        return torch.randn(shape, generator=self.source)

    def weight(self, count, rows, columns):
        """With rows next to each other where the case has them so."""
        x = self.random(count, rows, columns)
        x = x.transpose(1, 2).contiguous() if self.more else x
        self.memory[x.data_ptr()] = x
        return nn.Parameter(x, requires_grad=False)

    def given(self):
        index = torch.stack([torch.randperm(6, generator=self.source)[:2] for _ in self.rows])
        return [self.random(self.tokens, SIZES[1]), index, self.random(self.tokens, 2).abs()]

    @property
    def rows(self):
        return range(self.tokens)

    def check(self, given=None, look=None):
        """A call, which is right; the launches that searched, and that repeated. look: a profile
        function that sees the call."""
        x, index, weights = given or self.given()
        gate_up, down = (w.transpose(1, 2) if self.more else w for w in (self.gate_up, self.down))
        args = x, gate_up, down, index, weights, *self.biases
        more = {k: v for k, v in self.more.items() if k not in ("bias", "along")}
        before = self.count()
        profile = sys.getprofile()
        sys.setprofile(look)
        try:
            got = experts(*args, **more, kernel="triton")
        finally:
            sys.setprofile(profile)
        want = EXPERTS.call(*args, **more, output=torch.empty_like(got))
        with torch.autocast("cpu", enabled=False):
            kernels_of("experts")["reference"].run(want)
        torch.testing.assert_close(got, want.output, rtol=1e-4, atol=1e-4)
        return tuple(now - then for now, then in zip(self.count(), before, strict=True))

    def count(self):
        return tuple(sum(getattr(f, n) for f in self.functions) for n in ("launches", "repeats"))


@contextmanager
def calls(case):
    """Calls of a case on a machine where kernels are kept."""
    from attnops.kernels.shared.launch import compiled
    from attnops.kernels.triton.device import experts as device

    names, memory = ("one_token_up", "one_token_down", "few_tokens", "combine"), {}
    functions = {name: Searched(getattr(device, name), memory) for name in names}
    found = Calls(case, memory)
    found.functions = functions.values()
    EXPERTS.seen.clear()
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.multiple(device, **functions))
        enter(patch.multiple(compiled, JITFunction=Searched, CompiledKernel=Compiled, _ENTRIES={}))
        enter(patch.object(torch.cuda, "current_device", lambda: 0))
        enter(mode("as_is"))
        yield found
    EXPERTS.seen.clear()


def launches(case):
    return 2 if case == "one token" else 3


@contextmanager
def host_counted():
    """The launches whose arguments are worked out."""
    from attnops.kernels.triton.launch import experts as host

    made, before = [], host.launch

    def launch(*args):
        made.append(args)
        return before(*args)

    with patch.object(host, "launch", launch):
        yield made


@pytest.mark.parametrize("case", CASES)
@interpreted
def test_a_third_call_works_nothing_out(case):
    with calls(case) as found, host_counted() as made:
        n = launches(case)
        assert found.check() == (n, 0) and len(made) == n
        assert found.check() == (0, n) and len(made) == 2 * n
        for _ in range(2):
            assert found.check() == (0, n) and len(made) == 2 * n


@pytest.mark.parametrize("case", CASES)
@interpreted
def test_python_calls_of_a_call_like_one_before(case):
    """Our own, but for what the interpreter runs of device functions."""
    root = os.path.join(os.path.dirname(attnops.__file__), "")
    with calls(case) as found:
        for _ in range(3):
            found.check()
        entered = []

        def look(frame, event, arg):
            file = frame.f_code.co_filename
            if event == "call" and file.startswith(root) and "device" not in file:
                entered.append(f"{os.path.basename(file)}:{frame.f_code.co_name}")

        with torch.no_grad():
            found.check(look=look)
        assert len(entered) <= 26, entered


@pytest.mark.parametrize("case", CASES)
@interpreted
def test_weights_that_change_between_calls_are_seen(case):
    """Written in place, assigned to the parameter, and in another parameter."""
    with calls(case) as found:
        for _ in range(3):
            found.check()
        n, other = launches(case), Calls(case, found.memory)
        found.gate_up.copy_(2 * other.gate_up)
        assert found.check() == (0, n)
        found.down.data = other.down.data
        assert found.check() == (0, n)
        found.gate_up = other.gate_up
        assert found.check() == (0, n)


@pytest.mark.parametrize("case", CASES)
@interpreted
def test_memory_that_is_not_aligned_is_launched_as_ever(case):
    """Triton has another kernel for it."""
    with calls(case) as found, host_counted() as made:
        for _ in range(3):
            found.check()
        x, *others = found.given()
        odd = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
        made.clear()
        for _ in range(3):
            found.check([odd, *others])
        assert len(made) == 3 * launches(case)
        assert found.check() == (0, launches(case)) and len(made) == 3 * launches(case)


@pytest.mark.parametrize("name", ["debug", "few_tokens", "combine", "threads compile"])
@interpreted
def test_what_looks_at_launches_sees_them(name):
    """A debugger, a hook of a device function, threads that compile kernels beside each other."""
    from triton import knobs

    from attnops.kernels.shared.launch.beside import BESIDE

    with calls("few tokens") as found, host_counted() as made:
        for _ in range(3):
            found.check()
        made.clear()
        changes = {
            f.kernel.__name__: patch.object(f, "pre_run_hooks", (print,)) for f in found.functions
        }
        changes["debug"] = patch.object(knobs.runtime, "debug", True)
        changes["threads compile"] = patch.object(BESIDE, "looks", True)
        with changes[name]:
            found.check()
        assert len(made) == 3
        found.check()
        assert len(made) == 3


@interpreted
def test_other_calls_keep_nothing():
    from attnops.kernels.triton.launch import experts as host

    with calls("few tokens") as found:
        x, index, weights = found.given()
        wide = index.repeat_interleave(2, 1)[:, ::2]
        args = found.gate_up, found.down
        call = EXPERTS.call(x, *args, wide, weights, output=torch.empty(3, SIZES[3]))
        assert host.repeated(call) is host.experts, "a copy is made of it"
        call = call._replace(top_k_index=index)
        assert host.repeated(call) is not host.experts
        assert host.repeated(call._replace(policy="deterministic")) is host.experts
        for _ in range(3):
            found.check([x, wide, weights])
        with attnops.use(deterministic=True):
            for _ in range(3):
                found.check()


@interpreted
def test_weights_are_not_held():
    with calls("few tokens") as found:
        for _ in range(3):
            found.check()
        parameter, memory = found.gate_up, found.memory.pop(found.gate_up.data_ptr())
        alive = weakref.ref(parameter), weakref.ref(memory)
        found.gate_up = parameter = memory = None
        assert [x() for x in alive] == [None, None]


@interpreted
def test_modes_autocast_and_gradients():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names = []
    with calls("few tokens") as found:
        for _ in range(3):
            found.check()
        with torch.autocast("cpu"):
            assert found.check() == (0, 3)
        with torch.no_grad():
            assert found.check() == (0, 3)
        with torch.inference_mode():
            found.check()
        with Sees():
            found.check()
        assert any("attnops.experts" in name for name in names)
        found.gate_up.requires_grad_()
        with pytest.raises(attnops.errors.NoGradient):
            found.check()
        with torch.no_grad():
            found.check()
