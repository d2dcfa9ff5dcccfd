"""Tests of a kernel against its contract, for built-in and third-party kernels. Needs torch alone.

`for case in CASES[kernel.op]: print(check_kernel(kernel, case.call(seed=0, device="cuda")))` is the whole of a numerics test.
"""

from attnops.inputs import (
    Call as Call,
    allowance as allowance,
    equip as equip,
    equip_as_used as equip_as_used,
    planned as planned,
    with_device_plan as with_device_plan,
)
from attnops.testing.cases import CASES as CASES
from attnops.testing.check import (
    Figures as Figures,
    Mismatch as Mismatch,
    check_kernel as check_kernel,
    oracle as oracle,
    refusals as refusals,
)
from attnops.testing.inputs import Case as Case, Features as Features, Source as Source
