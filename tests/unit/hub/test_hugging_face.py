"""The lab's Hub with the clients aerie, huggingface_hub and the simulator."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from aerie.api import SpeculativeDeployment
from aerie.api.source import HuggingFaceSource
from aerie.checkpoints import HubClient, HubRejectionError, RepositoryInfo
from aerie.cli.app import run_command_line
from aerie.engine.models.checkpoint import Checkpoint
from aerie_lab.cli.scenarios import CONTAINER_SCENARIO, DEMO_SCENARIOS, REFRESH_SCENARIO, DemoScenario
from aerie_lab.engine.serving.arguments import parse_simulator_arguments
from aerie_lab.engine.serving.files import EngineError
from aerie_lab.engine.serving.options import SimulatorOptions
from aerie_lab.engine.serving.setup import prepare_engine
from aerie_lab.errors import StateError
from aerie_lab.hub.checkpoints import Repository, load_repositories
from aerie_lab.hub.server import create_hub_server
from aerie_lab.images.table import ImageTable

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
EAGLE_3 = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
EAGLE_31 = "aerie/Llama-3.1-8B-Instruct-EAGLE3.1"
OWN = "acme/own"
COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Repository]:
    """Repositories of the Hub under test: the lab's own, and a folder from a user's table."""
    folder = tmp_path_factory.mktemp("hub")
    (folder / "own" / "below").mkdir(parents=True)
    (folder / "own" / "config.json").write_text('{"max_position_embeddings": 64}')
    (folder / "own" / "below" / "big.bin").write_bytes(bytes(range(256)) * 9000)
    table = folder / "images.toml"
    rows = ((OWN, "own"), ("acme/gone", "gone"))
    table.write_text("".join(f'[[checkpoint]]\nrepository = "{a}"\ncommit = "{COMMIT}"\nfolder = "{b}"\n' for a, b in rows))
    return load_repositories([table])


@pytest.fixture(scope="module")
def endpoint(repositories: dict[str, Repository]) -> Iterator[str]:
    """The address of a running Hub."""
    with create_hub_server(repositories, "127.0.0.1", 0) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


@pytest.fixture
def api(endpoint: str) -> HfApi:
    """Client huggingface_hub with a token."""
    return HfApi(endpoint=endpoint, token="hf_any")


def read_checkpoint(endpoint: str, repositories: dict[str, Repository], repository: str) -> Checkpoint:
    with HubClient(endpoint, "hf_any") as hub:
        return hub.read_checkpoint(repository, repositories[repository].commit)


def read_forms(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    assert checkpoint.tensors is not None
    return {name: (tensor.dtype, tensor.shape) for name, tensor in checkpoint.tensors.items()}


def test_checkpoint_without_weights_has_the_published_headers(endpoint: str, repositories: dict[str, Repository]) -> None:
    target = read_checkpoint(endpoint, repositories, LLAMA)
    assert target.tensors is not None
    # What the published index gives as total_size, and the sizes of the published files.
    assert target.weight_bytes == 16_060_522_496
    sizes = [file.size for path, file in repositories[LLAMA].files().items() if path.endswith(".safetensors")]
    assert sizes == [4_976_698_672, 4_999_802_720, 4_915_916_176, 1_168_138_808]
    assert target.tensors["model.layers.31.mlp.down_proj.weight"].shape == (4096, 14336)
    drafter = read_checkpoint(endpoint, repositories, EAGLE_31)
    assert (drafter.d2t_offsets or ())[:2] == (0, 0)
    assert len(drafter.d2t_offsets or ()) == drafter.config["draft_vocab_size"]
    assert read_checkpoint(endpoint, repositories, EAGLE_3).tensors is None


def test_repository_info_has_commit_and_licence(endpoint: str, repositories: dict[str, Repository]) -> None:
    with HubClient(endpoint, "hf_any") as hub:
        assert hub.read_repository_info(EAGLE_3) == RepositoryInfo(repositories[EAGLE_3].commit, "apache-2.0")
        assert hub.read_repository_info(EAGLE_3, repositories[EAGLE_3].commit).licence == "apache-2.0"
        assert hub.read_repository_info(EAGLE_31).licence == ""
        with pytest.raises(HubRejectionError, match="404"):
            hub.read_repository_info(EAGLE_3, COMMIT)


def test_bundle_revisions_match_the_registry_digests(repositories: dict[str, Repository]) -> None:
    registry = json.loads((ROOT / "drafter" / "bundle" / "registry.json").read_text())
    for name, checkpoint in {"target": registry["target"], **registry["drafters"]}.items():
        assert checkpoint["digest"].removeprefix("sha256:").startswith(repositories[f"aerie/bundle-{name}"].commit)


def test_undertrained_drafter_has_the_form_of_the_bundle(endpoint: str, repositories: dict[str, Repository]) -> None:
    undertrained, bundle = (
        read_checkpoint(endpoint, repositories, f"aerie/bundle-{name}") for name in ("eagle31-undertrained", "eagle31")
    )
    assert {key: value for key, value in undertrained.config.items() if key != "simulator"} == bundle.config
    assert read_forms(undertrained) == read_forms(bundle)


def test_downloaded_folder_is_unchanged(api: HfApi, repositories: dict[str, Repository], tmp_path: Path) -> None:
    bundle_path = Path(api.snapshot_download("aerie/bundle-eagle31", cache_dir=tmp_path))
    assert bundle_path.name == repositories["aerie/bundle-eagle31"].commit
    for path in (ROOT / "drafter" / "bundle" / "eagle31").iterdir():
        assert (bundle_path / path.name).read_bytes() == path.read_bytes()
    own_path = Path(api.snapshot_download(OWN, revision=COMMIT, allow_patterns=["below/*"], cache_dir=tmp_path))
    assert (own_path / "below" / "big.bin").read_bytes() == bytes(range(256)) * 9000
    assert not (own_path / "config.json").exists()


def test_listings_name_files_and_sizes(api: HfApi, endpoint: str) -> None:
    assert api.list_repo_files(OWN) == ["below/big.bin", "config.json"]
    assert [path_info.path for path_info in api.list_repo_tree(OWN, path_in_repo="below")] == ["below/big.bin"]
    files = HfFileSystem(endpoint=endpoint, token="hf_any")
    assert files.info(f"{OWN}@{COMMIT}/config.json")["size"] == len('{"max_position_embeddings": 64}')
    (path_info,) = api.get_paths_info(OWN, ["config.json", "nothing.json"])
    assert path_info.path == "config.json"
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(OWN, path_in_repo="additional_chat_templates"))


@pytest.mark.parametrize(
    ("range_header", "expected_bytes"), [("bytes=0-3", (0, 4)), ("bytes=300-", (300, 2_304_000)), ("bytes=255-256", (255, 257))]
)
def test_range_request_returns_its_bytes(endpoint: str, range_header: str, expected_bytes: tuple[int, int]) -> None:
    begin, end = expected_bytes
    response = httpx.get(f"{endpoint}/{OWN}/resolve/main/below/big.bin", headers={"Range": range_header}, timeout=60)
    assert response.status_code == 206
    assert response.content == (bytes(range(256)) * 9000)[begin:end]
    assert response.headers["Content-Range"] == f"bytes {begin}-{end - 1}/2304000"


def test_hub_rejection_names_its_cause(api: HfApi, endpoint: str, tmp_path: Path) -> None:
    response = httpx.get(f"{endpoint}/{OWN}/resolve/main/config.json", headers={"Range": "bytes=1000-"}, timeout=60)
    assert response.status_code == 416
    with pytest.raises(EntryNotFoundError, match="has no nothing"):
        api.hf_hub_download(OWN, "nothing.json", cache_dir=tmp_path)
    with pytest.raises(RevisionNotFoundError, match=f"its one commit is {COMMIT}"):
        api.hf_hub_download(OWN, "config.json", revision="a" * 40, cache_dir=tmp_path)
    with pytest.raises(RepositoryNotFoundError, match=f"but .*{OWN}"):
        api.model_info("acme/other")
    with pytest.raises(EntryNotFoundError, match="gone is not a folder"):
        api.model_info("acme/gone")
    with pytest.raises(GatedRepoError, match="Any token will do"):
        HfApi(endpoint=endpoint, token=False).hf_hub_download(LLAMA, "config.json", cache_dir=tmp_path)
    for name, file in ((LLAMA, "model-00001-of-00004.safetensors"), (EAGLE_3, "pytorch_model.bin")):
        with pytest.raises(HfHubHTTPError, match="and no weights"):
            api.hf_hub_download(name, file, cache_dir=tmp_path)


def test_user_table_row_needs_a_commit(tmp_path: Path) -> None:
    table = tmp_path / "images.toml"
    table.write_text('[[checkpoint]]\nrepository = "a/b"\ncommit = "main"\nfolder = "x"\n')
    with pytest.raises(StateError, match="'commit' of a/b is 'main': write 40 hexadecimal digits"):
        load_repositories([table])


def test_simulated_engine_reads_its_checkpoints_from_the_hub(
    endpoint: str, repositories: dict[str, Repository], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_any")

    def describe_drafter(drafter: str, revision: str | None = None, target: str = LLAMA) -> str:
        speculation = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 3}
        if revision:
            speculation["revision"] = revision
        arguments = [target, "--revision", repositories[target].commit, "--speculative-config", json.dumps(speculation)]
        setup = prepare_engine(parse_simulator_arguments(arguments), SimulatorOptions())
        assert setup.drafter is not None
        return f"{setup.drafter.variant}, {setup.settings.max_model_len}"

    assert describe_drafter(EAGLE_3) == "eagle3, 131072"
    assert describe_drafter(EAGLE_31, repositories[EAGLE_31].commit) == "eagle3.1, 131072"
    assert describe_drafter("aerie/bundle-eagle31", target="aerie/bundle-target") == "eagle3.1, 2048"
    with pytest.raises(EngineError, match="acme/other is not a local folder and is not a valid model identifier listed"):
        describe_drafter("acme/other")
    with pytest.raises(EngineError, match="does not exist at this revision"):
        describe_drafter(EAGLE_31, "b" * 40)


SCENARIOS = (*DEMO_SCENARIOS.values(), CONTAINER_SCENARIO, REFRESH_SCENARIO)
EXAMPLES = [file for file in sorted((ROOT / "examples").rglob("*.yaml")) if "kind: SpeculativeDeployment" in file.read_text()]
MANIFESTS = [*EXAMPLES, *(scenario.manifest for scenario in SCENARIOS)]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_hub_has_the_sources_of_examples_and_demos(manifest: Path, repositories: dict[str, Repository]) -> None:
    spec = SpeculativeDeployment.from_dict(yaml.safe_load(manifest.read_text()), unknown_fields="forbid").spec
    sources = [spec.model.source] + ([spec.drafter.source] if spec.drafter else [])
    for source in sources:
        if isinstance(source.variant, HuggingFaceSource):
            assert repositories[source.variant.repo].commit == source.variant.revision


@pytest.mark.parametrize("scenario", DEMO_SCENARIOS.values(), ids=list(DEMO_SCENARIOS))
def test_hub_has_the_drafters_of_the_demos(scenario: DemoScenario, repositories: dict[str, Repository]) -> None:
    own = {row["repository"]: row["commit"] for row in ImageTable(scenario.image_tables).checkpoints}
    for change in scenario.changes:
        repository = repositories.get(change.drafter["repo"])
        commit = repository.commit if repository is not None else own[change.drafter["repo"]]
        assert commit == change.drafter["revision"]


# Options of `aerie preflight` by example, and the checks that have warnings. The Hub has the model of a claim, too.
FLEETS: dict[str, tuple[list[str], set[str]]] = {
    "gateway": (["--gpu-memory", "80GiB"], {"C4", "C5"}),
    "gpt-oss-120b-data-parallel": (
        ["--gpu-memory", "80GiB", "--drafter", f"aerie/gpt-oss-120b-EAGLE3@{'3' + '0' * 38 + '3'}"],
        {"C18"},
    ),
    "in-place": (["--gpu-memory", "80GiB"], {"C4", "C5"}),
    "kimi-k2.6": (["--gpu-memory", "141GiB"], set()),
    "llama-70b-tensor-parallel": (["--gpu-memory", "80GiB"], {"C4"}),
    "llama-8b": (["--gpu-memory", "80GiB"], {"C4", "C5"}),
    "no-spare-gpu": (["--gpu-memory", "80GiB"], {"C4", "C5"}),
}


@pytest.mark.parametrize("example", sorted((ROOT / "examples/fleets").glob("*.yaml")), ids=lambda path: path.stem)
def test_fleet_example_passes_preflight(
    endpoint: str, example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    options, warnings = FLEETS[example.stem]
    assert run_command_line(["preflight", "-f", str(example), *options, "-o", "json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {finding["id"] for finding in findings if finding["severity"] == "warning"} == warnings
