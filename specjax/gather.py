"""What runs have left below a folder: points of sweeps, reports, records.

Reads the files that docs/records.md and `specjax.sweep` describe, and nothing
else. A file that is half-written or something else's is named, with the reason,
and the rest is read.
"""

import os
from pathlib import Path
from typing import NamedTuple

from specjax import cli, lenient, trainlog
from specjax.errors import UserError
from specjax.points import DONE, FAILED, LOG, POINT, RESULT, RUN, SWEEP

SCHEMA = 1
_RECORD = trainlog.RECORD
# of a record that is taken for one; an empty one is null in a decode report
_SHAPES = {
  "decode": {
    "autoregressive": dict | None,
    "speculative": dict | None,
    "predicted": dict | None,
    "draft": dict | None,
    "config": dict,
  },
  "training": {"evaluations": list, "curve": dict, "config": dict},
}


class Run(NamedTuple):
  """One run, whatever came of it."""

  name: str  # its folder or file, below the one that is gathered
  kind: str  # decode or training
  status: str  # done, failed, interrupted, not run, or unreadable
  reason: str = ""  # why it is not done, one line
  log: str = ""  # of a failed one, the last lines
  config: str = ""  # FILE.py:ARG
  overrides: dict = {}  # {"draft.num_tokens": 2}, as a sweep named them
  command: tuple = ()
  record: dict = {}  # what it has left, {} if nothing


class Found(NamedTuple):
  """All that is below a folder."""

  folder: Path
  runs: list[Run]
  skipped: list[tuple[str, str]]  # (name, why)


def gather(folder, track=iter):
  """Return the `Found` of a folder.

  Args:
    track: wraps the list of what is to be read, for a progress bar.

  Raises:
    UserError: there is no such folder, or no run in it.
  """
  folder = Path(folder)
  _check(folder)
  runs, skipped = [], []
  for kind, path in track(_sources(folder, skipped)):
    name = os.path.relpath(path, folder)
    name = folder.resolve().name if name == "." else name
    file = {"point": f"{name}/{POINT}", "training": f"{name}/{_RECORD}"}
    try:
      runs += _READERS[kind](path, name, skipped)
    except lenient.Unreadable as e:
      skipped.append((file.get(kind, name), str(e)))
  if not runs:
    raise UserError(_nothing(folder, skipped))
  return Found(folder, runs, skipped)


def _check(folder):
  if folder.is_dir():
    return
  if folder.exists():
    raise UserError(f"{folder} is a file; name the folder that holds it")
  above = folder.parent
  some = above.iterdir() if above.is_dir() else ()
  best = cli.nearest(folder.name, [p.name for p in some if p.is_dir()])
  hint = f"; did you mean {above / best}?" if best else ""
  raise UserError(f"there is no folder {folder}{hint}")


def _nothing(folder, skipped):
  more = "; ".join(f"{name}: {why}" for name, why in skipped[:3])
  return (
    f"no run below {folder}"
    f"{f' ({more})' if more else ''}: name a sweep's --workdir, or a folder"
    " with what decode.py --json=FILE.json or train_draft.py --workdir=FOLDER"
    " wrote"
  )


def _sources(folder, skipped):
  """[(kind, path)] of what is to be read, sweeps in their own order."""
  found = []

  def failed(error):
    name = os.path.relpath(error.filename or folder, folder)
    skipped.append((name, error.strerror or str(error)))

  for where, folders, files in os.walk(folder, onerror=failed):
    where, kind = Path(where), _kind_of_folder(files)
    if kind:
      folders.clear()  # a checkpoint or an export has JSON of its own
      found.append((kind, where))
      continue
    order = {}
    if SWEEP in files:
      found.append(("sweep", where / SWEEP))
      order = {name: i for i, name in enumerate(_points(where / SWEEP))}
    folders.sort(
      key=lambda name: (order.get(name, len(order)), lenient.natural(name))
    )
    names = {name for name in files if name.endswith(".json")} - {SWEEP}
    names = sorted(names, key=lenient.natural)
    found += [("file", where / name) for name in names]
  return found


def _kind_of_folder(files):
  kinds = (
    (POINT, "point"),
    (_RECORD, "training"),
    (trainlog.RUNS, "unended"),
  )
  return next((kind for name, kind in kinds if name in files), None)


def _points(path):
  """The folders that a sweep names; [] if it cannot be read, told elsewhere."""
  try:
    names = lenient.read(path).get("points")
  except lenient.Unreadable:
    return []
  some = names if isinstance(names, list) else []
  return [name for name in some if isinstance(name, str) and name]


def _record(path):
  """(kind, record) of a file."""
  found = lenient.read(path)
  if "prediction" in found:
    raise lenient.Unreadable("a prediction of specjax.predict, not a run")
  kind = "training" if found.get("kind") == "training" else "decode"
  if not set(_SHAPES[kind]) <= set(found):
    raise lenient.Unreadable(
      "neither decode.py's report nor train_draft.py's record"
    )
  if found.get("schema") != SCHEMA:
    raise lenient.Unreadable(
      f"it is of schema {found.get('schema')!r}; this version reads {SCHEMA}"
    )
  for key, shape in _SHAPES[kind].items():
    if not isinstance(found[key], shape):
      raise lenient.Unreadable(f"its {key!r} is not what {kind} leaves")
  return kind, found


def _of_record(path, name, skipped):
  """The run of a file that stands alone."""
  kind, found = _record(path)
  command = lenient.texts(found.get("command"))
  status = "interrupted" if found.get("interrupted") else "done"
  reason = _how_far(found) if status == "interrupted" else ""
  config = _config_of(command)
  run = Run(name, kind, status, reason, "", config, {}, command, found)
  return [run]


def _how_far(found):
  if found.get("kind") == "training":
    return f"after {found.get('steps')} of {found.get('steps_planned')} steps"
  return "by Ctrl-C, before the last answer"


def _of_training(path, name, skipped):
  return _of_record(path / _RECORD, name, skipped)


def _of_unended(path, name, skipped):
  raise lenient.Unreadable(
    f"a training run without {_RECORD}: it is at work, or was killed"
  )


def _of_sweep(path, name, skipped):
  """The points that a sweep names and that have no folder yet."""
  found = lenient.read(path)
  script, config = found.get("script"), found.get("config")
  kind = "training" if "train" in str(script) else "decode"
  below = Path(name).parent
  return [
    Run(str(below / point), kind, "not run", config=str(config or ""))
    for point in _points(path)
    if not (path.parent / point / POINT).exists()
  ]


def _of_point(path, name, skipped):
  """The run of a point, also if it left nothing."""
  asked = lenient.read(path / POINT)
  kind = "training" if "train" in str(asked.get("script")) else "decode"
  own = asked.get("overrides")
  status, reason = _status(path)
  record, result = {}, path / RESULT
  if kind == "training" and (path / RUN / _RECORD).exists():
    result = path / RUN / _RECORD
  if result.exists() or status == "done":
    try:
      kind, record = _record(result)
    except lenient.Unreadable as e:
      skipped.append((f"{name}/{os.path.relpath(result, path)}", str(e)))
      if status == "done":
        status, reason = "unreadable", f"{result.name}: {e}"
  if record.get("interrupted") and status in ("done", "not run"):
    status, reason = "interrupted", _how_far(record)
  return [
    Run(
      *(name, kind, status, reason),
      log=lenient.tail(path / LOG)
      if status in ("failed", "interrupted")
      else "",
      config=str(asked.get("config") or ""),
      overrides=own if isinstance(own, dict) else {},
      command=lenient.texts(asked.get("command")),
      record=record,
    )
  ]


def _status(path):
  """(status, reason) of a point's markers."""
  if (path / DONE).exists():
    return "done", ""
  if not (path / FAILED).exists():
    if (path / LOG).exists():
      return "interrupted", f"neither {DONE} nor {FAILED}: at work, or killed"
    return "not run", ""
  try:
    found = lenient.read(path / FAILED)
  except lenient.Unreadable as e:
    return "failed", f"its {FAILED} file: {e}"
  reason = " ".join(str(found.get("reason") or "no reason told").split())
  if isinstance(found.get("returncode"), int):
    reason += f" (exit code {found['returncode']})"
  return "failed", reason


def _config_of(command):
  """The --config=FILE of a command, "" without one."""
  flags = [x.partition("=")[2] for x in command if x.startswith("--config=")]
  return flags[0] if flags else ""


_READERS = {
  "point": _of_point,
  "training": _of_training,
  "unended": _of_unended,
  "file": _of_record,
  "sweep": _of_sweep,
}
