"""What every attention module of a model with a cache of pages has in common, whatever lies in the pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnops.errors import InvalidInput
from attnops.hf import descriptor
from attnops.hf.descriptor import Range
from attnops.hf.paged_cache import PagedModelCache


def hand_over(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook of an attention module: its paged cache, whatever the argument is called, goes on to the attention function."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, PagedModelCache):
            kwargs["attnops_cache"] = value
            break
    return args, kwargs


def where(module: nn.Module, model: nn.Module | None = None) -> tuple[torch.device, torch.dtype]:
    """(device, dtype) that a module computes on and in. Weights that accelerate keeps elsewhere lie on meta until they are used.

    model: whose weights tell the dtype where the module's own are all quantised, and the device where it has none.
    """
    parts = [part for part in (module, model) if part is not None]
    lies = next((p for part in parts for p in part.parameters()), None)
    # Beside weights of one byte stand their scales, often of float32 whatever the layer computes in.
    owners = (list(m.parameters(recurse=False)) for part in parts for m in part.modules())
    weights = (p for own in owners if all(p.dtype.itemsize > 1 for p in own) for p in own)
    found = next((p for p in weights if p.dtype.is_floating_point), None)
    dtype = torch.get_default_dtype() if found is None else found.dtype
    device = torch.device("cpu") if lies is None else lies.device
    if device.type == "meta":
        hooks = (getattr(m, "_hf_hook", None) for m in module.modules())
        runs_on = next((d for hook in hooks if (d := getattr(hook, "execution_device", None)) is not None), device)
        device = torch.device("cuda", runs_on) if isinstance(runs_on, int) else torch.device(runs_on)
    return device, dtype


def check_call(
    module: Any, batch: int, mask: Tensor | None, dropout: float, is_causal: bool | None, others: tuple[tuple[str, Any], ...]
) -> Range:
    """What a mask for pages says, once nothing is asked of the call that pages cannot do.

    Args:
        batch: rows of the call. mask: a descriptor (see `attnops.hf.paged_mask`).
        others: arguments that attention over pages does not take here, with their names; None is well.

    Raises:
        InvalidInput: a mask that pages cannot follow, dropout, or one of `others`.
    """
    if dropout > 0.0 and module.training:
        raise InvalidInput("dropout", dropout, "0 with a paged cache: no kernel drops. Train without a cache, or call .eval()")
    if is_causal is False:
        raise InvalidInput("is_causal", False, "True with a paged cache")
    for name, value in others:
        if value is not None:
            raise InvalidInput(name, type(value).__name__, "None with a paged cache")
    if mask is None or mask.dtype != descriptor.DTYPE:
        got = "None" if mask is None else f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}"
        want = 'a 2-D mask [B, tokens so far] of ones, with zeros on the left only: pages hold no other pattern. Use cache="hf" for it'
        raise InvalidInput("attention_mask", got, want)
    found = descriptor.read(mask, batch)
    if not found.causal:
        raise InvalidInput("attention_mask", "bidirectional", "causal, with a paged cache")
    return found
