"""The revision: a hash of all that determines an engine's pod.

Target, engine, drafter, served name and speculation setting are in it; replicas, rollout, metrics and pausing are not, so
that changing those touches no pod. The number of the pods' form is in it too: a release of Aerie that builds other pods makes
a new revision, which reaches the fleet by canary as any other change, instead of restarting it behind the user's back.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from aerie.api import SpeculativeDeployment
from aerie.engine.speculation import Setting

FORM = 1
"""Raise it with every change of `pod.py` that changes a pod; tests/unit/resources/test_pod.py notices one that forgets it."""
LENGTH = 10


def revision(resource: SpeculativeDeployment, setting: Setting) -> str:
    """Ten characters of 0-9a-f; equal for equal pods and, but for chance, for no others."""
    spec = resource.spec
    content = {
        "form": FORM,
        "servedName": resource.served_name,
        "target": spec.model.source.to_dict(),
        "engine": spec.engine.to_dict(),
        "drafter": spec.drafter.to_dict() if spec.drafter else None,
        "setting": [type(setting).__name__, asdict(setting)],
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]
