"""`python -m aerie.cli` is `aerie`."""

from __future__ import annotations

from aerie.cli import main

main()
