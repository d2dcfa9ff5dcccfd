"""The version of the installed distribution, in one place that every rank may read."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("attnops")
except PackageNotFoundError:  # sources on PYTHONPATH
    VERSION = "0+unknown"
