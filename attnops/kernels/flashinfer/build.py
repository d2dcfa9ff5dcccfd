"""FlashInfer's modules built in advance and side by side, as `attnops build` does."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import NamedTuple

import torch

from attnops.core.errors import InvalidInput, one_line
from attnops.kernels.flashinfer import devices, mla, rope, trtllm
from attnops.kernels.flashinfer.libraries import PACKAGE, Library, unbuilt
from attnops.kernels.flashinfer.modules import DECODE, FA2, FA3, HALVES, NAMES, Module, library_of

AT_ONCE = 3
"""Modules that are built side by side, each by several compilers of up to 4 GB."""

HALF = "float16|bfloat16"
WORDS = (
    f"decode|fa2|fa3:{HALF}:64|128|256|192x128[:window][:softcap][:sinks]",
    f"mla_fa2|mla_fa3:{HALF}[:float8_e4m3fn]",
    f"xqa:{HALF}:{HALF}|float8_e4m3fn:PAGE_SIZE:HEAD_DIM:GROUP[:window]",
    "rope",
    "trtllm",
)
"""What `attnops build` builds, by the words that messages use."""
PLAIN = {library.word: library for library in (rope.LIBRARY, trtllm.LIBRARY)}
STORED = (*HALVES, torch.float8_e4m3fn)
DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
"""Head dims of keys and of values that kernels of FlashInfer take."""


class Result(NamedTuple):
    """How the build of one library ended. error: "" where it is there now."""

    library: Library
    seconds: float
    error: str = ""


def is_word(text: str) -> bool:
    """Is this a module's word, rather than the name of a model?"""
    return text.split(":")[0] in (*NAMES.values(), "mla_fa2", "mla_fa3", "xqa", *PLAIN)


def parse(word: str) -> Library:
    """The library of a word. Raises InvalidInput."""
    kind, *rest = word.split(":")
    with suppress(ValueError, KeyError):
        if word in PLAIN:
            return PLAIN[word]
        if kind == "xqa":
            return _xqa(rest)
        if kind.startswith("mla_"):
            return _mla(kind, rest)
        return library_of(module(word))
    raise InvalidInput("module", repr(word), " or ".join(WORDS))


def module(word: str) -> Module:
    """The inverse of str(module). Raises ValueError, KeyError."""
    path, dtype, dims, *flags = word.split(":")
    head_dim, *others = map(_size, dims.split("x"))
    [v_head_dim] = others or [head_dim]
    known = Module._fields[4:]
    dims_known = (head_dim, v_head_dim) in DIMS
    decode_fits = path != NAMES[DECODE] or (head_dim == v_head_dim and "sinks" not in flags)
    flags_known = {*flags} <= {*known} and len({*flags}) == len(flags)
    if not (dims_known and decode_fits and flags_known):
        raise ValueError(word)
    chosen = (flag in flags for flag in known)
    return Module(_path(path), _dtype(dtype, HALVES), head_dim, v_head_dim, *chosen)


def _mla(kind: str, rest: list[str]) -> Library:
    dtype, *stored = rest
    query = _dtype(dtype, HALVES)
    [kv_dtype] = stored or [dtype]
    path = _path(kind.removeprefix("mla_"))
    if path not in (FA2, FA3):
        raise ValueError(kind)
    return mla.library_of(path, query, _dtype(kv_dtype, (query, torch.float8_e4m3fn)))


def _xqa(rest: list[str]) -> Library:
    dtype, kv_dtype, page, dim, group, *flags = rest
    if flags not in ([], ["window"]):
        raise ValueError(flags)
    query = _dtype(dtype, HALVES)
    sizes = (_size(page), _size(dim), _size(group))
    return devices.xqa_library(query, _dtype(kv_dtype, STORED), *sizes, bool(flags), query, 1)


def _size(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)  # int() would take a sign and spaces
    return int(text)


def _path(name: str) -> int:
    return {name: number for number, name in NAMES.items()}[name]


def _dtype(name: str, known: tuple[torch.dtype, ...]) -> torch.dtype:
    return {str(dtype).removeprefix("torch."): dtype for dtype in known}[name]


def build(libraries: Iterable[Library], at_once: int = AT_ONCE) -> Iterator[Result]:
    """Build and load those that are not there, and say of each how it ended, as it ends."""
    # Those of fa3 take longest, and begin first.
    wanted = sorted(
        unbuilt(libraries), key=lambda library: ("fa3" not in library.word, library.word)
    )
    if not wanted:
        return
    with suppress(Exception):  # each build says what is wrong
        # Not first in several threads at once, which it does not survive.
        import flashinfer.prefill  # noqa: F401
    pool = ThreadPoolExecutor(at_once)
    try:
        for done in as_completed([pool.submit(_built, library) for library in wanted]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt waits for what has begun


def _built(library: Library) -> Result:
    start = time.perf_counter()
    try:
        library.load()
    except Exception as error:  # compilers and loaders raise whatever they like
        return Result(library, time.perf_counter() - start, one_line(error))
    seconds = time.perf_counter() - start
    if not unbuilt((library,)):
        return Result(library, seconds)
    why = (
        f"FlashInfer {PACKAGE.version()} built it under another name than {library.names[0]}, so "
        "that automatic choices do not find it; kernel= takes it"
    )
    return Result(library, seconds, why)
