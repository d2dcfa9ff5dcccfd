"""`AsItRuns`: the runner of `breakable`. A runner says how the step of a `Graphed` runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .buckets import Bucket
from .cuda_graphs import Recorded
from .eager_capture import CaptureMode
from .options import Options, Values
from .report import Report


class AsItRuns:
    """Runs the model's own Python code, which is captured as it runs.

    Runners that compile derive from it. Each of these belongs to one `Graphed`.
    """

    @property
    def repeats(self) -> bool:
        """Has `prepare` run all that a later run repeats? The model's own code may set up more in a
        second run."""
        return False

    @property
    def seconds(self) -> float:
        """Time of tracing, choice of kernels and compilation so far."""
        return 0.0

    def trace(self, bucket: Bucket) -> str:
        """The trace that serves a bucket. All buckets of one are prepared together."""
        return bucket.trace

    def session(self) -> AbstractContextManager[None]:
        """A context of runs and captures, in which the model does not change between them."""
        return nullcontext()

    def begin(self, options: Options, bucket: Bucket, values: Values) -> None:
        """Begin to build what `prepare` will wait for, on its inputs. No result is read."""

    def prepare(self, options: Options, bucket: Bucket, values: Values) -> None:
        """Initialise or compile for all buckets of a trace, on the inputs of the largest."""
        self.run(options, bucket, values)

    def prepared(self, bucket: Bucket) -> bool:
        """Was the bucket's trace prepared?"""
        return True

    def run(self, options: Options, bucket: Bucket, values: Values) -> Any:
        """Run the step on these inputs without graphs, as it will be captured."""
        return options.model(**options.planned(bucket, values))

    def record(self, options: Options, bucket: Bucket, values: Values, into: Recorded) -> Any:
        """Capture the step into `into`. Returns the outputs that every replay writes."""
        into.begin()
        with CaptureMode(into, options.kept_out(bucket)):
            return self.run(options, bucket, values)

    def changes(self, error: Exception) -> bool:
        """Does the step run in another way from now on, because of an error of its capture?"""
        return False

    def told(self, report: Report) -> Report:
        """The report with what was compiled."""
        return report
