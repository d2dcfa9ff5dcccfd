"""What tests of Triton's kernels share: the machine, how calls are split, and the check of one
call."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Target, pretend
from attnops.kernels.triton.launch import grids
from attnops.testing import Call, Figures, check_kernel
from tests.mates import invariant

SM90 = Target("cuda", 90, assume=("triton",))
MAY_REFUSE = {
    "attention_backward": {"head_dim", "last_dim_contiguous"},
    "varlen_attention_backward": {"head_dim", "last_dim_contiguous"},
    "decode_attention": {"last_dim_contiguous"},
    "decode_rows": {"q_heads"},
    "experts": {"last_dim_contiguous"},
    "linear": {"norm_weight", "last_dim_contiguous", "tokens"},
    "rms_norm": {"in_features", "last_dim_contiguous"},
    "route": {"experts", "top_k"},
    "gated_delta_rule": {"last_dim_contiguous"},
    "mamba2_scan": {"last_dim_contiguous"},
}
"""Beside dtypes."""

# Small calls are not worth a split; in this mode they are split all the same.
MODES = ("as_is", "split", "deterministic")


def triton(op: str) -> Kernel:
    return kernels_of(op)["triton"]


@contextmanager
def mode(name: str) -> Iterator[None]:
    """What a mode changes, and back. In a process of one test at a time."""
    from attnops.kernels.shared.launch import gpu
    from attnops.kernels.triton.launch import attention

    before = grids.LEAST_KEYS, grids.LEAST_LATENTS, grids.SPLIT_KEYS, gpu.INTERPRETED
    if name == "split":
        grids.LEAST_KEYS = 1
        grids.LEAST_LATENTS = 1
        gpu.INTERPRETED = gpu.INTERPRETED._replace(multiprocessors=16)
    if name == "deterministic":
        grids.SPLIT_KEYS = 128
    attention._launches.cache_clear()
    try:
        with pretend(SM90):
            yield
    finally:
        grids.LEAST_KEYS, grids.LEAST_LATENTS, grids.SPLIT_KEYS, gpu.INTERPRETED = before
        attention._launches.cache_clear()


def check(call: Call, name: str = "as_is", refused: Collection[str] | None = None) -> Figures:
    """The kernel is right in a mode. refused: fields by which it may refuse; None: those of its
    op."""
    kernel = triton(call.op)
    with mode(name):
        figures = check_kernel(invariant(kernel) if name == "deterministic" else kernel, call)
    may = {"dtype", "kv_dtype"} | MAY_REFUSE.get(call.op, set()) if refused is None else {*refused}
    assert {r.field for r in figures.refused} <= may, figures
    assert figures.worst <= 1.0, figures
    return figures
