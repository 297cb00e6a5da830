"""Revisions that differ in their drafter alone, and the fields by which others differ."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aerie.api import SpeculativeDeployment
from aerie.engine.speculation import Off, SpeculationSetting, Static
from aerie.manifests.revision_hash import RENEW_ANNOTATION, compute_revision, is_drafter_change_alone, list_changed_fields

FIELDS: dict[str, tuple[Any, Any]] = {
    "spec.model.servedName": ("chat", "other"),
    "spec.model.source": ("target", "other"),
    "spec.engine": (1, 2),
    "the speculation setting": (Static(3), Static(5)),
    "spec.speculation.draftSampling": (None, "Probabilistic"),
    "spec.speculation.engineOptions": (None, {"disable_padded_drafter_batch": True}),
    f"the annotation {RENEW_ANNOTATION}": ("", "1"),
}
"""Two values of each field that makes a revision, except the drafter."""


def claim(path: str) -> dict[str, Any]:
    return {"source": {"persistentVolumeClaim": {"claimName": "models", "path": path}}}


def build(drafter: str | None, changed: frozenset[str] = frozenset()) -> tuple[SpeculativeDeployment, SpeculationSetting]:
    """Return a resource with the second value of the changed fields, and its setting."""
    served, target, gpus, setting, sampling, options, renewal = (values[name in changed] for name, values in FIELDS.items())
    speculation = {"draftSampling": sampling, "engineOptions": options}
    spec = {
        "model": {"servedName": served, **claim(target)},
        "engine": {"image": "vllm/vllm-openai:v0.33.0", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}},
        "speculation": {name: value for name, value in speculation.items() if value is not None},
        **({"drafter": claim(drafter)} if drafter else {}),
    }
    metadata = {"name": "chat", "annotations": {RENEW_ANNOTATION: renewal} if renewal else {}}
    document = {"apiVersion": "aerie.dev/v1alpha1", "kind": "SpeculativeDeployment", "metadata": metadata, "spec": spec}
    return SpeculativeDeployment.from_dict(document), setting


DRAFTERS = st.sampled_from(["eagle3", "eagle31", None])
CHANGES = st.frozensets(st.sampled_from(sorted(FIELDS)))


@given(DRAFTERS, DRAFTERS, CHANGES)
def test_a_change_is_of_the_drafter_alone_if_nothing_else_differs(
    drafter: str | None, served_drafter: str | None, changed: frozenset[str]
) -> None:
    served, served_setting = build(served_drafter)
    desired, setting = build(drafter, changed)
    is_alone = is_drafter_change_alone(desired, setting, served.spec.drafter, compute_revision(served, served_setting))
    assert is_alone == (drafter != served_drafter and not changed)
    assert list_changed_fields(desired, setting, served, served_setting) == [name for name in FIELDS if name in changed]


def test_a_drafter_that_is_switched_off_is_another_setting() -> None:
    served, setting = build("eagle3")
    desired, _ = build("eagle31")
    assert not is_drafter_change_alone(desired, Off(), served.spec.drafter, compute_revision(served, setting))
    assert "the speculation setting" in list_changed_fields(desired, Off(), served, setting)
