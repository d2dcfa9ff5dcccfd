"""Kinds of calls that other projects' tests make and few kernels take, and the kernel that each
gets.

    python docs/generate.py    writes table.json beside this file, and its table in docs/kernels.md

FlashAttention, FlashInfer, FlashMLA, sgl-kernel, vLLM and PyTorch have such calls. A kind is some
calls, made as those of the numerics grid: the op, its features and its sizes. The kernel is chosen
for it anew, for an H100 and an H200 with the packages in PACKAGES; no GPU is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from attnops.core.problem import Target, pretend
from attnops.core.select import Decision, select
from attnops.ops.case_data import Rows
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Case, Features
from attnops.testing.cases import table

FILE = Path(__file__).parent / "table.json"
PACKAGES = ("sgl_kernel", "triton")
"""What is installed there besides torch."""
TARGETS = ("h100", "h200")

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LLAMA = Features(dtype=BF16, head_dim=128, q_heads=8, kv_heads=2, causal=True)
WIDE = replace(LLAMA, head_dim=576, v_head_dim=512)
FLOAT8 = replace(LLAMA, q_dtype=E4M3, kv_dtype=E4M3)
ODD = replace(LLAMA, dtype=F16, head_dim=111, q_heads=6, softcap=15.0, lse=True)
TRAINED = replace(LLAMA, q_heads=4, kv_heads=4, lse=True)
DOUBLE = replace(TRAINED, dtype=F64, head_dim=16)
SPARSE = partial(replace, DEEPSEEK, lse=True)
PAIR, LISTS = {"packed": True}, ((576, 64, 0, 5), 576)
DECODE, PROMPT, DENSE = ((1,) * 8, (400,) * 8, 64), ((300, 40), (300, 400), 16), (2, 300, 300)
PACKED = ((300, 40), (300, 400))


Kinds = Mapping[str, tuple[Case, ...]]


CALLS: Mapping[str, Mapping[str, Rows]] = {
    "sparse_mla_attention": {
        "packed latents, rows between pages": {
            "64 heads, pages of 64": (
                *LISTS,
                (10, 64),
                PAIR,
                {"gap": 1},
                SPARSE(q_heads=64, sinks=F32),
            ),
            "128 heads, pages of 2": (
                *LISTS,
                (300, 2),
                PAIR,
                {"gap": 1},
                SPARSE(q_heads=128, sinks=F32),
            ),
            "lists with lengths": (
                *LISTS,
                (10, 61),
                PAIR,
                {"gap": 1, "lengths": True},
                SPARSE(q_heads=64),
            ),
        },
        "packed latents, pages end to end": {
            "128 heads": (*LISTS, (10, 64), PAIR, SPARSE(q_heads=128, sinks=F32)),
        },
        "latents of bfloat16": {
            "128 heads": (*LISTS, (1, 640), SPARSE(q_heads=128)),
            "rows between pages": (*LISTS, (10, 64), {"gap": 1}, SPARSE(q_heads=64, sinks=F32)),
        },
    },
    "merge_state": {
        "merges of two results, eager": {
            "64 rows": ((64, 8, 128), BF16),
            "613 rows, head dim 48": ((613, 8, 48), F16),
            "8,192 rows": ((8192, 8, 64), BF16),
            "float32": ((256, 8, 32), F32),
        },
    },
    "merge_states": {
        "merges of many results, eager": {
            "2": ((64, 2, 8, 128), BF16),
            "133": ((64, 133, 8, 64), BF16),
            "133 of one token": ((1, 133, 8, 128), F16),
        },
    },
    "paged_attention": {
        "keys of 576, values of 512": {
            "one key head, decode": (*DECODE, replace(WIDE, q_heads=16, kv_heads=1, lse=True)),
            "two key heads, decode": (*DECODE, WIDE),
            "two key heads, prompt": (*PROMPT, replace(WIDE, lse=True)),
            "two key heads, float8 pages": (*DECODE, replace(WIDE, kv_dtype=E4M3)),
        },
        "head dim 512 over pages": {
            "decode": (*DECODE, replace(LLAMA, head_dim=512)),
            "prompt, soft cap": (*PROMPT, replace(LLAMA, head_dim=512, softcap=30.0, lse=True)),
        },
        "float8 pages": {
            "decode": (*DECODE, replace(LLAMA, kv_dtype=E4M3)),
            "float8_e5m2, soft cap": (
                *PROMPT,
                replace(LLAMA, dtype=F16, kv_dtype=E5M2, softcap=30.0),
            ),
        },
        "float8 query over pages": {
            "decode": (*DECODE, FLOAT8),
            "head dim 40": (*DECODE, replace(FLOAT8, head_dim=40)),
            "sinks": (*PROMPT, replace(FLOAT8, head_dim=64, sinks=BF16)),
            "mask": (*PROMPT, replace(FLOAT8, mask="bool")),
            "unlike head dims": (*PROMPT, replace(FLOAT8, head_dim=192, v_head_dim=128)),
        },
        "head dim 40 over pages": {
            "decode": (*DECODE, replace(LLAMA, head_dim=40)),
            "soft cap, sinks": (
                *PROMPT,
                replace(LLAMA, dtype=F16, head_dim=40, softcap=30.0, sinks=F16, lse=True),
            ),
        },
    },
    "varlen_attention": {
        "float8, packed": {
            "query and keys": (*PACKED, FLOAT8),
            "keys alone": (*PACKED, replace(LLAMA, kv_dtype=E4M3)),
            "unlike head dims": (*PACKED, replace(FLOAT8, head_dim=192, v_head_dim=128, lse=True)),
        },
        "mask and soft cap, head dim 256, packed": {
            "with lse": (
                *PACKED,
                replace(LLAMA, head_dim=256, mask="additive", softcap=30.0, lse=True),
            ),
        },
        "head dim 111, groups of three, packed": {
            "soft cap": (*PACKED, ODD),
            "window": (*PACKED, replace(ODD, window=(50, -1), softcap=0.0)),
        },
    },
    "attention": {
        "float8 query with windows": {
            "causal": (*DENSE, replace(FLOAT8, window=(50, -1))),
            "to both sides": (*DENSE, replace(FLOAT8, causal=False, window=(50, 20), lse=True)),
            "head dim 40": (*DENSE, replace(FLOAT8, head_dim=40, window=(50, -1))),
            "keys alone": (*DENSE, replace(LLAMA, kv_dtype=E4M3, window=(50, -1))),
        },
        "head dim 111, groups of three": {
            "soft cap": (*DENSE, ODD),
            "window": (*DENSE, replace(ODD, window=(50, 20), causal=False, softcap=0.0)),
        },
        "head dims 2 and 3, trained": {
            "2": (*DENSE, replace(TRAINED, dtype=F32, head_dim=2)),
            "3": (*DENSE, replace(TRAINED, head_dim=3)),
            "3, mask": (
                *DENSE,
                replace(TRAINED, dtype=F16, head_dim=3, causal=False, mask="additive"),
            ),
        },
        "float64, trained": {
            "causal": (*DENSE, DOUBLE),
        },
    },
    "attention_backward": {
        "gradients of head dims 2 and 3": {
            "2": (2, 30, 30, replace(TRAINED, dtype=F32, head_dim=2, lse=False)),
            "3": (2, 30, 30, replace(TRAINED, head_dim=3, lse=False)),
        },
        "gradients in float64": {
            "causal": (2, 30, 30, replace(DOUBLE, lse=False)),
        },
    },
}
"""By op and kind."""
KINDS: Kinds = {
    kind: table(op, rows) for op, kinds in CALLS.items() for kind, rows in kinds.items()
}

REASONS = {
    "float64, trained": (
        "no vendor has a kernel in float64, and Triton's products of it need a GPU with units for "
        "them. PyTorch's own attention computes it by the same products of torch. Without a "
        "gradient `sdpa` takes float64."
    ),
    "gradients in float64": "as above",
}
"""Why a kind is left to the plain body."""
MOST_LEFT = 5


Chosen = tuple[str, Case, dict[str, Decision]]
"""A kind, a call of it, and the decision by target."""


def decisions(of: Kinds = KINDS) -> Iterator[Chosen]:
    """The decisions about every call."""
    for kind, cases in of.items():
        for case in cases:
            call, found = case.call(), {}
            for name in TARGETS:
                with pretend(Target.parse(name, PACKAGES)):
                    found[name] = select(call.problem)
            yield kind, case, found


def rows(made: Iterable[Chosen] | None = None) -> list[dict[str, str]]:
    """One dict a call: op, kind, case, the features and sizes of its Problem, and the kernel by
    target. made: None decides anew."""
    found = []
    for kind, case, by_target in decisions() if made is None else made:
        problem = next(iter(by_target.values())).problem
        kernels = {name: d.kernel.name if d.kernel else "none" for name, d in by_target.items()}
        found.append(
            {"op": case.op, "kind": kind, "case": case.label, "problem": problem.summary()}
            | kernels
        )
    return found


def left(found: list[dict[str, str]]) -> set[str]:
    """The kinds of which some call gets the plain body, or nothing, on some target."""
    return {row["kind"] for row in found if {row[name] for name in TARGETS} & {"reference", "none"}}


def text(found: list[dict[str, str]]) -> str:
    """The file `table.json`, a line a call."""
    return "[\n" + ",\n".join(f" {json.dumps(row)}" for row in found) + "\n]\n"
