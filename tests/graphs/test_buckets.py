"""Which bucket serves a batch, which sizes there are, and what is over the largest."""

import pytest

from attnops.core.errors import BatchTooLarge, InvalidInput
from attnops.graphs import Bucket, Buckets
from attnops.graphs.buckets import decode_sizes, token_sizes


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
    buckets = Buckets(decode=(1, 2, 4, 8), tokens=(16, 32), requests=6)
    assert buckets.find("decode", 3, 3) == Bucket(4, 4, "decode") == buckets.find("decode", 4, 4)
    assert buckets.find("mixed", 17, 2) == Bucket(32, 6, "mixed")
    assert [str(b) for b in buckets.all()] == [
        "mixed 32 tokens x6", "mixed 16 tokens x6", "decode x8", "decode x4", "decode x2", "decode x1"
    ]  # fmt: skip
    assert buckets.most == (32, 8)
    assert Buckets(decode=(2, 4), tokens=(8,)).rows == 4


def test_a_dropped_bucket_serves_nobody():
    buckets = Buckets(decode=(2, 4), dropped=frozenset({Bucket(4, 4, "decode")}))
    assert buckets.find("decode", 2, 2) == Bucket(2, 2, "decode")
    with pytest.raises(BatchTooLarge, match="decode batch: requests got 3, want at most 2"):
        buckets.find("decode", 3, 3)
    assert buckets.all() == (Bucket(2, 2, "decode"),) and buckets.most == (4, 4)


@pytest.mark.parametrize(
    ("kind", "tokens", "requests", "text"),
    [
        ("decode", 9, 9, "decode batch: requests got 9, want at most 8"),
        ("mixed", 33, 2, "mixed batch: tokens got 33, want at most 32"),
        ("mixed", 20, 7, "mixed batch: requests got 7, want at most 6"),
    ],
)
def test_over_the_largest(kind, tokens, requests, text):
    with pytest.raises(BatchTooLarge, match=text):
        Buckets(decode=(1, 8), tokens=(16, 32), requests=6).find(kind, tokens, requests)
    assert Buckets(decode=(1, 8), tokens=(16, 32), requests=6, over="eager").find(kind, tokens, requests) is None


def test_a_kind_without_buckets_says_so():
    with pytest.raises(BatchTooLarge, match="want a bucket for such batches") as e:
        Buckets(decode=(1,)).find("mixed", 2, 1)
    assert (e.value.kind, e.value.field, e.value.got, e.value.largest) == ("mixed", "tokens", 2, 0)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "decode, tokens"),
        ({"decode": (2, 1)}, "decode"),
        ({"decode": (0, 1)}, "decode"),
        ({"decode": (1, 1)}, "decode"),
        ({"tokens": (True,)}, "tokens"),
        ({"decode": (1,), "over": "wait"}, "over"),
        ({"decode": (1,), "padding": "zeros"}, "padding"),
        ({"decode": (1,), "requests": -1}, "requests"),
    ],
)
def test_bad_buckets_name_the_field(given, field):
    with pytest.raises(InvalidInput) as e:
        Buckets(**given)
    assert e.value.field == field
