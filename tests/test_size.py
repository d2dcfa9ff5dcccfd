"""A file one can read in a sitting, in tokens: a limit on lines is met by writing densely."""

import tokenize
from statistics import median

from tests.helpers import ROOT, sources

LIMIT = 3_500
MEDIAN = 1_100
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def tokens(path):
    with path.open("rb") as file:
        return sum(token.type not in SILENT for token in tokenize.tokenize(file.readline))


SIZES = {str(path.relative_to(ROOT)): tokens(path) for path in sources().values()}


def test_no_file_is_longer_than_the_limit():
    """A concept is missing in a file that is."""
    assert not {name: size for name, size in SIZES.items() if size > LIMIT}


def test_the_median_file_is_short():
    assert median(SIZES.values()) <= MEDIAN
