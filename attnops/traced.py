"""What passes over traced graphs ask of a node."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_IN_PLACE = {getattr(operator, n) for n in dir(operator) if n[:1] == "i" and {n[1:], f"{n[1:]}_"} & {*dir(operator)}} | {
    operator.setitem, operator.delitem
}  # fmt: skip

_KNOWN = ("torch", "_operator", "math", "builtins")
"""Whose functions say by their names that they write. Those of others may do anything."""


def may_write(node: fx.Node) -> bool:
    """May this operation change a tensor that it is given? Yes where it cannot be told."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    target: Any = node.target
    if node.op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(bool(getattr(target, o)._schema.is_mutable) for o in target.overloads() if not o.endswith("out"))
    name = target if isinstance(target, str) else getattr(target, "__name__", "_")
    if target in _IN_PLACE or name == "__setitem__" or (name.startswith("__i") and name.endswith("__")):
        return True
    # torch's functions of C name no module.
    home = "torch" if isinstance(target, str) else getattr(target, "__module__", None) or "torch"
    if home.partition(".")[0] not in _KNOWN:
        return True
    # Modules' functions take `inplace` by place as well.
    functional = home in ("torch.nn.functional", "torch._C._nn")
    named = name.endswith("_") and not name.endswith("__") and home != "_operator"
    return named or (functional and any(a is True for a in node.args))
