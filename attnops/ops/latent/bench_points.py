"""Steps over latents that are timed, and the kernel that writes these."""

from __future__ import annotations

from dataclasses import replace

from attnops.measured import Shape
from attnops.ops.points import Points, Requests, Written

MLA = Shape("mla_attention", q_heads=128, kv_heads=1, head_dim=576, v_head_dim=512, rope_dim=64, page_size=64)
STEP = replace(MLA, decode=True)
FLOAT8 = replace(STEP, dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")

POINTS: Points = {
    "mla_attention": {
        "kernels": (
            Requests(4, "latent decode", STEP, 64, 1, 4096),
            Requests(12, "latent decode", replace(STEP, q_heads=16), 64, 1, 4096),
            Requests(15, "float8 latent decode", FLOAT8, 64, 1, 8192),
        )
    },
    "write_latent": {"data": tuple(Written(2, "write_latent", n, {"Dc": 512, "Dr": 64}, 64) for n in (64, 4096))},
}
