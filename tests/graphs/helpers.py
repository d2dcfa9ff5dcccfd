"""A model in graphs beside the same model without, each with a cache of its own that is given the
same requests."""

from contextlib import contextmanager

import pytest
import torch

from attnops.graphs import Buckets, breakable, piecewise
from tests.graphs.models import BOUNDARY, VOCAB, decoder, paged_cache
from tests.graphs.standin import StandIn

BUCKETS = Buckets(decode=(1, 2, 4), tokens=(16, 32), requests=4)


def pools(*caches):
    return [pool for cache in caches for pool in (*cache.k_pages, *cache.v_pages)]


def close(got, want):
    # Both run the same ops in the same precision; rows of a padded batch may be summed in another
    # order.
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def buckets_of(step):
    """The captured ones, in order."""
    return [str(row.bucket) for row in step.report().rows]


def graphed(mode, model, buckets, **more):
    """`model` in graphs of the stand-in, in pieces that are not compiled. Without a batch, unless
    `batch=` names one."""
    inner = {"inner": "eager"} if mode is piecewise else {}
    return mode(
        model,
        buckets,
        **{"batch": None, "tokens": ("tokens",), "graphs": StandIn(), **inner, **more},
    )


class Pair:
    """step: in graphs. Requests are named by letters, and both caches hold them."""

    def __init__(
        self,
        mode,
        buckets=BUCKETS,
        model=None,
        need=lambda: 0,
        layers=1,
        kernel=None,
        cached=paged_cache,
        **more,
    ):
        self.model = decoder(layers, kernel=kernel) if model is None else model
        layers = len(self.model.layers)
        self.cache, self.twin, self.device = cached(layers), cached(layers), StandIn(need)
        self.step = graphed(
            mode, self.model, buckets, batch="batch", cache=self.cache, graphs=self.device, **more
        )
        self.ids = {}

    def call(self, step, cache, tokens, batch):
        return step(tokens, batch=batch, k_pages=cache.k_pages, v_pages=cache.v_pages)

    def batches(self, names, new):
        for name in names:
            if name not in self.ids:
                self.ids[name] = self.cache.alloc(), self.twin.alloc()
        mine, theirs = zip(*(self.ids[n] for n in names), strict=True) if names else ((), ())
        return self.cache.batch(mine, new), self.twin.batch(theirs, new)

    def example(self, names="yz", new=1):
        """Arguments of a step. Of requests of its own: what only one cache holds is compared with
        nothing."""
        batch, _ = self.batches(names, new)
        tokens = torch.zeros(batch.slots.shape[0], dtype=torch.long)
        return {
            "tokens": tokens,
            "batch": batch,
            "k_pages": self.cache.k_pages,
            "v_pages": self.cache.v_pages,
        }

    def free(self, name):
        mine, theirs = self.ids.pop(name)
        self.cache.free(mine)
        self.twin.free(theirs)

    def give(self, batch, tokens=None):
        """A step in graphs of one batch, whose tokens are 0 unless they are given."""
        tokens = torch.zeros(batch.slots.shape[0], dtype=torch.long) if tokens is None else tokens
        return self.call(self.step, self.cache, tokens, batch)

    @contextmanager
    def untouched(self):
        """The block writes no page."""
        before = [pool.clone() for pool in pools(self.cache)]
        yield
        torch.testing.assert_close(pools(self.cache), before, rtol=0, atol=0, equal_nan=True)

    def go(self, names, new=1):
        """One step in both. Returns (got, want)."""
        batch, twin = self.batches(names, new)
        tokens = torch.randint(VOCAB, (batch.slots.shape[0],))
        with torch.no_grad():
            want = self.call(self.model, self.twin, tokens, twin)
            return self.call(self.step, self.cache, tokens, batch).clone(), want

    def agree(self, names, new=1):
        got, want = self.go(names, new)
        close(got, want)
        assert not got.isnan().any()
        torch.testing.assert_close(
            pools(self.cache), pools(self.twin), rtol=2e-5, atol=2e-5, equal_nan=True
        )


def batches_in_turn(pair):
    """Steps of every kind after one of the requests a, b and c."""
    pair.agree("ab")  # a shorter batch after a longer one
    pair.agree("b")
    pair.agree("dbc", [8, 1, 1])  # mixed
    pair.agree("cabd")  # other rows, and a full bucket
    pair.free("a")
    pair.agree("ebc", [6, 2, 3])  # pages that belonged to another
    pair.agree("ebc", 3)  # verification, rectangular
    pair.agree("cb", [1, 3])  # a shorter one after a longer one, ragged


both_modes = pytest.mark.parametrize("mode", [piecewise, breakable])
# Where the trace of a mode is no part of what is proven: test_changing_batches has batches of every
# kind in both modes.
any_mode = pytest.mark.parametrize(
    "mode", [breakable, pytest.param(piecewise, marks=pytest.mark.full)]
)
whole_and_split = pytest.mark.parametrize("kernel", [None, BOUNDARY], ids=["whole", "split"])
