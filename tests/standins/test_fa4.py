"""`fa4` through stand-ins of the functions it wraps: arguments, refusals, warming, gradients,
choices."""

import inspect
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import attnops
from attnops.core.errors import NotCompiled
from attnops.core.kernel import Package, kernels_of
from attnops.core.needs import _installed
from attnops.core.problem import Extent, Target, altered
from attnops.core.record import changed
from attnops.core.select import select
from attnops.kernels.flash_attn4 import backward, fa4 as kernel
from attnops.kernels.flash_attn4.fa4 import tile as tile_of
from attnops.testing import (
    Features,
    Mismatch,
    Source,
    check_kernel,
    gradient_call,
    make_call,
)
from tests.checks import right
from tests.helpers import torch_process
from tests.mates import POLICY
from tests.standins import calls, flash_attn_cute, flash_attn_cute_backward, test_fa3
from tests.standins.vendors import VENDORS

NAME = "fa4"
SM90, SM100 = (VENDORS[NAME].on(arch) for arch in (90, 100))
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def fa4(op):
    return kernels_of(op)["fa4"]


@pytest.mark.parametrize(
    ("change", "tile"),
    [
        ({}, 128),
        ({"head_dim": 64}, 128),
        ({"head_dim": 96}, 128),
        ({"head_dim": 96, "causal": False}, 144),
        ({"head_dim": 192, "v_head_dim": 128}, 128),
        ({"head_dim": 192, "v_head_dim": 192}, 112),
        ({"head_dim": 256}, 80),
        ({"head_dim": 192, "window": (100, -1)}, 96),
        ({"head_dim": 256, "window": (100, -1)}, 64),
        ({"target": SM100, "head_dim": 256}, 128),
    ],
)
def test_tiles(change, tile):
    assert tile_of(altered(LLAMA, **change)) == tile


def test_the_output_is_written_in_place(standin):
    call = make_call(
        "paged_attention", Source(4), (1, 3), (9, 3), 4, Features(dtype=BF16, causal=True)
    )
    fa4("paged_attention").run(call.record)
    assert standin[-1]["out"] is call.arguments["output"]


# Warming ------------------------------------------------------------------------------------------


class Capturing:
    """As if the tensors lay on a GPU whose stream is captured; switched on by hand."""

    def __init__(self, monkeypatch):
        self.on = False
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.on)


@pytest.fixture
def kinds():
    """The kinds of calls that count as compiled: none yet."""
    known = kernel._kinds()
    known.clear()
    return known


def packed(f, lengths, way, **more):
    """A packed call, or its gradient, without padding."""
    call = make_call("varlen_attention", Source(5), lengths, lengths, f, padding=None)
    return gradient_call(Source(5), call, **more) if way == "backward" else call


def paged(f, lens, q_lens=(1, 1), page=16):
    return make_call("paged_attention", Source(5), q_lens, lens, page, f, padding=0)


HALF = Features(dtype=BF16, head_dim=64, q_heads=4, kv_heads=2)
FEATURES: tuple[dict[str, Any], ...] = (
    {"dtype": F16},
    {"softcap": 1.0},
    {"sinks": BF16},
    {"window": (3, -1)},
    {"causal": True},
    {"kv_heads": 4},
)
OTHERS: dict[str, tuple[dict[str, Any], ...]] = {
    "forward": (
        {"page": 64},
        {"q_lens": (90, 1)},
        *({"f": replace(HALF, **c)} for c in (*FEATURES, {"lse": True}, {"head_dim": 32})),
    ),
    "backward": (
        {"lse_grad": True},
        {"lengths": (90, 2)},
        {"policy": POLICY},
        *({"f": replace(HALF, **c)} for c in (*FEATURES, {"head_dim": 96})),
    ),
}
"""What makes another kind of a call."""


@pytest.mark.parametrize("way", OTHERS)
def test_a_new_kind_is_refused_in_a_capture(standin, monkeypatch, kinds, way):
    capture = Capturing(monkeypatch)

    def run(f=HALF, policy="", **more):
        call = (
            packed(f, **{"lengths": (9, 30), **more}, way=way)
            if way == "backward"
            else paged(f, **{"lens": (90, 30), **more})
        )
        fa4(call.op).run(changed(call.record, policy=policy))

    capture.on = True
    with pytest.raises(
        NotCompiled, match=r"fa4: got a kind of call not yet compiled .* want one such call before"
    ):
        run()
    assert not standin
    capture.on = False
    run()
    capture.on = True
    run(f=replace(HALF, scale=0.3))
    run(
        **{"lengths": (40, 2)} if way == "backward" else {"lens": (50, 2)}
    )  # other lengths are no other kind
    for other in OTHERS[way]:
        with pytest.raises(NotCompiled):
            run(**other)


@pytest.mark.parametrize("way", OTHERS)
def test_one_kernel_takes_short_and_long_requests_under_a_deterministic_policy(standin, kinds, way):
    """The vendor compiles a kernel of its own for a batch of one tile, which a request among longer
    ones does not get."""
    for lengths in ((1, 3), (9, 30), (9, 140), (300, 1)):
        call = packed(HALF, lengths, way)
        fa4(call.op).run(changed(call.record, policy=POLICY))
    assert len(kinds) == 1
    assert {call["max_seqlen_q"] for call in standin} == {257, 300}
    assert {call.get("num_splits", 1) for call in standin} == {1}


# The choice ---------------------------------------------------------------------------------------

LLAMA = replace(test_fa3.LLAMA, target=SM90)


def test_it_is_chosen_where_fa3_is_not_there_and_not_before_it():
    both = replace(LLAMA, target=Target("cuda", 90, (*SM90.assume, "sgl_kernel")))
    assert select(both).kernel.name == "fa3" and "fa4" in select(both).passed_over
    assert select(LLAMA).kernel.name == "fa4"
    assert "flash_attn.cute missing" in str(
        select(replace(LLAMA, target=Target("cuda", 90, ()))).refused["fa4"][0]
    )


def test_a_finder_that_knows_no_specs_hides_no_package(monkeypatch):
    _installed.cache_clear()
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "this", raising=False)
    assert _installed("this") and not _installed("that_is_nowhere")


def test_a_submodule_is_looked_for_without_importing_its_parent(tmp_path):
    package = tmp_path / "flash_attn"
    (package / "cute").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemError('imported')")
    (package / "cute" / "__init__.py").write_text("")
    modules = ["flash_attn.cute", "flash_attn.cutie", "torch.nn", "flash_x.y"]
    code = f"from attnops.core.needs import _installed; print(*map(_installed, {modules}))"
    path = f"{tmp_path}:{':'.join(filter(None, sys.path))}"
    assert torch_process(code, env={"PYTHONPATH": path}).split() == [
        "True",
        "False",
        "True",
        "False",
    ]


@pytest.mark.parametrize(
    ("version", "old"),
    [("4.0.0b36", False), ("4.0.0b19", True), ("4.0.0", False), ("4.1.2", False)],
)
def test_betas_before_the_one_that_was_read_are_refused(monkeypatch, version, old):
    monkeypatch.setattr(Package, "version", lambda self: version)
    monkeypatch.setattr("attnops.core.needs._installed", lambda module: True)
    assert bool(kernel.PACKAGES[0].missing(Target("cuda", 90))) == old
    assert kernel.PACKAGES[0].missing(SM90) is None


# Gradients ----------------------------------------------------------------------------------------

RULES = {
    "causal": replace(HALF, causal=True, dtype=F16),
    "both_sides": replace(HALF, window=(2, 1)),
    "sinks": replace(HALF, sinks=F32, causal=True),
    "all": replace(HALF, causal=True, window=(4, -1), softcap=2.0, sinks=BF16, kv_heads=4),
    "mla": replace(HALF, causal=True, head_dim=192, v_head_dim=128, kv_heads=4),
}
SHAPES = {
    "dense": calls.dense,
    "ragged": calls.ragged,
    "long": lambda f: make_call("attention", Source(3), 1, 130, 140, f),
    "padded": lambda f: make_call(
        "varlen_attention", Source(3), (70, 3), (130, 9), f, padding=(200, 200)
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("lse_grad", [False, True], ids=["output", "lse"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rules", RULES)
def test_gradients(standin, rules, shape, lse_grad):
    call = gradient_call(Source(4), SHAPES[shape](RULES[rules]), lse_grad=lse_grad)
    right(fa4(call.op), call)
    assert len(standin) == 1


def test_promised_rows_are_neither_copied_nor_cleared(standin):
    call = packed(HALF, (5, 8), "backward")
    fa4(call.op).run(call.record)
    assert standin[-1]["q"].data_ptr() == call.arguments["query"].data_ptr()
    assert type(standin[-1]["max_seqlen_q"]) is int


@pytest.mark.parametrize("shape", ["dense", "ragged"])
def test_programs_take_turns_under_a_deterministic_policy_or_where_torch_asks_for_it(
    standin, shape
):
    call = gradient_call(Source(4), SHAPES[shape](HALF))
    for policy, mode in (("", 0), (POLICY, 0), (f"{POLICY};kernel=fa4", 0), ("", 2), ("", 1)):
        torch.set_deterministic_debug_mode(mode)
        try:
            fa4(call.op).run(changed(call.record, policy=policy))
        finally:
            torch.set_deterministic_debug_mode(0)
        assert standin[-1]["deterministic"] is (POLICY in policy or mode > 0)


def test_a_step_of_training_hands_the_policy_on(standin):
    q, k, v = (torch.randn(2, 6, n, 64, dtype=BF16, requires_grad=True) for n in (8, 2, 2))
    for steady in (True, False):
        with attnops.use(
            deterministic=steady, kernel={"attention": "aten_flash", "attention_backward": "fa4"}
        ):
            attnops.attention(q, k, v, causal=True).sum().backward()
        assert standin[-1]["deterministic"] is steady


MANY = dict.fromkeys(("queries", "context"), Extent.of(4096)) | {
    "tokens": Extent.of(8192),
    "batch": Extent.of(2),
}


@pytest.mark.parametrize("policy", ["", POLICY])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({}, ""),
        ({"sinks": True, "window": (1023, -1)}, ""),
        ({"target": SM100}, "target"),
        ({"kv_range": True}, "kv_range"),
    ],
)
def test_the_choice_of_a_gradient(policy, change, field):
    """By estimate it is the choice on an H200. Its order of turns was read for SM90 alone."""
    problem = gradient_call(Source(0), calls.dense(HALF)).problem
    for op in ("attention_backward", "varlen_attention_backward"):
        asked = altered(
            problem,
            op=op,
            head_dim=128,
            v_head_dim=128,
            q_heads=32,
            kv_heads=8,
            **{"target": SM90, **MANY, **change},
        )
        decision = select(asked, policy)
        if policy or not change:
            assert (decision.kernel is fa4(op)) is (not field), decision
            assert not field or field in [r.field for r in decision.refused["fa4"]]


PINNED = (
    (kernel, flash_attn_cute._flash_attn_fwd),
    (backward, flash_attn_cute_backward.flash_attn_bwd),
)
"""The wraps of a function of the package, and its stand-in."""


def signature_of(standin):
    return {n: p.default for n, p in inspect.signature(standin).parameters.items()}


@pytest.mark.parametrize(("wrap", "standin"), PINNED, ids=["forward", "backward"])
def test_what_is_used_is_in_the_signature(wrap, standin):
    assert set(wrap.USED) <= set(signature_of(standin))


@pytest.mark.gpu
@pytest.mark.skipif(
    not _installed("flash_attn.cute"),
    reason="flash-attn-4 is not installed, so its signature cannot be compared",
)
@pytest.mark.parametrize(("wrap", "standin"), PINNED, ids=["forward", "backward"])
def test_the_stand_in_has_the_packages_signature(wrap, standin):
    assert list(signature_of(wrap.interface()).items()) == list(signature_of(standin).items())


def test_the_bug_that_is_refused_is_in_the_stand_in(standin):
    f = Features(dtype=BF16, head_dim=128, causal=True)
    call = make_call("paged_attention", Source(1), (1, 1), (300, 129), 128, f)
    with pytest.raises(Mismatch, match="got nan"):
        check_kernel(replace(fa4("paged_attention"), needs=()), call)
