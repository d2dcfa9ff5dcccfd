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
from attnops.ops.latent.rope_reference import scaled
from attnops.ops.metadata.reference import rows_schedule_words
from attnops.ops.sparse.packed_format import GROUP, LEAST, TOP, unpack
from attnops.testing import error_bounds
from attnops.testing.calls import Call, equip, with_device_plan

Errors = dict[str, tuple[float, float]]


class Mismatch(AssertionError):
    """The kernel broke the contract. The text names the kernel, the result and the figures."""


@dataclass(frozen=True)
class Figures:
    """The outcome of a check. refused: why the kernel did not run. errors: (worst error, allowed error there) by result."""

    kernel: str
    op: str
    refused: tuple[Refusal, ...] = ()
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """The largest error as a share of the allowed one."""
        return max((e / a if a else (0.0 if e == 0 else float("inf")) for e, a in self.errors.values()), default=0.0)

    def __str__(self) -> str:
        if self.refused:
            return f"{self.op}.{self.kernel} refused: {'; '.join(map(str, self.refused))}"
        return f"{self.op}.{self.kernel}: " + ", ".join(f"{n} {e:.2e} of {a:.2e}" for n, (e, a) in self.errors.items())


def refusals(kernel: Kernel, call: Call) -> tuple[Refusal, ...]:
    """Why `kernel` does not take `call`, given the workspace it asks for."""
    return kernel.refusals(equip(kernel, call).problem)


def check_kernel(kernel: Kernel, call: Call) -> Figures:
    """Run `kernel` on `call` and compare with the reference in float64.

    Before the run, outputs and unreadable entries are filled with NaN. Besides the numbers it checks that the call keeps the contract,
    that results have the fake's shapes, strides and dtypes and alias no input, and that arguments not declared written are unchanged.
    A kernel that refuses the call is not run. A kernel gets the workspace and host plan that it needs, and runs with and without an
    optional device plan. The kernel need not be registered. `call` is not changed.

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
    # A workspace can be larger than all other arguments, so it is copied once for the run and once by the oracle.
    clean = call.map(lambda n, t: fill(clone(t), call.free[n], False) if n in call.free else t if n == "workspace" else clone(t))
    given = call.map(lambda n, t: _poisoned(call, n, t))
    before = {n: clone(t) for n, t in given.tensors().items() if n not in given.mutated}
    with torch.no_grad():
        returned = kernel.run(given.record)
    where = f"{kernel.op}.{kernel.name}"
    results = _results(given, returned, where)
    _check_layout(results, given, where)
    for name, copy in before.items():
        if not torch.equal(*(t.flatten().clone().view(torch.uint8) for t in (given.arguments[name], copy))):
            raise Mismatch(f"{where}: wrote into {name}, which the schema does not declare written")
    # References are called as ops call them: not all of torch's own functions find the GPU of their arguments.
    with on_device_of(next(iter(clean.tensors().values()))):
        errors = CHECKS.get(kernel.op, _compared)(kernel, clean, results)
    return Figures(kernel.name, kernel.op, errors=errors)


def _compared(kernel: Kernel, call: Call, results: Mapping[str, Tensor]) -> Errors:
    expected, errors, a, start = oracle(call), {}, call.arguments, 0
    if kernel.op == "decode_rows":  # only FlashMLA reads the first words
        start = rows_schedule_words(a["num_tokens"], a.get("q_heads", 0), a.get("float8", False))
    allowed = error_bounds.allowance(call, expected, kernel.tolerance.rounded_sums)
    for name, got in results.items():
        if name in ("plan", "workspace"):
            continue  # private to the kernel
        what = f"{kernel.op}.{kernel.name}: {name}"
        errors[name] = compare(what, got[start:], expected[name][start:], allowed.get(name, 0.0), kernel.tolerance.factor)
    return errors


def oracle(call: Call) -> dict[str, Tensor]:
    """The exact results: the reference on inputs taken to float64. Free entries must be finite."""
    kept = [n for n, t in call.tensors().items() if n.startswith("lse") or t.dtype.itemsize == 1 or not t.is_floating_point()]
    wide = call.map(lambda n, t: clone(t) if n in kept else clone(t).double())
    with torch.no_grad():
        return _results(wide, OPS[call.op].reference(wide.record), call.op)


def compare(what: str, got: Tensor, want: Tensor, allowed: float | Tensor, tolerance: float) -> tuple[float, float]:
    """(worst error, allowed error there). Integers and infinities must be equal. Raises Mismatch."""
    if got.shape != want.shape:
        raise Mismatch(f"{what}: got shape {tuple(got.shape)}, want {tuple(want.shape)}")
    if not got.is_floating_point():
        if not torch.equal(got.long(), want.long()):
            raise Mismatch(f"{what}: got {got.tolist()}, want {want.tolist()}")
        return 0.0, 0.0
    got, want = got.double(), want.double()
    limit = torch.as_tensor(allowed, dtype=torch.float64, device=got.device).expand_as(want) * tolerance
    odd = ~torch.isfinite(want)
    if not torch.equal(got[odd], want[odd]) or not bool(torch.isfinite(got[~odd]).all()):
        first = torch.nonzero((odd & (got != want)) | (~odd & ~torch.isfinite(got)))[0].tolist()
        raise Mismatch(f"{what}{first}: got {float(got[tuple(first)])}, want {float(want[tuple(first)])}")
    error, limit = (got - want).abs()[~odd], limit[~odd]
    if error.numel() == 0:
        return 0.0, 0.0
    at = int(torch.argmax(torch.where(error == 0, -1.0, error / limit)))
    worst, there = float(error[at]), float(limit[at])
    if worst > there:
        flat = torch.nonzero(~odd)[at].tolist()
        raise Mismatch(f"{what}{flat}: got {float(got[~odd][at])}, want {float(want[~odd][at])}, off by {worst:.3e}, allowed {there:.3e}")
    return worst, there


def clone(t: Tensor) -> Tensor:
    """A copy with the same strides and offset in a storage of its own, expanded tensors too."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage().clone(), t.storage_offset(), t.size(), t.stride())


def fill(t: Tensor, where: Tensor, poison: bool) -> Tensor:
    """`t` with the entries at `where` set to NaN (the largest int8 for int8), or to 0. In place."""
    if t.dtype.itemsize == 1 and t.dtype != torch.bool:
        # 0x7f is NaN in both float8 formats; bytes of packed numbers are NaN in any width when all are 0xff.
        byte = 0xFF if t.dtype == torch.uint8 else 0x7F
        t.view(torch.uint8).masked_fill_(where, byte if poison else 0)
    elif t.is_floating_point():
        t.masked_fill_(where, float("nan") if poison else 0.0)
    return t


def _poisoned(call: Call, name: str, tensor: Tensor) -> Tensor:
    if name in call.writes:
        return fill(clone(tensor), torch.ones((), dtype=torch.bool, device=tensor.device), True)
    return fill(clone(tensor), call.free[name], True) if name in call.free else clone(tensor)


def _results(call: Call, returned: Any, where: str) -> dict[str, Tensor]:
    """The results by name: returned or written tensors."""
    names = [r.name or "result" for r in OPS[call.op].packet.default._schema.returns]
    if not names:
        if returned is not None:
            raise Mismatch(f"{where}: returned {type(returned).__name__}, want None (it writes its arguments)")
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
    for want, (name, got) in zip(fake if isinstance(fake, tuple) else (fake,), results.items(), strict=True):
        # Inductor gives an empty tensor strides of zero.
        strides = (got.stride(), want.stride()) if got.numel() else ((), ())
        facts = {"shape": (tuple(got.shape), tuple(want.shape)), "strides": strides, "dtype": (got.dtype, want.dtype)}
        for fact, (a, b) in (facts | {"device": (got.device, want.device)}).items():
            if a != b:
                raise Mismatch(f"{where}: {name} has {fact} {a}, want {b}")
        if got.numel() and got.untyped_storage().data_ptr() in storages:
            raise Mismatch(f"{where}: {name} shares memory with an input")


WRITES = {
    "write_kv": (("k_pages", ("key",), "k_scale"), ("v_pages", ("value",), "v_scale")),
    "write_latent": (("latent_pages", ("latent", "k_pe"), "kv_scale"),),
    "write_latent_packed": (("latent_pages", ("latent", "k_pe"), ""),),
}
"""Ops that write slots: the pages, the arguments whose rows they store, end to end, and the scale."""


def _written(kernel: Kernel, call: Call, results: Mapping[str, Tensor]) -> Errors:
    """Compare every slot of the pages: a written one holds its row within half a step, the others keep their bytes."""
    errors, slots = {}, call.arguments["slots"]
    real = slots[slots >= 0].long()
    for pages, names, scale in WRITES[kernel.op]:
        what, got = f"{kernel.op}.{kernel.name}: {pages}", results[pages]
        _kept(what, call.arguments[pages], got, real)
        parts = [call.arguments[n][slots >= 0].double() for n in names]
        rows = got.flatten(0, 1).view(torch.uint8)[real]
        exact = torch.cat(parts, -1)
        if call.arguments.get(scale) is not None:
            exact = exact / call.arguments[scale].double().reshape(-1, 1)
        if kernel.op == "write_latent_packed":
            allowed, found = _packed(what, parts[0], parts[1], rows)
        else:
            quantised = call.arguments[names[0]].dtype == got.dtype  # stored unchanged
            exact, allowed = error_bounds.stored(exact, torch.float64 if quantised else got.dtype)
            found = rows.view(got.dtype).double()
        errors[pages] = compare(what, found, exact, allowed, 1.0)
    return errors


def _packed(what: str, latent: Tensor, k_pe: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(the allowed error, the numbers) of packed rows. Compares the scales, which are exact."""
    groups = latent.unflatten(-1, (-1, GROUP))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1) / TOP)
    scale = torch.exp2((exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(min=LEAST).double())
    scale = torch.where(mantissa == 0, 2.0**LEAST, scale)
    found = rows[:, latent.shape[1] : rows.shape[1] - 2 * k_pe.shape[1]].clone(memory_format=torch.contiguous_format).view(torch.float32)
    compare(f"{what}: scale", found, scale, 0.0, 1.0)
    step = (error_bounds.stored(groups / scale[..., None], torch.float8_e4m3fn)[1] * scale[..., None]).flatten(-2)
    return torch.cat([step, k_pe.abs() * 2.0**-8], -1), unpack(rows, latent.shape[1], k_pe.shape[1], torch.float64)


def _rotated(kernel: Kernel, call: Call, results: Mapping[str, Tensor]) -> Errors:
    """Compare stored numbers with exact ones: within half a step, plus float32's rounding of the rotation."""
    wide = call.map(lambda _, t: t.double() if t.is_floating_point() else t)
    parts, errors = scaled(wide.record), {}
    for (name, got), exact in zip(results.items(), (torch.cat(parts[:2], -1), torch.cat(parts[2:], -1)), strict=True):
        want, allowed = error_bounds.stored(exact, got.dtype)
        # A rotation keeps the length of a pair, so the largest number bounds the terms of its sums.
        allowed = allowed + 2.0**-21 * exact.abs().amax(-1, keepdim=True)
        errors[name] = compare(f"{kernel.op}.{kernel.name}: {name}", got.double(), want, allowed, 1.0)
    return errors


def _decoded(kernel: Kernel, call: Call, results: Mapping[str, Tensor]) -> Errors:
    """Compare the output, and every slot of the pages: that of a new token holds its key and value, the others keep their bytes."""
    expected, slots = oracle(call), call.arguments["slots"]
    real = slots[(slots >= 0) & (call.arguments["seq_lens"] > 0)].long()
    allowed = error_bounds.allowance(call, expected)
    errors = {"output": compare(f"{kernel.op}.{kernel.name}: output", results["output"], expected["output"], allowed["output"], 1.0)}
    for name in ("k_pages", "v_pages"):
        what = f"{kernel.op}.{kernel.name}: {name}"
        _kept(what, fill(clone(call.arguments[name]), call.free[name], True), results[name], real)
        got, want = results[name].flatten(0, 1)[real], expected[name].flatten(0, 1)[real]
        errors[name] = compare(what, got, want, allowed.get(name, 0.0), 1.0)
    return errors


def _kept(what: str, before: Tensor, after: Tensor, written: Tensor) -> None:
    """Raise Mismatch where a slot of the pages has changed that is not among those written."""
    old, new = (t.flatten(0, 1).view(torch.uint8) for t in (before, after))
    changed = (new != old).flatten(1).any(1)
    changed[written] = False
    if changed.any():
        raise Mismatch(f"{what}: slot {int(changed.nonzero()[0])} changed, but no token is stored there")


CHECKS = dict.fromkeys(WRITES, _written) | {"rope_quantize_latent": _rotated, "decode_attention": _decoded}
"""By op, the comparison of results in place of `_compared`."""
