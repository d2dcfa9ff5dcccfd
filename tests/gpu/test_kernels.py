"""Every kernel on a real GPU: numerics over the problem grid, opcheck, and proof that it may live in a CUDA graph."""

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from attnops.kernel import Capture, Kernel, all_kernels
from attnops.ops import OPS
from attnops.testing import CASES, Mismatch, check_kernel, refusals
from attnops.testing.equip import equip

KERNELS = [pytest.param(k, id=f"{k.op}.{k.name}") for k in all_kernels()]


@pytest.mark.parametrize("kernel", KERNELS)
def test_numerics(kernel: Kernel, found: dict[str, Any]) -> None:
    wrong, ran, refused, worst = [], 0, 0, 0.0
    for case in CASES[kernel.op]:
        try:
            figures = check_kernel(kernel, case.call(seed=ran, device="cuda"))
        except Mismatch as mismatch:
            wrong.append(f"{case}: {mismatch}")
            continue
        refused += bool(figures.refused)
        ran += not figures.refused
        worst = max(worst, figures.worst)
    found.setdefault("numerics", {})[f"{kernel.op}.{kernel.name}"] = {
        "cases": ran, "refused": refused, "wrong": len(wrong), "worst_share_of_budget": round(worst, 4)
    }  # fmt: skip
    assert not wrong, "\n".join(wrong[:8])
    if not ran:
        pytest.skip(f"takes no case on this GPU: {figures}")


@pytest.mark.parametrize("name", ["default", *sorted({k.name for k in all_kernels()})])
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_opcheck(op: Any, name: str, found: dict[str, Any]) -> None:
    if name != "default" and name not in op.packet.overloads():
        pytest.skip(f"{op.name} has no kernel {name}")
    kernel = None if name == "default" else next(k for k in all_kernels() if (k.op, k.name) == (op.name, name))
    done = 0
    for case in CASES[op.name]:
        call = case.call(seed=3, device="cuda")
        if kernel is not None:
            if refusals(kernel, call):
                continue
            call = equip(kernel, call)
        with torch.no_grad():
            checked = torch.library.opcheck(getattr(op.packet, name), call.args, call.kwargs)
        assert set(checked.values()) == {"SUCCESS"}
        done += 1
        if done == 2:
            break
    found.setdefault("opcheck", {})[f"{op.name}.{name}"] = done
    if not done:
        pytest.skip("takes no case on this GPU")


def same_shapes(a: Any, b: Any) -> bool:
    one, two = a.tensors(), b.tensors()
    return one.keys() == two.keys() and all(
        (x.shape, x.stride(), x.dtype) == (two[n].shape, two[n].stride(), two[n].dtype) for n, x in one.items()
    )


def fresh(kernel: Kernel, call: Any) -> list[torch.Tensor]:
    """The results of an eager call, and the tensors it writes."""
    out = kernel.run(*call.args, **call.kwargs)
    return [t.clone() for t in pytree.tree_leaves((out, written(call))) if isinstance(t, torch.Tensor)]


def written(call: Any) -> list[torch.Tensor]:
    """What a call writes that means something afterwards."""
    return [call.arguments[n] for n in call.mutated if n != "workspace"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_replays_follow_their_inputs(kernel: Kernel, found: dict[str, Any]) -> None:
    """Capture, change every input (lengths, tables, contents), replay, compare with eager."""
    if kernel.capture is not Capture.WHOLE:
        pytest.skip("declared uncapturable")
    proven = 0
    for case in CASES[kernel.op]:
        captured, later = (equip(kernel, case.call(seed=seed, device="cuda")) for seed in (11, 12))
        if refusals(kernel, captured) or refusals(kernel, later) or not same_shapes(captured, later):
            continue
        if any(captured.kwargs.get(n) != later.kwargs.get(n) for n in captured.kwargs if not isinstance(captured.kwargs[n], torch.Tensor)):
            continue
        want = fresh(kernel, later.map(lambda _, t: t.clone()))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what a kernel compiles or allocates at its first call must not be captured
            for _ in range(2):
                kernel.run(*captured.args, **captured.kwargs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernel.run(*captured.args, **captured.kwargs)
        for name, tensor in captured.tensors().items():
            tensor.copy_(later.tensors()[name])
        graph.replay()
        torch.cuda.synchronize()
        got = [t for t in pytree.tree_leaves((out, written(captured))) if isinstance(t, torch.Tensor)]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=1e-3, atol=1e-3, equal_nan=True, msg=lambda m, c=case: f"{c}: {m}")
        proven += 1
        if proven == 6:
            break
    found.setdefault("replay", {})[f"{kernel.op}.{kernel.name}"] = proven
    if not proven:
        pytest.skip("no pair of cases with equal shapes on this GPU")
