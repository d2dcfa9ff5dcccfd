"""`patch` for every kind of model: transformers' own, those of other libraries, and a user's."""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import nn

from attnops.adapters.callers import calls_sdpa
from attnops.adapters.handle import (
    MARK,
    PATCHING,
    Handle as Handle,
    refuse_nothing,
    refuse_other_options,
)
from attnops.adapters.report import Report as Report, Verification as Verification
from attnops.adapters.served import is_served
from attnops.adapters.swap import Change, Site, Swapped as Swapped
from attnops.core.errors import PatchError, fail, one_line
from attnops.core.kernel import check_kernel
from attnops.core.record import need
from attnops.nn.multihead import MultiheadAttention
from attnops.tried import warn_if_newer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from attnops.hf import Decode, Patched
    from attnops.hf.attention.mask import Mode
    from attnops.hf.interface import Kept
    from attnops.hf.steps.speculate import Speculate

LIBRARIES = {
    "diffusers": ("diffusers",),
    "timm": ("timm",),
    "torch": ("torch",),
    "torchtitan": ("torchtitan", "torchtitan_02"),
}
"""Packages whose classes have adapters, files of this folder: the first that the installed version
of the package lets import."""


@overload
def patch(
    model: PreTrainedModel,
    *,
    kernel: str | None = None,
    mask: Mode = "auto",
    cache: Kept = "auto",
    decode: Literal["auto", "hf", "piecewise", "breakable"] | Decode = "auto",
    speculate: Speculate = None,
) -> Patched: ...
@overload
def patch(
    model: nn.Module,
    *,
    kernel: str | None = None,
    mask: Mode = "auto",
    cache: Kept = "auto",
    decode: Literal["auto", "hf", "piecewise", "breakable"] | Decode = "auto",
    speculate: Speculate = None,
) -> Handle: ...
def patch(
    model: nn.Module,
    *,
    kernel: str | None = None,
    mask: Mode = "auto",
    cache: Kept = "auto",
    decode: Literal["auto", "hf", "piecewise", "breakable"] | Decode = "auto",
    speculate: Speculate = None,
) -> Handle:
    """Switch the attention of a model to attnops.

        patched = attnops.patch(model)
        print(patched.report())
        patched.verify(...)     # the model's own inputs
        model = torch.compile(model)

    A transformers model, or a module around one, goes to `attnops.hf.patch`. In other models these
    modules are switched: those whose code calls torch's scaled_dot_product_attention (timm,
    torchtitan, diffusers, your own), torch.nn.MultiheadAttention (torchvision,
    torch.nn.TransformerEncoder), and those that leave their attention to the dispatcher of
    diffusers (docs/adapters.md). Parameters, hooks and the state_dict stay as they are. In training
    mode attention with dropout above 0 is torch's own.

    Args:
        model: a torch.nn.Module.
        kernel: force this kernel on every call; None chooses per call.
        mask, cache, decode, speculate: of transformers models alone, see `attnops.hf.patch`.

    Returns:
        The handle, with `report()`, `verify()` and `unpatch()`. A second call on the same model
        returns the same handle, also on `torch.compile` of it.

    Raises:
        PatchError: no module can be patched (the text has every reason), or the model is patched
            with other options.
        UnknownKernel: no kernel has that name.
        InvalidInput: an option of transformers models for another model, or a value that does not
            exist.
    """
    if not isinstance(model, nn.Module):
        inside = ", ".join(
            f".{name}"
            for name, value in getattr(model, "__dict__", {}).items()
            if isinstance(value, nn.Module)
        )
        fail(
            PatchError,
            f"patch: got {type(model).__name__}, want a "
            f"torch.nn.Module{inside and f', as its {inside}'}",
        )
    with PATCHING:
        options = {"kernel": kernel, "mask": mask, "cache": cache, "decode": decode}
        return _patched(model, {**options, "speculate": speculate})


def _patched(model: nn.Module, options: dict[str, Any]) -> Handle:
    uncompiled = getattr(model, "_orig_mod", model)
    there = vars(uncompiled).get(MARK)
    if isinstance(there, Swapped):
        refuse_other_options(options, there.options)
        return there
    handle: Handle
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is not None and any(
        isinstance(module, transformers.PreTrainedModel) for module in model.modules()
    ):
        if any("can_flatten_inputs" in vars(module) for module in model.modules()):
            handle = import_module("attnops.adapters.sentence_transformers").patch(model, options)
        else:
            handle = import_module("attnops.hf").patch(model, **options)
        return handle
    warn_if_newer("torch")
    default = {"mask": "auto", "cache": "auto", "decode": "auto", "speculate": None}
    for field, want in default.items():
        value = options[field]
        need(
            value == want,
            field,
            repr(value),
            f"{want!r}: {type(model).__name__} holds no transformers.PreTrainedModel",
        )
    kernel = options["kernel"]
    if kernel is not None:
        check_kernel(kernel, ("attention",))
    model = uncompiled
    sites = _sites(model, kernel)
    if all(isinstance(site.change, str) for site in sites):
        refuse_nothing(type(model).__name__, ((site.module, site.change) for site in sites))
    return Swapped(model, options, sites)


def _sites(model: nn.Module, kernel: str | None) -> list[Site]:
    """Every attention module."""
    found, named = [], []
    for path, module in model.named_modules():
        change = _change(module, kernel)
        if isinstance(change, Change) and change.target is module and "forward" in vars(module):
            change = (
                "its forward is replaced on the module itself, by a hook of accelerate or "
                "torch.compile(module.forward); patch before"
            )
        if change is not None:
            found.append(Site(path, module, change))
        elif "Attention" in type(module).__name__ or "Attn" in type(module).__name__:
            named.append(
                Site(path, module, "its code does not call torch's scaled_dot_product_attention")
            )
    return [*found, *_apart(named, found)]


def _apart(named: list[Site], found: list[Site]) -> list[Site]:
    """Those of `named` that may have attention of their own: a module around attention modules, or
    one that is a part of one, has but their name."""
    alone = [
        n
        for n in named
        if not any(_within(n.path, f.path) or _within(f.path, n.path) for f in found)
    ]
    return [
        n
        for n in alone
        if not any(n is not other and _within(other.path, n.path) for other in alone)
    ]


def _within(path: str, parent: str) -> bool:
    return not parent or path == parent or path.startswith(parent + ".")


def _change(module: nn.Module, kernel: str | None) -> Change | str | None:
    """The change that switches a module, the reason against it, or None for a module without
    attention."""
    cls: Any = type(module)
    if isinstance(module, MultiheadAttention) or is_served(cls):
        return "it calls attnops already"
    unknown = None
    for package in dict.fromkeys(base.__module__.partition(".")[0] for base in cls.__mro__):
        adapter = _adapter(package)
        if isinstance(adapter, str):
            unknown = f"attnops knows other versions of {package}: {adapter}"
        elif adapter is not None:
            found: Change | str | None = adapter.change(module, kernel)
            if found is not None:
                return found
    if calls_sdpa(cls):
        return Change(module, "forward")
    return unknown if "Attention" in cls.__name__ else None


@functools.cache
def _adapter(package: str) -> ModuleType | str | None:
    """The adapter of a package; why none can be imported, for another version of it; None where
    there is none."""
    why: str | None = None
    for name in LIBRARIES.get(package, ()):
        try:
            return import_module(f"attnops.adapters.{name}")
        except ImportError as error:  # the version lacks a module that this adapter needs
            why = why or one_line(error)
    return why
