"""The errors that attnops raises, by the name that filters of warnings and `except` use."""

from attnops.core.errors import *  # noqa: F403
