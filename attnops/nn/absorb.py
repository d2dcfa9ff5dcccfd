"""Absorption (MLA): the weight of a projection that is no plain Linear, kept while what it follows
from is the same. `attnops.nn.latent.absorbed_weights` hands out its halves.

kv_b maps a latent `c` to the keys and values of all heads. With W its weight
`[H * (nope + v), Dc]`, W_UK its first `nope` rows of each head and W_UV the other v, a score
`q . (W_UK c)` is `(q W_UK) . c`, and a sum of values `sum_j p_j (W_UV c_j)` is
`W_UV sum_j p_j c_j`: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from attnops.graphs.streams import LastStream

PLAIN = (Tensor, nn.Parameter)
INTERNAL = frozenset(vars(nn.Module()))
BASES = nn.Module.__mro__
HELD = "_attnops_absorbed"
SIMPLE = (type(None), bool, int, float, str, bytes, type, torch.dtype, torch.device)


def weight_of(kv_b: nn.Module, like: Tensor) -> Tensor:
    """`[rows, Dc]` of a module whose weight is no view, kept where that can be."""
    if torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and any(p.requires_grad for p in kv_b.parameters())
    ):
        return _effective(kv_b, like)
    try:
        return _kept(kv_b, like)
    except _Unknown:
        return _effective(kv_b, like)


def make_anew(kv_b: nn.Module, like: Tensor) -> None:
    """What `attnops.nn.latent.renew` does for a module whose weight is no view."""
    expire(kv_b)
    with contextlib.suppress(_Unknown):
        _kept(kv_b, like)


def expire(kv_b: nn.Module) -> None:
    """The next eager call without gradients makes the weights that are kept of `kv_b` anew, as
    `renew` does now."""
    held: _Held | None = vars(kv_b).get(HELD)
    if held is not None:
        held.key = None


def changed(module: nn.Module) -> bool:
    """Has it hooks, or a forward of its own instance?"""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def _effective(kv_b: nn.Module, like: Tensor) -> Tensor:
    """`[rows, Dc]`."""
    out: Tensor = kv_b(torch.eye(like.shape[-1], dtype=like.dtype, device=like.device))
    return out.to(like.dtype).t()


class _Held:
    """An effective weight and its sources. A copy of the module, or its pickle, begins without one.

    module: whose weight it is: a replica of torch.nn.DataParallel begins with that of the module
    that it copies.
    key: the state of the sources that the weight was made of; None: it is to be made anew.
    stream: the last stream on which the weight was made or handed out.
    """

    key: Any = None
    tensors: tuple[weakref.ref[Tensor], ...] = ()
    weight: Tensor | None = None
    stream: LastStream | None = None

    def __init__(self, module: nn.Module | None = None) -> None:
        self.module = None if module is None else weakref.ref(module)

    def __reduce__(self) -> Any:
        return _Held, ()


def _kept(kv_b: nn.Module, like: Tensor) -> Tensor:
    """`[rows, Dc]`, made anew where something has changed. Raises _Unknown."""
    tensors: list[Tensor] = []
    kind = like.device.type
    cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    key = (like.shape[-1], like.dtype, like.device, cast, _state(kv_b, tensors))
    held = _held_of(kv_b)
    if held.stream is not None:
        held.stream.use()
    same = held.key == key and all(
        ref() is tensor for ref, tensor in zip(held.tensors, tensors, strict=True)
    )
    if held.weight is not None and same:
        return held.weight
    held.key = None
    with torch.inference_mode(False), torch.no_grad():
        weight = _effective(kv_b, like)
        if type(weight) is not Tensor:  # one of a fake mode
            return weight.contiguous()
        if held.weight is None or _layout(held.weight) != _layout(weight):
            held.weight = None  # two of them need not fit
            held.weight = weight.contiguous()
            held.stream = _stream_of(held.weight)
        else:
            held.weight.copy_(weight)
    held.key, held.tensors = key, tuple(map(weakref.ref, tensors))
    return held.weight


def _stream_of(weight: Tensor) -> LastStream:
    from attnops.graphs.streams import LastStream  # a model without wrapped weights needs no graphs

    stream = LastStream(weight.device, (weight,))
    stream.use()
    return stream


def _held_of(kv_b: nn.Module) -> _Held:
    """That of the module itself, and not of one that it is a copy of."""
    held: _Held | None = vars(kv_b).get(HELD)
    if held is None or held.module is None or held.module() is not kv_b:
        held = vars(kv_b)[HELD] = _Held(kv_b)
    return held


def _layout(weight: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return weight.shape, weight.dtype, weight.device


class _Unknown(Exception):
    """The module depends on a value that cannot be compared."""


def _state(kv_b: nn.Module, tensors: list[Tensor]) -> Any:
    """All that the output of `kv_b` may depend on, to be compared by ==; its tensors are appended
    to `tensors`. Raises _Unknown."""
    state = []
    for module in kv_b.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise _Unknown
        own = {n: x for n, x in vars(module).items() if n not in INTERNAL and n != HELD}
        parts = (own, module._parameters, module._buffers)
        # Of its class: switches and numbers, and its forward, which may be replaced for all
        # instances.
        of_class = [
            (n, x)
            for base in type(module).__mro__
            if base not in BASES
            for n, x in vars(base).items()
        ]
        shared = [
            (n, type(x), x)
            for n, x in of_class
            if n == "forward" or (n[:2] != "__" and isinstance(x, SIMPLE))
        ]
        state.append(
            (type(module), module.training, shared, *(_frozen(part, tensors) for part in parts))
        )
    return state


def _frozen(x: Any, tensors: list[Tensor]) -> Any:
    if isinstance(x, SIMPLE):
        return type(x), x
    if isinstance(x, (tuple, list)):
        return [_frozen(item, tensors) for item in x]
    if isinstance(x, dict):
        return _frozen([*x.items()], tensors)
    if isinstance(x, Tensor) and not x.is_inference():
        tensors.append(x)
        if type(x) in PLAIN:
            return x._version, x.data_ptr(), x.dtype, x.device
        if (flatten := getattr(x, "__tensor_flatten__", None)) is not None:
            return x._version, [_frozen(getattr(x, name), tensors) for name in flatten()[0]]
    return _rarely_frozen(x)


def _rarely_frozen(x: Any) -> Any:
    if isinstance(x, (set, frozenset)) and all(isinstance(item, SIMPLE) for item in x):
        return frozenset(x)
    if isinstance(x, types.FunctionType) and not x.__closure__:
        return x
    raise _Unknown
