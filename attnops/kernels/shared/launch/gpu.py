"""The GPU at hand, one launch, and the arguments that attention and its gradient share. Importing
this module imports triton."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnops.core.errors import InvalidInput
from attnops.core.tensors import Rules
from attnops.kernels.shared.launch.beside import ALIGNED, BESIDE
from attnops.kernels.shared.launch.compiled import Made, launch_compiled
from attnops.kernels.shared.memory import address
from attnops.kernels.shared.parts import GRID

LOG2E = 1.4426950408889634
OPTIONS = {"enable_fp_fusion": True}
"""Set explicitly, because Triton's default changes from release to release."""


class Gpu(NamedTuple):
    """The properties of a GPU that launches depend on.

    memory: bytes of shared memory a program may have. warpgroups: do they multiply (SM90 alone)?
    float8: does the GPU round to float8 itself (from SM89 on)?
    """

    multiprocessors: int
    memory: int
    warpgroups: bool
    float8: bool


INTERPRETED = Gpu(4, 227 * 1024, True, False)
"""In place of a GPU for Triton's interpreter. So few multiprocessors split small calls as a GPU
splits large ones."""


@functools.cache
def _gpu(index: int) -> Gpu:
    p: Any = torch.cuda.get_device_properties(index)
    return Gpu(
        p.multi_processor_count,
        p.shared_memory_per_block_optin,
        p.major == 9,
        (p.major, p.minor) >= (8, 9),
    )


def gpu_of(x: Tensor) -> Gpu:
    return _gpu(x.device.index) if x.is_cuda else INTERPRETED


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Can this Triton launch a kernel on this device while the one before it runs (programmatic
    dependent launch)?"""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return False
    return "launch_pdl" in CUDAOptions.__dataclass_fields__


def overlapped(overlap: bool) -> dict[str, Any]:
    """For `launch`: does the kernel, whose programs wait before any access, begin while the one
    before it ends?

    The kernel before it waited likewise, so kernels two launches apart are in order, too.
    """
    return {"OVERLAP": overlap, **({"launch_pdl": True} if overlap else {})}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    given: dict[str, Any],
    args: tuple[Any, ...] = (),
    warps: int = 4,
) -> Made | None:
    """Launch a device function on the current GPU. args: its first arguments; given: the others by
    name, with Triton's options.

    Returns what `launch_compiled` does. Raises InvalidInput for a grid that CUDA has no room for.
    """
    if len(grid) > 1 and max(grid[1:]) > GRID:
        raise InvalidInput(
            f"grid of {kernel.__name__}",
            grid,
            f"<= {GRID} but in the first dim: fewer pages a request, or layers",
        )
    given = {**given, "num_warps": warps, **OPTIONS}
    if BESIDE.looks and BESIDE.takes(kernel, grid, args, given):
        return None
    return launch_compiled(kernel, grid, args, given)


def steady(x: Tensor) -> Tensor:
    """`x`, or a copy of it that Triton loads as it does any other: for a deterministic policy.

    How a tile is spread over threads follows from its address and strides, and the order of a sum
    over what was loaded from that.
    """
    strides = x.stride()[:-1]
    if x.shape[-1] % ALIGNED:
        usual = x.is_contiguous() and strides == x.new_empty(x.shape, device="meta").stride()[:-1]
    else:
        usual = not any(stride % ALIGNED for stride in strides)
    if usual and x.stride(-1) == 1 and address(x) % ALIGNED == 0:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def computed_in(query: Tensor) -> Any:
    """The dtype of matrix products. The interpreter's products take bfloat16 for integers, so that
    it computes in float32."""
    if query.dtype == torch.float32 or not query.is_cuda:
        return tl.float32
    return tl.float16 if query.dtype == torch.float16 else tl.bfloat16


def ruled(rules: Rules) -> dict[str, Any]:
    """The rules of visibility, and the scale of the logits, as device functions take them: None
    where a rule is off."""
    _, causal, left, right, softcap, chunk = rules
    # A soft cap works on scale * logit / cap, and gives back logits in base 2.
    scale, cap = (
        (rules.scale / softcap, softcap * LOG2E) if softcap > 0 else (rules.scale * LOG2E, None)
    )
    return {
        "scale": scale,
        "cap": cap,
        "left": left if left >= 0 else None,
        "right": right if right >= 0 and not causal else None,
        "chunk": chunk or None,
        "CAUSAL": causal,
    }


NO_MASK = {"mask_ptr": None, "MASK": "none", "mask_b": 0, "mask_h": 0, "mask_q": 0, "mask_k": 0}


def masked(mask: Tensor | None, queries: int = 0) -> dict[str, Any]:
    """A mask as device functions take it, with its strides by request, head, query and key.

    mask: `[1 | B, 1 | H, 1 | S, K]`, or `[T, K]` of packed tokens. A dim of one number serves all.
    queries: of a dense request, where its first token has the offset of as many queries for each
    request before it.
    """
    if mask is None:
        return NO_MASK
    if mask.dim() == 2:
        b, h, q = 0, 0, mask.stride(0)
    else:
        b, h, q = (0 if n == 1 else mask.stride(i) for i, n in enumerate(mask.shape[:3]))
        b -= queries * q
    ptr, kind = (mask.view(torch.uint8), "bool") if mask.dtype == torch.bool else (mask, "additive")
    steps = {"mask_b": b, "mask_h": h, "mask_q": q, "mask_k": mask.stride(-1)}
    return {"mask_ptr": ptr, "MASK": kind, **steps}


def strides(**given: Tensor) -> dict[str, int]:
    """Strides by token and by head of packed `[T, H, D]` or dense `[B, S, H, D]` tensors, as the
    device functions take them.

    x_b is what a request adds to the offset that its first token has in one long batch: 0 where the
    dense batch is one.
    """
    found: dict[str, int] = {}
    for name, x in given.items():
        found |= {f"{name}_b": x.stride(0) - x.shape[1] * x.stride(1) if x.dim() == 4 else 0}
        found |= {f"{name}_t": x.stride(-3), f"{name}_h": x.stride(-2)}
    return found
