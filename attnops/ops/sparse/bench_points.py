"""The kernel that packs latents. No call of sparse attention is timed so far."""

from __future__ import annotations

from attnops.ops.points import Points, Written
from attnops.ops.sparse.packed_format import packed_bytes

SIZES = {"Dc": 512, "Dr": 64, "bytes": packed_bytes(512, 64)}

POINTS: Points = {
    "sparse_mla_attention": {"kernels": ()},
    "write_latent_packed": {
        "data": tuple(Written(3, "write_latent_packed", n, SIZES, 64) for n in (64, 4096))
    },
}
