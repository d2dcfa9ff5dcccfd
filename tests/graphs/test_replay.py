"""Graphs answer as eager does, whatever batch comes after whatever batch; and the ways graphs go
wrong elsewhere cannot be taken here.

Pages hold NaN until they are written, and so does memory of graphs, so that what is read and should
not be shows.
"""

import random
from dataclasses import replace

import pytest
import torch

import attnops
from attnops.core.errors import BatchTooLarge, InvalidInput, NotCapturable, StaleGraph
from attnops.graphs import Buckets, breakable, piecewise
from attnops.graphs.compile_pieces import inductor
from tests.graphs.helpers import (
    BUCKETS,
    Pair,
    any_mode,
    batches_in_turn,
    both_modes,
    close,
    graphed,
    pools,
    whole_and_split,
)
from tests.graphs.models import BOUNDARY, HIDDEN, VOCAB, decoder, paged_cache


@pytest.mark.sweep(6)
@whole_and_split
@both_modes
def test_changing_batches(mode, kernel):
    pair = Pair(mode, replace(BUCKETS, verify=(3, 5)), kernel=kernel, layers=2)
    pair.agree("abc", [6, 3, 7])  # prefill
    pair.agree("abc")
    batches_in_turn(pair)
    pair.agree("ebc", [2, 0, 3])  # a request without a draft
    pair.agree("febd", [1, 5, 2, 4])  # the larger number of queries, with a prefill of few tokens
    pair.agree("d", 4)
    pair.agree("ebcd")  # decode between
    pair.agree("eb", 3)
    report, kinds = pair.step.report(), ("decode", "mixed", "verify")
    assert report.modes == dict.fromkeys(kinds, "whole" if kernel is None else "piecewise")
    assert {str(row.bucket): row.replays for row in report.rows} == {
        "mixed 16 tokens x4": 3,
        "decode x4": 3,
        "decode x2": 1,
        "decode x1": 1,
        "verify 3 x4": 2,
        "verify 3 x2": 2,
        "verify 5 x4": 1,
        "verify 5 x1": 1,
    }
    # A bucket is captured once, and a model traced once a kind.
    assert (
        pair.device.calls.count("begin") == len(report.rows) * (1 if kernel is None else 3)
        and not report.eager_calls
    )
    if mode is piecewise:
        assert pair.step.runner.traces == dict.fromkeys(
            ("decode", "mixed", "verify 3", "verify 5"), 1
        )
        assert report.compiled.keys() == pair.step.runner.traces.keys()


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("mode", "padding"), [(piecewise, "null"), (breakable, "null"), (breakable, "absent")]
)
def test_many_random_steps(mode, padding):
    pair = Pair(
        mode,
        Buckets(decode=(1, 2, 4, 6), tokens=(16, 40), requests=6, padding=padding),
        kernel=BOUNDARY,
    )
    if padding == "null":
        # Its numbers are multiplied by nobody's weights, but they have to be numbers.
        for pool in pools(pair.cache, pair.twin):
            pool[0] = 0
    pair.step.capture(**pair.example("a"))
    pair.free("a")
    held = pair.device.calls.count("begin"), pair.device.used(), len(pair.device.made)
    rng = random.Random(0)
    for _ in range(40):
        names = rng.sample("abcdef", rng.randint(1, 6))
        for name in [n for n in pair.ids if pair.cache.length(pair.ids[n][0]) > 24]:
            pair.free(name)
        fresh = [n for n in names if n not in pair.ids]
        if not fresh and rng.random() < 0.7:
            pair.agree(names)
        else:
            pair.agree(names, [rng.randint(2, 6) if n in fresh else 1 for n in names])
    assert (pair.device.calls.count("begin"), pair.device.used(), len(pair.device.made)) == held


@any_mode
def test_widths_of_the_table(mode):
    """Lengths grow to it and never past it, and a narrower table leaves nothing of a wider one."""
    pair = Pair(mode)
    pair.agree("a", [20])
    for _ in range(12):
        pair.agree("a")  # from page 6 to 8 of 8
    assert pair.cache.length(pair.ids["a"][0]) == 32
    pair.agree("cd", [2, 3])
    pair.agree("cd")  # a capture clears what the bucket holds
    batch, twin = pair.batches("cd", 1)
    wide = torch.zeros(2, 9, dtype=torch.int32)
    with (
        pair.untouched(),
        pytest.raises(
            StaleGraph, match=r"batch.page_table: got 9 columns, want at most 8, as captured"
        ),
    ):
        pair.give(replace(batch, page_table=wide))
    tokens = torch.randint(VOCAB, (2,))
    narrow = replace(batch, page_table=batch.page_table[:, :2].contiguous())
    pair.step._inputs._batch.page_table.fill_(7)
    with torch.no_grad():
        close(pair.give(narrow, tokens), pair.call(pair.model, pair.twin, tokens, twin))
    assert (pair.step._inputs._batch.page_table[:2, 2:] == 0).all()


def stale(field):
    return pytest.raises(StaleGraph, match=f"^{field}: got ")


@both_modes
def test_what_a_replay_refuses(mode):
    pair = Pair(mode, Buckets(decode=(2,), tokens=(16,), requests=2))
    pair.agree("ab")
    given, other = pair.example("ab"), paged_cache(1)
    tokens, mine = given["tokens"], given["batch"]
    replays = pair.device.calls.count("replay")
    for field, changed in {
        r"k_pages\[0\]": {"k_pages": other.k_pages},
        "v_pages": {"v_pages": (*pair.cache.v_pages, *other.v_pages)},  # another number of layers
        "arguments": {"more": 1},
        "tokens": {"tokens": tokens.double()},  # would be rounded
        "batch.workspace": {"batch": replace(mine, workspace=torch.zeros(8, dtype=torch.uint8))},
    }.items():
        with stale(field):
            pair.step(**given | changed)
    with stale("arguments"):
        pair.step(**{name: x for name, x in given.items() if name != "v_pages"})
    with attnops.use("reference"), stale("policy"):
        pair.step(**given)
    for text, args, changed in (
        (r"tokens.shape\[0\]: got 3, want 2, as in the batch", (), {"tokens": tokens.new_zeros(3)}),
        ("batch: got dict, want a PagedBatch", (), {"batch": {}}),
        (
            "batch.prefix: got 1 chunks of cached tokens, want None",
            (),
            {"batch": replace(mine, prefix=(1,))},
        ),
        ("arguments: got 5 without a name", (1, 2, 3, 4, 5), {}),
        (r"arguments: got \['tokens'\], want each once", (tokens,), {}),
    ):
        with pytest.raises(InvalidInput, match=text):
            pair.step(*args, **given | changed)
    with pytest.raises(BatchTooLarge, match="decode batch: requests got 3, want at most 2"):
        pair.give(pair.batches("abc", 1)[0])
    # The same pages in another tuple are the same pages.
    pair.step(**given | {"k_pages": tuple(pair.cache.k_pages[i] for i in range(1))})
    assert pair.device.calls.count("replay") == replays + 1

    pages = pair.cache.k_pages[0]
    pages.set_(torch.zeros_like(pages))  # the same object, somewhere else
    with stale(r"k_pages\[0\]"):
        pair.step(**given)


@both_modes
def test_a_list_that_holds_something_else_is_seen(mode):
    """The same list is no longer the same tensors. Buckets captured later are of the same
    circumstances."""
    step = graphed(mode, lambda tokens, scale: tokens * scale[0], Buckets(tokens=(2, 4)))
    scale = [torch.ones(1)]
    step(torch.ones(2), scale)
    with stale(r"scale\[0\]"):
        step.capture(torch.ones(2), [torch.full((1,), 5.0)])
    close(step(torch.ones(4), scale), torch.ones(4))
    scale[0] = torch.full((1,), 5.0)
    with stale(r"scale\[0\]"):
        step(torch.ones(2), scale)


def test_a_first_capture_that_fails_binds_nobody():
    def forward(tokens, fail):
        if fail:
            raise InvalidInput("tokens", 1, "2")
        return tokens * 2

    step = graphed(breakable, forward, Buckets(tokens=(2,)))
    with pytest.raises(InvalidInput):
        step(torch.ones(2), True)
    close(step(torch.ones(2), False), torch.full((2,), 2.0))


def test_pages_held_by_the_model_are_watched_through_the_cache():
    pair = Pair(breakable)

    def held(tokens, batch):
        return pair.model(tokens, batch, pair.cache.k_pages, pair.cache.v_pages)

    step = graphed(breakable, held, Buckets(decode=(2,)), batch="batch", cache=pair.cache)
    batch, tokens = pair.batches("ab", 1)[0], torch.zeros(2, dtype=torch.long)
    step(tokens, batch)
    pair.cache.v_pages[0].set_(torch.zeros_like(pair.cache.v_pages[0]))
    with stale(r"cache.pages\[1\]"):
        step(tokens, batch)


@both_modes
def test_over_the_largest_bucket_it_runs_eager_where_that_is_asked_for(mode):
    pair = Pair(mode, Buckets(decode=(2,), tokens=(16,), requests=2, over="eager"))
    pair.agree("ab", [3, 4])
    pair.agree("abc", [1, 1, 9])
    pair.agree("abc")
    assert pair.step.report().eager_calls == 2
    assert "2 calls were over the largest bucket and ran without graphs" in str(pair.step.report())


def test_all_sizes_are_one_trace():
    """A size of 1 is a size as any other, and a bucket captured first is not the model for the
    rest."""
    pair = Pair(piecewise, Buckets(decode=(1, 2, 3, 4), tokens=(5, 16), requests=5))
    pair.agree("a", [1])
    pair.agree("a", [2])
    pair.agree("abcd")
    pair.agree("ab")
    pair.agree("abc", [2, 7, 4])
    assert pair.step.runner.traces == {"decode": 1, "mixed": 1}


@both_modes
def test_modes_of_the_caller_change_nothing(mode):
    """Captured in inference mode, called outside of it, and the other way round."""
    pair = Pair(mode, Buckets(decode=(1, 2)))
    for names, inside in (("ab", True), ("ab", False), ("a", False), ("a", True)):
        with torch.inference_mode(inside):
            pair.agree(names)
    if mode is piecewise:
        assert pair.step.runner.traces == {"decode": 1}


@pytest.mark.parametrize(("sizes", "traces"), [((1, 2, 4), 2), ((2, 4), 1), ((1,), 1)])
def test_a_model_that_tells_one_from_several_is_traced_for_each(sizes, traces):
    """Which is known before anything is compiled."""
    compiled = []

    def forward(tokens):
        return tokens * 2 if tokens.shape[0] == 1 else tokens * 3

    step = graphed(
        piecewise,
        forward,
        Buckets(tokens=sizes),
        inner=lambda module, _: compiled.append(module) or module,
    )
    for rows in (2, 1, 2, 1) if len(sizes) > 1 else (1, 1):
        close(step(torch.ones(rows)), torch.full((rows,), 2.0 if rows == 1 == sizes[0] else 3.0))
    assert step.runner.traces == {"mixed": traces} and len(compiled) == traces


def test_a_model_of_one_size_is_refused():
    step = graphed(piecewise, lambda tokens: tokens + torch.arange(4.0), Buckets(tokens=(2, 4)))
    with pytest.raises(
        NotCapturable, match=r"the model: cannot be captured, it takes one size only: .*4"
    ):
        step(torch.ones(3))


def test_another_model_of_other_sizes_is_traced_once_too():
    """Traces do not learn from each other which sizes change."""
    for pages in (64, 16):
        pair = Pair(piecewise, Buckets(decode=(2, 16)))
        pair.cache, pair.twin = paged_cache(1, pages), paged_cache(1, pages)
        pair.step.cache = pair.cache
        pair.agree("ab")
        pair.agree("a")
        assert pair.step.runner.traces == {"decode": 1}


@pytest.mark.full
@pytest.mark.slow
@whole_and_split
def test_inductor(kernel):
    """Pieces compiled by Inductor, three however many layers there are."""
    pair = Pair(
        piecewise,
        layers=4,
        kernel=kernel,
        inner=lambda *given: pair.device.opaque(inductor(*given)),
    )
    for names in ("abc", "ab", "a"):
        pair.agree(names)
    report = pair.step.report()
    assert report.compiled == {"decode": 3} and report.parts == {"decode": 5}


@both_modes
def test_without_a_batch(mode):
    """Any function of rows: causal attention over a padded prompt, results of other structures and
    of whole tensors."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
    ).eval()

    def forward(tokens, scale):
        x = model(tokens)
        q = x.view(1, -1, 4, 8)
        return {
            "out": x * scale + attnops.attention(q, q, q, causal=True).view(-1, HIDDEN),
            "weight": model[1].weight,
            "n": 3,
        }

    step = graphed(mode, forward, Buckets(tokens=(4, 8)))
    for n in (3, 7, 4, 2):
        tokens = torch.randint(VOCAB, (n,))
        got, want = step(tokens, 0.5), forward(tokens, 0.5)
        close(got["out"], want["out"])
        assert got["n"] == 3 and got["weight"].shape == (HIDDEN, HIDDEN)
    with stale("scale"):
        step(tokens, 0.25)
    with pytest.raises(BatchTooLarge):
        step(torch.zeros(9, dtype=torch.long), 0.5)


@both_modes
def test_results_of_requests(mode):
    def last(tokens, batch, k_pages, v_pages):
        return model(tokens, batch, k_pages, v_pages)[
            (batch.cu_seqlens_q[1:].long() - 1).clamp(min=0)
        ]

    model, pair = decoder(1), Pair(mode)
    pair.step = graphed(
        mode, last, Buckets(tokens=(16,), requests=4), batch="batch", returns="requests"
    )
    mine, theirs = pair.batches("abc", [2, 4, 3])
    tokens = torch.randint(VOCAB, (9,))
    with torch.no_grad():
        got = pair.give(mine, tokens)
        close(got, pair.call(last, pair.twin, tokens, theirs))
    assert got.shape == (3, VOCAB)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tokens": ()}, "tokens, requests"),
        ({"tokens": ("tokens", "tokens")}, "tokens, requests"),
        ({"tokens": ("batch",)}, "tokens, requests"),
        ({"tokens": ("words",)}, "batch, tokens, requests"),
        ({"returns": "all"}, "returns"),
        ({"over_budget": "wait"}, "over_budget"),
        ({"check_every": -1}, "check_every"),
        ({"eager": {"prefill": ()}}, "eager"),
        ({"eager": {"mixed": "paged_attention"}}, "eager"),
        ({"inner": "nvfuser"}, "inner"),
        ({"state": torch.zeros(2)}, "state"),
        ({"state": [torch.zeros(2), 3]}, "state"),
    ],
)
def test_bad_arguments_name_themselves(given, field):
    with pytest.raises(InvalidInput) as e:
        piecewise(decoder(1), Buckets(decode=(1,)), **{"tokens": ("tokens",), **given})
    assert e.value.field == field


def test_bad_first_calls_name_themselves():
    pair = Pair(breakable, Buckets(decode=(2,), padding="null"))
    batch, _ = pair.batches("ab", 1)
    with pytest.raises(InvalidInput, match="tokens: got NoneType, want a tensor"):
        pair.step(batch=batch, k_pages=pair.cache.k_pages, v_pages=pair.cache.v_pages)
    with pytest.raises(InvalidInput, match="one token a request and padded=False"):
        pair.give(replace(batch, padded=True))


@any_mode
def test_an_idle_step(mode):
    """Replays the smallest bucket, for a process that must take part in the step of others."""
    pair = Pair(mode)
    pair.agree("ab", [6, 3])
    pair.agree("ab")
    pair.agree("")
    pair.agree("ab")
    replays = {str(row.bucket): row.replays for row in pair.step.report().rows}
    assert replays["decode x1"] == 1 and not pair.step.report().eager_calls


@any_mode
def test_an_idle_step_of_graphs_without_decode(mode):
    """It may be the first one."""
    pair = Pair(mode, Buckets(tokens=(16, 32), requests=2))
    with pair.untouched():
        pair.agree("")
    pair.agree("ab", [6, 3])
    pair.agree("")
    replays = {str(row.bucket): row.replays for row in pair.step.report().rows}
    assert replays == {"mixed 16 tokens x2": 3}
