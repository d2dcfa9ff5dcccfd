"""`check_kernel`: does a kernel keep its op's contract on this call, and how close does it come?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnops.core.adapt import on_device_of
from attnops.core.kernel import Kernel
from attnops.core.problem import Refusal
from attnops.core.record import check, fake as empty
from attnops.ops import OPS
from attnops.testing.calls import Call, equip, with_device_plan
from attnops.testing.error_bounds import allowance

Errors = dict[str, tuple[float, float]]


class Mismatch(AssertionError):
    """The kernel broke the contract. The text names the kernel, the result and the figures."""


@dataclass(frozen=True)
class Figures:
    """The outcome of a check. refused: why the kernel did not run. errors: (worst error, allowed
    error there) by result."""

    kernel: str
    op: str
    refused: tuple[Refusal, ...] = ()
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """The largest error as a share of the allowed one."""
        return max(
            (e / a if a else (0.0 if e == 0 else float("inf")) for e, a in self.errors.values()),
            default=0.0,
        )

    def __str__(self) -> str:
        if self.refused:
            return f"{self.op}.{self.kernel} refused: {'; '.join(map(str, self.refused))}"
        return f"{self.op}.{self.kernel}: " + ", ".join(
            f"{n} {e:.2e} of {a:.2e}" for n, (e, a) in self.errors.items()
        )


def refusals(kernel: Kernel, call: Call) -> tuple[Refusal, ...]:
    """Why `kernel` does not take `call`, given the workspace it asks for."""
    return kernel.refusals(equip(kernel, call).problem)


def check_kernel(kernel: Kernel, call: Call) -> Figures:
    """Run `kernel` on `call` and compare with the reference in float64.

    Before the run, outputs and unreadable entries are filled with NaN. Besides the numbers it
    checks that the call keeps the contract, that results have the fake's shapes, strides and dtypes
    and alias no input, and that arguments not declared written are unchanged. A kernel that refuses
    the call is not run. A kernel gets the workspace and host plan that it needs, and runs with and
    without an optional device plan. The kernel need not be registered. `call` is not changed.

    Raises Mismatch, and InvalidInput when the call breaks the contract.
    """
    call = equip(kernel, call)
    check(call.record)
    if refused := refusals(kernel, call):
        return Figures(kernel.name, kernel.op, refused)
    figures = _check_run(kernel, call)
    if (with_plan := with_device_plan(kernel, call)) is not call:
        figures = max(figures, _check_run(kernel, with_plan), key=lambda f: f.worst)
    return figures


def _check_run(kernel: Kernel, call: Call) -> Figures:
    # A workspace can be larger than all other arguments, so it is copied once for the run and once
    # by the oracle.
    clean = call.map(
        lambda n, t: (
            fill(clone(t), call.free[n], False)
            if n in call.free
            else t
            if _is_scratch(call, n)
            else clone(t)
        )
    )
    given = call.map(lambda n, t: _poisoned(call, n, t))
    before = {n: clone(t) for n, t in given.tensors().items() if n not in given.mutated}
    with torch.no_grad():
        returned = kernel.run(given.record)
    where = f"{kernel.op}.{kernel.name}"
    results = named_results(given, returned, where)
    _check_layout(results, given, where)
    for name, copy in before.items():
        if not torch.equal(
            *(t.flatten().clone().view(torch.uint8) for t in (given.arguments[name], copy))
        ):
            raise Mismatch(f"{where}: wrote into {name}, which the schema does not declare written")
    # References are called as ops call them: not all of torch's own functions find the GPU of their
    # arguments.
    with on_device_of(next(iter(clean.tensors().values()))):
        errors = _errors(kernel, clean, results)
    return Figures(kernel.name, kernel.op, errors=errors)


def _errors(kernel: Kernel, call: Call, results: dict[str, Tensor]) -> Errors:
    """(worst error, allowed error there) by result. call: as it was before the run, with zeros
    where it is free."""
    written = _written_slots(call)
    for name in results:
        if written is not None and name in call.spec.names and call.spec[name].holds == "pages":
            _check_kept(
                f"{kernel.op}.{kernel.name}: {name}",
                _poisoned(call, name, call.arguments[name]),
                results[name],
                written,
            )
    results = _cut(call, results, written)
    compared = OPS[kernel.op].of_family("bound", "COMPARED")
    if compared is not None:
        found, factor = compared(call.record, results), 1.0
    else:
        whole = oracle(call)
        allowed = allowance(call, whole, kernel.tolerance.rounded_sums)
        factor = kernel.tolerance.factor
        expected = _cut(call, whole, written)
        found = {
            name: (got, expected[name], allowed.get(name, 0.0)) for name, got in results.items()
        }
    what = f"{kernel.op}.{kernel.name}"
    return {
        name: compare(f"{what}: {name}", got, want, most, factor)
        for name, (got, want, most) in found.items()
    }


def _written_slots(call: Call) -> Tensor | None:
    """The slots where the call stores new keys, in the tokens' order; None where it is not told
    them."""
    held = call.held()
    slots: Tensor | None = held.get("slots_of_tokens")
    lengths = held.get("lengths_of_keys")
    if slots is None:
        return None
    return slots[slots >= 0 if lengths is None else (slots >= 0) & (lengths > 0)].long()


def _cut(call: Call, results: Mapping[str, Tensor], written: Tensor | None) -> dict[str, Tensor]:
    """The results without scratch; of pages, the slots that are written, if they are known."""
    cut = {}
    for name, x in results.items():
        a = call.spec[name] if name in call.spec.names else None
        if a is not None and a.hint:
            continue  # private to the kernel
        pages = a is not None and a.holds == "pages" and written is not None
        cut[name] = x.flatten(0, 1).view(torch.uint8)[written].view(x.dtype) if pages else x
    return cut


def oracle(call: Call) -> dict[str, Tensor]:
    """The exact results: the reference on inputs taken to float64. Free entries must be finite."""
    kept = [
        n
        for n, t in call.tensors().items()
        if n.startswith("lse") or t.dtype.itemsize == 1 or not t.is_floating_point()
    ]
    wide = call.map(lambda n, t: clone(t) if n in kept else clone(t).double())
    with torch.no_grad():
        return named_results(wide, OPS[call.op].reference(wide.record), call.op)


def compare(
    what: str, got: Tensor, want: Tensor, allowed: float | Tensor, tolerance: float
) -> tuple[float, float]:
    """(worst error, allowed error there). Integers and infinities must be equal. Raises
    Mismatch."""
    if got.shape != want.shape:
        raise Mismatch(f"{what}: got shape {tuple(got.shape)}, want {tuple(want.shape)}")
    if not got.is_floating_point():
        if not torch.equal(got.long(), want.long()):
            raise Mismatch(f"{what}: got {got.tolist()}, want {want.tolist()}")
        return 0.0, 0.0
    got, want = got.double(), want.double()
    limit = (
        torch.as_tensor(allowed, dtype=torch.float64, device=got.device).expand_as(want) * tolerance
    )
    odd = ~torch.isfinite(want)
    if not torch.equal(got[odd], want[odd]) or not bool(torch.isfinite(got[~odd]).all()):
        first = torch.nonzero((odd & (got != want)) | (~odd & ~torch.isfinite(got)))[0].tolist()
        raise Mismatch(
            f"{what}{first}: got {float(got[tuple(first)])}, want {float(want[tuple(first)])}"
        )
    error, limit = (got - want).abs()[~odd], limit[~odd]
    if error.numel() == 0:
        return 0.0, 0.0
    at = int(torch.argmax(torch.where(error == 0, -1.0, error / limit)))
    worst, there = float(error[at]), float(limit[at])
    if worst > there:
        flat = torch.nonzero(~odd)[at].tolist()
        raise Mismatch(
            f"{what}{flat}: got {float(got[~odd][at])}, want {float(want[~odd][at])}, off by "
            f"{worst:.3e}, allowed {there:.3e}"
        )
    return worst, there


def clone(t: Tensor) -> Tensor:
    """A copy with the same strides and offset in a storage of its own, expanded tensors too."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(
        t.untyped_storage().clone(), t.storage_offset(), t.size(), t.stride()
    )


def fill(t: Tensor, where: Tensor, poison: bool) -> Tensor:
    """`t` with the entries at `where` set to NaN (the largest int8 for int8), or to 0. In place."""
    if t.dtype.itemsize == 1 and t.dtype != torch.bool:
        # 0x7f is NaN in both float8 formats; bytes of packed numbers are NaN in any width when all
        # are 0xff.
        byte = 0xFF if t.dtype == torch.uint8 else 0x7F
        t.view(torch.uint8).masked_fill_(where, byte if poison else 0)
    elif t.is_floating_point():
        t.masked_fill_(where, float("nan") if poison else 0.0)
    return t


def _is_scratch(call: Call, name: str) -> bool:
    a = call.spec[name]
    return a.hint and a.written


def _poisoned(call: Call, name: str, tensor: Tensor) -> Tensor:
    if name in call.writes:
        return fill(clone(tensor), torch.ones((), dtype=torch.bool, device=tensor.device), True)
    return fill(clone(tensor), call.free[name], True) if name in call.free else clone(tensor)


def named_results(call: Call, returned: Any, where: str) -> dict[str, Tensor]:
    """The results by name: returned or written tensors."""
    names = [r.name or "result" for r in OPS[call.op].packet.default._schema.returns]
    if not names:
        if returned is not None:
            raise Mismatch(
                f"{where}: returned {type(returned).__name__}, want None (it writes its arguments)"
            )
        return {n: call.arguments[n] for n in call.mutated}
    values = returned if isinstance(returned, (tuple, list)) else (returned,)
    if len(values) != len(names):
        raise Mismatch(f"{where}: returned {len(values)} results, want {', '.join(names)}")
    return dict(zip(names, values, strict=True))


def _check_layout(results: Mapping[str, Tensor], given: Call, where: str) -> None:
    fake = empty(given.record)
    if fake is None:
        return
    storages = {t.untyped_storage().data_ptr() for t in given.tensors().values() if t.numel()}
    for want, (name, got) in zip(
        fake if isinstance(fake, tuple) else (fake,), results.items(), strict=True
    ):
        # Inductor gives an empty tensor strides of zero.
        strides = (got.stride(), want.stride()) if got.numel() else ((), ())
        facts = {
            "shape": (tuple(got.shape), tuple(want.shape)),
            "strides": strides,
            "dtype": (got.dtype, want.dtype),
        }
        for fact, (a, b) in (facts | {"device": (got.device, want.device)}).items():
            if a != b:
                raise Mismatch(f"{where}: {name} has {fact} {a}, want {b}")
        if got.numel() and got.untyped_storage().data_ptr() in storages:
            raise Mismatch(f"{where}: {name} shares memory with an input")


def _check_kept(what: str, before: Tensor, after: Tensor, written: Tensor) -> None:
    """Raise Mismatch where a slot of the pages has changed that is not among those written."""
    old, new = (t.flatten(0, 1).view(torch.uint8) for t in (before, after))
    changed = (new != old).flatten(1).any(1)
    changed[written] = False
    if changed.any():
        raise Mismatch(
            f"{what}: slot {int(changed.nonzero()[0])} changed, but no token is stored there"
        )
