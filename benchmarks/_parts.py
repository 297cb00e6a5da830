"""A benchmark of parts that can run alone: PARTS in the environment chooses some of them.

Guarantee: the results of parts that run alone are in a file named after them, so they never replace those of others. In a page,
each part has a section of its own, which its run alone replaces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

Part = Callable[[], dict[str, float]]


def measure_parts(parts: Mapping[str, Part]) -> dict[str, float]:
    """Return the keys of the parts that PARTS names, in their order; of all without it. Raises SystemExit."""
    results: dict[str, float] = {}
    for name in choose_parts(parts, os.environ.get("PARTS", "")):
        results |= parts[name]()
    return results


def choose_parts(parts: Mapping[str, Part], text: str) -> list[str]:
    """Return the parts named in `text`, separated by commas, in their order; all without a name. Raises SystemExit."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in parts]:
        raise SystemExit(f"bench: PARTS names '{unknown[0]}': use some of {', '.join(parts)}, separated by commas.")
    return [part for part in parts if part in names or not names]


def name_result(benchmark: str, parts: Mapping[str, Part]) -> str:
    """Return the name of the file of results."""
    names = choose_parts(parts, os.environ.get("PARTS", ""))
    return "-".join([benchmark, *names]) if len(names) < len(parts) else benchmark


def replace_section(text: str, name: str, written: str) -> str:
    """Return a page with the lines between `<!-- name -->` and the next `<!-- end -->` replaced."""
    before, mark, rest = text.partition(f"<!-- {name} -->\n")
    return f"{before}{mark}{written}\n{rest[rest.index('<!-- end -->') :]}"
