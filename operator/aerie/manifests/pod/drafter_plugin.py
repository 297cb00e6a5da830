"""What engine pods need so that their drafter can change in place: Aerie's plugin of vLLM, and what it reads.

    /aerie/plugin      on PYTHONPATH: the plugin (plugin_config_map.py)          -> --middleware, --worker-extension-cls
    /aerie/token       the Secret with the token of the endpoint, once it exists -> AERIE_DRAFTER_TOKEN_FILE
    /aerie/expected    the ConfigMap with the drafter to come to, if it exists   -> AERIE_DRAFTER_EXPECTED
    /models/drafters   the drafter's whole claim, for drafters at other paths    -> AERIE_DRAFTER_ROOTS
    $HF_HOME           the Hub's cache, for drafters of the Hub                  -> AERIE_DRAFTER_ROOTS
    its volume         if it is this pod's alone (emptyDir)                      -> AERIE_DRAFTER_OWN_CACHE, _BYTES

Guarantees: pure; a function of the resource, its revision and the finished pod, podTemplate included. What users set is kept:
PYTHONPATH and VLLM_PLUGINS are continued, other middleware runs inside the plugin's, which answers its calls first. Where that is
impossible, or the engine could not change its drafter anyway, the result is the reason, with the field, its value and the fix. So
a pod has all of it or none.

Sources of what hinders the plugin in vLLM 0.26 to 0.33: vllm/entrypoints/cli/serve.py (which server answers, and how many of
them), vllm/config/parallel.py, vllm/ray/ray_env.py. `--config`, `--grpc`, `--headless`, `--host`, `--port`, `--uds` and `--ssl-*`
are reserved for Aerie in all engines (engine/command_line.py). `--api-key` and VLLM_API_KEY concern vLLM's own paths only.

The plugin is the default, so it must not prevent a start. vLLM does not start if it cannot import a middleware or a worker
extension, and a pod without the middleware is never ready. So the plugin is added only to releases of vLLM whose extension points
were read, and only where the image's PYTHONPATH is known: vLLM's own images set none (docker/Dockerfile* of vLLM).

Not guaranteed: what an image derived from vLLM's own changes under the same name, and variables by `envFrom`. A command of the
user's has to pass the arguments on, and PYTHONPATH too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.source import HuggingFaceSource, ImageSource, VolumeClaimSource
from aerie.engine.arguments import parse_arguments, parse_flags
from aerie.engine.releases import Feature, Version, describe_missing_feature, is_published_image, supports
from aerie.manifests import naming, plugin_config_map
from aerie.manifests.pod import engine_pod
from aerie_vllm import settings

PLUGIN_PATH = "/aerie/plugin"
DRAFTERS_PATH = "/models/drafters"
"""Mount path of the drafter's claim; a drafter at another path of the claim lies below it."""
HUB_CACHE_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
"""Variables that name a folder of the Hub's cache (huggingface_hub, constants.py)."""
READINESS_PATH = "/aerie/ready"
MIDDLEWARE = "aerie_vllm.endpoint.DrafterEndpoint"
WORKER_EXTENSION = "aerie_vllm.worker.DrafterWorker"
_TOKEN_PATH, _EXPECTED_PATH = "/aerie/token", "/aerie/expected"
_VARIABLES = (settings.TOKEN_FILE, settings.ROOTS, settings.EXPECTED, settings.OWN_CACHE, settings.OWN_CACHE_BYTES)
_RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"
_BY_PODS = "or leave it: drafters then change by pods"
_RESTARTING_ENGINES = "engines may restart alone, with the drafter of their arguments"
_OTHER_EXECUTORS = "workers may run outside of this pod, without the plugin and the drafters"
_FLAG_OBSTACLES = {
    "--worker-extension-cls": "the plugin needs the one worker extension of vLLM",
    "--enable-elastic-ep": _RESTARTING_ENGINES,
    "--enable-fault-tolerance": _RESTARTING_ENGINES,
    "--distributed-executor-backend": _OTHER_EXECUTORS,
    "--data-parallel-backend": _OTHER_EXECUTORS,
    "--root-path": "requests of users below it would be taken for calls of the plugin",
}
"""Why a flag prevents the plugin, by its full name; `_PERMITTED_VALUES` do not."""
_PERMITTED_VALUES = {"--distributed-executor-backend": ("mp", "uni"), "--data-parallel-backend": ("mp",)}


@dataclass(frozen=True)
class PluginObstacle:
    """Why pods do not get the plugin."""

    message: str
    """A sentence for each reason: what is, why it matters, what to do."""


@dataclass(frozen=True)
class PluginAdditions:
    """What is added to a pod template, so that the pods have the plugin."""

    arguments: tuple[str, ...]
    env: tuple[dict[str, str], ...]
    """Variables; one that the pod has already is replaced at its place."""
    volumes: tuple[dict[str, Any], ...]
    mounts: tuple[dict[str, Any], ...]

    def add_to(self, pod_template: Mapping[str, Any]) -> dict[str, Any]:
        """Return the template with the additions."""
        spec = pod_template["spec"]
        return {
            **pod_template,
            "spec": {
                **spec,
                "containers": [
                    self._extend_engine(container) if container["name"] == naming.ENGINE_CONTAINER else container
                    for container in spec["containers"]
                ],
                "volumes": [*(spec.get("volumes") or []), *self.volumes],
            },
        }

    def _extend_engine(self, container: Mapping[str, Any]) -> dict[str, Any]:
        added = {variable["name"]: variable for variable in self.env}
        env = [added.pop(variable["name"], variable) for variable in container.get("env") or []]
        probe = container["readinessProbe"]
        return {
            **container,
            "args": [*container["args"], *self.arguments],
            "env": [*env, *added.values()],
            "volumeMounts": [*(container.get("volumeMounts") or []), *self.mounts],
            "readinessProbe": {**probe, "httpGet": {**probe["httpGet"], "path": READINESS_PATH}},
        }


def plan_plugin(
    resource: SpeculativeDeployment, revision: str, version: Version, pod_template: Mapping[str, Any]
) -> PluginAdditions | PluginObstacle:
    """Return what the pods of a revision need for the plugin, or why they do not get it.

    Args:
        resource: whose arguments are valid.
        version: of the engine.
        pod_template: the revision's, as `engine_pod.build_pod_template` returns it.
    """
    container = next(
        container for container in pod_template["spec"]["containers"] if container["name"] == naming.ENGINE_CONTAINER
    )
    variables = {variable["name"]: variable for variable in container.get("env") or []}
    additions = _build_additions(resource, revision, pod_template["spec"], container, variables)
    obstacles = [
        *_find_engine_obstacles(resource, version, has_drafter="--speculative-config" in container["args"]),
        *_find_server_obstacles(resource, variables),
        *_find_argument_obstacles(resource),
        *_find_variable_obstacles(resource, variables),
        *_find_volume_obstacles(pod_template["spec"], container, additions),
        *_find_probe_obstacles(container),
    ]
    return PluginObstacle(" ".join(obstacles)) if obstacles else additions


def _build_additions(
    resource: SpeculativeDeployment,
    revision: str,
    spec: Mapping[str, Any],
    container: Mapping[str, Any],
    variables: Mapping[str, Mapping[str, Any]],
) -> PluginAdditions:
    name = resource.metadata.name
    token = {"secretName": naming.drafter_token_secret_name(name), "optional": True}
    expected = {"name": naming.expected_drafter_config_map_name(name, revision), "optional": True}
    volumes = [
        plugin_config_map.build_plugin_volume(name),
        {"name": "aerie-token", "secret": token},
        {"name": "aerie-expected", "configMap": expected},
    ]
    paths = {naming.PLUGIN_VOLUME: PLUGIN_PATH, "aerie-token": _TOKEN_PATH, "aerie-expected": _EXPECTED_PATH}
    folders = [str(variables[folder].get("value") or "") for folder in HUB_CACHE_VARIABLES if folder in variables]
    roots = [folder for folder in folders if _is_absolute(folder)]
    if resource.spec.drafter is not None and isinstance(resource.spec.drafter.source.variant, VolumeClaimSource):
        paths["drafter"] = DRAFTERS_PATH
        roots.insert(0, DRAFTERS_PATH)
    env = {
        "PYTHONPATH": _continue_list(variables.get("PYTHONPATH"), PLUGIN_PATH, ":"),
        settings.TOKEN_FILE: f"{_TOKEN_PATH}/{naming.DRAFTER_TOKEN_KEY}",
        settings.ROOTS: ":".join(roots),
        settings.EXPECTED: f"{_EXPECTED_PATH}/{naming.EXPECTED_DRAFTER_KEY}",
        **_describe_own_cache(spec, container, folders),
    }
    if "VLLM_PLUGINS" in variables:
        env["VLLM_PLUGINS"] = _continue_list(variables["VLLM_PLUGINS"], plugin_config_map.PACKAGE, ",")
    return PluginAdditions(
        # After the user's: vLLM makes the last middleware the outermost (vllm/entrypoints/serve/middleware/register.py).
        arguments=("--middleware", MIDDLEWARE, "--worker-extension-cls", WORKER_EXTENSION),
        env=tuple({"name": variable, "value": value} for variable, value in env.items()),
        volumes=tuple(volumes),
        mounts=tuple({"name": volume, "mountPath": path, "readOnly": True} for volume, path in paths.items()),
    )


def _describe_own_cache(spec: Mapping[str, Any], container: Mapping[str, Any], folders: Sequence[str]) -> dict[str, str]:
    """Return the variables about the volume with the Hub's cache, if it is an emptyDir, which no other pod has.

    `folders`: that may hold the cache; all of them have to be in the volume.
    """
    from kubernetes.utils.quantity import parse_quantity  # the package takes long to import

    volumes = {volume["name"]: volume for volume in spec.get("volumes") or []}
    for mount in container.get("volumeMounts") or []:
        empty = volumes.get(mount["name"], {}).get("emptyDir")
        if empty is not None and folders and all(_is_below(folder, mount["mountPath"]) for folder in folders):
            own_cache = {settings.OWN_CACHE: mount["mountPath"]}
            if limit := empty.get("sizeLimit"):
                with suppress(ValueError):  # of a podTemplate, which the API server rejects
                    own_cache[settings.OWN_CACHE_BYTES] = str(int(parse_quantity(limit)))  # type: ignore[no-untyped-call]
            return own_cache
    return {}


def _continue_list(variable: Mapping[str, Any] | None, entry: str, separator: str) -> str:
    """Return the variable's value with one more entry at its end, unless it has it."""
    value = str((variable or {}).get("value") or "")
    entries = value.split(separator) if value else []
    return value if entry in entries else separator.join([*entries, entry])


def _find_engine_obstacles(resource: SpeculativeDeployment, version: Version, *, has_drafter: bool) -> Iterator[str]:
    drafter = resource.spec.drafter
    if resource.spec.rollout.in_place.mode == "Off":
        yield "spec.rollout.inPlace.mode is Off: set it to Auto for changes in place."
    if not supports(version, Feature.DRAFTER_IN_PLACE):
        yield describe_missing_feature(version, Feature.DRAFTER_IN_PLACE)
    if drafter is None or not has_drafter:
        yield (
            "the engine runs without a drafter, so there is none to change: set spec.drafter and "
            "spec.speculation.numSpeculativeTokens."
        )
    elif isinstance(source := drafter.source.variant, ImageSource):
        yield (
            f"spec.drafter.source.image is {source.reference}, and a running pod cannot get another image: use "
            f"persistentVolumeClaim or huggingFace, {_BY_PODS}."
        )
    elif drafter.source == resource.spec.model.source:
        yield (
            "spec.drafter.source is that of spec.model, and a drafter inside the target's checkpoint cannot change alone: its "
            "changes are rolled out by pods."
        )


def _find_server_obstacles(resource: SpeculativeDeployment, variables: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield why the server might not start with the plugin."""
    image = resource.spec.engine.image
    if "PYTHONPATH" not in variables and not is_published_image(image):
        yield (
            f"spec.engine.image is {image}, which is none of vLLM's own images, and a PYTHONPATH that it sets would be replaced: "
            f"add PYTHONPATH to spec.engine.env, with the image's value or empty, {_BY_PODS}."
        )


def _find_argument_obstacles(resource: SpeculativeDeployment) -> Iterator[str]:
    args = resource.spec.engine.args
    for flag in parse_flags(args):
        # The beginning of a name counts as the name: argparse completes it.
        name = next((name for name in _FLAG_OBSTACLES if flag.name and name.startswith(flag.name)), None)
        if name is None or "".join(flag.values) in _PERMITTED_VALUES.get(name, ()):
            continue
        if name == "--root-path" and not any(_is_below(value, "/aerie") for value in flag.values):
            continue
        text = flag.raw_text if "=" in flag.raw_text else " ".join((flag.raw_text, *flag.values))
        yield f"spec.engine.args has '{text}', and {_FLAG_OBSTACLES[name]}: remove it, {_BY_PODS}."
    arguments = parse_arguments(args)
    if arguments.api_server_count > 1:
        yield (
            f"the pod runs {arguments.api_server_count} API servers (--api-server-count, by default --data-parallel-size), and a "
            f"change needs one that knows of all: add --api-server-count=1 to spec.engine.args, {_BY_PODS}."
        )
    if arguments.pipeline_parallel > 1:
        yield (
            f"spec.engine.args sets --pipeline-parallel-size to {arguments.pipeline_parallel}, and only the last stage has the "
            f"drafter: use --tensor-parallel-size, {_BY_PODS}."
        )


def _find_variable_obstacles(resource: SpeculativeDeployment, variables: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name in ("PYTHONPATH", "VLLM_PLUGINS"):
        if "valueFrom" in variables.get(name, {}):
            yield (
                f"spec.engine.env takes {name} from {_describe_value(variables[name])}, and a value that is not visible cannot "
                f"be continued: write its value, {_BY_PODS}."
            )
    for name in _VARIABLES:
        if name in variables:
            value = _describe_value(variables[name])
            yield f"spec.engine.env sets {name} to {value}, which the plugin needs: remove it, {_BY_PODS}."
    if (variable := variables.get(_RUST_FRONTEND)) is not None and variable.get("value") != "0":
        yield (
            f"spec.engine.env sets {_RUST_FRONTEND} to {_describe_value(variable)}, and vLLM's front end in Rust has no "
            f"middleware: set it to 0, {_BY_PODS}."
        )
    if resource.spec.drafter is None or not isinstance(resource.spec.drafter.source.variant, HuggingFaceSource):
        return
    for name in HUB_CACHE_VARIABLES:
        if name in variables and not _is_absolute(value := _describe_value(variables[name])):
            yield (
                f"spec.engine.env sets {name} to {value}, which is no absolute path without a colon, and drafters are read below "
                f"it: write one, {_BY_PODS}."
            )


def _find_volume_obstacles(spec: Mapping[str, Any], container: Mapping[str, Any], additions: PluginAdditions) -> Iterator[str]:
    field = "spec.engine.podTemplate.spec"
    present_names = {volume.get("name") for volume in spec.get("volumes") or []}
    for volume in additions.volumes:
        if volume["name"] in present_names:
            yield f"{field}.volumes has {volume['name']}, a name of Aerie's: choose another name, {_BY_PODS}."
    for present in container.get("volumeMounts") or []:
        path = str(present.get("mountPath"))
        overlapping = [mount["mountPath"] for mount in additions.mounts if _overlaps(path.rstrip("/"), mount["mountPath"])]
        if overlapping:
            yield (
                f"{field}.containers[{naming.ENGINE_CONTAINER}].volumeMounts has {path}, where Aerie mounts "
                f"{' and '.join(overlapping)}: choose another path, {_BY_PODS}."
            )


def _is_absolute(folder: str) -> bool:
    return folder.startswith("/") and ":" not in folder


def _overlaps(path: str, other: str) -> bool:
    return _is_below(path, other) or _is_below(other, path)


def _is_below(path: str, folder: str) -> bool:
    """Return whether the path is the folder or below it."""
    return f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")


def _find_probe_obstacles(container: Mapping[str, Any]) -> Iterator[str]:
    handler = container["readinessProbe"].get("httpGet")
    if handler != engine_pod.HEALTH_CHECK:
        yield (
            f"spec.engine.podTemplate.spec.containers[{naming.ENGINE_CONTAINER}].readinessProbe checks {handler or 'otherwise'}, "
            f"and a pod with the plugin is ready when {READINESS_PATH} says so: leave httpGet as it is, {_BY_PODS}."
        )


def _describe_value(variable: Mapping[str, Any]) -> str:
    """Return the value of a variable, or where it comes from: `secretKeyRef NAME`."""
    for kind, reference in (variable.get("valueFrom") or {}).items():
        return f"{kind} {reference.get('name') or reference.get('fieldPath') or ''}".strip()
    return variable.get("value") or "nothing"
