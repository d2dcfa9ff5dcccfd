"""`attnops bench`: suites that measure attnops beside its alternatives, in one run.

A result whose error exceeds its budget gets no time. Times are medians of interleaved calls, with their spread; bandwidth and matmul
ceilings come from the same run. The rows of all suites have the same fields (`attnops.bench.rows.Row`), so that any two files compare.
"""

from attnops.bench.rows import Row as Row, Way as Way
from attnops.bench.setup import Point as Point, Setup as Setup
