"""A line every half minute of a run of tests: how many are done, the time they took, and about how
much remains. `make` loads it."""

import time

import pytest

EVERY_S = 30.0


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist has no terminal
        config.pluginmanager.register(Progress(config))


class Progress:
    """Counts tests as they end. Those ahead are taken to need as long as those behind, on
    average."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.done, self.start = config, 0, time.monotonic()
        self.told = self.start

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test has one report of its teardown, however it ended.
        self.done += report.when == "teardown"
        now, total = time.monotonic(), self.session.testscollected
        if now - self.told >= EVERY_S and self.done:
            self.told = now
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            assert terminal is not None
            terminal.ensure_newline()
            terminal.write_line(line(self.done, total, now - self.start))


def line(done: int, total: int, seconds: float) -> str:
    """`   3:20  1200 of 4800 tests, about 10:00 more`."""
    left = seconds * (total - done) / done
    return f"{clock(seconds):>7}  {done} of {total} tests, about {clock(left)} more"


def clock(seconds: float) -> str:
    """`3:20`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
