r"""Run one point of a sweep, unless it is done.

  python -m specjax.point --folder=sweeps/a/draft.num_tokens=2

The folder says what to run (specjax/points.py); run this from where the sweep
was made. Run twice, it does nothing the second time; run again behind a
failure or a kill, it does what is left: train_draft.py goes on from its
checkpoint. It leaves DONE or FAILED. SIGINT, SIGTERM, SIGHUP and SIGUSR2 stop
the script, which saves, and leave neither. Exit code 0 when the point is done,
1 when it failed, 128 + the signal's number when it was stopped.
"""

import contextlib
import datetime
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from absl import flags

from specjax import cli, files, points, signals
from specjax.errors import UserError

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_METRICS = "metrics.jsonl"  # of train_draft.py
_LONGEST = 300  # characters of a reason


def main(argv):
  del argv
  if not flags.FLAGS.folder:
    raise UserError("no point: type --folder=sweeps/NAME/POINT")
  return run(Path(flags.FLAGS.folder))


def run(folder):
  """Run the point of a folder; return the exit code.

  Raises:
    UserError: it is no point's folder, another process works in it, or its
      script is not here.
  """
  point = points.read(folder / points.POINT)
  if point is None:
    raise UserError(f"{folder} has no {points.POINT}: name a point's folder")
  if not Path(point["script"]).is_file():
    raise UserError(
      f"no {point['script']} in {Path.cwd()}: run this from the checkout"
    )
  with _locked(folder) as lock:
    if points.state(folder) == "done":
      _tell(folder, "is done already")
      return 0
    try:
      return _run(folder, point, lock)
    except OSError as e:
      raise UserError(
        f"cannot write {e.filename or folder}: {e.strerror or e}; free space"
        " there, or make it writable, and type the same command again"
      ) from e


@contextlib.contextmanager
def _locked(folder):
  """Hold a point's folder; give the lock's file descriptor.

  The script inherits it, so the folder is held as long as any of both lives.
  What was killed holds nothing.
  """
  busy = f"another process is at work in {folder}; wait for it"
  file = files.hold(folder / points.LOCK, busy)
  try:
    yield file
  finally:
    os.close(file)


def _run(folder, point, lock):
  before = points.read(folder / points.FAILED) or {"attempt": 0}
  for name in (points.FAILED, points.RESULT):
    (folder / name).unlink(missing_ok=True)
  output = f"--json={folder / points.RESULT}"
  if point["script"] == points.TRAIN:
    output = f"--workdir={folder / points.RUN}"
  began = time.perf_counter()
  code, asked = _watched([*point["command"][1:], output], folder, lock)
  seconds = time.perf_counter() - began
  if asked or -code in _STOPS or code - 128 in _STOPS:
    number = asked or (-code if code < 0 else code - 128)
    _tell(folder, f"was stopped by {signal.Signals(number).name}")
    return 128 + number
  reason = _died(folder, code) if code else _wrong(folder, point["script"])
  finished = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
  if not reason:
    done = {"seconds": round(seconds, 3), "finished": finished}
    points.write(folder / points.DONE, done)
    _tell(folder, f"done in {seconds:.0f} s")
    return 0
  attempt = before["attempt"] + 1
  points.write(
    folder / points.FAILED,
    {
      "reason": reason,
      "returncode": code,
      "attempt": attempt,
      "finished": finished,
    },
  )
  _tell(folder, f"failed: {reason}; log: {folder / points.LOG}")
  return 1


def _watched(command, folder, lock):
  """Run a script into the log: (its return code, signal that was heard or 0).

  It is in a process group of its own: a terminal's Ctrl-C reaches it once, from
  here. What stops this process stops it with SIGTERM, upon which a training run
  saves; a second one is passed on too and ends it at once.
  """
  heard, child = [], None

  def hear(number, frame):
    heard.append(number)
    if child is not None:
      child.send_signal(signal.SIGTERM)

  with signals.heard(_STOPS, hear), open(folder / points.LOG, "w") as log:
    print("$ python", shlex.join(command), file=log, flush=True)
    child = subprocess.Popen(
      [sys.executable, *command],
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      env=os.environ | {"PYTHONUNBUFFERED": "1"},  # in the order of time
      pass_fds=[lock],
      process_group=0,
    )
    if heard:  # before there was a child to tell
      child.send_signal(signal.SIGTERM)
    return child.wait(), next(iter(heard), 0)


def _died(folder, code):
  """Why a script ended with a code that is not 0, one line."""
  if code < 0:
    name = signal.Signals(-code).name
    memory = ", as where memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{memory}"
  lines = (folder / points.LOG).read_text(errors="replace").split("\n")
  said = [line.strip() for line in lines[1:] if line.strip()]
  last = said[-1].removeprefix("error: ") if said else f"exit code {code}"
  return last[:_LONGEST]


def _wrong(folder, script):
  """What is wrong with the result of a run that ended well, "" for nothing."""
  if script == points.TRAIN:
    run = folder / points.RUN
    if (run / "record.json").is_file():
      record = points.read(run / "record.json")
      points.write(folder / points.RESULT, record)
    rows = (run / _METRICS).read_text().splitlines()
    found = [*map(json.loads, rows), points.read(folder / points.RESULT)]
  else:
    report = points.read(folder / points.RESULT)
    if report is None:
      return f"it left no {points.RESULT}"
    parts = [report[n] or {} for n in ("autoregressive", "speculative")]
    outputs = [x for part in parts for x in part.get("outputs", ())]
    bad = sum(x["finish_reason"] == "nonfinite" for x in outputs)
    if bad:
      return f"{bad} of {len(outputs)} answers ended with logits not finite"
    found = [report]
  wrong = next((x for part in found for x in _not_finite(part, "")), None)
  return f"{wrong[0]} is {wrong[1]}" if wrong else ""


def _not_finite(what, path):
  """Yield (path, number) of all in JSON that is NaN or infinite.

  The config may ask for what it likes, and log-probabilities may be -inf.
  """
  if isinstance(what, float) and not math.isfinite(what):
    yield path, what
  pairs = enumerate(what) if isinstance(what, list) else ()
  for key, part in what.items() if isinstance(what, dict) else pairs:
    if key not in ("config", "logprobs"):
      yield from _not_finite(part, f"{path}.{key}" if path else str(key))


def _tell(folder, what):
  print(f"{folder.name} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
  # defined here alone, so that this file can be imported beside other scripts
  flags.DEFINE_string("folder", None, "Folder of the point.")
  cli.run(main)
