"""Kernels of other packages: their first results are compared with what the op promises."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from attnops.core.adapt import origin
from attnops.core.errors import WrongResult, fail
from attnops.core.kernel import Kernel
from attnops.core.record import Call, fake, name

PACKAGE = __name__.partition(".")[0]


def is_foreign(kernel: Kernel) -> bool:
    """Does its function come from another package?"""
    return str(origin(kernel.run).__module__).partition(".")[0] != PACKAGE


@functools.cache
def answering(kernel: Kernel) -> Callable[[Any], Any]:
    """`kernel.run`. That of a foreign kernel raises WrongResult where its first results are not
    those of the op."""
    if not is_foreign(kernel):
        return kernel.run
    unchecked = [True]

    def run(call: Any) -> Any:
        results = kernel.run(call)
        if unchecked:
            check_results(kernel, call, results)
            unchecked.clear()
        return results

    return run


def check_results(kernel: Kernel, call: Call, results: Any) -> None:
    """Raise WrongResult unless these are results of the call: as many, of their shapes, strides,
    dtypes and devices."""
    promised = fake(call)
    if isinstance(promised, tuple):
        found: Any = results
        want = f"a tuple of {len(promised)}: {', '.join(r.name for r in call.spec.results)}"
    else:
        promised, found = (promised,), (results,)
        want = (
            "None, because the op writes into its arguments" if promised == (None,) else "a tensor"
        )
    if not isinstance(found, (tuple, list)) or [*map(_kind, found)] != [*map(_kind, promised)]:
        fail(WrongResult, kernel.op, kernel.name, "result", _named(results), want)
    for result, x, y in zip(call.spec.results, found, promised, strict=False):
        for field, got, wanted in _differences(x, y):
            fail(WrongResult, kernel.op, kernel.name, f"{result.name}.{field}", got, wanted)


def _differences(x: Tensor, y: Tensor) -> Iterator[tuple[str, object, object]]:
    if x.shape != y.shape:
        yield "shape", tuple(x.shape), tuple(y.shape)
    if x.dtype != y.dtype:
        yield "dtype", name(x.dtype), name(y.dtype)
    if x.device != y.device:
        yield "device", x.device, y.device
    # A dim of one number is nowhere stepped over.
    pairs = zip(x.shape, x.stride(), y.stride(), strict=True)
    if x.numel() and any(size > 1 and mine != theirs for size, mine, theirs in pairs):
        yield "stride()", x.stride(), y.stride()


def _kind(x: object) -> type:
    return Tensor if isinstance(x, Tensor) else type(x)


def _named(results: object) -> str:
    if isinstance(results, (tuple, list)):
        return f"a {type(results).__name__} of {len(results)}"
    return "a tensor" if isinstance(results, Tensor) else type(results).__name__
