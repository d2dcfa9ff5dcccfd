"""Log-sum-exps and sinks of +inf, in every kernel that runs on a CPU."""

import pytest
import torch

from attnops.core.kernel import Kernel
from attnops.ops import OPS
from attnops.testing import CASES, Source, gradient_call
from attnops.testing.calls import Call, equip
from tests.checks import results, runs_here, those

INF = float("inf")
SUNK = [
    name for name, op in OPS.items() if any(a.name == "sinks" and a.tensor for a in op.spec.args)
]


def first_call(kernel: Kernel, *wanted: str) -> Call | None:
    """The first call of the grid that the kernel takes and that has these arguments."""
    calls = (case.call() for case in CASES[kernel.op])
    given = (
        equip(kernel, call)
        for call in calls
        if all(call.arguments.get(n) is not None for n in wanted)
    )
    return next((call for call in given if not kernel.refusals(call.problem)), None)


def check_sinks(kernel: Kernel, call: Call) -> None:
    """The first head's sink is +inf: the head gives 0 and lse +inf, and other heads give what they
    give without."""
    infinite = call.arguments["sinks"].clone()
    infinite[0] = INF
    want, got = results(kernel.run, call), results(kernel.run, call.with_(sinks=infinite))
    assert torch.equal(got["output"][..., 1:, :], want["output"][..., 1:, :])
    assert (got["output"][..., 0, :] == 0).all()
    if (lse := got.get("lse")) is not None and lse.numel():
        assert torch.equal(lse[..., 1:], want["lse"][..., 1:])
        assert torch.equal(lse[..., 0] == INF, want["lse"][..., 0] > -INF)


def check_gradients(kernel: Kernel, call: Call) -> None:
    """A head whose sink is +inf hands on no gradient, and the others hand on theirs."""
    given = {
        n: x
        for n, x in call.arguments.items()
        if n in OPS[kernel.op.removesuffix("_backward")].spec.names
    }
    infinite = given["sinks"].clone()
    infinite[0] = INF
    forward = Call(kernel.op.removesuffix("_backward"), given | {"sinks": infinite}, call.free)
    want = results(kernel.run, call)
    got = results(
        kernel.run,
        gradient_call(Source(0, "cpu"), forward).with_(grad_output=call.arguments["grad_output"]),
    )
    assert all(x.isfinite().all() for x in got.values())
    assert (got["grad_query"][..., 0, :] == 0).all() and got["grad_sinks"][0] == 0
    torch.testing.assert_close(got["grad_query"][..., 1:, :], want["grad_query"][..., 1:, :])


def check_merge(kernel: Kernel, call: Call) -> None:
    """A part with an lse of +inf is as empty as one with -inf, whatever its output holds."""
    lse, output = ("lse_a", "output_a") if kernel.op == "merge_state" else ("lses", "outputs")
    empty = torch.rand(call.arguments[lse].shape) < 0.5
    outputs = call.arguments[output].masked_fill(empty[..., None], float("nan"))
    found = [
        results(
            kernel.run,
            call.with_(**{lse: call.arguments[lse].masked_fill(empty, sign), output: outputs}),
        )
        for sign in (-INF, INF)
    ]
    for name, x in found[0].items():
        assert torch.equal(found[1][name], x), name
        assert not x.isnan().any()


CHECKS = {op: check_gradients if op.endswith("_backward") else check_sinks for op in SUNK}
CHECKS |= {"merge_state": check_merge, "merge_states": check_merge}


def cases_of(kernel: Kernel) -> list[Call]:
    """A call of the kernel, and one with a log-sum-exp where an op has one."""
    sinks = ("sinks",) if kernel.op in SUNK else ()
    calls = [
        first_call(kernel, *sinks),
        *(
            first_call(kernel, *sinks, n)
            for n in ("lse", "return_lse")
            if n in OPS[kernel.op].spec.names
        ),
    ]
    return [call for call in calls if call is not None]


def has_infinity(kernel: Kernel) -> bool:
    return (
        kernel.op in CHECKS
        and runs_here(kernel)
        and (kernel.op not in SUNK or "sinks" in kernel.takes)
    )


@pytest.mark.parametrize("kernel", those(has_infinity))
def test_infinity_is_no_nan(kernel):
    calls = cases_of(kernel)
    if not calls:
        pytest.skip(
            "it takes no call of the grid here: "
            f"{kernel.refusals(CASES[kernel.op][0].call().problem)}"
        )
    for call in calls:
        CHECKS[kernel.op](kernel, call)
