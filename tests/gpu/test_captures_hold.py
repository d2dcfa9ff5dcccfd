"""Captures that fail, and captures beside other threads, on a real GPU: what they leave behind, and
what they take from others."""

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the hf extra is not installed")

import attnops
from attnops.graphs import Buckets, CudaGraphs, breakable
from attnops.graphs.capturing import capture_stream, side_stream
from attnops.hf import tiny
from tests.gpu.helpers import LIMIT, together

pytestmark = [
    pytest.mark.alone,  # what is invalidated, drawn and reserved is the process's
    pytest.mark.skipif(not torch.cuda.is_available(), reason="captures need a GPU"),
    pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast"),
]

CALLS = 8
"""Calls of generate() after which what is tried again has succeeded: three for the steps, and as
many for the tail."""
BIG = 2 * 2**30
"""Bytes that must come back to the driver."""


GRAPHS = ("paged", "breakable", "", "")
"""What generate() took when it had its graphs."""


class Waiting(nn.Module):
    """An activation that waits for the device. A graph has no wait."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, x: Tensor) -> None:
        torch.cuda.synchronize()

    def forward(self, x: Tensor) -> Any:
        self.wait(x)
        return self.inner(x)


class Reading(Waiting):
    """An activation that reads a number, which no graph may hold and no recording repeats."""

    def wait(self, x: Tensor) -> None:
        float(x.sum())


def model_of(seed: int) -> Any:
    return tiny.model("llama", seed=seed).cuda().eval()


def generated(model: Any) -> Tensor:
    ids = torch.randint(
        2, 90, (2, 9), generator=torch.Generator().manual_seed(1), device="cpu"
    ).cuda()
    found: Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
    )
    return found


def checked(model: Any, want: Tensor, handle: Any) -> tuple[str, ...]:
    """Generate, and return what that took."""
    got, took = generated(model), handle.took
    assert torch.equal(got, want), (
        f"\ngot {got.tolist()}\nwant {want.tolist()}\ntook {took}\n{handle.report()}"
    )
    return took.cache, took.decode, took.why, took.loop


def check_draws() -> None:
    """The default generator draws, outside a capture."""
    chosen = torch.multinomial(torch.full((3, 5), 0.2, device="cuda"), 1)
    assert chosen.shape == (3, 1)
    assert torch.empty(1000, device="cuda").normal_().isfinite().all()
    assert torch.rand(1000, device="cuda").unique().numel() > 900


def check_memory() -> None:
    """What is freed goes back to the driver: no pool is still open."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    x = torch.empty(BIG, dtype=torch.uint8, device="cuda")
    del x
    torch.cuda.empty_cache()
    after = torch.cuda.memory_reserved()
    assert after - before < BIG // 4, (
        f"{before} bytes reserved before, {after} "
        f"after\n{torch.cuda.memory_summary(abbreviated=True)}"
    )


def check_captures(seed: int = 5) -> None:
    """A model that is patched now has its graphs at once."""
    model = model_of(seed)
    want = generated(model)
    with attnops.patch(model) as handle:
        assert [checked(model, want, handle) for _ in range(2)] == [GRAPHS] * 2


@contextmanager
def beside(run: Callable[[], None]) -> Iterator[list[str]]:
    """Call `run` again and again in a thread, until the block ends. Yields the errors of that
    thread."""
    errors: list[str] = []
    ends, began = threading.Event(), threading.Event()

    def loop() -> None:
        while not ends.is_set():
            try:
                run()
            except Exception:
                errors.append(traceback.format_exc())
            began.set()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        assert began.wait(LIMIT)
        yield errors
    finally:
        ends.set()
        thread.join(LIMIT)
    assert not thread.is_alive()


def test_a_wait_in_a_layer_is_no_part_of_its_graph() -> None:
    """The graph holds the torch functions of the layer, in order."""
    model = model_of(2)
    mlp = model.model.layers[0].mlp
    mlp.act_fn = Waiting(mlp.act_fn)
    want = generated(model)
    with attnops.patch(model) as handle:
        assert [checked(model, want, handle) for _ in range(3)] == [GRAPHS] * 3
        assert handle.took.prompt == "captured"


def test_a_model_that_reads_in_its_forward() -> None:
    """Its captures fail each time, and nothing else does."""
    model = model_of(2)
    mlp = model.model.layers[0].mlp
    mlp.act_fn = Reading(mlp.act_fn)
    want = generated(model)
    with attnops.patch(model) as handle:
        for _ in range(3):
            _, decode, why, _ = checked(model, want, handle)
            assert decode == "hf" and why
            check_draws()
        check_memory()
        check_captures()
        checked(model, want, handle)
    check_memory()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_captures_that_another_thread_invalidates(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for the whole device, in the midst of the first captures. They are tried again, and
    pages and graphs stay."""
    model, left, real = model_of(3), [times], CudaGraphs.begin
    want = generated(model)

    def synchronise() -> None:
        with suppress(RuntimeError):  # what CUDA says of a wait for a device that captures
            torch.cuda.synchronize()

    def begin(self: CudaGraphs) -> None:
        real(self)
        if left[0] > 0:
            left[0] -= 1
            together([synchronise])

    monkeypatch.setattr(CudaGraphs, "begin", begin)
    took = []
    with attnops.patch(model) as handle:
        for _ in range(CALLS):
            took.append(checked(model, want, handle))
            check_draws()
        assert not left[0], took
        assert {cache for cache, *_ in took} == {"paged"} and took[-1] == GRAPHS, took
        check_memory()
        check_captures()


def test_a_thread_that_synchronises_all_the_time() -> None:
    """Captures may fail for as long as it does. Tokens are right meanwhile, and graphs come after
    release()."""
    model = model_of(4)
    want = generated(model)
    with attnops.patch(model) as handle:
        # Its own errors are those of CUDA, which refuses a wait for a device that captures.
        with beside(torch.cuda.synchronize):
            for _ in range(CALLS):
                checked(model, want, handle)
        handle.release()
        check_draws()
        check_memory()
        assert checked(model, want, handle) == GRAPHS
        check_captures()


def test_two_threads_with_two_models() -> None:
    """Each captures, frees and captures again, while the other does."""
    models = [model_of(seed) for seed in (6, 7)]
    wants = [generated(model) for model in models]
    handles = [attnops.patch(model) for model in models]
    start, seen = threading.Barrier(2), []

    def work(number: int) -> None:
        start.wait(LIMIT)
        for again in range(6):
            seen.append(checked(models[number], wants[number], handles[number]))
            if again % 2:
                handles[number].release()

    together([partial(work, number) for number in range(2)])
    assert seen == [GRAPHS] * 12
    for handle in handles:
        handle.unpatch()
    check_draws()
    check_memory()


def test_a_thread_draws_while_another_captures() -> None:
    model, drawn, took = model_of(8), list[Tensor](), []
    want = generated(model)

    def draw() -> None:
        drawn.append(torch.rand(16, device="cuda"))
        time.sleep(0.0001)

    with attnops.patch(model) as handle:
        with beside(draw) as errors:
            for _ in range(10):
                took.append(checked(model, want, handle))
                handle.release()
        assert not errors, f"{len(errors)} of {len(drawn) + len(errors)} draws failed: {errors[0]}"
        assert took == [GRAPHS] * 10
    again = len(drawn) - torch.stack(drawn).unique(dim=0).shape[0]
    assert again <= 0.01 * len(drawn), f"{again} of {len(drawn)} draws came twice"


def test_captures_draw_nothing() -> None:
    model = model_of(9)
    found = []
    with attnops.patch(model):
        for captures in (False, True):
            torch.cuda.manual_seed(11)
            first = torch.rand(8, device="cuda")
            if captures:
                generated(model)
            found.append(torch.cat([first, torch.rand(8, device="cuda")]))
    assert torch.equal(*found), str(found)


def test_a_step_that_draws_is_captured_all_the_same() -> None:
    """Whether it says so or not. Its replays follow the generator, also after a capture that
    failed."""
    fails = [False]

    def step(x: Tensor) -> Tensor:
        out = x + torch.rand_like(x)
        if fails[0]:
            torch.cuda.synchronize()
        return out

    x = torch.zeros(4, 1024, device="cuda")
    for draws in (True, False):
        fails[0] = False
        ours, other = (
            breakable(
                step,
                Buckets(decode=(4,)),
                batch=None,
                tokens=(),
                requests=("x",),
                returns="requests",
                draws=draws,
            )
            for _ in range(2)
        )
        ours(x=x)
        fails[0] = True
        with pytest.raises(Exception, match="cannot be captured"):
            other(x=x)
        fails[0] = False
        found = []
        for _ in range(2):
            torch.cuda.manual_seed(5)
            found.append([ours(x=x).clone() for _ in range(3)])
        for first, second in zip(*found, strict=True):
            assert torch.equal(first, second), f"draws={draws}"
        assert not torch.equal(found[0][0], found[0][1]), f"draws={draws}"
        check_draws()
        ours.free()
        other.free()
    check_memory()


@pytest.mark.parametrize("own", [capture_stream, side_stream])
def test_our_streams_are_not_some_that_others_get(own: Callable[[int], Any]) -> None:
    stream = own(torch.cuda.current_device())
    assert isinstance(stream, torch.cuda.ExternalStream), "the driver made no stream"
    assert stream is own(torch.cuda.current_device())
    others = {
        torch.cuda.Stream(priority=priority).cuda_stream for priority in (0, -1) for _ in range(40)
    }
    assert stream.cuda_stream not in {*others, torch.cuda.default_stream().cuda_stream}
    check_captures(10)
