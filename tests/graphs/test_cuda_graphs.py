"""What CudaGraphs asks of torch.cuda, in which order, against a torch.cuda that only writes it
down."""

import gc
import itertools
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from attnops.core.errors import InvalidInput, NotCapturable
from attnops.graphs import Buckets, CudaGraphs, breakable, capturing
from attnops.graphs.cuda_graphs import Recorded, drawing_nothing
from tests.graphs.standin import StandIn


@pytest.fixture
def cuda(monkeypatch):
    log = []

    class Stream:
        def __init__(self, name="side"):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

        def synchronize(self):
            log.append(f"{self.name} idle")

    class Graph:
        """As torch's: it registers the state that the generator has, allocates for it, and takes it
        into the capture."""

        captured = False

        def capture_begin(self, pool, capture_error_mode):
            self.registered, self.of = generator.state, pool
            torch.empty(1)
            self.registered["capturing"] = not capturing.has_capture_states()
            log.append(f"begin {pool} {capture_error_mode} gc={gc.isenabled()}")
            state.recording.append(pool)

        def capture_end(self):
            log.append("end")
            if self.captured:
                raise RuntimeError("no capture is under way")
            if state.broken:
                state.broken -= 1
                if capturing.version() >= (2, 13) and self.of in state.recording:
                    state.recording.remove(self.of)
                raise RuntimeError("capture was invalidated")
            state.recording.remove(self.of)
            self.captured, self.registered["capturing"] = True, False

        def pool(self):
            if not self.captured:
                raise RuntimeError("without a preceding successful capture")
            return self.of

        def reset(self):
            log.append("reset")
            if self.captured or capturing.version() >= (2, 14):
                release(0, self.of)
            self.captured = False

    class Generator:
        """`state` may be exchanged, as torch's."""

        def __init__(self, of):
            self.state = of

        def graphsafe_get_state(self):
            return Generator(self.state)

        def graphsafe_set_state(self, other):
            self.state = other.state

        def clone_state(self):
            return Generator({**self.state, "capturing": False})

        def get_state(self):
            return torch.tensor(self.state["offset"])

        def set_state(self, offset):
            self.state["offset"] = int(offset)

        def draw(self):
            if self.state["capturing"]:
                raise RuntimeError(
                    "Offset increment outside graph capture encountered unexpectedly."
                )
            self.state["offset"] += 4

    generator = Generator({"offset": 8, "capturing": False})

    def end_pool(index, pool):
        if pool not in state.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        log.append(f"end {pool} by hand")
        state.recording.remove(pool)

    def release(index, pool):
        state.released.append(pool)

    @contextmanager
    def stream(s):
        log.append(f"on {s.name}")
        yield
        log.append(f"off {s.name}")

    state = SimpleNamespace(
        log=log,
        broken=0,
        pools=itertools.count(),
        current=0,
        allocator="native",
        devices=[],
        recording=[],
        released=[],
        generator=generator,
        held={},
    )

    def of_device(answer):
        def ask(device):
            state.devices.append(device)
            return answer

        return ask

    for name, value in {
        "CUDAGraph": Graph,
        "stream": stream,
        "current_stream": lambda device: Stream("main"),
        "graph_pool_handle": lambda: f"pool {next(state.pools)}",
        "synchronize": lambda device: log.append("synchronize"),
        "reset_peak_memory_stats": lambda device: log.append("reset peak"),
        "memory_allocated": of_device(100),
        "max_memory_allocated": lambda device: 350,
        "mem_get_info": of_device((600, 1000)),
        "memory_reserved": lambda device: 150,
        "empty_cache": lambda: log.append("empty cache"),
        "current_device": lambda: state.current,
        "get_allocator_backend": lambda: state.allocator,
        "default_generators": [generator, generator],
        "memory_snapshot": lambda pool, include_traces: state.held.get(pool, ()),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in {
        "_cuda_clearCublasWorkspaces": lambda: log.append("clear workspaces"),
        "_cuda_endAllocateToPool": end_pool,
        "_cuda_releasePool": release,
    }.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    # Of the capture that takes a generator out of another.
    monkeypatch.setattr(torch, "zeros", lambda *given, real=torch.zeros, **more: real(*given))
    monkeypatch.setattr(
        "attnops.graphs.cuda_graphs.capture_stream",
        lambda index: of_device(Stream())(torch.device("cuda", index)),
    )
    return state


@pytest.fixture(params=[(2, 11), (2, 13), (2, 14), (2, 15)], ids=str)
def release_of_torch(request, monkeypatch):
    monkeypatch.setattr(capturing, "version", lambda: request.param)
    return request.param


def captured(device, run):
    device.begin()
    try:
        out = run()
    except BaseException:
        device.abort()
        raise
    return device.end(), out


def session(device, run=lambda: None):
    """A step of one graph, in a session of its own."""
    with device.session():
        recorded = Recorded(device)
        with recorded.whole():
            recorded.begin()
            run()


def test_a_capture(cuda):
    device = CudaGraphs()
    assert gc.isenabled()
    with device.session():
        graph, out = captured(device, lambda: cuda.log.append("run") or 7)
    assert gc.isenabled() and out == 7 and not isinstance(graph, int)
    assert cuda.log == [
        "side waits for main",
        "on side",
        "side idle",
        "clear workspaces",
        "begin pool 0 thread_local gc=False",
        "run",
        "end",
        "clear workspaces",
        "off side",
        "main waits for side",
    ]


@pytest.mark.parametrize(
    ("when", "broken"), [("in the step", 0), ("in the step", 2), ("at its end", 2)]
)
def test_a_capture_that_fails_leaves_nothing_behind(cuda, release_of_torch, when, broken):
    """Or was invalidated, by a synchronise in the step, or in another thread: torch's allocator and
    its generator may still be in it."""
    device = CudaGraphs()
    kept, _ = captured(device, lambda: None)
    cuda.broken = broken  # at every try to end it

    def step():
        if when == "in the step":
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(NotCapturable):
        session(device, step)
    assert cuda.log[-1] == "main waits for side" and cuda.log.count("reset") == 1
    assert cuda.log.count("end pool 0 by hand") == (broken > 0 and release_of_torch < (2, 13))
    assert cuda.released == ["pool 0"] and not cuda.recording, (
        "once, for the graph that lives holds the pool for itself"
    )
    cuda.generator.draw()
    assert gc.isenabled()
    cuda.broken = 0
    after, _ = captured(device, lambda: None)
    assert any("begin pool 1" in line for line in cuda.log), "a pool of its own"
    kept.reset()
    after.reset()
    assert cuda.released == ["pool 0", "pool 0", "pool 1"]
    with pytest.raises(RuntimeError, match="without begin"):
        device.end()
    device.abort()  # nothing is open


def test_a_capture_that_does_not_begin_takes_nothing_from_its_pool(
    cuda, release_of_torch, monkeypatch
):
    device = CudaGraphs()
    kept = captured(device, lambda: None)

    def refused(self, pool, capture_error_mode):
        self.of = "none"
        raise RuntimeError("refused")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refused)
    cuda.broken = 1
    with pytest.raises(NotCapturable):
        session(device)
    assert "pool 0" not in cuda.released, kept


@pytest.mark.parametrize("broken", [1, 2, 9], ids=["once", "twice", "always"])
def test_a_generator_that_a_capture_drew_from_is_taken_out_of_it(cuda, monkeypatch, broken):
    """By a capture that succeeds, with the state that other graphs follow; where none does, by a
    copy of the state."""
    monkeypatch.setattr(capturing, "version", lambda: (2, 11))
    device, own = CudaGraphs(), cuda.generator.state
    with (
        pytest.raises(ZeroDivisionError),
        drawing_nothing(torch.device("cuda:0")),
        device.session(),
    ):
        cuda.broken = broken
        captured(device, lambda: 1 / 0)
    cuda.generator.draw()
    assert cuda.generator.state["offset"] == 12
    assert (cuda.generator.state is own) is (broken < 9)
    assert not cuda.recording and len(set(cuda.released)) == len(cuda.released), "each pool once"


def test_other_threads_draw_while_a_capture_runs(cuda, monkeypatch):
    """On torch below 2.13, whose generator refuses that once a capture has registered its state.
    The numbers are not drawn again."""
    monkeypatch.setattr(capturing, "version", lambda: (2, 11))
    device, generator, own = CudaGraphs(), cuda.generator, cuda.generator.state
    drawn, real = [], torch.empty

    def empty(*given, **more):
        generator.draw()  # before the allocation, from what stands in
        drawn.append(generator.state is own)
        return real(*given, **more)

    monkeypatch.setattr(torch, "empty", empty)
    captured(device, generator.draw)
    assert drawn == [False] and generator.state is own and own == {"offset": 16, "capturing": False}
    with (
        drawing_nothing(torch.device("cuda:0")),
        pytest.raises(RuntimeError, match="outside graph capture"),
    ):
        captured(device, generator.draw)


def test_a_step_that_draws_without_saying_so_is_captured_as_one_that_does():
    class Refusing(StandIn):
        """As torch below 2.13, where a capture was begun as one that draws nothing."""

        def end(self):
            if not capturing.DRAWS.get():
                raise RuntimeError(
                    "Attempt to increase offset for a CUDA generator not in capture mode."
                )
            return super().end()

    def step(x):
        return x + torch.rand_like(x)

    device = Refusing()
    graphed = breakable(step, Buckets(tokens=(4,)), batch=None, tokens=("x",), graphs=device)
    assert graphed(x=torch.zeros(4)).shape == (4,) and graphed.draws
    assert device.calls.count("abort") == 1 and len(device.graphs) == 1


def beside(cuda, device, other):
    """Call `other` in a thread that begins while another captures. It ends after the capture."""
    began, may_end = threading.Event(), threading.Event()

    def capture():
        with device.session():
            captured(device, lambda: (began.set(), may_end.wait(60)))

    first, second = threading.Thread(target=capture), threading.Thread(target=other)
    first.start()
    assert began.wait(60)
    second.start()
    second.join(0.1)
    cuda.log.append("still captures")
    may_end.set()
    first.join(60)
    second.join(60)


def test_no_thread_waits_for_the_device_or_frees_within_a_capture_of_another(cuda):
    """Through an object of its own, as another model has one."""
    theirs = CudaGraphs("cuda:0")
    graph, _ = captured(theirs, lambda: None)

    def free():
        theirs.settle()
        graph.reset()
        theirs.release()
        theirs.warm(lambda: None)

    beside(cuda, CudaGraphs("cuda:0"), free)
    after = cuda.log[cuda.log.index("still captures") :]
    done = [line for line in after if line in ("synchronize", "reset", "empty cache")]
    assert done == ["synchronize", "reset", "empty cache", "synchronize"]
    assert cuda.log.count("synchronize") == 2 and after.index("end") < after.index("synchronize")


def test_sessions_on_one_stream_take_turns(cuda):
    """A wait for the caller's stream, in another thread's capture, would become part of it."""
    device = CudaGraphs()

    def capture():
        with device.session():
            captured(device, lambda: None)

    beside(cuda, device, capture)
    one = ["side waits for main", "on side", "off side", "main waits for side"]
    assert [line for line in cuda.log if line in one] == one * 2


def test_a_pool_is_as_old_as_its_graphs(cuda):
    """torch's allocator fails on the handle of a pool that no graph holds any more: after free(),
    or a first capture that failed."""
    device = CudaGraphs()

    def begun():
        return [line.split()[2] for line in cuda.log if line.startswith("begin")]

    first, second = (captured(device, lambda: None)[0] for _ in range(2))
    first.reset()
    third = captured(device, lambda: None)[0]
    assert begun() == ["0", "0", "0"]
    second.reset()
    third.reset()
    with pytest.raises(ZeroDivisionError):
        captured(device, lambda: 1 / 0)
    last = captured(device, lambda: None)[0]
    assert begun() == ["0", "0", "0", "1", "2"]
    del last
    captured(device, lambda: None)
    assert begun()[-1] == "3"


@pytest.mark.parametrize("free", [600, 124])
def test_memory(cuda, free, monkeypatch):
    """The cache is emptied where the driver has less than an eighth."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    device = CudaGraphs("cuda:0")
    assert device.measured(lambda: cuda.log.append("run")) == 250
    emptied = ["empty cache"] * (free == 124)
    assert cuda.log == ["synchronize", "reset peak", "run", "synchronize", *emptied]
    device.release()
    assert cuda.log[-1] == "empty cache"


def test_the_bytes_of_graphs_are_those_of_their_pool(cuda):
    """Not of another process, which the driver counts, nor of tensors of another thread."""
    device = CudaGraphs()
    cuda.held = {"pool 9": [{"total_size": 1 << 30}]}
    recorded = Recorded(device)

    def captures(*segments):
        recorded.begin()
        held = cuda.held.setdefault(device._pool, [])
        held += [{"total_size": size} for size in segments]
        recorded.end()

    captures(3, 4)
    captures()
    captures(5)
    assert recorded.bytes_of == [7, 0, 5] and device.used() == 12
    recorded.reset()
    assert device.used() == 0, "the next capture takes another pool"
    again = Recorded(device)
    again.begin()
    cuda.held[device._pool] = [{"total_size": 2}]
    again.end()
    assert again.bytes_of == [2]


def test_weak_memory_is_not_held(cuda, monkeypatch):
    """A tensor over the same bytes; where torch cannot make one, the tensor itself."""
    x = torch.arange(12.0).view(3, 4)[1:, ::2]
    made = x.untyped_storage()
    name = "_construct_storage_from_data_pointer"
    monkeypatch.setattr(
        torch._C, name, lambda at, where, size: made if size == 48 else None, raising=False
    )
    device = CudaGraphs()
    y = device.weak(x)
    assert (
        y is not x
        and torch.equal(y, x)
        and y.stride() == x.stride()
        and y.data_ptr() == x.data_ptr()
    )
    monkeypatch.delattr(torch._C, name)
    assert device.weak(x) is x


@pytest.mark.parametrize("given", ["cuda", "cuda:1"])
def test_the_device_is_bound_at_the_first_use(cuda, given):
    """torch.cuda.set_device() between two captures changes which device `cuda` is."""
    device = CudaGraphs(given)
    for cuda.current in (1, 0):
        with device.session():
            captured(device, lambda: None)
        device.measured(lambda: None)
    assert set(cuda.devices) == {torch.device("cuda:1")}


def test_what_is_refused(cuda):
    """An allocator whose addresses change before anything is begun, as a reason that a patched
    model's report can say."""
    device, cuda.allocator = CudaGraphs(), "cudaMallocAsync"
    with (
        pytest.raises(NotCapturable, match="got the allocator 'cudaMallocAsync', want 'native'"),
        device.session(),
    ):
        pass
    assert not cuda.log and gc.isenabled()
    with pytest.raises(InvalidInput, match="device: got cpu"):
        CudaGraphs("cpu")


@pytest.fixture
def thawed():
    """As in a program that froze nothing; the tests' own conftest does."""
    gc.unfreeze()
    yield
    gc.freeze()


class Ring:
    """Garbage that reference counts do not find."""

    def __init__(self):
        self.ring = self


def test_sessions_within_one_collect_what_was_made_since(cuda, thawed):
    """All buckets share a session. To look at everything again for each would take longer than many
    a capture."""
    device, before = CudaGraphs(), gc.get_freeze_count()
    died = []

    def ring(name):
        weakref.finalize(Ring(), died.append, name)

    def run():
        ring("of a capture")
        with device.session():
            assert "of a capture" not in died[seen:], "no garbage is collected in a capture"
        return len(died)

    ring("of before")
    with device.session():
        assert died == ["of before"]
        for _ in range(3):
            seen = len(died)
            with device.session():
                assert died[1:] == ["of a capture", "between"] * (len(died) // 2), (
                    "none of an earlier bucket holds memory in a later"
                )
                assert len(gc.get_objects()) < 10_000, "what was there before is not looked at"
                seen = len(died)
                assert captured(device, run)[1] == seen
            ring("between")
        assert len(died) == 5
    assert gc.isenabled() and gc.get_freeze_count() == before
    assert cuda.log.count("on side") == cuda.log.count("off side") == 1
    gc.collect()
    assert len(died) == 7


@pytest.mark.parametrize("free", [60, 80])
def test_old_garbage_is_looked_for_where_memory_is_short(cuda, thawed, monkeypatch, free):
    """Free memory is the driver's and that of the allocator's blocks without a tensor, here 50:
    less than 125 of 1000 is short."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    died = []
    old = Ring()
    weakref.finalize(old, died.append, "old")
    gc.collect()  # in the oldest generation from here on
    del old
    with CudaGraphs().session():
        assert died == (["old"] if free == 60 else [])


def test_what_a_program_froze_stays_frozen(cuda, thawed):
    """Before it forked, say. Then all else is looked at in every session."""
    device, died = CudaGraphs(), []
    gc.freeze()
    before, kept = gc.get_freeze_count(), [[] for _ in range(20_000)]
    with device.session():
        weakref.finalize(Ring(), died.append, 1)
        with device.session():
            assert died == [1] and len(gc.get_objects()) > len(kept)
    assert gc.get_freeze_count() > 0.9 * before


class Interrupt(BaseException):
    """As a KeyboardInterrupt."""


WHERE = {
    "wait_stream": lambda device: type(device._stream),
    "capture_begin": lambda device: torch.cuda.CUDAGraph,
    "capture_end": lambda device: torch.cuda.CUDAGraph,
    "freeze": lambda device: gc,
}


@pytest.mark.parametrize("where", WHERE)
def test_an_interrupt_leaves_the_collector_and_the_device_as_they_were(
    cuda, thawed, monkeypatch, where
):
    device, before = CudaGraphs(), gc.get_freeze_count()
    owner = WHERE[where](device)
    real = getattr(owner, where)

    def interrupted(*args, **named):
        real(*args, **named)
        raise Interrupt

    with monkeypatch.context() as now:
        now.setattr(owner, where, interrupted)
        with pytest.raises(Interrupt):
            session(device)
    assert gc.isenabled() and gc.get_freeze_count() == before
    cuda.log.clear()
    with device.session():
        captured(device, lambda: None)
    assert "on side" in cuda.log and any(
        line.endswith("thread_local gc=False") for line in cuda.log
    )


def test_garbage_is_collected_between_captures(cuda):
    """Pieces compile there, for seconds, while other threads go on. A program without collections
    keeps none."""
    device = CudaGraphs()
    for collects in (True, False):
        (gc.enable if collects else gc.disable)()
        try:
            with device.session():
                captured(device, lambda: None)
                assert gc.isenabled() is collects
                with pytest.raises(ZeroDivisionError):
                    captured(device, lambda: 1 / 0)
                assert gc.isenabled() is collects
            assert gc.isenabled() is collects
        finally:
            gc.enable()
