"""Odd values for every field of the spec, validated by the API server and by Python.

The operator can read everything that the server accepts; otherwise it could not reconcile a stored resource. `aerie preflight`
rejects exactly what the server rejects.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest

from aerie.api import ResourceError, SpeculativeDeployment
from aerie.api.crd import build_root_schema
from aerie.api.validation.admission import find_manifest_errors, prune_manifest
from aerie_lab.cluster import Lab
from aerie_lab.errors import KubeError
from tests.lab.api.conftest import MINIMAL_RESOURCE, RESOURCES_PATH
from tests.nightly import use_each_nth

Json = dict[str, Any]
ODD: tuple[Any, ...] = (
    *(-1, 0, 1, 2.0, 2.5, 10**12, -0.5, 1e300, True, False),
    *("", " ", "-1", "0", "1.0", "1e3", "ä", "a" * 300, "x\u0000", "\ud7ff", "a\n"),
    *([], {}, [{}], [""], {"a": "b"}, {"a": -1}, {"": "a"}, None),
)
PARTS = 4
"""Number of parts of the manifests. Each has every path and, at other paths, every value."""


def iter_paths(schema: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every field; [] is an entry of a list, {} one of a map."""
    if path:
        yield path
    for name, child in (schema.get("properties") or {}).items():
        yield from iter_paths(child, (*path, name))
    for key, part in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(key), dict):
            yield from iter_paths(schema[key], (*path, part))


def set_at_path(node: Any, path: tuple[str, ...], value: Any) -> Any:
    """Return `node` with the value at the path."""
    if not path:
        return value
    first, *remaining_path = path
    if first == "[]":
        return [set_at_path({}, tuple(remaining_path), value)]
    key = "a" if first == "{}" else first
    inner = node if isinstance(node, dict) else {}
    return {**inner, key: set_at_path(inner.get(key, {}), tuple(remaining_path), value)}


def explain_rejection(document: Json) -> str:
    """Return the message with which Python rejects the manifest, or an empty string."""
    try:
        SpeculativeDeployment.from_dict(prune_manifest(document))
    except ResourceError as error:
        return str(error)
    return "\n".join(find_manifest_errors(document))


def _is_whole_float(value: object) -> bool:
    """Whether it is a number such as 2.0, which kubectl sends as 2 and of which the API server's types and rules differ."""
    return isinstance(value, float) and value.is_integer()


@pytest.mark.parametrize("part", use_each_nth(PARTS, range(PARTS)))
def test_operator_reads_everything_that_the_server_accepts(
    lab: Lab,
    crd: Json,  # noqa: ARG001 - it has to be there
    part: int,
) -> None:
    assert math.gcd(len(ODD), PARTS) == 1, "otherwise a part would have the same values at each path"
    spec = build_root_schema()["properties"]["spec"]
    manifests = [
        (path, value, set_at_path(copy.deepcopy(MINIMAL_RESOURCE), ("spec", *path), value))
        for path in iter_paths(spec)
        for value in ODD
    ][part::PARTS]
    accepted_count = unreadable_count = 0
    faults: list[str] = []
    disagreed: list[str] = []

    async def offer_manifests() -> None:
        nonlocal accepted_count, unreadable_count
        async with lab.client() as client:
            for path, value, document in manifests:
                try:
                    stored = await client.request("POST", RESOURCES_PATH, body=document, query={"dryRun": "All"})
                except UnicodeError:
                    continue
                except KubeError:
                    if not explain_rejection(document) and not _is_whole_float(value):
                        disagreed.append(f"the server rejects spec.{'.'.join(path)} = {value!r}")
                    continue
                accepted_count += 1
                if (rejection := explain_rejection(document)) and not _is_whole_float(value):
                    disagreed.append(f"the server accepts spec.{'.'.join(path)} = {value!r}: {rejection}")
                try:
                    SpeculativeDeployment.from_dict(stored)
                except ResourceError as error:
                    unreadable_count += 1
                    faults.append(f"spec.{'.'.join(path)} = {value!r}: {error}")

    asyncio.run(offer_manifests())
    assert not unreadable_count, "\n".join(faults)
    assert not disagreed, "\n".join(disagreed)
    assert accepted_count > len(manifests) // 20, (
        f"too many odd values are rejected: {accepted_count} of {len(manifests)} were accepted"
    )
