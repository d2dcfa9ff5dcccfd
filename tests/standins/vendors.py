"""The kernels that have a stand-in, by name: how it is put in place, and the machine that is taken
to have the package."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as vendor

from attnops.core.problem import Target, pretend
from attnops.kernels.fla import recurrent as fla
from attnops.kernels.flash_attn4 import fa4
from attnops.kernels.torch import flex
from attnops.ops import OPS
from attnops.testing import Call
from attnops.testing.check import clone
from tests.standins import (
    aten_flash,
    cudnn,
    fla_ops,
    flash_attn_cute,
    flashinfer_mla,
    flashinfer_modules,
    flashinfer_rope,
    flashinfer_trtllm,
    flashinfer_trtllm_mla,
    mem_efficient,
    sgl_kernel_fa3,
    sgl_kernel_mla,
    sgl_kernel_small,
    sgl_kernel_sparse as _registers,  # noqa: F401
)

BF16, WIDE = torch.bfloat16, (torch.float32, torch.float64)


@dataclass(frozen=True)
class Vendor:
    """installed: puts the stand-in in place, and gives the record of its calls. arch: of the GPU
    that has the packages."""

    installed: Callable[[], AbstractContextManager[Any]]
    packages: tuple[str, ...] = ()
    arch: int = 90

    def on(self, arch: int) -> Target:
        """A machine of this architecture that has the packages."""
        return Target("cuda", arch, assume=self.packages)

    @property
    def target(self) -> Target:
        """Of the architecture that the stand-in is for."""
        return self.on(self.arch)

    @contextmanager
    def running(self, arch: int = 0) -> Iterator[Any]:
        """As on such a machine, of another architecture if asked for; gives the record of the
        stand-in's calls.

        Skips where the package itself is installed.
        """
        for name in self.packages:
            if name in ("sgl_kernel", "flashinfer") and find_spec(name):
                pytest.skip(f"{name} is installed, and a stand-in under its name would hide it")
        with self.installed() as calls, pretend(self.on(arch or self.arch)):
            yield calls


@contextmanager
def flex_on_a_cpu() -> Iterator[list[int]]:
    """flex's vendor uncompiled, without its refusal of a CPU. Its calls, of which each says its
    number of requests."""
    calls: list[int] = []

    def call(query: Any, *given: Any, **more: Any) -> Any:
        calls.append(len(query))
        return vendor.flex_attention(query, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vendor, "_validate_device", lambda *given: None)
        patch.setattr(flex, "_call", lambda device: call)
        yield calls


SGL, FLASHINFER = ("sgl_kernel",), ("flashinfer",)
VENDORS = {
    "aten_flash": Vendor(aten_flash.installed),
    "cudnn": Vendor(cudnn.installed),
    "mem_efficient": Vendor(mem_efficient.installed),
    "flex": Vendor(flex_on_a_cpu),
    "fa3": Vendor(sgl_kernel_fa3.installed, SGL),
    "fa4": Vendor(flash_attn_cute.installed, tuple(p.module for p in fa4.PACKAGES)),
    "flashmla": Vendor(sgl_kernel_mla.installed, SGL),
    "flashmla_fp8": Vendor(sgl_kernel_mla.installed, SGL),
    "cutlass_mla": Vendor(sgl_kernel_mla.installed, SGL, 100),
    "sgl_sparse": Vendor(sgl_kernel_small.installed, SGL),
    "flashinfer": Vendor(flashinfer_modules.installed, FLASHINFER),
    "flashinfer_mla_fa2": Vendor(flashinfer_mla.installed, FLASHINFER),
    "flashinfer_mla_fa3": Vendor(flashinfer_mla.installed, FLASHINFER),
    "flashinfer_rope": Vendor(flashinfer_rope.installed, FLASHINFER, 100),
    "xqa": Vendor(flashinfer_trtllm.installed, FLASHINFER),
    "trtllm": Vendor(flashinfer_trtllm.installed, FLASHINFER, 100),
    "fla": Vendor(fla_ops.installed, tuple(p.module for p in fla.PACKAGES)),
    "trtllm_mla": Vendor(flashinfer_trtllm_mla.installed, FLASHINFER, 100),
}


def half(call: Call, dtype: torch.dtype = BF16) -> Call:
    """The same call in `dtype`, sinks and masks too; lse and scales are float32 in every call."""
    kept = ("lse", "grad_lse", "q_scale", "k_scale", "v_scale", "temperature")
    return call.map(lambda n, t: t.to(dtype) if n not in kept and t.dtype in WIDE else t)


def narrow(call: Call) -> Call:
    """The call in bfloat16; a gradient's with the results that the forward has there."""
    call = half(call)
    if not call.op.endswith("_backward"):
        return call
    forward = OPS[call.op.removesuffix("_backward")]
    names = {a.name for a in forward.packet.default._schema.arguments}
    given = {n: v for n, v in call.arguments.items() if n in names}
    given |= {n: clone(v).masked_fill_(call.free[n], 0) for n, v in given.items() if n in call.free}
    output, lse = forward.reference(forward.call(**given | {"return_lse": True}))
    return call.with_(output=output, lse=lse)
