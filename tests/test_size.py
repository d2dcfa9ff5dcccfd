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


def test_files_are_short():
    """A concept is missing in a file that is longer than the limit."""
    sizes = {str(path.relative_to(ROOT)): tokens(path) for path in sources().values()}
    assert not {name: size for name, size in sizes.items() if size > LIMIT}
    assert median(sizes.values()) <= MEDIAN
