"""The lines that `make test` prints while it runs, and the list of `make test-quick`."""

import re
from pathlib import Path

import pytest

from tests.progress import line

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("done", "total", "seconds", "text"),
    [(1200, 4800, 200, "   3:20  1200 of 4800 tests, about 10:00 more"), (1, 10, 30, "   0:30  1 of 10 tests, about 4:30 more")],
)
def test_time_left(done, total, seconds, text):
    assert line(done, total, seconds) == text


@pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="not in a checkout")
def test_the_quick_list_names_files_of_every_room():
    listed = re.search(r"^QUICK := (.*?[^\\])$", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)[1]
    files = listed.replace("\\", " ").split()
    assert all((ROOT / file).is_file() for file in files) and len(files) == len(set(files))
    rooms = {file.split("/")[1] for file in files if file.count("/") == 2}
    assert rooms >= {"ops", "hf", "lowering", "graphs", "triton"}
