"""What kernels that have a stand-in refuse, fact by fact, and how much of the grid that leaves to
tests/standins/test_contract.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Extent, Problem, Target, altered
from tests.standins.test_contract import GRADIENTS, KERNELS, LATENT, NARROWED, named, serviced
from tests.standins.vendors import VENDORS

F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn

SINKS, LSE = {"sinks": True, "sinks_dtype": BF16}, {"lse": True}
WIDE_SINKS = SINKS | {"sinks_dtype": F32}
FLOAT8 = {"dtype": E4M3, "kv_dtype": E4M3, "kv_scales": True}
ANY: dict[str, dict[str, Any]] = {
    "float16": {"dtype": F16, "kv_dtype": F16},
    "float32": {"dtype": F32, "kv_dtype": F32},
    "float8": FLOAT8,
    "float8 keys": {"kv_dtype": E4M3, "kv_scales": True},
    "float8 keys by head": {"kv_dtype": E4M3, "kv_scales": True, "per_head_scales": True},
    "int8 keys": {"kv_dtype": torch.int8, "kv_scales": True},
    "scales": {"kv_scales": True},
    "mask": {"mask": "bool"},
    "all keys": {"causal": False},
    "window": {"window": (5, -1)},
    "window of all": {"window": (5, -1), "causal": False},
    "right window": {"window": (-1, 3), "causal": False},
    "softcap": {"softcap": True},
    "chunk": {"attention_chunk": 64},
    "chunk of all": {"attention_chunk": 64, "causal": False},
    "sinks": SINKS,
    "wide sinks": WIDE_SINKS,
    "strides": {"last_dim_contiguous": False},
}
FORWARD: dict[str, dict[str, Any]] = {
    "lse": LSE,
    "sinks lse": SINKS | LSE,
    "wide sinks lse": WIDE_SINKS | LSE,
}
GRADIENT: dict[str, dict[str, Any]] = {
    "mask_grad": {"mask": "additive", "mask_grad": True},
    "lse_grad": {"lse_grad": True},
}
ROWS: dict[str, dict[str, Any]] = {
    "range": {"kv_range": True},
    "more keys": {"sizes_equal": False, "context": Extent.of(90)},
    "one query": {"queries": Extent.of(1)},
}
SQUARE = (12, 64, 72, 96, 100, 112, 192, 256, 264, 512)
TALL = ((128, 64), (192, 128), (64, 512), (60, 64), (64, 60))
HEADS = {
    **{f"d{d}": {"head_dim": d, "v_head_dim": d} for d in SQUARE},
    **{f"d{d} {dv}": {"head_dim": d, "v_head_dim": dv} for d, dv in TALL},
    **{f"{n} heads": {"q_heads": n} for n in (24, 136)},
}
LATENTS = {
    "d320 256": {"head_dim": 320, "v_head_dim": 256},
    "rope 32": {"head_dim": 544, "rope_dim": 32},
    **{f"{n} heads": {"q_heads": n} for n in (8, 20, 96, 192)},
}
PAGES: dict[str, dict[str, Any]] = {
    **{f"page {n}": {"page_size": n} for n in (1, 8, 24, 32, 48, 128)},
    **{f"{n} queries": {"queries": Extent.of(n)} for n in (2, 9)},
    **{f"{plan} plan": {"plan": plan} for plan in ("none", "host", "device")},
    "gaps": {"pages_packed": False},
    "gaps of no row": {"pages_in_rows": False},
    "unlike pages": {"pages_alike": False},
}
OVER_PAGES = (*LATENT, "paged_attention")
ATTENTION = (*NARROWED, *LATENT)


def changes(op: str) -> dict[str, dict[str, Any]]:
    """One fact of a problem after another, by a name, of those that an op has."""
    kinds: list[dict[str, dict[str, Any]]] = [
        ANY,
        LATENTS if op in LATENT else HEADS,
        GRADIENT if op in GRADIENTS else FORWARD,
    ]
    kinds += [PAGES] * (op in OVER_PAGES) + [ROWS] * op.startswith("attention")
    return {name: change for kind in kinds for name, change in kind.items()}


def usual_problem(kernel: Kernel) -> Problem:
    """A call in bfloat16 that every kernel takes: a decode step over pages, or few queries and
    keys."""
    few = {n: Extent.of(9) for n in ("queries", "context")}
    facts: dict[str, Any] = {"dtype": BF16, "kv_dtype": BF16, "q_heads": 32, "kv_heads": 8}
    facts |= {"head_dim": 128, "v_head_dim": 128, "causal": kernel.op != "sparse_mla_attention"}
    facts |= {"tokens": Extent.of(64), "batch": Extent.of(8), "sizes_equal": True, **few}
    facts |= {"grad": kernel.op in GRADIENTS}
    if kernel.op in OVER_PAGES:
        facts |= {"page_size": 64, "queries": Extent.of(1), "context": Extent.of(4096)}
    if kernel.op in (*LATENT, "rope_quantize_latent"):
        facts |= {"q_heads": 64, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "rope_dim": 64}
    if kernel.name == "flashmla_fp8":
        facts |= FLOAT8
    return serviced(kernel, Problem.of(kernel.op, VENDORS[kernel.name].target, **facts))


EIGHTS = ("d64", "d72", "d96", "d112", "d192", "d256")
COUNTS = ("24 heads", "136 heads")
WINDOWS = ("window", "window of all", "right window")
OF_SINKS = ("sinks", "wide sinks")
OF_LSE = ("lse", "sinks lse", "wide sinks lse")
SHAPES = ("more keys", "one query")
FEW, MANY = ("2 queries",), ("2 queries", "9 queries")
ANY_PAGE = ("page 1", "page 8", "page 24", "page 32", "page 48", "page 128")
ANY_PLAN = ("none plan", "host plan", "device plan")
LAID = ("gaps", "gaps of no row", "unlike pages")
OVER = {*ANY_PAGE, *MANY, *ANY_PLAN, *LAID}
FEW_HEADS = ("8 heads", "20 heads", "96 heads")
OF_FLASHMLA = {*FEW_HEADS, "192 heads", *FEW, *ANY_PLAN, *LAID, "lse"}
SM80, SM90, SM100 = (80, 89, 90, 100, 103, 120), (90,), (100, 103)
FLASHINFER = {
    "float16",
    "float8 keys",
    "float8 keys by head",
    *FEW_HEADS,
    "192 heads",
    *(OVER - {"none plan", "device plan"}),
    "lse",
}

TAKES: dict[str, tuple[tuple[int, ...], set[str]]] = {
    "aten_flash": (SM80, {"float16", *WINDOWS, "strides", *EIGHTS, *COUNTS, "lse", *SHAPES}),
    "cudnn": (SM80, {"float16", *EIGHTS, "d128 64", "d192 128", *COUNTS, "lse"}),
    "mem_efficient": (
        SM80,
        {
            "float16",
            "float32",
            "mask",
            "mask_grad",
            *WINDOWS,
            "chunk",
            "chunk of all",
            *EIGHTS,
            "d264",
            "d512",
            "d128 64",
            "d192 128",
            "d64 512",
            *COUNTS,
            "lse",
            *SHAPES,
        },
    ),
    "flex": (
        (75, *SM80),
        {
            "float16",
            "float32",
            "mask",
            *WINDOWS,
            "softcap",
            "chunk",
            "chunk of all",
            *OF_SINKS,
            "strides",
            *EIGHTS,
            "d100",
            "d60 64",
            "d64 60",
            "d128 64",
            "d192 128",
            "lse_grad",
            "range",
            *SHAPES,
        },
    ),
    "fa3": (
        (80, 89, 90),
        {
            "float16",
            "float8",
            *WINDOWS,
            "softcap",
            "chunk",
            *OF_SINKS,
            *EIGHTS,
            "d192 128",
            "d64 512",
            *COUNTS,
            "lse",
            "sinks lse",
            "range",
            *SHAPES,
            *OVER,
        },
    ),
    "fa3 mla_attention": (
        SM90,
        {
            "float16",
            "window",
            "window of all",
            "softcap",
            *OF_SINKS,
            *FEW_HEADS,
            "192 heads",
            *OVER,
            "lse",
            "sinks lse",
        },
    ),
    "fa4": (
        (90, *SM100),
        {
            "float16",
            *WINDOWS,
            "softcap",
            *OF_SINKS,
            *EIGHTS,
            "d128 64",
            "d192 128",
            *COUNTS,
            *OF_LSE,
            *SHAPES,
            *(OVER - {"page 128"}),
        },
    ),
    "fa4 gradient": (
        (90, *SM100),
        {
            "float16",
            *WINDOWS,
            "softcap",
            *OF_SINKS,
            "d64",
            "d96",
            "d192",
            "d256",
            *COUNTS,
            "lse_grad",
            *SHAPES,
        },
    ),
    "flashinfer": (
        SM80,
        {
            "float16",
            "window",
            "window of all",
            "softcap",
            *OF_SINKS,
            "d64",
            "d256",
            "d192 128",
            *COUNTS,
            *OF_LSE,
            *ANY_PAGE,
            *MANY,
            "host plan",
            *LAID[:2],
        },
    ),
    "xqa": (
        (90, *SM100, 120),
        {
            "float16",
            "float8 keys",
            *WINDOWS,
            *OF_SINKS,
            "d64",
            "d256",
            "24 heads",
            "page 32",
            "page 128",
            "none plan",
            "device plan",
            *LAID[:2],
        },
    ),
    "trtllm": (
        SM100,
        {
            "float16",
            "float8 keys",
            "window",
            *OF_SINKS,
            "d64",
            "d256",
            *COUNTS,
            "page 32",
            "page 128",
            *MANY,
            "none plan",
            "device plan",
            *LAID[:2],
            "lse",
        },
    ),
    "trtllm varlen_attention": (SM100, {"float16", "window", "d256", "d192 128", *COUNTS, "lse"}),
    "flashinfer_mla_fa2": (SM80, FLASHINFER),
    "flashinfer_mla_fa3": (SM90, FLASHINFER),
    "trtllm_mla": (
        SM100,
        {
            "float8",
            "scales",
            *OF_SINKS,
            "8 heads",
            "20 heads",
            "page 32",
            *FEW,
            "none plan",
            "device plan",
            *LAID[1:],
            "lse",
        },
    ),
    "cutlass_mla": (
        (100,),
        {
            "float16",
            *FEW_HEADS,
            "page 1",
            "page 8",
            "page 32",
            "page 128",
            *FEW,
            *ANY_PLAN,
            *LAID[1:],
        },
    ),
    "flashmla": (SM90, {"float16", *OF_FLASHMLA}),
    "flashmla sparse_mla_attention": (
        (90, 100),
        {
            *OF_SINKS,
            *FEW_HEADS,
            *(OVER - {"gaps of no row"}),
            *OF_LSE,
        },
    ),
    "flashmla_fp8": (
        SM90,
        {
            "float8",
            "float8 keys",
            "float8 keys by head",
            "scales",
            *OF_FLASHMLA,
        },
    ),
}
TAKES["flex varlen_attention_backward"] = TAKES["flex"][0], TAKES["flex"][1] - {"mask"}
"""By kernel, and of one op where it differs: architectures and changes taken, beside seeing all
keys."""


def taken_by(kernel: Kernel) -> tuple[tuple[int, ...], set[str]]:
    kind = "gradient" if kernel.op in GRADIENTS else "forward"
    keys = (f"{kernel.name} {kernel.op}", f"{kernel.name} {kind}", kernel.name)
    return next(TAKES[key] for key in keys if key in TAKES)


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.op in ATTENTION], ids=named)
def test_what_is_refused(kernel: Kernel) -> None:
    """Every change of a usual problem is taken, or refused by the name of what was changed."""
    problem, (archs, names) = usual_problem(kernel), taken_by(kernel)
    assert not kernel.refusals(problem)
    on = {arch: replace(problem, target=VENDORS[kernel.name].on(arch)) for arch in (75, *SM80)}
    on_cpu = replace(problem, target=Target("cpu", 0, VENDORS[kernel.name].packages))
    of_a_cpu_too = kernel.name == "aten_flash" and kernel.op.startswith("attention")
    assert bool(kernel.refusals(on_cpu)) is not of_a_cpu_too
    assert {arch for arch, other in on.items() if not kernel.refusals(other)} == {*archs}
    made = {name: altered(problem, **change) for name, change in changes(kernel.op).items()}
    refused = {name: kernel.refusals(other) for name, other in made.items()}
    assert {name for name, why in refused.items() if not why} == (names | {"all keys"}) & {*made}
    for name, found in refused.items():
        changed = {*changes(kernel.op)[name]} | {"windowed", "group_size"}
        assert all(changed & {*r.field.split(", ")} for r in found), found


FEWER_KEYS = {
    "causal": False,
    "sizes_equal": False,
    "queries": Extent.of(130),
    "context": Extent.of(70),
}
RULED: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    *(
        (name, "attention", dict.fromkeys(("q_heads", "kv_heads"), 65_536), "q_heads")
        for name in ("aten_flash", "flex", "mem_efficient")
    ),
    *(
        ("aten_flash", "attention", FEWER_KEYS | {"window": window}, "window")
        for window in ((33, -1), (-1, 8))
    ),
    ("cudnn", "attention", {"arch": 100, "head_dim": 192}, "head_dim, v_head_dim"),
    ("cudnn", "attention_backward", {"v_head_dim": 4}, "v_head_dim"),
    ("fa3", "paged_attention", FLOAT8 | {"kv_dtype": torch.int8}, "kv_dtype"),
    ("fa3", "paged_attention", FLOAT8 | {"head_dim": 72, "v_head_dim": 72}, "head_dim"),
    ("fa3", "paged_attention", FLOAT8 | {"head_dim": 192}, "v_head_dim"),
    ("fa3", "paged_attention", FLOAT8 | {"arch": 80}, "dtype"),
    ("fa3", "paged_attention", FLOAT8 | SINKS, "dtype"),
    ("fa3", "attention", {"attention_chunk": 64, "kv_range": True}, "kv_range"),
    ("fa3", "mla_attention", SINKS | {"q_heads": 128}, "q_heads=128 (wants <= 64 (sinks))"),
    (
        "fa3",
        "mla_attention",
        WIDE_SINKS | LSE,
        "sinks_dtype=float32 (wants bfloat16 (lse is exact to float32))",
    ),
    ("fa4", "paged_attention", {"arch": 100, "head_dim": 192, "v_head_dim": 192}, "head_dim"),
    ("fa4", "paged_attention", {"arch": 100, "head_dim": 256, "v_head_dim": 256}, ""),
    ("fa4", "paged_attention", FLOAT8 | {"arch": 100}, ""),
    (
        "fa4",
        "paged_attention",
        FLOAT8 | {"arch": 100, "head_dim": 72, "v_head_dim": 72},
        "head_dim",
    ),
    (
        "fa4",
        "attention_backward",
        SINKS | {"arch": 100, "head_dim": 256, "v_head_dim": 256},
        "head_dim",
    ),
    (
        "fa4",
        "varlen_attention_backward",
        {"arch": 100, "head_dim": 192, "v_head_dim": 192},
        "v_head_dim",
    ),
    ("flashinfer", "paged_attention", SINKS | {"softcap": True}, "softcap=True (wants no (sinks))"),
    (
        "flashinfer_mla_fa3",
        "mla_attention",
        ANY["float8 keys"] | {"dtype": F16},
        "kv_dtype=float8_e4m3fn (wants the query's dtype",
    ),
    (
        "flashinfer_mla_fa2",
        "mla_attention",
        ANY["float8 keys"] | {"arch": 100},
        "kv_dtype=float8_e4m3fn (wants the query's dtype",
    ),
    (
        "flashinfer_mla_fa3",
        "mla_attention",
        ANY["float8 keys"] | LSE,
        "lse=True (wants no (over float8 latents))",
    ),
    *(
        (
            "flashinfer_mla_fa3",
            "mla_attention",
            {"q_heads": n, "queries": Extent.of(9)},
            f"q_heads={n} (wants a divisor of 64, or 128",
        )
        for n in (3, 20, 24, 96, 192, 256)
    ),
    (
        "flashmla_fp8",
        "mla_attention",
        {"tokens": Extent.of(4100)},
        "tokens=4097..8192 (wants <= 4095)",
    ),
    (
        "flashmla",
        "sparse_mla_attention",
        {"dtype": F16, "kv_dtype": torch.uint8},
        "dtype=float16 (wants bfloat16)",
    ),
    (
        "trtllm",
        "paged_attention",
        ANY["float8 keys"] | {"dtype": F16},
        "kv_dtype=float8_e4m3fn (wants the query's, or",
    ),
    (
        "trtllm",
        "paged_attention",
        ANY["float8 keys"] | {"queries": Extent.of(9)},
        "queries=9..16 (wants <= 8 and causal",
    ),
    (
        "trtllm",
        "paged_attention",
        {"causal": False, "window": (5, -1)},
        "window=(5, -1) (wants none (but with causal))",
    ),
    (
        "trtllm",
        "varlen_attention",
        {"head_dim": 64},
        "head_dim, v_head_dim=(64, 128) (wants (192, 128)",
    ),
    ("trtllm_mla", "mla_attention", SINKS | LSE, "lse=True (wants no (with sinks))"),
    *(
        ("flashinfer_rope", "rope_quantize_latent", change, want)
        for change, want in (
            (
                {"arch": 80},
                "target=sm80 (wants sm89 | sm90 | sm100 | sm103 | sm110 | sm120 | sm121)",
            ),
            ({"dtype": F32}, "dtype=float32 (wants float16 | bfloat16)"),
            ({"rope_dim": 16}, "rope_dim=16 (wants a multiple of 32)"),
            ({"v_head_dim": 24}, "v_head_dim=24 (wants a multiple of 16)"),
            ({"q_heads": 7281}, "q_heads=7281 (wants <= 7280 of 512 + 64 numbers each)"),
            ({"last_dim_contiguous": False}, "last_dim_contiguous=False (wants True)"),
        )
    ),
    *(
        ("sgl_sparse", "vertical_slash_attention", change, want)
        for change, want in (
            ({"head_dim": 64, "v_head_dim": 64}, "head_dim"),
            ({"v_head_dim": 64}, "v_head_dim"),
            (ANY["float32"], "dtype"),
            ({"arch": 75}, "target"),
            ({"arch": 100}, "target"),
            (ANY["strides"], "last_dim_contiguous"),
            ({}, ""),
        )
    ),
)
"""Kernel, op, change, and how the refusal begins; "": taken. What rules of several facts say, and
in which words."""


@pytest.mark.parametrize(("name", "op", "change", "want"), RULED)
def test_what_a_rule_of_several_facts_says(
    name: str, op: str, change: dict[str, Any], want: str
) -> None:
    kernel = kernels_of(op)[name]
    arch = change.get("arch", VENDORS[name].arch)
    problem = altered(usual_problem(kernel), **{n: x for n, x in change.items() if n != "arch"})
    found = list(map(str, kernel.refusals(replace(problem, target=VENDORS[name].on(arch)))))
    assert any(text.startswith(want) for text in found) if want else not found, found


@pytest.mark.parametrize("kernel", [k for k in KERNELS if VENDORS[k.name].packages], ids=named)
def test_an_absent_package_is_named(kernel: Kernel) -> None:
    vendor = VENDORS[kernel.name]
    assert f"{vendor.packages[0]} missing" in str(
        kernel.absences(Target("cuda", vendor.arch, assume=()))[0]
    )
    assert not kernel.absences(vendor.target)
