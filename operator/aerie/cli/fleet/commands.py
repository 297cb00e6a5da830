"""The command line of `kubectl aerie` about resources in a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from aerie.boundary import EXIT_REJECTED
from aerie.cli.console import err, out
from aerie.cli.fleet import screens
from aerie.cli.fleet.actions import Action, ActionName, build_action, build_extension, parse_extension
from aerie.cli.fleet.attention import find_attention_reason
from aerie.cli.fleet.explain import (
    build_explanation_document,
    read_tuning_record,
    render_explanation,
    tuning_config_map_name,
)
from aerie.cli.fleet.kubectl import ConflictError, Document, Kubectl, UnreachableError
from aerie.cli.fleet.options import with_kubectl
from aerie.cli.fleet.output import Output, OutputOption, write_document
from aerie.cli.fleet.resource_view import ResourceView, now
from aerie.cli.fleet.wait import Goal, describe_outcome, is_reached, parse_timeout

EXIT_CONFLICT, EXIT_TIMED_OUT = 3, 4
"""Exit statuses beside those of `aerie.boundary`: the resource has changed meanwhile, and `wait` has ended without a result."""

MAX_ATTEMPTS = 3
"""Attempts to write a decision, while what it is about stays the same."""
RECONNECT_SECONDS = 1.0
"""Pause before a watch that has ended begins again."""

Name = Annotated[str, typer.Argument(help="Name of the SpeculativeDeployment.", show_default=False)]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Have the API server check the change, and write nothing.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why, for the history of rollouts: one line.")]


@with_kubectl
def list_resources(
    kubectl: Kubectl,
    all_namespaces: Annotated[bool, typer.Option("-A", "--all-namespaces", help="Of all namespaces.")] = False,
    attention: Annotated[
        bool, typer.Option("--attention", help="Only those that wait for a user. Exit status 1 if there are any.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """List SpeculativeDeployments: who serves, what is in progress, and what waits for a user."""
    views = [ResourceView(item) for item in kubectl.list(all_namespaces=all_namespaces)]
    if attention:
        views = [view for view in views if find_attention_reason(view)]
    if output in (Output.JSON, Output.YAML):
        write_document(output, "ResourceList", {"items": [_summarize(view) for view in views]})
    elif views:
        is_wide = output is Output.WIDE
        _show(screens.render_list(views, now(), width=out.width, is_wide=is_wide, with_namespace=all_namespaces))
    else:
        err.print("No SpeculativeDeployment waits for a user." if attention else "No SpeculativeDeployments found.")
    if attention and views:
        raise typer.Exit(EXIT_REJECTED)


@with_kubectl
def status(
    kubectl: Kubectl,
    name: Name,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Update the screen after each change, until Ctrl-C.")] = False,
    all_: Annotated[
        bool, typer.Option("--all", help="Also criteria without a requirement, and those of the last analysis.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show one SpeculativeDeployment: whether clients are served, what is in progress, what it needs, and what you can do."""
    if output in (Output.JSON, Output.YAML):
        write_document(output, "ResourceStatus", _summarize(ResourceView(kubectl.get(name)), with_details=True))
        return

    def render(document: Document) -> Any:
        return screens.render_status(ResourceView(document), now(), width=out.width, shows_all=all_)

    if not watch:
        _show(render(kubectl.get(name)))
    elif out.is_terminal:
        from rich.live import Live  # not needed otherwise

        with Live(console=out, auto_refresh=False, screen=True) as live:
            for document in _watch(kubectl, name):
                live.update(render(document), refresh=True)
    else:
        for document in _watch(kubectl, name):
            _show(render(document))
            out.print()


def _watch(kubectl: Kubectl, name: str) -> Iterator[Document]:
    """Yield a resource now and after each change, for ever: API servers end connections after half an hour or so."""
    latest = kubectl.get(name)
    yield latest
    while True:
        try:
            for document in kubectl.watch(name):
                if document != latest:
                    latest = document
                    yield document
        except UnreachableError:
            pass  # the screen stays until the server answers again
        time.sleep(RECONNECT_SECONDS)


@with_kubectl
def history(kubectl: Kubectl, name: Name, output: OutputOption = Output.TEXT) -> None:
    """Show past rollouts and trials of a SpeculativeDeployment, newest first."""
    view = ResourceView(kubectl.get(name))
    if output in (Output.JSON, Output.YAML):
        trials = (view.status.get("speculation") or {}).get("trials") or []
        write_document(output, "RolloutHistory", {"rollouts": list(view.history), "trials": list(trials)})
    else:
        _show(screens.render_history(view))


@with_kubectl
def explain(kubectl: Kubectl, name: Name, output: OutputOption = Output.TEXT) -> None:
    """Explain a SpeculativeDeployment's drafter and setting: the last verdict, and the last decision of tuning."""
    view = ResourceView(kubectl.get(name))
    record = read_tuning_record(view, kubectl.find("configmap", tuning_config_map_name(view)))
    if output in (Output.JSON, Output.YAML):
        write_document(output, "Explanation", build_explanation_document(view, record))
    else:
        _show(render_explanation(view, record, now(), width=out.width))


@with_kubectl
def wait(
    kubectl: Kubectl,
    name: Name,
    goal: Annotated[
        Goal, typer.Option("--for", help="What to wait for. decided: promoted, rolled back or failed.")
    ] = Goal.DECIDED,
    timeout: Annotated[str, typer.Option("--timeout", help="Time after which it ends with exit status 4, such as 10m.")] = "1h",
) -> None:
    """Wait until the present spec of a SpeculativeDeployment has come to an end. Exit status 1: the opposite has happened."""
    deadline = time.monotonic() + parse_timeout(timeout)
    view: ResourceView | None = None
    while True:
        try:
            view = ResourceView(kubectl.get(name))
            outcome = describe_outcome(view)
        except UnreachableError as error:
            if view is None:
                raise
            outcome = str(error)  # such as during a failover of the API server
        else:
            if (reached := is_reached(view, goal)) is not None:
                out.print(outcome, markup=False)
                raise typer.Exit(0 if reached else EXIT_REJECTED)
        if time.monotonic() >= deadline:
            err.print(f"Not {goal} within {timeout}: {outcome}", markup=False)
            raise typer.Exit(EXIT_TIMED_OUT)
        time.sleep(min(2.0, max(0.1, deadline - time.monotonic())))


def _decide(
    kubectl: Kubectl, view: ResourceView, build: Callable[[ResourceView], Action], output: Output, *, dry_run: bool
) -> None:
    """Write a decision, and say what follows."""
    action = _write_decision(kubectl, view, build, dry_run=dry_run)
    follow_up = f"kubectl aerie status {view.name} -n {view.namespace} --watch"
    if output in (Output.JSON, Output.YAML):
        result = {"action": action.name, "dryRun": dry_run, "consequence": action.consequence, "followUp": follow_up}
        write_document(output, "ActionResult", {"namespace": view.namespace, "name": view.name, **result})
    else:
        out.print(f"{'Checked, nothing is written: ' if dry_run else ''}{action.consequence}", markup=False)
        out.print(f"Follow it with: {follow_up}", markup=False, style="dim")


def _write_decision(kubectl: Kubectl, view: ResourceView, build: Callable[[ResourceView], Action], *, dry_run: bool) -> Action:
    """Write a decision, and return it. It is written again where only other parts of the resource have changed meanwhile."""
    for _ in range(MAX_ATTEMPTS - 1):
        action = build(view)
        try:
            kubectl.patch(view.name, action.operations, dry_run="server" if dry_run else "none")
            return action
        except ConflictError:
            latest = ResourceView(kubectl.get(view.name))
            if latest.decision_key != view.decision_key:
                break
            view = latest
    try:
        action = build(view)
        kubectl.patch(view.name, action.operations, dry_run="server" if dry_run else "none")
    except ConflictError as error:
        err.print(f"error: {error}", markup=False)
        raise typer.Exit(EXIT_CONFLICT) from None
    return action


def _define_action(action_name: ActionName, text: str) -> Callable[..., None]:
    def run(
        kubectl: Kubectl,
        name: Name,
        reason: ReasonOption = "",
        dry_run: DryRunOption = False,
        output: OutputOption = Output.TEXT,
    ) -> None:
        view = ResourceView(kubectl.get(name))
        user = kubectl.read_user_name()
        _decide(kubectl, view, lambda latest: build_action(latest, action_name, user, reason, now()), output, dry_run=dry_run)

    run.__name__, run.__doc__ = action_name, text
    return with_kubectl(run)


promote = _define_action("promote", "Promote the candidate: end or skip its analysis. The ramp follows.")
rollback = _define_action("rollback", "Roll back the candidate, or revert a promotion while the previous revision is retained.")
retry = _define_action("retry", "Roll out a rejected revision again, from its preflight on.")


@with_kubectl
def pause(kubectl: Kubectl, name: Name, dry_run: DryRunOption = False, output: OutputOption = Output.TEXT) -> None:
    """Have Aerie change nothing of a SpeculativeDeployment."""
    view, user = ResourceView(kubectl.get(name)), kubectl.read_user_name()
    _decide(kubectl, view, lambda latest: build_action(latest, "pause", user, "", now()), output, dry_run=dry_run)


@with_kubectl
def resume(
    kubectl: Kubectl,
    name: Name,
    extension: Annotated[
        str,
        typer.Option(
            "--for", metavar="DURATION", help="Extend the inconclusive analysis of a Held canary: 30m, 2h, at most 24h."
        ),
    ] = "",
    reason: Annotated[str, typer.Option("--reason", help="With --for: why, for the history of rollouts.")] = "",
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Have Aerie continue a paused SpeculativeDeployment. With --for: an inconclusive analysis, for so long."""
    duration = parse_extension(extension) if extension else None
    view, user = ResourceView(kubectl.get(name)), kubectl.read_user_name()

    def build(latest: ResourceView) -> Action:
        if duration is None:
            return build_action(latest, "resume", user, reason, now())
        return build_extension(latest, duration, user, reason, now())

    _decide(kubectl, view, build, output, dry_run=dry_run)


def _show(screen: Any) -> None:
    """Print a screen, with lines that end at the terminal's width. A table that needs more is not cut."""
    out.print(screen, soft_wrap=False, crop=False)


# -------------------------------------------------------------------------------------------------------------- for programs
def _summarize(view: ResourceView, *, with_details: bool = False) -> dict[str, Any]:
    """Return a resource for programs."""
    document: dict[str, Any] = {
        "namespace": view.namespace,
        "name": view.name,
        "phase": view.phase,
        "isServing": view.is_serving,
        "isObserved": view.is_observed,
        "attention": find_attention_reason(view) or None,
        "servedRevision": view.served_revision or None,
        "candidate": None,
    }
    if view.candidate:
        names = ("revision", "change", "phase", "startTime")
        document["candidate"] = {name: view.candidate.get(name) for name in names}
    if with_details:
        document["arms"] = [dict(_arm_items(arm)) for arm in view.arms]
        analysis = {name: value for name, value in view.analysis.items() if name not in ("state", "parameters")}
        document |= {"analysis": analysis or None, "conditions": list(view.status.get("conditions") or ())}
    return document


def _arm_items(arm: Any) -> Iterator[tuple[str, Any]]:
    names = {
        "role": "role",
        "revision": "revision",
        "drafter": "drafter",
        "setting": "setting",
        "replicas": "replicas",
        "readyReplicas": "ready_replicas",
        "weight": "weight",
        "acceptanceLength": "acceptance_length",
        "timePerOutputToken": "time_per_output_token",
        "timeToFirstToken": "time_to_first_token",
    }
    yield from ((name, getattr(arm, attribute)) for name, attribute in names.items())
