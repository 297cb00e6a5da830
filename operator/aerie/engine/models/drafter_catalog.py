"""The published drafters, and the selection of a drafter for a target. The rows are data: catalog.toml.

A target is recognised by its name, by its name without owner and without the suffix of a quantised copy, or by the sizes in its
config. Only a name is a sufficient reason to select a drafter automatically. Models of the same sizes may be very different: then
the drafter starts, and none of its tokens are accepted. A row also needs a reason to be selected, its field `automatic`: a commit
says which files are used, and not that they fit the target.

Guarantees: pure except that it reads its own rows. The order of matches is total: name before copy before sizes, then EAGLE 3.1
before EAGLE 3 before unsupported kinds, then the order of the rows. An invalid row of a user is a CatalogError that names row and
field. Not guaranteed: that a repository still exists or has the published content. Preflight reads it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from importlib import resources
from typing import Any, Literal

from aerie.engine.models.config import parse_target_model


class CatalogError(ValueError):
    """A row that cannot be used; the message names the row and the field."""


class DrafterKind(Enum):
    """The kind of a drafter, in order of preference. The value is its spelling in catalog.toml."""

    EAGLE31 = "eagle3.1"
    EAGLE3 = "eagle3"
    P_EAGLE = "p-eagle"
    DFLASH = "dflash"
    DSPARK = "dspark"
    MTP = "mtp"

    @property
    def is_supported(self) -> bool:
        """Whether Aerie runs this kind, with vLLM's method eagle3."""
        return self in (DrafterKind.EAGLE31, DrafterKind.EAGLE3)

    @property
    def display_name(self) -> str:
        """The display name of a supported kind; the value of any other."""
        return {DrafterKind.EAGLE31: "EAGLE 3.1", DrafterKind.EAGLE3: "EAGLE 3"}.get(self, self.value)


@dataclass(frozen=True)
class ModelShape:
    """The sizes that identify a target under another name."""

    model_type: tuple[str, ...]
    hidden_size: int
    layers: int
    vocab_size: int


class AutomaticReason(Enum):
    """Why a row may be selected for a resource that names no drafter. The value is its spelling in catalog.toml."""

    OWN = "own"
    """A user's own row: adding it is the decision. No published row has this reason."""
    CHECKED = "checked"
    """Preflight read the published files of drafter and target at the row's commit, and passed. The row has the day."""
    EARLIER_DEFAULT = "earlier default"
    """Aerie selected it before published files had to be checked. They are not, but the selection for its targets is stable."""


@dataclass(frozen=True)
class CatalogEntry:
    """One drafter for one target."""

    targets: tuple[str, ...]
    """Repositories of the target, the most common one first."""
    repo: str | None
    """Repository of the drafter. None: the drafter is part of the target."""
    kind: DrafterKind
    source: str
    """The place of its publication."""
    read: str = ""
    """The day, or the month, when the source was read."""
    num_speculative_tokens: int | None = None
    """The value of num_speculative_tokens in the source."""
    acceptance: Mapping[str, float] = field(default_factory=dict)
    """Reported acceptance length by workload, bonus token included."""
    shape: ModelShape | None = None
    notes: str = ""
    revision: str | None = None
    """Commit of the repository, if the row pins one."""
    reported_revision: str | None = None
    """Commit that the row reports without pinning it: such a row is not selected."""
    automatic: AutomaticReason | None = None
    """Why the row may be selected. None: it is listed, and used only where a resource names its drafter."""
    checked: str = ""
    """The day when preflight passed with the published files. Only with AutomaticReason.CHECKED."""
    revision_source: str = ""
    """The set-ups that name the commit."""
    licence: str = ""
    """Licence of the drafter as its model card declares it. Empty: unknown."""
    licence_source: str = ""


MatchReason = Literal["name", "copy", "sizes"]
_MATCH_REASONS: tuple[MatchReason, ...] = ("name", "copy", "sizes")


@dataclass(frozen=True)
class CatalogMatch:
    """An entry that matches a target, and the reason."""

    entry: CatalogEntry
    reason: MatchReason
    """`name`: the target itself. `copy`: a copy by its name, such as a quantised one. `sizes`: a model of the same sizes."""


@dataclass(frozen=True)
class NoMatchingDrafter:
    """The result if no drafter can be selected; the message has the reason, the alternatives and the fix."""

    message: str


_SERVE_WITHOUT_DRAFTER_HINT = "To serve without a drafter, set spec.speculation.numSpeculativeTokens: 0."


@dataclass(frozen=True)
class DrafterCatalog:
    """Rows in order of preference among equal matches: the user's own rows come first."""

    entries: tuple[CatalogEntry, ...]

    def with_user_entries(self, rows: Mapping[str, str]) -> DrafterCatalog:
        """Return a catalog with a user's own rows, as in a ConfigMap: a name, and the fields of one row as TOML.

        Raises CatalogError.
        """
        return DrafterCatalog((*(_parse_user_entry(name, text) for name, text in sorted(rows.items())), *self.entries))

    def find_matches(self, target: str, config: Mapping[str, Any] | None = None) -> list[CatalogMatch]:
        """Return the entries that match a target by its name or, with its config.json, by its sizes, the best first.

        A revision after @ in the name is ignored.
        """
        name = _normalize_name(target)
        original_name = _strip_quantization_suffix(name)
        matches = []
        for entry in self.entries:
            entry_names = {_normalize_name(repository) for repository in entry.targets}
            if name in entry_names or name in {_repository_name(entry_name) for entry_name in entry_names}:
                matches.append(CatalogMatch(entry, "name"))
            elif _repository_name(original_name) in {
                _repository_name(_strip_quantization_suffix(entry_name)) for entry_name in entry_names
            }:
                matches.append(CatalogMatch(entry, "copy"))
            elif config is not None and entry.shape is not None and _matches_shape(entry.shape, config):
                matches.append(CatalogMatch(entry, "sizes"))
        kinds = list(DrafterKind)
        return sorted(matches, key=lambda match: (_MATCH_REASONS.index(match.reason), kinds.index(match.entry.kind)))

    def select_drafter(self, target: str, config: Mapping[str, Any] | None = None) -> CatalogEntry | NoMatchingDrafter:
        """Select the drafter for a resource that names none: the first automatic one for exactly this target, or a message.

        The order is that of `find_matches`: EAGLE 3.1 before EAGLE 3. The entry has a repository and a revision.
        """
        matches = [match for match in self.find_matches(target, config) if match.entry.kind.is_supported and match.entry.repo]
        name_matches = [match.entry for match in matches if match.reason != "sizes"]
        if automatic := next((entry for entry in name_matches if entry.automatic is not None), None):
            return automatic
        problem = f"spec.drafter is missing, and the catalog has no drafter for {target}"
        if pinned := next((entry for entry in name_matches if entry.revision is not None), None):
            return NoMatchingDrafter(
                f"{problem} whose files were checked; it has {pinned.repo} ({pinned.kind.display_name}), unchecked: set it in "
                f"spec.drafter.source.huggingFace, {{repo: {pinned.repo}, revision: {pinned.revision}}}, and preflight checks "
                f"it. {_SERVE_WITHOUT_DRAFTER_HINT}"
            )
        if name_matches:
            drafters = ", ".join(f"{entry.repo} ({entry.kind.display_name})" for entry in name_matches)
            return NoMatchingDrafter(
                f"{problem} that is pinned to a commit; it has {drafters}: set one of them in spec.drafter.source.huggingFace, "
                f"such as {{repo: {name_matches[0].repo}, revision: <its commit, 40 characters>}}, or add its commit to the "
                f"operator's catalog (value `catalog` of the chart). {_SERVE_WITHOUT_DRAFTER_HINT}"
            )
        if matches:
            drafters = ", ".join(f"{match.entry.repo}" for match in matches)
            alternative = (
                f"it has {drafters} for models of the same sizes: set one in spec.drafter.source if it is for this model"
            )
        elif nearest_targets := self.nearest_targets(target):
            alternative = (
                f"its most similar targets are {', '.join(nearest_targets)}: set a drafter in spec.drafter.source, or train one"
            )
        else:
            alternative = "set a drafter in spec.drafter.source, or train one"
        return NoMatchingDrafter(f"{problem}; {alternative}. {_SERVE_WITHOUT_DRAFTER_HINT}")

    def explain_selection(self, match: CatalogMatch, target: str, config: Mapping[str, Any] | None = None) -> str:
        """Explain whether the drafter is selected for a resource that names none: "selected", or the reason against it."""
        entry = match.entry
        if not entry.kind.is_supported:
            return f"{entry.kind.value} is not supported"
        if entry.repo is None:
            return "part of the target"
        if match.reason == "sizes":
            return "possibly for another target"
        if entry.revision is None:
            return "reported commit only" if entry.reported_revision else "no verified commit"
        if entry.automatic is None:
            return "files not checked"
        selected = self.select_drafter(target, config)
        if selected is not entry:
            return "another row takes precedence"
        return {
            AutomaticReason.OWN: "selected",
            AutomaticReason.CHECKED: f"selected (checked {entry.checked})",
            AutomaticReason.EARLIER_DEFAULT: "selected (earlier default, files not checked)",
        }[entry.automatic]

    def nearest_targets(self, target: str, count: int = 3) -> list[str]:
        """Return names of targets that resemble this one, the nearest first."""
        names = list(dict.fromkeys(entry.targets[0] for entry in self.entries))
        names_by_key = {_repository_name(_strip_quantization_suffix(_normalize_name(name))): name for name in reversed(names)}
        target_key = _repository_name(_strip_quantization_suffix(_normalize_name(target)))
        return [names_by_key[key] for key in difflib.get_close_matches(target_key, names_by_key, n=count, cutoff=0.6)]


@cache
def load_published_catalog() -> DrafterCatalog:
    """Load the rows that ship with Aerie."""
    return parse_catalog(resources.files("aerie.engine.models").joinpath("catalog.toml").read_text(encoding="utf-8"))


def parse_catalog(text: str) -> DrafterCatalog:
    """Parse a catalog from the text of a file like catalog.toml. Raises CatalogError."""
    document = _parse_toml(text, "the catalog")
    tables = document.get("shape", {})
    shapes = {name: _parse_shape(f"[shape.{name}]", table) for name, table in tables.items()}
    rows = document.get("drafter", [])
    return DrafterCatalog(
        tuple(_parse_published_entry(_row_label(number, row), row, shapes) for number, row in enumerate(rows, 1))
    )


_QUANTIZATION_SUFFIX = re.compile(
    r"[-_.](fp8|fp4|nvfp4|mxfp4|mxfp8|int4|int8|w4a16|w8a8|w8a16|awq|gptq|bf16|fp16|bnb|4bit|8bit|gguf|dynamic|static|quantized|"
    r"marlin|autoround|kv8|block)(?=$|[-_.])"
)


def _normalize_name(name: str) -> str:
    return name.partition("@")[0].strip().lower()


def _repository_name(name: str) -> str:
    return name.rpartition("/")[2]


def _strip_quantization_suffix(name: str) -> str:
    """Remove the suffixes that quantised copies add: a-8b-instruct-FP8-dynamic is a copy of a-8b-instruct."""
    return _QUANTIZATION_SUFFIX.sub("", name)


def _matches_shape(shape: ModelShape, config: Mapping[str, Any]) -> bool:
    model = parse_target_model(config)
    sizes = (model.hidden_size, model.layer_count, model.vocab_size)
    return model.model_type in shape.model_type and sizes == (shape.hidden_size, shape.layers, shape.vocab_size)


# -- Parsing rows ---------------------------------------------------------------------------------------------------------

_REPOSITORY_PATTERN = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TEXT_FIELDS = ("read", "notes", "revision_source", "licence", "licence_source")
_REVISION_FIELDS = ("revision", "reported_revision")
_AUTOMATIC_FIELDS = ("automatic", "checked")
_ENTRY_FIELDS = (
    *("targets", "repo", "kind", "source", "num_speculative_tokens", "acceptance", "shape"),
    *_REVISION_FIELDS,
    *_TEXT_FIELDS,
)


def _row_label(number: int, row: Any) -> str:
    name = row.get("repo") if isinstance(row, dict) else None
    return f"the catalog's row {number}" + (f" ({name})" if name else "")


def _parse_user_entry(name: str, text: str) -> CatalogEntry:
    label = f"the catalog entry '{name}'"
    row = _parse_toml(text, label)
    entry = _parse_entry(label, {"source": "your own entry", **row}, {})
    return replace(entry, automatic=AutomaticReason.OWN if entry.revision else None)


def _parse_published_entry(label: str, row: Any, shapes: Mapping[str, ModelShape]) -> CatalogEntry:
    """Parse a row with the fields that only a published row has."""
    reason, checked = (row.get("automatic"), row.get("checked")) if isinstance(row, dict) else (None, None)
    others = {name: value for name, value in row.items() if name not in _AUTOMATIC_FIELDS} if isinstance(row, dict) else row
    entry = _parse_entry(label, others, shapes)
    if reason is None and checked is None:
        return entry
    reasons = [AutomaticReason.CHECKED.value, AutomaticReason.EARLIER_DEFAULT.value]
    if reason not in reasons:
        raise _field_error(label, "automatic", reason, f"one of {', '.join(reasons)}")
    if entry.revision is None:
        raise _field_error(label, "revision", None, "the commit, as the row has the field 'automatic'")
    is_day = isinstance(checked, str) and re.fullmatch(r"\d{4}-\d{2}-\d{2}", checked) is not None
    if is_day is not (reason == AutomaticReason.CHECKED.value) or not (is_day or checked is None):
        raise _field_error(label, "checked", checked, 'a day such as "2026-11-28" with automatic = "checked", else left out')
    return replace(entry, automatic=AutomaticReason(reason), checked=checked or "")


def _parse_toml(text: str, label: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise CatalogError(f'{label} is not TOML: {error}: use lines such as kind = "eagle3.1".') from None


def _parse_entry(label: str, row: Any, shapes: Mapping[str, ModelShape]) -> CatalogEntry:
    if not isinstance(row, dict):
        raise CatalogError(f"{label} is {row!r}: set a table with targets, kind and repo.")
    if unknown := sorted(row.keys() - set(_ENTRY_FIELDS)):
        raise CatalogError(
            f"{label} has the field '{unknown[0]}', which does not exist: the fields are {', '.join(_ENTRY_FIELDS)}."
        )
    targets = row.get("targets")
    if not isinstance(targets, list) or not targets or not all(_is_repository(name) for name in targets):
        raise _field_error(label, "targets", targets, 'a list of repositories, such as ["meta-llama/Llama-3.1-8B-Instruct"]')
    kinds = [kind.value for kind in DrafterKind]
    if row.get("kind") not in kinds:
        raise _field_error(label, "kind", row.get("kind"), f"one of {', '.join(kinds)}")
    kind, repo = DrafterKind(row["kind"]), row.get("repo")
    if not (_is_repository(repo) or (repo is None and kind is DrafterKind.MTP)):
        raise _field_error(label, "repo", repo, 'the drafter\'s repository, such as "owner/name"')
    for field_name in _REVISION_FIELDS:
        revision = row.get(field_name)
        if revision is not None and not (isinstance(revision, str) and re.fullmatch("[0-9a-f]{40}", revision)):
            raise _field_error(label, field_name, revision, "a full commit, 40 characters of 0-9 and a-f")
    texts: dict[str, Any] = {name: _read_text(label, row, name, required=False) for name in _TEXT_FIELDS}
    return CatalogEntry(
        targets=tuple(targets),
        repo=repo,
        kind=kind,
        source=_read_text(label, row, "source"),
        num_speculative_tokens=_read_tokens(label, row.get("num_speculative_tokens")),
        acceptance=_read_acceptance(label, row.get("acceptance", {})),
        shape=_read_shape(label, row.get("shape"), shapes),
        revision=row.get("revision"),
        reported_revision=row.get("reported_revision"),
        **texts,
    )


def _is_repository(name: Any) -> bool:
    return isinstance(name, str) and _REPOSITORY_PATTERN.fullmatch(name) is not None


def _field_error(label: str, name: str, value: Any, expected: str) -> CatalogError:
    if value is None:
        return CatalogError(f"{label} has no '{name}': it must be {expected}.")
    return CatalogError(f"{label}: '{name}' is {value!r}: it must be {expected}.")


def _read_text(label: str, row: Mapping[str, Any], name: str, *, required: bool = True) -> str:
    value = row.get(name, None if required else "")
    if not isinstance(value, str) or (required and not value):
        raise _field_error(label, name, value, "a string")
    return value


def _read_tokens(label: str, value: Any) -> int | None:
    if value is not None and not (type(value) is int and 1 <= value <= 64):
        raise _field_error(label, "num_speculative_tokens", value, "a whole number from 1 to 64")
    return value


def _read_acceptance(label: str, value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or not all(type(length) in (int, float) and length >= 1 for length in value.values()):
        raise _field_error(label, "acceptance", value, "a table of workloads and acceptance lengths of 1 or more")
    return {workload: float(length) for workload, length in value.items()}


def _read_shape(label: str, value: Any, shapes: Mapping[str, ModelShape]) -> ModelShape | None:
    """Return a shape by its name, or parse the one in the row."""
    if value is None or (isinstance(value, str) and value in shapes):
        return shapes[value] if value else None
    if isinstance(value, dict):
        return _parse_shape(f"{label}: 'shape'", value)
    raise _field_error(
        label, "shape", value, f"a table with {', '.join(_SHAPE_FIELDS)}" + (f", or one of {', '.join(shapes)}" if shapes else "")
    )


_SHAPE_FIELDS = ("model_type", "hidden_size", "layers", "vocab_size")


def _parse_shape(label: str, table: Any) -> ModelShape:
    sizes: Sequence[Any] = [table.get(name) for name in _SHAPE_FIELDS[1:]] if isinstance(table, dict) else []
    types = table.get("model_type") if isinstance(table, dict) else None
    types = [types] if isinstance(types, str) else types
    if (
        not isinstance(types, list)
        or not all(isinstance(name, str) for name in types)
        or not all(type(size) is int and size > 0 for size in sizes)
        or table.keys() - set(_SHAPE_FIELDS)
    ):
        raise CatalogError(f"{label} is {table!r}: it must have {', '.join(_SHAPE_FIELDS)}, the last three whole numbers.")
    return ModelShape(tuple(types), *sizes)
