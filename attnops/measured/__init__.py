"""Tables of measured times, and the cost of a call by them. Selection reads the table in force; `attnops tune` makes tables."""

from attnops.measured.grid import Grid as Grid
from attnops.measured.hardware import never_run as never_run
from attnops.measured.rates import RATES as RATES, Roofline as Roofline, copy_us as copy_us, phases as phases, scaled as scaled
from attnops.measured.shape import Shape as Shape, Sizes as Sizes, sizes_of as sizes_of
from attnops.measured.store import (
    cpu_name as cpu_name,
    digests as digests,
    forget as forget,
    in_force as in_force,
    path_for as path_for,
    save as save,
)
from attnops.measured.table import (
    ESTIMATED as ESTIMATED,
    HANDICAP as HANDICAP,
    MEASURED as MEASURED,
    SCALED as SCALED,
    UNMEASURED as UNMEASURED,
    Cost as Cost,
    Table as Table,
    costs as costs,
    from_json as from_json,
    version_of as version_of,
)
