"""Absorption (MLA): the two halves of the projection that unfolds latents, as attention over
latents takes them.

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
from torch._subclasses.fake_tensor import FakeTensor

from attnops.core.record import need
from attnops.nn.steady import is_linear

if TYPE_CHECKING:
    from attnops.graphs.streams import LastStream

PLAIN = (Tensor, nn.Parameter)
INTERNAL = frozenset(vars(nn.Module()))
BASES = nn.Module.__mro__
HELD = "_attnops_absorbed"
SIMPLE = (type(None), bool, int, float, str, bytes, type, torch.dtype, torch.device)


def absorbed_weights(kv_b: nn.Module, nope: int, v: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """(W_UK `[H, nope, Dc]`, W_UV `[H, v, Dc]`) of the projection `kv_b` as it is now. H follows
    from its rows.

    Of a plain torch.nn.Linear they are views of the weight, without a copy, and follow every later
    change of the weight. Of any other module (an adapter around the Linear, a quantised or
    parametrised weight, one that a hook brings from elsewhere) they are the module's outputs for
    the unit vectors. Compiled code computes them at every call, at the price of unfolding Dc
    tokens. Eager calls without gradients keep them on the module, outside its state_dict, while its
    parameters and buffers have the same versions and the plain attributes of all submodules and of
    their classes are as they were; a module with hooks, a forward of its own instance or other
    attributes is asked anew each time. A write through `.data` or numpy changes no version: `renew`
    brings it in. What was kept is overwritten by what follows it, so a CUDA graph captured from
    eager code reads what the last eager call or `renew` made.

    Args:
        kv_b: Dc numbers in, H * (nope + v) out, linear and without bias.
        nope, v: numbers of a head's key without its rotated part, and of its value.
        like: `[..., Dc]`, a latent: of the dtype and on the device that kv_b computes in.

    Raises:
        InvalidInput: kv_b has a bias, or its rows are not whole heads.
    """
    linear = _is_viewed(kv_b)
    # A tensor: wrappers keep flags and words of this name.
    biased = any(
        isinstance(getattr(module, "bias", None), Tensor)
        for module in ((kv_b,) if linear else kv_b.modules())
    )
    need(not biased, "kv_b.bias", "a bias", "None, for it cannot be absorbed")
    weight: Any = kv_b.weight if linear else _weight_of(kv_b, like)
    rows, latent = weight.shape
    need(
        rows % (nope + v) == 0,
        "kv_b.weight.shape[0]",
        rows,
        f"a multiple of {nope} + {v}, the key and value of one head",
    )
    heads = weight.view(rows // (nope + v), nope + v, latent)
    return heads[:, :nope], heads[:, nope:]


def _weight_of(kv_b: nn.Module, like: Tensor) -> Tensor:
    """`[rows, Dc]` of a module whose weight is no view, kept where that can be."""
    if torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and any(p.requires_grad for p in kv_b.parameters())
    ):
        return _effective(kv_b, like)
    try:
        return _kept(kv_b, like)
    except _Unknown:
        return _effective(kv_b, like)


def renew(kv_b: nn.Module, like: Tensor) -> None:
    """Make what eager calls of `absorbed_weights` keep of `kv_b` anew, for writes that change no
    version (`.data`, numpy).

    To be called at every prompt, and with the autocast of the steps that follow. The new weights
    take the place of the old ones in memory, so CUDA graphs read them. No effect where nothing is
    kept: for a plain Linear, in compiled code, and for a module that is asked at every call. It
    costs as much as unfolding Dc tokens.

    Args:
        kv_b, like: as in `absorbed_weights`.
    """
    if torch.compiler.is_compiling() or _is_viewed(kv_b):
        return
    expire(kv_b)
    with contextlib.suppress(_Unknown):
        _kept(kv_b, like)


def expire(kv_b: nn.Module) -> None:
    """The next eager call without gradients makes the weights that are kept of `kv_b` anew, as
    `renew` does now."""
    held: _Held | None = vars(kv_b).get(HELD)
    if held is not None:
        held.key = None


def _is_viewed(kv_b: nn.Module) -> bool:
    """Are the absorbed weights views of its weight?"""
    # A parametrisation or a wrapper is another type, a quantised weight another type of tensor, an
    # offloaded one is on meta.
    return (
        is_linear(kv_b)
        and type(kv_b.weight) in (*PLAIN, FakeTensor)
        and not kv_b.weight.is_meta
        and not changed(kv_b)
    )


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
    if isinstance(x, (set, frozenset)) and all(isinstance(item, SIMPLE) for item in x):
        return frozenset(x)
    if isinstance(x, types.FunctionType) and not x.__closure__:
        return x
    if isinstance(x, Tensor) and not x.is_inference():
        tensors.append(x)
        if type(x) in PLAIN:
            return x._version, x.data_ptr(), x.dtype, x.device
        if (flatten := getattr(x, "__tensor_flatten__", None)) is not None:
            return x._version, [_frozen(getattr(x, name), tensors) for name in flatten()[0]]
    raise _Unknown
