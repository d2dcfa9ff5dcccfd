"""The version of the installed distribution, and the oldest transformers, for every rank."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("attnops")
except PackageNotFoundError:  # sources on PYTHONPATH
    VERSION = "0+unknown"

OLDEST_TRANSFORMERS = "5.4"
"""Older ones call mask functions with other arguments. The extra `hf` says the same."""
