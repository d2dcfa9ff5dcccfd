"""Windows and chunks that hide no key: public functions turn them off, ops refuse what
overflows."""

from dataclasses import replace

import pytest
import torch

import attnops
from attnops import nn, ops
from attnops.core.arguments import FURTHEST
from attnops.core.eager_cache import Eager
from attnops.core.errors import InvalidInput
from attnops.core.record import changed, check, values
from attnops.ops import OPS
from attnops.testing import CASES, Features, Source, gradient_call, make_call
from tests.ops.calls import FUNCTIONS, PARAMETERS, good
from tests.triton.checks import check as right
from tests.triton.process import interpreted

OFF = {"window_left": -1, "window_right": -1, "attention_chunk": 0}
BOUNDED = [(op, name) for op in OPS for name in OFF if name in OPS[op].spec.names]
NONE_OF_INT32 = 2**31 - 1
PUBLIC = [op for op in dict(BOUNDED) if op in FUNCTIONS and not op.startswith("plan")]


@pytest.fixture
def seen(monkeypatch):
    """The arguments of OFF that reach an op, by name."""
    found = []
    call = Eager.__call__

    def spied(self, record, *more):
        found.append({n: getattr(record, n) for n in OFF if n in self.names})
        return call(self, record, *more)

    monkeypatch.setattr(Eager, "__call__", spied)
    return found


@pytest.mark.parametrize(("op", "name"), BOUNDED)
def test_an_op_refuses_what_is_no_distance(op, name):
    call = changed(CASES[op][0].call().record, **{name: FURTHEST})
    check(call)
    far = changed(call, **{name: FURTHEST + 1})
    n, names = far.spec.positional, far.spec.names
    for run in (
        check,
        lambda c: OPS[op].packet.default(
            *values(c)[:n], **dict(zip(names[n:], values(c)[n:], strict=True))
        ),
    ):
        with pytest.raises(InvalidInput, match=f"{name}: got 1073741824, want <= 1073741823"):
            run(far)


@pytest.mark.parametrize("far", [FURTHEST + 1, NONE_OF_INT32, 2**70])
@pytest.mark.parametrize("op", PUBLIC)
def test_a_public_function_turns_it_off(op, far, seen):
    wide = {"window": (far, far), "window_left": far, "attention_chunk": far}
    FUNCTIONS[op](**good(op), **{n: value for n, value in wide.items() if n in PARAMETERS[op]})
    assert seen and all(call.items() <= OFF.items() for call in seen), seen


def test_one_that_is_a_distance_stays(seen):
    attnops.attention(**good("attention"), window=(FURTHEST, 3), attention_chunk=FURTHEST)
    assert seen == [{"window_left": FURTHEST, "window_right": 3, "attention_chunk": FURTHEST}]


def test_layers_and_specs(seen):
    x = torch.zeros(1, 3, 4, 8)
    layer = nn.Attention(4, head_dim=8, window=(NONE_OF_INT32, -1), attention_chunk=NONE_OF_INT32)
    layer(x, x, x)
    assert seen[-1].items() <= OFF.items() and (layer.window, layer.attention_chunk) == (
        (-1, -1),
        0,
    )
    spec = ops.paged_layers(4, 2, 8, 2, torch.float32, window=(NONE_OF_INT32, NONE_OF_INT32))
    assert spec == ops.paged_layers(4, 2, 8, 2, torch.float32)


WIDE = Features(dtype=torch.float16, lse=True, causal=False)
FAR = {
    "left": replace(WIDE, window=(FURTHEST, -1)),
    "both": replace(WIDE, window=(FURTHEST, FURTHEST)),
    "causal": replace(WIDE, window=(FURTHEST, -1), causal=True),
    "chunk": replace(WIDE, chunk=FURTHEST),
}


@pytest.mark.parametrize("name", FAR)
@interpreted
def test_the_widest_of_triton_is_right(name):
    f = FAR[name]
    dense = make_call("attention", Source(1), 2, 5, 9, f)
    packed = make_call("varlen_attention", Source(1), (5, 3), (9, 2), f)
    for call in (
        make_call("paged_attention", Source(1), (5, 1), (9, 40), 4, f),
        *(gradient_call(Source(2), c) for c in (dense, packed)),
    ):
        assert not right(call).refused
