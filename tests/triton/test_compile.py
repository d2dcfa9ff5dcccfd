"""The device functions through Triton's compiler and ptxas, for GPUs that are not there: what would be launched, compiled."""

import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Features, Source, gradient_call, make_call
from tests.triton.process import compiled

BF16, F16, F32, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8
TYPES = {
    BF16: "bf16", F16: "fp16", F32: "fp32", E4M3: "fp8e4nv", torch.float8_e5m2: "fp8e5", INT8: "i8", torch.uint8: "u8", torch.int16: "i16",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg", "launch_pdl")
MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}

LLAMA = Features(dtype=BF16, head_dim=128, q_heads=32, kv_heads=8, causal=True)
V3 = replace(DEEPSEEK, q_heads=128)
WIDE = replace(LLAMA, head_dim=576, v_head_dim=512, q_heads=8, kv_heads=2)


def paged(f, q_len, page=16, keys=2048, **more):
    return lambda: make_call("paged_attention", Source(), (q_len,), (max(keys, q_len),), page, f, padding=0, **more)


def dense(f, **ranges):
    return lambda: make_call("attention", Source(), 2, 300, 300, f, **ranges)


def mla(f, page=64):
    return lambda: make_call("mla_attention", Source(), (1,), (2048,), page, f, padding=0)


# What is served most: the call, and the bytes of registers that may spill on SM90.
CALLS = {
    "decode": (paged(LLAMA, 1), 0),
    "decode_page_64": (paged(LLAMA, 1, 64), 0),
    "decode_page_1": (paged(LLAMA, 1, 1), 0),
    "decode_d64": (paged(replace(LLAMA, head_dim=64), 1), 0),
    "decode_d256": (paged(replace(LLAMA, head_dim=256), 1), 16),
    "decode_float8": (paged(replace(LLAMA, kv_dtype=E4M3), 1), 0),
    "decode_int8": (paged(replace(LLAMA, kv_dtype=INT8), 1), 0),
    "decode_every_feature": (paged(replace(LLAMA, window=(512, -1), softcap=30.0, sinks=BF16, lse=True), 1), 0),
    "decode_temperature": (paged(replace(LLAMA, softcap=30.0, temperature=True), 1), 0),
    "decode_float32": (paged(replace(LLAMA, dtype=F32), 1), 0),
    "verify": (paged(LLAMA, 8), 0),
    "verify_tree": (paged(replace(LLAMA, mask="bool"), 16), 0),
    "verify_bias": (paged(replace(LLAMA, mask="additive"), 16), 0),
    # 256 rows spill and were the faster on an H200 all the same.
    "extend": (paged(LLAMA, 600), 96),
    "extend_page_128": (paged(LLAMA, 600, 128), 96),
    "extend_window": (paged(replace(LLAMA, window=(512, -1)), 600), 192),
    "extend_d256": (paged(replace(LLAMA, head_dim=256), 600), 0),
    "decode_d576": (paged(WIDE, 1), 0),
    # The sum of 64 rows of 512 numbers takes all registers, as that of latents does.
    "extend_d576": (paged(WIDE, 200), 256),
    "extend_d576_float8": (paged(replace(WIDE, kv_dtype=E4M3), 200), 0),
    "dense": (dense(LLAMA), 96),
    "dense_ranges": (dense(replace(LLAMA, softcap=30.0, sinks=BF16), kv_start=(3, 0), kv_end=(300, 290), index=torch.int32), 256),
    # Keys of 222 bytes are loaded through registers.
    "dense_d111": (dense(replace(LLAMA, dtype=F16, head_dim=111, q_heads=6, kv_heads=2, window=(50, -1))), 256),
    "dense_float8_query": (dense(replace(LLAMA, q_dtype=E4M3, kv_dtype=E4M3, window=(50, -1))), 0),
    "packed_d256_mask": (
        lambda: make_call("varlen_attention", Source(), (200, 100), (200, 150), replace(LLAMA, head_dim=256, mask="bool", softcap=30.0)),
        0,
    ),
    "mla_16_heads": (mla(DEEPSEEK), 0),
    "mla_128_heads": (mla(V3), 256),
    "mla_float32": (mla(replace(DEEPSEEK, dtype=F32)), 0),
    "mla_128_heads_float8": (mla(replace(V3, kv_dtype=E4M3)), 0),
}
ELSEWHERE = [
    (80, "decode"), (80, "decode_int8"), (80, "extend"), (80, "mla_128_heads"), (89, "mla_float32"), (89, "extend"), (100, "decode"),
    (100, "extend"), (80, "extend_d576"), (89, "extend_d576"), (100, "extend_d576"),
]  # fmt: skip


def launches_overlap():
    from triton.backends.nvidia.compiler import CUDAOptions

    return "launch_pdl" in CUDAOptions.__dataclass_fields__


def launched(call, arch):
    """(device function, arguments) of everything that a call launches on `arch`; nothing is launched."""
    from attnops.kernels.shared.launch import gpu
    from attnops.kernels.triton.launch import attention as host

    with recorded(host, gpu.Gpu(132, MEMORY[arch], arch == 90, arch >= 89)) as found:
        before, host.overlaps = host.overlaps, lambda device: arch >= 90 and launches_overlap()
        try:
            kernels_of(call.op)["triton"].run(call.record)
        finally:
            host.overlaps = before
    return found


@contextmanager
def recorded(host, on):
    """(device function, arguments) of what the module `host` launches in the block, as on a GPU. Nothing is launched."""
    from attnops.kernels.shared.launch import gpu

    found = []

    def launch(kernel, grid, given, args=(), warps=4):
        found.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | given | {"num_warps": warps} | gpu.OPTIONS))

    before = host.launch, gpu.INTERPRETED
    host.launch, gpu.INTERPRETED = launch, on
    try:
        yield found
    finally:
        host.launch, gpu.INTERPRETED = before


def compile_for(arch, kernel, given, dtype):
    """Triton's result for one launch. `dtype`: the query's, which a launch on the CPU would not compute in."""
    import triton.language as tl
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {n: given.pop(n) for n in OPTIONS if n in given}
    if "COMPUTE" in given:
        given["COMPUTE"] = {BF16: tl.bfloat16, F16: tl.float16, F32: tl.float32}[dtype]
    varying = {p.name for p in kernel.params if p.do_not_specialize}
    signature, constants, divisible = {}, {}, []
    for at, name in enumerate(kernel.arg_names):
        x = given[name]
        if hasattr(x, "block_shape"):
            signature[name] = f"tensordesc<{TYPES[x.base.dtype]}{[*x.block_shape]}>"
        elif isinstance(x, torch.Tensor):
            signature[name] = "*" + TYPES[x.dtype]
            divisible.append(at)
        elif isinstance(x, float):
            signature[name] = "fp32"
        elif isinstance(x, int) and not isinstance(x, bool) and not name.isupper() and (name in varying or x != 1):
            signature[name] = "i32" if -(2**31) <= x < 2**31 else "i64"
            divisible += [at] if name not in varying and x % 16 == 0 else []
        else:
            signature[name] = "constexpr"
            constants[(at,)] = x
    source = ASTSource(kernel, signature, constants, {(at,): [["tt.divisibility", 16]] for at in divisible})
    return triton_compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def told(binary, arch):
    """Messages of ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(binary.asm["ptx"])
        file.flush()
        name = re.search(r"^\.target (\w+)", binary.asm["ptx"], re.MULTILINE)[1]
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = done.stdout + done.stderr
    print(binary.metadata.name, f"sm{arch}", re.search(r"Used \d+ registers", text)[0], f"{binary.metadata.shared} bytes shared")
    return text


def spilled(binary, arch, text=""):
    """Bytes, by ptxas. text: its messages, if they are known."""
    return int(re.search(r"(\d+) bytes spill stores", text or told(binary, arch))[1])


# Bytes that spill on SM90 where the bounds above, which are those of Triton 3.7, do not allow them. Triton 3.6 compiled what is
# measured. No code of 3.9 is measured yet.
SPILLS_TO_3_6 = {"extend_d576": 288}
SPILLS_FROM_3_9 = {"extend_d576": 512, "d128": 64, "d128_window": 64, "unlike_dims": 448, "softcap": 256}


def release():
    """(major, minor) of the Triton that is installed."""
    return tuple(map(int, version("triton").split(".")[:2]))


def from_3_9():
    """Is the Triton that is installed newer than those whose code was measured?"""
    return release() >= (3, 9)


def allowed(name, arch, limit):
    """The bound of bytes that spill."""
    if arch == 90 and from_3_9():
        return SPILLS_FROM_3_9.get(name, limit)
    if arch == 90 and release() <= (3, 6):
        return SPILLS_TO_3_6.get(name, limit)
    return limit


def waits_first(ptx):
    """Does the kernel wait for the one before it, and before any access?"""
    return re.search(r"griddepcontrol\.wait|\b(?:ld|st|atom|red)\.global|cp\.async|prefetch", ptx)[0] == "griddepcontrol.wait"


def check(name, arch, limit):
    call = CALLS[name][0]()
    found = launched(call, arch)
    assert found
    for kernel, given in found:
        query = call.arguments.get("query", call.arguments.get("q_nope"))
        whole = query.shape[-1] * query.dtype.itemsize % 16 == 0
        binary = compile_for(arch, kernel, dict(given), BF16 if query.dtype == E4M3 else query.dtype)
        assert binary.metadata.shared <= MEMORY[arch]
        assert spilled(binary, arch) <= allowed(name, arch, limit)
        assert ("griddepcontrol" in binary.asm["ptx"]) == given["OVERLAP"]
        if kernel.__name__ == "attend" and query.dtype != F32:
            ptx = binary.asm["ptx"]
            assert "mma" in ptx, "no matrix unit is used"
            assert ("cp.async" in ptx) == whole, "keys are not loaded ahead"
            assert ("wgmma" in ptx) == (arch == 90 and given["TILE_M"] >= 64)


@pytest.mark.sweep(18)
@pytest.mark.parametrize("name", CALLS)
@compiled
def test_sm90(name):
    check(name, 90, CALLS[name][1])


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("arch", "name"), ELSEWHERE)
@compiled
def test_other_gpus(arch, name):
    check(name, arch, 512)


@compiled
def test_stage_two_begins_early():
    both = launched(CALLS["decode"][0](), 90)
    assert [k.__name__ for k, _ in both] == ["attend", "combine"]
    assert all(given["OVERLAP"] == launches_overlap() for _, given in both)
    assert [given.get("launch_pdl", False) for _, given in both] == [False, launches_overlap()]
    assert not any(given["OVERLAP"] for _, given in launched(CALLS["decode"][0](), 80))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@compiled
def test_merge(dtype):
    for op, shape in (("merge_state", (64, 32, 128)), ("merge_states", (64, 5, 32, 128))):
        call = make_call(op, Source(), shape, dtype)
        [(kernel, given)] = launched(call, 90)
        assert spilled(compile_for(90, kernel, given, dtype), 90) == 0


# The call, and the bytes of registers that may spill on SM90. Without these tiles, a thousand of them did.
GRADIENTS = {
    "d128": (LLAMA, 32),
    "d128_window": (replace(LLAMA, window=(1023, -1)), 32),
    "d128_chunk": (replace(LLAMA, chunk=1024), 32),
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
@pytest.mark.parametrize(("arch", "name"), [(90, name) for name in GRADIENTS] + [(80, "d128"), (89, "d64_window"), (100, "d64_window")])
@compiled
def test_gradients(arch, name):
    from attnops.kernels.shared.launch import gpu
    from attnops.kernels.triton.launch import gradient

    f, limit = GRADIENTS[name]
    # A chunk is for packed requests.
    forward = make_call("varlen_attention", Source(), (64,), (64,), f) if f.chunk else make_call("attention", Source(), 1, 64, 64, f)
    call = gradient_call(Source(), forward, **({"mask_grad": True} if f.mask == "additive" else {}))
    with recorded(gradient, gpu.Gpu(132, MEMORY[arch], arch == 90, True)) as found:
        kernels_of(call.op)["triton"].run(call.record)
    assert [k.__name__ for k, _ in found] == ["grad_queries", "grad_keys", *["grad_mask"] * (f.mask == "additive")]
    for kernel, given in found:
        binary = compile_for(arch, kernel, dict(given), f.dtype)
        text = told(binary, arch)
        assert binary.metadata.shared <= MEMORY[arch]
        assert spilled(binary, arch, text) <= (allowed(name, arch, limit) if arch == 90 else 1024)
        # ptxas waits for each product where a register of a sum is written between two of them, be it on the way past a loop.
        assert "serialized" not in text
        assert ("wgmma" in binary.asm["ptx"]) == (arch == 90 and f.dtype != F32)


@pytest.mark.full
@compiled
def test_gradients_of_far_rows():
    """Offsets within a tile have 64 bits where a tensor's rows are that far apart; registers may spill."""
    import triton.language as tl

    from attnops.kernels.shared.launch import gpu
    from attnops.kernels.triton.launch import gradient

    f = replace(LLAMA, head_dim=64, mask="additive")
    call = gradient_call(Source(), make_call("attention", Source(), 1, 64, 64, f), mask_grad=True)
    near = call.arguments["query"]
    far = torch.empty_strided(near.shape, (0, 1 << 25, 64, 1), dtype=BF16, device="meta")
    with recorded(gradient, gpu.Gpu(132, MEMORY[90], True, True)) as found:
        for query in (near, far):
            kernels_of(call.op)["triton"].run(call.with_(query=query).record)
    assert [g["OFFSETS"] for _, g in found] == [tl.int32] * 3 + [tl.int64] * 3
    for kernel, arguments in found[3:]:
        assert compile_for(90, kernel, dict(arguments), f.dtype).metadata.shared <= MEMORY[90]
