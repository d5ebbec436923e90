"""What a training run leaves beside its checkpoints, and shows while it runs.

config.json    the config, resolved
runs.jsonl     a line a start: command, versions, device, mesh, first step
record.json    all of it for `python -m specjax.report`, when the run ends
metrics.jsonl  a line a logged step; no step is there twice
events.*       the same for TensorBoard, made anew from it at each start
curves.png     the same as a picture
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import rich.progress

from specjax import multihost, runtime, terminal
from specjax.errors import UserError

CONFIG, RUNS, METRICS = "config.json", "runs.jsonl", "metrics.jsonl"
RECORD = "record.json"  # of the whole run, when it ends: record.py
LOCK = "lock"  # may be all there is, where a run has only begun


class Log(NamedTuple):
  """Open files of a run's folder."""

  folder: Path
  metrics: object  # a text file; None: another process writes
  events: object  # tensorboardX's `EventsWriter`: it writes at once
  rows: list  # of all steps so far


@contextlib.contextmanager
def written(folder):
  """Turn a full disk and its like into one line."""
  try:
    yield
  except OSError as e:
    raise UserError(
      f"cannot write {e.filename or folder}: {e.strerror or e}; what is saved"
      " stays: free space there and type the same command again"
    ) from e


def config_of(folder):
  """Return the config that a folder's run has, None if there is no run.

  Raises:
    UserError: the folder holds something else.
  """
  folder = Path(folder)
  if folder.exists() and not folder.is_dir():
    raise UserError(f"--workdir={folder} is a file; name a folder")
  path = folder / CONFIG
  if not path.exists():
    begun = {LOCK, _part(path).name}  # a run that was killed as it began
    if folder.exists() and any(p.name not in begun for p in folder.iterdir()):
      raise UserError(
        f"--workdir={folder} holds files but no run; name a new folder"
      )
    return None
  try:
    return json.loads(path.read_text())
  except (OSError, ValueError) as e:
    raise UserError(f"cannot read {path}: {e}; name a new --workdir") from e


def begin(folder, config):
  """Make a run's folder, with its config, JSON-like."""
  with written(folder):
    Path(folder).mkdir(parents=True, exist_ok=True)
  write(Path(folder) / CONFIG, json.dumps(config, indent=2) + "\n")


def start(step, dtype, mesh):
  """Return what there is to say of a run that starts now, at a step."""
  return {
    "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    "step": step,
    "command": sys.orig_argv,
    "folder": os.getcwd(),
    "dtype": str(dtype),
    "versions": runtime.versions() | {"commit": runtime.commit()},
    "device": runtime.device(),
    "mesh": list(mesh),
  }


def describe(folder, line):
  """Write down that a run starts; `line` is of `start`."""
  if not multihost.first():
    return
  with written(folder), (Path(folder) / RUNS).open("a") as file:
    file.write(json.dumps(line) + "\n")


def write(path, data):
  """Write text or bytes so that the file is there whole or not at all."""
  with written(path):
    _replace(path, data)


def _replace(path, data):
  if not multihost.first():
    return
  part = _part(path)
  try:
    with open(part, "wb") as file:
      file.write(data.encode() if isinstance(data, str) else data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(part, path)
  except BaseException:
    part.unlink(missing_ok=True)
    raise


def _part(path):
  """Where a file is written before it gets its name."""
  return path.with_name(f".{path.name}.part")


@contextlib.contextmanager
def opened(folder, step):
  """Give the `Log` of a run that goes on behind a step: later rows are cut.

  Args:
    step: the last one that counts, -1 for none.
  """
  from tensorboardX import event_file_writer

  folder = Path(folder)
  if not multihost.first():
    yield Log(
      folder, None, None, [r for r in read(folder) if r["step"] <= step]
    )
    return
  with written(folder):
    rows = [row for row in read(folder) if row["step"] <= step]
    _replace(folder / METRICS, "".join(map(_line, rows)))
    for old in folder.glob("events.out.tfevents.*"):
      old.unlink()
    events = event_file_writer.EventsWriter(str(folder / "events"))
    log = Log(folder, (folder / METRICS).open("a"), events, rows)
    for row in rows:
      _to_events(events, row)
    events.flush()
  try:
    yield log
  finally:
    with contextlib.suppress(OSError):  # a row that failed has been told
      log.metrics.close()
    with contextlib.suppress(OSError):
      events.close()


def read(folder):
  """Return the rows of a run; a last line that was cut does not count."""
  path = Path(folder) / METRICS
  lines = path.read_text().split("\n")[:-1] if path.is_file() else []
  try:
    return list(map(json.loads, lines))
  except ValueError as e:
    raise UserError(f"{path} is damaged: {e}; move it away") from e


def append(log, row):
  """Add a row, {"step": whole number, name: number}, on disk when it returns.

  Raises:
    UserError: it cannot be written.
  """
  if log.metrics is not None:
    with written(log.folder):
      log.metrics.write(_line(row))
      log.metrics.flush()
      os.fsync(log.metrics.fileno())
      _to_events(log.events, row)
      log.events.flush()
  log.rows.append(row)


def _line(row):
  return json.dumps(row) + "\n"


def _to_events(events, row):
  from tensorboardX.proto import event_pb2, summary_pb2

  values = [
    summary_pb2.Summary.Value(tag=tag, simple_value=value)
    for tag, value in row.items()
    if tag not in ("step", "time")
  ]
  events.write_event(
    event_pb2.Event(
      wall_time=row["time"],
      step=row["step"],
      summary=summary_pb2.Summary(value=values),
    )
  )


@contextlib.contextmanager
def shown(out, steps):
  """Give (step, told) -> None, which shows how far a run of `steps` is.

  On a terminal that is a bar with the time left, else a line now and then.
  """
  bar = rich.progress.Progress(
    "{task.description}",
    rich.progress.BarColumn(),
    "{task.completed} of {task.total}{task.fields[told]}",
    console=out,
    transient=True,
    disable=not out.is_terminal,
  )
  task = bar.add_task("training", total=steps, told="")
  logged, first = 0.0, None  # the clock starts behind the first step

  def step(now, told):
    nonlocal logged, first
    if first is None:
      first = now, time.perf_counter()
    made, began = now - first[0], first[1]
    left = terminal.time_left(began, max(made, 1), steps - first[0])
    told = f"{told}, {left}" if made else told
    bar.update(task, completed=now, told=f", {told}")
    due = time.perf_counter() - logged > terminal.LOG_EVERY
    if due and not out.is_terminal:
      terminal.note(out, f"step {now} of {steps}: {told}")
      logged = time.perf_counter()

  with bar:
    yield step


def picture(log, schedule, steps):
  """Write curves.png."""
  from specjax import curves

  write(log.folder / "curves.png", curves.training(log.rows, schedule, steps))
