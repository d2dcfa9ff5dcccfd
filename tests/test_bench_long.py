"""Long points of `decode` and `prefill`: steps and chunks after random caches, at a length that is
long for the test."""

import gc
import weakref
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("transformers", reason="the suites measure transformers models")

import transformers

import attnops.bench
import attnops.hf
from attnops.bench import Point, Setup, chunks, decode, first_token, models, random_caches, ways
from attnops.core.kernel import kernels_of
from attnops.graphs import Graphed
from attnops.hf import Decode
from attnops.hf.steps import prompt
from tests.graphs.standin import StandIn
from tests.measuring import by_way, exchange
from tests.test_bench_chunks import TOY, Scores

TWO = replace(TOY, layers=2)
"""A layer alone has no equal one, and is not captured in layers."""
GIB = 1 << 30


@pytest.fixture(autouse=True)
def long(monkeypatch):
    """Points are long from 32 tokens on."""
    monkeypatch.setattr(attnops.bench, "LONG", 32)


@pytest.fixture
def in_graphs(monkeypatch):
    """The way `attnops_prompt` as on a GPU. A function sets the tokens of a chunk."""
    graphs = Decode("piecewise", inner="eager", compile_after=0, graphs=StandIn())
    way = ways.How({**ways.PAGED, "decode": graphs}, device="cpu")
    some = {"hf_eager": ways.How(), "attnops_prompt": way}
    monkeypatch.setitem(ways.WAYS, "prefill", some)

    def chunks_of(tokens):
        monkeypatch.setattr(prompt, "CAPTURED", (tokens,))
        monkeypatch.setattr(prompt, "CHUNK", tokens)
        monkeypatch.setattr(random_caches, "LATER", tokens)

    return chunks_of


def measured(suite, point, setup=TWO):
    run = {"decode": decode.measure, "prefill": decode.prefill}[suite]
    return by_way(run(setup, models.keeper(setup), "llama", point))


@pytest.fixture
def alive(monkeypatch):
    """Of each cache of 40 tokens that is filled, whether an earlier one is still in memory."""
    fill, caches, found = random_caches.fill, [], []

    def counted(cache, model, rows, length, dtype):
        if length == 40:
            found.append(any(each() not in (None, cache) for each in caches))
            caches.append(weakref.ref(cache))
        return fill(cache, model, rows, length, dtype)

    monkeypatch.setattr(random_caches, "fill", counted)
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("suite", "share"), [("decode", "of_bandwidth"), ("prefill", "of_matmul")])
def test_every_way_is_right_at_a_long_point(suite, share, alive):
    """And one is in memory at a time."""
    rows = measured(suite, Point(3, 40))
    assert {"hf_eager", "hf_compiled", "attnops_eager"} < {*rows}
    for row in rows.values():
        assert row["error"] <= row["budget"] < 1e-3
        assert share in row and ("of_hf_eager" in row) is (row["way"] != "hf_eager")
    assert suite == "prefill" or (len(alive) >= 4 and not any(alive))


def test_chunks_over_pages_are_compared_in_their_graphs(in_graphs, monkeypatch):
    """After both random caches."""
    in_graphs(64)
    after, replay = random_caches.logits_after, Graphed._replay
    replayed, within = [], []

    def seen(graphed, entry, *given):
        if within:
            replayed.append((entry.bucket.kind, entry.bucket.tokens))
        return replay(graphed, entry, *given)

    def logits_after(forward, *given):
        within[:] = [True]
        try:
            return after(forward, *given)
        finally:
            within.clear()

    monkeypatch.setattr(Graphed, "_replay", seen)
    monkeypatch.setattr(random_caches, "logits_after", logits_after)
    row = measured("prefill", Point(1, 192))["attnops_prompt"]
    assert row["error"] <= row["budget"] < 1e-3
    assert replayed == [("mixed", 64)] * 2


def no_page(call):
    """The second page of a table stands for the third one, too."""
    table = call.page_table.clone()
    table[:, 2] = table[:, 1]
    return call._replace(page_table=table)


def another_head(call):
    return call._replace(query=call.query.roll(1, 1))


def no_own_token(call):
    """A step reads what was there before it."""
    return call._replace(seq_lens=call.seq_lens - 1)


def wrong_slot(call):
    """A token is written over the one before it."""
    return call._replace(slots=call.slots - 1)


MUTANTS = {"right": lambda call: call, "no_page": no_page, "another_head": another_head}
WRITES = {"wrong_slot": wrong_slot}
OF_STEPS = {"no_own_token": no_own_token, **WRITES}
NOW = {"name": "right"}
"""A call like an earlier one takes the earlier one's kernel, which looks here."""


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("suite", "name"),
    [*product(("decode", "prefill"), MUTANTS), *(("decode", name) for name in OF_STEPS)],
)
def test_what_is_not_read_and_a_wrong_head_have_no_time(suite, name, in_graphs, monkeypatch):
    """In bfloat16, as on a GPU, where one of 64 pages is left out, or one of 4,096 tokens."""
    page, pages = 16, 256 if name in OF_STEPS else 64
    in_graphs(256)
    monkeypatch.setitem(NOW, "name", name)
    monkeypatch.setattr(Setup, "dtype", torch.bfloat16)
    right, patch = kernels_of("paged_attention")["sdpa"].run, attnops.hf.patch
    new_cache, write = attnops.hf.Patched.new_cache, kernels_of("write_kv")["scatter"].run
    reads = MUTANTS | OF_STEPS | dict.fromkeys(WRITES, MUTANTS["right"])
    writes = dict.fromkeys(reads, MUTANTS["right"]) | WRITES
    exchange(monkeypatch, "paged_attention", "sdpa", lambda call: right(reads[NOW["name"]](call)))
    exchange(monkeypatch, "write_kv", "scatter", lambda call: write(writes[NOW["name"]](call)))
    monkeypatch.setattr(attnops.hf, "patch", lambda one, **more: patch(one, kernel="sdpa", **more))
    monkeypatch.setattr(
        attnops.hf.Patched,
        "new_cache",
        lambda handle, *sizes: new_cache(handle, *sizes, page_size=page),
    )
    rows = measured(
        suite, Point(1, page * pages), replace(TWO, ways=("attnops_paged",) * (suite == "decode"))
    )
    ours = next(row for way, row in rows.items() if way != "hf_eager")
    assert "wrong" not in rows["hf_eager"]
    assert ("wrong" in ours) is ("median_us" not in ours) is (name != "right"), ours
    if name != "right":
        assert ours["wrong"].startswith("wrong: off by"), ours


@pytest.mark.parametrize("at_once", [1, 3])
def test_exact_tails_in_chunks_are_those_of_the_whole(at_once, monkeypatch):
    model = models.build(TWO, "llama")
    text = models.tokens(TWO, model, 2, 33)
    want = models.exact_tail(model, text)
    most = at_once * 33 * 2 * model.config.num_attention_heads * 8
    monkeypatch.setattr(chunks, "MOST", most)
    with Scores() as seen:
        got = models.exact_tail(model, text)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert max(seen.bytes) <= most and len(seen.bytes) >= 16 // at_once * 2


def test_a_long_point_needs_two_caches(monkeypatch):
    """Eight requests of 32k tokens fit beside 32 layers of an 8B model into 139 GiB."""
    monkeypatch.setattr(attnops.bench, "LONG", 16384)
    monkeypatch.setattr(models, "free", lambda device: 139 * GIB)
    gpu, name = Setup(torch.device("cuda")), "llama-3-8b-shape"
    for text in ("1x32k", "1x128k", "8x32k"):
        assert models.fitted(gpu, name, Point.parse(text)).num_hidden_layers == 32, text
    assert models.largest([Point(32, 8192), Point(1, 1 << 18)]) == Point(32, 8192)


def test_models_with_windows_compute_their_prompts():
    plain, windows, latents = (
        models.config(TOY, name) for name in ("llama", "gemma3", "deepseek_v3")
    )
    assert random_caches.serve(plain, Point(1, 32)) and not random_caches.serve(plain, Point(4, 31))
    for other in (windows, latents):
        assert not random_caches.serve(other, Point(1, 32))


def test_a_text_beyond_the_limit_is_exact_in_its_last_tokens(monkeypatch):
    model = models.build(TWO, "llama")
    text = models.tokens(TWO, model, 2, 100)
    want = models.exact_of(model, text, 3)
    monkeypatch.setattr(models, "MOST_EXACT", 96)
    monkeypatch.setattr(models, "LAST", 8)
    with Scores() as seen:
        got = models.exact_of(model, text, 3)
    assert got.shape == want.shape and got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not torch.equal(got, want), "the keys of the first tokens are transformers' own"
    assert seen.bytes[-1] == 2 * 4 * 10 * 99 * 8, "of ten queries"


def test_a_text_beyond_the_limit_of_layers_with_states_is_exact(monkeypatch):
    """Their states cannot be made wider half way."""
    model = models.build(replace(TWO, layers=4), "qwen3_next")
    text = models.tokens(TWO, model, 1, 100)
    want = models.exact_of(model, text, 3)
    monkeypatch.setattr(models, "MOST_EXACT", 96)
    torch.testing.assert_close(models.exact_of(model, text, 3), want)


def test_random_lengths_are_those_of_short_points():
    some = replace(TWO, points=(Point(1, 16), Point(1, 64)))
    names = [*first_token.cases(some)]
    assert names == ["llama 1x16", "llama 1x64", "llama 3 lengths up to 16"]
    assert [*first_token.cases(replace(some, points=(Point(1, 64),)))] == ["llama 1x64"]


def test_a_long_first_token_has_its_share():
    row = by_way(first_token.cases(replace(TWO, points=(Point(1, 64),)))["llama 1x64"]())["attnops"]
    assert "of_matmul" in row and row["error"] <= row["budget"]


@pytest.mark.parametrize("length", [128, 4096])
def test_attention_over_random_values_is_as_large_at_any_length(length):
    model = models.build(TWO, "llama")
    cache = transformers.DynamicCache(config=model.config)
    random_caches.fill(cache, model, 1, length, torch.float32)
    keys, values = cache.layers[1].keys, cache.layers[1].values
    out = scaled_dot_product_attention(torch.randn_like(keys), keys, values)
    assert 1 < out.std() / random_caches.VALUES < 3
