"""The device functions through Triton's compiler and ptxas, for GPUs that are not there: what would
be launched, compiled."""

from dataclasses import replace

import pytest
import torch

from attnops.ops.case_data import BF16, E4M3, F16, F32, INT8
from attnops.ops.latent.cases import DEEPSEEK
from attnops.ops.recurrent.cases import STEPS
from attnops.testing import Features, Source, gradient_call, make_call
from tests.triton.compiling import (
    MEMORY,
    built,
    compile_for,
    from_3_9,
    launched,
    launches_overlap,
    release,
    spilled,
    told,
)
from tests.triton.process import compiled

LLAMA = Features(dtype=BF16, head_dim=128, q_heads=32, kv_heads=8, causal=True)
V3 = replace(DEEPSEEK, q_heads=128)
WIDE = replace(LLAMA, head_dim=576, v_head_dim=512, q_heads=8, kv_heads=2)


def paged(f, q_len, page=16, keys=2048, **more):
    return lambda: make_call(
        "paged_attention", Source(), (q_len,), (max(keys, q_len),), page, f, padding=0, **more
    )


def dense(f, **ranges):
    return lambda: make_call("attention", Source(), 2, 300, 300, f, **ranges)


def mla(f, page=64):
    return lambda: make_call("mla_attention", Source(), (1,), (2048,), page, f, padding=0)


# What is served most: the call, and the bytes of registers that may spill on SM90.
CALLS = {
    "decode": (paged(LLAMA, 1), 0),
    "decode_page_1": (paged(LLAMA, 1, 1), 0),
    "decode_d256": (paged(replace(LLAMA, head_dim=256), 1), 16),
    "decode_int8": (paged(replace(LLAMA, kv_dtype=INT8), 1), 0),
    "decode_every_feature": (
        paged(replace(LLAMA, window=(512, -1), softcap=30.0, sinks=BF16, lse=True), 1),
        0,
    ),
    "decode_temperature": (paged(replace(LLAMA, softcap=30.0, temperature=True), 1), 0),
    "verify_tree": (paged(replace(LLAMA, mask="bool"), 16), 0),
    # 256 rows spill and were the faster on an H200 all the same.
    "extend": (paged(LLAMA, 600), 96),
    "extend_page_128": (paged(LLAMA, 600, 128), 96),
    "extend_window": (paged(replace(LLAMA, window=(512, -1)), 600), 192),
    "extend_d256": (paged(replace(LLAMA, head_dim=256), 600), 0),
    "decode_d576": (paged(WIDE, 1), 0),
    # The sum of 64 rows of 512 numbers takes all registers, as that of latents does.
    "extend_d576": (paged(WIDE, 200), 256),
    "dense": (dense(LLAMA), 96),
    "dense_ranges": (
        dense(
            replace(LLAMA, softcap=30.0, sinks=BF16),
            kv_start=(3, 0),
            kv_end=(300, 290),
            index=torch.int32,
        ),
        256,
    ),
    # Keys of 222 bytes are loaded through registers.
    "dense_d111": (
        dense(replace(LLAMA, dtype=F16, head_dim=111, q_heads=6, kv_heads=2, window=(50, -1))),
        256,
    ),
    "dense_float8_query": (dense(replace(LLAMA, q_dtype=E4M3, kv_dtype=E4M3, window=(50, -1))), 0),
    "packed_d256_mask": (
        lambda: make_call(
            "varlen_attention",
            Source(),
            (200, 100),
            (200, 150),
            replace(LLAMA, head_dim=256, mask="bool", softcap=30.0),
        ),
        0,
    ),
    "mla_128_heads": (mla(V3), 256),
    "mla_float32": (mla(replace(DEEPSEEK, dtype=F32)), 0),
    "mla_128_heads_float8": (mla(replace(V3, kv_dtype=E4M3)), 0),
}
ELSEWHERE = [
    (80, "decode"),
    (80, "decode_int8"),
    (80, "extend"),
    (80, "mla_128_heads"),
    (89, "mla_float32"),
    (89, "extend"),
    (100, "decode"),
    (100, "extend"),
    (80, "extend_d576"),
    (89, "extend_d576"),
    (100, "extend_d576"),
]


# Bytes that spill on SM90 where the bounds above, which are those of Triton 3.7, do not allow them.
# Triton 3.6 compiled what is measured. No code of 3.9 is measured yet.
SPILLS_TO_3_6 = {"extend_d576": 288}
SPILLS_FROM_3_9 = {
    "extend_d576": 512,
    "d128": 64,
    "d128_window": 64,
    "unlike_dims": 448,
    "softcap": 256,
}


def allowed(name, arch, limit):
    """The bound of bytes that spill."""
    if arch == 90 and from_3_9():
        return SPILLS_FROM_3_9.get(name, limit)
    if arch == 90 and release() <= (3, 6):
        return SPILLS_TO_3_6.get(name, limit)
    return limit


def check(name, arch, limit):
    call = CALLS[name][0]()
    query = call.arguments.get("query", call.arguments.get("q_nope"))
    whole = query.shape[-1] * query.dtype.itemsize % 16 == 0
    for kernel, given in launched(call, arch):
        binary = built(
            arch,
            kernel,
            given,
            BF16 if query.dtype == E4M3 else query.dtype,
            allowed(name, arch, limit),
        )
        ptx = binary.asm["ptx"]
        assert ("griddepcontrol" in ptx) == given["OVERLAP"]
        if kernel.__name__ == "attend" and query.dtype != F32:
            assert "mma" in ptx, "no matrix unit is used"
            assert ("cp.async" in ptx) == whole, "keys are not loaded ahead"
            assert ("wgmma" in ptx) == (arch == 90 and given["TILE_M"] >= 64)


ON = [(90, name, limit) for name, (_, limit) in CALLS.items()] + [
    (arch, name, 512) for arch, name in ELSEWHERE
]


@pytest.mark.sweep(13)
@pytest.mark.parametrize(("arch", "name", "limit"), ON)
@compiled
def test_attention(arch, name, limit):
    check(name, arch, limit)


@compiled
def test_stage_two_begins_early():
    both = launched(CALLS["decode"][0](), 90)
    assert [k.__name__ for k, _ in both] == ["attend", "combine"]
    assert all(given["OVERLAP"] == launches_overlap() for _, given in both)
    assert [given.get("launch_pdl", False) for _, given in both] == [False, launches_overlap()]
    assert not any(given["OVERLAP"] for _, given in launched(CALLS["decode"][0](), 80))


@compiled
def test_merge():
    for dtype in (BF16, F32):
        for op, shape in (("merge_state", (64, 32, 128)), ("merge_states", (64, 5, 32, 128))):
            [(kernel, given)] = launched(make_call(op, Source(), shape, dtype), 90)
            built(90, kernel, given, dtype)


@pytest.mark.parametrize(("requests", "columns"), [(1, 32), (17, 64)])
@compiled
def test_steps_of_a_rule(requests, columns):
    """Of a Qwen3-Next. Wide programs serve as many requests as keep them busy, and each thread
    reads 16 bytes at once."""
    sizes = (1,) * requests, 16, 32, 128, 128
    call = make_call("gated_delta_rule", Source(), *sizes, BF16, normalize=True, padding=0)
    [(kernel, given)] = launched(call, 90, "recurrent")
    assert given["BLOCK_V"] == columns
    binary = built(90, kernel, given, BF16)
    held = 128 * columns // (32 * given["num_warps"] * 4)
    assert binary.asm["ptx"].count("ld.global.v4.b32") >= held


@pytest.mark.parametrize("state", [128, 256])
@pytest.mark.parametrize("tokens", [1, 300])
@compiled
def test_scan(tokens, state):
    """Of a Granite 4, and of a Falcon-H1."""
    call = make_call("mamba2_scan", Source(), (tokens,), 1, 8, state, 64, BF16, STEPS, padding=0)
    [(kernel, given)] = launched(call, 90, "scan")
    binary = built(90, kernel, given, BF16, 64)
    assert ("wgmma" in binary.asm["ptx"]) == (tokens > 1)


KEEPS = {"R": 16, "accepted": ((3, 5),), "padding": 0}
VERIFIED = {
    "gated_delta_rule": ((8,), 16, 32, 128, 128, BF16, {"normalize": True}, KEEPS),
    "mamba2_scan": ((8,), 1, 8, 128, 64, BF16, STEPS, KEEPS),
    "causal_conv1d": ((8,), 8192, 4, BF16, {"activation": "silu"}, KEEPS),
}


@pytest.mark.parametrize("op", VERIFIED)
@compiled
def test_tokens_that_may_be_taken_back(op):
    """Of a Qwen3-Next and a Granite 4. A state is loaded and stored once."""
    call = make_call(op, Source(), *VERIFIED[op])
    [(kernel, given)] = launched(call, 90, "verify_states")
    built(90, kernel, given, BF16)


# The call, and the bytes of registers that may spill on SM90. Without these tiles, a thousand of
# them did.
GRADIENTS = {
    "d128": (LLAMA, 32),
    "d128_window": (replace(LLAMA, window=(1023, -1)), 32),
    "d64": (replace(LLAMA, head_dim=64, q_heads=16, kv_heads=16), 0),
    "d64_window": (replace(LLAMA, head_dim=64, window=(128, -1), sinks=BF16), 0),
    # Steps of 64 rows spill and were the faster on an H200 all the same.
    "unlike_dims": (replace(LLAMA, head_dim=192, v_head_dim=128), 192),
    "softcap": (replace(LLAMA, softcap=30.0, sinks=BF16), 32),
    "bias": (replace(LLAMA, softcap=30.0, mask="additive"), 64),
    # As above.
    "d64_bias": (replace(LLAMA, head_dim=64, mask="additive"), 256),
    "d256": (replace(LLAMA, head_dim=256), 192),
    "float32": (replace(LLAMA, dtype=F32), 640),
}


@pytest.mark.sweep(18)
@pytest.mark.parametrize(
    ("arch", "name"),
    [(90, name) for name in GRADIENTS] + [(80, "d128"), (89, "d64_window"), (100, "d64_window")],
)
@compiled
def test_gradients(arch, name):
    f, limit = GRADIENTS[name]
    call = gradient_call(
        Source(), make_call("attention", Source(), 1, 64, 64, f), mask_grad=f.mask == "additive"
    )
    found = launched(call, arch, "gradient")
    assert [k.__name__ for k, _ in found] == [
        "grad_queries",
        "grad_keys",
        *["grad_mask"] * (f.mask == "additive"),
    ]
    for kernel, given in found:
        binary = compile_for(arch, kernel, dict(given), f.dtype)
        text = told(binary, arch)
        assert binary.metadata.shared <= MEMORY[arch]
        assert spilled(binary, arch, text) <= (allowed(name, arch, limit) if arch == 90 else 1024)
        # ptxas waits for each product where a register of a sum is written between two of them, be
        # it on the way past a loop.
        assert "serialized" not in text
        assert ("wgmma" in binary.asm["ptx"]) == (arch == 90 and f.dtype != F32)


@pytest.mark.full
@compiled
def test_gradients_of_far_rows():
    """Offsets within a tile have 64 bits where a tensor's rows are that far apart; registers may
    spill."""
    import triton.language as tl

    f = replace(LLAMA, head_dim=64, mask="additive")
    call = gradient_call(Source(), make_call("attention", Source(), 1, 64, 64, f), mask_grad=True)
    near = call.arguments["query"]
    far = torch.empty_strided(near.shape, (0, 1 << 25, 64, 1), dtype=BF16, device="meta")
    found = [
        each for query in (near, far) for each in launched(call.with_(query=query), 90, "gradient")
    ]
    assert [g["OFFSETS"] for _, g in found] == [tl.int32] * 3 + [tl.int64] * 3
    for kernel, arguments in found[3:]:
        assert compile_for(90, kernel, dict(arguments), f.dtype).metadata.shared <= MEMORY[90]
