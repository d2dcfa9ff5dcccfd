"""`pack_experts`: the experts of a gpt-oss in four bits a number, as its checkpoints store them.

Without kernels from its hub, transformers loads such a checkpoint as bfloat16. Packing finds the
four bits again, exactly: a layer whose numbers are none of MXFP4 is refused. The packed bytes take
the parameters' place, so that no copy can be out of date.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnops.core.adapt import on_device_of
from attnops.core.errors import PatchError, fail
from attnops.core.record import name as name_of
from attnops.hf.models import experts as plain
from attnops.hf.models.experts import PREFIX, Gate
from attnops.ops.experts.mxfp4 import WIDE, mxfp4_experts
from attnops.ops.experts.mxfp4_reference import (
    COLUMNS,
    MOST_SCALE,
    ROWS,
    arranged,
    decoded,
    encoded,
    restored,
)

NAMES = ("gate_up_proj", "down_proj")
_PACKED = "_attnops_mxfp4"
_LIKE = "_mxfp4_like"
"""A buffer without numbers, of the weights' dtype: a cast of the model casts it."""


@dataclass(frozen=True)
class Kept:
    """A packed module as it was. order: the names of its parameters. trained: the packed ones that
    asked for a gradient."""

    gate: Gate
    order: tuple[str, ...]
    trained: tuple[str, ...]
    hooks: tuple[Any, ...]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The config holds the name of a function, which a process that loads a copy of the module
        # needs, too.
        vars(self).update(state)
        _name(self.gate.stock)


def pack_experts(model: nn.Module) -> int:
    """Keep the experts of a model in four bits a number, in place of their parameters, until
    `unpack_experts`.

    They are served by `attnops.ops.mxfp4_experts`, without gradients. Call it before
    `attnops.patch` and before anything is compiled or captured. A state_dict has the weights as
    they were; loading one is refused. Memory: a quarter of the weights', and the numbers of one
    expert more while it runs.

    Args:
        model: whose experts ask transformers' experts interface, as those of gpt-oss do; others are
            left as they are.

    Returns:
        The number of layers that were packed.

    Raises:
        PatchError: a layer's weights are no MXFP4 numbers, or have a shape or dtype that the op
            does not take, or no data, or belong to another module, too; the model is patched. It is
            as it was.
    """
    sites = tuple(plain.sites(model))
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    if any(plain.is_taken(site.module) for site in sites):
        fail(
            PatchError,
            f"pack_experts: {type(model).__name__} got patched before, want pack_experts() "
            "before attnops.patch()",
        )
    try:
        found = [
            (s.module, s.found)
            for s in sites
            if isinstance(s.found, Gate) and _is_of_gpt_oss(s.found)
        ]
        for module, gate in found:
            if any(owners[id(getattr(module, name))] > 1 for name in NAMES):
                fail(
                    PatchError,
                    f"pack_experts: {type(module).__name__} got a weight of another module, too, "
                    "want weights of its own",
                )
            _pack(module, gate)
    except PatchError:
        unpack_experts(model)
        raise
    return len(found)


def unpack_experts(model: nn.Module) -> None:
    """Give packed experts their parameters back, with the values that they had. Idempotent."""
    for module in model.modules():
        kept: Kept | None = module.__dict__.pop(_PACKED, None)
        if kept is None:
            continue
        for hook in kept.hooks:
            hook.remove()
        parameters = dict(module._parameters)
        for name in NAMES:
            parameters[name] = nn.Parameter(
                _whole(module, name), requires_grad=name in kept.trained
            )
            for part in ("blocks", "scales"):
                delattr(module, f"_{name}_{part}")
        delattr(module, _LIKE)
        module._parameters.clear()
        module._parameters.update({name: parameters[name] for name in kept.order})
        config: Any = module.config
        if getattr(config, plain.SWITCH) == _name(kept.gate.stock):
            setattr(config, plain.SWITCH, kept.gate.stock)


def _is_of_gpt_oss(gate: Gate) -> bool:
    return "interleaved" in gate.given and "activation" not in gate.given


def _pack(module: Any, gate: Gate) -> None:
    with torch.inference_mode(False), torch.no_grad():
        found = {name: _encoded(module, name) for name in NAMES}
    parameters = {name: module._parameters[name] for name in NAMES}
    trained = tuple(name for name, p in parameters.items() if p.requires_grad)
    hooks = (
        module.register_state_dict_post_hook(_give),
        module.register_load_state_dict_pre_hook(_refuse),
    )
    module.__dict__[_PACKED] = Kept(gate, tuple(module._parameters), trained, hooks)
    module.register_buffer(_LIKE, parameters["down_proj"].new_empty(0), persistent=False)
    for name in NAMES:
        del module._parameters[name]
        for part, tensor in zip(("blocks", "scales"), found[name], strict=True):
            module.register_buffer(f"_{name}_{part}", tensor, persistent=False)
    setattr(module.config, plain.SWITCH, _name(gate.stock))


def _encoded(module: Any, name: str) -> tuple[Tensor, Tensor]:
    weight = getattr(module, name)
    weight = weight.transpose(1, 2) if module.is_transposed else weight
    if weight.dtype not in WIDE or weight.is_meta:
        got = f"{name_of(weight.dtype)} on {weight.device}"
        fail(
            PatchError,
            f"pack_experts: {name} got {got}, want {' | '.join(map(name_of, WIDE))} with data",
        )
    _, rows, columns = weight.shape
    if rows % ROWS or columns % COLUMNS:
        fail(
            PatchError,
            f"pack_experts: {name} got {rows} rows and {columns} columns, want multiples of "
            f"{ROWS} and {COLUMNS}",
        )
    parts = []
    with on_device_of(weight):
        for (
            one
        ) in weight:  # an expert at a time, because numbers on the way take ten times the memory
            codes = encoded(one)
            if codes is None or int(codes[1].max()) > MOST_SCALE:
                fail(
                    PatchError,
                    f"pack_experts: {name} of {type(module).__name__} got numbers that are none "
                    "of MXFP4",
                )
            parts.append(arranged(codes[0][None], codes[1][None], name == "gate_up_proj"))
        blocks, scales = zip(*parts, strict=True)
        return torch.cat(blocks), torch.cat(scales)


def _whole(module: Any, name: str) -> Tensor:
    blocks, scales = (getattr(module, f"_{name}_{part}") for part in ("blocks", "scales"))
    pairs, dtype = name == "gate_up_proj", getattr(module, _LIKE).dtype
    with torch.inference_mode(False), torch.no_grad(), on_device_of(blocks):
        one = [
            decoded(*restored(b[None], s[None], pairs), dtype)
            for b, s in zip(blocks, scales, strict=True)
        ]
        weight = torch.cat(one)
        return weight.transpose(1, 2).contiguous() if module.is_transposed else weight


def _give(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in NAMES:
        state[prefix + name] = _whole(module, name)


def _refuse(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if any(prefix + name in state for name in NAMES):
        fail(
            PatchError,
            f"load_state_dict: {prefix.rstrip('.')} is packed; call unpack_experts(), load, then "
            "pack_experts()",
        )


def _name(stock: str) -> str:
    """The name of the function that serves packed modules, and others of their config as `stock`
    does."""
    return plain.implementation(stock, f"{PREFIX}mxfp4_", _served)


def _served(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor | None:
    kept: Kept | None = getattr(module, _PACKED, None)
    if kept is None:
        return None
    return mxfp4_experts(
        x,
        module._gate_up_proj_blocks,
        module._gate_up_proj_scales,
        module._down_proj_blocks,
        module._down_proj_scales,
        index,
        weights,
        *plain.biases_of(module),
        **{n: given for n, given in kept.gate.given.items() if n != "interleaved"},
    )
