"""`aten`: the experts of a mixture by torch's grouped product, or one after the other where torch
has none for the call."""

from __future__ import annotations

import torch

from attnops.core.kernel import Kernel, register
from attnops.kernels.shared.experts import TAKES, cost_us, experts
from attnops.kernels.torch.by_request import by_token, register_by_token
from attnops.ops.experts.reference import experts as reference

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

register(
    Kernel(
        "aten",
        "experts",
        experts,
        TAKES,
        FLOATS,
        cost_us=cost_us,
        about="torch's grouped product, or an expert after the other",
    )
)
register_by_token("experts", by_token(reference), TAKES, FLOATS, cost_us)
