"""What a kernel asks of its caller besides the call itself, so that one grid serves every kernel."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnops.kernel import Kernel
from attnops.ops import OPS
from attnops.testing.inputs import Call
from attnops.testing.plans import planned


def equip(kernel: Kernel, call: Call) -> Call:
    """`call` with the plan and the workspace (zeroed) that `kernel` asks for, unless it has them or the op takes none."""
    call = planned(kernel, call)
    names = {a.name for a in OPS[call.op].packet.default._schema.arguments}
    if kernel.workspace_bytes is None or "workspace" not in names or call.arguments.get("workspace") is not None:
        return call
    if kernel.unmet(call.problem):
        return call  # it will not run, and its size function is not asked about such a problem
    device = next(iter(call.tensors().values())).device
    return call.with_(workspace=torch.zeros(kernel.workspace_bytes(call.problem), dtype=torch.uint8, device=device))


def with_device_plan(kernel: Kernel, call: Call) -> Call:
    """`call` with the plan that `kernel` reads on the device, and the promise that lets it.

    As it is when the kernel reads none, the call has one, or it is refused.
    """
    if kernel.device_plan is None or call.arguments.get("plan") is not None:
        return call
    if kernel.refusals(replace(call.problem, plan="device")):
        return call
    with torch.no_grad():
        return call.with_(plan=kernel.device_plan(**call.arguments), holes=False)


def equip_as_used(kernel: Kernel, call: Call) -> Call:
    """As `equip`, and with the plan that the kernel's users make once a step though it would run without: what it is timed with."""
    return with_device_plan(kernel, equip(kernel, call))
