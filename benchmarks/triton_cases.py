"""What the Triton kernels are measured on: shapes, the vendors' kernels for each, what is aimed at, and what the numbers should be."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from direct import Run, fa3_paged, flashinfer_decode, flashinfer_mla, flashinfer_prefill, flashmla, why

from attnops.inputs import Pool, build
from attnops.measured import Shape
from attnops.testing import Call
from attnops.tune import Stopwatch
from attnops.tune.shapes import FP8, MLA, PAGED
from attnops.tune.timing import runner

NEAR = 0.02
"""Two kernels' results for one call differ by less, as a share of the largest value."""


@dataclass(frozen=True)
class Case:
    """One shape at one size.

    vendors: makers of direct calls. kernels: names of registered ones, those that can answer are timed. goal: our speed over that of the
    fastest call whose name holds `against`, 0 for no goal. more: further arguments of the op.
    """

    shape: Shape
    batch: int
    queries: int
    keys: int
    goal: float = 0.0
    against: str = ""
    more: dict[str, Any] = field(default_factory=dict)
    vendors: dict[str, Any] = field(default_factory=dict)
    kernels: tuple[str, ...] = ("fa3", "flashinfer", "xqa")

    @property
    def kind(self) -> tuple[Shape, str]:
        """What is compiled is the same for cases of one kind, but for tiles and whether there are splits."""
        return self.shape, str(self.more)

    def call(self, pool: Pool) -> Call:
        return build(self.shape, [self.queries] * self.batch, [self.keys] * self.batch, pool).with_(**self.more)

    def small(self, pool: Pool) -> Call:
        """One of the same kind that can be checked against the exact result."""
        lens = [(1, 900), (1, 70)] if self.queries == 1 else [(300, 300 + min(self.keys - self.queries, 400))]
        return build(self.shape, [q for q, _ in lens], [k for _, k in lens], pool).with_(**self.more)

    @property
    def seen(self) -> int:
        """Keys of a request that any of its queries sees."""
        return min(self.keys, self.shape.window + self.queries) if self.shape.window >= 0 else self.keys

    @property
    def bytes(self) -> float:
        """Of the keys and values that are seen: what a decode step must read."""
        s = self.shape
        numbers = s.head_dim if s.rope_dim else s.kv_heads * (s.head_dim + s.v_head_dim)
        return float(self.batch * self.seen * numbers * getattr(torch, s.kv_dtype).itemsize)

    @property
    def flops(self) -> float:
        """Of both products, over the pairs that are seen."""
        s = self.shape
        return 2.0 * self.batch * self.queries * (self.seen - (self.queries - 1) / 2) * s.q_heads * (s.head_dim + s.v_head_dim)


STEP = replace(PAGED, decode=True)
H16, H128 = replace(MLA, q_heads=16, decode=True), replace(MLA, decode=True)
PLAIN: dict[str, Any] = {
    "against": "fa3",
    "vendors": {"fa3": fa3_paged, "flashinfer_cores": flashinfer_decode(False), "flashinfer_tensor": flashinfer_decode(True)},
}
LATENT: dict[str, Any] = {
    "against": "flashmla", "vendors": {"flashmla": flashmla, "flashinfer_fa3": flashinfer_mla("fa3")}, "kernels": ("fa3", "flashmla"),
}  # fmt: skip
EXTEND: dict[str, Any] = {
    "against": "fa3", "vendors": {"fa3": fa3_paged, "flashinfer_fa3": flashinfer_prefill("fa3")}, "kernels": ("fa3",),
}  # fmt: skip
FEATURES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "softcap": (STEP, {"softcap": 30.0}),
    "sinks": (replace(STEP, sinks=True), {}),
    "window": (replace(STEP, window=1023), {}),
    "fp8": (replace(STEP, **FP8), {}),
}
CASES: dict[str, Case] = {
    "decode_1x8192": Case(STEP, 1, 1, 8192, 1.3, **PLAIN),
    "decode_64x4096": Case(STEP, 64, 1, 4096, 0.95, **PLAIN),
    "mla16_64x8192": Case(H16, 64, 1, 8192, 0.85, **LATENT),
    "mla128_64x8192": Case(H128, 64, 1, 8192, 0.6, **LATENT),
    "extend_2048_on_8192": Case(PAGED, 1, 2048, 10240, 0.6, **EXTEND),
    "decode_8x4096": Case(STEP, 8, 1, 4096, 1.0, **PLAIN),
    "decode_1x32768": Case(STEP, 1, 1, 32768, 1.3, **PLAIN),
    "extend_8192_on_0": Case(PAGED, 1, 8192, 8192, **EXTEND),
    "mla16_1x8192": Case(H16, 1, 1, 8192, **LATENT),
    "mla128_1x8192": Case(H128, 1, 1, 8192, **LATENT),
    **{f"{n}_8x4096": Case(s, 8, 1, 4096, 0.9, more=more) for n, (s, more) in FEATURES.items()},
    **{f"{n}_64x4096": Case(s, 64, 1, 4096, 0.9, more=more) for n, (s, more) in FEATURES.items()},
}


def is_vendor(name: str) -> bool:
    """Is a timed call of that name a vendor's?"""
    return name.startswith(("direct.", "op."))


def vendors_of(case: Case, call: Call, without: set[str]) -> tuple[dict[str, Run], dict[str, str]]:
    """The vendors' calls, called once: `direct.*` as the vendor has it, `op.*` as registered. And what is left out, with the reason."""
    runs: dict[str, Run] = {}
    left_out: dict[str, str] = {}

    def attempt(name: str, make: Any) -> None:
        try:
            run = make()
            run()
            torch.cuda.synchronize()
            runs[name] = run
        except Exception as error:
            left_out[name] = why(error)

    for name, make in case.vendors.items():
        attempt(f"direct.{name}", partial(make, call))
    for kernel, mine, _ in Stopwatch(lambda *_: 0.0, names=tuple(set(case.kernels) - without)).candidates(call):
        # Not `call`'s own output: ours are compared with it.
        attempt(f"op.{kernel.name}", partial(runner, kernel, mine.with_(output=torch.empty_like(mine.arguments["output"]))))
    return runs, left_out


def expected_of(call: Call) -> tuple[str, torch.Tensor] | None:
    """(whose, float32 output) of `call` by a vendor's registered kernel, else by our own: what every configuration should give."""
    for name in ("fa3", "flashinfer", "xqa", "triton"):
        for kernel, mine, _ in Stopwatch(lambda *_: 0.0, names=(name,)).candidates(call):
            with contextlib.suppress(Exception):
                mine = mine.with_(output=torch.empty_like(mine.arguments["output"]))
                runner(kernel, mine)()
                torch.cuda.synchronize()
                return name, mine.arguments["output"].float()
    return None


def error_of(call: Call, run: Run, want: torch.Tensor) -> float:
    """The largest difference of what `run` writes into the call's output, as a share of the largest value; NaN if it leaves some out."""
    output = call.arguments["output"]
    output.fill_(float("nan"))
    run()
    return float((output.float() - want).abs().max() / want.abs().max())
