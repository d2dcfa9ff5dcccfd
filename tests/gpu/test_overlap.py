"""Linears and attention of a decode step that are launched while the kernel before them runs: bit
for bit what they give in turn."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from attnops.core.kernel import kernels_of
from attnops.kernels.triton.launch import grids, linear_tiles as tiles
from attnops.ops.linear.record import Linear
from attnops.testing import Features, Source, equip, make_call

LAYERS, HEADS, DIM = 4, 16, 128
WIDTH = HEADS * DIM
LLAMA = Features(dtype=torch.bfloat16, head_dim=DIM, q_heads=HEADS, kv_heads=4)


def replays(
    run: Callable[[], None], results: tuple[Tensor, ...], start: Tensor
) -> Iterator[list[Tensor]]:
    """The results of replays of `run` for 20 values of `start`."""
    graph, source = torch.cuda.CUDAGraph(), Source(3, start.device)
    run()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        start.copy_(source.normal(*start.shape))
        for x in results:
            x.fill_(float("nan"))
        graph.replay()
        yield [x.clone() for x in results]


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_step_of_launches_that_overlap_gives_what_launches_in_turn_give(rows: int) -> None:
    """Every kernel reads what the one before it wrote, and writes over what that one read."""
    from attnops.kernels.shared.launch.gpu import gpu_of
    from attnops.kernels.triton.launch.decode import decode_attention
    from attnops.kernels.triton.launch.linear import linear

    source = Source(1, "cuda")
    take = partial(source.normal, dtype=torch.bfloat16)
    call = equip(
        kernels_of("decode_attention")["triton"],
        make_call("decode_attention", source, (900,) * rows, 64, LLAMA, missing=None),
    )
    query, attended = (call.arguments[n].view(rows, WIDTH) for n in ("query", "output"))
    weights = [
        [take(n * WIDTH, WIDTH, spread=WIDTH**-0.5) for n in (2, 1, 1)] for _ in range(LAYERS)
    ]
    gain, x, inner, start = take(WIDTH), take(rows, WIDTH), take(rows, WIDTH), take(rows, WIDTH)
    gpu = gpu_of(x)

    def launched(record: Linear, overlap: bool) -> None:
        gated = record.activation != ""
        tile = tiles.one_row(WIDTH, gated, gpu.multiprocessors)
        if rows > 1:
            tile = tiles.few_rows(
                rows,
                WIDTH,
                2,
                gated,
                record.norm_weight is not None,
                gpu.multiprocessors,
                gpu.memory,
            )
        linear(record, tile._replace(overlap=overlap))

    def step(overlap: bool) -> None:
        x.copy_(start)
        for up, down, out in weights:
            launched(
                Linear(x, up, norm_weight=gain, norm_eps=1e-5, activation="silu", output=inner),
                overlap,
            )
            launched(Linear(inner, down, residual=x, output=query), overlap)
            at = grids.decode(rows * 4, DIM, 2, 960, -1, gpu.multiprocessors, gpu.memory)
            decode_attention(call.record, at._replace(overlap=overlap))
            launched(Linear(attended, out, residual=query, output=x), overlap)

    in_turn, early = (
        list(replays(partial(step, overlap), (x, inner, attended), start))
        for overlap in (False, True)
    )
    for n, both in enumerate(zip(in_turn, early, strict=True)):
        assert all(a.isfinite().all() and torch.equal(a, b) for a, b in zip(*both, strict=True)), (
            f"replay {n}"
        )
    assert not call.arguments["workspace"].any()
