"""Kernels are compiled in threads before they are launched. Stand-ins for Triton's kernels and its
compiler say the order."""

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnops.core.errors import InvalidInput
from attnops.kernels.shared.launch import beside
from attnops.kernels.shared.launch.beside import Beside
from attnops.ops.case_data import F32

LIMIT = 60
"""Seconds after which a test no longer waits."""


class Kernel:
    """As a function of triton.jit, to the launches."""

    arg_names = ("x", "rows", "count", "WIDE")
    do_not_specialize = ("count",)
    _hash_lock = None


class Compiler:
    """In place of `build`: takes part in the order of events, and waits where it is held."""

    def __init__(self, held=False):
        self.built, self.free, self.began = [], threading.Event(), threading.Semaphore(0)
        if not held:
            self.free.set()

    def __call__(self, launch):
        assert threading.current_thread() is not threading.main_thread()
        self.built.append(launch)
        self.began.release()
        assert self.free.wait(LIMIT)


def begun(found, *calls):
    """`found` with the launches of these calls begun: (kernel, argument, the others by name) of
    each."""

    def run(call):
        for kernel, x, given in calls:
            assert found.looks
            assert found.takes(kernel, (1,), (x,), given)

    found.begin(run, None)
    return found


def in_a_thread(run):
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def settled(found):
    while found.looks:
        for launch in list(found._launches.values()):
            assert launch.done.wait(LIMIT)


def test_a_launch_waits_for_the_thread_that_compiles_its_kernel():
    compiler, kernel, x, order = Compiler(held=True), Kernel(), torch.zeros(4), []
    found = begun(Beside(compiler), (kernel, x, {"rows": 32, "WIDE": 8}))
    assert compiler.began.acquire(timeout=LIMIT)

    def launch():
        assert not found.takes(
            kernel, (1,), (x,), {"rows": 64, "WIDE": 8}
        )  # a kernel of Triton serves both
        order.append("launched")

    thread = in_a_thread(launch)
    assert not found.takes(
        kernel, (1,), (x,), {"rows": 64, "WIDE": 16}
    )  # another one, which no thread compiles
    order.append("compiled")
    compiler.free.set()
    thread.join(LIMIT)
    settled(found)
    assert order == ["compiled", "launched"] and len(compiler.built) == 1


def test_what_is_not_yet_compiled():
    compiler, kernel, x = Compiler(held=True), Kernel(), torch.zeros(4)
    found = Beside(compiler)
    assert not found.pending()
    begun(found, (kernel, x, {"rows": 32}), (kernel, x, {"rows": 1}))
    one, other = found.pending()
    assert not one.done.wait(0.01) and not other.done.is_set()
    compiler.free.set()
    assert one.done.wait(LIMIT) and other.done.wait(LIMIT)
    settled(found)
    assert not found.pending()


X = torch.zeros(8)
OTHERS: list[tuple[Any, bool]] = [
    ({"rows": 48}, True),
    ({"rows": 1}, False),
    ({"rows": 33}, False),
    ({"count": 1}, True),
    ({"count": 2.0}, False),
    ({"WIDE": 32}, False),
    ({"num_stages": 3}, False),
]
OTHERS += [(X[4:], True), (X[1:], False), (X.double(), False), (None, False)]


@pytest.mark.parametrize(("other", "alike"), OTHERS, ids=str)
def test_launches_of_one_compiled_kernel_are_compiled_once(other, alike):
    """Numbers that Triton tells apart, addresses and dtypes make another kernel."""
    compiler = Compiler(held=True)
    kernel = Kernel()
    given = {"rows": 32, "count": 32, "WIDE": 8, "num_stages": 2}
    second = (kernel, X, given | other) if isinstance(other, dict) else (kernel, other, given)
    found = begun(Beside(compiler), (kernel, X, given), second)
    compiler.free.set()
    settled(found)
    assert len(compiler.built) == 1 + (not alike)


def test_what_was_compiled_is_not_begun_again():
    """As for new pages. Else each launch would be looked at while threads find it compiled."""
    compiler, kernel, given = Compiler(), Kernel(), {"rows": 32, "WIDE": 8}
    found = begun(Beside(compiler), (kernel, X, given))
    settled(found)
    begun(found, (kernel, X, given))
    assert not found.looks and len(compiler.built) == 1


class Unread:
    """An argument that is not to be looked at."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} is read")


def test_a_launch_of_another_kernel_than_those_that_are_compiled_is_not_looked_at():
    compiler = Compiler(held=True)
    found = begun(Beside(compiler), (Kernel(), X, {}))
    assert compiler.began.acquire(timeout=LIMIT)
    assert found.looks and not found.takes(Kernel(), (1,), (Unread(),), {"x": Unread()})
    compiler.free.set()
    settled(found)


def test_a_launch_does_not_wait_for_a_thread_that_has_not_begun():
    compiler, kernels = Compiler(held=True), [Kernel() for _ in range(beside.MOST_THREADS + 1)]
    found = begun(Beside(compiler), *((kernel, None, {}) for kernel in kernels))
    for _ in range(beside.MOST_THREADS):
        assert compiler.began.acquire(timeout=LIMIT)
    assert not found.takes(kernels[-1], (1,), (None,), {})
    compiler.free.set()
    settled(found)
    assert {launch.kernel for launch in compiler.built} == set(kernels[:-1])


def test_an_error_of_a_thread_leaves_the_kernel_to_its_launch():
    kernel, tried = Kernel(), threading.Event()

    def build(launch):
        tried.set()
        raise RuntimeError("no compiler")

    found = begun(Beside(build), (kernel, None, {}))
    assert not found.takes(kernel, (1,), (None,), {})
    assert tried.is_set() or not found.looks
    settled(found)


@pytest.mark.parametrize("before", [0, 1], ids=["no thread", "a second thread"])
def test_a_thread_that_cannot_start_leaves_kernels_to_their_launches(before, monkeypatch):
    """As at a limit of processes. Else each launch would be looked at from then on."""
    compiler, kernels, given = Compiler(held=True), [Kernel(), Kernel()], {"rows": 32, "WIDE": 8}
    found = begun(Beside(compiler), *((kernel, None, given) for kernel in kernels[:before]))

    def none(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as now:
        now.setattr(threading.Thread, "start", none)
        found.start()
        begun(found, (kernels[1], None, given))
    assert found._threads == before and found.looks is bool(before)
    compiler.free.set()
    settled(found)
    assert not found.takes(kernels[1], (1,), (None,), given)
    begun(found, (Kernel(), None, given))
    settled(found)
    assert len(compiler.built) == 1 + 2 * before


def test_an_error_of_the_host_side_notes_no_launch():
    def run(call):
        raise InvalidInput("x", 1, 2)

    found = Beside(Compiler())
    with pytest.raises(InvalidInput):
        found.begin(run, None)
    assert not found.looks and not found.takes(Kernel(), (1,), (None,), {})


def test_launches_of_other_threads_are_made_meanwhile():
    found, seen = Beside(Compiler()), []

    def run(call):
        in_a_thread(lambda: seen.append(found.takes(Kernel(), (1,), (None,), {}))).join(LIMIT)
        seen.append(found.takes(Kernel(), (1,), (None,), {}))

    found.begin(run, None)
    settled(found)
    assert seen == [False, True]


def test_a_kernel_waits_for_the_driver_that_a_thread_compiles(monkeypatch):
    order, began, free = [], threading.Event(), threading.Event()

    class Driver:
        def get_current_device(self):
            return 0

        def launcher_cls(self, src, metadata):
            order.append("launcher")

    def driver():
        order.append("driver")
        began.set()
        assert free.wait(LIMIT)
        return Driver()

    class Compiled(Kernel):
        device_caches = (None,)  # by device
        src = metadata = None

        def warmup(self, *args, grid, **given):
            order.append(("kernel", args, grid, given))
            return self

    monkeypatch.setattr(beside, "driver", driver)
    found = Beside()
    found.start()
    assert began.wait(LIMIT)
    found.start()
    begun(found, (Compiled(), 1, {"rows": 2}))
    free.set()
    settled(found)
    assert order == ["driver", "driver", ("kernel", (1,), (1,), {"rows": 2}), "launcher"]


def test_what_all_kernels_wait_for_begins_at_once(monkeypatch):
    """Processes that compile, first, then what this process reads of Triton."""
    order, target = [], SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    active = SimpleNamespace(get_current_target=lambda: target)
    workers = SimpleNamespace(start=lambda count, target: order.append(target))
    monkeypatch.setattr(beside, "driver", lambda: active)
    monkeypatch.setattr(beside, "WORKERS", workers)
    monkeypatch.setattr(beside, "hash_compiler", lambda: order.append("hash"))
    Beside()._start()
    assert order == [("cuda", 90, 32), "hash"]


def test_triton_keeps_its_hash():
    from triton.compiler import compiler
    from triton.runtime import cache

    key = getattr(cache, "triton_key", None) or compiler.triton_key
    key.cache_clear()
    beside.hash_compiler()
    assert key.cache_info().currsize == 1


def test_without_a_lock_of_tritons_no_thread_compiles():
    compiler = Compiler()
    found = begun(Beside(compiler), (type("Interpreted", (), {"arg_names": ()})(), None, {}))
    assert not found.looks and not compiler.built


def test_after_a_fork_no_thread_is_waited_for():
    compiler, kernel = Compiler(held=True), Kernel()
    found = begun(Beside(compiler), (kernel, None, {}))
    assert compiler.began.acquire(timeout=LIMIT)
    found.reset()
    assert not found.looks and not found.takes(kernel, (1,), (None,), {})
    compiler.free.set()


END = """
import threading, time, types
from attnops.kernels.shared.launch.beside import Beside
built = []
def build(launch):
    built.append(launch)
    print("built", flush=True)
    threading.main_thread().join()
found = Beside(build)
kernel = lambda: types.SimpleNamespace(arg_names=(), _hash_lock=None)
found.begin(lambda call: [found.takes(kernel(), (1,), (), {}) for _ in range(40)], None)
while not built:
    time.sleep(0.01)
"""


@pytest.mark.full
def test_a_process_ends_after_the_kernels_that_threads_have_begun():
    done = subprocess.run(
        [sys.executable, "-c", END], capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert 1 <= done.stdout.count("built") <= beside.MOST_THREADS, done.stderr


def test_calls_on_fake_tensors_are_compiled_and_not_launched():
    triton = pytest.importorskip("triton")
    from attnops.kernels.triton.launch import data
    from attnops.ops.pages.record import WriteKV

    noted = Beside(Compiler())
    noted._add = lambda launch: launches.append(launch)
    launches = []
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnops.kernels.shared.launch.gpu.BESIDE", noted)
        key, pages = torch.empty(5, 2, 16), torch.empty(3, 4, 2, 16)
        noted.begin(
            data.write_kv, WriteKV(key, key, pages, pages, torch.empty(5, dtype=torch.int64))
        )
    assert (
        triton
        and [launch.grid for launch in launches]
        and all(launch.given["PAGE"] == 4 for launch in launches)
    )
    assert {
        x.dtype for launch in launches for x in launch.args if isinstance(x, beside.Pointer)
    } == {F32, torch.int64}
