"""The drawn pictures of README.md and the docs, as SVG.

They are drawn here, so that they cannot differ from the code unnoticed: the layers of the operator are those of the import
contract in pyproject.toml, a test compares the phases and their arrows with the state machine, and the refresh is drawn from the
recorded run in benchmarks/results. `make crds` writes the files.

Guarantees: a picture adapts to light and dark pages. Its text fits into the boxes by an estimate of the font's width:
a longer one is an error. Not guaranteed: that arrows cross nothing. Look at a picture after a change.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 760
_CHARACTER_WIDTH, _SMALL_CHARACTER_WIDTH = 8.1, 6.7
"""Mean width of a character in a title and in small text, in pixels; of a wide font."""
_STYLE = """\
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f; }
  .strong { font-weight: 600; }
  .small { font-size: 11.5px; fill: #57606a; }
  .on { font-size: 11.5px; fill: #ffffff; }
  .page { fill: #ffffff; }
  .area { fill: #f6f8fa; stroke: #d0d7de; }
  .box { fill: #ffffff; stroke: #8c959f; }
  .end { fill: #dfe3e8; stroke: #8c959f; }
  .pure { fill: #ddf4ff; stroke: #54aeff; }
  .good { fill: #dafbe1; stroke: #4ac26b; }
  .bad { fill: #ffebe9; stroke: #ff8182; }
  .wait { fill: #fff8c5; stroke: #d4a72c; }
  .stable { fill: #2f6fb2; }
  .canary { fill: #b9570c; }
  .arrow { stroke: #57606a; stroke-width: 1.5; fill: none; }
  .user { stroke-dasharray: 5 3; }
  .head { fill: #57606a; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .small { fill: #9ea7b3; }
    .page { fill: #0d1117; }
    .area { fill: #161b22; stroke: #30363d; }
    .box { fill: #0d1117; stroke: #6e7681; }
    .end { fill: #30363d; stroke: #6e7681; }
    .pure { fill: #0c2d4a; stroke: #1f6feb; }
    .good { fill: #0f2f1a; stroke: #238636; }
    .bad { fill: #3b1519; stroke: #da3633; }
    .wait { fill: #332a0c; stroke: #9e6a03; }
    .stable { fill: #3273b8; }
    .canary { fill: #b8611a; }
    .arrow { stroke: #9ea7b3; }
    .head { fill: #9ea7b3; }
  }"""

Point = tuple[float, float]


class PictureError(Exception):
    """A text does not fit into its box; `str(error)` names it."""


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and lines of small text."""

    x: float
    y: float
    width: float
    height: float

    @property
    def centre(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height


@dataclass
class Picture:
    """A picture in the making."""

    title: str
    description: str
    height: float
    parts: list[str] = field(default_factory=list)

    def box(self, box: Box, title: str, *lines: str, kind: str = "box") -> Box:
        """Draw a box with its text in the middle, and return it."""
        for text, width in ((title, _CHARACTER_WIDTH), *((line, _SMALL_CHARACTER_WIDTH) for line in lines)):
            if len(text) * width > box.width:
                raise PictureError(f"{self.title}: {text!r} is wider than its box of {box.width:g} pixels: shorten it.")
        self._rectangle(box, kind)
        x, y = box.centre
        y += 4.5 - 8 * len(lines)
        self.text((x, y), title, style="strong", anchor="middle")
        for index, line in enumerate(lines, start=1):
            self.text((x, y + 16 * index), line, anchor="middle")
        return box

    def area(self, box: Box, title: str, *, indent: float = 10) -> None:
        """Draw a rectangle behind boxes, with its title at the upper left."""
        self._rectangle(box, "area")
        self.text((box.x + indent, box.y + 18), title)

    def bar(self, box: Box, kind: str, text: str = "") -> None:
        """Draw a filled bar without a border."""
        self._rectangle(box, kind, radius=2)
        if text:
            self.text((box.centre[0], box.centre[1] + 4), text, style="on", anchor="middle")

    def text(self, at: Point, text: str, *, style: str = "small", anchor: str = "start") -> None:
        """Draw one line of text."""
        self.parts.append(f'<text class="{style}" x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, *points: Point, edge: tuple[str, str] | None = None, is_user: bool = False) -> None:
        """Draw an arrow through points. `edge`: the names of the phases that it leads from and to. `is_user`: dashed."""
        line = "L".join(f"{x:g} {y:g}" for x, y in points)
        data = f' data-from="{edge[0]}" data-to="{edge[1]}"' if edge else ""
        style = "arrow user" if is_user else "arrow"
        self.parts.append(f'<path class="{style}"{data} d="M{line}" marker-end="url(#head)"/>')

    def line(self, *points: Point) -> None:
        """Draw a line through points."""
        self.parts.append(f'<path class="arrow" d="M{"L".join(f"{x:g} {y:g}" for x, y in points)}"/>')

    def _rectangle(self, box: Box, kind: str, radius: int = 4) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" rx="{radius}"/>'
        )

    def render(self) -> str:
        """Return the file's text."""
        size = f'viewBox="0 0 {WIDTH} {self.height:g}" width="{WIDTH}" height="{self.height:g}"'
        head = '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title description">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="description">{escape(self.description)}</desc>',
                f"<style>\n{_STYLE}\n</style>",
                f'<defs>{head}<path class="head" d="M0 0L10 5L0 10z"/></marker></defs>',
                f'<rect class="page" width="{WIDTH}" height="{self.height:g}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def files() -> Iterator[tuple[str, str]]:
    """Yield (path, content) of each picture; the path is relative to docs/pictures/."""
    yield "rollout.svg", draw_rollout().render()
    yield "data-flow.svg", draw_data_flow().render()
    yield "phases.svg", draw_phases().render()
    timeline = json.loads((ROOT / "benchmarks" / "results" / "refresh-timeline.json").read_text())
    yield "refresh.svg", draw_refresh(timeline).render()
    yield "layers.svg", draw_layers((ROOT / "pyproject.toml").read_text()).render()


def draw_rollout() -> Picture:
    """Draw what happens to a new drafter, for README.md."""
    picture = Picture(
        "The rollout of a new drafter",
        "A changed spec is checked by preflight without a GPU. The new drafter is then tried under live requests: in place, where"
        " pods alternate between both drafters, or as a canary beside a control. The verdict promotes it, rolls it back, or"
        " leaves the decision to a user.",
        232,
    )
    apply = picture.box(Box(10, 78, 112, 76), "kubectl apply", "another", "drafter")
    preflight = picture.box(Box(144, 78, 108, 76), "preflight", "do they fit?", "without a GPU")
    trial = Box(274, 10, 302, 212)
    picture.area(trial, "trial under live requests")
    picture.text((284, 52), "in place: running pods alternate", style="strong")
    for row in range(2):
        picture.text((284, 74 + 24 * row), f"pod {row + 1}")
        for window in range(8):
            # Partners have opposite orders, and each pair of windows has both drafters.
            is_canary = (window + window // 2 + row) % 2 == 1
            picture.bar(
                Box(320 + 31 * window, 62 + 24 * row, 28, 18), "canary" if is_canary else "stable", "new" if is_canary else "old"
            )
    picture.text((284, 138), "or by pods: a canary beside a control", style="strong")
    for column, (kind, text) in enumerate((("stable", "old"), ("stable", "old"), ("stable", "control"), ("canary", "canary"))):
        picture.bar(Box(284 + 72 * column, 148, 66, 20), kind, text)
    picture.text((284, 192), "compared: tokens per verification step,")
    picture.text((284, 208), "time per token, time to first token, failures")
    ends = [
        picture.box(Box(610, 20, 140, 54), "promoted", "better, or equal", kind="good"),
        picture.box(Box(610, 89, 140, 54), "held", "undecided: your turn", kind="wait"),
        picture.box(Box(610, 158, 140, 54), "rolled back", "worse, or it fails", kind="bad"),
    ]
    picture.arrow((apply.right, 116), (preflight.x, 116))
    picture.arrow((preflight.right, 116), (trial.x, 116))
    for end in ends:
        picture.arrow((trial.right, end.centre[1]), (end.x, end.centre[1]))
    return picture


def draw_data_flow() -> Picture:
    """Draw the way of data from a watch event to the status."""
    picture = Picture(
        "From a watch event to the status",
        "Watch events and lists go into the cache, which enqueues the key of the resource. The reconciler takes a key, has a"
        " snapshot built and measurements added, and lets the pure function build_reconcile_plan decide. It applies the plan,"
        " calls pods, sends notifications and updates metrics.",
        606,
    )
    picture.area(Box(42, 96, 676, 248), "aerie.controller: reads", indent=184)
    picture.area(Box(42, 360, 676, 98), "aerie.rollout and below: decides, without input or output")
    picture.area(Box(42, 474, 676, 98), "aerie.controller: writes, in this order", indent=184)
    api = picture.box(Box(10, 12, 520, 46), "API server", "resources, Deployments, pods, routes, Leases", kind="end")
    pods = picture.box(Box(556, 12, 194, 46), "engine pods", "vLLM, with Aerie's plugin", kind="end")
    watches = picture.box(Box(54, 132, 152, 62), "kubernetes", "watches: by Kopf", "listing: all of a kind")
    cache = picture.box(Box(226, 132, 152, 62), "kubernetes.cache", "newest version", "of each object")
    queue = picture.box(Box(398, 132, 132, 62), "fair_queue", "keys of resources,", "each once")
    scraping = picture.box(Box(556, 132, 150, 62), "scraping", "collection: blocks", "probes: prompts")
    observe = picture.box(Box(226, 258, 152, 62), "kubernetes.observe", "cached snapshot;", "live before a write")
    reconciler = picture.box(Box(398, 258, 132, 62), "reconciler", "one at a time", "per resource")
    tuning = picture.box(Box(556, 258, 150, 62), "tuning", "asks its worker", "once an interval")
    decide = picture.box(
        Box(226, 388, 304, 58), "reconcile.build_reconcile_plan", "canary, in_place, progression, status", kind="pure"
    )
    core = picture.box(Box(556, 388, 150, 58), "analysis", "manifests, engine, api", kind="pure")
    apply = picture.box(Box(54, 502, 152, 58), "1 kubernetes.apply", "objects, then status")
    notify = picture.box(Box(226, 502, 304, 58), "3 notifications, rollout_metrics", "from the status that was written")
    drafters = picture.box(Box(556, 502, 150, 58), "2 drafters", "the drafter of a pod")
    picture.arrow((128, api.bottom), (128, watches.y))
    picture.text((136, 84), "watch events, lists")
    picture.arrow((watches.right, 163), (cache.x, 163))
    picture.arrow((cache.right, 163), (queue.x, 163))
    picture.arrow((631, pods.bottom), (631, scraping.y))
    picture.text((623, 84), "metrics, answers", anchor="end")
    picture.arrow((300, cache.bottom), (300, observe.y))
    picture.arrow((464, queue.bottom), (464, reconciler.y))
    picture.text((472, 216), "key")
    picture.arrow((observe.right, 289), (reconciler.x, 289))
    picture.arrow((scraping.x + 30, scraping.bottom), (scraping.x + 30, 228), (510, 228), (510, reconciler.y))
    picture.text((596, 232), "measurements")
    picture.arrow((tuning.x, 289), (reconciler.right, 289))
    picture.arrow((464, reconciler.bottom), (464, decide.y))
    picture.text((472, 356), "Snapshot")
    picture.arrow((decide.right, 417), (core.x, 417))
    picture.arrow((decide.x + 60, decide.bottom), (decide.x + 60, 466), (128, 466), (128, apply.y))
    picture.text((decide.x + 70, 470), "ReconcilePlan, carried out by the reconciler")
    picture.arrow((300, notify.bottom), (300, 586))
    picture.text((308, 589), "receivers, Prometheus")
    picture.arrow((apply.x, 531), (26, 531), (26, api.bottom))
    picture.text((36, 589), "objects, status, events")
    picture.arrow((drafters.right, 531), (734, 531), (734, pods.bottom))
    picture.text((728, 589), "load, lease, return", anchor="end")
    return picture


_COLUMNS = tuple(10 + 127 * column for column in range(6))
_ROWS = (58, 158, 258, 340)


def draw_phases() -> Picture:
    """Draw the phases of a canary and its post-promotion monitoring: the rows of the state machine's table."""
    picture = Picture(
        "The phases of a canary",
        "Starting leads to WarmingUp, directly or through Evaluating, then to Analyzing, Ramping, Promoting and Promoted."
        " AwaitingApproval and Held wait for a user. Every phase may lead to RolledBack. Monitoring and Verifying follow a"
        " promotion.",
        462,
    )
    texts = {
        "Starting": (0, 1, "pods start"),
        "Evaluating": (1, 0, "copied requests"),
        "WarmingUp": (1, 1, "nothing counts"),
        "AwaitingApproval": (2, 0, "passed"),
        "Analyzing": (2, 1, "blocks compared"),
        "Held": (3, 2, "inconclusive"),
        "Ramping": (3, 1, "more traffic"),
        "Promoting": (4, 1, "all pods follow"),
        "Monitoring": (5, 2, "old pods kept"),
        "Verifying": (4, 2, "old pods serve"),
    }
    ends = {"Failed": (0, 2, "never ready"), "Explored": (1, 2, "only measured"), "Promoted": (5, 1, ""), "Completed": (5, 3, "")}
    boxes = {}
    for kind, names in (("box", texts), ("end", ends)):
        for name, (column, row, text) in names.items():
            box = Box(_COLUMNS[column], _ROWS[row], 148 if name == "AwaitingApproval" else 108, 46)
            boxes[name] = picture.box(box, name, *([text] if text else []), kind=kind)

    def connect(source: str, target: str, *points: Point, is_user: bool = False) -> None:
        picture.arrow(*points, edge=(source, target), is_user=is_user)

    def level(source: str, target: str, *, is_user: bool = False) -> None:
        y = boxes[source].centre[1]
        connect(source, target, (boxes[source].right, y), (boxes[target].x, y), is_user=is_user)

    def down(source: str, target: str) -> None:
        x = boxes[source].centre[0]
        connect(source, target, (x, boxes[source].bottom), (x, boxes[target].y))

    for source, target in (
        ("Starting", "WarmingUp"),
        ("WarmingUp", "Analyzing"),
        ("Analyzing", "Ramping"),
        ("Ramping", "Promoting"),
    ):
        level(source, target)
    level("Promoting", "Promoted")
    level("Evaluating", "AwaitingApproval")
    for source, target in (("Starting", "Failed"), ("Evaluating", "WarmingUp"), ("Monitoring", "Completed")):
        down(source, target)
    starting, evaluating, warming = boxes["Starting"], boxes["Evaluating"], boxes["WarmingUp"]
    analyzing, ramping, held = boxes["Analyzing"], boxes["Ramping"], boxes["Held"]
    connect("Starting", "Evaluating", (64, starting.y), (64, 81), (evaluating.x, 81))
    connect("Evaluating", "Ramping", (191, evaluating.y), (191, 38), (480, 38), (480, ramping.y))
    connect("WarmingUp", "Ramping", (230, warming.y), (230, 134), (410, 134), (410, ramping.y), is_user=True)
    x = analyzing.centre[0]
    connect("Analyzing", "AwaitingApproval", (x, analyzing.y), (x, boxes["AwaitingApproval"].bottom))
    connect("AwaitingApproval", "Ramping", (boxes["AwaitingApproval"].right, 81), (445, 81), (445, ramping.y), is_user=True)
    connect("Analyzing", "Explored", (x - 34, analyzing.bottom), (x - 34, 281), (boxes["Explored"].right, 281))
    connect("Analyzing", "Held", (x + 34, analyzing.bottom), (x + 34, 271), (held.x, 271))
    connect("Held", "Analyzing", (held.x, 291), (x, 291), (x, analyzing.bottom), is_user=True)
    connect("Held", "Ramping", (held.centre[0], held.y), (held.centre[0], ramping.bottom), is_user=True)
    y = boxes["Monitoring"].centre[1]
    connect("Monitoring", "Verifying", (boxes["Monitoring"].x, y), (boxes["Verifying"].right, y))
    x = boxes["Verifying"].centre[0]
    connect("Verifying", "Completed", (x, boxes["Verifying"].bottom), (x, 363), (boxes["Completed"].x, 363))
    x = boxes["Promoted"].centre[0]
    picture.arrow((x, boxes["Promoted"].bottom), (x, boxes["Monitoring"].y))
    picture.text((330, 31), "accepted by the shadow evaluation", anchor="middle")
    picture.text((x - 6, 228), "previous pods retained", anchor="end")
    picture.text((296, 309), "extended", anchor="middle")
    picture.box(
        Box(10, 404, 743, 46),
        "RolledBack",
        "from every phase: a user's request, a hard failure; from most, the verdict that it is worse, or late pods",
        kind="bad",
    )
    picture.arrow((10, 348), (50, 348), is_user=True)
    picture.text((58, 352), "only by a user's request")
    picture.bar(Box(10, 366, 40, 16), "end")
    picture.text((58, 378), "end of the rollout")
    return picture


def draw_refresh(timeline: dict[str, Any]) -> Picture:
    """Draw the acceptance length of a run of `make demo SHOW=refresh` over time, and name its stages."""
    stages, left, right, top, bottom = timeline["stages"], 44.0, WIDTH - 24.0, 56.0, 236.0
    end: float = stages[-1]["end"]
    lengths: list[float] = [length for _, length in timeline["curve"]] + [stage["acceptance_length"] for stage in stages]
    lowest, highest = math.floor(5 * min(lengths)) / 5, math.ceil(5 * max(lengths)) / 5
    picture = Picture(
        "A refresh, from the change of the requests to the promotion",
        "Acceptance length over time: "
        + "; ".join(f"{stage['name']} {stage['acceptance_length']:.2f}" for stage in stages)
        + ". It drops when the requests change, and is back with the refreshed drafter.",
        bottom + 44 + 20 * len(stages),
    )

    def x(seconds: float) -> float:
        return round(left + (right - left) * seconds / end, 1)

    def y(length: float) -> float:
        return round(bottom - (bottom - top) * (length - lowest) / (highest - lowest), 1)

    picture.text((left, 14), "acceptance length; bars: mean of a stage")
    for number, stage in enumerate(stages, start=1):
        band = Box(x(stage["begin"]), 22, x(stage["end"]) - x(stage["begin"]), bottom - 22)
        picture.area(band, str(number), indent=band.width / 2 - 3)
    for step in range(round(5 * lowest), round(5 * highest) + 1):
        picture.text((left - 8, y(step / 5) + 4), f"{step / 5:.1f}", anchor="end")
    picture.line(*((x(seconds), y(length)) for seconds, length in timeline["curve"]))
    for number, stage in enumerate(stages, start=1):
        kind = "canary" if "refreshed" in stage["name"] else "wait" if "turns" in stage["name"] else "stable"
        width = x(stage["end"]) - x(stage["begin"])
        picture.bar(Box(x(stage["begin"]), y(stage["acceptance_length"]) - 2, width, 4), kind)
        row = bottom + 42 + 20 * (number - 1)
        picture.bar(Box(left, row - 10, 20, 12), kind)
        minutes = (stage["end"] - stage["begin"]) / 60
        picture.text((left + 28, row), f"{number}  {stage['name']}: {stage['acceptance_length']:.2f}, for {minutes:.1f} min")
    for minutes in range(0, int(end / 60) + 1, 5 if end > 900 else 2):
        picture.text((x(60 * minutes), bottom + 16), f"{minutes} min", anchor="middle")
    return picture


_PURE_LAYERS = ("rollout", "tuning", "manifests", "engine", "api")
_LAYER_TEXTS = {
    "cli": "the command lines aerie and kubectl aerie",
    "forecast": "a rollout before it begins: simulations",
    "controller": "clusters, engines",
    "evaluator": "shadow evaluations",
    "recorder": "users' prompts",
    "checkpoints": "models in folders and on the Hub, headers only",
    "rollout": "from a snapshot to the next actions",
    "tuning": "the number of draft tokens",
    "manifests": "builders of Kubernetes objects",
    "engine": "facts of vLLM, preflight",
    "api": "the resource",
}


def read_layers(pyproject: str) -> list[list[str]]:
    """Return the operator's packages by layer, the highest first, from its import contract."""
    contracts = tomllib.loads(pyproject)["tool"]["importlinter"]["contracts"]
    (contract,) = [item for item in contracts if item["name"].startswith("operator:")]
    return [re.findall(r"aerie\.(\w+)", layer) for layer in contract["layers"]]


def draw_layers(pyproject: str) -> Picture:
    """Draw the folders and the direction of their imports."""
    layers = read_layers(pyproject)
    pitch, top = 52, 46
    picture = Picture(
        "Folders and the direction of imports",
        f"In operator/aerie, from top to bottom: {', '.join(' and '.join(layer) for layer in layers)}. A folder imports only"
        " lower ones. The package analysis imports neither api nor manifests nor rollout. lab, drafter and plugin are"
        " distributions of their own.",
        top + pitch * len(layers) + 14,
    )
    picture.area(Box(10, 10, 452, picture.height - 20), "operator/aerie: a folder imports only lower ones")
    for index, layer in enumerate(layers):
        y = top + pitch * index
        width = (424 - 12 * (len(layer) - 1)) / len(layer)
        for column, name in enumerate(layer):
            box = Box(24 + column * (width + 12), y, width, 40)
            picture.box(box, name, _LAYER_TEXTS[name], kind="pure" if name in _PURE_LAYERS else "box")
        if index:
            picture.arrow((236, y - pitch + 40), (236, y))
    rows: Sequence[tuple[float, str, tuple[str, ...], str]] = (
        (46, "lab/aerie_lab", ("a Kubernetes cluster on one machine,", "simulated engines"), "box"),
        (130, "drafter/aerie_drafter", ("training, export, evaluation: PyTorch",), "box"),
        (214, "plugin/aerie_vllm", ("runs in vLLM's processes;", "imports nothing else of Aerie"), "box"),
        (298, "operator/aerie/analysis", ("statistics, which know no cluster:", "neither api nor manifests nor rollout"), "pure"),
    )
    for row_y, title, lines, kind in rows:
        picture.box(Box(492, row_y, 258, 70), title, *lines, kind=kind)
    picture.text((492, 400), "The lab and the drafter's package never")
    picture.text((492, 416), "import the controller.")
    picture.bar(Box(492, 446, 28, 16), "pure")
    picture.text((528, 458), "pure: neither clock nor network")
    picture.bar(Box(492, 472, 28, 16), "box")
    picture.text((528, 484), "input and output")
    return picture
