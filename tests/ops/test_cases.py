"""Cases and calls follow from a family's data and from records: nothing in `attnops.testing` knows
an op or an argument."""

from __future__ import annotations

import ast
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from attnops.core.op import Op
from attnops.core.problem import LEAVES
from attnops.core.record import FLOATS, KW_ONLY, RECORDS, Call, arg, record
from attnops.ops import OPS
from attnops.ops.case_data import Grid
from attnops.testing import CASES, Source, allowance, make_call
from tests.helpers import sources


@pytest.fixture
def toy(monkeypatch):
    """A family of another package: a record in `toy.record`, its data in `toy.cases` and
    `toy.bound`."""

    monkeypatch.setitem(RECORDS, "toy", None)

    @record("toy")
    class Toy(Call):
        x: Tensor = arg("T, In", FLOATS)
        gain: Tensor | None = arg("In", "x", default=None)
        _: KW_ONLY
        eps: float = 0.0
        output: Tensor = arg("T, In", "x", written=True)

    Toy.__module__ = "toy.record"
    cases, bound = ModuleType("toy.cases"), ModuleType("toy.bound")
    rows = {
        "plain": (3, 4),
        "gain": (3, 4, torch.float64, {"gain": True, "eps": 0.5}),
        "none": (0, 4),
    }
    cases.CASES = {"toy": Grid("T In dtype", rows)}
    bound.BOUNDS = {"toy": lambda call, expected: {"output": 2.0 * call.eps}}
    for module in (ModuleType("toy"), cases, bound):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(OPS, "toy", Op(Toy, None))


def test_an_op_of_another_package_has_the_cases_and_the_bound_of_its_family(toy):
    assert "toy" in set(CASES) and [case.label for case in CASES["toy"]] == [
        "plain",
        "gain",
        "none",
    ]
    plain, gain, none = (case.call() for case in CASES["toy"])
    assert {n: x.shape for n, x in plain.arguments.items()} == dict.fromkeys(
        ("x", "output"), (3, 4)
    )
    assert gain.arguments["gain"].dtype == torch.float64 and gain.arguments["eps"] == 0.5
    assert none.arguments["x"].shape == (0, 4) and none.writes == ("output",)
    assert allowance(gain, {}) == {"output": 1.0} and allowance(plain, {}) == {"output": 0.0}


def test_a_value_that_nothing_takes_is_refused(toy):
    for named in ({"padded": False}, {"rows": 4}):
        with pytest.raises(TypeError, match="toy: got"):
            make_call("toy", Source(), 3, 4, **named)
    with pytest.raises(TypeError, match="got 4 values"):
        make_call("toy", Source(), 3, 4, torch.float32, 5)
    with pytest.raises(TypeError, match="paddding"):
        make_call("paged_attention", Source(), (1,), (3,), 4, paddding=0)


@pytest.mark.parametrize("module", [m for m in sources() if m.startswith("attnops.testing.")])
def test_no_argument_is_asked_for_by_its_name(module):
    """Words of a Problem apart, which name arguments' facts."""
    names = {name for op in OPS.values() for name in op.names} - set(LEAVES)
    found = {
        node.value
        for node in ast.walk(ast.parse(sources()[module].read_text()))
        if isinstance(node, ast.Constant)
    } & names
    assert not found, f"{module}: {sorted(found)}"
