"""Which bucket serves a batch, which sizes there are, and what is over the largest."""

from dataclasses import replace

import pytest

from attnops.core.errors import BatchTooLarge, InvalidInput
from attnops.graphs import Bucket, Buckets
from attnops.graphs.buckets import decode_sizes, token_sizes

BUCKETS = Buckets(decode=(1, 2, 4), tokens=(16, 32), requests=4, verify=(3, 5))


def test_default_decode_sizes():
    assert decode_sizes(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert decode_sizes(256)[-2:] == (248, 256) and len(decode_sizes(256)) == 35
    assert decode_sizes(300)[-4:] == (256, 272, 288, 300)
    assert decode_sizes(3) == (1, 2, 3) and decode_sizes(1) == (1,) and decode_sizes(0) == ()


def test_default_token_sizes_pad_little_and_are_few():
    sizes = token_sizes(8192)
    assert sizes[0] == 16 and sizes[-1] == 8192 and list(sizes) == sorted(set(sizes))
    for tokens in range(129, 8193):
        bucket = next(s for s in sizes if s >= tokens)
        assert (bucket - tokens) / tokens <= 1 / 8
    assert len(sizes) < 70 and token_sizes(20) == (16, 20)


def test_the_next_bucket_serves():
    assert BUCKETS.find("decode", 3, 3) == Bucket(4, 4, "decode") == BUCKETS.find("decode", 4, 4)
    assert BUCKETS.find("mixed", 17, 2) == Bucket(32, 4, "mixed")
    assert [str(b) for b in BUCKETS.all()] == [
        "mixed 32 tokens x4",
        "verify 5 x4",
        "mixed 16 tokens x4",
        "verify 3 x4",
        "verify 5 x2",
        "verify 3 x2",
        "verify 5 x1",
        "decode x4",
        "verify 3 x1",
        "decode x2",
        "decode x1",
    ]
    assert BUCKETS.most == (32, 4) and Buckets(decode=(2, 4), tokens=(8,)).rows == 4


def test_verify_batches():
    assert BUCKETS.kind(8, 4, 2) == BUCKETS.kind(20, 4, 5) == "verify"
    assert BUCKETS.find("verify", 8, 4, 2) == Bucket(12, 4, "verify") and BUCKETS.find(
        "verify", 5, 1, 5
    ) == Bucket(5, 1, "verify")
    assert (
        BUCKETS.kind(4, 4, 1) == "decode"
        and BUCKETS.kind(5, 5, 2) == BUCKETS.kind(6, 1, 6) == "mixed"
    )
    # Rows of no request need room, too.
    assert (
        BUCKETS.find("verify", 7, 2, 3) == Bucket(12, 4, "verify")
        and BUCKETS.kind(30, 2, 3) == "mixed"
    )
    assert [b.queries for b in BUCKETS.of_trace("verify 3")] == [3, 3, 3]


def test_an_idle_step_takes_the_smallest_bucket_there_is():
    assert BUCKETS.find(BUCKETS.kind(0, 0, 0), 0, 0) == Bucket(1, 1, "decode")
    some = Buckets(tokens=(16, 32), requests=4)
    assert some.find(some.kind(0, 0, 0), 0, 0) == Bucket(16, 4, "mixed")
    assert some.kind(2, 2, 1) == "decode"  # of which there is no bucket


def test_batches_with_a_shared_prefix_have_buckets_of_their_own():
    found = BUCKETS.find("decode", 3, 3, shared=True)
    assert found == Bucket(4, 4, "decode", True) and str(found) == "decode shared x4"
    assert [str(b) for b in BUCKETS.of_trace("verify 3 shared")] == [
        "verify 3 shared x2",
        "verify 3 shared x4",
    ], "one request shares its pages with no other"
    several = [bucket for bucket in BUCKETS.all() if bucket.requests > 1]
    assert BUCKETS.all(True) == tuple(replace(b, shared=True) for b in several)
    assert BUCKETS.kind(8, 4, 2, shared=True) == "verify"
    without = replace(BUCKETS, dropped=frozenset({found}))
    with pytest.raises(BatchTooLarge, match="decode shared batch: requests got 3, want at most 2"):
        without.find("decode", 3, 3, shared=True)
    assert without.find("decode", 3, 3) == Bucket(4, 4, "decode")


def test_a_dropped_bucket_serves_nobody():
    buckets = replace(BUCKETS, dropped=frozenset({Bucket(4, 4, "decode"), Bucket(12, 4, "verify")}))
    assert buckets.find("decode", 2, 2) == Bucket(2, 2, "decode") and buckets.find(
        "verify", 12, 4, 3
    ) == Bucket(20, 4, "verify")
    assert len(buckets.all()) == 9 and buckets.most == (32, 4)
    with pytest.raises(BatchTooLarge, match="decode batch: requests got 3, want at most 2"):
        buckets.find("decode", 3, 3)


@pytest.mark.parametrize(
    ("given", "kind", "sizes", "text"),
    [
        ({}, "decode", (9, 9), "decode batch: requests got 9, want at most 4"),
        ({}, "mixed", (33, 2), "mixed batch: tokens got 33, want at most 32"),
        ({}, "mixed", (20, 7), "mixed batch: requests got 7, want at most 4"),
        ({"tokens": ()}, "verify", (10, 5, 2), "verify batch: requests got 5, want at most 4"),
        (
            {"tokens": ()},
            "mixed",
            (8, 2, 4),
            "mixed batch: tokens got 8, want a bucket for such batches",
        ),
    ],
)
def test_over_the_largest(given, kind, sizes, text):
    buckets = replace(BUCKETS, **given)
    with pytest.raises(BatchTooLarge, match=text):
        buckets.find(kind, *sizes)
    assert replace(buckets, over="eager").find(kind, *sizes) is None


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"decode": ()}, "decode, tokens"),
        ({"decode": (2, 1)}, "decode"),
        ({"decode": (0, 1)}, "decode"),
        ({"decode": (1, 1)}, "decode"),
        ({"tokens": (True,)}, "tokens"),
        ({"over": "wait"}, "over"),
        ({"padding": "zeros"}, "padding"),
        ({"requests": -1}, "requests"),
        ({"verify": (1,)}, "verify"),
        ({"verify": (3, 2)}, "verify"),
        ({"decode": (), "tokens": (8,), "verify": (2,)}, "verify"),
    ],
)
def test_bad_buckets_name_the_field(given, field):
    with pytest.raises(InvalidInput) as e:
        Buckets(**{"decode": (1,), **given})
    assert e.value.field == field
