"""Prompts that are timed, and forwards with their gradients."""

from __future__ import annotations

from attnops.core.problem import altered
from attnops.ops.attention.timed import DENSE, PACKED, WINDOW
from attnops.ops.points import Points, Requests, Trained, documents
from attnops.ops.sweeps import D64_MHA, DEEPSEEK

WINDOWED = altered(DENSE, **WINDOW)

POINTS: Points = {
    "attention": {
        "kernels": (
            Requests(2, "prefill", DENSE, 1, 4096, 4096),
            Requests(9, "prefill", WINDOWED, 1, 4096, 4096, "window"),
            Requests(10, "prefill", DENSE, 1, 2048, 2048, "soft cap", (("softcap", 30.0),)),
            Requests(13, "prefill", DENSE, 1, 16384, 16384),
        )
    },
    "varlen_attention": {"kernels": (Requests(11, "packed prefill", PACKED, 4, 2048, 2048),)},
    "attention_backward": {
        "training": (
            Trained(1, "2x4096, 32/8 heads, d128", DENSE, (4096,) * 2),
            Trained(3, "window 1024, 1x16384", WINDOWED, (16384,)),
            Trained(4, "sinks, 2x4096", altered(DENSE, sinks=True), (4096,) * 2),
            Trained(5, "chunks of 1024, 1x16384", DENSE, (16384,), chunk=1024),
            Trained(
                6,
                "bias with its gradient, 2x2048, 16/16 heads, d64",
                altered(DENSE, **D64_MHA),
                (2048,) * 2,
                bias=True,
            ),
            Trained(7, "8x1024, 16/16 heads, d64", altered(DENSE, **D64_MHA), (1024,) * 8),
            Trained(8, "soft cap 30, 2x4096", altered(DENSE, softcap=True), (4096,) * 2),
            Trained(9, "2x4096, 16/16 heads, d192/128", altered(DENSE, **DEEPSEEK), (4096,) * 2),
            Trained(10, "1x16384, 32/8 heads, d128", DENSE, (16384,)),
        )
    },
    "varlen_attention_backward": {
        "training": (Trained(2, "packed, 18 documents, 32k tokens", PACKED, documents(18, 32768)),),
    },
}
