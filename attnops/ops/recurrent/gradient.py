"""Autograd of ops that change a state: the gradient of the op `x` is the op `x_backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput, fail
from attnops.core.op import OPS, applied, below, blank, gradients, tensors_of
from attnops.core.record import changed


class _Carried(torch.autograd.Function):
    """The op as a function: its output and the states after the tokens are new."""

    @staticmethod
    def forward(
        ctx: Any, op: str, run: Any, call: Any, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        given = changed(call, **dict(zip(OPS[op].tensors, tensors, strict=True)))
        output, after = torch.empty_like(given.output), given.state.clone()
        below(run, changed(given, output=output, state=after))
        # The caller's state and output are about to change.
        state = None if call.fresh else given.state.clone()
        ctx.save_for_backward(*tensors_of(changed(given, output=None, state=state)))
        ctx.op, ctx.call = op, call
        return output, after

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_after: Tensor) -> tuple[Tensor | None, ...]:
        op = OPS[ctx.op]
        wants = dict(zip(op.tensors, ctx.needs_input_grad[3:], strict=True))
        given = dict(zip(op.names, ctx.call, strict=True))
        given |= dict(zip(op.tensors, ctx.saved_tensors, strict=True))
        given |= {"grad_output": grad_output, "grad_after": grad_after}
        return None, None, None, *gradients(ctx.op, given, wants)


def differentiable(run: Any, call: Any) -> None:
    """Run a call whose gradient is asked for. Its state carries a gradient from call to call, as
    any tensor that is changed in place.

    Raises InvalidInput if `output` or `state` is a leaf that requires grad, and for tokens that may
    be taken back.
    """
    if call.accepted is not None:
        want = "None, where a gradient is asked for: no token is taken back in training"
        fail(InvalidInput, "accepted", "a tensor", want)
    for field in ("output", "state"):
        written = getattr(call, field)
        if written.is_leaf and written.requires_grad:
            want = "another tensor, such as its clone(): it is changed in place"
            fail(InvalidInput, field, "a leaf that requires grad", want)
    output, after = applied(_Carried, call.spec.op, run, blank(call), *tensors_of(call))
    call.output.copy_(output)
    call.state.copy_(after)
