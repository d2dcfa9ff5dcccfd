"""Absorption (MLA): the two halves of the projection that unfolds latents, as attention over latents takes them.

kv_b maps a latent `c` to the keys and values of all heads. With W its weight `[H * (nope + v), Dc]`, W_UK its first `nope` rows of each
head and W_UV the other v, a score `q . (W_UK c)` is `(q W_UK) . c`, and a sum of values `sum_j p_j (W_UV c_j)` is `W_UV sum_j p_j c_j`:
DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from attnops.call import need
from attnops.nn.steady import is_linear

PLAIN = (Tensor, nn.Parameter)
INTERNAL = frozenset(vars(nn.Module()))
BASES = nn.Module.__mro__
HELD = "_attnops_absorbed"
SIMPLE = (type(None), bool, int, float, str, bytes, type, torch.dtype, torch.device)


def absorbed_weights(kv_b: nn.Module, nope: int, v: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """(W_UK `[H, nope, Dc]`, W_UV `[H, v, Dc]`) of the projection `kv_b` as it is now. H follows from its rows.

    Of a plain torch.nn.Linear they are views of the weight, without a copy, and follow every later change of the weight.
    Of any other module (an adapter around the Linear, a quantised or parametrised weight, one that a hook brings from elsewhere) they
    are the module's outputs for the unit vectors. Compiled code computes them at every call, at the price of unfolding Dc tokens.
    Eager calls without gradients keep them on the module, outside its state_dict, while its parameters and buffers have the same versions
    and the plain attributes of all submodules and of their classes are as they were; a module with hooks, a forward of its own instance or
    other attributes is asked anew each time. A write through `.data` changes no version and is not seen, and a CUDA graph captured from
    eager code replays the weights of its capture.

    Args:
        kv_b: Dc numbers in, H * (nope + v) out, linear and without bias.
        nope, v: numbers of a head's key without its rotated part, and of its value.
        like: `[..., Dc]`, a latent: of the dtype and on the device that kv_b computes in.

    Raises:
        InvalidInput: kv_b has a bias, or its rows are not whole heads.
    """
    # A parametrisation or a wrapper is another type, a quantised weight another type of tensor, an offloaded one is on meta.
    linear = is_linear(kv_b) and type(kv_b.weight) in PLAIN and not kv_b.weight.is_meta and not changed(kv_b)
    # A tensor: wrappers keep flags and words of this name.
    biased = any(isinstance(getattr(module, "bias", None), Tensor) for module in ((kv_b,) if linear else kv_b.modules()))
    need(not biased, "kv_b.bias", "a bias", "None, for it cannot be absorbed")
    weight: Tensor
    if linear:
        weight = kv_b.weight  # type: ignore[assignment]
    elif torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(p.requires_grad for p in kv_b.parameters())):
        weight = _effective(kv_b, like)
    else:
        weight = _kept(kv_b, like)
    rows, latent = weight.shape
    need(rows % (nope + v) == 0, "kv_b.weight.shape[0]", rows, f"a multiple of {nope} + {v}, the key and value of one head")
    heads = weight.view(rows // (nope + v), nope + v, latent)
    return heads[:, :nope], heads[:, nope:]


def changed(module: nn.Module) -> bool:
    """Has it hooks, or a forward of its own instance?"""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def _effective(kv_b: nn.Module, like: Tensor) -> Tensor:
    """`[rows, Dc]`."""
    out: Tensor = kv_b(torch.eye(like.shape[-1], dtype=like.dtype, device=like.device))
    return out.to(like.dtype).t()


class _Held:
    """An effective weight and its sources. A copy of the module, or its pickle, begins without one."""

    key: Any = None
    tensors: tuple[weakref.ref[Tensor], ...] = ()
    weight: Tensor | None = None

    def __reduce__(self) -> Any:
        return _Held, ()


def _kept(kv_b: nn.Module, like: Tensor) -> Tensor:
    tensors: list[Tensor] = []
    kind = like.device.type
    try:
        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        key = (like.shape[-1], like.dtype, like.device, cast, _state(kv_b, tensors))
    except _Unknown:
        return _effective(kv_b, like)
    held: _Held = vars(kv_b).setdefault(HELD, _Held())
    same = held.key == key and all(ref() is tensor for ref, tensor in zip(held.tensors, tensors, strict=True))
    if held.weight is not None and same:
        return held.weight
    held.weight = None  # two of them need not fit
    with torch.inference_mode(False), torch.no_grad():
        weight = _effective(kv_b, like).contiguous()
    if type(weight) is Tensor:  # not one of a fake mode
        held.key, held.tensors, held.weight = key, tuple(map(weakref.ref, tensors)), weight
    return weight


class _Unknown(Exception):
    """The module depends on a value that cannot be compared."""


def _state(kv_b: nn.Module, tensors: list[Tensor]) -> Any:
    """All that the output of `kv_b` may depend on, to be compared by ==; its tensors are appended to `tensors`. Raises _Unknown."""
    state = []
    for module in kv_b.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise _Unknown
        own = {n: x for n, x in vars(module).items() if n not in INTERNAL and n != HELD}
        parts = (own, module._parameters, module._buffers)
        # Of its class: switches and numbers, and its forward, which may be replaced for all instances.
        of_class = [(n, x) for base in type(module).__mro__ if base not in BASES for n, x in vars(base).items()]
        shared = [(n, type(x), x) for n, x in of_class if n == "forward" or (n[:2] != "__" and isinstance(x, SIMPLE))]
        state.append((type(module), module.training, shared, *(_frozen(part, tensors) for part in parts)))
    return state


def _frozen(x: Any, tensors: list[Tensor]) -> Any:
    if isinstance(x, SIMPLE):
        return type(x), x
    if isinstance(x, (tuple, list)):
        return [_frozen(item, tensors) for item in x]
    if isinstance(x, dict):
        return [(_frozen(key, tensors), _frozen(value, tensors)) for key, value in x.items()]
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
