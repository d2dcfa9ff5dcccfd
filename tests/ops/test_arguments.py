"""What contracts say of arguments, derived from the records: written tensors, dtypes of their own,
numbers of numpy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from attnops.core.arguments import FLOATS, Arg
from attnops.core.errors import InvalidInput
from attnops.ops import OPS
from attnops.testing import CASES
from attnops.testing.calls import Call
from tests.checks import results


def arguments(wanted):
    return [
        pytest.param(op, a, id=f"{name}.{a.name}")
        for name, op in OPS.items()
        for a in op.spec.args
        if wanted(a)
    ]


def call_with(op, a: Arg) -> Call:
    """A call of the grid that gives the argument, or the first with a workspace. Buffers that
    nothing reads hold 0."""
    calls = (case.call() for case in CASES[op.name])
    given = next((call for call in calls if call.arguments.get(a.name) is not None), None)
    call = (
        CASES[op.name][0].call().with_(**{a.name: torch.zeros(8, dtype=torch.uint8)})
        if given is None
        else given
    )
    return call.map(lambda name, x: torch.zeros_like(x) if name in call.writes else x)


def negated(x: Tensor) -> Tensor:
    return torch._neg_view(x.clone())


# What is written ----------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", ["eager", "dispatcher"])
@pytest.mark.parametrize(("op", "a"), arguments(lambda a: a.written))
def test_a_tensor_that_cannot_be_written_is_refused_before_anything_is(op, a, way):
    """One whose numbers share memory, too: tests/ops/test_bad_inputs.py."""
    call = call_with(op, a)
    call = call.with_(**{a.name: negated(call.arguments[a.name])})
    before = {n: call.arguments[n].clone() for n in call.mutated}
    with torch.no_grad(), pytest.raises(InvalidInput, match=rf"^{a.name}(\.stride\(\))?: got "):
        op(call.record) if way == "eager" else op.packet.default(*call.args, **call.kwargs)
    for name, x in before.items():
        assert torch.equal(call.arguments[name], x), name


# Dtypes -------------------------------------------------------------------------------------------

OF_THEIR_OWN = arguments(lambda a: a.dtypes == FLOATS and a.kind == "Tensor | None")


@pytest.mark.parametrize(("op", "a"), OF_THEIR_OWN)
def test_an_argument_with_a_dtype_of_its_own_may_be_wider_than_the_others(op, a):
    """The numbers of a norm's weight, of cosines or of sinks count, whatever float dtype holds
    them."""
    call = call_with(op, a)
    tied = [b.name for b in op.spec.args if b.dtypes == a.name]
    wider = call.with_(**{n: call.arguments[n].double() for n in (a.name, *tied)})
    assert call.record[0].dtype == torch.float32
    got = results(op, wider)
    for name, exact in results(op, call).items():
        torch.testing.assert_close(got[name].to(exact.dtype), exact, equal_nan=True)


# Numbers ------------------------------------------------------------------------------------------

NUMPY = {int: np.int64, float: np.float32, bool: np.bool_}


@pytest.mark.parametrize("name", OPS)
def test_numbers_of_numpy_are_taken_where_those_of_python_are(name):
    op, call = OPS[name], call_with(OPS[name], OPS[name].spec.args[0])
    numbers = {
        a.name: call.record[i]
        for i, a in enumerate(op.spec.args)
        if a.kind in ("int", "float", "bool")
    }
    rounded = {n: float(np.float32(x)) if type(x) is float else x for n, x in numbers.items()}
    of_numpy = {n: NUMPY[type(x)](x) for n, x in rounded.items()}
    want = results(op, call.with_(**rounded))
    for kind in (of_numpy, {n: np.array(x) for n, x in of_numpy.items()}):
        torch.testing.assert_close(
            results(op, call.with_(**kind)), want, rtol=0, atol=0, equal_nan=True
        )
