"""What FlashInfer builds with nvcc, and whether it is there, without an import of FlashInfer.

FlashInfer loads `NAME/NAME.so` from its own package (`data/aot`), from a package of prebuilt
modules, or from the folder into which it builds on this machine. Names and folders are those of
0.7.2 (flashinfer/jit/env.py, and the `gen_` functions of flashinfer/jit). They are compared with
FlashInfer's own where it is installed: by tests, and by `attnops build` after every build.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnops.core.kernel import Built, Package, Unbuilt
from attnops.core.problem import Problem
from attnops.measured.store import foreign_variable

PACKAGE = Package("flashinfer", ("flashinfer-python",), "0.7.2")
PREBUILT = "flashinfer_jit_cache"
COMMAND = "attnops build"

SHORT = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}
"""FlashInfer's names of dtypes within names of modules."""


class Library(NamedTuple):
    """What one word of `attnops build` builds.

    word: as the command takes it, and messages say it. names: FlashInfer's, of the files. load:
    builds them where need be, and loads them.
    """

    word: str
    names: tuple[str, ...]
    load: Callable[[], Any]


def unbuilt(libraries: Iterable[Library]) -> tuple[Library, ...]:
    """The libraries that miss a file. FlashInfer's metadata name the folder; without them none is
    known to."""
    version = PACKAGE.version()
    if version is None:
        return ()
    places = [*_prebuilt(), *_own(version)]
    return tuple(
        library
        for library in libraries
        if not all(any((p / n / f"{n}.so").is_file() for p in places) for n in library.names)
    )


def announce(library: Library) -> None:
    """Warn that the call that loads `library` will build it. Looks once a process."""
    if library.word in _announced():
        return
    _announced().add(library.word)
    if not unbuilt((library,)):
        return
    warnings.warn(
        f"FlashInfer builds its module {library.word} in this call, which may take minutes. "
        f"`{COMMAND} {library.word}` builds it beforehand",
        UserWarning,
        stacklevel=3,
    )


@functools.cache
def _announced() -> set[str]:
    """The words of what calls have loaded."""
    return set()


def built_by(libraries_of: Callable[[Problem], Iterable[Library]]) -> Built:
    """`Kernel.built` of a kernel that loads these libraries for a Problem."""

    def lacks(problem: Problem) -> Unbuilt | None:
        if problem.target.assume is not None:
            return None  # of another machine nothing is known
        lacking = unbuilt(libraries_of(problem))
        if not lacking:
            return None
        words = tuple(library.word for library in lacking)
        want = f"{COMMAND} {' '.join(words)}"
        return Unbuilt("module", f"{', '.join(words)}, not built", want, words)

    return Built(lacks, state)


def state() -> str:
    """The modules that are built on this machine, as a word for cache keys."""
    version = PACKAGE.version()
    folders = () if version is None else (*_prebuilt(), *_own(version))
    return ",".join(sorted(file.stem for folder in folders for file in folder.glob("*/*.so")))


def _own(version: str) -> Iterator[Path]:
    """The folder into which FlashInfer builds for the GPUs of this machine."""
    wanted = _architectures()
    with suppress(OSError, RuntimeError):  # there is no such folder yet, or no home
        base = foreign_variable("FLASHINFER_WORKSPACE_BASE") or Path.home()
        for folder in Path(base, ".cache", "flashinfer", version).iterdir():
            # FlashInfer's suffixes, as in 90a_120f, depend on the version of nvcc.
            if {*map(_number, folder.name.split("_"))} == wanted:
                yield folder / "cached_ops"


def _architectures() -> set[int]:
    """Those for which FlashInfer builds: 90 for SM90."""
    listed = foreign_variable("FLASHINFER_CUDA_ARCH_LIST")
    if listed is not None:
        return {*map(_number, listed.split())}
    devices = range(torch.cuda.device_count())
    return {10 * major + minor for major, minor in map(torch.cuda.get_device_capability, devices)}


def _number(text: str) -> int:
    """90 of `9.0a`, `90a` and `sm90a`; 0 without a digit."""
    return int(re.sub(r"\D", "", text) or 0)


@functools.cache
def _prebuilt() -> tuple[Path, ...]:
    """Folders of modules that came built: FlashInfer's own and those of packages beside it."""
    found = [folder / "data" / "aot" for folder in _folders("flashinfer")]
    found += [folder / "jit_cache" for folder in _folders(PREBUILT)]
    wanted = _architectures()
    for provider in entry_points(group="flashinfer.jit_cache.providers"):
        with suppress(Exception):  # FlashInfer leaves out a package that fails, too
            manifest = provider.load()()
            if all(_runs(manifest["cuda_architectures"], arch) for arch in wanted):
                found.append(Path(manifest["jit_cache_dir"]))
    return tuple(found)


def _folders(package: str) -> list[Path]:
    with suppress(ValueError):  # of a module without a spec
        spec = find_spec(package)
        return [Path(p) for p in (spec and spec.submodule_search_locations) or ()]
    return []


def _runs(built_for: Iterable[str], arch: int) -> bool:
    """Does code for one of these, as sm90a, run on `arch`? That with an `a` on this one alone."""
    return any(
        _number(name) == arch
        or (not name.endswith("a") and _number(name) // 10 == arch // 10 and _number(name) < arch)
        for name in built_for
    )
