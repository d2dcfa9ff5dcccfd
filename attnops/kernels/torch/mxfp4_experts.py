"""`aten`: the experts of a mixture with weights of MXFP4, decoded for the call, by torch's grouped
product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnops.core.kernel import Kernel, register
from attnops.kernels.shared import experts as plain
from attnops.kernels.shared.mxfp4_experts import TAKES, cost_us
from attnops.kernels.torch.by_request import by_token, register_by_token
from attnops.ops.experts.mxfp4_reference import decoded_call, experts as reference

if TYPE_CHECKING:
    from attnops.ops.experts.mxfp4 import Mxfp4Experts

FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def experts(call: Mxfp4Experts) -> None:
    """All experts' weights are written to memory and read again, however few are chosen."""
    plain.experts(decoded_call(call))


register(
    Kernel(
        "aten",
        "mxfp4_experts",
        experts,
        TAKES,
        FLOATS,
        cost_us=cost_us,
        about="weights decoded for the call, torch's grouped product",
    )
)
register_by_token("mxfp4_experts", by_token(reference), TAKES, FLOATS, cost_us)
