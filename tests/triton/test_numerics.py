"""`triton` through the interpreter, against the exact result: every feature, split and unsplit,
long and ragged batches, any layout."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.record import changed
from attnops.kernels.triton.launch import grids
from attnops.ops.case_data import BF16, E4M3, E5M2, F16, F32, INT8
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import CASES, Features, Source, make_call
from tests.ops import test_fakes as layouts
from tests.pairwise import pairwise
from tests.triton.checks import MODES, check as checked, mode
from tests.triton.process import interpreted

ATTENTION = ("paged_attention", "mla_attention", "attention", "varlen_attention")


check = partial(checked, refused=())
TELLING = (
    "all",
    "all_mask",
    "lse_sinks",
    "decode_padded-all",
    "page_3-window_both",
    "no_table-all",
    "deepseek-verify",
    "window",
    "chunk_window",
    "range-all",
    "long-all",
    "mask_bool_h",
    "bfloat16_d576",
    "float8_query_windows",
    "deepseek-float8_both",
)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", MODES[1:])
@pytest.mark.parametrize(
    ("op", "label"),
    [
        pytest.param(op, case.label, id=str(case))
        for op in ATTENTION
        for case in CASES[op]
        if case.label in TELLING
    ],
)
@interpreted
def test_splits(op, label, name):
    [case] = [c for c in CASES[op] if c.label == label]
    check(case.call(), name)


WIDE = Features(dtype=F16, head_dim=32, q_heads=8, kv_heads=2, causal=True, lse=True)
LONG = {
    "plain": WIDE,
    "all_keys": replace(WIDE, causal=False),
    "window": replace(WIDE, window=(50, -1)),
    "window_both": replace(WIDE, causal=False, window=(70, 40)),
    "window_right": replace(WIDE, causal=False, window=(-1, 9)),
    "chunk": replace(WIDE, chunk=60),
    "chunk_all_keys": replace(WIDE, chunk=100, causal=False, window=(70, 40)),
    "softcap_sinks": replace(WIDE, softcap=3.0, sinks=F32),
    "mask": replace(WIDE, mask="bool"),
    "mha": replace(WIDE, q_heads=2),
    "mqa": replace(WIDE, q_heads=20, kv_heads=1),
    "group_of_70": replace(WIDE, q_heads=70, kv_heads=1),
    "odd_dims": replace(WIDE, head_dim=40, v_head_dim=24),
    "float8": replace(WIDE, kv_dtype=E4M3),
    "float32": replace(WIDE, dtype=F32),
    "d256": replace(WIDE, head_dim=256, q_heads=4, kv_heads=1),
}


BATCHES = {
    "mixed": ((70, 1, 33), (300, 129, 40), 16, "as_is"),
    "one": ((150,), (270,), 128, "as_is"),
    "verify": ((3, 8), (300, 220), 48, "split"),
    "deterministic": ((1, 9), (300, 40), 128, "deterministic"),
}


# Both launches and a split for every feature; a long request alone and a fixed split for those that
# decide which tiles are looked at. The interpreter takes a second a tile of a wide group, whose
# splits are those of the others.
TILES = ("plain", "window", "window_both", "chunk_all_keys", "softcap_sinks")
BATCHES_OF = {
    f: [*BATCHES] if f in TILES else ["mixed"] if f == "group_of_70" else ["mixed", "verify"]
    for f in LONG
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("features", "batch"), [(f, b) for f, batches in BATCHES_OF.items() for b in batches]
)
@interpreted
def test_long(features, batch):
    """Tiles that are not masked, tiles that are, both launches of a mixed batch."""
    *sizes, name = BATCHES[batch]
    check(make_call("paged_attention", Source(1), *sizes, LONG[features]), name)


ROWS = {
    "dense": lambda f: make_call("attention", Source(2), 2, 150, 270, f),
    "ranges": lambda f: make_call(
        "attention",
        Source(2),
        3,
        70,
        200,
        f,
        kv_start=(0, 130, 9),
        kv_end=(200, 190, 140),
        index=torch.int32,
    ),
    "packed": lambda f: make_call(
        "varlen_attention", Source(2), (70, 1, 33, 9), (300, 129, 40, 0), f
    ),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("features", "batch"), [(f, b) for f in (*TILES, "mask", "odd_dims", "d256") for b in ROWS]
)
@interpreted
def test_long_rows_without_pages(features, batch):
    """Tiles that are not masked, tiles that are, the first keys that may be seen, both launches of
    a batch."""
    check(ROWS[batch](LONG[features]))


@interpreted
def test_ranges_past_the_last_key_read_nothing():
    """A range may end after the keys; a query's position counts from its end all the same."""
    f = Features(dtype=F16, head_dim=16, causal=True, lse=True)
    call = make_call(
        "attention", Source(3), 2, 5, 20, f, kv_start=(0, 3), kv_end=(20, 20), index=torch.int32
    ).with_(kv_end=torch.tensor([26, 23]))
    check(replace(call, free={}), "split")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", MODES)
@interpreted
def test_ragged(name):
    """Many short requests and a long one: tiles look for their requests."""
    q_lens = (1, 0, 90, 1, 1, 9, 1, 0, 1, 1, 64, 1, 1)
    f = Features(head_dim=16, q_heads=4, kv_heads=1, causal=True, lse=True)
    call = make_call(
        "paged_attention",
        Source(3),
        q_lens,
        [n + 3 * i for i, n in enumerate(q_lens)],
        16,
        f,
        padding=70,
    )
    shape = grids.Shape(sum(q_lens) + 70, len(q_lens), 90, 1024, 1, 4, 16, 16, 32, 4, 4)
    assert grids.launches(shape, False, 4, 10**6)[1].ragged
    check(call, name)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("heads", "queries", "name"),
    [
        (1, 1, "split"),
        (16, 2, "split"),
        (24, 2, "deterministic"),
        (128, 1, "as_is"),
        (32, 3, "split"),
    ],
)
@interpreted
def test_latents(heads, queries, name):
    f = replace(DEEPSEEK, q_heads=heads, window=(100, -1) if heads == 16 else (-1, -1), lse=True)
    check(make_call("mla_attention", Source(0), (queries, queries), (110, queries), 64, f, 1), name)


@interpreted
def test_more_parts_than_are_read_at_once():
    """Stage two in several steps: what is added up fades where a later part has the larger
    logits."""
    with patch.object(grids, "MANY_SPLITS", 2):
        check(
            make_call("paged_attention", Source(8), (1, 2), (600, 300), 16, WIDE), "deterministic"
        )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kv", [E4M3, E5M2, INT8], ids=str)
@interpreted
def test_stored_keys(kv):
    f = replace(WIDE, dtype=BF16, kv_dtype=kv, head_dim=128)
    for per_head in (True, False):
        check(
            make_call(
                "paged_attention",
                Source(5),
                (1, 2),
                (200, 33),
                16,
                replace(f, scale_per_head=per_head),
            ),
            "split",
        )
    if kv != E5M2:
        check(
            make_call(
                "mla_attention", Source(5), (1, 2), (100, 33), 16, replace(DEEPSEEK, kv_dtype=kv)
            ),
            "split",
        )


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("softcap", "queries", "name"), pairwise(softcap=(0.0, 30.0), queries=(1, 5, 70), name=MODES)
)
@interpreted
def test_temperature_by_position(softcap, queries, name):
    """A logit is multiplied after the cap."""
    f = replace(WIDE, dtype=F32, scale=4.0, softcap=softcap, temperature=True, sinks=F32)
    check(make_call("paged_attention", Source(6), (queries, 2), (300, 40), 16, f), name)


@interpreted
def test_steps_of_a_scan_are_as_exact_as_float32():
    """Of requests of one number each, whose outputs are the steps."""
    dt = torch.linspace(-20.0, 20.0, 81)[:, None]
    one, given = torch.ones(81, 1, 1), {"dt_softplus": True, "fresh": True, "padding": None}
    call = make_call("mamba2_scan", Source(1), [1] * 81, 1, 1, 1, 1, F32, given)
    call = call.with_(x=one, b=one, c=one, dt=dt, a=torch.zeros(1))
    want = torch.logaddexp(dt.double(), torch.zeros(())).float()
    torch.testing.assert_close(ran(call, "as_is")[..., 0], want, rtol=3e-7, atol=0.0)


def ran(call, name):
    """The output of the kernel in a mode."""
    with mode(name):
        kernels_of(call.op)["triton"].run(
            changed(call.record, policy="deterministic" if name == "deterministic" else "")
        )
    return call.arguments["output"]


def strided(t, dim):
    """Every second entry of a buffer along `dim`."""
    return layouts.raw(layouts.strided, t, dim)


def transposed(t, dim):
    """`dim` and the dim before it lie the other way round."""
    return layouts.raw(layouts.transposed, t, dim - 1)
