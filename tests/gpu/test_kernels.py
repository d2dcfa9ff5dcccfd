"""Every kernel on a real GPU: numerics over the problem grid, opcheck, and proof that it may live in a CUDA graph."""

import random
import time
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from attnops.kernel import Capture, Kernel, all_kernels
from attnops.ops import OPS
from attnops.testing import CASES, Case, Mismatch, check_kernel, refusals
from attnops.testing.check import OPAQUE
from attnops.testing.equip import equip
from attnops.testing.inputs import Source
from tests.gpu.wide import WIDE, DeviceSource

# A kernel that is built anew for every shape or dtype shows how far it comes; what it did not reach is counted in the results.
SECONDS = 25.0

KERNELS = [pytest.param(k, id=f"{k.op}.{k.name}") for k in all_kernels()]


def run_all(kernel: Kernel, cases: tuple[Case, ...], source: Any) -> dict[str, Any]:
    """The cases through `check_kernel`, in a fixed random order and until the time is up. source: makes the Source of a seed."""
    wrong, refused, worst, ran, left_out = [], [], 0.0, 0, 0
    end = time.monotonic() + SECONDS
    for seed, case in enumerate(random.Random(kernel.name).sample(cases, len(cases))):
        if time.monotonic() > end:
            left_out += 1
            continue
        try:
            figures = check_kernel(kernel, case.build(source(seed)))
        except Mismatch as mismatch:
            wrong.append(f"{case}: {mismatch}")
            continue
        except torch.OutOfMemoryError:
            wrong.append(f"{case}: out of memory")
            torch.cuda.empty_cache()
            continue
        if figures.refused:
            refused.append(f"{case}: {figures}")
        else:
            ran, worst = ran + 1, max(worst, figures.worst)
    done = {"cases": ran, "refused": len(refused), "wrong": len(wrong), "worst_share_of_budget": round(worst, 4)}
    if left_out:
        done["left_out_for_time"] = left_out
    return done | ({"first_wrong": wrong[0][:300]} if wrong else {"why_refused": refused[0][:300]} if not ran else {})


def settle(done: dict[str, Any]) -> None:
    assert not done["wrong"], done
    if not done["cases"]:
        pytest.skip(f"takes no case on this GPU: {done['why_refused']}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_numerics(kernel: Kernel, found: dict[str, Any]) -> None:
    done = run_all(kernel, CASES[kernel.op], lambda seed: Source(seed, "cuda"))
    found.setdefault("numerics", {})[f"{kernel.op}.{kernel.name}"] = done
    settle(done)


# `reference` is what the oracle runs, in float64.
AT_SIZE = [pytest.param(k, id=f"{k.op}.{k.name}") for k in all_kernels() if k.op in WIDE and k.name != "reference"]


@pytest.mark.parametrize("kernel", AT_SIZE)
def test_numerics_at_size(kernel: Kernel, found: dict[str, Any]) -> None:
    done = run_all(kernel, WIDE[kernel.op], lambda seed: DeviceSource(seed, "cuda"))
    found.setdefault("numerics_at_size", {})[f"{kernel.op}.{kernel.name}"] = done
    settle(done)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_opcheck_of_the_op(op: Any, found: dict[str, Any]) -> None:
    opcheck_all(op, None, found)


@pytest.mark.parametrize("kernel", KERNELS)
def test_opcheck(kernel: Kernel, found: dict[str, Any]) -> None:
    opcheck_all(OPS[kernel.op], kernel, found)


BLIND = "not implemented for 'Float8"
"""What opcheck's own comparison says of float8 results; check_kernel looks for undeclared writes and aliasing too."""


def opcheck_all(op: Any, kernel: Kernel | None, found: dict[str, Any]) -> None:
    """opcheck of the op or of a kernel's overload on the first two cases it takes."""
    name, done, why = "default" if kernel is None else kernel.name, 0, ""
    for case in CASES[op.name]:
        call = case.call(seed=3, device="cuda")
        if kernel is not None:
            if refused := refusals(kernel, call):
                why = "; ".join(map(str, refused))
                continue
            call = equip(kernel, call)
        with torch.no_grad():
            checked = torch.library.opcheck(getattr(op.packet, name), call.args, call.kwargs, raise_exception=False)
        if kernel is not None and BLIND in str(checked["test_schema"]):
            check_kernel(kernel, call)
            checked["test_schema"] = "SUCCESS"
        assert set(checked.values()) == {"SUCCESS"}, f"{case}: {checked}"
        done += 1
        if done == 2:
            break
    found.setdefault("opcheck", {})[f"{op.name}.{name}"] = done
    if not done:
        pytest.skip(f"takes no case on this GPU: {why}")


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
    if kernel.op in OPAQUE:
        pytest.skip("its result means something to one kernel only; tests/gpu/test_fa.py replays both")
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
