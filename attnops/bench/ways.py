"""The ways to run a model, and the models with their points: one table each, by suite.

The modules of the suites say what the names of the ways mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from attnops.bench import Point, Setup
from attnops.bench.rows import Row
from attnops.core.errors import InvalidInput
from attnops.hf import Decode
from attnops.hf.steps.speculate import LOOKUP
from attnops.ops.linear.record import LINEAR


@dataclass(frozen=True)
class How:
    """How a way runs a model.

    patch: options of `attnops.patch`; None: not patched. packed: with packed experts. compiled:
    options of torch.compile; None is eager. policy: of `attnops.use`. given: to `generate()`.
    attention: that of transformers.
    liger: with Liger's modules. torch: without packages that transformers calls in place of its own
    functions. device: where it runs, "" everywhere. asked: only if `--ways` names
    it.
    """

    patch: Row | None = None
    compiled: Row | None = None
    policy: Row = field(default_factory=dict)
    packed: bool = False
    given: Row = field(default_factory=dict)
    attention: str = ""
    liger: bool = False
    torch: bool = False
    device: str = ""
    asked: bool = False


HF, PAGED, GRAPHS = {"cache": "hf"}, {"cache": "paged"}, {"mode": "reduce-overhead"}
TUNED: Row = {
    "options": {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
}  # the second one is that of Decode(inner="tuned")
STOCK: Row = {"kernel": {LINEAR.name: "aten"}}
APART: Row = {"deny": ("decode_attention:triton",)}
PIECES = How({**PAGED, "decode": Decode("piecewise")}, device="cuda")
STEPS = {
    "hf_eager": How(),
    "hf_compiled": How(compiled=GRAPHS),
    "attnops_eager": How(HF),
    "attnops_hf": How(HF, GRAPHS),
    "attnops_paged": How(PAGED, GRAPHS),
    "attnops_piecewise": PIECES,
    "attnops_tuned": How(
        {**PAGED, "decode": Decode("piecewise", inner="tuned")}, device="cuda", asked=True
    ),
    "attnops_apart": replace(PIECES, policy=STOCK | APART),
    "attnops_linears": replace(PIECES, policy=APART, asked=True),
    "attnops_one_launch": replace(PIECES, policy=STOCK, asked=True),
    "attnops_mxfp4": replace(PIECES, packed=True),
    "attnops_breakable": How({**PAGED, "decode": Decode("breakable")}, device="cuda"),
    "hf_eager_torch": How(torch=True, device="cuda", asked=True),
    "hf_tuned": How(compiled=TUNED, device="cuda", asked=True),
}
CALLS = {
    "hf": How(),
    "hf_static": How(given={"cache_implementation": "static"}),
    "attnops": How({}),
    "attnops_hf": How({**HF, "decode": "hf"}),
    "attnops_paged": How({**PAGED, "decode": "hf"}, device="cpu"),
    **{
        f"attnops_{mode}": How({**PAGED, "decode": mode}, device="cuda")
        for mode in ("piecewise", "breakable")
    },
    "hf_again": How(asked=True),
    "hf_torch": How(torch=True, device="cuda", asked=True),
}
HYBRIDS = {
    **{n: STEPS[n] for n in ("hf_eager", "attnops_eager", "attnops_breakable", "hf_eager_torch")},
    **{n: CALLS[n] for n in ("hf", "attnops", "hf_torch")},
}
FLEX = How(attention="flex_attention", device="cuda")
OFTEN = 0, 80, 100
"""Percent of the drafts that are right, in the suite `speculate`."""
MTPS = {"mtp1": 1, "mtp3": 3}
"""Of its MTP layers the tokens that they draft, by the kind of way."""
NODES = 8, 16, 32, 64
"""Of its trees."""
NGRAM: Row = {"max_matching_ngram_size": 3}  # that of `speculate="lookup"`
WAYS: dict[str, dict[str, How]] = {
    "decode": STEPS,
    "prefill": {
        "hf_eager": How(),
        "hf_compiled": How(compiled={}),
        "attnops_eager": How(HF),
        "attnops_compiled": How(HF, {}),
        "attnops_paged": How(
            {**PAGED, "decode": Decode("breakable", compile_after=0)}, device="cuda"
        ),
        "attnops_prompt": How(
            {**PAGED, "decode": Decode("piecewise", compile_after=0)}, device="cuda"
        ),
    },
    # On a GPU Inductor's CUDA graphs over transformers' static cache and over pages, and those of
    # `decode=`.
    "compile": {
        "hf_compiled": STEPS["hf_compiled"],
        "attnops_hf": replace(STEPS["attnops_hf"], device="cpu"),
        "attnops_paged": STEPS["attnops_paged"],
        "attnops_piecewise": PIECES,
    },
    "generate": CALLS,
    "first_token": {name: CALLS[name] for name in ("hf", "hf_static", "attnops", "hf_again")},
    "hybrid": HYBRIDS,
    "speculate": {
        "attnops": How({}),
        **{
            f"attnops_lookup_{tokens}": How({}, given={**NGRAM, LOOKUP: tokens}, device="cuda")
            for tokens in (1, 3, 4, 7)
        },
        **{
            f"attnops_{kind}_{often}": How({}, device="cuda")
            for kind in ("right", "eagle3", "head_tree", "dflash", *MTPS)
            for often in OFTEN
        },
        **{f"attnops_tree_{nodes}": How({}, device="cuda") for nodes in NODES},
        "hf": How(asked=True),
        "hf_lookup": How(given={**NGRAM, LOOKUP: 7}, asked=True),
    },
    "cliffs": {
        "hf": CALLS["hf"],
        "attnops": replace(CALLS["attnops"], device="cuda"),
        **{
            name: replace(CALLS[name], asked=True)
            for name in ("attnops_piecewise", "attnops_breakable")
        },
        "attnops_paged": CALLS["attnops_paged"],
    },
    "training_steps": {
        "hf_sdpa": How(attention="sdpa"),
        "attnops": How({}),
        "hf_flex": FLEX,
        "hf_fa4": replace(FLEX, attention="flash_attention_4"),
        "hf_eager": How(attention="eager"),
        "hf_liger": replace(FLEX, liger=True, asked=True),
        "attnops_liger": How({}, liger=True, device="cuda", asked=True),
        "hf_compiled": replace(FLEX, compiled={}, asked=True),
        "attnops_compiled": How({}, {}, asked=True),
    },
}

Places = Mapping[str, Mapping[str, tuple[Point, ...]]]
"""By size of the run: the models of a suite, and the points of each."""

LLAMA, TOY = "llama-3-8b-shape", (Point(2, 12),)
ONE, EIGHT, MANY, LONG = Point(1, 1024), Point(8, 1024), Point(32, 2048), Point(8, 4096)
PROMPTS = {LLAMA: (Point(1, 512), Point(1, 4096), EIGHT)}
FIRST = tuple(
    Point(*size)
    for size in (
        (1, 128),
        (1, 512),
        (1, 1024),
        (1, 4096),
        (8, 128),
        (8, 512),
        (8, 1024),
        (32, 256),
    )
)
STATES: dict[str, tuple[Point, ...]] = dict.fromkeys(
    ("falcon-h1-7b-shape", "nemotron-h-8b-shape", "qwen3-next-shape"), (ONE, EIGHT)
)
TRAINED = {"llama-3.2-1b-shape": (LONG,), "gpt-oss-20b-shape": (Point(2, 4096), LONG)}
WHOLE: Places = {
    "toy": {"llama": TOY},
    "small": {"llama-small": (Point(1, 128),)},
    "quick": {LLAMA: (ONE, EIGHT)},
    "full": {LLAMA: (ONE, EIGHT)},
}
PLACES: dict[str, Places] = {
    "decode": {
        "toy": {"llama": TOY},
        "small": dict.fromkeys(("llama", "llama-small"), (Point(1, 128), Point(4, 128))),
        "quick": {LLAMA: (ONE, EIGHT)},
        "full": {
            **dict.fromkeys((LLAMA, "qwen3-4b-shape"), (ONE, EIGHT, MANY)),
            **dict.fromkeys(("gpt-oss-20b-shape", "deepseek-v3-shape"), (EIGHT,)),
        },
    },
    "prefill": {
        "toy": {"llama": TOY},
        "small": dict.fromkeys(("llama", "llama-small"), (Point(1, 128), Point(4, 256))),
        "quick": PROMPTS,
        "full": PROMPTS,
    },
    "generate": WHOLE,
    "first_token": {
        "toy": {"llama": TOY},
        "small": {"llama-small": (Point(1, 64), Point(2, 128))},
        "quick": {LLAMA: FIRST},
        "full": dict.fromkeys(
            (
                LLAMA,
                "llama-3.2-1b-shape",
                "qwen3-4b-shape",
                "gemma-3-4b-shape",
                "gpt-oss-20b-shape",
                "qwen3-30b-a3b-shape",
                "deepseek-v3-shape",
                "qwen3-0.6b-shape",
                "mistral-7b-shape",
                "phi-3-mini-shape",
                "olmo2-7b-shape",
                "granite-3-2b-shape",
                "qwen3-next-shape",
            ),
            FIRST,
        ),
    },
    "cliffs": {
        size: {name: points[:1] for name, points in some.items()} for size, some in WHOLE.items()
    },
    "hybrid": {
        "toy": {"qwen3_next": TOY},
        "small": {"qwen3_next": (Point(2, 128),)},
        "quick": STATES,
        "full": STATES,
    },
    "speculate": {
        "toy": {"llama": (Point(2, 72),)},
        "small": {"llama-small": (Point(1, 128),)},
        "quick": {LLAMA: (ONE, EIGHT)},
        "full": {LLAMA: (ONE, EIGHT, Point(32, 1024))},
    },
    "training_steps": {
        "toy": {"llama": TOY, "gpt_oss": TOY},
        "small": {"llama-small": (Point(2, 128),)},
        "quick": TRAINED,
        "full": TRAINED,
    },
}


def here(setup: Setup, suite: str) -> dict[str, How]:
    """A suite's ways on this device."""
    return {name: how for name, how in WAYS[suite].items() if how.device in ("", setup.device.type)}


def chosen(setup: Setup, suite: str, *always: str) -> dict[str, How]:
    """Those of them that run: the ones of `--ways` and `always`, or all that need not be asked
    for."""
    asked = {*always, *setup.ways}
    return {
        name: how
        for name, how in here(setup, suite).items()
        if (name in asked if setup.ways else not how.asked)
    }


def check(setup: Setup, suite: str, everywhere: bool = False) -> None:
    """Raise InvalidInput for a way of `--ways` that the suite does not have here, or anywhere."""
    known = WAYS[suite] if everywhere else here(setup, suite)
    if unknown := [way for way in setup.ways if way not in known]:
        raise InvalidInput("ways", ", ".join(map(repr, unknown)), f"some of {', '.join(known)}")
