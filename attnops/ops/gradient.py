"""Autograd of attention: the gradient of the op `x` is the op `x_backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.call import changed
from attnops.errors import NoGradient, fail
from attnops.ops.op import OPS, applied, below, blank, tensors_of


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, run: Any, call: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        given = changed(call, **dict(zip(OPS[op].tensors, tensors, strict=True)))
        output, lse = below(run, changed(given, return_lse=True))
        ctx.save_for_backward(*tensors, output, lse)
        ctx.op, ctx.call = op, call
        ctx.set_materialize_grads(False)
        if not call.return_lse:
            ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, output, lse = ctx.saved_tensors
        op, gradient = OPS[ctx.op], OPS[f"{ctx.op}_backward"]
        wants = dict(zip(op.tensors, ctx.needs_input_grad[3:], strict=True))
        given = dict(zip(op.names, ctx.call, strict=True)) | dict(zip(op.tensors, tensors, strict=True))
        given |= {"output": output, "lse": lse, "grad_lse": grad_lse, "mask_grad": wants["mask"]}
        given["grad_output"] = torch.zeros_like(output) if grad_output is None else grad_output
        found = dict(zip(gradient.results, gradient(gradient.call(*(given[n] for n in gradient.names))), strict=True))
        return (None, None, None, *(found.get(f"grad_{n}") if wants[n] else None for n in op.tensors))


def differentiable(run: Any, call: Any) -> tuple[Tensor, Tensor]:
    """(output, lse) of a call whose gradient is asked for. Raises NoGradient where the gradient does not know an argument."""
    op = call.spec.op
    if call.q_scale is not None or call.k_scale is not None or call.v_scale is not None:
        fail(NoGradient, f"{op} with q_scale, k_scale or v_scale", ("query, key or value",))
    if call.mask is not None and call.mask.requires_grad and "grad_mask" not in OPS[f"{op}_backward"].results:
        fail(NoGradient, op, ("mask",))
    output, lse = applied(_Attention, op, run, blank(call), *tensors_of(call))
    return output, lse if call.return_lse else lse.new_empty(0)
