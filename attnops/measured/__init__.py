"""Tables of measured times, and the cost of a call by them. Selection reads the table in force; `attnops tune` makes tables."""

from attnops.measured.grid import Grid as Grid
from attnops.measured.hardware import never_run as never_run
from attnops.measured.rates import RATES as RATES
from attnops.measured.rates import Roofline as Roofline
from attnops.measured.rates import copy_us as copy_us
from attnops.measured.rates import phases as phases
from attnops.measured.rates import scaled as scaled
from attnops.measured.shape import Shape as Shape
from attnops.measured.shape import Sizes as Sizes
from attnops.measured.shape import sizes_of as sizes_of
from attnops.measured.store import cpu_name as cpu_name
from attnops.measured.store import digests as digests
from attnops.measured.store import forget as forget
from attnops.measured.store import in_force as in_force
from attnops.measured.store import path_for as path_for
from attnops.measured.store import save as save
from attnops.measured.table import ESTIMATED as ESTIMATED
from attnops.measured.table import HANDICAP as HANDICAP
from attnops.measured.table import MEASURED as MEASURED
from attnops.measured.table import SCALED as SCALED
from attnops.measured.table import UNMEASURED as UNMEASURED
from attnops.measured.table import Cost as Cost
from attnops.measured.table import Table as Table
from attnops.measured.table import costs as costs
from attnops.measured.table import from_json as from_json
from attnops.measured.table import version_of as version_of
