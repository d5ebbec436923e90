"""Pictures of gathered runs.

A picture never mixes places (model, dtype, device): each has its own, and says
which. What else runs differ in is a panel's title.
"""

import itertools
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from specjax import canvas, curves, heat, naming
from specjax.lenient import number

_MARKERS = "osD^vP*X"


class Figure(NamedTuple):
  """A picture and what to say below it."""

  name: str  # of its file, without .png
  kind: str  # of KINDS
  place: str
  caption: str
  png: bytes


def draw(rows, records, track=iter):
  """Return ([Figure], {kind: why there is none}).

  Args:
    rows: of `rows.flat`; records: {run: its record}.
    track: wraps a list of what is to be drawn, for a progress bar.
  """
  jobs = [
    (kind, group)
    for kind, (_, usable, _) in KINDS.items()
    for _, group in canvas.named(usable(rows), naming.place)
  ]
  colours, found = _colours(rows), []
  for kind, group in track(jobs):
    place = naming.place(group[0])
    if kind == "training":
      parts = curves.runs(canvas.grouped(group), records)
    else:
      parts = _DRAWERS[kind](group, colours)
    made = sum(figure.kind == kind for figure in found)
    for n, (figure, caption) in enumerate(parts, made + 1):
      name = kind if n == 1 else f"{kind}_{n}"
      png = canvas.png(figure, place)
      found.append(Figure(name, kind, place, caption, png))
  drawn = {figure.kind for figure in found}
  lacking = {k: why for k, (_, _, why) in KINDS.items() if k not in drawn}
  return found, lacking


def _decoded(*keys):
  """What gives the finished decode runs that have these columns."""
  return lambda rows: [
    row
    for row in naming.done(rows, "decode")
    if all(number(row[key]) is not None for key in keys)
  ]


def _accepting(rows):
  return [r for r in naming.done(rows, "decode") if r["accepted_by_position"]]


def _batched(rows):
  """The runs of those places that have more than one batch size."""
  some = _decoded("speedup", "K", "batch")(rows)
  groups = [group for _, group in canvas.named(some, naming.place)]
  several = [g for g in groups if len({row["batch"] for row in g}) > 1]
  return [row for group in several for row in group]


def _trained(rows):
  return [row for row in naming.done(rows, "training") if row["loss"] != ""]


KINDS = {  # kind -> its title, which rows it shows, why it may have none
  "speedup_by_k": (
    "Speed-up against K by draft",
    _decoded("speedup", "K"),
    "no finished run decoded both ways",
  ),
  "predicted_measured": (
    "Predicted against measured speed-up",
    _decoded("speedup", "predicted_speedup"),
    "no finished run has both speed-ups",
  ),
  "acceptance": (
    "Acceptance by position",
    _accepting,
    "no finished run drafted anything",
  ),
  "batch_by_k": (
    "Speed-up over batch and K",
    _batched,
    "no draft was run at more than one batch size",
  ),
  "training": ("Training curves", _trained, "there is no training run"),
}


def _colours(rows):
  names = dict.fromkeys(row["draft"] for row in rows if row["kind"] == "decode")
  cycle = itertools.cycle(plt.get_cmap("tab10").colors)
  return dict(zip(names, cycle, strict=False))


def _speedups(rows, colours):
  """S against K, a line a draft; the mean of runs that differ in a seed."""
  top = max(1.1, 1.08 * max(row["speedup"] for row in rows))
  for figure, panels in canvas.panels(canvas.grouped(rows)):
    handles = {}
    for axes, (_, group) in panels:
      for draft, own in canvas.named(group, lambda row: row["draft"]):
        line = _means(axes, own, colours[draft])
        handles.setdefault(draft, line)
      axes.axhline(1, **canvas.GREY)
      axes.set_xticks(sorted({row["K"] for row in rows}))
      axes.set_ylim(0, top)
      axes.set_xlabel("K, drafted tokens a round")
      axes.set_ylabel("S, times plain decoding")
    canvas.legend(figure, handles)
    yield (
      figure,
      "Measured speed-up over plain decoding of the same prompts; above the"
      " line speculation is faster.",
    )


def _means(axes, rows, colour):
  groups = sorted(canvas.named(rows, lambda row: row["K"]))
  each = [(K, [row["speedup"] for row in own]) for K, own in groups]
  mean = [np.mean(S) for _, S in each]
  (line,) = axes.plot([K for K, _ in each], mean, "o-", color=colour, ms=4)
  for K, S in each:
    if len(S) > 1:
      axes.plot([K] * len(S), S, "_", color=colour, ms=9)
  return line


def _predicted(rows, colours):
  """Measured S over predicted S, with the diagonal."""
  figure, axes = plt.subplots(figsize=(5.8, 6.2), layout="constrained")
  groups = canvas.grouped(rows)
  marked = list(zip(groups, itertools.cycle(_MARKERS), strict=False))
  for (_, group), marker in marked:
    for row in group:
      _point(axes, row, marker, colours[row["draft"]])
  sign = lambda **style: plt.Line2D([], [], ls="none", **style)
  drafts = dict.fromkeys(row["draft"] for row in rows)
  handles = {name: sign(color=colours[name], marker="o") for name in drafts}
  if len(groups) > 1:
    for (title, _), marker in marked:
      handles[title] = sign(color="0.4", marker=marker)
  S = [row[key] for row in rows for key in ("predicted_speedup", "speedup")]
  ends = np.array([0.85 * min(S), 1.1 * max(S)])
  line = axes.plot(ends, ends, "k-", lw=1, zorder=0)
  handles["measured = predicted"] = line[0]
  handles["within 10 %"] = axes.fill_between(
    ends, 0.9 * ends, 1.1 * ends, color="0.92", zorder=-1
  )
  for line in (axes.axhline, axes.axvline):
    line(1, **canvas.GREY)
  axes.set(xlim=ends, ylim=ends, aspect="equal")
  axes.set_xlabel("predicted S, from plain texts and measured costs")
  axes.set_ylabel("measured S")
  canvas.legend(figure, handles)
  yield figure, _gap(rows)


def _point(axes, row, marker, colour):
  style = dict(color=colour, marker=marker, ms=6, alpha=0.85)
  x, y = row["predicted_speedup"], row["speedup"]
  axes.plot(x, y, ls="none", **style)
  ends = row["predicted_speedup_low"], row["predicted_speedup_high"]
  if None not in map(number, ends):
    axes.plot(ends, [y, y], color=colour, lw=0.8, alpha=0.5)


def _gap(rows):
  caption = (
    "The seconds of a plain step and of a round are the run's own, so the"
    " distance is that of the tokens a round: none at T = 0, where both decode"
    " the same text. Horizontal lines are the 95 % interval over prompts."
  )
  off = [
    abs(row["speedup"] / row["predicted_speedup"] - 1)
    for row in rows
    if row["predicted_speedup"] > 0
  ]
  if not off:
    return caption
  return caption + (
    f" Of {len(off)} runs the median is {np.median(off):.0%} off, the worst"
    f" {max(off):.0%}."
  )


def _acceptance(rows, colours):
  """Accepted at position i, of the longest draft of each kind."""
  size = lambda row: (number(row["K"]) or 0, -(number(row["batch"]) or 0))
  longest = [
    (title, [max(own, key=size) for _, own in canvas.named(group, _draft)])
    for title, group in canvas.grouped(rows, ("batch_size",))
  ]
  for figure, panels in canvas.panels(longest):
    handles = {}
    for axes, (_, group) in panels:
      for row in group:
        y = [float(x) for x in row["accepted_by_position"].split()]
        style = dict(color=colours[row["draft"]], ms=4)
        (line,) = axes.plot(range(1, len(y) + 1), y, "o-", **style)
        handles.setdefault(row["draft"], line)
      axes.set_ylim(0, 1.02)
      axes.xaxis.set_major_locator(MaxNLocator(integer=True))
      axes.set_xlabel("position i")
      axes.set_ylabel("accepted at i / rounds")
    canvas.legend(figure, handles)
    yield (
      figure,
      "Of each draft the run with the largest K, at its smallest batch.",
    )


def _draft(row):
  return row["draft"]


_DRAWERS = {
  "speedup_by_k": _speedups,
  "predicted_measured": _predicted,
  "acceptance": _acceptance,
  "batch_by_k": lambda rows, colours: heat.draw(rows),
}
