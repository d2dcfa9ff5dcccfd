"""Which tiles flex is given: a pure function of head dims, dtype, mask and architecture."""

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, altered
from attnops.kernels.torch import flex
from attnops.kernels.torch.flex_tiles import Tile, shared_bytes, shared_limit
from attnops.testing import Features, Source, make_call
from tests.modules import cu

BF16, F32 = torch.bfloat16, torch.float32
DIMS = [(16, 16), (64, 64), (80, 80), (192, 128), (256, 256), (512, 512), (576, 512), (1024, 1024)]
ARCHS = (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)

# (arch, bytes of a number, head dims, additive float32 mask, tile) -> bytes of shared memory that
# Triton compiles of torch's template.
COMPILED = {
    (90, 2, 64, 64, False, Tile(128, 128, 3, 4)): 114688,
    (90, 2, 64, 64, True, Tile(128, 128, 3, 4)): 245760,
    (90, 2, 512, 512, False, Tile(64, 32, 1, 4)): 98304,
    (90, 2, 576, 512, True, Tile(32, 16, 2, 4)): 117760,
    (80, 2, 64, 64, False, Tile(128, 128, 3, 4)): 81920,
    (80, 4, 64, 64, True, Tile(128, 32, 3, 4)): 115200,
    (80, 4, 128, 128, False, Tile(32, 64, 3, 4)): 155776,
    (90, 4, 512, 512, True, Tile(32, 16, 3, 4)): 202880,
}


def problem(d, dv, dtype, arch, mask="none"):
    call = make_call(
        "attention",
        Source(),
        1,
        1,
        1,
        Features(dtype=dtype, head_dim=d, v_head_dim=dv, q_heads=1, kv_heads=1),
    )
    return altered(call.problem, target=Target("cuda", arch), mask=mask)


@pytest.mark.parametrize("compiled", COMPILED, ids=str)
def test_no_kernel_takes_more_than_the_bound(compiled):
    arch, itemsize, d, dv, masked, tile = compiled
    bound = shared_bytes(tile, d, dv, itemsize, arch, masked)
    assert COMPILED[compiled] <= bound <= 2 * COMPILED[compiled]


@pytest.mark.parametrize("keys", [1, 3, 100, 5000])
@pytest.mark.parametrize("mask", ["none", "additive"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_whatever_is_taken_fits(dtype, mask, keys):
    taken = set()
    for arch in ARCHS:
        for d, dv in DIMS:
            tile = flex.tile(d, dv, dtype.itemsize, arch, mask != "none", keys)
            needed = shared_bytes(tile, d, dv, dtype.itemsize, arch, mask != "none")
            assert (
                not flex.BLOCK % tile.BLOCK_M
                and not flex.BLOCK % tile.BLOCK_N
                and max(16, 2 * keys) >= tile.BLOCK_N
            )
            refused = [
                r
                for r in kernels_of("attention")["flex"].refusals(problem(d, dv, dtype, arch, mask))
                if "head_dim" in r.field
            ]
            if needed > shared_limit(arch):
                assert [r.field for r in refused] == ["head_dim, v_head_dim"] and str(
                    shared_limit(arch)
                ) in refused[0].want
            elif not refused:
                taken.add((arch, d))
    assert all((arch, 512) in taken for arch in (80, 86, 90, 100, 120)) and all(
        (arch, 1024) in taken for arch in (80, 90, 100)
    )


def test_torch_is_given_the_tile(monkeypatch):
    monkeypatch.setattr(Target, "of", classmethod(lambda cls, device: Target("cuda", 90)))
    query, key = (torch.empty(1, 2, n, 224, dtype=BF16, device="meta") for n in (511, 1))
    for masked in (False, True):
        given = flex._options(query, key, masked, False, 1)["kernel_options"]
        assert given == {
            "FORCE_USE_FLEX_ATTENTION": True,
            **flex.tile(224, 224, 2, 90, masked, 1)._asdict(),
        }


RANGES = (
    torch.tensor([0, 5, 120], dtype=torch.int32),
    torch.tensor([1, 290, 150], dtype=torch.int32),
)


@pytest.mark.full
@pytest.mark.parametrize("recorded", [True, False], ids=["backward", "forward"])
def test_inductor_finds_the_same_blocks(recorded):
    """Those of eager code, in rows: flex multiplies the request by the stride of the heads. Of
    sizes that change, and do not at first."""
    dense, packed = flex.one_graph(flex.dense_blocks), flex.one_graph(flex.packed_blocks)
    causal, window, chunk = (
        flex.Rules(1.0, True, *more) for more in ((), (100, -1), (-1, -1, 0.0, 64))
    )
    for keys, (start, end), rules in (
        (300, (None, None), causal),
        (431, (None, None), causal),
        (431, RANGES, window),
        (300, (None, None), chunk),
    ):
        given = torch.empty(3, 130 + keys, 1, 1), keys, start, end, rules, recorded
        found = dense(*given)
        torch.testing.assert_close(found, flex.dense_blocks(*given))
        mask = flex._block_mask(130 + keys, keys, found)
        for x in (mask.kv_num_blocks, mask.kv_indices, mask.q_num_blocks, mask.q_indices)[
            : 4 if recorded else 2
        ]:
            assert x.stride(0) == x.stride(1) > 0
    for queries, keys in (((300, 9), (150, 290)), ((129, 0, 200), (3, 1, 500))):
        given = cu(queries), cu(keys), sum(queries) + 3, sum(keys) + 2, recorded
        torch.testing.assert_close(packed(*given), flex.packed_blocks(*given))
