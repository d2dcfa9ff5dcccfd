"""Measurements beside what one would use instead, in one run: what `attnops bench` runs.

A result that is further from its reference than its budget has no time. Figures are medians of calls made in turn, with their spread;
ceilings are measured in the same run. All suites write one form of file (`attnops.bench.verdict.Row`), so that any two compare.
"""

from attnops.bench.setup import Point as Point
from attnops.bench.setup import Setup as Setup
from attnops.bench.setup import device_of as device_of
from attnops.bench.verdict import Row as Row
from attnops.bench.verdict import Way as Way
