"""Every model type of transformers, tiny and with random weights, patched against eager;
docs/models.md and results/cpu/census.json.

    python -m benchmarks.census.run [--types a,b] [--tests FOLDER] [--jobs N] [--limit-s S] [--out
    FOLDER] [--fresh]

A type that does not run with the census's own config is tried with those of transformers' own
tests, if a folder holds them. Without one, the rows of the last run that needed them are kept.

Each type runs in a process of its own, forked from one that has imported everything. A type whose
file is in FOLDER already is not run again. A check that runs into the limit of its type is wrong,
and so are those after it. Exit status 1: a check is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import attnops.hf  # noqa: F401, in the parent, so that no child imports it
from attnops.core.errors import AttnopsError, PatchError
from benchmarks.census import checks, models, recipes, results, testers

ROOT = Path(__file__).resolve().parents[2]
INDUCTOR = ("llama", "gpt_oss", "deepseek_v3", "qwen3_next", "t5", "bert")
LIMIT_S = 300.0
PRELOADED = (
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "functorch.compile",
    "attnops.lowering",
    "transformers.generation",
)
"""What each type's process would else import again, for seconds."""
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "census.json"


def note(path: Path, **values: Any) -> None:
    """Append a row to a file as a JSON line, at once: a process that is killed leaves those it
    finished."""
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")


def verdict(check: checks.Check) -> tuple[str, str]:
    """(ok, chosen, refused, eager or wrong; the reason)."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            check()
    except (checks.Wrong, checks.AsChosen, checks.Eager) as error:
        return error.status, str(error)
    except Exception as error:
        if (own := checks.ours_in(error)) is not None:
            return "refused", checks.short(own)
        at = traceback.extract_tb(error.__traceback__)[-1]
        return "wrong", f"{checks.short(error)} ({Path(at.filename).name}:{at.lineno})"
    return "ok", ""


Head = results.Record
"""The row of a type as it was built and patched; without a subject it says why there are no
checks."""

STATES = ("reason", "unrun", "refused")
"""Of a type that does not run, from the least that is known of it: not built, no input is known,
refused by patch()."""


def attempt(
    kind: models.Kind, make: Callable[[], models.Recipe]
) -> tuple[Head, checks.Subject | None]:
    """A type built by one recipe, and patched; what the checks look at, or None."""
    try:
        recipe = make()
        model = models.build(recipe)
    except BaseException as error:
        return {"built": False, "reason": checks.short(error), "cls": kind.cls}, None
    module = model.get_submodule(recipe.part)
    head = {
        "built": True,
        "cls": type(module).__name__,
        "parameters": sum(p.numel() for p in module.parameters()),
    }
    head |= {"source": recipe.source} if recipe.source else {}
    try:
        head |= checks.patches(model, recipe.part)
    except AttnopsError as error:
        text = (
            " ".join(str(error).split()) if isinstance(error, PatchError) else checks.short(error)
        )
        return head | {"refused": text}, None
    except Exception as error:
        return head | {
            "foreign": checks.short(error),
            "patched": 0,
            "modules": 0,
            "skipped": [],
        }, None
    try:
        subject = checks.Subject(
            module, functools.partial(models.chosen, recipe), recipe.inputs, model
        )
    except ValueError as error:
        return head | {"unrun": str(error)}, None
    except Exception as error:  # of eager, from run to run
        return head | {"unrun": checks.short(error)}, None
    return head, subject


def first_that_runs(kind: models.Kind, tests: bool) -> tuple[Head, checks.Subject | None]:
    """The first recipe of a type that runs; of those that do not, the last one of which most is
    known.

    A refusal of a config of the census's own is not believed before those of transformers' tests
    are refused, too.
    """
    found: Head = {}
    try:
        for make in recipes.recipes(kind, tests):
            head, subject = attempt(kind, make)
            if subject is not None or "foreign" in head:
                return head, subject
            found = max(
                head,
                found,
                key=lambda row: max(
                    (STATES.index(state) for state in row.keys() & STATES), default=-1
                ),
            )
            if "refused" in head and "source" in head:
                break
    except Exception as error:  # of the tests' own code
        found["untested"] = checks.short(error)
    return found, None


def survey(kind: models.Kind, out: Path, skip: tuple[str, ...] = (), tests: bool = False) -> None:
    """Run every check of a type, in this process, but those whose names begin with one of `skip`.

    tests: where the census's own config does not run, try those of transformers' tests.
    """
    path = out / f"{kind.name}.jsonl"
    begin = time.monotonic()
    note(path, torch=torch.__version__, commit=results.commit(ROOT))
    head, subject = first_that_runs(kind, tests)
    if subject is None:
        note(path, **head)
        if "foreign" in head:
            note(path, check="patch", status="wrong", reason=head["foreign"], seconds=0)
        note(path, done=True, seconds=time.monotonic() - begin)
        return
    plan = [
        one
        for one in checks.checks_of(subject, kind.name in INDUCTOR)
        if not one[0].startswith(skip)
    ]
    inputs = {
        name: list(value.shape)
        for name, value in subject.given.items()
        if isinstance(value, torch.Tensor)
    }
    note(
        path,
        plan=[name for name, _ in plan],
        inputs=inputs,
        noise=subject.noise,
        bound=subject.limit,
        **head,
    )
    for name, check in plan:
        start = time.monotonic()
        status, reason = verdict(check)
        note(
            path,
            check=name,
            status=status,
            reason=reason,
            seconds=round(time.monotonic() - start, 2),
        )
    note(path, done=True, seconds=time.monotonic() - begin)


def read(path: Path) -> results.Rows:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def finished(path: Path) -> bool:
    return any(row.get("done") for row in read(path))


def close(path: Path, reason: str) -> None:
    """Say of a process that ended before its time: the check it was at is wrong, and those it did
    not come to."""
    rows = read(path)
    plan = next((row["plan"] for row in rows if "plan" in row), ["build"])
    done = {row["check"] for row in rows if "check" in row}
    if not any("built" in row for row in rows):
        note(path, built=True, plan=plan, cls=None, patched=0, modules=0, skipped=[])
    for at, name in enumerate(name for name in plan if name not in done):
        note(
            path,
            check=name,
            status="wrong",
            reason=reason if at == 0 else f"not reached: {reason}",
            seconds=0,
        )
    note(path, done=True, seconds=0)


def census(
    kinds: list[models.Kind],
    out: Path,
    jobs: int,
    limit_s: float,
    work: Any = survey,
    tell: Any = print,
) -> None:
    """Check these types in processes of their own, so many at a time. work: what a process does,
    for tests of this function."""
    out.mkdir(parents=True, exist_ok=True)
    unfinished = [kind for kind in kinds if not finished(out / f"{kind.name}.jsonl")]
    waiting = sorted(
        unfinished, key=lambda kind: kind.name not in INDUCTOR
    )  # Inductor takes longest, so these begin first.
    running: dict[models.Kind, tuple[Any, float]] = {}
    count = 0
    while waiting or running:
        while waiting and len(running) < jobs:
            kind = waiting.pop(0)
            (out / f"{kind.name}.jsonl").unlink(missing_ok=True)
            process = get_context("fork").Process(target=_leave_after, args=(work, kind, out))
            process.start()
            running[kind] = process, time.monotonic() + limit_s
        time.sleep(0.02)
        for kind, (process, end) in list(running.items()):
            if (late := process.is_alive()) and time.monotonic() <= end:
                continue
            process.kill()
            process.join()
            del running[kind]
            if not finished(path := out / f"{kind.name}.jsonl"):
                close(
                    path,
                    f"ran into the limit of {limit_s:.0f} s"
                    if late
                    else f"its process ended with {process.exitcode}",
                )
            count += 1
            tell(f"{count:4} {kind.name}: {line(read(path))}", flush=True)


def _leave_after(work: Any, kind: models.Kind, out: Path) -> None:
    """Do the work, and wait for no thread of a compiler."""
    code = 1
    try:
        work(kind, out)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def line(rows: results.Rows) -> str:
    """One type in a line."""
    head = next(row for row in rows if "built" in row)
    if not head["built"]:
        return f"not built: {head['reason'][:150]}"
    for name in ("refused", "unrun"):
        if name in head:
            return f"{name}: {head[name][:150]}"
    counts = Counter(row["status"] for row in rows if "check" in row)
    wrong = [
        f"{row['check']}: {row['reason'][:100]}" for row in rows if row.get("status") == "wrong"
    ]
    text = ", ".join(f"{n} {status}" for status, n in counts.items())
    return f"{text} in {rows[-1]['seconds']:.0f} s" + "".join(
        f"\n       wrong {w}" for w in wrong[:6]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default="", help="names of model types; all of them without it")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for one type")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "census")
    parser.add_argument(
        "--json", default=str(RESULTS), help="written when every type was looked at"
    )
    parser.add_argument(
        "--tests",
        type=Path,
        help="a folder with the tests of the transformers that is installed: tests/models/...",
    )
    parser.add_argument(
        "--skip",
        default="",
        help="checks to leave out, by how their names begin: compile,gradients",
    )
    parser.add_argument("--fresh", action="store_true", help="run finished types again")
    given = parser.parse_args(arguments)
    known = models.kinds()
    wanted = [name for name in given.types.split(",") if name] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"no model types: {', '.join(unknown)}")
    if given.fresh:
        for name in wanted:
            (given.out / f"{name}.jsonl").unlink(missing_ok=True)
    torch.set_num_threads(1)
    checks.quiet()
    for name in PRELOADED:
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("torchao")

    version = None if given.tests is None else testers.open_folder(given.tests)

    # Of the children: attnops asks the collector who holds a config.
    gc.collect()
    gc.freeze()
    skip = tuple(name for name in given.skip.split(",") if name)
    work = functools.partial(survey, skip=skip, tests=given.tests is not None)
    census([known[name] for name in wanted], given.out, given.jobs, given.limit_s, work)
    target = Path(given.json)
    before = json.loads(target.read_text()) if target.exists() and version is None else {}
    found = results.summary(
        {name: read(given.out / f"{name}.jsonl") for name in wanted}, ROOT, before, version
    )
    print(
        *(
            f"{n} {word}"
            for kind in ("types", "checks")
            for word, n in found["counts"][kind].items()
        ),
        sep=", ",
    )
    if wanted == list(known):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(found, indent=1) + "\n")
    return int("wrong" in found["counts"]["checks"])


if __name__ == "__main__":
    sys.exit(main())
