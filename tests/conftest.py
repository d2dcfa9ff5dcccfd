"""One seed, one thread, one clean compiler for every test."""

import gc
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from tests.helpers import ROOT

# Read by OpenMP and by Inductor when torch is loaded, hence before any test module.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Scalar loops: g++ takes half as long, and an empty cache folder is not filled with trials of
# vector instructions first.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# No line tables for profilers, a seventh of what g++ takes.
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")
# Dynamo remembers what torch's own ops give fake tensors, and nothing of ours. Where sizes are open
# five look-ups of six miss, and a miss takes longer than the answer.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
# Dynamo looks for garbage after each trace. Tests that ask what is freed do so themselves.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# Colours and a width of their own in what commands print.
for _name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(_name, None)
# What this user has measured shall not decide a test. Nothing is written there.
os.environ["ATTNOPS_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), "attnops-tests-no-tables")

if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # The first example of a test may compile; a time limit for each would fail on it.
    settings.register_profile(
        "attnops", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("attnops")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        action="store_true",
        help="leave out tests marked `full`, and all cases but every nth of those marked "
        "`sweep(n)`",
    )


# After -k and -m have chosen, so that of each file a chosen test says why it is skipped, and the
# nth of the chosen cases runs.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("part"):
        leave_out(config, items)
    skip_on_gpu(items)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All cases but the first of every n of a test marked `sweep(n)`, and every test marked
    `full`."""
    cases, kept, left = Counter[str](), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        test, mark = item.nodeid.partition("[")[0], item.get_closest_marker("sweep")
        if item.get_closest_marker("full"):
            stays = False
        else:
            stays = mark is None or cases[test] % mark.args[0] == 0
        cases[test] += 1
        (kept if stays else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def skip_on_gpu(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if torch.cuda.is_available():
        return
    # One line a file says so.
    count = Counter(item.path for item in on_gpu)
    first = {item.path: item for item in reversed(on_gpu)}
    for path, item in first.items():
        item.add_marker(
            pytest.mark.skip(
                reason=f"{count[path]} tests need a CUDA device; torch {torch.__version__} finds "
                "none"
            )
        )
    left_out = {*on_gpu} - {*first.values()}
    items[:] = [item for item in items if item not in left_out]


# Nearly all that imports and collection make lives to the end, and looking for cycles in it takes a
# quarter of their time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    # Dynamo allocates by the million, where the default looks for cycles at every 700th object.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # for libraries that report as leaked what is left at the end


def _no_latency(*_: object) -> float:
    return 0.0


# Only what is loaded is seeded and reset: a test of data alone shall not wait for torch.
@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    random.seed(0)
    if torch := sys.modules.get("torch"):
        # Where there is no device, torch.manual_seed would keep a seed and a traceback for one,
        # longer than many a test takes.
        (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)
        torch.set_num_threads(1)
    if guards := sys.modules.get("torch._dynamo.guards"):
        # For a log line, and it empties the processor's caches at every trace.
        vars(guards)["profile_guard_manager"] = _no_latency
    if errors := sys.modules.get("attnops.core.errors"):
        errors._WARNED.clear()  # what is said once a process is said in each test
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a script of docs/ by its name."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module
