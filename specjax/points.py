"""The points of a sweep: what a config's sweep(add) names, and their folders.

  def sweep(add):
    for k in (2, 4, 8):
      add({"draft.num_tokens": k}, seed=1)

A sweep is a folder; a point is a folder in it, named by its overrides:

  sweep.json      schema, config, script, launcher, points (folder names, in
                  order), overrides_common
  POINT/
    point.json    schema, script, config, overrides, command, and `values`: the
                  whole resolved config, which tells this point from any other
    log.txt       stdout and stderr of the newest attempt
    result.json   the script's own report
    run/          of train_draft.py: its --workdir
    DONE          seconds, finished: it ended well and its result is finite
    FAILED        reason, returncode, attempt, finished: it did not
    lock          held by the kernel while anything works in there

A point with neither DONE nor FAILED has not run, or was stopped. Nothing here
imports jax: a point's own process has no use for it.
"""

import copy
import json
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from specjax import cli, files, folders
from specjax.errors import UserError

SCHEMA = 1
SWEEP, POINT, RESULT, LOG = "sweep.json", "point.json", "result.json", "log.txt"
RUN, DONE, FAILED, LOCK = "run", "DONE", "FAILED", "lock"
DECODE, TRAIN = "decode.py", "train_draft.py"

_WANTED = {bool: "True or False", int: "a whole number", float: "a number"}


class Point(NamedTuple):
  """One run of a sweep."""

  name: str  # of its folder
  overrides: dict  # {"group.key": value}, by key
  config: ConfigDict  # with them


def script(config):
  """Return the script that a config is for.

  A decoding config has the key `decoder`, a training config `loss` and `steps`.

  Raises:
    UserError: it is neither.
  """
  if "decoder" in config:
    return DECODE
  if "loss" in config and "steps" in config:
    return TRAIN
  raise UserError(
    f"this config is for neither {DECODE} (it has no `decoder`) nor {TRAIN} (no"
    " `loss` and `steps`); begin one as configs/common.py or"
    " configs/training.py do"
  )


def collect(spec, config, common, sweep):
  """Return the list of `Point` that a config file's sweep(add) names.

  Args:
    spec: "FILE.py[:ARG]"; config: its locked ConfigDict.
    common: names of keys that are set for all points.
    sweep: the file's function, None if it has none.

  Raises:
    UserError: a key that does not exist, a value of another type, the same
      point twice, no point, or whatever the file's own code raises.
  """
  file = spec.partition(":")[0]
  if sweep is None:
    raise UserError(
      f'{file} names no points: add `def sweep(add): add({{"seed": 1}})`'
    )
  found = {}

  def add(overrides=(), /, **more):
    asked = dict(overrides) | more
    values = {key: _value(config, key, asked[key]) for key in sorted(asked)}
    if both := sorted(values.keys() & set(common)):
      raise UserError(
        f"every point would have --config.{both[0]} of the command line, and"
        " this one sets it too: leave it out of one of them"
      )
    point = folders.name(values)
    if point in found:
      raise UserError(f"point {point} is there already; add it once")
    found[point] = Point(point, values, _with(config, values))

  try:
    sweep(add)
  except Exception as error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f":{f.lineno}" for f in frames if f.filename == file]
    plain = isinstance(error, UserError | ValueError)
    what = error if plain else f"{type(error).__name__}: {error}"
    raise UserError(f"{file}{''.join(lines[-1:])}: {what}") from error
  if not found:
    raise UserError(f"sweep(add) of {file} adds no point")
  return list(found.values())


def _value(config, key, value):
  """The value that an override of a config's key has, of the key's type."""
  known = cli.flatten(config)
  if key not in known:
    groups = [name for name in known if name.startswith(f"{key}.")]
    best = groups[:1] or [n for n in known if n.endswith(f".{key}")]
    best = best or [cli.nearest(key, known)]
    hint = (
      f"did you mean {best[0]!r}?" if best[0] else "add --help to list them"
    )
    what = f"{key!r} is a group of keys" if groups else f"no key {key!r}"
    raise UserError(f"{what}; {hint}")
  *path, last = key.split(".")
  for part in path:
    config = config[part]
  kind = config.get_type(last)
  if kind is float and type(value) is int:
    return float(value)
  if kind is tuple and type(value) is list:
    return tuple(value)
  # bool is an int to Python; here True is no number
  if type(value) is not kind and not (value is None and known[key] is None):
    wanted = _WANTED.get(kind, f"a {kind.__name__}")
    raise UserError(
      f"{key} must be {wanted}, got {value!r} (the default is {known[key]!r})"
    )
  return value


def _with(config, overrides):
  changed = copy.deepcopy(config)  # a reference follows what it refers to
  changed.update_from_flattened_dict(overrides)
  return changed


def arguments(overrides):
  """Return the command line's arguments that set a config's keys."""
  return [f"--config.{key}={value}" for key, value in overrides.items()]


def prepare(workdir, spec, kind, common, found, launcher):
  """Make the folders of a sweep's points, or add to those that are there.

  Args:
    workdir: the sweep's folder; spec: "FILE.py[:ARG]".
    kind: the script; common: overrides of all points; found: `Point`s.
    launcher: name of the engine.

  Raises:
    UserError: the folder holds something else, another sweep, or a point of
      the same name with another config; nothing is changed then.
  """
  workdir = Path(workdir)
  new = {
    "schema": SCHEMA,
    "config": spec,
    "script": kind,
    "launcher": launcher,
    "points": [point.name for point in found],
    "overrides_common": common,
  }
  old = _sweep(workdir, new["points"])
  if old:
    _check_same(workdir, old, new)
    added = [point for point in new["points"] if point not in old["points"]]
    new["points"] = old["points"] + added
  records = {p.name: _record(p, spec, kind, common) for p in found}
  for point, record in records.items():
    _check_point(workdir / point, record)
  try:
    for point, record in records.items():
      (workdir / point).mkdir(parents=True, exist_ok=True)
      if not (workdir / point / POINT).exists():
        write(workdir / point / POINT, record)
    write(workdir / SWEEP, new)
  except OSError as e:
    raise UserError(
      f"cannot write {e.filename or workdir}: {e.strerror or e}; name another"
      " --workdir, or make this one writable"
    ) from e


def _sweep(workdir, names):
  """What sweep.json says, None in a new folder.

  A folder with a point's name may be empty as yet: another process is making
  the same ones, as jobs of a cloud do that begin together.
  """
  if workdir.is_dir() and not (workdir / SWEEP).exists():
    inside = [p for p in workdir.iterdir() if p.name not in names]
    left = [p.name for p in inside if not (p / POINT).exists()]
    if left:
      raise UserError(
        f"--workdir={workdir} holds {left[0]} and no {SWEEP}; name a new folder"
      )
  elif workdir.exists() and not workdir.is_dir():
    raise UserError(f"--workdir={workdir} is a file; name a folder")
  return read(workdir / SWEEP)


def _check_same(workdir, old, new):
  for key in ("schema", "config", "script", "overrides_common"):
    before, now = (json.loads(json.dumps(x.get(key))) for x in (old, new))
    if before != now:
      raise UserError(
        f"--workdir={workdir} holds a sweep with {key} {before!r}, now"
        f" {now!r}; name a new --workdir, or set it back"
      )


def _record(point, spec, kind, common):
  """What point.json says; the script's output is where the folder is."""
  values = json.loads(json.dumps(cli.flatten(point.config), default=str))
  command = ["python", kind, f"--config={spec}"]
  return {
    "schema": SCHEMA,
    "script": kind,
    "config": spec,
    "overrides": point.overrides,
    "command": command + arguments(common | point.overrides),
    "values": values,
  }


def _check_point(folder, record):
  before = (read(folder / POINT) or record)["values"]
  now = record["values"]
  for key in sorted(before.keys() | now.keys()):
    old, new = (values.get(key, "not set") for values in (before, now))
    if json.dumps(old) != json.dumps(new):  # NaN is equal to itself
      raise UserError(
        f"{folder} is a point with {key} {old!r}, now {new!r}; name a new"
        " --workdir, set it back, or remove that folder"
      )


def state(folder):
  """Return "done", "failed" or "missing"."""
  if (folder / DONE).exists():
    return "done"
  return "failed" if (folder / FAILED).exists() else "missing"


def read(path):
  """Return what a JSON file says, None if there is none.

  Raises:
    UserError: it cannot be read.
  """
  try:
    return json.loads(path.read_text())
  except FileNotFoundError:
    return None
  except (OSError, ValueError) as e:
    raise UserError(f"cannot read {path}: {e}; remove it") from e


def write(path, what):
  """Write JSON, whole or not at all."""
  files.write(path, (json.dumps(what, indent=1) + "\n").encode())


def of_file():
  """Return sweep(add) of the config file that the command line named, or None.

  `cli` has run the file already; running it twice might make two of something.
  """
  return getattr(sys.modules["config_file"], "sweep", None)
