"""Checks the words of names, docstrings, comments and docs: the standard term, where there is one.

A reader looks for `desired`, `rollback` and `timeout`, not for words that this code base once made up for them. Each kind of
violation is counted and has a maximum (`MAX_VIOLATIONS`), which is never raised. The counts come from syntax tree and tokens:
strings, uses of other packages' names and code in backticks do not count.

An exception gets a line in scripts/words_allowed.txt. Words that are wrong only in one of their senses ("at once" for
immediately) are not in the tables: review has to find those.
"""

from __future__ import annotations

import ast
import enum
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOW_LIST = "scripts/words_allowed.txt"

CODE_FOLDERS = ("operator/aerie", "lab/aerie_lab", "drafter", "plugin", "benchmarks", "scripts", "tests")

DOCS = ("*.md", "charts/aerie/README.md", "docs/**/*.md", "drafter/README.md", "lab/README.md", "plugin/README.md")
"""Patterns of the files whose prose is checked."""


class Kind(enum.Enum):
    """A kind of violation, with its name in the summary."""

    VAGUE_NAME = "vague names"
    COINED_NAME = "coined names"
    PREPOSITION = "docstrings that begin with a preposition"
    PHRASE = "coined phrases"


MAX_VIOLATIONS = {Kind.VAGUE_NAME: 0, Kind.COINED_NAME: 0, Kind.PREPOSITION: 0, Kind.PHRASE: 0}

VAGUE_NAMES = {
    "again": "the time and its purpose: requeue_after, retry_at",
    "asked": "requested, or the request",
    "course": "progression",
    "found": "what it holds: samples, failures, matches",
    "given": "what it holds: the input, the configured value",
    "kept": "what it holds: retained_pods, saved_state",
    "known": "what it holds: samples_by_pod, supported_names",
    "look": "reconcile, peek (statistics) or observation",
    "looks": "reconciles, peeks (statistics) or observations",
    "made": "what it holds: created_objects, requests",
    "mine": "own_..., this_...",
    "named": "what it holds: objects_by_name",
    "one": "the singular of what is iterated: pod, sample, condition",
    "said": "message, response or status",
    "seen": "what it holds: observed_names, handled_keys",
    "theirs": "other_...",
    "told": "message, or sent_...",
    "wanted": "desired, expected",
    "way": "transition, path or fix",
    "word": "manual_action, token or message",
}
"""Names that say nothing of what they hold, as a whole name; and what to write instead."""

COINED_NAMES = {
    "anew": "recreate, restarted",
    "asked": "requested",
    "belonging": "owned, child",
    "belongings": "owned_objects",
    "decider": "worker",
    "fallen": "regressed",
    "ghost": "tombstone",
    "ghosts": "tombstones",
    "heard": "received",
    "histories": "calibrations, deviations",
    "hopeless": "cannot_start",
    "judged": "evaluated",
    "judgement": "verdict, evaluation",
    "lane": "scrape_pool",
    "lanes": "scrape_pools",
    "lately": "recent",
    "leftover": "orphan, remaining",
    "leftovers": "orphans",
    "lent": "borrowed",
    "mirror": "cache",
    "namesake": "name_conflict",
    "namesakes": "name_conflicts",
    "noon": "what the constant bounds",
    "owed": "expected",
    "patience": "timeout, deadline",
    "reckoned": "computed, estimated",
    "refusal": "rejection",
    "refusals": "rejections",
    "regimes": "change_points",
    "said": "message",
    "scatter": "dispersion",
    "scatters": "dispersions",
    "spoken": "route_status",
    "stamped": "with_digest",
    "superfluous": "to_delete",
    "told": "message",
    "trouble": "pod_failure",
    "troubles": "pod_failures",
    "unanswered": "pending",
    "unasked": "skip_reason",
    "unbelievable": "invalid",
    "undecided": "inconclusive",
    "unheard": "without_status",
    "unrouted": "route_error",
    "wanted": "desired",
    "way": "fix, transition",
}
"""Parts of names in snake_case or CamelCase that have a standard term; and that term."""

PREPOSITIONS = frozenset(
    ("With", "Of", "By", "As", "For", "In", "At", "From", "To", "On", "Without", "Under", "Before", "After", "Between")
)

PHRASES = {
    r"a person's word": "a manual action",
    r"a person": "the user, an operator",
    r"(?:go|goes|going|gone|went) on": "continues",
    r"(?:is|are|was|were|be|been|being) looked at": "is reconciled, is checked",
    r"amiss": "no problem was found",
    r"(?:take|takes|taken|taking|took) back": "rolled back, reverted",
    r"what serves": "the serving pods, the stable revision",
    r"(?:by|of) (?:itself|themselves)": "automatically, independently",
    r"of its own accord": "automatically",
    r"pass(?:es|ed)? over": "skipped",
    r"(?:hold|holds|held|holding) up": "delayed",
    r"no news": "unchanged",
    r"for good(?! reason)": "permanently",
    r"of (?:no )?use": "useful, useless",
    r"in force": "active, applied",
    r"under way": "in progress",
    r"anew": "again; the verb with re-: recreate, restart",
    r"certainly": "significantly (statistics); else leave it out",
    r"of late": "recently",
    r"lately": "recently",
    r"way out": "fix",
    r"way (?:back|on)": "rollback, transition",
    r"asked": "requested",
    r"said": "stated; name the message or the field",
    r"told": "notified, sent, instructed",
    r"un?heard|heard|hears?": "received",
    r"(?:has|have|had) to say": "message, response",
    r"says? so": "name the field or the message that states it",
    r"wanted": "desired, expected",
    r"fallen": "dropped, regressed",
    r"judgements?": "verdict, evaluation",
    r"undecided": "inconclusive",
    r"advised": "recommended",
    r"reckon(?:s|ed|ing)?": "computed, estimated",
    r"(?:is|are|was|were) gone": "was removed, has ended",
    r"of before": "previous",
    r"revision before": "previous revision",
    r"metrics pages?": "metrics response, exposition",
    r"patience": "timeout, deadline",
    r"troubles?": "pod failure, problem",
    r"refusals?": "rejection",
    r"unbelievable|(?:not|cannot) be believed": "invalid",
    r"unanswered|unasked|unrouted": "without a status, skipped, without a route",
    r"superfluous": "that have to be deleted",
    r"leftovers?": "orphan, remaining objects",
    r"namesakes?": "name conflict",
    r"belongings?": "owned objects",
    r"ghosts?": "tombstone, stale entry",
    r"deciders?": "tuning worker",
    r"scrap(?:e|ing) lanes?|lanes?": "scrape pool",
    r"scatters?": "dispersion, variance",
    r"figures": "metrics, measured values",
    r"a look(?: at)?": "a reconcile, a check",
}
"""Phrases that have a standard term, as regular expressions of whole words; and that term. A space is any whitespace."""

_PHRASE_PATTERNS = [
    (re.compile(rf"\b(?:{phrase})\b".replace(" ", r"\s+"), re.IGNORECASE), replacement) for phrase, replacement in PHRASES.items()
]


@dataclass(frozen=True)
class Violation:
    """A word at a line of a file, and what to write instead."""

    kind: Kind
    path: str
    line: int
    violating_text: str
    replacement: str

    @property
    def message(self) -> str:
        return f"{self.path}:{self.line}: `{self.violating_text}` ({self.kind.value}): write {self.replacement}"


@dataclass(frozen=True)
class Prose:
    """A docstring or a comment, with the line at which it begins."""

    line: int
    text: str


def iter_defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each definition: functions, classes, parameters, variables, attributes, import aliases."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.MatchMapping(rest=str(name)):
                yield node.lineno, name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((alias.lineno, alias.asname) for alias in aliases if alias.asname)
            case _:
                pass


def split_name(name: str) -> list[str]:
    """Return the parts of a name in snake_case or CamelCase, in lower case and without digits."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def check_name(path: str, line: int, name: str) -> Iterator[Violation]:
    """Yield the violations of one defined name."""
    parts = split_name(name)
    if len(parts) == 1 and parts[0] in VAGUE_NAMES:
        yield Violation(Kind.VAGUE_NAME, path, line, name, VAGUE_NAMES[parts[0]])
        return
    for part in parts:
        if part in COINED_NAMES:
            replacement = f"{COINED_NAMES[part]} instead of `{part}`"
            yield Violation(Kind.COINED_NAME, path, line, name, replacement)


def _docstring_value(statement: ast.stmt) -> ast.Constant | None:
    match statement:
        case ast.Expr(value=ast.Constant(value=str()) as constant):
            return constant
    return None


def iter_docstrings(tree: ast.AST) -> Iterator[Prose]:
    """Yield the docstrings of modules, classes, functions, and attributes (the string after an assignment)."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for previous, statement in zip([None, *body], body, strict=False):
            constant = _docstring_value(statement)
            is_docstring = documented if previous is None else isinstance(previous, ast.Assign | ast.AnnAssign)
            if constant is not None and is_docstring:
                yield Prose(constant.lineno, str(constant.value))


def iter_comments(source: str) -> Iterator[Prose]:
    """Yield the comments; full lines of comment that follow each other are one, so that a phrase may continue on the next."""
    comments = [
        (token.start[0], token.line.lstrip().startswith("#"), token.string.lstrip("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    start, lines = 0, list[str]()
    for line, is_full_line, text in comments:
        if lines and is_full_line and line == start + len(lines):
            lines.append(text)
            continue
        if lines:
            yield Prose(start, "\n".join(lines))
        start, lines = line, [text]
    if lines:
        yield Prose(start, "\n".join(lines))


def check_phrases(path: str, prose: Prose) -> Iterator[Violation]:
    """Yield the phrases of a text that have a standard term; code in backticks does not count."""
    text = re.sub(r"`[^`\n]+`", lambda code: "`" * len(code[0]), prose.text)
    for pattern, replacement in _PHRASE_PATTERNS:
        for match in pattern.finditer(text):
            line = prose.line + text.count("\n", 0, match.start())
            yield Violation(Kind.PHRASE, path, line, " ".join(match[0].split()), replacement)


def check_preposition(path: str, prose: Prose) -> Iterator[Violation]:
    """Yield a violation if a docstring begins with a preposition."""
    first_word = next(iter(prose.text.split()), "").rstrip(",.:;")
    if first_word in PREPOSITIONS:
        replacement = "a verb (`Return the ...`) or a full noun phrase as the docstring's beginning"
        yield Violation(Kind.PREPOSITION, path, prose.line, first_word, replacement)


def check_code(path: str, source: str) -> Iterator[Violation]:
    """Yield the violations of a Python file."""
    tree = ast.parse(source)
    module = Path(path).parent.name if Path(path).name == "__init__.py" else Path(path).stem
    yield from check_name(path, 1, module)
    for line, name in iter_defined_names(tree):
        yield from check_name(path, line, name)
    for docstring in iter_docstrings(tree):
        yield from check_preposition(path, docstring)
        yield from check_phrases(path, docstring)
    for comment in iter_comments(source):
        yield from check_phrases(path, comment)


def check_markdown(path: str, text: str) -> Iterator[Violation]:
    """Yield the phrases of a page of the docs, without its blocks of code."""
    prose = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    yield from check_phrases(path, Prose(1, prose))


def find_violations(root: Path) -> list[Violation]:
    """Return all violations of a working tree, without its allow-list."""
    violations: list[Violation] = []
    for path in sorted(path for folder in CODE_FOLDERS for path in (root / folder).rglob("*.py")):
        violations += check_code(path.relative_to(root).as_posix(), path.read_text())
    for page in sorted(path for pattern in DOCS for path in root.glob(pattern)):
        violations += check_markdown(page.relative_to(root).as_posix(), page.read_text())
    return violations


def read_allow_list(root: Path) -> tuple[dict[tuple[str, str], int], list[str]]:
    """Return the line of each (path, word) that is allowed, and a message for each line that is no `path:word  # reason`."""
    path = root / ALLOW_LIST
    allowed: dict[tuple[str, str], int] = {}
    errors = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
        if not line.strip() or line.startswith("#"):
            continue
        entry = re.fullmatch(r"([^:#]+):([^:#]+?)\s+#\s*(\S.*)", line)
        if entry is None:
            errors.append(f"{ALLOW_LIST}:{number}: `{line}` is no entry: write `path:word  # reason`")
        else:
            allowed[entry[1], entry[2].lower()] = number
    return allowed, errors


def check(root: Path, maxima: dict[Kind, int]) -> tuple[list[str], str]:
    """Return a message for each violation of a kind of which there are too many, and the summary of all kinds."""
    allowed, messages = read_allow_list(root)
    violations = find_violations(root)
    entries_in_use = {(violation.path, violation.violating_text.lower()) for violation in violations} & allowed.keys()
    messages += [
        f"{ALLOW_LIST}:{number}: `{path}:{allowed_text}` does not occur any more: delete the line"
        for (path, allowed_text), number in allowed.items()
        if (path, allowed_text) not in entries_in_use
    ]
    counted = [violation for violation in violations if (violation.path, violation.violating_text.lower()) not in entries_in_use]
    counts = Counter(violation.kind for violation in counted)
    counted.sort(key=lambda violation: (violation.path, violation.line))
    messages += [violation.message for violation in counted if counts[violation.kind] > maxima[violation.kind]]
    kind_counts = ", ".join(f"{kind.value} {counts[kind]} (at most {maxima[kind]})" for kind in Kind)
    return messages, f"words: {kind_counts}; allowed exceptions {len(violations) - len(counted)}"


def main(arguments: Sequence[str] = ()) -> int:
    """Check this working tree, or the one whose path is the first argument."""
    messages, summary = check(Path(arguments[0]) if arguments else ROOT, MAX_VIOLATIONS)
    for message in messages:
        print(message, file=sys.stderr)
    print(summary)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
