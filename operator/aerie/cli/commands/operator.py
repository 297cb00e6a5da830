"""`aerie operator`: the operator itself, as its pod runs it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import kopf
import typer

from aerie.api import ResourceError
from aerie.api.engine import EnvVar, ResourceRequirements
from aerie.cli.console import CommandError
from aerie.cli.inputs.files import CATALOG_HELP, read_valid_catalog
from aerie.manifests.preflight_job import DEFAULT_PREFLIGHT_RESOURCES, PreflightJobConfig
from aerie.rollout.facts.concurrency import ConcurrencyLimits

if TYPE_CHECKING:
    from aerie.controller.notifications.config import NotificationsConfig


class LogFormat(Enum):
    """Format of the log."""

    JSON = "json"
    TEXT = "text"


def operator(
    namespace: Annotated[list[str] | None, typer.Option(help="Namespace to watch; repeatable. Default: all namespaces.")] = None,
    lease_namespace: Annotated[
        str | None, typer.Option(help="Namespace of the leader election Lease and the drafter key. Default: the pod's own.")
    ] = None,
    lease_name: Annotated[str, typer.Option(help="Name of the leader election Lease.")] = "aerie-operator",
    drafter_key_secret: Annotated[
        str, typer.Option(help="Secret with the key of the drafter endpoints' tokens; created if it does not exist.")
    ] = "aerie-drafter-key",
    preflight_image: Annotated[
        str | None, typer.Option(envvar="AERIE_IMAGE", help="Image of the preflight Jobs, normally the operator's own.")
    ] = None,
    preflight_pull_secret: Annotated[
        list[str] | None,
        typer.Option(help="Image pull secret for that image, in the namespace of each resource; repeatable."),
    ] = None,
    preflight_resources: Annotated[
        str | None,
        typer.Option(help="Resource requests and limits of their container, as JSON. Default: both set, as quotas require."),
    ] = None,
    preflight_env: Annotated[
        str | None, typer.Option(help="Environment variables of their container, as a JSON list of {name, value or valueFrom}.")
    ] = None,
    max_concurrent_rollouts: Annotated[
        int, typer.Option(min=0, help="Maximum concurrent rollouts in the cluster; further ones wait. 0: unlimited.")
    ] = 20,
    max_concurrent_rollouts_per_namespace: Annotated[
        int, typer.Option(min=0, help="Maximum concurrent rollouts in one namespace. 0: unlimited.")
    ] = 10,
    max_concurrent_trials: Annotated[
        int, typer.Option(min=0, help="Maximum concurrent trials of speculation settings by tuning. 0: unlimited.")
    ] = 10,
    catalog: Annotated[str | None, typer.Option(help=CATALOG_HELP)] = None,
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics.")] = 8080,
    health_port: Annotated[int, typer.Option(help="Port of /healthz and /readyz.")] = 8081,
    notifications_config: Annotated[
        str | None,
        typer.Option(help="File with the receivers of notifications and their subscriptions (docs/how-to/notifications.md)."),
    ] = None,
    notify_url: Annotated[
        str | None,
        typer.Option(envvar="AERIE_NOTIFY_URL", help="URL to which CloudEvents of rollouts are posted. Default: none."),
    ] = None,
    notify_headers: Annotated[
        str | None,
        typer.Option(help="File with HTTP headers of the notifications, one `Name: value` a line; read for each notification."),
    ] = None,
    notify_source: Annotated[str, typer.Option(help="Source of all notifications, such as the name of the cluster.")] = "aerie",
    prometheus_token: Annotated[
        list[str] | None,
        typer.Option(help="ADDRESS=FILE: file with the bearer token for the Prometheus server at the address; repeatable."),
    ] = None,
    prometheus_allow: Annotated[
        list[str] | None,
        typer.Option(help="Address of a Prometheus server that resources may use; repeatable. Default: any address."),
    ] = None,
    prometheus_ca: Annotated[
        str | None, typer.Option(help="PEM file with CA certificates for Prometheus servers. Default: the public CAs.")
    ] = None,
    log_format: Annotated[LogFormat, typer.Option(help="Log format.")] = LogFormat.TEXT,
    log_level: Annotated[str, typer.Option(help="Log level: DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the actions for each resource without performing them.")
    ] = False,
) -> None:
    """Run the operator: watch SpeculativeDeployments and reconcile them.

    Uses the service account of its pod, or the kubeconfig. Of several operators with the same Lease, one is active. SIGTERM stops
    it.
    """
    # Imported here: the other commands need neither Kopf nor the cluster's client.
    from aerie.controller.kubernetes.kubeconfig import ConnectError
    from aerie.controller.operator import OperatorOptions, run_operator
    from aerie.controller.scraping.prometheus import PrometheusAccess

    if preflight_image is None:
        raise CommandError("the image of preflight Jobs is unknown: set --preflight-image or AERIE_IMAGE.")
    notifications = read_notifications(notifications_config, notify_url, notify_headers, notify_source)
    drafter_catalog, problems = read_valid_catalog(catalog)
    kopf.configure(log_format=kopf.LogFormat.JSON if log_format is LogFormat.JSON else kopf.LogFormat.FULL)
    logging.getLogger().setLevel(_parse_log_level(log_level))
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # Kopf logs a line for each event
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs a line for each scrape
    for problem in problems:
        logging.getLogger(__name__).error("%s", problem)
    options = OperatorOptions(
        preflight_job_config=PreflightJobConfig(
            preflight_image,
            tuple(preflight_pull_secret or ()),
            _parse_preflight_resources(preflight_resources),
            _parse_preflight_env(preflight_env),
        ),
        drafter_catalog=drafter_catalog,
        identity=f"{socket.gethostname()}_{os.getpid()}",
        namespaces=tuple(namespace or ()),
        lease_namespace=lease_namespace,
        lease_name=lease_name,
        drafter_key_secret=drafter_key_secret,
        health_port=health_port,
        metrics_port=metrics_port,
        notifications=notifications,
        prometheus_access=PrometheusAccess(
            dict(map(_parse_prometheus_token, prometheus_token or [])),
            Path(prometheus_ca) if prometheus_ca else None,
            tuple(map(_check_prometheus_address, prometheus_allow or [])),
        ),
        concurrency_limits=ConcurrencyLimits(
            max_concurrent_rollouts or None, max_concurrent_rollouts_per_namespace or None, max_concurrent_trials or None
        ),
        dry_run=dry_run,
    )
    try:
        raise typer.Exit(asyncio.run(run_operator(options)))
    except ConnectError as error:
        raise CommandError(str(error)) from None


def read_notifications(file: str | None, url: str | None, headers_file: str | None, source: str) -> NotificationsConfig:
    """Return the receivers of notifications. Their files with secrets may be invalid: an operator must be able to restart after
    somebody has changed a Secret. Raises CommandError."""
    from aerie.controller.notifications import config as notifications
    from aerie.controller.notifications.receiver import Endpoint, ReceiverError

    try:
        config = notifications.read_notifications_config(Path(file), source) if file else notifications.NotificationsConfig()
        for problem in notifications.find_file_problems(config):
            logging.getLogger(__name__).error("notifications: %s", problem)
        if url:
            endpoint = Endpoint(url, headers_file=Path(headers_file) if headers_file else None)
            endpoint.read_url()
            endpoint.read_headers()
            config = notifications.with_url_receiver(config, endpoint, source)
    except notifications.NotificationsConfigError as error:
        raise CommandError(f"--notifications-config: {error}") from None
    except ReceiverError as error:
        raise CommandError(f"--notify-url or --notify-headers: {error}") from None
    return config


def _parse_preflight_env(text: str | None) -> tuple[dict[str, Any], ...]:
    try:
        variables = json.loads(text or "[]")
        if not isinstance(variables, list):
            raise ResourceError("it is not a list.")
        return tuple(EnvVar.from_dict(variable, unknown_fields="forbid").to_dict() for variable in variables)
    except (ResourceError, ValueError) as error:
        raise CommandError(f"--preflight-env: {error}") from None


def _parse_preflight_resources(text: str | None) -> ResourceRequirements:
    if text is None:
        return DEFAULT_PREFLIGHT_RESOURCES
    try:
        resources = json.loads(text, parse_float=str)  # a quantity: 0.5
    except ValueError:
        resources = None
    if not isinstance(resources, dict):
        raise CommandError(f'--preflight-resources is {text}: set JSON, such as {{"limits": {{"cpu": "1", "memory": "512Mi"}}}}.')
    try:
        return ResourceRequirements.from_dict(resources, unknown_fields="forbid")
    except ResourceError as error:
        raise CommandError(f"--preflight-resources: {error}") from None


def _parse_prometheus_token(text: str) -> tuple[str, Path]:
    address, separator, file = text.rpartition("=")
    if not separator or not file or not address.startswith(("http://", "https://")):
        raise CommandError(f"--prometheus-token is {text}: use the form http://HOST:PORT=FILE or https://HOST=FILE.")
    return address, Path(file)


def _check_prometheus_address(address: str) -> str:
    if not address.startswith(("http://", "https://")):
        raise CommandError(f"--prometheus-allow is {address}: use the form http://HOST:PORT or https://HOST/PATH.")
    return address


def _parse_log_level(name: str) -> int:
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise CommandError(f"--log-level is {name}: set DEBUG, INFO, WARNING or ERROR.")
    return level
