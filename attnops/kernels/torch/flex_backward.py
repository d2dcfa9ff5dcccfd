"""`flex` of the gradients: the backward that torch compiles for flex_attention, with the mask and
score function of the call.

flex_attention gives its backward to autograd alone, so the forward is computed once more and
recorded: `grad_output` and `grad_lse` go back through it, the gradient of the sinks through the
log-sum-exp that they join. A mask is a constant there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.core.kernel import Capture, Kernel, demand, device, register
from attnops.core.record import changed
from attnops.core.tensors import compact
from attnops.kernels.shared.parts import in_turns
from attnops.kernels.torch.flex import NEEDS, TAKES, attended, dispatch_keys, packed_attended
from attnops.measured import Roofline

if TYPE_CHECKING:
    from attnops.ops.attention import record as dense, varlen


@in_turns
def attention_backward(
    call: dense.AttentionBackward,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v, grad_sinks = _gradients(call, attended)
    return grad_q, grad_k, grad_v, call.query.new_empty(0), grad_sinks


def varlen_attention_backward(
    call: varlen.VarlenAttentionBackward,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(call, packed_attended)


def _gradients(
    call: Any, forward: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Those of query, key, value and sinks, contiguous; that of the sinks is `[0]` where there are
    none."""
    names = [n for n in ("query", "key", "value", "sinks") if getattr(call, n) is not None]
    leaves = {n: getattr(call, n).detach().requires_grad_() for n in names}
    with torch.enable_grad(), dispatch_keys(recorded=True):
        output, lse = forward(changed(call, **leaves), recorded=True)
        given = [(output, call.grad_output.transpose(-3, -2).to(output.dtype))]
        if call.grad_lse is not None:
            given.append((lse, call.grad_lse.transpose(-1, -2).to(lse.dtype)))
        roots = [(x, grad) for x, grad in given if x.requires_grad]  # none, where there are no keys
        found = (
            torch.autograd.grad(
                [x for x, _ in roots],
                list(leaves.values()),
                [grad for _, grad in roots],
                allow_unused=True,
                materialize_grads=True,
            )
            if roots
            else [torch.zeros_like(x) for x in leaves.values()]
        )
    grads = {n: compact(grad.detach()) for n, grad in zip(names, found, strict=True)}
    return (
        grads["query"],
        grads["key"],
        grads["value"],
        grads["sinks"] if "sinks" in grads else call.query.new_empty(0),
    )


# By whole steps on an H200, whose forward is computed once more, and a little over it: never
# measured by direct calls.
BACKWARD = Roofline(300.0, 0.079, 0.09)
for _run, _takes in (
    (attention_backward, {"mask", "kv_start", "kv_end"}),
    (varlen_attention_backward, set[str]()),
):
    register(
        Kernel(
            "flex",
            _run.__name__,
            _run,
            takes=(TAKES - {"return_lse"}) | _takes,
            dtypes=(torch.float16, torch.bfloat16, torch.float32),
            # Torch refuses flex's backward on a CPU, and has no tiles of it for wider heads.
            needs=(
                *NEEDS,
                device("cuda"),
                demand(
                    "head_dim, v_head_dim", "<= 256", lambda p: max(p.head_dim, p.v_head_dim) <= 256
                ),
            ),
            # Tensors of the recorded forward outlive the call, which the pool of Inductor's CUDA
            # graphs refuses.
            capture=Capture.NEVER,
            cost_us=BACKWARD,
            about="torch flex_attention's gradient, with its forward once more",
        )
    )
