"""What a kernel asks of its caller besides the call itself, so that one grid serves every kernel."""

from __future__ import annotations

import torch

from attnops.kernel import Kernel
from attnops.ops import OPS
from attnops.testing.inputs import Call


def equip(kernel: Kernel, call: Call) -> Call:
    """`call` with the workspace that `kernel` asks for, zeroed, if it has none and the op takes one. Else `call` itself."""
    names = {a.name for a in OPS[call.op].packet.default._schema.arguments}
    if kernel.workspace_bytes is None or "workspace" not in names or call.arguments.get("workspace") is not None:
        return call
    if any(need(call.problem) for need in kernel.needs):
        return call  # it will not run, and its size function is not asked about such a problem
    device = next(iter(call.tensors().values())).device
    return call.with_(workspace=torch.zeros(kernel.workspace_bytes(call.problem), dtype=torch.uint8, device=device))
