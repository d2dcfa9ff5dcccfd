"""Launches as on a GPU that is not there, through Triton's compiler and ptxas."""

import re
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.metadata import version
from unittest.mock import patch

import torch

from attnops.core.kernel import kernels_of
from attnops.ops.case_data import BF16, E4M3, E5M2, F16, F32, INT8, U8

TYPES = {
    BF16: "bf16",
    F16: "fp16",
    F32: "fp32",
    E4M3: "fp8e4nv",
    E5M2: "fp8e5",
    INT8: "i8",
    U8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg", "launch_pdl")
MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def launches_overlap():
    from triton.backends.nvidia.compiler import CUDAOptions

    return "launch_pdl" in CUDAOptions.__dataclass_fields__


def overlap_on(arch):
    """Does a launch begin before the one before it ends?"""
    return arch >= 90 and launches_overlap()


def launched(call, arch, module="attention", name="triton"):
    """(device function, arguments) of everything that a call launches on `arch`; nothing is
    launched. module: of launch/. name: of the kernel."""
    from attnops.kernels.shared.launch.gpu import Gpu

    host = import_module(f"attnops.kernels.triton.launch.{module}")
    with ExitStack() as patches:
        found = patches.enter_context(
            recorded(host, Gpu(132, MEMORY[arch], arch == 90, arch >= 89))
        )
        if hasattr(host, "overlaps"):
            patches.enter_context(patch.object(host, "overlaps", lambda device: overlap_on(arch)))
        kernels_of(call.op)[name].run(call.record)
    assert found
    return found


@contextmanager
def recorded(host, on):
    """(device function, arguments) of what the module `host` launches in the block, as on a GPU.
    Nothing is launched."""
    from attnops.kernels.shared.launch import gpu

    found = []

    def launch(kernel, grid, given, args=(), warps=4):
        found.append(
            (
                kernel,
                dict(zip(kernel.arg_names, args, strict=False))
                | given
                | {"num_warps": warps}
                | gpu.OPTIONS,
            )
        )

    before = host.launch, gpu.INTERPRETED
    host.launch, gpu.INTERPRETED = launch, on
    try:
        yield found
    finally:
        host.launch, gpu.INTERPRETED = before


def compile_for(arch, kernel, given, dtype):
    """Triton's result for one launch. `dtype`: the query's, which a launch on the CPU would not
    compute in."""
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
        elif (
            isinstance(x, int)
            and not isinstance(x, bool)
            and not name.isupper()
            and (name in varying or x != 1)
        ):
            signature[name] = "i32" if -(2**31) <= x < 2**31 else "i64"
            divisible += [at] if name not in varying and x % 16 == 0 else []
        else:
            signature[name] = "constexpr"
            constants[(at,)] = x
    source = ASTSource(
        kernel, signature, constants, {(at,): [["tt.divisibility", 16]] for at in divisible}
    )
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
    print(
        binary.metadata.name,
        f"sm{arch}",
        re.search(r"Used \d+ registers", text)[0],
        f"{binary.metadata.shared} bytes shared",
    )
    return text


def spilled(binary, arch, text=""):
    """Bytes, by ptxas. text: its messages, if they are known."""
    return int(re.search(r"(\d+) bytes spill stores", text or told(binary, arch))[1])


def built(arch, kernel, given, dtype, limit=0):
    """As `compile_for`, and fits: into shared memory, and into registers but for `limit` bytes that
    spill."""
    binary = compile_for(arch, kernel, dict(given), dtype)
    assert binary.metadata.shared <= MEMORY[arch]
    assert spilled(binary, arch) <= limit
    return binary


def release():
    """(major, minor) of the Triton that is installed."""
    return tuple(map(int, version("triton").split(".")[:2]))


def from_3_9():
    """Is the Triton that is installed newer than those whose code was measured?"""
    return release() >= (3, 9)


def waits_first(ptx):
    """Does the kernel wait for the one before it, and before any access?"""
    return (
        re.search(r"griddepcontrol\.wait|\b(?:ld|st|atom|red)\.global|cp\.async|prefetch", ptx)[0]
        == "griddepcontrol.wait"
    )


def waits_as_told(binary, given, arch):
    """Does a kernel that overlaps the one before it wait for it, and no other kernel?"""
    assert waits_first(binary.asm["ptx"]) == given.get("launch_pdl", False) == overlap_on(arch)
