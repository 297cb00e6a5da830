"""The image table: the row that matches a reference, and errors of a table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aerie_lab.errors import BuildError, StateError
from aerie_lab.images.table import SIMULATED_IMAGE_TABLE, ImageError, ImageTable, normalize_repository


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("busybox", "docker.io/library/busybox"),
        ("busybox:1.36", "docker.io/library/busybox"),
        ("docker.io/busybox", "docker.io/library/busybox"),
        ("docker.io/library/busybox:1", "docker.io/library/busybox"),
        ("vllm/vllm-openai:v0.33.0", "docker.io/vllm/vllm-openai"),
        ("ghcr.io/a/b:1@sha256:00ff", "ghcr.io/a/b"),
        ("localhost/x:1", "localhost/x"),
        ("localhost:5000/x/y", "localhost:5000/x/y"),
        ("registry.example:5000/x:1", "registry.example:5000/x"),
    ],
)
def test_references_are_normalized_to_repositories(reference: str, name: str) -> None:
    assert normalize_repository(reference) == name


@pytest.fixture
def table_of(tmp_path: Path) -> type:
    class Table:
        def __new__(cls, text: str) -> ImageTable:  # type: ignore[misc]
            file = tmp_path / "images.toml"
            file.write_text(text)
            return ImageTable([file], find_binaries_folder=lambda family: Path("/built") / family)

    return Table


def test_a_users_row_comes_before_the_labs_own(table_of: type) -> None:
    table = table_of(
        """
[[image]]
repository = "aerie.dev/lab/echo"
entrypoint = ["{python}", "{python-folder}/x", "{binaries:etcd}/etcd"]
arguments = ["--flag"]
path = ["{binaries:etcd}"]
environment = {WHERE = "{binaries:etcd}"}

[[image]]
repository = "team/*"
entrypoint = ["team"]

[[image]]
repository = "*/any-registry/*"
entrypoint = ["any"]
"""
    )
    image = table.resolve_image("aerie.dev/lab/echo:7")
    assert image.entrypoint == [sys.executable, f"{Path(sys.executable).parent}/x", "/built/etcd/etcd"]
    assert (image.arguments, image.path_folders, image.environment) == (["--flag"], ["/built/etcd"], {"WHERE": "/built/etcd"})
    assert table.resolve_image("docker.io/team/model@sha256:00").entrypoint == ["team"]
    assert table.resolve_image("quay.example/any-registry/x:1").entrypoint == ["any"]
    assert table.resolve_image("aerie.dev/lab/shell").entrypoint == ["/bin/sh"]


@pytest.mark.parametrize("repository", ["aerie.dev/lab/engine", "localhost:5000/vllm-openai"])
@pytest.mark.parametrize(
    ("suffix", "tag"), [("", ""), (":v0.33.0", "v0.33.0"), ("@sha256:00", ""), (":v0.33.0@sha256:00", "v0.33.0")]
)
def test_a_row_may_use_the_tag(table_of: type, repository: str, suffix: str, tag: str) -> None:
    table = table_of(
        '[[image]]\nrepository = "*/vllm-openai"\nentrypoint = ["x"]\nenvironment = {AERIE_SIMULATOR_TAG = "{tag}"}\n'
    )
    assert table.resolve_image(f"{repository}{suffix}").environment == {"AERIE_SIMULATOR_TAG": tag}


def test_a_simulated_vllm_gets_its_tag() -> None:
    assert ImageTable([SIMULATED_IMAGE_TABLE]).resolve_image("vllm/vllm-openai:v0.32.0").environment == {
        "AERIE_SIMULATOR_TAG": "v0.32.0"
    }


def test_unknown_references_are_reported(table_of: type) -> None:
    with pytest.raises(ImageError, match=r"'example.org/x:1'.*repository = 'example.org/x'"):
        table_of("").resolve_image("example.org/x:1")
    with pytest.raises(ImageError, match=r"image volume 'x:1'"):
        table_of("").resolve_volume("x:1")


def test_a_failed_build_of_binaries_is_an_image_error() -> None:
    def fail_to_build(family: str) -> Path:
        raise BuildError(f"no Go for {family}")

    with pytest.raises(ImageError, match="no Go for contour"):
        ImageTable(find_binaries_folder=fail_to_build).resolve_image("ghcr.io/projectcontour/contour:v1")


def test_image_volumes_lie_beside_their_table(table_of: type, tmp_path: Path) -> None:
    table = table_of('[[volume]]\nrepository = "example.org/model"\nfolder = "model"\n')
    with pytest.raises(ImageError, match="is not a folder"):
        table.resolve_volume("example.org/model:1")
    (tmp_path / "model").mkdir()
    assert table.resolve_volume("example.org/model:1") == tmp_path / "model"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[image]\n", "is not TOML"),
        ("[[image]]\nentrypoint = []\n", "has no 'repository'"),
        ("[[image]]\nrepository = 'x'\n", "has no 'entrypoint'"),
        ("[[image]]\nrepository = 'x'\nentrypoint = 'x'\n", "'entrypoint' of x is 'x': it must be a list of strings"),
        ("[[image]]\nrepository = 'x'\nentrypoint = [1]\n", "must be a list of strings"),
        ("[[image]]\nrepository = 1\nentrypoint = []\n", "must be a string"),
        ("[[image]]\nrepository = 'x'\nentrypoint = []\nenvironment = {A = 1}\n", "must be a table of strings"),
        ("[[image]]\nrepository = 'x'\nentrypoint = []\nenv = {}\n", "unknown field 'env'"),
        ("[[image]]\nrepository = 'x'\nentrypoint = ['{pyhton}']\n", "unknown placeholder {pyhton}"),
        ("[[volume]]\nrepository = 'x'\n", "has no 'folder'"),
        ("[image]\nrepository = 'x'\n", "write each row as"),
        ("[[images]]\nrepository = 'x'\n", "unknown entry 'images'"),
    ],
)
def test_invalid_tables_are_rejected_with_one_sentence(table_of: type, text: str, message: str) -> None:
    with pytest.raises(StateError) as caught:
        table_of(text)
    assert message in str(caught.value)
    assert str(caught.value).endswith((".", "}."))


def test_a_missing_table_is_reported() -> None:
    with pytest.raises(StateError, match=r"/no/such.toml cannot be read"):
        ImageTable([Path("/no/such.toml")])
