"""Every family by every tier, and every way to generate: tokens, streams and random numbers are
those of a twin that is not patched, and the report says which tier ran."""

import copy
import functools
import random
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers import GenerationConfig

import attnops
from attnops.core.errors import NotCapturable, PatchError
from attnops.graphs.per_layer import Regions
from attnops.hf import tiny
from attnops.hf.cache.names import argument, cache_in
from attnops.hf.steps import prompt
from tests.hf.decoding import ENDS, OPTIONS, TIERS, Streamer, asked, captures
from tests.hf.helpers import DECODERS, LATENT, left_padded, tokens
from tests.hf.kinds import attending


def outcome(model, ids, streams=False, seed=7, **given):
    """What generate() gives and streams, and the state in which it leaves random numbers."""
    streamer = Streamer() if streams else None
    torch.manual_seed(seed)
    out = model.generate(ids, streamer=streamer, **given)
    found = getattr(out, "sequences", out).tolist()
    return found, streams and streamer.got, torch.get_rng_state().tolist()


# Families -----------------------------------------------------------------------------------------

RANDOM = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma2",
    "gemma3",
    "mistral",
    "phi3",
    "olmo2",
    "granite",
    "glm4",
    "cohere2",
    "gpt_neox",
    "minicpm3",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_5",
    "qwen3_next",
)
"""Families of random calls, with sliding windows, latents, mixtures and states among them."""

COMPILED = RANDOM[:-2]
"""Of these, those whose layers may be compiled: no others have states."""

OWN_PROMPTS = ("deepseek_v3", "mixtral", "qwen3_moe", "gpt_oss", "qwen3_next")
"""Of these, whose prompts are never captured in float32."""

WITHOUT: tuple[str, ...] = ("kimi_linear", "doge", "llama4")
WITHOUT += ("longcat_flash", "gpt2", "opt")
"""Families whose steps have no graphs: their layers have states that move, pages do not serve them,
or their code waits for the device."""

# Rows, length of the prompt, new tokens: fewer rows than before, rows that nobody has, longer
# texts, pages that are made anew. The pages of the first recorded call serve all.
SIZES = [(3, 20, 3), (3, 18, 2), (2, 14, 3), (2, 13, 1), (1, 18, 1), (3, 20, 3)]
CALLS = {
    "breakable": [(1, 14, 4), (3, 14, 6), (2, 14, 6), (1, 20, 6), (5, 9, 5), (2, 14, 6)],
    "piecewise": [(2, 14, 4), (3, 14, 4), (2, 60, 4), (5, 9, 4)],
    "recorded": [(4, 50, 4), *SIZES],
    "auto": [(1, 9, 4), (3, 14, 6), (4, 9, 5), (2, 20, 4)],
}
PROMPTS = ["", "", "captured", "", "captured", "captured", "captured"]
"""How those of the recorded calls run: in graphs from the second of a size on."""

ENDING = {"eos_token_id": ENDS, "pad_token_id": 1}
SAMPLED: dict[str, Any] = {**OPTIONS["all"], **ENDING, "min_new_tokens": None}
KINDS: list[dict[str, Any]] = [{}, {"streams": True}, SAMPLED]

FAMILIES = [
    *((name, tier) for name in (*DECODERS, "llava") for tier in ("recorded", "breakable")),
    ("llama", "auto"),
    *(pytest.param(name, "auto", marks=pytest.mark.full) for name in (*COMPILED[1:], "starcoder2")),
    *(pytest.param(name, "piecewise", marks=pytest.mark.full) for name in ("llama", "gpt_oss")),
]


def calls_of(name, tier):
    """Of a family: rows, lengths and numbers of tokens change from call to call."""
    draw = random.Random(f"{name} {tier}").randint
    count = 8 if (tier == "recorded" and name in RANDOM) else 0
    some = [(draw(1, 4), draw(5, 50), draw(1, 4)) for _ in range(count)]
    return CALLS[tier] + some


@pytest.fixture
def bounds(monkeypatch, request):
    """Sizes of prompts in graphs, and small pages; no compiler, where layers are recorded."""
    monkeypatch.setattr(prompt, "CAPTURED", (32, 64, 128, 256))

    def compiles(*args, **kwargs):
        raise AssertionError("layers are compiled")

    tier = request.getfixturevalue("tier")
    if tier == "recorded":
        monkeypatch.setattr(Regions, "_traced", compiles)
    if tier != "auto":
        request.getfixturevalue("small_pages")


def steady(model, twin, handle):
    """Whether calls of each kind capture no more after the second."""
    ids, given = asked(2, 6, 8)
    made = []
    for seed in range(3):
        for kind in KINDS:
            got, want = (
                outcome(each, ids, seed=seed, **{**given, **kind}) for each in (model, twin)
            )
            assert got == want
        made.append(captures(handle))
    return made[1] == made[2]


@pytest.mark.sweep(9)
@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize(("name", "tier"), FAMILIES)
def test_families(name, tier):
    """Greedy, streamed and sampled in turn, rows with padding on the left."""
    model = tiny.model(name)
    twin, took = copy.deepcopy(model), []
    ids, given = asked(1, 6, 3)
    if tier == "breakable" and name in WITHOUT:
        refused = pytest.raises((PatchError, NotCapturable))
        with refused, attnops.patch(model, **TIERS[tier]()):
            model.generate(ids, **given)
        return
    with attnops.patch(model, **TIERS[tier]()) as handle:
        assert "forward" not in vars(model) or "cache" in TIERS[tier](), "the first call chooses"
        for number, call in enumerate(calls_of(name, tier)):
            ids, given = asked(*call)
            # Sampled texts end early, and so many steps in all are compiled.
            kinds = KINDS[:2] if tier == "auto" else KINDS
            given |= kinds[number % len(kinds)] | {"seed": number}
            assert outcome(model, ids, **given) == outcome(twin, ids, **given), call
            took.append(handle.took)
        assert steady(model, twin, handle) and "captured anew" not in str(handle.report())
        check(name, tier, handle, took)
    assert handle.graphs is None and "forward" not in vars(model)
    assert outcome(model, ids, **given) == outcome(twin, ids, **given)


def check(name, tier, handle, took):
    """The tier that each call took. handle: of the patch that served them."""
    stepped = [each for each in took if each.decode]
    if name in WITHOUT:
        assert all(each.decode == "hf" and each.why for each in stepped), took
        return
    modes = [each.decode for each in stepped]
    if tier == "auto":
        assert modes == ["breakable", "breakable", "piecewise", "piecewise"]
    else:
        assert set(modes) == {"piecewise" if tier == "piecewise" else "breakable"}
    assert all((each.cache, each.why) == ("paged", "") for each in took) and not handle.plain_steps
    # They prepare their inputs by code of their own.
    assert all((each.loop != "") is (name in ("phi3", "phimoe")) for each in stepped), took
    assert "CUDA graphs" in str(handle.report())
    assert tier == "auto" or {*handle.graphs.report().modes.values()} == {"whole"}
    prompts = [each.prompt for each in took]
    if tier == "recorded" and name in OWN_PROMPTS:
        assert not any(prompts)
    elif tier == "recorded" and name in RANDOM:
        assert prompts[: len(PROMPTS)] == PROMPTS, handle.report()
        assert "ran through captured layers, without a compiler" in str(handle.report())


# Ways to generate ---------------------------------------------------------------------------------


class Way(NamedTuple):
    """given: options of generate(), and the number of rows. Why the call is not served as others
    are: loop, transformers' own chooses its tokens; steps, they have no graphs; pages, it has
    none."""

    given: dict[str, Any]
    loop: str = ""
    steps: str = ""
    pages: str = ""


def halves(input_ids, scores):
    return scores / 2


def ends(input_ids, scores, **_):
    return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 64)


def by_own_loop(model, input_ids, generation_config, **given):
    cache = cache_in(given)
    cache.batch_repeat_interleave(1)
    for _ in range(generation_config.max_new_tokens):
        seen = cache.get_seq_length()
        logits = model(input_ids[:, seen:], **argument(model, cache)).logits
        input_ids = torch.cat([input_ids, logits[:, -1:].argmax(-1)], 1)
    return input_ids


def echoes(self, input_ids, **_):
    return input_ids


RETURNED = {"return_dict_in_generate": True}
OF_THE_NEW = transformers.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=9)
BEAMS = {"pages": "beam search"}
WAYS = {
    **{name: Way(given) for name, given in OPTIONS.items()},
    **{f"{name}, ends": Way({**given, **ENDING}) for name, given in OPTIONS.items()},
    "streams": Way({"streams": True}),
    "streams that end": Way({"streams": True, **ENDING}),
    "streams of one row": Way({"streams": True, **ENDING, "rows": 1}),
    "streams of one token": Way({"streams": True, "max_new_tokens": 1}),
    "chunks": Way({"prefill_chunk_size": 4}),
    "long chunks": Way({"prefill_chunk_size": 40}),
    "samples": Way({"num_return_sequences": 2, "do_sample": True}),
    "lookup": Way({"prompt_lookup_num_tokens": 3, "rows": 1}),
    "long lookup": Way({"prompt_lookup_num_tokens": 50, "rows": 1}),
    "beams": Way({"num_beams": 3}, **BEAMS),
    "beams' samples": Way({"num_beams": 2, "num_return_sequences": 2}, **BEAMS),
    "beams of a config": Way({"generation_config": GenerationConfig(num_beams=2)}, **BEAMS),
    "no cache": Way({"use_cache": False}, pages="use_cache is False"),
    "static": Way({"cache_implementation": "static"}, pages="asks for the cache 'static'"),
    "dynamic": Way({"cache_implementation": "dynamic"}, pages="asks for the cache 'dynamic'"),
    "processor": Way({"logits_processor": [halves]}, "function is code of its own"),
    "criterion": Way({"stopping_criteria": [ends]}, "function is code"),
    "n-grams": Way({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor is code"),
    "of the new": Way({"logits_processor": [OF_THE_NEW]}, "leaves the prompt out"),
    "scores": Way({"output_scores": True, **RETURNED}, "output_scores=True"),
    "logits": Way({"output_logits": True, **RETURNED}, "output_logits=True"),
    "states": Way({"output_hidden_states": True, **RETURNED}, steps="output_hidden_states=True"),
    "another loop": Way({"custom_generate": by_own_loop}, pages="custom_generate"),
    "no loop": Way({"custom_generate": echoes}, "custom_generate="),
    "long": Way({"max_new_tokens": 249, **ENDING}, "longer than the model's positions"),
}
SERVED = [
    ("dense", "llama"),
    ("compact", "llama"),
    ("pages", "gpt_oss"),
    ("pages", "deepseek_v3"),
    ("breakable", "llama"),
    ("recorded", "llama"),
]


def is_case(tier, way):
    """By the two loops of the caller's own: the one asks for a cache of transformers', the other
    for nothing. Calls that are recorded as others are among the families."""
    asked = WAYS[way]
    if "custom_generate" in asked.given:
        return (tier == "breakable") is (way == "no loop") and tier != "pages"
    return tier != "recorded" or asked.steps or asked.pages


def swept(tier, way):
    """`make test` runs each way by one tier, but of the options of the choice of tokens two."""
    options = way in OPTIONS or way.endswith(", ends")
    return tier != "breakable" or (options and way not in ("penalty, ends", "all, ends"))


CASES = [
    pytest.param(*case, way, marks=[pytest.mark.sweep(9)] if swept(case[0], way) else [])
    for case in SERVED
    for way in WAYS
    if is_case(case[0], way)
]


def generated(model, streams=False, rows=3, **given):
    """Of a text longer than windows, with padding on the left."""
    more = {"attention_mask": left_padded(rows, 60), "max_new_tokens": 12, "do_sample": False}
    return outcome(model, tokens(rows, 60), streams, **{**more, **given})


@functools.cache
def wanted(name, way, rows=3):
    return generated(tiny.model(name), **{"rows": rows, **WAYS[way].given})


@pytest.mark.parametrize(("tier", "name", "way"), CASES)
def test_ways_to_generate(tier, name, way, small_pages):
    model, asked, want = tiny.model(name), WAYS[way], wanted(name, way)
    reasons = [each for each in asked[1:] if each]
    warns = asked.pages == "beam search" and tier in ("pages", "breakable")
    told = pytest.warns(UserWarning, match=asked.pages) if warns else nullcontext()
    with attnops.patch(model, **TIERS[tier]()) as handle, attending(name) as calls:
        with told:
            assert generated(model, **asked.given) == want
        took = handle.took
        assert way != "all, ends" or len(want[0][0]) < 72, "rows end before the length does"
        if tier in ("dense", "compact", "pages"):
            cache = "paged" if tier == "pages" and not asked.pages else "hf"
            assert (took.cache, took.decode) == (cache, "hf")
            assert bool(calls.first) == bool(small_pages) == (cache == "paged")
            steps = len(want[0][0]) > 61  # the first token may end the text
            assert bool(calls.later) == (cache == "paged" and steps)
            assert all(p.windows == ((0,) if name in LATENT else (8, 0)) for p in small_pages)
            return
        if not reasons:
            for rows in (1, 2, 3, 4, 3):
                given = {"rows": rows, **asked.given}
                assert generated(model, **given) == wanted(name, way, rows)
            assert (took.cache, took.why, took.loop, handle.plain_steps) == ("paged", "", "", 0)
        assert not reasons or any(each in took.loop + took.why for each in reasons), took
        if tier == "recorded" and (asked.steps or asked.pages):
            assert (took.cache, took.decode) == ("hf", "hf") and reasons[-1] in took.why
        assert not reasons or not handle._paged.loop._idle
        assert generated(model) == wanted(name, "greedy")
        took = handle.took
        assert (took.cache, took.why, took.loop) == ("paged", "", "") and took.decode != "hf"
