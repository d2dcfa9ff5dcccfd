"""`sgl_merge`: the merge of two partial results inside the sgl_kernel wheel (`merge_state_v2`, natural log).

The kernel multiplies an empty side by 0, so that NaN in it would spread, and divides 0 by 0 where both are empty. Hence an empty
side's output is zeroed first, in a copy, unless the caller promises that it is; and -inf is replaced by the least
finite number, whose exp beside a real lse is 0 too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.kernel import Kernel, arch, dtypes, register
from attnops.kernels import _sgl
from attnops.kernels._rows import aligned, cleared, countable
from attnops.problem import Problem, Refusal, Target

ARCHS = (80, 86, 87, 89, 90, 100, 103, 120)
LEAST = torch.finfo(torch.float32).min


def merge_state(
    output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor, *, stale: bool = True, policy: str = ""
) -> tuple[Tensor, Tensor]:
    """See `attnops.merge_state`. The kernel writes both results itself; when stale, both outputs are copied once before."""
    output = torch.empty(output_a.shape, dtype=output_a.dtype, device=output_a.device)
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=output_a.device)
    if output.numel() == 0:
        return output, lse.fill_(float("-inf"))
    countable(output_a=output_a)
    _sgl.load("merge_state_v2", _sgl.common_ops(Target.of(output_a.device)))
    a, b = _side(output_a, lse_a, stale), _side(output_b, lse_b, stale)
    torch.ops.sgl_kernel.merge_state_v2(*a, *b, output, lse)
    return output, lse.masked_fill_(lse == LEAST, float("-inf"))


def _side(output: Tensor, lse: Tensor, stale: bool) -> tuple[Tensor, Tensor]:
    output = (cleared(output, lse) if stale else output).contiguous()
    aligned(output=output)
    return output, lse.clamp(min=LEAST).contiguous()


def _whole_packs(p: Problem) -> Refusal | None:
    pack = 16 // p.dtype.itemsize
    return None if p.v_head_dim % pack == 0 else Refusal("v_head_dim", p.v_head_dim, f"a multiple of {pack}, of {p.dtype}")


def _cost_us(p: Problem) -> float:
    """Seven passes over an output, four of them to clear empty sides, and some launches; 3.1 TB/s were seen on SM90."""
    return 14.0 + 7 * max(p.tokens.hint, 1) * p.q_heads * p.v_head_dim * p.dtype.itemsize / 3.1e6


register(
    Kernel(
        "sgl_merge",
        "merge_state",
        merge_state,
        needs=(arch(*ARCHS), dtypes(torch.float16, torch.bfloat16, torch.float32), _whole_packs),
        packages=(_sgl.package(holds="merge_state_v2"),),
        probe=_sgl.lacks_common_ops,
        cost_us=_cost_us,
        batch_invariant=True,
        about="merge_state_v2 (sgl_kernel)",
    )
)
