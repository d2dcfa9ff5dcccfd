"""Which tiles flex is given: a pure function of head dims, dtype, mask and architecture."""

import pytest
import torch
from torch._inductor.kernel.flex import common
from torch._inductor.lowering import lowerings
from torch.nn.attention import flex_attention as vendor

from attnops.call import changed
from attnops.kernel import kernels_of
from attnops.kernels.torch import flex
from attnops.kernels.torch.flex import Tile, shared_limit
from attnops.problem import Target, altered
from attnops.testing import Features, Source, builders

BF16, F32 = torch.bfloat16, torch.float32
DIMS = [(16, 16), (64, 64), (80, 80), (128, 128), (192, 128), (192, 192), (224, 224), (256, 256), (512, 512), (576, 512), (1024, 1024)]
ARCHS = (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)

# (arch, bytes of a number, head dims, additive float32 mask, tile) -> bytes of shared memory that Triton compiles of torch's template.
COMPILED = {
    (90, 2, 64, 64, False, Tile(128, 128, 3, 4)): 114688,
    (90, 2, 64, 64, True, Tile(128, 128, 3, 4)): 245760,
    (90, 2, 64, 64, True, Tile(128, 128, 2, 4)): 147456,
    (90, 2, 128, 128, True, Tile(128, 64, 3, 8)): 196608,
    (90, 2, 192, 192, True, Tile(64, 64, 3, 4)): 245760,
    (90, 2, 512, 512, True, Tile(64, 32, 2, 8)): 204800,
    (90, 2, 512, 512, False, Tile(64, 32, 1, 4)): 98304,
    (90, 2, 576, 512, False, Tile(64, 32, 1, 8)): 196608,
    (90, 2, 576, 512, True, Tile(32, 16, 2, 4)): 117760,
    (80, 2, 64, 64, False, Tile(128, 128, 3, 4)): 81920,
    (80, 2, 128, 128, False, Tile(128, 64, 3, 8)): 98304,
    (80, 2, 512, 512, False, Tile(64, 32, 3, 4)): 200704,
    (80, 4, 64, 64, True, Tile(128, 32, 3, 4)): 115200,
    (80, 4, 128, 128, False, Tile(32, 64, 3, 4)): 155776,
    (80, 4, 192, 192, True, Tile(32, 64, 1, 8)): 106496,
    (90, 4, 512, 512, True, Tile(32, 16, 3, 4)): 202880,
}


def problem(d: int, dv: int, dtype: torch.dtype, arch: int, mask: str = "none"):
    call = builders.dense(Source(), 1, 1, 1, Features(dtype=dtype, head_dim=d, v_head_dim=dv, q_heads=1, kv_heads=1))
    return altered(call.problem, target=Target("cuda", arch), mask=mask)


@pytest.mark.parametrize("compiled", COMPILED, ids=str)
def test_no_kernel_takes_more_than_the_bound(compiled):
    arch, itemsize, d, dv, masked, tile = compiled
    bound = flex.shared_bytes(tile, d, dv, itemsize, arch, masked)
    assert COMPILED[compiled] <= bound <= 2 * COMPILED[compiled]


@pytest.mark.parametrize("keys", [1, 3, 100, 5000])
@pytest.mark.parametrize("mask", ["none", "additive"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_whatever_is_taken_fits(dtype, mask, keys):
    taken = set()
    for arch in ARCHS:
        for d, dv in DIMS:
            tile = flex.tile(d, dv, dtype.itemsize, arch, mask != "none", keys)
            needed = flex.shared_bytes(tile, d, dv, dtype.itemsize, arch, mask != "none")
            assert not flex.BLOCK % tile.BLOCK_M and not flex.BLOCK % tile.BLOCK_N and max(16, 2 * keys) >= tile.BLOCK_N
            refused = [r for r in kernels_of("attention")["flex"].refusals(problem(d, dv, dtype, arch, mask)) if "head_dim" in r.field]
            if needed > shared_limit(arch):
                assert [r.field for r in refused] == ["head_dim, v_head_dim"] and str(shared_limit(arch)) in refused[0].want
            elif not refused:
                taken.add((arch, d))
    assert all((arch, 512) in taken for arch in (80, 86, 90, 100, 120)) and all((arch, 1024) in taken for arch in (80, 90, 100))


def test_torch_is_given_the_tile(monkeypatch):
    monkeypatch.setattr(Target, "of", classmethod(lambda cls, device: Target("cuda", 90)))
    query, key = (torch.empty(1, 2, n, 224, dtype=BF16, device="meta") for n in (511, 1))
    for masked in (False, True):
        given = flex._options(query, key, masked, False, 1)
        assert given == {"FORCE_USE_FLEX_ATTENTION": True, **flex.tile(224, 224, 2, 90, masked, 1)._asdict()}
        assert given["BLOCK_N"] == 16
    assert flex._options(torch.empty(1, 2, 3, 64), key, False, False, 1) == {}


class _Lowered(Exception):
    pass


@pytest.mark.sweep(2)
@pytest.mark.parametrize("recorded", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("shape", ["ranges", "mask", "packed"])
def test_inductor_is_given_blocks_in_rows_and_no_numbers(monkeypatch, shape, recorded):
    """Of 2 calls, the second with sizes that change. The template multiplies the request by the heads' stride; Inductor 2.11 takes tensors
    and symbols from around a score function, and neither numbers nor sums."""
    seen = []

    def lowering(query, key, value, score, block_mask, scale, options, captured, *more):
        blocks = [x for x in common.maybe_realize(block_mask[2:8]) if x is not None]
        seen.append([x.get_stride() for x in blocks])
        assert len(blocks) == (4 if recorded else 2)
        assert all(getattr(x, "is_Symbol", False) or x.get_size() is not None for x in captured)
        raise _Lowered

    monkeypatch.setitem(lowerings, torch.ops.higher_order.flex_attention, lowering)
    monkeypatch.setattr(vendor, "_validate_device", lambda *given: None)
    monkeypatch.setattr(flex, "_compiled", lambda device, function: flex.one_graph(function))
    monkeypatch.setattr(flex, "_on_cpu", lambda x: False)
    monkeypatch.setattr(flex, "_options", lambda *given: {})
    f = Features(dtype=torch.float32, head_dim=16, q_heads=4, kv_heads=2, causal=True, mask="additive" if shape == "mask" else "none")
    for count in (2, 3):
        if shape == "packed":
            run, call = flex.packed_attended, builders.varlen(Source(0), (300, 9, 20)[:count], (150, 290, 40)[:count], f)
        else:
            ends = {"end": (1, 290, 150)[:count]} if shape == "ranges" else {}
            run, call = flex.attended, builders.dense(Source(0), count, 130 * count, 300 + count, f, **ends)
        record = changed(call.record, **{n: call.arguments[n].requires_grad_() for n in ("query", "key", "value")})
        with torch.set_grad_enabled(recorded), pytest.raises(Exception, match="_Lowered"):
            run(record, recorded=recorded)
    assert len(seen) == 2
    assert all(by_request == by_head for blocks in seen for by_request, by_head, *_ in blocks), seen
