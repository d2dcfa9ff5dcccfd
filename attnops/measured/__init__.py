"""Tables of measured times, and the cost of a call by them. Selection reads the table in force;
`attnops tune` makes tables."""

from attnops.measured.cost import (
    ESTIMATED as ESTIMATED,
    MEASURED as MEASURED,
    RATES as RATES,
    Cost as Cost,
    Roofline as Roofline,
    Sizes as Sizes,
    Work as Work,
    copy_us as copy_us,
    phases as phases,
    sizes_of as sizes_of,
    token_writes_us as token_writes_us,
)
from attnops.measured.kinds import (
    Counting as Counting,
    distance as distance,
    place as place,
    title as title,
    work as work,
)
from attnops.measured.store import (
    NOWHERE as NOWHERE,
    cpu_name as cpu_name,
    forget as forget,
    in_force as in_force,
    never_run as never_run,
    ran_on as ran_on,
)
from attnops.measured.table import (
    Grid as Grid,
    Table as Table,
    costs as costs,
    scaled as scaled,
)
