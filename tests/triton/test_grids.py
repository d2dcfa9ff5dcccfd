"""What is launched: from shapes alone, within the device, every token served once."""

from contextlib import ExitStack
from importlib import import_module
from itertools import product
from pkgutil import iter_modules
from unittest.mock import patch

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import pretend
from attnops.core.record import changed, sizes_of
from attnops.kernels.shared.parts import GRID
from attnops.kernels.triton.launch.grids import (
    BLOCKS_PER_SM,
    DECODE_QUERIES,
    SPLIT_KEYS,
    TABLE,
    Shape,
    launches,
    pick,
    shared_bytes,
)
from attnops.testing.calls import filled
from tests.triton.checks import SM90
from tests.triton.process import interpreted
from tests.triton.test_far import OPS, covering

H200 = (132, 227 * 1024)
SMALL_GPU = (20, 99 * 1024)


def llama(requests, queries, keys, tokens=None, **more) -> Shape:
    tokens = requests * queries if tokens is None else tokens
    return Shape(tokens, requests, queries, keys, 8, 4, 128, 128, 256, 2, 2)._replace(**more)


def deepseek(requests, heads, keys, **more) -> Shape:
    return Shape(requests, requests, 1, keys, 1, heads, 512, 576, 576, 2, 2)._replace(**more)


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        (llama(1, 1, 8192), 32),
        (llama(8, 1, 4096), 8),
        (llama(1, 1, 32768, left=1023), 4),
        (llama(1, 2048, 10240), 1),
        (deepseek(64, 16, 8192), 4),
        (deepseek(1, 16, 8192), 64),
    ],
    ids=str,
)
def test_splits_fill_the_device(shape, splits):
    [launch] = launches(shape, False, *H200)
    assert launch.splits == splits
    assert launch.parts == (splits > 1)
    assert launch.splits == 1 or launch.blocks <= (BLOCKS_PER_SM + 0.2) * H200[0]


def test_a_fixed_split_does_not_follow_from_the_batch():
    one = launches(llama(1, 1, 100_000), True, *H200)
    for requests, queries, keys in ((64, 1, 300), (3, 8, 5000), (7, 900, 40_000)):
        many = launches(llama(requests, queries, keys), True, *H200)
        assert (many[0].tile, many[0].split_keys) == (one[0].tile, SPLIT_KEYS)
        assert many[0].splits * SPLIT_KEYS >= keys
        assert many[0].parts and not many[0].ragged
    deep = [launches(llama(b, q, 4096), True, *H200)[1] for b, q in ((1, 9), (50, 9), (2, 4000))]
    assert len({x.tile for x in deep}) == 1 and {x.splits for x in deep} == {1}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("queries", [1, 8, 9, 64, 65, 3000])
@pytest.mark.parametrize("requests", [0, 1, 2, 40])
def test_every_length_is_served_once(requests, queries, deterministic):
    found = launches(llama(requests, queries, 4096), deterministic, *H200)
    for length in range(queries + 1):
        assert sum(x.fewest <= length <= x.most for x in found) == 1
    assert all(x.queries >= min(queries, x.most) for x in found)
    # Tokens of no request are the last launch's.
    assert [x.pads > 0 or x.ragged for x in found] == [False] * (len(found) - 1) + [True]
    assert found[0].queries <= DECODE_QUERIES or len(found) == 1


def test_ragged_tiles_are_as_many_as_needed():
    shape = llama(200, 4000, 8192, tokens=4000 + 199)
    decode, extend = launches(shape, False, *H200)
    assert extend.ragged and extend.tiles <= shape.tokens // 16 + 202
    assert not decode.ragged and decode.queries == DECODE_QUERIES


@pytest.mark.parametrize("memory", [H200[1], 163 * 1024, SMALL_GPU[1]])
def test_tiles_fit(memory):
    widths = {64: (64, 64, 128), 128: (128, 128, 256), 256: (256, 256, 512), 512: (512, 576, 576)}
    for kind, dim in TABLE:
        size, stored = {"half": (2, 2), "quantised": (2, 1), "float32": (4, 4)}[kind]
        shape = Shape(1, 1, 1, 4096, 1, 1, *widths[dim], size, stored)
        for rows in (1, 16, 33, 128):
            tile = pick(shape, rows, memory)
            assert shared_bytes(tile, shape) <= memory, (kind, dim, rows)


def test_a_head_dim_beyond_the_table_is_told():
    with pytest.raises(ValueError, match="head_dim: got 1024, want <= 512"):
        launches(llama(1, 1, 10, head_dim=1024), False, *H200)


LARGE = {
    "T": 5_000_000,
    "N": 5_000_000,
    "S": 5_000_000,
    "K": 5_000_000,
    "B": 70_000,
    "max_pages": 1_000_000,
    "P": 1_000_000,
}
"""Sizes of a batch, by the layouts' names, each larger than 65,535 tiles of tokens, or requests, of
a launch."""
FOLLOW = {"T": ("num_tokens", "max_seqlen_q"), "S": (), "N": ("max_seqlen_k",)}
"""Numbers of a call that grow with a size."""


def enlarged(call, name):
    """A call without memory, of LARGE of the tensors' size `name`; None where no layout has it."""
    spec, sizes = call.spec, sizes_of(call.record)
    if name not in sizes or (name == "K" and "S" not in sizes):
        return None  # where there are no rows of queries, K is the experts of a token
    numbers = {n: LARGE[name] for n in FOLLOW.get(name, ()) if n in call.arguments}
    sizes |= {name: LARGE[name], **numbers}
    scalars = {n: v for n, v in call.arguments.items() if not isinstance(v, torch.Tensor)} | numbers
    given = call.tensors()

    def made(a, shape):
        like = given.get(a.name)
        return (
            None if like is None or a.hint else torch.empty(shape, dtype=like.dtype, device="meta")
        )

    arguments = filled(call.op, sizes, scalars, made) | {
        n: v for n, v in given.items() if spec[n].hint
    }
    return call.with_(**arguments)


@pytest.mark.parametrize("policy", ["", "deterministic"])
@pytest.mark.parametrize("op", OPS)
@interpreted
def test_no_dim_of_a_grid_but_the_first_follows_from_the_batch(op, policy):
    """CUDA takes 65,535 programs there. Nothing is launched: tensors have no memory."""
    from attnops.kernels.triton import launch as folder

    hosts = [
        import_module(f"{folder.__name__}.{found.name}") for found in iter_modules(folder.__path__)
    ]
    grids_of = []

    def launch(kernel, grid, *given, **more):
        assert max(grid[1:], default=1) <= GRID and grid[0] < 2**31, (kernel.__name__, grid)
        grids_of.append(grid)

    with ExitStack() as patches:
        replaced = {
            "launch": launch,
            "composed": lambda call: None,
        }  # of the last, torch's products
        for host, name in product(hosts, replaced):
            if hasattr(host, name):
                patches.enter_context(patch.object(host, name, replaced[name]))
        with pretend(SM90):
            kernel = kernels_of(op)["triton"]
            for call in () if op == "copy_kv" else covering(op):
                for name in LARGE:
                    large = enlarged(call, name)
                    if large is not None and not (
                        op == "linear" and kernel.refusals(large.problem) and not policy
                    ):
                        kernel.run(changed(large.record, policy=policy))
    few = op == "copy_kv" or (op in ("linear", "experts") and not policy)
    assert grids_of or few, (
        "copies: grids follow from layers and a bounded scratch; of more rows torch makes the "
        "products"
    )
