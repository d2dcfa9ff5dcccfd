"""`python -m attnops`: the command `attnops`."""

from attnops.cli import main

main()
