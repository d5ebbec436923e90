"""The picture of a training run, and of several."""

import io
import itertools

import matplotlib

matplotlib.use("Agg")  # files, no window

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from specjax import canvas
from specjax.lenient import at, number, numbers


def training(rows, schedule, steps):
  """Return a PNG's bytes: the loss, alpha, and what the draft is worth.

  Args:
    rows: of metrics.jsonl.
    schedule: of `objective.phase`; where another loss begins is marked.
    steps: of the whole run.
  """
  figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
  loss, alpha, worth = axes
  _line(loss, rows, "loss", "loss of the schedule", "-", "tab:blue")
  held_out = "mix/forward_kl", "KL(p || q), held out"
  _line(loss, rows, *held_out, "o-", "tab:orange")
  loss.set_title("Loss a token")
  _line(alpha, rows, "alpha", "training", "-", "tab:blue")
  _line(alpha, rows, "mix/alpha", "held out", "o-", "tab:orange")
  _line(alpha, rows, "mix/agreement", "greedy agreement", "s--", "tab:green")
  alpha.set_ylim(0, 1)
  alpha.set_title("alpha = sum min(p, q)")
  for rule, colour in (("block", "tab:blue"), ("token", "tab:orange")):
    name = f"mix/E_N_{rule}"
    _line(worth, rows, name, f"tokens a round, {rule}", "o-", colour)
    _band(worth, rows, name, colour)
  _line(worth, rows, "mix/S_block", "S, best k, block", "s--", "tab:green")
  worth.axhline(1, color="0.6", linewidth=0.8, zorder=0)
  worth.set_title("Predicted of held-out texts")
  places = "upper right", "lower right", "center right"
  for one, place in zip(axes, places, strict=True):
    _phases(one, schedule, steps)
    one.set_xlabel("step")
    one.set_xlim(0, steps)
    one.legend(fontsize="small", frameon=False, loc=place)
  buffer = io.BytesIO()
  figure.savefig(buffer, format="png", dpi=150)
  plt.close(figure)
  return buffer.getvalue()


def _points(rows, name):
  found = [(row["step"], row[name]) for row in rows if name in row]
  return zip(*found, strict=True) if found else ((), ())


def _line(axes, rows, name, label, style, colour):
  x, y = _points(rows, name)
  options = dict(color=colour, label=label, markersize=4, linewidth=1.4)
  axes.plot(x, y, style, **options)


def _band(axes, rows, name, colour):
  """The interval over texts."""
  x, low = _points(rows, f"{name}_low")
  _, high = _points(rows, f"{name}_high")
  axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _phases(axes, schedule, steps):
  """A line where the loss changes, with the new one's name."""
  starts = [0.0, *(until for _, until, *_ in schedule)]
  for (name, *_), start in zip(schedule, starts, strict=False):
    if start:
      axes.axvline(start * steps, color="0.7", linestyle=":", linewidth=1)
    axes.annotate(
      name.replace("_", " "),
      (start * steps, 0.01),
      xycoords=("data", "axes fraction"),
      xytext=(3, 0),
      textcoords="offset points",
      fontsize=7,
      color="0.45",
    )


def runs(groups, records):
  """Yield (figure, caption): loss, alpha, KL and S by step, a line a run.

  Args:
    groups: [(name, rows of `rows.flat`)], each with a colour of its own.
    records: {run: its record}.
  """
  figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
  cycle = itertools.cycle(plt.get_cmap("tab10").colors)
  handles = {}
  for (name, group), colour in zip(groups, cycle, strict=False):
    for row in group:
      _run(axes.flat, records[row["run"]], colour)
    handles[name or "all runs"] = plt.Line2D([], [], color=colour)
  style = dict(color="0.4", marker="o", ms=4, ls="--")
  handles["held out"] = plt.Line2D([], [], **style)
  titles = (
    "Loss a token, each its own",
    "alpha = sum min(p, q)",
    "KL(p || q), held out",
    "Predicted S, best k, block, held out",
  )
  for one, title in zip(axes.flat, titles, strict=True):
    one.set_title(title, fontsize=10)
    one.set_xlabel("step")
    one.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
  axes[0, 1].set_ylim(0, 1)
  axes[1, 1].axhline(1, **canvas.GREY)
  canvas.legend(figure, handles)
  yield (
    figure,
    "A line a run; runs that differ in their seed alone have one colour."
    " Losses of different names are not on one scale; what is held out is.",
  )


def _run(axes, record, colour):
  """Draw a record into the four panels."""
  loss, alpha, held, worth = axes
  steps = numbers(at(record, "curve.step"))
  for one, name in ((loss, "loss"), (alpha, "alpha")):
    pairs = zip(steps, numbers(at(record, f"curve.{name}")), strict=False)
    one.plot(*_columns(pairs), color=colour, lw=1.3)
  told = [x for x in record["evaluations"] if isinstance(x, dict)]
  for one, path in (
    *((alpha, "alpha"), (held, "forward_kl")),
    (worth, "block.speedup"),
  ):
    pairs = ((number(at(x, "step")), number(at(x, path))) for x in told)
    pairs = (pair for pair in pairs if None not in pair)
    one.plot(*_columns(pairs), "o--", color=colour, ms=4, lw=1)


def _columns(pairs):
  """The two columns, also of nothing."""
  some = list(pairs)
  return [x for x, _ in some], [y for _, y in some]
