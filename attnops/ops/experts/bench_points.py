"""Mixtures of published models whose experts are timed. No layer in MXFP4 is timed so far."""

from __future__ import annotations

from typing import NamedTuple

from attnops.ops.points import Points


class Mixture(NamedTuple):
    """A layer of experts. kind, of: of transformers' model and classes. sizes: experts, those of a
    token, their width.

    many, wide: as its config calls the experts and their width.
    """

    place: int
    name: str
    kind: str
    of: str
    hidden: int
    sizes: tuple[int, int, int]
    many: str
    wide: str


POINTS: Points = {
    "experts": {
        "experts": (
            Mixture(
                1,
                "gpt-oss-20b",
                "gpt_oss",
                "GptOss",
                2880,
                (32, 4, 2880),
                "num_local_experts",
                "intermediate_size",
            ),
            Mixture(
                2,
                "qwen3-30b-a3b",
                "qwen3_moe",
                "Qwen3Moe",
                2048,
                (128, 8, 768),
                "num_experts",
                "moe_intermediate_size",
            ),
            Mixture(
                3,
                "deepseek-v3",
                "deepseek_v3",
                "DeepseekV3",
                7168,
                (256, 8, 2048),
                "n_routed_experts",
                "moe_intermediate_size",
            ),
        )
    },
    "mxfp4_experts": {"experts": ()},
}
