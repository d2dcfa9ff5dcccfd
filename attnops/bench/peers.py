"""Other engines in the suites `generate`, `first_token` and `decode`: each in a process of its own,
with the Python of its environment (`engines.py`)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from attnops.bench import Point, Setup, engines, models
from attnops.bench.rows import Case, LeftOut, Row, Rows
from attnops.bench.work import bytes_of, flop_of, kv_width
from attnops.core.errors import InvalidInput
from attnops.tune.clock import spread

LIMIT_S = 300.0  # of an engine with all of its points; a compilation may hang
LONG_LIMIT_S = 900.0  # where some are long: a prompt of 8x32k takes 12 s, and is run 14 times
SET = ("VLLM_ENABLE_V1_MULTIPROCESSING=0", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1")
EMPTY = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")  # folders of caches


def parse(given: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Engines and the Pythons of their environments, of texts such as `vllm=/path/to/python`.
    Raises InvalidInput."""
    found = {}
    for text in given:
        name, _, python = text.partition("=")
        if name not in engines.ENGINES or not python:
            raise InvalidInput(
                "engine", repr(text), f"NAME=PYTHON, with a NAME of {' | '.join(engines.ENGINES)}"
            )
        found[name] = python
    return tuple(found.items())


def cases(setup: Setup, suite: str, new: int, rounds: int, less: int = 0) -> dict[str, Case]:
    """One case for each engine and model of a suite, with all of the model's points.

    new: tokens of a call. rounds: timed calls. less: the first tokens of a call, whose time does
    not count, so that decode steps alone are timed.
    """
    every = models.points_of(setup, suite).items()
    return {
        f"{name}, {engine}": partial(
            measure, setup, name, points, engine, python, new, rounds, less
        )
        for engine, python in setup.engines
        for name, points in every
    }


def measure(
    setup: Setup,
    name: str,
    points: tuple[Point, ...],
    engine: str,
    python: str,
    new: int,
    rounds: int,
    less: int = 0,
) -> Rows:
    """The rows of an engine. Raises LeftOut with the last line of its errors, if it measures no
    point."""
    made = models.fitted(setup, name, models.largest(points))
    longest = max(point.context for point in points) + new + engines.SPARE
    # Engines refuse more positions, or read beyond their table of rotations.
    made.max_position_embeddings = max(made.max_position_embeddings, longest)
    long = any(point.long for point in points)
    model = _weightless(setup, made) if less or new == 1 else None
    spec = {
        "engine": engine,
        "points": points,
        "new": new,
        "rounds": rounds,
        "less": less,
        "long": long,
        "vocab": made.vocab_size,
        "dtype": _name(setup),
        "token_bytes": kv_width(made) * made.num_hidden_layers * setup.dtype.itemsize,
    }
    with TemporaryDirectory(prefix="attnops-bench-", ignore_cleanup_errors=True) as folder:
        for file, content in files(setup, made).items():
            (Path(folder) / file).write_text(json.dumps(content))
        limit_s = LONG_LIMIT_S if long else LIMIT_S
        found, why = answers(setup, python, spec, Path(folder), limit_s)
    if not found:
        raise LeftOut(why)
    rows, more = Rows(), {"layers": made.num_hidden_layers, "new_tokens": new - less}
    for at, point in enumerate(points):
        row: Row = {"case": f"{name} {point}", "way": engine}
        if at < len(found):
            us = spread([1e6 * seconds / (new - less) for seconds in found[at]["seconds"]])
            row |= {
                **us,
                "tokens_s": round(point.batch / us["median_us"] * 1e6, 1),
                **more,
                **(
                    {}
                    if model is None
                    else setup.shares(us["median_us"], **_work(model, point, less))
                ),
                **found[at]["facts"],
            }
        rows.append(row if at < len(found) else {**row, "wrong": why})
    if less:
        return rows
    first_s, version = found[0]["first_s"], found[0]["facts"]["version"]
    first = {
        "median_us": round(1e6 * first_s, 2),
        "first_s": round(first_s, 3),
        "new_tokens": new,
        "version": version,
    }
    return [
        *rows,
        {
            "case": f"{name} {points[0]}, first call",
            "way": engine,
            **first,
            "how": "from the start of its process",
        },
    ]


def _weightless(setup: Setup, made: Any) -> Any:
    """The model of a config, on the device meta."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(made, dtype=setup.dtype)


def _work(model: Any, point: Point, less: int) -> dict[str, int]:
    """What a step must read, or a call of one token compute, as of `Setup.shares`."""
    if less:
        return {"of_bandwidth": bytes_of(model, point)}
    return {"of_matmul": flop_of(model, [point.context] * point.batch)}


def files(setup: Setup, made: Any) -> dict[str, Any]:
    """The files of a model's folder by name, of its transformers config."""
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(made)]
    config = {
        **json.loads(made.to_json_string()),
        "architectures": [kind.__name__],
        "dtype": _name(setup),
        "torch_dtype": _name(setup),
    }
    return {
        "config.json": config,
        "generation_config.json": {
            name: config.get(name) for name in ("bos_token_id", "eos_token_id")
        },
    }


def answers(
    setup: Setup, python: str, spec: engines.Spec, folder: Path, limit_s: float
) -> tuple[Rows, str]:
    """(what the engine printed for each point, why it printed no more). Its processes have
    ended."""
    if (program := shutil.which(os.path.expanduser(python))) is None:
        return [], f"{python} is no executable file"
    # Of several GPUs, that of this process. PYTHONPATH has packages of this process.
    gpu = (
        [f"CUDA_VISIBLE_DEVICES=GPU-{torch.cuda.get_device_properties(setup.device).uuid}"]
        if setup.device.index
        else []
    )
    changed = [
        "env",
        "-u",
        "PYTHONPATH",
        *SET,
        *(f"{name}={folder / name}" for name in EMPTY),
        *gpu,
    ]
    given = json.dumps({**spec, "model": str(folder), "began": time.time()})
    command = [*changed, os.path.abspath(program), engines.__file__, given]
    printed, errors = folder / "printed", folder / "errors"
    with printed.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        late = ""
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = f"not done after {limit_s:g} s"
        finally:
            with suppress(ProcessLookupError):  # the processes that it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = Rows()
    for line in printed.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            if isinstance(one := json.loads(line), dict):
                found.append(one)
    last = ["", *filter(None, map(str.strip, errors.read_text(errors="replace").splitlines()))][-1]
    return found, late or last[:300] or f"ended with exit code {process.returncode}"


def _name(setup: Setup) -> str:
    return str(setup.dtype).removeprefix("torch.")
