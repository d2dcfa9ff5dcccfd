"""Tests of a kernel against its contract, for built-in and third-party kernels. Needs torch alone.

`for case in CASES[kernel.op]: print(check_kernel(kernel, case.call(seed=0, device="cuda")))` is the whole of a numerics test.
"""

from attnops.inputs import Call as Call
from attnops.inputs import equip as equip
from attnops.inputs import equip_as_used as equip_as_used
from attnops.inputs import planned as planned
from attnops.inputs import with_device_plan as with_device_plan
from attnops.testing.budget import allowance as allowance
from attnops.testing.cases import CASES as CASES
from attnops.testing.check import Figures as Figures
from attnops.testing.check import Mismatch as Mismatch
from attnops.testing.check import check_kernel as check_kernel
from attnops.testing.check import oracle as oracle
from attnops.testing.check import refusals as refusals
from attnops.testing.inputs import Case as Case
from attnops.testing.inputs import Features as Features
from attnops.testing.inputs import Source as Source
