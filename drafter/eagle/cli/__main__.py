"""`python -m eagle.cli`."""

from eagle.cli import main

main()
