"""Modules whose rows do not follow from each other under a deterministic policy.

torch's product of one row sums in another order than that of four, and on a GPU so does its mean.
`steady(module)` gives a module a subclass of its class, until `unsteady`. The subclass runs the
forward of the class; under a deterministic policy it does so in a mode, in which products, means,
sums and norms of torch are calls of `attnops.ops.linear`. Its kernels sum each row in one order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnops.core.select import _ACTIVE, use
from attnops.core.tracers import is_recorded
from attnops.nn.class_swap import subclass
from attnops.ops.linear.record import linear

# Products ----------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """A linear by the op. Its input's gradient is one, too; its weight's is a sum over all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        # No more than is needed: a model may go on to change a tensor of which it took the sum.
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.shape = x.shape
        return linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        # The gradient may be computed in a thread that has another policy.
        with use(deterministic=True):
            through = linear(rows, weight.t().contiguous()).view(ctx.shape) if of_x else None
        return (
            through,
            rows.t() @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` by the op, under the policy in force. Differentiable.

    Args:
        x: `[..., In]`.
        weight: `[Out, In]`.
        bias: `[Out]`, or None.

    Returns:
        `[..., Out]`, in the dtype of autocast where that is on.

    Raises:
        InvalidInput: dtypes or shapes differ.
        NoKernel: no kernel keeps the rows of this call apart, as in float64 on a GPU.
    """
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return _in_one_dtype(x, weight, bias)


def _in_one_dtype(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product` without autocast, which ends at the op."""
    x, weight = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight))
    given = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return _Product.apply(x, weight, bias)  # type: ignore[no-any-return]
    return linear(x, weight, bias)


def sums(x: Tensor) -> Tensor:
    """`[..., 1]`: the sums of the last dim, in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return _in_one_dtype(x, x.new_ones(1, x.shape[-1]))


def means(x: Tensor) -> Tensor:
    """`[..., 1]`: the means of the last dim, likewise."""
    return sums(x) / x.shape[-1]


# torch's functions by them -----------------------------------------------------------------------

Answer = Callable[..., Tensor | None]
"""The result of a call of torch, or None where torch itself is to run it."""


def _matmul(input: Tensor, other: Tensor) -> Tensor | None:
    known = other.dim() == 2 and input.dim() > 0
    return product(input, other.t()) if known else None


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **more: Any) -> Tensor | None:
    return product(mat1, mat2.t(), input) if input.dim() == 1 and not more else None


def _is_last(x: Tensor, dim: Any) -> bool:
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return x.is_floating_point() and type(dim) is int and dim in (-1, x.dim() - 1) and x.dim() > 0


def _sum(input: Tensor, dim: Any = None, keepdim: bool = False, **more: Any) -> Tensor | None:
    return None if more or not _is_last(input, dim) else _reduced(sums(input), input, keepdim)


def _mean(input: Tensor, dim: Any = None, keepdim: bool = False, **more: Any) -> Tensor | None:
    return None if more or not _is_last(input, dim) else _reduced(means(input), input, keepdim)


def _reduced(found: Tensor, input: Tensor, keepdim: bool) -> Tensor:
    found = found.to(input.dtype)
    return found if keepdim else found.squeeze(-1)


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    if len(normalized_shape) != 1:
        return None
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    x = _scaled(x - means(x), weight, eps)
    return (x if bias is None else x + bias).to(input.dtype)


def _rms_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    if len(normalized_shape) != 1:
        return None
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    return _scaled(x, weight, torch.finfo(x.dtype).eps if eps is None else eps).to(input.dtype)


def _scaled(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x` over the root of its mean square, times the weight."""
    x = x * torch.rsqrt(means(x * x) + eps)
    return x if weight is None else x * weight


ANSWERS: dict[Any, Answer] = {
    F.linear: product,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
}


class Steady(TorchFunctionMode):
    """Within it, the functions of torch in `ANSWERS` are calls of the op."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = ANSWERS.get(func)
        if answer is not None and (found := answer(*args, **kwargs)) is not None:
            return found
        return func(*args, **kwargs)


# Modules -----------------------------------------------------------------------------------------


def _keeps_apart() -> bool:
    """A tool that records the model gets torch's own code, under any policy."""
    return _ACTIVE.deterministic and not is_recorded()


def apart(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`call(*args, **kwargs)`, under a deterministic policy within `Steady`."""
    if not _keeps_apart():
        return call(*args, **kwargs)
    with Steady():
        return call(*args, **kwargs)


WHOLE = 64
"""Numbers that a CPU's vectors divide."""


def one_by_one(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A pointwise function of `x` `[..., N]`, on a CPU a row at a time under a deterministic
    policy.

    There torch computes the last numbers of a tensor, and of a thread's part of it, by other code
    than the rest. Traced code has no loop over rows, and fills them up to whole vectors.
    """
    if not (_keeps_apart() and x.is_cpu and x.dim() > 1 and x.numel()):
        return call(x)
    if torch.compiler.is_compiling():
        return call(F.pad(x, (0, -x.shape[-1] % WHOLE)))[..., : x.shape[-1]]
    return torch.stack([call(row) for row in x.reshape(-1, x.shape[-1])]).view(x.shape)


def steady(module: nn.Module, pointwise: bool = False) -> None:
    """Give the module the subclass of its class that keeps rows apart under a deterministic policy.

    Args:
        module: its forward computes each row of its result `[..., N]` from a row of its input.
        pointwise: it takes one tensor, and each number of its result follows from one number.
    """
    cls: Any = type(module)
    # Hooks, the public way, were tried: they enter the mode before the forward and leave it after,
    # and pre-hooks that a user registers later run within it.
    module.__class__ = _steady(cls, pointwise)


def unsteady(module: nn.Module) -> None:
    """Give the module its class back; other modules stay as they are."""
    module.__class__ = class_of(module)


def is_steady(module: nn.Module) -> bool:
    """Has `steady` given the module its class?"""
    return _STEADY in vars(type(module))


def class_of(module: nn.Module) -> Any:
    """The class of a module without `steady`."""
    return type(module).__mro__[1] if is_steady(module) else type(module)


def is_linear(module: nn.Module) -> bool:
    """Is it a torch.nn.Linear, and of no subclass but that of `steady`?"""
    return class_of(module) is nn.Linear


_STEADY = "_attnops_steady"


@functools.cache
def _steady(cls: Any, pointwise: bool) -> type:
    """The subclass of `cls`, with its name. Its objects can be copied and pickled."""

    # Outside of the policy a module costs one call of Python and no more.
    def of_rows(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _ACTIVE.deterministic:
            return cls.forward(self, *args, **kwargs)
        return apart(cls.forward, self, *args, **kwargs)

    def of_linear(self: Any, input: Tensor) -> Tensor:
        by = product if _ACTIVE.deterministic and not is_recorded() else F.linear
        return by(input, self.weight, self.bias)

    def of_numbers(self: Any, input: Tensor) -> Any:
        if not _ACTIVE.deterministic:
            return cls.forward(self, input)
        return one_by_one(functools.partial(cls.forward, self), input)

    linear = cls.forward is nn.Linear.forward
    forward = of_linear if linear else of_numbers if pointwise else of_rows
    return subclass(cls, {"forward": forward, _STEADY: True}, (_steady, cls, pointwise))
