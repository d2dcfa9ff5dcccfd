"""Tables of measured kernel times. `attnops tune` is the command; `attnops.bench` uses the
clocks."""

from attnops.tune.clock import clock_for as clock_for
from attnops.tune.grids import GRIDS as GRIDS, sweeps_of as sweeps_of
from attnops.tune.run import Stopwatch as Stopwatch, measure as measure
