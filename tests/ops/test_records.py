"""Call records: what follows from the list of an op's arguments, and what a kernel never sees that
does not list it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnops.core.errors import RegistrationError
from attnops.core.kernel import Kernel, Registry, kernels_of, register
from attnops.core.op import check_binding, schema
from attnops.core.problem import Problem, Target, problem_of
from attnops.core.record import (
    FLOATS,
    KW_ONLY,
    Call,
    Result,
    arg,
    asked,
    check,
    fake,
    record,
)
from attnops.ops import OPS
from tests.checks import those
from tests.helpers import ROOT

PLAIN = Problem("attention", Target(), q_heads=4, kv_heads=2, head_dim=8, v_head_dim=8)


def test_schemas_are_those_that_others_have_compiled_against():
    listed = re.findall(
        r"^```text\n(.*?)\n```$", (ROOT / "docs" / "ops.md").read_text(), re.M | re.S
    )
    assert sorted(str(op.packet.default._schema) for op in OPS.values()) == sorted(
        re.sub(r"\n +", " ", text) for text in listed
    )


@record(
    "toy", Result("out", "B + 1, H", "a"), problem={"tokens": "B", "batch": "0", "q_heads": "H"}
)
class Toy(Call):
    """An op of no use, with every kind of layout."""

    a: Tensor = arg("B, H", FLOATS)
    starts: Tensor | None = arg("B + 1", (torch.int32,), default=None)
    scale: Tensor | None = arg("1 | H", FLOATS, default=None)
    mask: Tensor | None = arg("B, >= pages * size", (torch.bool,), default=None)
    tail: Tensor | None = arg("B, ...", "a", default=None)
    _: KW_ONLY
    pages: int = arg(default=1, least=0)
    size: int = arg(default=2, least=1)
    bright: bool = arg(default=True, off=False)
    promise: bool = arg(default=True, hint=True)
    base: int = arg(default=2, always=True)
    policy: str = ""


A = torch.zeros(3, 4)


def test_a_record_gives_its_schema_and_its_fake():
    assert schema(Toy.spec) == (
        "(Tensor a, Tensor? starts=None, Tensor? scale=None, Tensor? mask=None, Tensor? "
        "tail=None, *, int pages=1, int size=2, "
        'bool bright=True, bool promise=True, int base=2, str policy="") -> Tensor out'
    )
    call = Toy(A, tail=torch.zeros(3, 1, 2))
    assert check(call) | {"B": 3, "H": 4, "pages": 1} == check(call)
    assert fake(call).shape == (4, 4)


def test_what_is_asked_for():
    assert asked(Toy(A)) == {"bright"}  # on by default, so that a kernel must know it
    assert asked(Toy(A, bright=False, promise=False, base=3)) == set()
    assert asked(Toy(A, bright=False, size=3)) == {"size"}
    assert problem_of(Toy(A, scale=A[0])).asks == {"bright", "scale"}


def test_hints_change_no_result():
    """Every other argument with a default is listed by a kernel, or taken by all kernels of its
    op."""
    hints = {a.name for op in OPS.values() for a in op.spec.args if a.hint}
    of_plans = {"seq_lens_cpu", "cu_seqlens_q_cpu"}
    assert hints == {"plan", "padded", "holes", "workspace", "stale", "group"} | of_plans


@pytest.mark.parametrize("argument", ["slope", "bright"])
def test_an_argument_that_is_new_is_refused_until_it_is_listed(argument):
    new = replace(PLAIN, asks=frozenset({argument}))
    kernel = Kernel("two", "attention", lambda call: (), dtypes=FLOATS)
    assert kernel.unmet(PLAIN) == ()
    assert [r.field for r in kernel.unmet(new)] == [argument]
    assert replace(kernel, takes=frozenset({argument})).unmet(new) == ()
    stored = replace(PLAIN, kv_dtype=torch.int8)
    assert [r.field for r in kernel.unmet(stored)] == ["kv_dtype"]
    assert replace(kernel, kv_dtypes=(torch.int8,)).unmet(stored) == ()


@pytest.mark.parametrize("kernel", those(lambda kernel: True))
def test_every_kernel_refuses_what_it_does_not_list(kernel):
    """An argument that is new, or on by default, and a dtype: of an op as it may be one day."""
    problem = Problem(
        kernel.op,
        Target(),
        dtype=torch.complex64,
        kv_dtype=torch.complex64,
        asks=frozenset({"slope"}),
    )
    refused = {r.field for r in kernel.unmet(problem)}
    assert {"slope", "dtype"} <= refused
    assert "slope" not in {
        r.field for r in replace(kernel, takes=kernel.takes | {"slope"}).unmet(problem)
    }


def test_a_misspelt_argument_is_no_kernel():
    kernel = Kernel("misspelt", "attention", lambda call: (), takes=frozenset({"soft_cap"}))
    with pytest.raises(
        RegistrationError, match=r"takes got 'soft_cap', want arguments of attention: .*softcap"
    ):
        check_binding(kernel)


@pytest.fixture
def registry(monkeypatch):
    for name in ("attnops.core.kernel", "attnops.core.eager_cache"):
        monkeypatch.setattr(f"{name}._REGISTRY", Registry())


def one_by_one(query, key, value, *rest, scale, causal=False):
    return query


@pytest.mark.parametrize(
    "run", [one_by_one, lambda *call: call, lambda **call: call, lambda: None, None, 3]
)
def test_a_run_takes_the_call(registry, run):
    """The form of contract 1, the arguments one by one, is refused by name."""
    with pytest.raises(
        RegistrationError,
        match=r"kernel new: run got .*, want a function of one parameter, the call \(contract 2\)",
    ):
        register(Kernel("new", "attention", run, dtypes=FLOATS))
    assert "new" not in kernels_of("attention")


def test_an_annotation_that_no_schema_says_is_no_record():
    with pytest.raises(RegistrationError, match="got the type list"):
        record("odd")(type("Odd", (Call,), {"__annotations__": {"a": "list"}}))
