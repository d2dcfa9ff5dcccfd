"""Steps over latents that are timed, and the kernel that writes these."""

from __future__ import annotations

import torch

from attnops.core.problem import altered
from attnops.ops.latent.timed import MLA
from attnops.ops.points import Points, Requests, Written
from attnops.ops.sweeps import decoding

STEP = decoding(MLA)
FLOAT8 = altered(STEP, dtype=torch.float8_e4m3fn, kv_dtype=torch.float8_e4m3fn)

POINTS: Points = {
    "mla_attention": {
        "kernels": (
            Requests(4, "latent decode", STEP, 64, 1, 4096),
            Requests(12, "latent decode", altered(STEP, q_heads=16), 64, 1, 4096),
            Requests(15, "float8 latent decode", FLOAT8, 64, 1, 8192),
        )
    },
    "write_latent": {
        "data": tuple(Written(2, "write_latent", n, {"Dc": 512, "Dr": 64}, 64) for n in (64, 4096))
    },
}
