"""The catalog: its own rows, matches, selection, and a user's rows with their errors."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.engine.models.drafter_catalog import (
    AutomaticReason,
    CatalogEntry,
    CatalogError,
    DrafterCatalog,
    DrafterKind,
    NoMatchingDrafter,
    load_published_catalog,
    parse_catalog,
)

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256}
KIMI = {"model_type": "kimi_k25", "text_config": {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840}}


def test_published_rows_are_valid() -> None:
    entries = load_published_catalog().entries
    assert len(entries) > 50
    pairs = [(target, entry.repo, entry.kind) for entry in entries for target in entry.targets]
    assert len(set(pairs)) == len(pairs)
    for entry in entries:
        assert all("/" in target for target in entry.targets)
        assert entry.repo is None or "/" in entry.repo
        assert all(1 <= value <= (entry.num_speculative_tokens or 15) + 1 for value in entry.acceptance.values()), entry
        assert re.fullmatch(r"2026-\d\d(-\d\d)?", entry.read), entry
        assert entry.revision is None or entry.reported_revision is None, entry
        assert bool(entry.revision_source) == bool(entry.revision or entry.reported_revision), entry
        assert bool(entry.licence) == bool(entry.licence_source), entry
    assert len([entry for entry in entries if entry.kind is DrafterKind.EAGLE31]) == 9


def test_pinned_commits_have_unrelated_set_ups() -> None:
    for entry in load_published_catalog().entries:
        assert entry.revision is None or entry.revision_source.count("; ") >= 1, entry


@pytest.mark.parametrize(
    ("target", "repo", "reason"),
    [
        ("moonshotai/Kimi-K2.6", "lightseekorg/kimi-k2.6-eagle3.1-mla", "name"),
        ("moonshotai/kimi-k2.6@0123456789", "lightseekorg/kimi-k2.6-eagle3.1-mla", "name"),
        ("Kimi-K2.6", "lightseekorg/kimi-k2.6-eagle3.1-mla", "name"),
        ("nvidia/Kimi-K2.6-NVFP4", "lightseekorg/kimi-k2.6-eagle3.1-mla", "name"),
        ("someone/Kimi-K2.6", "lightseekorg/kimi-k2.6-eagle3.1-mla", "copy"),
        ("someone/Kimi-K2.6-FP8-dynamic", "lightseekorg/kimi-k2.6-eagle3.1-mla", "copy"),
        ("moonshotai/Kimi-K2.7-Code", "lightseekorg/kimi-k2.7-coder-eagle3.1-mla", "copy"),
        ("openai/gpt-oss-120b", "Dogacel/specdrift-gpt-oss-120b-eagle3", "name"),
        ("RedHatAI/Qwen3-8B-quantized.w4a16", "RedHatAI/Qwen3-8B-speculator.eagle3", "copy"),
        ("deepseek-ai/DeepSeek-V3", None, "name"),
    ],
)
def test_best_match_by_name(target: str, repo: str | None, reason: str) -> None:
    best = load_published_catalog().find_matches(target)[0]
    assert (best.entry.repo, best.reason) == (repo, reason)


def test_eagle31_is_first_and_unsupported_kinds_are_last() -> None:
    kinds = [match.entry.kind for match in load_published_catalog().find_matches("openai/gpt-oss-20b")]
    assert kinds == [DrafterKind.EAGLE31, DrafterKind.EAGLE3, DrafterKind.P_EAGLE]
    assert [kind.is_supported for kind in kinds] == [True, True, False]


def test_a_model_under_another_name_is_matched_by_its_sizes() -> None:
    assert load_published_catalog().find_matches("/models/mine") == []
    by_sizes = load_published_catalog().find_matches("/models/mine", LLAMA)
    assert {match.reason for match in by_sizes} == {"sizes"}
    assert {match.entry.targets[0] for match in by_sizes} == {"meta-llama/Llama-3.1-8B-Instruct"}
    assert load_published_catalog().find_matches("/models/mine", KIMI)[0].entry.kind is DrafterKind.EAGLE31
    assert load_published_catalog().find_matches("/models/mine", LLAMA | {"vocab_size": 7}) == []


def test_omitted_drafter_is_the_eagle31_drafter_of_the_target() -> None:
    for target in ("nvidia/Kimi-K2.6-NVFP4", "moonshotai/Kimi-K2.6"):
        chosen = load_published_catalog().select_drafter(target)
        assert isinstance(chosen, CatalogEntry)
        assert chosen.repo == "lightseekorg/kimi-k2.6-eagle3.1-mla"
        assert chosen.kind is DrafterKind.EAGLE31
        assert chosen.revision is not None


@given(st.sampled_from(sorted({target for entry in load_published_catalog().entries for target in entry.targets})))
def test_selected_drafter_is_supported_and_pinned(target: str) -> None:
    chosen = load_published_catalog().select_drafter(target)
    if isinstance(chosen, CatalogEntry):
        assert chosen.kind.is_supported
        assert chosen.repo is not None
        assert chosen.revision is not None
    else:
        assert "To serve without a drafter, set spec.speculation.numSpeculativeTokens: 0." in chosen.message


KIMI_DRAFTER = ("lightseekorg/kimi-k2.6-eagle3.1-mla", "35194ee8feb2826812f716eb42a924f99a5404f3")
LLAMA_DRAFTER = ("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "f4fa34a8f803a0ba75d048d6b3dbc1ad5149e9ac")
EARLIER_DEFAULTS = {
    "moonshotai/Kimi-K2.6": KIMI_DRAFTER,
    "nvidia/Kimi-K2.6-NVFP4": KIMI_DRAFTER,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_DRAFTER,
    "meta-llama/Meta-Llama-3.1-8B-Instruct": LLAMA_DRAFTER,
    "meta-llama/Llama-3.3-70B-Instruct": (
        "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
        "42864f78d503693ae5fd317419f099ab3b7c13e4",
    ),
    "Qwen/Qwen3-8B": ("RedHatAI/Qwen3-8B-speculator.eagle3", "08610ffa01dd9f16731fe8f627b85905b6aa51c4"),
}
"""The selections of the catalog from before published files had to be checked. They are constant: a changed one would change
what a new resource without a drafter serves."""


def test_earlier_defaults_are_as_before_the_rule_and_all_others_are_checked() -> None:
    catalog = load_published_catalog()
    selected = {}
    for target in {target for entry in catalog.entries for target in entry.targets}:
        entry = catalog.select_drafter(target)
        if isinstance(entry, CatalogEntry) and entry.automatic is not AutomaticReason.CHECKED:
            assert entry.automatic is AutomaticReason.EARLIER_DEFAULT
            selected[target] = (entry.repo, entry.revision)
    assert selected == EARLIER_DEFAULTS


def test_a_pinned_row_without_a_check_is_listed_and_not_selected() -> None:
    catalog = load_published_catalog()
    (match,) = (match for match in catalog.find_matches("Qwen/Qwen3-32B") if match.entry.revision)
    assert catalog.explain_selection(match, "Qwen/Qwen3-32B") == "files not checked"
    result = catalog.select_drafter("Qwen/Qwen3-32B")
    assert isinstance(result, NoMatchingDrafter)
    assert (
        "whose files were checked; it has RedHatAI/Qwen3-32B-speculator.eagle3 (EAGLE 3), unchecked: set it in "
        "spec.drafter.source.huggingFace, {repo: RedHatAI/Qwen3-32B-speculator.eagle3, revision: "
        "dc84fe7ff1db31efa824776f49c141fc8195eb47}, and preflight checks it."
    ) in result.message


PUBLISHED = f"""[[drafter]]
targets = ["a/b"]
kind = "eagle3"
repo = "c/d"
source = "a test"
revision = "{"1" * 40}"
"""


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("", "files not checked"),
        ('automatic = "earlier default"', "selected (earlier default, files not checked)"),
        ('automatic = "checked"\nchecked = "2026-11-29"', "selected (checked 2026-11-29)"),
    ],
)
def test_field_automatic_decides_the_selection(lines: str, reason: str) -> None:
    catalog = parse_catalog(PUBLISHED + lines)
    (match,) = catalog.find_matches("a/b")
    assert catalog.explain_selection(match, "a/b") == reason
    assert isinstance(catalog.select_drafter("a/b"), CatalogEntry) is reason.startswith("selected")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PUBLISHED + 'automatic = "yes"', "'automatic' is 'yes': it must be one of checked, earlier default."),
        (PUBLISHED + 'automatic = "own"', "'automatic' is 'own': it must be one of checked, earlier default."),
        (PUBLISHED + 'checked = "2026-11-29"', "has no 'automatic': it must be one of checked, earlier default."),
        (PUBLISHED + 'automatic = "checked"', "has no 'checked': it must be a day"),
        (PUBLISHED + 'automatic = "checked"\nchecked = "soon"', "'checked' is 'soon': it must be a day"),
        (PUBLISHED + 'automatic = "checked"\nchecked = 3', "'checked' is 3: it must be a day"),
        (PUBLISHED + 'automatic = "earlier default"\nchecked = "2026-11-29"', "'checked' is '2026-11-29': it must be a day"),
        (
            PUBLISHED.replace("revision", "reported_revision") + 'automatic = "earlier default"',
            "has no 'revision': it must be the commit",
        ),
    ],
)
def test_errors_of_the_field_automatic(text: str, message: str) -> None:
    with pytest.raises(CatalogError) as caught:
        parse_catalog(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("the catalog's row 1 (c/d)")


@pytest.mark.parametrize(
    ("target", "config", "message"),
    [
        (
            "Qwen/Qwen3-14B",
            None,
            "that is pinned to a commit; it has RedHatAI/Qwen3-14B-speculator.eagle3 (EAGLE 3), ",
        ),
        (
            "openai/gpt-oss-20b",
            None,
            "it has Dogacel/specdrift-gpt-oss-20b-eagle3 (EAGLE 3.1), RedHatAI/gpt-oss-20b-speculator.eagle3 (EAGLE 3): set ",
        ),
        (
            "openai/gpt-oss-20b",
            None,
            "one of them in spec.drafter.source.huggingFace, such as {repo: Dogacel/specdrift-gpt-oss-20b-eagle3, revision: <its",
        ),
        ("Qwen/Qwen3-9B", None, "its most similar targets are Qwen/Qwen3-8B, "),
        ("x/y", None, "no drafter for x/y; set a drafter in spec.drafter.source, or train one."),
        ("/models/mine", KIMI, "no drafter for /models/mine; it has lightseekorg/kimi-k2.6-eagle3.1-mla, "),
        ("/models/mine", KIMI, " for models of the same sizes: set one in spec.drafter.source if it is for this model."),
        ("deepseek-ai/DeepSeek-V3", None, "its most similar targets are deepseek-ai/DeepSeek-V3"),
    ],
)
def test_sizes_other_kinds_and_unpinned_rows_select_no_drafter(
    target: str, config: dict[str, object] | None, message: str
) -> None:
    chosen = load_published_catalog().select_drafter(target, config)
    assert isinstance(chosen, NoMatchingDrafter)
    assert message in chosen.message


def test_user_rows_take_precedence_over_equal_rows() -> None:
    row = """
        targets = ["moonshotai/Kimi-K2.6"]
        repo = "me/kimi-drafter"
        kind = "eagle3.1"
        num_speculative_tokens = 5
        revision = "0123456789012345678901234567890123456789"
        acceptance = { "our traffic" = 3 }
        shape = { model_type = "kimi_k2", hidden_size = 7168, layers = 61, vocab_size = 163840 }
    """
    chosen = load_published_catalog().with_user_entries({"mine": row}).select_drafter("moonshotai/Kimi-K2.6")
    assert isinstance(chosen, CatalogEntry)
    assert (chosen.repo, chosen.num_speculative_tokens, chosen.acceptance, chosen.source) == (
        "me/kimi-drafter",
        5,
        {"our traffic": 3.0},
        "your own entry",
    )
    assert chosen.revision is not None
    assert chosen.shape is not None
    assert chosen.shape.model_type == ("kimi_k2",)


GOOD = {"targets": '["a/b"]', "kind": '"eagle3"', "repo": '"c/d"'}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kind": None},
            "the catalog entry 'mine' has no 'kind': it must be one of eagle3.1, eagle3, p-eagle, dflash, dspark, mtp.",
        ),
        ({"kind": '"eagle4"'}, "the catalog entry 'mine': 'kind' is 'eagle4': it must be one of eagle3.1, "),
        ({"targets": '"a/b"'}, "'targets' is 'a/b': it must be a list of repositories"),
        ({"targets": "[]"}, "'targets' is []: it must be"),
        ({"targets": '["a b"]'}, "'targets' is ['a b']"),
        ({"repo": None}, "has no 'repo': it must be the drafter's repository"),
        ({"repo": '"/etc/passwd"'}, "'repo' is '/etc/passwd'"),
        ({"num_speculative_tokens": "0"}, "'num_speculative_tokens' is 0: it must be a whole number from 1 to 64"),
        ({"num_speculative_tokens": "true"}, "'num_speculative_tokens' is True"),
        ({"acceptance": "2.5"}, "'acceptance' is 2.5: it must be a table of workloads"),
        ({"acceptance": "{ a = 0.5 }"}, "'acceptance' is {'a': 0.5}"),
        ({"revision": '"main"'}, "'revision' is 'main': it must be a full commit"),
        ({"reported_revision": '"main"'}, "'reported_revision' is 'main': it must be a full commit"),
        ({"licence": "true"}, "'licence' is True: it must be a string"),
        ({"shape": '"llama"'}, "'shape' is 'llama': it must be a table with model_type, hidden_size, layers, vocab_size"),
        ({"shape": "{ model_type = 3 }"}, "the catalog entry 'mine': 'shape' is {'model_type': 3}: it must have model_type"),
        ({"automatic": '"checked"'}, "has the field 'automatic', which does not exist: the fields are targets, repo, "),
        ({"notes": "3"}, "'notes' is 3: it must be a string"),
        ({"color": "3"}, "has the field 'color', which does not exist: the fields are targets, repo, "),
        ({"kind": "eagle3"}, "the catalog entry 'mine' is not TOML: "),
    ],
)
def test_errors_of_a_user_row_name_row_and_field(changes: dict[str, str | None], message: str) -> None:
    fields = {**GOOD, **changes}
    text = "\n".join(f"{name} = {value}" for name, value in fields.items() if value is not None)
    with pytest.raises(CatalogError) as caught:
        load_published_catalog().with_user_entries({"mine": text})
    assert message in str(caught.value)
    assert str(caught.value).startswith("the catalog entry 'mine'")


def test_errors_of_the_catalog_name_the_row() -> None:
    with pytest.raises(CatalogError, match=r"the catalog's row 1 \(c/d\) has no 'source'"):
        parse_catalog('[[drafter]]\ntargets = ["a/b"]\nkind = "eagle3"\nrepo = "c/d"')


@settings(deadline=None)  # the machine may be busy
@given(
    st.text(max_size=60),
    st.dictionaries(st.sampled_from(["model_type", "hidden_size", "text_config"]), st.integers() | st.none()),
)
def test_any_target_has_a_drafter_or_a_reason(target: str, config: dict[str, object]) -> None:
    assert isinstance(load_published_catalog().select_drafter(target, config), CatalogEntry | NoMatchingDrafter)
    assert DrafterCatalog(()).find_matches(target, config) == []
