"""What became of a sweep's points: the progress of a run, and its table."""

import contextlib
import sys
import time
from pathlib import Path
from typing import NamedTuple

import rich.console
import rich.progress
import rich.table

from specjax import points, summary, terminal, trainlog


class Outcome(NamedTuple):
  """What became of one point; None: not known."""

  folder: Path
  state: str  # done, failed or unfinished
  seconds: float | None
  speedup: float | None  # measured
  predicted: float | None  # S
  tokens: float | None  # a target call; of a training run: predicted
  reason: str  # why it is not done


def before(folders):
  """Return '4 points: 1 done, 1 failed and tried again, 2 to run'."""
  states = [points.state(folder) for folder in folders]
  parts = [
    f"{states.count(state)} {what}"
    for state, what in (
      ("done", "done"),
      ("failed", "failed and tried again"),
      ("missing", "to run"),
    )
    if state in states
  ]
  return f"{len(folders)} points: {', '.join(parts)}"


@contextlib.contextmanager
def shown(out, todo):
  """Give (index, told) -> None, which shows how far a sweep is.

  A bar on a terminal; a line for every point that has ended in any case.

  Args:
    todo: folders; told: None when a point begins, its last line when it ended.
  """
  bar = rich.progress.Progress(
    rich.progress.BarColumn(),
    "{task.completed} of {task.total}",
    rich.progress.TimeElapsedColumn(),
    "{task.fields[told]}",
    console=out,
    transient=True,
    disable=not out.is_terminal,
  )
  task = bar.add_task("sweep", total=len(todo), told="")
  began, done, running = time.perf_counter(), 0, {}

  def show(index, told):
    nonlocal done
    if told is None:
      running[index] = todo[index].name
    else:
      running.pop(index, None)
      done += 1
      left = terminal.time_left(began, done, len(todo))
      line = f"{done} of {len(todo)}: {told}"
      terminal.note(out, line + (f"; {left}" if done < len(todo) else ""))
    left = f"{terminal.time_left(began, done, len(todo))} " if done else ""
    bar.update(task, completed=done, told=left + ", ".join(running.values()))

  with bar:
    yield show


def of(folder, told):
  """Return the `Outcome` of a point's folder.

  Args:
    told: the last line that its command had to say, "" if it did not run now.
  """
  state = points.state(folder)
  if state == "failed":
    failed = points.read(folder / points.FAILED)
    reason = f"attempt {failed['attempt']}: {failed['reason']}"
    return Outcome(folder, state, None, None, None, None, reason)
  if state == "missing":
    return Outcome(folder, "unfinished", None, None, None, None, told)
  done = points.read(folder / points.DONE)
  training = points.read(folder / points.POINT)["script"] == points.TRAIN
  numbers = _trained(folder) if training else _decoded(folder)
  return Outcome(folder, state, done["seconds"], *numbers, "")


def _decoded(folder):
  """(speed-up, predicted, tokens a call) of decode.py's report."""
  report = points.read(folder / points.RESULT)
  predicted = (report["predicted"] or {}).get("speedup")
  return report["speedup"], predicted, report["tokens_per_call"]


def _trained(folder):
  """The same of a training run's best evaluation."""
  rows = trainlog.read(folder / points.RUN)
  judged = [row for row in rows if summary.KEY in row]
  best = max(judged, key=lambda row: row[summary.KEY], default={})
  return None, best.get(summary.KEY), best.get(summary.TOKENS)


def table(found):
  """Print a list of `Outcome`: a table, and below it why some are not done."""
  # a table that is piped is not squeezed into 80 columns
  width = None if sys.stdout.isatty() else 160
  out = rich.console.Console(width=width, highlight=False, markup=False)
  shown_table = rich.table.Table(box=None, pad_edge=False)
  shown_table.add_column("point", overflow="fold")
  shown_table.add_column("state")
  for name in ("seconds", "speed-up", "predicted", "tokens a call"):
    shown_table.add_column(name, justify="right")
  text = lambda x, form: "-" if x is None else f"{x:{form}}"
  for one in found:
    numbers = (one.speedup, one.predicted, one.tokens)
    cells = [text(x, ".2f") for x in numbers]
    seconds = text(one.seconds, ".1f")
    shown_table.add_row(one.folder.name, one.state, seconds, *cells)
  out.print(shown_table)
  for one in found:
    if one.state != "done":
      log = f"; log: {one.folder / points.LOG}" if one.state == "failed" else ""
      line = f"{one.folder.name} {one.state}, {one.reason}{log}"
      out.print(line, soft_wrap=True)
