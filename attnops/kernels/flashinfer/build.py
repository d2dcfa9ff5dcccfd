"""FlashInfer's modules built in advance and side by side.

    python -m attnops.kernels.flashinfer.build decode:bfloat16:128 fa2:bfloat16:128 fa3:bfloat16:128:window

A module is written path:dtype:head_dim[xv_head_dim][:window][:softcap][:sinks]. Without this a module is built by nvcc at the first plan
that needs it, which takes a quarter of a minute (decode, fa2) to more than one (fa3).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from attnops.errors import InvalidInput
from attnops.kernels.flashinfer import modules as fi
from attnops.problem import Problem

WANT = "decode|fa2|fa3:float16|bfloat16:64|128|256|192x128[:window][:softcap][:sinks]"


class Module(NamedTuple):
    """What tells FlashInfer's modules apart."""

    path: int
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    window: bool = False
    softcap: bool = False
    sinks: bool = False

    @classmethod
    def parse(cls, text: str) -> Module:
        """The inverse of str. Raises InvalidInput."""
        path, _, rest = text.partition(":")
        dtype, _, rest = rest.partition(":")
        dims, *flags = rest.split(":")
        names = {name: number for number, name in fi.NAMES.items()}
        numbers = dims.split("x")
        known = path in names and dtype in ("float16", "bfloat16") and set(flags) <= {"window", "softcap", "sinks"}
        if not known or not all(n.isdigit() for n in numbers) or len(numbers) > 2:
            raise InvalidInput("module", repr(text), WANT)
        return cls(names[path], getattr(torch, dtype), int(numbers[0]), int(numbers[-1]), *(f in flags for f in cls._fields[4:]))

    @classmethod
    def of(cls, p: Problem, max_seqlen_q: int, deterministic: bool = False) -> Module:
        """The module of a paged or packed call."""
        paged = p.op == "paged_attention"
        s = fi.Shape(
            1, 1, int(paged), p.q_heads, p.kv_heads, p.head_dim, p.v_head_dim, p.page_size or 1, p.dtype, p.kv_dtype,
            paged and max_seqlen_q <= 1, p.causal, p.window[0], p.softcap, p.sinks, deterministic,
        )  # fmt: skip
        path = fi.path_of(s, p.target.arch, max_seqlen_q)
        return cls(path, p.dtype, p.head_dim, p.v_head_dim, p.window[0] >= 0, p.softcap, p.sinks)

    def __str__(self) -> str:
        dims = str(self.head_dim) + (f"x{self.v_head_dim}" if self.v_head_dim != self.head_dim else "")
        flags = [f for f in self._fields[4:] if getattr(self, f)]
        return ":".join([fi.NAMES[self.path], str(self.dtype).removeprefix("torch."), dims, *flags])

    def load(self) -> float:
        """Build it if need be and load it. Returns the seconds that took."""
        start = time.perf_counter()
        found = fi.load_module(self.path, self.dtype, self.dtype, *self[2:])
        if self.path == fi.FA2 and self.head_dim != self.v_head_dim and not self.sinks:
            found.prewarm_paged_kv_stride_variant()
        return time.perf_counter() - start


def build(modules: Iterable[Module]) -> dict[Module, float]:
    """Build and load `modules` side by side. Returns the seconds of each; the first error of a build is raised when all have ended."""
    wanted = sorted(set(modules), key=lambda m: (-m.path, str(m)))  # the slow ones first
    import flashinfer.prefill  # noqa: F401 - not first in several threads at once, which it does not survive

    with ThreadPoolExecutor(max(len(wanted), 1)) as pool:
        return dict(zip(wanted, pool.map(Module.load, wanted), strict=True))


def main(arguments: list[str]) -> int:
    """Build the modules that are named."""
    for module, seconds in build(Module.parse(a) for a in arguments).items():
        print(f"{seconds:7.1f} s  {module}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
