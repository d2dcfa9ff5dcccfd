"""The gradients of `fa4` through a stand-in of the function it wraps: rules, padding, sinks, refusals, warming."""

import inspect
from dataclasses import replace

import pytest
import torch

import attnops
from attnops.core.errors import NotCompiled
from attnops.core.kernel import kernels_of
from attnops.core.needs import _installed
from attnops.core.problem import Extent, altered
from attnops.core.record import changed
from attnops.core.select import select
from attnops.kernels.flash_attn4 import backward, fa4
from attnops.testing import Features, Source, check_kernel, gradient_call, make_call
from tests.mates import POLICY
from tests.standins import flash_attn_cute_backward, shapes
from tests.standins.test_fa4 import NAME, SM90, SM100, Capturing

__all__ = ["NAME"]  # the vendor
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OPS = ("attention_backward", "varlen_attention_backward")
PLAIN = Features(dtype=BF16, head_dim=64, q_heads=4, kv_heads=2)
RULES = {
    "plain": PLAIN,
    "causal": replace(PLAIN, causal=True, dtype=F16),
    "window": replace(PLAIN, causal=True, window=(3, -1)),
    "both_sides": replace(PLAIN, window=(2, 1)),
    "right": replace(PLAIN, window=(-1, 1)),
    "softcap": replace(PLAIN, softcap=1.5, kv_heads=1),
    "sinks": replace(PLAIN, sinks=F32, causal=True),
    "sinks_float64": replace(PLAIN, sinks=torch.float64),
    "all": replace(PLAIN, causal=True, window=(4, -1), softcap=2.0, sinks=BF16, kv_heads=4),
    "mla": replace(PLAIN, causal=True, head_dim=192, v_head_dim=128, kv_heads=4),
}
SHAPES = {
    **shapes.SHAPES,
    "long": lambda f: make_call("attention", Source(3), 1, 130, 140, f),
    "padded": lambda f: make_call("varlen_attention", Source(3), (70, 3), (130, 9), f, padding=(200, 200)),
    "tight": lambda f: make_call("varlen_attention", Source(3), (5, 8), (5, 70), f, padding=None),
}


def kernel(op):
    return kernels_of(op)["fa4"]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("lse_grad", [False, True], ids=["output", "lse"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rules", RULES)
def test_gradients(standin, rules, shape, lse_grad):
    call = gradient_call(Source(4), SHAPES[shape](RULES[rules]), lse_grad=lse_grad)
    figures = check_kernel(kernel(call.op), call)
    assert not figures.refused and figures.worst <= 1.0, figures
    assert len(standin) == (not shape.startswith("no_key"))


def test_promised_rows_are_neither_copied_nor_cleared(standin):
    call = gradient_call(Source(4), SHAPES["tight"](PLAIN))
    kernel(call.op).run(call.record)
    assert standin[-1]["q"].data_ptr() == call.arguments["query"].data_ptr()
    assert type(standin[-1]["max_seqlen_q"]) is int


def test_a_new_kind_is_refused_in_a_capture(standin, monkeypatch):
    capture = Capturing(monkeypatch)
    fa4._kinds().clear()

    def run(f=PLAIN, lens=(9, 30), lse_grad=False, policy=""):
        call = gradient_call(Source(5), make_call("varlen_attention", Source(5), lens, lens, f, padding=None), lse_grad=lse_grad)
        kernel(call.op).run(changed(call.record, policy=policy))

    capture.on = True
    with pytest.raises(NotCompiled, match=r"fa4: got a kind of call not yet compiled"):
        run()
    assert not standin
    capture.on = False
    run()
    capture.on = True
    run(lens=(40, 2))  # other lengths are no other kind
    run(f=replace(PLAIN, scale=0.3))
    for other in (
        {"lse_grad": True}, {"lens": (70, 1)}, {"f": replace(PLAIN, dtype=F16)},
        {"f": replace(PLAIN, softcap=1.0)}, {"f": replace(PLAIN, sinks=BF16)}, {"f": replace(PLAIN, window=(3, -1))},
        {"f": replace(PLAIN, causal=True)}, {"f": replace(PLAIN, head_dim=96)}, {"f": replace(PLAIN, kv_heads=4)},
        {"policy": POLICY},
    ):  # fmt: skip
        with pytest.raises(NotCompiled):
            run(**other)


@pytest.mark.parametrize("shape", ["dense", "ragged"])
@pytest.mark.parametrize("policy", ["", POLICY, f"{POLICY};kernel=fa4"])
def test_programs_take_turns_under_a_deterministic_policy_alone(standin, policy, shape):
    call = gradient_call(Source(4), SHAPES[shape](PLAIN))
    kernel(call.op).run(changed(call.record, policy=policy))
    assert standin[-1]["deterministic"] is (POLICY in policy)


@pytest.mark.parametrize("shape", ["dense", "ragged"])
def test_programs_take_turns_where_torch_asks_for_it(standin, shape):
    call = gradient_call(Source(4), SHAPES[shape](PLAIN))
    for mode in (0, 2, 1):
        torch.set_deterministic_debug_mode(mode)
        try:
            kernel(call.op).run(call.record)
        finally:
            torch.set_deterministic_debug_mode(0)
        assert standin[-1]["deterministic"] is (mode > 0)


def test_a_step_of_training_hands_the_policy_on(standin):
    q, k, v = (torch.randn(2, 6, n, 64, dtype=BF16, requires_grad=True) for n in (8, 2, 2))
    for steady in (True, False):
        with attnops.use(deterministic=steady, kernel={"attention": "aten_flash", "attention_backward": "fa4"}):
            attnops.attention(q, k, v, causal=True).sum().backward()
        assert standin[-1]["deterministic"] is steady


def test_one_kernel_takes_short_and_long_requests_under_a_deterministic_policy(standin):
    """The vendor compiles a kernel of its own for a batch of one tile, which a request among longer ones does not get."""
    fa4._kinds().clear()
    for lengths in ((1, 3), (9, 30), (9, 140), (300, 1)):
        call = gradient_call(Source(5), make_call("varlen_attention", Source(5), lengths, lengths, PLAIN, padding=None))
        kernel(call.op).run(changed(call.record, policy=POLICY))
    assert len(fa4._kinds()) == 1
    assert {call["max_seqlen_q"] for call in standin} == {257, 300}


@pytest.mark.parametrize(
    ("change", "field"),
    [({}, ""), ({"sinks": True, "window": (1023, -1)}, ""), ({"target": SM100}, "target"), ({"kv_range": True}, "kv_range")],
)
def test_the_choice_under_a_deterministic_policy(change, field):
    """Its order of turns was read for SM90 alone."""
    many = dict.fromkeys(("queries", "context"), 4096) | {"tokens": 8192, "batch": 2}
    problem = altered(PROBLEM, head_dim=128, v_head_dim=128, q_heads=32, kv_heads=8, **{n: Extent.of(x) for n, x in many.items()})
    for op in OPS:
        decision = select(altered(problem, op=op, **change), POLICY)
        assert (decision.kernel is kernel(op)) is (not field), decision
        assert not field or field in [r.field for r in decision.refused["fa4"]]


PROBLEM = altered(gradient_call(Source(0), SHAPES["dense"](PLAIN)).problem, target=SM90)


@pytest.mark.parametrize("op", OPS)
def test_it_is_the_choice_by_estimate_on_an_h200(op):
    many = dict.fromkeys(("queries", "context"), 4096) | {"tokens": 8192, "batch": 2}
    problem = altered(PROBLEM, op=op, head_dim=128, v_head_dim=128, q_heads=32, kv_heads=8, **{n: Extent.of(x) for n, x in many.items()})
    assert select(problem).kernel is kernel(op)


def test_what_is_used_is_in_the_signature():
    assert set(backward.USED) <= set(flash_attn_cute_backward.PARAMETERS)


@pytest.mark.gpu
@pytest.mark.skipif(not _installed("flash_attn.cute"), reason="flash-attn-4 is not installed, so its signature cannot be compared")
def test_the_stand_in_has_the_packages_signature():
    real = inspect.signature(backward.interface()).parameters
    mine = {n: p for n, p in inspect.signature(flash_attn_cute_backward.flash_attn_bwd).parameters.items() if n != "arch"}
    assert {n: p.default for n, p in real.items()} == {n: p.default for n, p in mine.items()}
