"""Under a deterministic policy Triton has one kernel for a call, wherever its tensors lie: sums
over what is loaded have one order."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import pretend
from attnops.core.record import changed
from attnops.ops.case_data import BF16
from attnops.testing import Features, Source, equip, gradient_call, make_call
from tests.mates import POLICY
from tests.triton.checks import SM90
from tests.triton.process import compiled
from tests.triton.test_kernels import kind_of

F = Features(dtype=BF16, head_dim=64, q_heads=4, kv_heads=2)
ODD = Features(dtype=BF16, head_dim=40, q_heads=4, kv_heads=2)


def gradient(f):
    return gradient_call(Source(2), make_call("attention", Source(1), 2, 9, 9, f))


# The arguments that a program sums over.
CALLS = {
    "linear": (("x",), lambda: make_call("linear", Source(1), 3, 48, 40, BF16, norm=0.0)),
    "linear of an odd width": (
        ("x",),
        lambda: make_call("linear", Source(1), 3, 72, 40, BF16, norm=0.0),
    ),
    "linear of one row": (
        ("x",),
        lambda: make_call("linear", Source(1), 1, 72, 40, BF16, norm=0.0),
    ),
    "norm": (("x",), lambda: make_call("rms_norm", Source(1), 3, 48, BF16)),
    "norm of an odd width": (("x",), lambda: make_call("rms_norm", Source(1), 3, 72, BF16)),
    "decode": (
        ("query", "key"),
        lambda: make_call("decode_attention", Source(1), (9, 12, 5), 16, F),
    ),
    "decode of odd heads": (
        ("query", "key"),
        lambda: make_call("decode_attention", Source(1), (9, 12, 5), 16, ODD),
    ),
    "gradient": (("grad_output", "output"), lambda: gradient(F)),
    "gradient of odd heads": (("grad_output", "output"), lambda: gradient(ODD)),
    "route": (("logits",), lambda: make_call("route", Source(1), 3, 48, 4)),
}


def behind(x):
    """The same numbers, one number behind an address of a multiple of 16 bytes."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


def apart(x, more):
    """The same numbers, `more` further apart along the dim before the last."""
    wide = torch.cat([x, x[..., :1].expand(*x.shape[:-1], more)], -1)
    return wide[..., : x.shape[-1]]


LAYOUTS = {
    "behind": behind,
    "apart": lambda x: apart(x, 8),
    "odd": lambda x: apart(x, 1),
    "far": lambda x: apart(x, 16),
}


def kinds(call, policy):
    """By launch, what Triton tells one compiled kernel from another by."""
    from attnops.kernels.triton.launch import (
        decode,
        gradient as grad,
        linear as lines,
        route as routing,
    )

    found = []

    def launch(kernel, grid, given, args=(), warps=4):
        named = dict(zip(kernel.arg_names, args, strict=False)) | given
        varying = {p.name for p in kernel.params if p.do_not_specialize}
        found.append({n: x if n.isupper() else kind_of(x, n in varying) for n, x in named.items()})

    with ExitStack() as patches:
        for host in (decode, grad, lines, routing):
            patches.enter_context(patch.object(host, "launch", launch))
        kernels_of(call.op)["triton"].run(changed(call.record, policy=policy))
    return found


@pytest.mark.parametrize("name", CALLS)
@compiled
def test_one_kernel_serves_every_layout(name):
    names, build = CALLS[name]
    with pretend(SM90):
        call = equip(kernels_of(build().op)["triton"], build())
        usual, free = kinds(call, POLICY), kinds(call, "")
        others = []
        for argument in names:
            for layout in LAYOUTS.values():
                given = call.with_(**{argument: layout(call.arguments[argument])})
                assert torch.equal(given.arguments[argument], call.arguments[argument])
                assert kinds(given, POLICY) == usual, argument
                others.append(kinds(given, "") == free)
        assert not all(others), "nothing is copied without the policy"
