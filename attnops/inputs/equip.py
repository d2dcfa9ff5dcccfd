"""Plans and workspaces that a kernel needs besides the arguments of the call, so that one grid serves every kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnops.call import changed
from attnops.inputs.call import Call
from attnops.kernel import Kernel, kernels_of
from attnops.ops import OPS


def equip(kernel: Kernel, call: Call) -> Call:
    """`call` with the host plan and the zeroed workspace that `kernel` needs, unless it has them or the op takes none."""
    call = planned(kernel, call)
    if kernel.workspace_bytes is None or "workspace" not in call.spec.names or call.arguments.get("workspace") is not None:
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


def planned(kernel: Kernel, call: Call, policy: str = "", buffers: tuple[Tensor, Tensor] | None = None) -> Call:
    """`call` with the host plan that `kernel` needs; unchanged if it needs none, or refuses the call with a plan, too.

    buffers: plan and workspace to write into; None allocates the smallest ones.
    """
    maker = None if call.arguments.get("plan") is not None else kernels_of(f"plan_{call.op}").get(kernel.name)
    if maker is None or maker.plan.sizes is None or kernel.refusals(replace(call.problem, plan="host")):
        return call
    made = plan_call(call, maker, buffers)
    with torch.no_grad():
        maker.run(changed(made.record, policy=policy))
    return call.with_(plan=made.arguments["plan"], workspace=made.arguments["workspace"])


def plan_call(call: Call, maker: Kernel, buffers: tuple[Tensor, Tensor] | None = None) -> Call:
    """The call of the plan op for `call`. The static arguments come from the call's Problem."""
    p = call.problem
    pool = call.arguments["k_pages" if "k_pages" in call.arguments else "latent_pages"]
    known: dict[str, Any] = {
        **vars(p), "window_left": p.window[0], "window_right": p.window[1], "num_tokens": call.args[0].shape[0],
        "max_seqlen_q": call.arguments["max_seqlen_q"], "dtype": str(p.dtype)[6:], "kv_dtype": str(p.kv_dtype)[6:],
        "num_pages": pool.shape[0],
    }  # fmt: skip
    op = f"plan_{call.op}"
    statics = {n: known[n] for n in OPS[op].spec.names if n in known and n not in ("plan", "workspace")}
    tables = {n: call.arguments[n] for n in ("page_table", "seq_lens", "cu_seqlens_q")}
    device = tables["page_table"].device
    if buffers is None:
        requests, pages = tables["page_table"].shape
        fixed = {n: v for n, v in statics.items() if n not in ("num_tokens", "max_seqlen_q", "num_pages")}
        assert maker.plan.sizes is not None
        sizes = maker.plan.sizes(**fixed, max_tokens=known["num_tokens"], max_requests=requests, max_pages=pages, device=device)
        buffers = torch.zeros(sizes[0], dtype=torch.int64), torch.zeros(sizes[1], dtype=torch.uint8, device=device)
    return Call(op, {**tables, **statics, "plan": buffers[0], "workspace": buffers[1]}, writes=("plan", "workspace"))
