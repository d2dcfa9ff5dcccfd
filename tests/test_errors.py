"""Every class of error crosses processes and is copied; a compiler's error leads to the one it
wraps."""

import copy
import gc
import importlib
import inspect
import pickle
import pkgutil
import threading
import weakref
from dataclasses import replace
from functools import wraps

import pytest
import torch

import attnops
from attnops.core.errors import (
    AttnopsError,
    BadTable,
    InvalidInput,
    NoKernel,
    NotCompiled,
    UnknownKernel,
    fail,
    find,
)
from attnops.core.kernel import Kernel, _drop, kernels_of, register
from attnops.core.problem import Problem, Refusal, Target
from attnops.core.select import Policy, select

PLAIN = Problem(
    "attention",
    Target(),
    torch.bfloat16,
    torch.bfloat16,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    v_head_dim=8,
)


def classes():
    """Every subclass, wherever it is defined."""
    for package in (
        "attnops",
        *(f"attnops.{room}" for room in ("cli", "hf", "bench", "tune", "graphs", "lowering")),
    ):
        for module in pkgutil.iter_modules(
            importlib.import_module(package).__path__, f"{package}."
        ):
            if "__main__" not in module.name:
                importlib.import_module(module.name)
    found = [AttnopsError]
    for kind in found:
        found += kind.__subclasses__()
    return sorted(
        {k for k in found if k.__module__.startswith("attnops")}, key=lambda k: k.__name__
    )


PLAIN_VALUES = {
    "str": "a word",
    "int": 3,
    "bool": True,
    "float": 0.5,
    "object": (1, "two", torch.float16),
    "int | None": None,
    "Mapping[str, tuple[int, ...]]": {"fa3": (64,)},
    "tuple[str, ...]": ("a", "b"),
    "tuple[int, ...]": (1, 64),
    "Mapping[str, tuple[Refusal, ...]]": {"fa3": (Refusal("page_size", 1, "64"),)},
    "Exception": ValueError("why"),
    "Decision": select(PLAIN, Policy(deny=tuple(kernels_of("attention")))),
}
"""By the annotation of an argument."""


def arguments(kind):
    """The annotations of those that a class takes, by name."""
    found = inspect.signature(kind.__init__).parameters.values()
    return {
        p.name: str(p.annotation)
        for p in found
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"
    }


def make(kind, **instead):
    wanted = arguments(kind)
    given = [instead.get(name, PLAIN_VALUES[annotation]) for name, annotation in wanted.items()]
    return kind(*given) if wanted else kind("the text")


def same(a, b):
    assert type(a) is type(b) and str(a) == str(b) and a.args == b.args
    assert {n: str(v) for n, v in vars(a).items()} == {n: str(v) for n, v in vars(b).items()}


KINDS = classes()


AGAIN = {
    "pickle": lambda e: pickle.loads(pickle.dumps(e)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("again", AGAIN.values(), ids=AGAIN)
def test_an_error_is_what_it_was(kind, again):
    error = make(kind)
    for there in (again(error), again(again(error))):
        same(there, error)
        assert find(there) is there


class Nameless:
    """Has no text."""

    def __str__(self):
        raise TypeError("no")

    __repr__ = __str__


FROM_CALLERS = {"got", "request", "name", "page_size", "needed", "need", "budget"}
LONG = {
    "400 digits": 10**400,
    "5000 digits": 10**5000,
    "text": "x" * 100_000,
    "list": [0] * 100_000,
    "no text": Nameless(),
}


@pytest.mark.parametrize("given", LONG)
@pytest.mark.parametrize(
    "kind", [k for k in KINDS if FROM_CALLERS & arguments(k).keys()], ids=lambda k: k.__name__
)
def test_an_error_is_short_whatever_was_given(kind, given):
    error = make(kind, **dict.fromkeys(FROM_CALLERS, LONG[given]))
    assert len(str(error)) < 1000
    assert ("has no text" if given in ("5000 digits", "no text") else " characters)") in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


class Stubborn:
    """Cannot be pickled."""

    def __reduce__(self):
        raise TypeError("no")

    def __str__(self):
        return "stubborn"


@pytest.mark.parametrize(
    "got",
    [Stubborn(), torch.zeros(2), (Stubborn(),), threading.Lock()],
    ids=lambda g: type(g).__name__,
)
def test_what_cannot_be_pickled_arrives_as_text(got):
    error = InvalidInput("field", got, "another")
    there = pickle.loads(pickle.dumps(error))
    assert str(there) == str(error) and isinstance(there.got, str) and there.field == "field"
    assert pickle.loads(pickle.dumps(Refusal("field", got, "another"))).field == "field"


@pytest.mark.parametrize("again", AGAIN.values(), ids=AGAIN)
@pytest.mark.parametrize("policy", ["", "kernel=fa3"])
def test_a_decision_is_what_it_was(policy, again):
    decision = select(PLAIN, policy)
    there = again(decision)
    assert (str(there), there.problem) == (
        str(decision),
        decision.problem,
    ) and there.kernel is decision.kernel


def test_a_kernel_that_only_one_process_has_keeps_its_name():
    there = pickle.loads(pickle.dumps(Kernel("theirs", "attention", lambda q: q)))
    assert (there.name, there.op) == ("theirs", "attention")
    with pytest.raises(AttnopsError, match="only the process it comes from"):
        there.run(None)
    known = kernels_of("attention")["sdpa"]
    assert pickle.loads(pickle.dumps(known)) is known


# Wrapped by a compiler ----------------------------------------------------------------------------


@wraps(kernels_of("attention")["reference"].run)
def breaks(*args, **kwargs):
    raise NotCompiled("breaks", "a call")


CALLS = {
    "traced": ({"window": (1, 2, 3)}, InvalidInput),
    "fake": ({"softcap": -1.0}, InvalidInput),
    "name": ({"kernel": "fa9"}, UnknownKernel),
    "forced": ({"softcap": 1.0, "kernel": "sdpa"}, NoKernel),
    "lowering": ({}, NoKernel),
    "run": ({"kernel": "breaks"}, NotCompiled),
}


@pytest.fixture(scope="module")
def breaking():
    kernel = register(
        replace(
            kernels_of("attention")["reference"],
            name="breaks",
            run=breaks,
            cost_us=lambda p: 1e9,
            judge=False,
        )
    )
    yield
    _drop([kernel])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("fullgraph", [True, False], ids=["whole", "broken"])
@pytest.mark.parametrize("stage", CALLS)
def test_an_error_is_found_in_what_a_compiler_raises(breaking, stage, fullgraph):
    given, kind = CALLS[stage]
    deny = tuple(kernels_of("attention")) if stage == "lowering" else ()
    backend = "inductor" if stage in ("lowering", "run") else "eager"

    @torch.compile(fullgraph=fullgraph, backend=backend)
    def call(q):
        return attnops.attention(q, q, q, **given)

    with pytest.raises(Exception) as caught, attnops.use(deny=deny):
        call(torch.randn(1, 3, 2, 8))
    ours = find(caught.value)
    assert type(ours) is kind and str(ours).splitlines()[0] in str(caught.value)


def test_a_caught_error_keeps_no_caller_alive():
    def caught():
        local = torch.nn.Linear(1, 1)
        try:
            fail(InvalidInput, "x", 1, "2")
        except InvalidInput:
            return weakref.ref(local)

    gc.disable()
    try:
        assert caught()() is None
    finally:
        gc.enable()


def test_other_errors_hold_none():
    assert find(None) is None
    loop, other = ValueError("a"), KeyError("b")
    loop.__cause__, other.__context__ = other, loop
    assert find(loop) is None
    other.__cause__ = BadTable("a", "b", "c")
    assert find(loop) is other.__cause__
