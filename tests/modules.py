"""What the tests of modules share: comparisons, refusals, and steps over a cache."""

import dataclasses
import itertools

import pytest
import torch
from torch.nn import functional as F

from attnops.cache import LatentCache
from attnops.core.errors import InvalidInput

NAN = float("nan")


def close(got, want, tolerance=1e-6):
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, equal_nan=True)


def cu(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def refused(call, text):
    """The InvalidInput that the call raises. Its text begins like this:
    `field: got ..., want ...`."""
    with pytest.raises(InvalidInput) as caught:
        call()
    assert str(caught.value).startswith(text)
    assert caught.value.field == text.partition(": got ")[0]
    return caught.value


def turned(x, positions, turns, interleaved=False, factor=1.0):
    """RoPE as multiplication by complex numbers. x `[T, H, D]`; turns `[D / 2]`: the angle of a
    pair at position 1."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    angle = positions[:, None].double() * turns
    z = (
        torch.complex(a.double(), b.double())
        * torch.polar(torch.full_like(angle, factor), angle)[:, None]
    )
    return (
        torch.stack([z.real, z.imag], -1).flatten(-2)
        if interleaved
        else torch.cat([z.real, z.imag], -1)
    )


def poisoned(cache):
    """The cache, with NaN, or a number that no token has, wherever one may be written."""
    for pages in itertools.chain(*cache.layers):
        pages.fill_(NAN if pages.is_floating_point() else 77)
    return cache


def pages_of(cache, layer=0):
    """A layer's pages, by the names that the modules give them."""
    names = ("latent_pages",) if isinstance(cache, LatentCache) else ("k_pages", "v_pages")
    return dict(zip(names, cache.layers[layer], strict=True))


def padded(batch, tokens):
    """The step as a fixed-size graph runs it: one more request, of length 0, and tokens of
    nobody."""
    zeros = batch.seq_lens.new_zeros
    chunks = [
        dataclasses.replace(
            c, cu_seqlens_k=F.pad(c.cu_seqlens_k, (0, 1), value=int(c.cu_seqlens_k[-1]))
        )
        for c in batch.prefix or ()
    ]
    return dataclasses.replace(
        batch,
        page_table=torch.cat([batch.page_table, zeros(1, batch.page_table.shape[1])]),
        seq_lens=torch.cat([batch.seq_lens, zeros(1)]),
        cu_seqlens_q=torch.cat([batch.cu_seqlens_q, batch.cu_seqlens_q[-1:]]),
        slots=F.pad(batch.slots, (0, tokens), value=-1),
        positions=F.pad(batch.positions, (0, tokens)),
        padded=True,
        prefix=None if batch.prefix is None else tuple(chunks),
    )
