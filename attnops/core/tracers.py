"""Tools that record a model in place of running it."""

from __future__ import annotations

import sys

import torch
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy


def is_onnx() -> bool:
    """Does torch.onnx.export record the model?"""
    if is_dynamo_compiling():
        return False
    # torch.onnx is not imported with torch, and the question takes it longer than most.
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and bool(onnx.is_in_onnx_export())


def is_recorded(*given: object) -> bool:
    """Does torch.jit.trace, torch.onnx.export or torch.fx.symbolic_trace record this call?

    given: its arguments, as many as may be Proxies of torch.fx.
    """
    traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return traced or is_onnx() or any(isinstance(x, Proxy) for x in given)


def wanted(want: str, got: object) -> str:
    """`want`, of an argument that is no tensor, and what to do if torch.fx gave it."""
    if isinstance(got, Proxy):
        want += "; torch.fx has none: make the module a leaf of the Tracer, or use torch.fx.wrap"
    return want
