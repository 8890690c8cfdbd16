"""`python -m ridgeline` is the command `ridgeline`."""

from ridgeline.cli import main

main()
