"""`aten`: the experts of a mixture by torch's grouped product, or one after the other where torch has none for the call."""

from __future__ import annotations

import torch

from attnops.core.kernel import Invariant, Kernel, device, register
from attnops.kernels.shared.experts import TAKES, cost_us, experts
from attnops.kernels.torch.by_request import by_token
from attnops.ops.experts.reference import experts as reference

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

register(
    Kernel(
        "aten", "experts", experts, TAKES, FLOATS, cost_us=cost_us, about="torch's grouped product, or an expert after the other",
    )
)  # fmt: skip
register(
    Kernel(
        "reference", "experts", by_token(reference), TAKES, FLOATS, cost_us=lambda p: 1000.0 + 10.0 * cost_us(p), judge=True,
        invariant=Invariant((device("cpu"),)), about="plain torch, float32 accumulation",
    )
)  # fmt: skip
