"""How far from the exact result a kernel may be, as its op's family says in `bound.py`. A kernel's
`tolerance` multiplies every figure."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attnops.core.rounding import Allowed, roundoff
from attnops.ops import OPS
from attnops.testing.calls import Call

SUMS = "lse"


def allowance(call: Call, expected: Mapping[str, Tensor], rounded_sums: bool = False) -> Allowed:
    """The absolute error each result of `call` may have; the results that are not named are exact.

    expected: the exact results; free entries of the call are zero.
    rounded_sums: the kernel rounds weights to the query's dtype before it adds them up. Their sum
    is off by one unit roundoff of that dtype at most, and the error of the lse grows by it.
    """
    bound = OPS[call.op].of_family("bound", "BOUNDS")
    if bound is None:
        return {}  # integers and copies
    allowed: Allowed = bound(call.record, expected)
    if rounded_sums and SUMS in allowed:
        allowed[SUMS] += roundoff(call.args[0].dtype)
    return allowed
