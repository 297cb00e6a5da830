"""The command line of `kubectl aerie plan`. What it needs of the operator is imported when it runs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from aerie.boundary import EXIT_REJECTED
from aerie.cli.console import CommandError, err, out
from aerie.cli.fleet.kubectl import Kubectl, RejectionError
from aerie.cli.fleet.options import with_kubectl
from aerie.cli.fleet.output import write_document

if TYPE_CHECKING:
    from aerie.api import SpeculativeDeployment
    from aerie.cli.plan.change import PlannedChange
    from aerie.cli.plan.rollout_plan import Forecast, RolloutPlan

_EFFECTS = (0.03, 0.0, -0.03)
_MAX_REQUESTS_PER_SECOND = 1000.0


class PlanOutput(StrEnum):
    """Form of the output."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


@with_kubectl
def plan(
    kubectl: Kubectl,
    file: Annotated[str, typer.Option("-f", "--file", help="Manifest of a SpeculativeDeployment; -: standard input.")],
    name: Annotated[str | None, typer.Option(help="Name of the object, if the file contains several.")] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(help="Users' requests per second of one pod, for the time until the verdict.")
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Also the pod template before and after, without secrets.")] = False,
    target: Annotated[str | None, typer.Option(help="Target for preflight: a folder, or OWNER/NAME@COMMIT.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter for preflight: a folder, or OWNER/NAME@COMMIT.")] = None,
    catalog_file: Annotated[
        str | None, typer.Option("--catalog", help="ConfigMap with catalog entries, as the operator has it.")
    ] = None,
    output: Annotated[PlanOutput, typer.Option("-o", "--output", help="Form of the output.")] = PlanOutput.TEXT,
) -> None:
    """Show what an apply would do before it is applied: the rollout, preflight, pods and GPUs, time, and what users notice.

    Writes nothing. Exit status 1: the API server or preflight rejects the file, or it would not be rolled out. 2: no plan.
    """
    if requests_per_second is not None and not 0 < requests_per_second <= _MAX_REQUESTS_PER_SECOND:
        raise CommandError(f"--requests-per-second is {requests_per_second:g}: set a number above 0, up to 1000.")
    try:
        result = _build_plan(kubectl, file, name, requests_per_second, (target, drafter), catalog_file, with_diff=diff)
    except RejectionError as error:
        err.print(f"error: The API server rejects {file}:", markup=False)
        for line in str(error).splitlines():
            err.print(f"  {line}", markup=False)
        err.print(
            "Correct these fields, then plan again. docs/reference/resource.md has all fields and their ranges.", markup=False
        )
        raise typer.Exit(EXIT_REJECTED) from None
    if output is PlanOutput.TEXT:
        from aerie.cli.plan.screen import render_diff, render_next, render_plan  # not needed otherwise

        out.print(render_plan(result), soft_wrap=False)
        out.print(render_next(result))
        if result.diff is not None:
            out.print()
            out.print(render_diff(result.diff))
    else:
        from aerie.cli.plan.document import build_plan_document  # not needed otherwise

        write_document(output, "RolloutPlan", build_plan_document(result))
    raise typer.Exit(result.exit_status)


def _build_plan(
    kubectl: Kubectl,
    file: str,
    name: str | None,
    requests_per_second: float | None,
    locations: tuple[str | None, str | None],
    catalog_file: str | None,
    *,
    with_diff: bool,
) -> RolloutPlan:
    from datetime import UTC, datetime

    from aerie.api import SpeculativeDeployment
    from aerie.cli.inputs.files import read_catalog
    from aerie.cli.inputs.hub import read_hub_checkpoint
    from aerie.cli.inputs.model_location import parse_model_location
    from aerie.cli.inputs.preflight_input import PreflightOverrides
    from aerie.cli.plan import capacity
    from aerie.cli.plan.change import plan_change
    from aerie.cli.plan.cluster_reader import read_cluster, read_manifest, read_nodes
    from aerie.cli.plan.consequences import describe_reversal, describe_users
    from aerie.cli.plan.preflight_summary import summarize_preflight
    from aerie.cli.plan.rollout_plan import RolloutPlan
    from aerie.cli.plan.template_diff import build_template_diff

    target, drafter = (
        None if text is None else parse_model_location(text, option)
        for text, option in zip(locations, ("--target", "--drafter"), strict=True)
    )
    catalog = read_catalog(catalog_file)
    cluster = read_cluster(kubectl, read_manifest(file, name))
    resource = SpeculativeDeployment.from_dict(dict(cluster.planned))
    change = plan_change(cluster.planned, cluster.state, cluster.live, datetime.now(UTC), catalog)
    preflight = summarize_preflight(change, resource, PreflightOverrides(target, drafter), catalog, read_hub_checkpoint)
    before, after = change.read_templates()
    need, gpus = capacity.count_pods(change), capacity.read_pod_gpus(after)
    room, room_problem = None, ""
    if need.extra and gpus.count:
        assert after is not None
        try:
            nodes, pods = read_nodes(cluster.kubectl)
        except CommandError as error:
            room_problem = str(error)
        else:
            room = capacity.compute_room(after, gpus, nodes, pods)
    names = (change.stable.revision if change.stable is not None else "none", change.desired.revision)
    diff = None
    if with_diff:  # a change in place leaves the template of the pods as it is
        diff = "" if change.kind == "InPlace" else build_template_diff(before, after, names)
    return RolloutPlan(
        str(cluster.planned["metadata"]["namespace"]),
        resource.metadata.name,
        file,
        tuple(flag for flag in kubectl.flags if not flag.startswith("--namespace=")),
        change,
        preflight,
        need,
        gpus,
        room,
        room_problem,
        _forecast(change, resource, requests_per_second, file),
        tuple(describe_users(change)),
        describe_reversal(change),
        diff,
    )


def _forecast(change: PlannedChange, resource: SpeculativeDeployment, requests_per_second: float | None, file: str) -> Forecast:
    from aerie.cli.plan.rollout_plan import Forecast, ForecastRow

    if change.kind not in ("InPlace", "Canary"):
        return Forecast("Nothing is compared, so no verdict takes time.")
    if requests_per_second is None:
        return Forecast("Set --requests-per-second of one pod for the time until the verdict, and its chances.")
    from aerie.forecast.assumptions import Requests
    from aerie.forecast.stages import ForecastError, forecast_rollout

    if change.kind == "Canary":  # the forecast takes the method from the spec alone
        in_place = resource.spec.rollout.in_place.model_copy(update={"mode": "Off"})
        rollout = resource.spec.rollout.model_copy(update={"in_place": in_place})
        resource = resource.model_copy(update={"spec": resource.spec.model_copy(update={"rollout": rollout})})
    try:
        result = forecast_rollout(resource, Requests(requests_per_second), _EFFECTS)
    except ForecastError as error:
        return Forecast(f"There is no forecast. {error}")
    rows = tuple(
        ForecastRow(item.effect, item.median_seconds, item.promotion_chance, item.rollback_chance) for item in result.total
    )
    return Forecast(f"Until the verdict, by tokens per step; more: aerie forecast -f {file}", rows)
