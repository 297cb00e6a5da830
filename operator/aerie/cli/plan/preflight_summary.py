"""Preflight of a planned change, by the checks of `aerie preflight`, as far as the models can be read from here.

Not guaranteed: a result. A volume or an image cannot be read from here, and the Hub may not answer; then the operator's preflight
Job decides. A result of that Job for the same revision is taken over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aerie.api import SpeculativeDeployment
from aerie.checkpoints import HubError
from aerie.cli.console import CommandError
from aerie.cli.inputs.model_location import HubReader
from aerie.cli.inputs.preflight_input import PreflightOverrides, UnreadableSourceError, build_input_from_deployment
from aerie.cli.plan.change import ROLLOUT_KINDS, PlannedChange
from aerie.engine.arguments import ArgumentError
from aerie.engine.models.checkpoint import CheckpointError
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.engine.preflight import Finding, Severity, run_preflight

PreflightState = Literal["Passed", "Failed", "Overridden", "NotNeeded", "NotChecked", "Off"]


@dataclass(frozen=True)
class PreflightSummary:
    """Result of preflight."""

    state: PreflightState
    message: str
    findings: tuple[Finding, ...] = ()
    """Errors and warnings."""
    passed: int = 0
    notes: int = 0


def summarize_preflight(
    change: PlannedChange,
    resource: SpeculativeDeployment,
    overrides: PreflightOverrides,
    catalog: DrafterCatalog,
    hub_reader: HubReader,
) -> PreflightSummary:
    """Return the result of preflight for the desired revision. `resource`: with the spec's own preflight settings."""
    if change.kind not in ROLLOUT_KINDS:
        return PreflightSummary("NotNeeded", "Not needed: no revision starts.")
    preflight = resource.spec.rollout.preflight
    if preflight.mode == "Off":
        return PreflightSummary("Off", "Off by spec.rollout.preflight.mode: nothing is checked before pods start.")
    recorded = change.recorded_preflight
    if recorded is not None and recorded.state == "Failed":
        return PreflightSummary("Failed", f"Failed in the cluster: {recorded.message}")
    try:
        preflight_input, _ = build_input_from_deployment(change.desired.resource, overrides, catalog, hub_reader)
    except (UnreadableSourceError, HubError) as error:
        if recorded is not None:
            return PreflightSummary("Passed", f"Passed in the cluster: {recorded.message}")
        return PreflightSummary("NotChecked", f"Not checked here: {error} The operator's preflight Job will check it.")
    except (CommandError, ArgumentError, CheckpointError) as error:
        return PreflightSummary("Failed", str(error))
    report = run_preflight(preflight_input)
    counts = {severity: len(list(report.with_severity(severity))) for severity in Severity}
    findings = tuple(item for item in report.findings if item.severity in (Severity.ERROR, Severity.WARNING))
    failed_ids = list(dict.fromkeys(finding.id for finding in report.with_severity(Severity.ERROR)))
    if report.passed:
        state: PreflightState = "Passed"
        message = report.summary
    elif preflight.allows(failed_ids):
        state = "Overridden"
        message = f"{report.summary}; spec.rollout.preflight lets the revision continue"
    else:
        state, message = "Failed", report.summary
    message = f"{message[:1].upper()}{message[1:]}."
    return PreflightSummary(state, message, findings, counts[Severity.PASS], counts[Severity.INFO])
