"""`aerie preflight`: from a manifest and folders, or the Hub, to lines, JSON and an exit status."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.api import SpeculativeDeployment
from aerie.cli.app import run_command_line
from aerie.cli.console import CommandError
from aerie.cli.inputs.files import parse_memory_bytes
from aerie.cli.inputs.preflight_input import PreflightOverrides, build_input_from_deployment
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.engine.preflight.registry import CHECKS
from tests.golden import Messages

Folders = Callable[..., tuple[Path, Path]]
File = Callable[..., str]
Capture = pytest.CaptureFixture[str]
ONES, TWOS = "1" * 40, "2" * 40


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"source": {"huggingFace": {"repo": "example/target", "revision": ONES}}},
            "engine": {"image": "vllm/vllm-openai:v0.33.0", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
            "drafter": {"source": {"huggingFace": {"repo": "example/drafter", "revision": TWOS}}},
            **spec,
        },
    }


@pytest.fixture
def file(tmp_path: Path) -> File:
    def write(*documents: object, name: str = "chat.yaml") -> str:
        (tmp_path / name).write_text(yaml.safe_dump_all(documents))
        return str(tmp_path / name)

    return write


def preflight(*arguments: object) -> int:
    return run_command_line(["preflight", *(str(argument) for argument in arguments)])


def test_a_fitting_pair_passes(folders: Folders, file: File, capsys: Capture, messages: Messages) -> None:
    target, drafter = folders()
    assert preflight("-f", file(manifest()), "--target", target, "--drafter", drafter, "--gpu-memory", "80GiB") == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[:3] == [
        f"target   example/target@{ONES}",
        f"drafter  example/drafter@{TWOS}",
        "vLLM     0.33.0",
    ]
    messages.check("fitting pair", output.out)
    assert output.err == ""


def test_verbose_adds_the_other_checks(small_models: Any, folders: Folders, capsys: Capture, messages: Messages) -> None:
    target, drafter = folders(small_models.target(hidden_size=128))
    arguments = ["--target", target, "--drafter", drafter]
    assert preflight(*arguments) == 1
    text = capsys.readouterr().out
    body, _, last = text.rstrip().rpartition("\n\n")
    assert re.fullmatch(r"Not shown: \d+ passed, 2 not applicable \(--verbose\)\.", last)
    assert "✓" not in text
    assert preflight(*arguments, "--verbose") == 1
    verbose = capsys.readouterr().out
    assert verbose.startswith(body)
    assert "✓" in verbose
    assert {line.split()[1] for line in verbose.splitlines() if re.match(r"[✗!·✓-] ", line)} == set(CHECKS)
    messages.check("verbose", verbose.replace(str(target.parent), "DIR"))


def test_the_order_is_verdict_errors_warnings_notes(small_models: Any, folders: Folders, file: File, capsys: Capture) -> None:
    engine = {**manifest()["spec"]["engine"], "args": ["--enable-lora", "--tensor-parallel-size=4"]}
    target, drafter = folders(small_models.target(hidden_size=128))
    assert preflight("-f", file(manifest(engine=engine)), "--target", target, "--drafter", drafter) == 1
    lines = capsys.readouterr().out.splitlines()
    kinds = [line[:1] for line in lines if re.match(r"[✗!·] ", line) or line.startswith("preflight failed")]
    assert [kind for kind, _ in itertools.groupby(kinds)] == ["p", "✗", "!", "·"]


def test_general_notes_are_those_of_every_deployment(folders: Folders, file: File, capsys: Capture) -> None:
    general = []
    for vllm, memory in (("0.33.0", "80GiB"), ("0.26.0", "24GiB")):
        target, drafter = folders()
        preflight("-f", file(manifest()), "--target", target, "--drafter", drafter, "--gpu-memory", memory, "--vllm", vllm)
        _, _, section = capsys.readouterr().out.partition("Notes for every deployment with speculation\n")
        general.append(section.partition("\n\n")[0])
    assert general[0] == general[1]
    assert re.findall(r"^· (C\d+)", general[0], re.MULTILINE) == ["C15", "C16", "C23"]


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("C25", {"target": {"hidden_size": 128}}),
        ("C9", {"drafter": {"without": ("fc_norm",)}}),
        ("C27", {"drafter": {"drop": ("norm_output",)}}),
    ],
)
def test_an_error_is_followed_by_its_fix(
    small_models: Any, folders: Folders, capsys: Capture, messages: Messages, check: str, change: Any
) -> None:
    target, drafter = folders(small_models.target(**change.get("target", {})), small_models.drafter(**change.get("drafter", {})))
    assert preflight("--target", target, "--drafter", drafter) == 1
    lines = capsys.readouterr().out.splitlines()
    index = next(index for index, line in enumerate(lines) if line.startswith(f"✗ {check} "))
    verdict = lines.index(next(line for line in lines if line.startswith("preflight failed: ")))
    assert verdict < index, "the verdict is above the errors"
    messages.check(f"error {check}", "\n".join([lines[verdict], *lines[index : index + 2]]))


def test_an_index_that_contradicts_the_files_is_a_finding(folders: Folders, capsys: Capture) -> None:
    target, drafter = folders()
    index = {"weight_map": {"fc.weight": "model.safetensors", "gone.weight": "model.safetensors"}}
    (drafter / "model.safetensors.index.json").write_text(json.dumps(index))
    assert preflight("--target", target, "--drafter", drafter) == 1
    output = capsys.readouterr().out
    assert "✗ C32" in output
    assert "'gone.weight' is in model.safetensors" in output


def test_json_has_every_finding(small_models: Any, folders: Folders, file: File, capsys: Capture) -> None:
    target, drafter = folders(small_models.target(vocab_size=512))
    assert preflight("-f", file(manifest()), "--target", target, "--drafter", drafter, "-o", "json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert report["drafter"] == f"example/drafter@{TWOS}"
    assert {finding["id"] for finding in report["findings"]} == {f"C{number}" for number in range(1, 39)}
    assert next(finding for finding in report["findings"] if finding["id"] == "C26")["severity"] == "error"


def test_arguments_environment_and_gpus_of_the_resource_are_checked(folders: Folders, file: File, capsys: Capture) -> None:
    engine = {
        "image": "registry.example/vllm@sha256:" + "0" * 64,
        "version": "0.33.0",
        "args": ["--tensor-parallel-size=4", "--enable-lora", "--gpu_memory_utilization", "0.5"],
        "env": [{"name": "VLLM_USE_V2_MODEL_RUNNER", "value": "0"}],
        "resources": {"limits": {"nvidia.com/gpu": "2"}},
        "podTemplate": {"spec": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}},
    }
    target, drafter = folders()
    assert preflight("-f", file(manifest(engine=engine)), "--target", target, "--drafter", drafter, "-v") == 1
    output = capsys.readouterr().out
    assert "✗ C29 GPU count: the pod has 2 of nvidia.com/gpu, and the engine needs 4" in output
    assert "! C24 LoRA" in output
    assert "the engine may use 50% of 80.0 GiB" in output
    assert "model runner V1: VLLM_USE_V2_MODEL_RUNNER=0" in output


def test_zero_tokens_is_checked_without_a_drafter(folders: Folders, file: File, capsys: Capture) -> None:
    target, _ = folders()
    assert preflight("-f", file(manifest(speculation={"numSpeculativeTokens": 0})), "--target", target, "-v") == 0
    output = capsys.readouterr()
    assert "spec.speculation.numSpeculativeTokens is 0: the engine runs without a drafter." in output.err
    assert "\nNot applicable\n- C1 " in output.out
    assert "Notes for every deployment" not in output.out


def test_omitted_drafter_comes_from_the_catalog_and_the_hub(
    small_models: Any,
    folders: Folders,
    file: File,
    hub: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    small_models.write(hub.folder, small_models.drafter())
    for name in ("HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    monkeypatch.setenv("HF_HOME", str(hub.folder))
    resource = manifest()
    del resource["spec"]["drafter"]
    row = f'targets = ["example/target"]\nkind = "eagle3.1"\nrepo = "me/model"\nrevision = "{hub.commit}"'
    entries = file({"kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"mine": row}}, name="entries.yaml")
    target, _ = folders()
    assert preflight("-f", file(resource), "--target", target, "--catalog", entries) == 0
    output = capsys.readouterr()
    assert f"drafter  me/model@{hub.commit}" in output.out
    assert f"note: spec.drafter is missing: checked with me/model@{hub.commit} from the catalog." in output.err


@pytest.fixture
def hub_with_drafter(small_models: Any, hub: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the Hub of this process, which has a drafter as me/model."""
    small_models.write(hub.folder, small_models.drafter())
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    monkeypatch.setenv("HF_HOME", str(hub.folder))
    return hub


def test_a_repository_at_a_commit_needs_no_folder(folders: Folders, hub_with_drafter: Any, capsys: Capture) -> None:
    target, _ = folders()
    assert preflight("--target", target, "--drafter", f"me/model@{hub_with_drafter.commit}") == 0
    output = capsys.readouterr()
    assert f"drafter  me/model@{hub_with_drafter.commit}" in output.out
    assert "note:" not in output.err


@pytest.mark.parametrize("drafter", ["me/model", "me/model@main"])
def test_a_branch_is_resolved_and_its_commit_printed(
    folders: Folders, hub_with_drafter: Any, capsys: Capture, drafter: str
) -> None:
    target, _ = folders()
    assert preflight("--target", target, "--drafter", drafter) == 0
    output = capsys.readouterr()
    assert f"drafter  me/model@{hub_with_drafter.commit}" in output.out
    note = f"note: me/model at main is commit {hub_with_drafter.commit} now; set the commit in the resource, "
    assert f"{note}because a branch can move." in " ".join(output.err.split())


def test_a_folder_takes_precedence_over_a_repository(
    folders: Folders, hub_with_drafter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders()
    (tmp_path / "me").mkdir()
    (tmp_path / "drafter").rename(tmp_path / "me" / "model")
    monkeypatch.chdir(tmp_path)
    assert preflight("--target", "target", "--drafter", "me/model") == 0
    assert hub_with_drafter.requests == []


def test_a_repository_replaces_a_source_of_the_manifest(
    folders: Folders, file: File, hub_with_drafter: Any, capsys: Capture
) -> None:
    target, _ = folders()
    claim = {"source": {"persistentVolumeClaim": {"claimName": "models"}}}
    options = ("--target", target, "--drafter", f"me/model@{hub_with_drafter.commit}")
    assert preflight("-f", file(manifest(drafter=claim)), *options) == 0
    assert preflight("-f", file(manifest()), *options) == 0
    output = capsys.readouterr().out
    assert output.count(f"drafter  me/model@{hub_with_drafter.commit}") == 2


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "it does not exist, or it is private: check the name, or set HF_TOKEN"),
        (403, "the token may not read it: accept the model's terms"),
        (404, "it does not exist at this revision: check repository and revision"),
    ],
)
def test_an_error_of_the_hub_is_status_2(
    folders: Folders, hub_with_drafter: Any, capsys: Capture, status: int, message: str
) -> None:
    target, _ = folders()
    hub_with_drafter.failures = [(status, {})] * 2
    assert preflight("--target", target, "--drafter", f"me/model@{ONES}") == 2
    assert message in (output := " ".join(capsys.readouterr().err.split()))
    assert "no folder" not in output
    assert preflight("--target", target, "--drafter", "me/model") == 2
    assert "There is no folder me/model either." in " ".join(capsys.readouterr().err.split())


def test_a_repository_is_read_from_the_cache_when_offline(
    small_models: Any, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    target, _ = folders()
    small_models.write(tmp_path / "hub" / "models--me--model" / "snapshots" / ONES, small_models.drafter())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert preflight("--target", target, "--drafter", f"me/model@{ONES}") == 0
    assert preflight("--target", target, "--drafter", f"me/model@{TWOS}") == 2
    assert "The Hub is not accessed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "drafter", ["me/model@", "@main", "me/too/deep@main", "https://huggingface.co/me/model", "me/mo del@main", "me/..@main",
              "me/model@a..b", "me/model@ma in", "", "me/model@a\x1b[2J", "me/" + "m" * 200 + "@main"],
)  # fmt: skip
def test_an_invalid_name_is_rejected_before_any_request(
    folders: Folders, hub_with_drafter: Any, capsys: Capture, drafter: str
) -> None:
    target, _ = folders()
    assert "set a folder, or a repository as OWNER/NAME@COMMIT." in " ".join(
        run_failing(capsys, "--target", target, "--drafter", drafter).split()
    )
    assert hub_with_drafter.requests == []


def run_failing(capsys: Capture, *arguments: object) -> str:
    assert preflight(*arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


def test_a_preflight_that_cannot_run_is_status_2_with_a_message(
    folders: Folders, file: File, tmp_path: Path, capsys: Capture, messages: Messages
) -> None:
    target, drafter = folders()
    both = ("--target", target, "--drafter", drafter)
    claim = {"source": {"persistentVolumeClaim": {"claimName": "models"}}}
    (tmp_path / "bad.yaml").write_text("a: [")
    cases: dict[str, Callable[[], tuple[object, ...]]] = {
        "no arguments": lambda: (),
        "missing file": lambda: ("-f", tmp_path / "none.yaml"),
        "nothing to check": lambda: ("-f", file({"kind": "Pod"})),
        "two resources": lambda: ("-f", file(manifest(), manifest())),
        "volume claim": lambda: ("-f", file(manifest(drafter=claim)), "--target", target),
        "missing folder": lambda: ("--target", tmp_path / "x", "--drafter", drafter),
        "GPU memory": lambda: (*both, "--gpu-memory", "80 apples"),
        "vLLM version": lambda: (*both, "--vllm", "new"),
        "no drafter": lambda: ("-f", file(manifest(drafter=None)), "--target", target),
    }
    for name, arguments in cases.items():
        messages.check(name, run_failing(capsys, *arguments()).replace(str(tmp_path), "DIR"))
    assert "bad.yaml is not YAML: while parsing" in run_failing(capsys, "-f", tmp_path / "bad.yaml")
    assert "No such option" in run_failing(capsys, "--nonsense")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("80Gi", 80 * 2**30),
        ("80g", 80 * 10**9),
        ("85 GB", 85 * 10**9),
        ("0.5TiB", 2**39),
        (str(2**30), 2**30),
        ("1.5Gi", 3 * 2**29),
    ],
)
def test_valid_gpu_memory_is_parsed(text: str, size: int) -> None:
    assert parse_memory_bytes(text) == size


@pytest.mark.parametrize("text", ["80", "0.1", "0", "512MiB", "9" * 400, "-80GiB", "80 apples", "\u0668GiB", "nan"])
def test_invalid_gpu_memory_is_rejected(text: str) -> None:
    with pytest.raises(CommandError, match=r"--gpu-memory is .*, such as 80GiB") as caught:
        parse_memory_bytes(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"resources": {"limits": {"nvidia.com/gpu": "2"}}}, (2, "nvidia.com/gpu", None)),
        ({"resources": {"limits": {"amd.com/gpu": "8"}}}, (8, "amd.com/gpu", None)),
        ({"resources": {"limits": {"nvidia.com/mig-3g.40gb": "1"}}}, (1, "nvidia.com/mig-3g.40gb", 40 * 2**30)),
        (
            {"resources": {"limits": {"nvidia.com/mig-3g.40gb": "1", "nvidia.com/mig-1g.10gb": "1"}}},
            (None, "nvidia.com/mig-1g.10gb and nvidia.com/mig-3g.40gb", None),
        ),
        (
            {"podTemplate": {"spec": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]}}},
            (None, "resourceClaims (DRA)", None),
        ),
        ({}, (None, "", None)),
    ],
)
def test_gpus_are_counted_in_every_form_of_request(
    folders: Folders, engine: dict[str, Any], expected: tuple[int | None, str, int | None]
) -> None:
    target, drafter = folders()
    document = manifest(engine={"image": "vllm/vllm-openai:v0.33.0", **engine})
    deployment = SpeculativeDeployment.from_dict(document)
    overrides = PreflightOverrides(target=Path(target), drafter=Path(drafter))
    subject, _ = build_input_from_deployment(
        deployment, overrides, DrafterCatalog(()), lambda *_: pytest.fail("the Hub is not needed")
    )
    assert (subject.gpu_count, subject.gpu_resource, subject.gpu_memory_bytes) == expected


@pytest.mark.parametrize(
    ("preflight_spec", "status", "message"),
    [
        ({"acceptedChecks": ["C25"]}, 1, ""),
        ({"acceptedChecks": ["C9", "C25"]}, 0, "acceptedChecks contains C9, C25: the operator continues in spite of the errors."),
        ({"mode": "Warn"}, 0, "mode is Warn: the operator continues in spite of the errors."),
        ({"mode": "Off"}, 0, "mode is Off: the operator does not run preflight."),
    ],
)
def test_errors_that_the_manifest_allows_have_status_0(
    small_models: Any, folders: Folders, file: File, capsys: Capture, preflight_spec: dict[str, Any], status: int, message: str
) -> None:
    target, drafter = folders(small_models.target(hidden_size=128), small_models.drafter(without=("fc_norm",)))
    path = file(manifest(rollout={"preflight": preflight_spec}))
    assert preflight("-f", path, "--target", target, "--drafter", drafter) == status
    output = capsys.readouterr()
    assert "✗ C25" in output.out
    assert message in " ".join(output.err.split())
    assert preflight("-f", path, "--target", target, "--drafter", drafter, "-o", "json") == status
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], report["allowed"]) == (False, status == 0)
