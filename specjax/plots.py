"""Pictures of predictions. Matplotlib is imported here alone."""

import io

import matplotlib

matplotlib.use("Agg")  # files, no window

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import BoundaryNorm

from specjax import theory, title

_ALPHA = np.linspace(0.01, 0.99, 200)
_COST_RATIO = np.geomspace(1, 100, 200)


def prediction(found):
  """Return a PNG's bytes of a report's "prediction".

  Left, S against K of each draft, by its better verifier and sampling, with
  the interval over prompts; dashed, what the formula for independent tokens
  says; stars, what was measured. Right, that formula's best S and K at any
  (alpha, C), and where the drafts lie.
  """
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(12, 5), layout="constrained", width_ratios=(1, 1.05)
  )
  best = _best_curves(found["rows"])
  colours = dict(zip(best, plt.get_cmap("tab10").colors * 9, strict=False))
  _curves(left, best, colours)
  _measured(left, found["rows"], colours)
  left.axhline(1, color="0.6", linewidth=0.8, zorder=0)
  left.set_xticks(found["lengths"])
  left.set_xlabel("K, drafted tokens a round")
  left.set_ylabel("S, times as fast as plain decoding")
  modelled = any(d["costs"]["modelled"] for d in found["drafts"].values())
  how = "Modelled" if modelled else "Predicted"
  left.set_title(f"{how} speed-up at batch {found['batch']}")
  left.set_ylim(bottom=0)
  left.legend(fontsize="small", frameon=False)
  best_map(figure, right)
  _drafts(right, best, found["drafts"], colours)
  buffer = io.BytesIO()
  figure.savefig(buffer, format="png", dpi=150)
  plt.close(figure)
  return buffer.getvalue()


def _best_curves(rows):
  """{draft: its rows by K} of the verifier and sampling with the largest S."""
  best = {}  # rows come with the fastest first
  for row in rows:
    best.setdefault(row["draft"], row)
  same = lambda a, b: all(
    a[key] == b[key] for key in ("draft", "sampling", "verifier")
  )
  return {
    name: sorted((r for r in rows if same(r, top)), key=lambda r: r["K"])
    for name, top in best.items()
  }


def _curves(axes, best, colours):
  for name, rows in best.items():
    K, colour = [row["K"] for row in rows], colours[name]
    low, high = zip(*(row["speedup_interval"] for row in rows), strict=True)
    text = f"{title.label(rows[0])}, {rows[0]['verifier']}"
    S = [row["speedup"] for row in rows]
    axes.plot(K, S, "o-", color=colour, label=text, markersize=4)
    axes.fill_between(K, low, high, color=colour, alpha=0.15, linewidth=0)
    S = [row["iid"]["speedup"] for row in rows]
    axes.plot(K, S, "--", color=colour, linewidth=1.2)
  axes.plot([], [], "--", color="0.4", label="i.i.d. formula")


def _measured(axes, rows, colours):
  points = {
    (row["draft"], row["K"], row["measured"]["speedup"])
    for row in rows
    if row["measured"]
  }
  for name, K, S in sorted(points):
    axes.plot(
      K, S, "*", color=colours[name], markersize=13, markeredgecolor="black"
    )
  if points:
    axes.plot([], [], "k*", markersize=10, label="measured", linestyle="none")


def best_map(figure, axes):
  """S* in colour and lines of k* over (alpha, C)."""
  best = theory.optimal_length(_ALPHA, _COST_RATIO[:, None])
  # an S of exactly 1 lies below the first level: plain decoding is the best
  levels = [1.001, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7, 10, 15]
  colours = plt.get_cmap("viridis").with_extremes(under="0.88")
  filled = axes.contourf(
    _ALPHA,
    _COST_RATIO,
    best.speedup,
    levels,
    cmap=colours,
    norm=BoundaryNorm(levels, colours.N, extend="both"),
    extend="both",
  )
  axes.text(0.05, 1.2, "plain decoding is faster", color="0.35", fontsize=8)
  bar = figure.colorbar(filled, ax=axes, ticks=levels)
  bar.set_label("best S of the i.i.d. formula")
  bar.ax.set_yticklabels([f"{level:.3g}" for level in levels])
  steps = [1, 2, 3, 4, 6, 8, 12, 16, 24]
  lines = axes.contour(
    _ALPHA,
    _COST_RATIO,
    best.k_continuous,
    steps,
    colors="white",
    linewidths=0.7,
  )
  axes.clabel(lines, fmt=lambda k: f"K = {k:g}", fontsize=7)
  axes.set_yscale("log")
  axes.set_yticks([1, 2, 5, 10, 20, 50, 100], [1, 2, 5, 10, 20, 50, 100])
  axes.minorticks_off()
  axes.set_xlabel("alpha")
  axes.set_ylabel("C, target step / draft step")
  axes.set_title("Best K and S by alpha and C")


def _drafts(axes, best, drafts, colours):
  """Where each lies, at the edge if it is beyond."""
  for name, rows in best.items():
    alpha, C = rows[0]["iid"]["alpha"], drafts[name]["costs"]["C"] or np.inf
    x = np.clip(alpha, _ALPHA[0], _ALPHA[-1])
    y = np.clip(C, _COST_RATIO[0], _COST_RATIO[-1])
    axes.plot(
      x,
      y,
      "o",
      color=colours[name],
      markeredgecolor="white",
      markersize=9,
      clip_on=False,
    )
