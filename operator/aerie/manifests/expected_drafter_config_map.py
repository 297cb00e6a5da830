"""The ConfigMap with the drafter that was promoted in place, for pods that start or restart afterwards.

A pod of the revision mounts it (`pod/drafter_plugin.py`), and loads the drafter before it is ready. The operator reads it where
the status was lost.

Guarantees: equal drafters are equal objects. Not guaranteed: that a running pod comes to a drafter that was changed here; the
operator loads it in each pod.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aerie.api import ResourceError
from aerie.api.status import InPlaceDrafter
from aerie.manifests import naming

IN_PLACE_KEY = "inPlace.json"
"""Key of the drafter as the status has it; `naming.EXPECTED_DRAFTER_KEY` is the key of what the plugin reads."""


def build_expected_drafter_config_map(resource_name: str, revision: str, drafter: InPlaceDrafter) -> dict[str, Any]:
    """Return the ConfigMap for pods of a revision, as a plain object."""
    location = drafter.location
    source = (
        {"folder": location.folder}
        if location.folder is not None
        else {"repository": location.repository, "revision": location.commit}
    )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": naming.expected_drafter_config_map_name(resource_name, revision),
            "labels": naming.common_labels(resource_name) | {naming.REVISION_LABEL: revision},
        },
        "data": {
            naming.EXPECTED_DRAFTER_KEY: json.dumps({**source, "files": drafter.files}, sort_keys=True),
            IN_PLACE_KEY: json.dumps(drafter.to_dict(), sort_keys=True),
        },
    }


def read_in_place_drafter(data: Mapping[str, str]) -> InPlaceDrafter | None:
    """Return the drafter in the data of the ConfigMap; None where there is none, or an invalid one."""
    try:
        return InPlaceDrafter.from_dict(json.loads(data.get(IN_PLACE_KEY) or ""))
    except (ValueError, ResourceError):
        return None
