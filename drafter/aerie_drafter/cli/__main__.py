"""`python -m aerie_drafter.cli`."""

from aerie_drafter.cli import main

main()
