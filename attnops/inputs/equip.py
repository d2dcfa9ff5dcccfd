"""Plans and workspaces that a kernel needs besides the arguments of the call, so that one grid serves every kernel."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnops.inputs.call import Call
from attnops.inputs.plans import planned
from attnops.kernel import Kernel
from attnops.ops import OPS


def equip(kernel: Kernel, call: Call) -> Call:
    """`call` with the host plan and the zeroed workspace that `kernel` needs, unless it has them or the op takes none."""
    call = planned(kernel, call)
    names = {a.name for a in OPS[call.op].packet.default._schema.arguments}
    if kernel.workspace_bytes is None or "workspace" not in names or call.arguments.get("workspace") is not None:
        return call
    if kernel.unmet(call.problem):
        return call  # the kernel refuses it, and its size function need not know such a problem
    device = next(iter(call.tensors().values())).device
    return call.with_(workspace=torch.zeros(kernel.workspace_bytes(call.problem), dtype=torch.uint8, device=device))


def with_device_plan(kernel: Kernel, call: Call) -> Call:
    """`call` with the device plan that `kernel` reads, and `holes=False`, which the plan requires.

    Unchanged if the kernel reads none, the call has one, or the kernel refuses it.
    """
    if kernel.plan.device is None or call.arguments.get("plan") is not None:
        return call
    if kernel.refusals(replace(call.problem, plan="device")):
        return call
    with torch.no_grad():
        return call.with_(plan=kernel.plan.device(**call.arguments), holes=False)


def equip_as_used(kernel: Kernel, call: Call) -> Call:
    """As `equip`, with the optional device plan that layers make once a step. Kernels are timed on such calls."""
    return with_device_plan(kernel, equip(kernel, call))
