"""Processes that compile kernels into Triton's cache, for a GPU that is not there."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from attnops.kernels.shared.launch import compile_workers
from attnops.kernels.shared.launch.beside import Launch, Pointer
from attnops.kernels.shared.launch.compile_worker import Driver
from tests.triton.process import compiled

SM90 = ("cuda", 90, 32)


def stored(slots=128, dtype=torch.bfloat16, **more):
    """A launch that writes keys and values."""
    from attnops.kernels.triton.device.store import store

    ids, rows = Pointer(torch.int64, 4096), Pointer(dtype, 8192)
    part = (rows, rows, None, 1024, 128, 1, 65536, 1024, 128, 1, 0)
    constants = {"PAGE": 64, "HEADS": 8, "A_D": 128, "B_D": 128, "BLOCK_T": 1, "HARDWARE": True}
    constants |= {"A_BLOCK": 1024, "B_BLOCK": 1024, "A_AS": "same", "B_AS": "same", "num_warps": 4}
    return Launch(store, (1,), (ids, 1, slots, 4096, *part, *part), {**constants, **more}, 0)


@contextmanager
def empty(folder, most_s=120):
    """(workers as on a machine with many processors, with an empty cache, and the processes that
    are started in the block)."""
    begun, start = [], subprocess.Popen

    def popen(*args, **more):
        begun.append(start(*args, **more))
        return begun[-1]

    with (
        patch.dict(os.environ, {"TRITON_CACHE_DIR": str(folder)}),
        patch.object(compile_workers, "LEAST_CPUS", 0),
        patch.object(subprocess, "Popen", popen),
        patch.object(compile_workers, "MOST_S", most_s),
    ):
        found = compile_workers.Workers()
        yield found, begun
        found.end()


@compiled
def test_this_process_finds_the_kernel(tmp_path):
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver

    with empty(tmp_path) as (workers, begun):
        launch = stored()
        workers.compile(launch, SM90)
        assert len(begun) == 1
        with (
            patch.object(driver, "_active", Driver(GPUTarget(*SM90))),
            patch.object(CUDABackend, "make_cubin", None),  # what compiles it would call that
        ):
            made = launch.kernel.warmup(*launch.args, grid=(1,), **launch.given)
        assert made.asm["cubin"]


@compiled
def test_what_was_compiled_before_starts_no_process(tmp_path):
    """Also in a later process, and for other numbers of one compiled kernel."""
    with empty(tmp_path) as (workers, begun):
        workers.compile(stored(), SM90)
        later = compile_workers.Workers()
        later.start(3, SM90)
        for launch in (stored(), stored(slots=64)):
            later.compile(launch, SM90)
        assert len(begun) == 1
        for launch in (stored(slots=63), stored(dtype=torch.float16)):
            later.compile(launch, SM90)
        assert len(begun) == 2, "one process for both"
        later.end()


@compiled
def test_a_process_that_has_ended_is_replaced(tmp_path):
    with empty(tmp_path) as (workers, begun):
        workers.start(1, SM90)
        begun[0].kill()
        while begun[0].poll() is None:
            time.sleep(0.01)
        workers.compile(stored(), SM90)
        workers.compile(stored(slots=3), SM90)
        assert len(begun) == 2


@compiled
def test_a_kernel_that_no_process_can_compile_is_left(tmp_path):
    """Its error is raised where it is launched."""
    with empty(tmp_path) as (workers, begun):
        for launch in (stored(A_BLOCK=1000), stored(A_BLOCK=1000), stored()):
            workers.compile(launch, SM90)
        assert len(begun) == 1
        workers.compile(stored(HARDWARE=lambda: True), SM90)  # which pickle does not take
        # Which pickle takes, and a process without torch cannot read.
        workers.compile(stored(A_AS=torch.bfloat16), SM90)
        workers.compile(stored(slots=3), SM90)
        assert len(begun) == 1


ENDS, HANGS = "exit 1", "exec sleep 60"
PRINTS = "echo loading; exec sleep 60"


@pytest.mark.parametrize("script", [ENDS, HANGS, PRINTS])
@compiled
def test_a_process_that_answers_otherwise_is_ended(script, tmp_path):
    """It is asked once. Nothing is marked as compiled, and kernels are compiled in this process."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with empty(tmp_path, most_s=1) as (workers, begun):
        with patch.object(sys, "executable", str(program)):
            workers.compile(stored(), SM90)
            workers.compile(stored(slots=3), SM90)
        assert len(begun) == 1 and begun[0].poll() is not None
        assert not any(tmp_path.rglob(compile_workers.MARK))


@compiled
def test_a_frozen_program_does_not_start_itself(tmp_path):
    with empty(tmp_path) as (_, begun), patch.object(sys, "frozen", True, create=True):
        workers = compile_workers.Workers()
        workers.start(2, SM90)
        workers.compile(stored(), SM90)
        assert not begun


def test_processors_are_shared_by_ranks(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    counts = []
    for ranks in ("", "0", "4", "64"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        counts.append(compile_workers.processors())
    assert counts == [12, 12, 3, 1]


@compiled
def test_where_no_process_can_be_started(tmp_path):
    with empty(tmp_path) as (workers, begun):
        with patch.object(sys, "executable", "/nowhere/python"):
            workers.start(2, SM90)
        workers.compile(stored(), SM90)
        assert not begun
