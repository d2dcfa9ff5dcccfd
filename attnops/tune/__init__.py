"""Tables of measured kernel times. `attnops tune` is the command; `attnops.bench` uses the clocks."""

from attnops.tune.ahead import COMPILED as COMPILED, compile_ahead as compile_ahead, side_by_side as side_by_side
from attnops.tune.clock import Clock as Clock, clock_for as clock_for
from attnops.tune.run import Report as Report, gpu_name as gpu_name, measure as measure
from attnops.tune.shapes import GRIDS as GRIDS, Sweep as Sweep, sweeps_of as sweeps_of
from attnops.tune.timing import Stopwatch as Stopwatch
