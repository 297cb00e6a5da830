"""The revisions of the bundle that `make crds` writes."""

from __future__ import annotations

import pytest

from scripts.bundle_revisions import set_revisions

OLD, NEW = "0" * 40, "1" * 40
REVISIONS = {"eagle31": NEW}


@pytest.mark.parametrize(
    "form",
    [
        "{{repo: aerie/bundle-eagle31, revision: {}}}",
        '{{"repo": "aerie/bundle-eagle31", "revision": "{}"}}',
        'repository = "aerie/bundle-eagle31"\ncommit = "{}"\n',
        '("aerie/bundle-eagle31", "{}", BUNDLE)',
        'repository = "aerie/bundle-eagle31-again"\ncommit = "{}"\n',
    ],
)
def test_each_form_gets_the_revision_of_the_registry(form: str) -> None:
    assert set_revisions(form.format(OLD), REVISIONS) == form.format(NEW)


@pytest.mark.parametrize(
    "text",
    [
        f"{{repo: aerie/bundle-eagle31-undertrained, revision: {OLD}}}",
        f"{{repo: aerie/bundle-unknown, revision: {OLD}}}",
        f"{{repo: acme/eagle31, revision: {OLD}}}",
        f"aerie/bundle-eagle31 is a drafter, and {OLD} a commit of something else",
    ],
)
def test_no_other_revision_is_changed(text: str) -> None:
    assert set_revisions(text, REVISIONS) == text
