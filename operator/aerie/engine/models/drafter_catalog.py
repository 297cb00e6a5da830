"""The drafters that somebody has published, and which of them belongs to a target. The rows are data: catalog.toml.

A target is recognised by its name, by its name without owner and without the suffix of a quantised copy, or by the sizes in
its config. Only a name is reason enough to choose a drafter for somebody: models of the same sizes may be quite different, and
then the drafter starts, and nothing that it proposes is accepted.

Guarantees: pure but for reading its own rows; the order of matches is total (name before copy before sizes, EAGLE 3.1 before
EAGLE 3 before what Aerie does not run, then as written); a faulty row of a user's is a CatalogError that names row and field.
Not guaranteed: that a repository still exists or holds what was published. Preflight reads it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import resources
from typing import Any, Literal

from aerie.engine.models.config import parse_target_model


class CatalogError(ValueError):
    """A row that cannot be used; the message is a sentence that names the row and the field."""


class DrafterKind(Enum):
    """What a drafter is, the preferred one first. The value is the word in catalog.toml."""

    EAGLE31 = "eagle3.1"
    EAGLE3 = "eagle3"
    P_EAGLE = "p-eagle"
    DFLASH = "dflash"
    DSPARK = "dspark"
    MTP = "mtp"

    @property
    def is_supported(self) -> bool:
        """Whether Aerie runs it: vLLM's method eagle3."""
        return self in (DrafterKind.EAGLE31, DrafterKind.EAGLE3)

    @property
    def display_name(self) -> str:
        """As a person calls those that Aerie runs."""
        return {DrafterKind.EAGLE31: "EAGLE 3.1", DrafterKind.EAGLE3: "EAGLE 3"}.get(self, self.value)


@dataclass(frozen=True)
class ModelShape:
    """Sizes by which a target is recognised under another name."""

    model_type: tuple[str, ...]
    hidden_size: int
    layers: int
    vocab_size: int


@dataclass(frozen=True)
class CatalogEntry:
    """One drafter for one target."""

    targets: tuple[str, ...]
    """Repositories of the target, the usual one first."""
    repo: str | None
    """Repository of the drafter. None: it is part of the target."""
    kind: DrafterKind
    source: str
    """Where it was published."""
    tokens: int | None = None
    """num_speculative_tokens that the source used."""
    acceptance: Mapping[str, float] = field(default_factory=dict)
    """Reported acceptance length by workload, bonus token included."""
    shape: ModelShape | None = None
    notes: str = ""
    revision: str | None = None
    """Commit of the repository, where the row pins one."""


MatchReason = Literal["name", "copy", "sizes"]
_MATCH_REASONS: tuple[MatchReason, ...] = ("name", "copy", "sizes")


@dataclass(frozen=True)
class CatalogMatch:
    """An entry that fits a target, and why."""

    entry: CatalogEntry
    reason: MatchReason
    """`name`: the target itself. `copy`: by its name a copy, such as a quantised one. `sizes`: a model of the same sizes."""


@dataclass(frozen=True)
class NoMatchingDrafter:
    """No drafter can be chosen; the sentence says why, what there is, and what to do."""

    message: str


_SERVE_WITHOUT_DRAFTER_HINT = "To serve without a drafter, write spec.speculation.tokens: 0."


@dataclass(frozen=True)
class DrafterCatalog:
    """Rows in the order of preference among equals: a user's own come first."""

    entries: tuple[CatalogEntry, ...]

    def with_user_entries(self, rows: Mapping[str, str]) -> DrafterCatalog:
        """With a user's own rows, as a config map holds them: a name, and the fields of one row as TOML. Raises CatalogError."""
        return DrafterCatalog((*(_parse_user_entry(name, text) for name, text in sorted(rows.items())), *self.entries))

    def find_matches(self, target: str, config: Mapping[str, Any] | None = None) -> list[CatalogMatch]:
        """What fits a target by its name (a revision after @ is ignored) or, given its config.json, by its sizes. Best first."""
        name, copy = _normalize_name(target), _strip_quantization_suffix(_normalize_name(target))
        found = []
        for entry in self.entries:
            names = {_normalize_name(each) for each in entry.targets}
            if name in names or name in {_repository_name(each) for each in names}:
                found.append(CatalogMatch(entry, "name"))
            elif _repository_name(copy) in {_repository_name(_strip_quantization_suffix(each)) for each in names}:
                found.append(CatalogMatch(entry, "copy"))
            elif config is not None and entry.shape is not None and _matches_shape(entry.shape, config):
                found.append(CatalogMatch(entry, "sizes"))
        kinds = list(DrafterKind)
        return sorted(found, key=lambda match: (_MATCH_REASONS.index(match.reason), kinds.index(match.entry.kind)))

    def select_drafter(self, target: str, config: Mapping[str, Any] | None = None) -> CatalogEntry | NoMatchingDrafter:
        """The drafter for a resource that names none: the first for this very target that is pinned, or a sentence.

        In the order of `matches`: EAGLE 3.1 before EAGLE 3. The entry has a repository and a revision.
        """
        matches = [match for match in self.find_matches(target, config) if match.entry.kind.is_supported and match.entry.repo]
        named = [match.entry for match in matches if match.reason != "sizes"]
        if pinned := next((entry for entry in named if entry.revision is not None), None):
            return pinned
        missing = f"spec.drafter is missing, and the catalog has no drafter for {target}"
        if named:
            found = ", ".join(f"{entry.repo} ({entry.kind.display_name})" for entry in named)
            return NoMatchingDrafter(
                f"{missing} that is pinned to a commit; it has {found}: write one of them as spec.drafter.source.huggingFace, "
                f"such as {{repo: {named[0].repo}, revision: <its commit, 40 characters>}}, or add its commit to the operator's "
                f"catalog (value `catalog` of the chart). {_SERVE_WITHOUT_DRAFTER_HINT}"
            )
        if matches:
            found = ", ".join(f"{match.entry.repo}" for match in matches)
            known = f"it has {found} for models of the same sizes: name one in spec.drafter.source if it is for this model"
        elif near := self.nearest_targets(target):
            known = f"the nearest targets that it has are {', '.join(near)}: name a drafter in spec.drafter.source, or train one"
        else:
            known = "name a drafter in spec.drafter.source, or train one"
        return NoMatchingDrafter(f"{missing}; {known}. {_SERVE_WITHOUT_DRAFTER_HINT}")

    def explain_selection(self, match: CatalogMatch, target: str, config: Mapping[str, Any] | None = None) -> str:
        """Why the drafter is, or is not, the one for a resource that names none: "chosen", or what is against it."""
        entry = match.entry
        if not entry.kind.is_supported:
            return f"Aerie does not run {entry.kind.value}"
        if entry.repo is None:
            return "part of the target"
        if match.reason == "sizes":
            return "maybe another target's"
        if entry.revision is None:
            return "no commit is verified"
        chosen = self.select_drafter(target, config)
        return "chosen" if chosen is entry else "another comes first"

    def nearest_targets(self, target: str, count: int = 3) -> list[str]:
        """Names of targets that look like this one, the nearest first."""
        names = list(dict.fromkeys(entry.targets[0] for entry in self.entries))
        plain = {_repository_name(_strip_quantization_suffix(_normalize_name(name))): name for name in reversed(names)}
        wanted = _repository_name(_strip_quantization_suffix(_normalize_name(target)))
        return [plain[found] for found in difflib.get_close_matches(wanted, plain, n=count, cutoff=0.6)]


@cache
def load_published_catalog() -> DrafterCatalog:
    """The rows that ship with Aerie."""
    return parse_catalog(resources.files("aerie.engine.models").joinpath("catalog.toml").read_text(encoding="utf-8"))


def parse_catalog(text: str) -> DrafterCatalog:
    """A catalog from the text of a file like catalog.toml. Raises CatalogError."""
    document = _parse_toml(text, "the catalog")
    tables = document.get("shape", {})
    shapes = {name: _parse_shape(f"[shape.{name}]", table) for name, table in tables.items()}
    rows = document.get("drafter", [])
    return DrafterCatalog(tuple(_parse_entry(_row_label(number, row), row, shapes) for number, row in enumerate(rows, 1)))


_QUANTIZATION_SUFFIX = re.compile(
    r"[-_.](fp8|fp4|nvfp4|mxfp4|mxfp8|int4|int8|w4a16|w8a8|w8a16|awq|gptq|bf16|fp16|bnb|4bit|8bit|gguf|dynamic|static|quantized|"
    r"marlin|autoround|kv8|block)(?=$|[-_.])"
)


def _normalize_name(name: str) -> str:
    return name.partition("@")[0].strip().lower()


def _repository_name(name: str) -> str:
    return name.rpartition("/")[2]


def _strip_quantization_suffix(name: str) -> str:
    """The name without the words that quantised copies add: a-8b-instruct-FP8-dynamic is a copy of a-8b-instruct."""
    return _QUANTIZATION_SUFFIX.sub("", name)


def _matches_shape(shape: ModelShape, config: Mapping[str, Any]) -> bool:
    model = parse_target_model(config)
    sizes = (model.hidden_size, model.layer_count, model.vocab_size)
    return model.model_type in shape.model_type and sizes == (shape.hidden_size, shape.layers, shape.vocab_size)


# -- Reading rows ---------------------------------------------------------------------------------------------------------

_REPOSITORY_PATTERN = re.compile(r"[\w.-]+(/[\w.-]+)?")
_ENTRY_FIELDS = ("targets", "repo", "kind", "source", "tokens", "acceptance", "shape", "notes", "revision")


def _row_label(number: int, row: Any) -> str:
    name = row.get("repo") if isinstance(row, dict) else None
    return f"the catalog's row {number}" + (f" ({name})" if name else "")


def _parse_user_entry(name: str, text: str) -> CatalogEntry:
    where = f"the catalog entry '{name}'"
    row = _parse_toml(text, where)
    return _parse_entry(where, {"source": "your own entry", **row}, {})


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise CatalogError(f'{where} is not TOML: {error}: write lines such as kind = "eagle3.1".') from None


def _parse_entry(where: str, row: Any, shapes: Mapping[str, ModelShape]) -> CatalogEntry:
    if not isinstance(row, dict):
        raise CatalogError(f"{where} is {row!r}: write a table with targets, kind and repo.")
    if unknown := sorted(row.keys() - set(_ENTRY_FIELDS)):
        raise CatalogError(
            f"{where} has the field '{unknown[0]}', which there is not: its fields are {', '.join(_ENTRY_FIELDS)}."
        )
    targets = row.get("targets")
    if not isinstance(targets, list) or not targets or not all(_is_repository(name) for name in targets):
        raise _field_error(where, "targets", targets, 'a list of repositories, such as ["meta-llama/Llama-3.1-8B-Instruct"]')
    kinds = [kind.value for kind in DrafterKind]
    if row.get("kind") not in kinds:
        raise _field_error(where, "kind", row.get("kind"), f"one of {', '.join(kinds)}")
    kind, repo = DrafterKind(row["kind"]), row.get("repo")
    if not (_is_repository(repo) or (repo is None and kind is DrafterKind.MTP)):
        raise _field_error(where, "repo", repo, 'the drafter\'s repository, such as "owner/name"')
    revision = row.get("revision")
    if revision is not None and not (isinstance(revision, str) and re.fullmatch("[0-9a-f]{40}", revision)):
        raise _field_error(where, "revision", revision, "a full commit, 40 characters of 0-9 and a-f")
    return CatalogEntry(
        targets=tuple(targets),
        repo=repo,
        kind=kind,
        source=_read_text(where, row, "source"),
        tokens=_read_tokens(where, row.get("tokens")),
        acceptance=_read_acceptance(where, row.get("acceptance", {})),
        shape=_read_shape(where, row.get("shape"), shapes),
        notes=_read_text(where, row, "notes", needed=False),
        revision=revision,
    )


def _is_repository(name: Any) -> bool:
    return isinstance(name, str) and _REPOSITORY_PATTERN.fullmatch(name) is not None


def _field_error(where: str, name: str, found: Any, expected: str) -> CatalogError:
    if found is None:
        return CatalogError(f"{where} has no '{name}': it must be {expected}.")
    return CatalogError(f"{where}: '{name}' is {found!r}: it must be {expected}.")


def _read_text(where: str, row: Mapping[str, Any], name: str, *, needed: bool = True) -> str:
    value = row.get(name, None if needed else "")
    if not isinstance(value, str) or (needed and not value):
        raise _field_error(where, name, value, "a text")
    return value


def _read_tokens(where: str, value: Any) -> int | None:
    if value is not None and not (type(value) is int and 1 <= value <= 64):
        raise _field_error(where, "tokens", value, "a whole number from 1 to 64")
    return value


def _read_acceptance(where: str, value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or not all(type(each) in (int, float) and each >= 1 for each in value.values()):
        raise _field_error(where, "acceptance", value, "a table of workloads and acceptance lengths of 1 or more")
    return {name: float(each) for name, each in value.items()}


def _read_shape(where: str, value: Any, shapes: Mapping[str, ModelShape]) -> ModelShape | None:
    """A shape by its name, or written out in the row."""
    if value is None or (isinstance(value, str) and value in shapes):
        return shapes[value] if value else None
    if isinstance(value, dict):
        return _parse_shape(f"{where}: 'shape'", value)
    raise _field_error(
        where, "shape", value, f"a table with {', '.join(_SHAPE_FIELDS)}" + (f", or one of {', '.join(shapes)}" if shapes else "")
    )


_SHAPE_FIELDS = ("model_type", "hidden_size", "layers", "vocab_size")


def _parse_shape(where: str, table: Any) -> ModelShape:
    sizes: Sequence[Any] = [table.get(name) for name in _SHAPE_FIELDS[1:]] if isinstance(table, dict) else []
    types = table.get("model_type") if isinstance(table, dict) else None
    types = [types] if isinstance(types, str) else types
    if (
        not isinstance(types, list)
        or not all(isinstance(name, str) for name in types)
        or not all(type(size) is int and size > 0 for size in sizes)
        or table.keys() - set(_SHAPE_FIELDS)
    ):
        raise CatalogError(f"{where} is {table!r}: it must have {', '.join(_SHAPE_FIELDS)}, the last three whole numbers.")
    return ModelShape(tuple(types), *sizes)
