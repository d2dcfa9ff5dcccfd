"""Under a deterministic policy `triton` gives a request or a token the bits that it has alone,
through the interpreter."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from attnops.ops.case_data import BF16, F16, F32
from attnops.ops.experts.cases import OSS, SHAPED
from attnops.ops.latent.cases import DEEPSEEK
from attnops.ops.pages.decode_cases import Angles
from attnops.testing import CASES, Features, Source, equip, make_call
from tests.mates import may_be_chosen, same_bits, same_bits_in_any_page
from tests.triton.checks import mode, triton
from tests.triton.process import interpreted
from tests.triton.test_decode import LONG, many_splits

RULES = {"causal": True, "window": (250, -1), "sinks": F32, "lse": True}
PAGED = Features(dtype=F16, head_dim=32, q_heads=8, kv_heads=2, **RULES)
DENSE = Features(dtype=F16, head_dim=24, q_heads=6, kv_heads=2, mask="bool", **RULES)
LATENTS = replace(DEEPSEEK, dtype=F16, head_dim=80, v_head_dim=64, lse=True)
LENGTHS = (1, 20, 1, 7, 1), (400, 130, 90, 300, 17)
RANGES = {"kv_start": (0, 40, 290, 0), "kv_end": (300, 280, 300, 7), "index": torch.int32}
STEP = replace(LONG, q_heads=6)
ALL = {"norm": 1.0, "bias": True, "activation": "silu", "residual": True}

REQUESTS = [(0,), (1,), (2,), (3, 0), (3, 2, 1)]
ROWS = [(0,), (5,), (17,), range(9)]
KEPT = {"R": 8, "accepted": ((7, 3), (0, 0), (2, 4), (5, 1))}
CALLS = {
    "paged": (REQUESTS, lambda: make_call("paged_attention", Source(4), *LENGTHS, 16, PAGED)),
    "latents": (REQUESTS, lambda: make_call("mla_attention", Source(4), *LENGTHS, 16, LATENTS)),
    "dense": (REQUESTS, lambda: make_call("attention", Source(4), 4, 20, 300, DENSE, **RANGES)),
    "packed": (
        REQUESTS,
        lambda: make_call("varlen_attention", Source(4), LENGTHS[0][:4], LENGTHS[1][:4], DENSE),
    ),
    "decode": (
        REQUESTS,
        lambda: make_call(
            "decode_attention", Source(4), (300, 1, 33, 129, 17), 16, STEP, Angles(norms=True)
        ),
    ),
    "decode of a window": (
        REQUESTS,
        lambda: make_call(
            "decode_attention",
            Source(4),
            (300, 1, 33, 129),
            16,
            replace(STEP, window=(100, -1)),
            Angles(),
        ),
    ),
    "rotate": (
        ROWS,
        lambda: make_call(
            "rotate_and_write_kv", Source(4), range(40), 3, 16, Angles(norms=True), STEP
        ),
    ),
    "linear": (ROWS, lambda: make_call("linear", Source(1), 64, 330, 40, BF16, **ALL)),
    "linear of more rows": (ROWS, lambda: make_call("linear", Source(1), 70, 330, 40, BF16, **ALL)),
    "sums of rows": (ROWS, lambda: make_call("linear", Source(1), 70, 330, 1, F32)),
    "rms_norm": (ROWS, lambda: make_call("rms_norm", Source(1), 64, 330, BF16, residual=True)),
    "experts": (ROWS, lambda: make_call("experts", Source(1), 40, (72, 20, 70, 5, 2), BF16, **OSS)),
    "mxfp4_experts": (
        ROWS,
        lambda: make_call("mxfp4_experts", Source(1), 18, (64, 64, 16, 3, 2), BF16, **SHAPED),
    ),
    "rule": (
        REQUESTS,
        lambda: make_call(
            "gated_delta_rule", Source(4), (70, 1, 3, 64), 1, 2, 32, 16, F16, normalize=True
        ),
    ),
    "scan": (
        REQUESTS,
        lambda: make_call(
            "mamba2_scan", Source(4), (70, 1, 3, 64), 1, 4, 128, 64, F16, dt_softplus=True
        ),
    ),
    "rule with tokens that may be taken back": (
        REQUESTS,
        lambda: make_call(
            "gated_delta_rule", Source(4), (4, 1, 3, 4), 1, 2, 32, 16, F16, KEPT, normalize=True
        ),
    ),
    "conv": (REQUESTS, lambda: make_call("causal_conv1d", Source(4), (40, 1, 3, 17), 9, 4, BF16)),
    "route": (
        [(t,) for t in range(9)],
        lambda: next(c for c in CASES["route"] if c.label == "ties-all").call(),
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", CALLS)
@interpreted
def test_bits_are_those_of_a_request_alone(name):
    """In page tables of several widths, too."""
    groups, build = CALLS[name]
    with mode("deterministic"), many_splits() if name.startswith("decode") else nullcontext():
        call = build()
        kernel = triton(call.op)
        call = equip(kernel, call)
        assert may_be_chosen(kernel, call) or name == "sums of rows"
        same_bits(call, groups, kernel)


ONES = (1,) * 5, LENGTHS[1]
STEPS = {
    "paged": lambda: make_call("paged_attention", Source(4), *ONES, 64, PAGED),
    "latents": lambda: make_call("mla_attention", Source(4), *ONES, 64, LATENTS),
    "decode": lambda: make_call("decode_attention", Source(4), ONES[1], 64, STEP, Angles()),
    "decode of a window": lambda: make_call(
        "decode_attention", Source(4), ONES[1], 64, replace(STEP, window=(100, -1)), Angles()
    ),
}


@pytest.mark.parametrize("name", STEPS)
@interpreted
def test_bits_do_not_follow_from_the_size_of_pages(name):
    with mode("deterministic"), many_splits() if name.startswith("decode") else nullcontext():
        call = STEPS[name]()
        assert triton(call.op).invariant.any_page
        same_bits_in_any_page(call, triton(call.op))
