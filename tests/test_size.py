"""A file one can read in a sitting, in tokens: a limit on lines is met by writing densely."""

import tokenize
from statistics import median

import pytest

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

LONG = {
    "attnops/kernels/torch/flex.py": 3926,
    "attnops/kernels/triton/device/gradient.py": 3962,
    "attnops/kernels/triton/device/mxfp4_experts.py": 3760,
}
"""Files over the limit, and what each has: they only get shorter."""


def tokens(path):
    with path.open("rb") as file:
        return sum(token.type not in SILENT for token in tokenize.tokenize(file.readline))


SIZES = {str(path.relative_to(ROOT)): tokens(path) for path in sources().values()}


@pytest.mark.parametrize("name", sorted({name for name, size in SIZES.items() if size > LIMIT} | LONG.keys()))
def test_no_file_is_longer_than_the_limit(name):
    most = LONG.get(name, LIMIT)
    assert SIZES[name] <= most, f"{name} has {SIZES[name]} tokens, want at most {most}: a concept is missing"


def test_the_list_of_long_files_only_gets_shorter():
    assert not [name for name in LONG if SIZES[name] <= LIMIT]


def test_the_median_file_is_short():
    assert median(SIZES.values()) <= MEDIAN
