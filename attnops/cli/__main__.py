"""`python -m attnops.cli`."""

from attnops.cli import main

main()
