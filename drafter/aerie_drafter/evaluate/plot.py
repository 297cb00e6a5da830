"""Picture of exact acceptance: by position, a panel for each temperature and draft sampling."""

from __future__ import annotations

from pathlib import Path

from aerie_drafter.evaluate.exact import COPY_NAME, ExactAcceptance
from aerie_drafter.evaluate.expected import acceptance_length


def plot_acceptance(acceptance: ExactAcceptance, file: Path) -> None:
    """Plot the share of drafts whose tokens 1..k are all accepted, by k. The file's suffix selects the format (svg, png)."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "acceptance", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(2.6 * len(acceptance.counts), 2.9), layout="constrained")
        panels = figure.subplots(1, len(acceptance.counts), squeeze=False, sharey=True)[0]
        for axes, (condition, by_name) in zip(panels, acceptance.counts.items(), strict=True):
            lengths: list[str] = []
            steps = range(1, next(iter(by_name.values())).shape[1])
            for (name, counts), marker in zip(by_name.items(), "osd^v<>", strict=False):
                total = counts.sum(0)
                is_copy = name == COPY_NAME
                axes.plot(
                    steps,
                    (total[1:] / total[0]).tolist(),
                    marker="" if is_copy else marker,
                    linestyle="--" if is_copy else "-",
                    color="0.5" if is_copy else None,
                    markersize=4,
                    linewidth=1.5,
                    label=name,
                )
                lengths.append(f"{float(acceptance_length(total)):.2f}")
            axes.set_title(
                f"temperature {condition.temperature:g}, {condition.draft_sampling.value} drafts\n"
                f"acceptance length {', '.join(lengths)}",
                fontsize=8,
            )
            axes.set_xlabel("draft token")
            axes.set_xticks(steps)
            axes.set_ylim(0, 1.05)
            axes.grid(alpha=0.25)
        panels[0].set_ylabel("accepted up to here")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(by_name), frameon=False)
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=150)
