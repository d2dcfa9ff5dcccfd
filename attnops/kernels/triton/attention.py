"""`triton`: attention, gradients, and merges, by attnops' own kernels, for any GPU that Triton
compiles for.

Attention over pages, over latents and of dense and packed calls is one kernel. It has two stages: a
tile of queries attends over one split of its request's keys, then the splits are merged by their
log-sum-exps; docs/triton.md has the picture. The number of splits follows from shapes alone, so
that a captured graph replays for other lengths. Gradients take every rule of visibility, soft caps,
sinks and ranges of keys. Their tiles follow from head dims and the GPU, and no two programs add to
one number, so that a request's gradients do not depend on the rest of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from attnops.core.kernel import (
    Invariant,
    Kernel,
    Need,
    Package,
    arch_from,
    at_most,
    demand,
    one_of,
    register,
)
from attnops.core.problem import Problem, Refusal
from attnops.kernels.shared import memory
from attnops.measured import Roofline, phases

PACKAGE = Package("triton", ("triton",), "3.3", "pip install triton")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
QUERY = (*FLOATS, torch.float8_e4m3fn)
STORED = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@dataclass(frozen=True)
class Launched:
    """The function `name` of `launch/<module>.py` as a kernel's `run`. The first call imports it,
    and triton."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """The module's full name."""
        return f"attnops.kernels.triton.launch.{self.module}"

    @functools.cached_property
    def function(self) -> Callable[[Any], Any]:
        """The function."""
        found: Callable[[Any], Any] = getattr(import_module(self.path), self.name)
        return found

    def __call__(self, call: Any) -> Any:
        return self.function(call)

    def ahead(self, call: Any | None) -> None:
        """Begin to compile what such a call launches: a kernel's `ahead`."""
        from attnops.kernels.shared.launch.beside import BESIDE

        function = (
            self.function
        )  # imports triton: two threads that import one package may each find half of it
        if call is None:
            BESIDE.start()
        else:
            BESIDE.begin(function, call)


def launched(module: str, name: str) -> Launched:
    """See Launched."""
    return Launched(module, name)


def own(
    op: str,
    run: Callable[[Any], Any],
    cost_us: Callable[[Problem], float],
    about: str,
    takes: Iterable[str] = (),
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    kv_dtypes: tuple[torch.dtype, ...] | None = None,
    needs: tuple[Need, ...] = (),
    again: Callable[[Any], Callable[[Any], Any]] | None = None,
) -> None:
    """Register `triton` for an op; the arguments are fields of the Kernel."""
    register(
        Kernel(
            "triton",
            op,
            run,
            frozenset(takes),
            dtypes,
            kv_dtypes,
            (arch_from(80), *needs),
            (PACKAGE,),
            cost_us=cost_us,
            invariant=Invariant(any_page=True),
            ahead=run.ahead if isinstance(run, Launched) else None,
            again=again,
            about=about,
        )
    )


def _merge_us(p: Problem) -> float:
    parts = max(p.sizes.batch.hint, 1) if p.op == "merge_states" else 2
    return (
        5.0
        + (parts + 1.0)
        * max(p.sizes.tokens.hint, 1)
        * p.q_heads
        * p.v_head_dim
        * p.dtype.itemsize
        / 3.4e6
    )


PAGED = phases(Roofline(8.2, 1.1, 0.45, 0.013, 590), Roofline(7.8, 0.71, 0.46, 0.034, 510))
BACKWARD = Roofline(33.5, 0.093, 0.19)
LATENTS = phases(Roofline(11.0, 1.1, 0.29, 0.032, 320), Roofline(8.7, 0.4, 0.38, 0.064, 250))
# Not measured: half the rates of the same loop over pages, and the small tensors that say where
# keys begin.
WITHOUT_PAGES = phases(
    Roofline(25.0, 0.5, 0.22, 0.013, 590), Roofline(25.0, 0.35, 0.23, 0.034, 510)
)


def _by_query(cost_us: Callable[[Problem], float]) -> Callable[[Problem], float]:
    """Of a float8 query twice the estimate: it is multiplied in bfloat16, at half the rate of
    float8, as are its keys. Not measured."""
    return lambda p: cost_us(p) * (2.0 if p.dtype == torch.float8_e4m3fn else 1.0)


def _float8(p: Problem) -> Refusal | None:
    for field in ("dtype", "kv_dtype"):
        if getattr(p, field) == torch.float8_e4m3fn and p.target.arch < 89:
            return Refusal(field, torch.float8_e4m3fn, "another, or sm89 and later")
    return None


LAYOUT: tuple[Need, ...] = (_float8, one_of("last_dim_contiguous", True))
HEADS: tuple[Need, ...] = (*LAYOUT, at_most("head_dim", 256), at_most("v_head_dim", 256))
_halves = demand(
    "dtype",
    "float16 | bfloat16 (head dims above 256)",
    lambda p: max(p.head_dim, p.v_head_dim) <= 256 or p.dtype.itemsize <= 2,
)
WIDE_HEADS: tuple[Need, ...] = (
    *LAYOUT,
    at_most("head_dim", 576),
    at_most("v_head_dim", 512),
    _halves,
)
LATENT_NEEDS: tuple[Need, ...] = (*LAYOUT, at_most("v_head_dim", 512), at_most("rope_dim", 64))

RULES = frozenset({"causal", "window_left", "window_right", "softcap", "attention_chunk", "sinks"})
LATENT_TAKES = {"causal", "window_left", "softcap", "sinks", "mask", "q_scale", "kv_scale", "lse"}
TAKES = RULES | {"mask", "q_scale", "k_scale", "v_scale"}
PAGED_TAKES = TAKES | {"temperature", "lse"}

attention = launched("attention", "attention")
few_queries = launched("attention", "few_queries")
"""`attention` of the requests of at most `grids.DECODE_QUERIES` queries. All other rows keep what
they hold."""

for _op, _run, _us, _about, _takes, _needs in (
    ("paged_attention", attention, PAGED, "decode and extend", PAGED_TAKES, WIDE_HEADS),
    (
        "mla_attention",
        attention,
        LATENTS,
        "decode and extend over latents",
        LATENT_TAKES,
        LATENT_NEEDS,
    ),
    (
        "attention",
        launched("attention", "dense_attention"),
        WITHOUT_PAGES,
        "any head dims and rules",
        TAKES | {"kv_start", "kv_end", "return_lse"},
        WIDE_HEADS,
    ),
    (
        "varlen_attention",
        launched("attention", "varlen_attention"),
        WITHOUT_PAGES,
        "any head dims and rules",
        TAKES | {"return_lse"},
        WIDE_HEADS,
    ),
):
    own(_op, _run, _by_query(_us), f"attnops' own, {_about}", _takes, QUERY, STORED, _needs)
for _op, _takes in (
    ("attention_backward", RULES | {"mask", "mask_grad", "kv_start", "kv_end"}),
    ("varlen_attention_backward", RULES | {"mask"}),
):
    # FlashAttention-2's backward makes five products where this makes seven.
    own(_op, launched("gradient", _op), BACKWARD, "attnops' own gradient", _takes, needs=HEADS)
for _op in ("merge_state", "merge_states"):
    own(_op, launched("attention", _op), _merge_us, "attnops' own")
_SIXTEEN = demand(
    "q_heads, kv_heads", "at most 16 query heads a key head", lambda p: p.group_size <= 16
)
_decode = launched("decode", "decode_attention")
register(
    Kernel(
        "triton",
        "decode_attention",
        _decode,
        frozenset({"cos", "sin", "q_norm", "k_norm", "sinks", "window_left", "softcap", "holes"}),
        FLOATS,
        None,
        (arch_from(80), one_of("last_dim_contiguous", True), at_most("head_dim", 256), _SIXTEEN),
        (PACKAGE,),
        cost_us=Roofline(6.0, 1.05, 0.45, 0.013, 256),
        workspace_bytes=lambda problem: memory.total(0),
        # Keys of a split of a fixed size.
        invariant=Invariant(cost_us=Roofline(6.0, 1.05, 0.45, 0.013, 512), any_page=True),
        ahead=_decode.ahead,
        about="attnops' own, all in one launch",
    )
)
