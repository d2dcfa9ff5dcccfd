"""Run the committed mutants: each one changes a line of the package, and a test must fail.

A mutant is a table in a `.toml` file beside this one:

    [[mutant]]
    file = "attnops/core/select.py"      the file that is changed
    was = "if us < best:"                a text that stands in it once
    now = "if us > best:"                the text in its place
    tests = ["tests/test_select.py"]     what pytest gets; one of its tests must fail

Usage, from the root of the repository:

    python tests/mutants/run.py [--only TEXT] [--before COMMIT]

`--only` runs the mutants whose list, file or new text contains TEXT. `--before` takes the tests of
another commit, which shows that a mutant died there as well. The script works in a copy of the
tracked files. It ends with 1 if a mutant lived.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tomllib  # type: ignore[import-not-found]  # of Python 3.11; mypy reads this as 3.10

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "mutants"
ONE_FAILED = 1  # pytest's exit status; 2 and more mean that no test decided
LIMIT_S = 600


@dataclass(frozen=True)
class Mutant:
    """One change of one line, and the tests that notice it."""

    area: str
    file: str
    was: str
    now: str
    tests: tuple[str, ...]

    def problem(self, root: Path) -> str | None:
        """Why this mutant cannot be run over the tree at `root`, or None."""
        path = root / self.file
        if not path.is_file():
            return f"{self.file} is not there"
        count = path.read_text().count(self.was)
        if count != 1:
            return (
                f"{self.was!r} stands {count} times in {self.file}; a mutant needs a text "
                "that stands there once"
            )
        missing = [test for test in self.tests if not _is_there(test, root)]
        if missing:
            return f"its tests are not there: {missing}"
        return None


def _is_there(test: str, root: Path) -> bool:
    """Is there a test of this name, or the file or folder?"""
    place, _, name = test.partition("::")
    path = root / place
    if not name:
        return path.exists()
    return path.is_file() and f"def {name.partition('[')[0]}(" in path.read_text()


def read_all(folder: Path = HERE) -> list[Mutant]:
    """The mutants of every list in `folder`, in the order of the files."""
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            mutants.append(
                Mutant(path.stem, entry["file"], entry["was"], entry["now"], tuple(entry["tests"]))
            )
    return mutants


def copy_tree(to: Path, tests_of: str | None) -> None:
    """Copy the tracked files (and new ones that git does not ignore) to `to`, with the tests of
    another commit if one is named."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0"):
        source = ROOT / name
        if name and os.path.lexists(source):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name, follow_symlinks=False)
    if tests_of is not None:
        shutil.rmtree(to / "tests")
        archive = subprocess.run(
            ["git", "archive", tests_of, "tests"], cwd=ROOT, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x"], cwd=to, input=archive.stdout, check=True)


def run_one(mutant: Mutant, root: Path, home: Path) -> str:
    """Apply a mutant, run its tests, take it back. Returns "died", "LIVED" or why no test
    decided."""
    problem = mutant.problem(root)
    if problem is not None:
        return problem
    path = root / mutant.file
    text = path.read_text()
    environment = dict(
        os.environ, PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1"
    )
    environment.update(
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCHINDUCTOR_CACHE_DIR=str(home),
        TRITON_CACHE_DIR=str(home),
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.progress",
        "--part",
        *mutant.tests,
    ]
    path.write_text(text.replace(mutant.was, mutant.now))
    try:
        ran = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"no result after {LIMIT_S} s"
    finally:
        path.write_text(text)
        shutil.rmtree(home, ignore_errors=True)
    if ran.returncode == 0:
        return "LIVED"
    if ran.returncode != ONE_FAILED:
        return f"pytest ended with {ran.returncode}: {ran.stdout[-300:]}{ran.stderr[-300:]}"
    return "died"


def main() -> int:
    """Run the mutants asked for and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="the mutants whose list, file or new text contains TEXT",
    )
    parser.add_argument("--before", metavar="COMMIT", help="take the tests of this commit")
    given = parser.parse_args()
    mutants = [m for m in read_all() if any(given.only in text for text in (m.area, m.file, m.now))]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "attnops"
        root.mkdir()
        copy_tree(root, given.before)
        for mutant in mutants:
            begun = time.monotonic()
            result = run_one(mutant, root, Path(folder) / "caches")
            results.append(result)
            print(
                f"{result}  {mutant.file}: {mutant.now!r}  ({time.monotonic() - begun:.0f} s)",
                flush=True,
            )
    print(f"{results.count('died')} of {len(mutants)} mutants died")
    return int(results.count("died") != len(mutants) or not mutants)


if __name__ == "__main__":
    sys.exit(main())
