"""Entry point of `python -m aerie.cli`, which is `aerie`."""

from __future__ import annotations

from aerie.cli import main

main()
