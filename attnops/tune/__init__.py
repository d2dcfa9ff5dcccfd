"""Tables of measured kernel times. `attnops tune` is the command; `attnops.bench` uses the clocks."""

from attnops.tune.ahead import COMPILED as COMPILED
from attnops.tune.ahead import compile_ahead as compile_ahead
from attnops.tune.ahead import side_by_side as side_by_side
from attnops.tune.clock import Clock as Clock
from attnops.tune.clock import clock_for as clock_for
from attnops.tune.run import Report as Report
from attnops.tune.run import gpu_name as gpu_name
from attnops.tune.run import measure as measure
from attnops.tune.shapes import GRIDS as GRIDS
from attnops.tune.shapes import Sweep as Sweep
from attnops.tune.shapes import sweeps_of as sweeps_of
from attnops.tune.timing import Stopwatch as Stopwatch
