"""What several tests need: where the code lies, how it names itself, and a Python that has imported
nothing yet."""

import ast
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"attnops": "attnops", "lowering": "attnops.lowering", "graphs": "attnops.graphs"}

# The path finder answers "not found" for the blocked names. A finder that raised would also break
# importlib.util.find_spec, which a package that is truly absent does not.
_BLOCK = """
import sys
from importlib.machinery import PathFinder
def _block(names, find):
    def find_spec(fullname, path=None, target=None):
        return None if fullname.partition(".")[0] in names else find(fullname, path, target)
    return staticmethod(find_spec)
PathFinder.find_spec = _block({names!r}, PathFinder.find_spec)
"""


@cache
def sources() -> Mapping[str, Path]:
    """Module name -> file, for every file of attnops, lowering and graphs (links are not followed
    twice)."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT / folder)
            if folder == "attnops" and relative.parts[0] in FOLDERS:
                continue
            found[
                ".".join([package, *relative.with_suffix("").parts]).removesuffix(".__init__")
            ] = path
    return found


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node of a syntax tree except the bodies of ``if TYPE_CHECKING:``, which never run."""
    yield tree
    children: Iterable[ast.AST] = ast.iter_child_nodes(tree)
    if isinstance(tree, ast.If) and ast.unparse(tree.test).rpartition(".")[2] == "TYPE_CHECKING":
        children = tree.orelse
    for child in children:
        yield from runtime_nodes(child)


def fresh_process(
    code: str,
    *,
    block: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = 240,
) -> str:
    """Run code in a new Python at the repository's root and return what it printed.

    Args:
        code: Python source.
        block: top-level modules that this process shall not find, as if they were not installed.
        env: variables set on top of this process's own.
        timeout_s: seconds until the process is ended.

    Raises:
        AssertionError: the process failed; the text is what it wrote to stderr.
    """
    prelude = _BLOCK.format(names=frozenset(block)) if block else ""
    done = subprocess.run(
        [sys.executable, "-c", prelude + code],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        raise AssertionError(
            f"the process ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done.stdout


@contextmanager
def importable(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Within the block `import` finds these modules under these names; after it, what it found
    before."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


# Most of what a test of a compiled or patched model waits for in a new Python, and none of it ours.
READY = [
    "torch",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "transformers.modeling_utils",
    "transformers.generation",
]


@cache
def ready() -> Any:
    """A multiprocessing context whose processes begin with these modules."""
    context = get_context("forkserver")
    context.set_forkserver_preload(READY)
    return context


@cache
def _with_torch() -> ProcessPoolExecutor:
    """A process that has loaded torch alone, which forks those of `torch_process`."""
    return ProcessPoolExecutor(1, get_context("spawn"), import_module, ("torch",))


def _ended(process: BaseProcess, timeout_s: float) -> int | None:
    """Start a process and wait until it ends, by itself or after timeout_s: its exit code."""
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def _forked(given: tuple[Any, ...], timeout_s: float) -> int | None:
    return _ended(get_context("fork").Process(target=_execute, args=given), timeout_s)


def _execute(code: str, arguments: list[str], env: dict[str, str], out: str) -> None:
    # As in tests/conftest.py: compilers allocate by the million.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{out}/{name}", os.O_WRONLY | os.O_CREAT), fd)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = arguments
    sys.path[:0] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def ready_process(
    code: str, *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 240
) -> str:
    """As `fresh_process`, in a process that has loaded torch, its compiler and transformers
    already, and nothing of ours.

    It is forked from one that did, which saves the seconds they take. For tests that do not ask
    what is loaded, or what happens while it is: those variables in `env` that torch reads when it
    is imported come too late. arguments: sys.argv after its first.
    """

    def run(given: tuple[Any, ...]) -> int | None:
        return _ended(ready().Process(target=_execute, args=given), timeout_s)

    return _printed(run, code, arguments, env)


def torch_process(
    code: str,
    *arguments: str,
    block: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = 240,
) -> str:
    """As `ready_process`, in a process that has loaded torch and nothing that torch does not load.

    block: as of `fresh_process`.
    """
    prelude = _BLOCK.format(names=frozenset(block)) if block else ""

    def run(given: tuple[Any, ...]) -> int | None:
        return _with_torch().submit(_forked, given, timeout_s).result()

    return _printed(run, prelude + code, arguments, env)


def _printed(
    run: Callable[[tuple[Any, ...]], int | None],
    code: str,
    arguments: tuple[str, ...],
    env: Mapping[str, str] | None,
) -> str:
    """What code prints where `run` has a process execute it."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    with TemporaryDirectory() as out:
        exitcode = run((code, ["-c", *arguments], given, out))
        paths = Path(out, "stdout"), Path(out, "stderr")
        stdout, stderr = (path.read_text() if path.exists() else "" for path in paths)
    if exitcode:
        raise AssertionError(f"the process ended with {exitcode}\n{stdout}\n{stderr}")
    return stdout


@contextmanager
def where_kernels_ran(record: str) -> Iterator[None]:
    """Within the block `record` is the text of attnops/measured/hardware.json."""
    from attnops.measured import store

    before = store.HARDWARE
    with TemporaryDirectory() as folder:
        store.HARDWARE = Path(folder, "hardware.json")
        store.HARDWARE.write_text(record)
        store.forget()
        try:
            yield
        finally:
            store.HARDWARE = before
            store.forget()
