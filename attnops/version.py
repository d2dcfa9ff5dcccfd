"""The version, in one place that every rank may read."""

VERSION = "0.1.0"
