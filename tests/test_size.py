"""A file one can read in a sitting: none over 400 lines, half of them under 150."""

from statistics import median

from tests.helpers import ROOT, sources

LIMIT = 400
MEDIAN = 150


def _lines():
    return {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources().values()}


def test_no_file_is_longer_than_the_limit():
    long = {name: n for name, n in _lines().items() if n > LIMIT}
    assert not long, f"over {LIMIT} lines, so a concept is missing: {long}"


def test_the_median_file_is_short():
    assert median(_lines().values()) <= MEDIAN
