"""A run's folder: one process works in it, and all in it is one run's.

checkpoints/  the state; best/: what is exported; drafted/: the draft's answers
draft/        the export
lock          held by the kernel while a process works here, whatever ends it
"""

import contextlib
import os
import shutil
from pathlib import Path

from specjax import (
  checkpoint,
  export,
  feed,
  files,
  multihost,
  recipe,
  summary,
  trainlog,
)
from specjax.errors import UserError

SAVES, BEST, DRAFT, LOCK = "checkpoints", "best", "draft", trainlog.LOCK
COSTS = "costs.json"


@contextlib.contextmanager
def locked(folder):
  """Work in a run's folder alone; it is made if need be.

  A folder in which nothing came to be is removed again.

  Raises:
    UserError: it is something else's, cannot be written, or another process
      works in it.
  """
  folder = Path(folder)
  trainlog.config_of(folder)  # before a file is left in somebody's folder
  multihost.meet("config read")
  if not multihost.first():
    yield
    return
  with _writable(folder):
    folder.mkdir(parents=True, exist_ok=True)
    file = files.hold(
      folder / LOCK,
      f"another train_draft.py is at work in {folder}; wait for it or name a"
      " new --workdir",
    )
  try:
    yield
  finally:
    with contextlib.suppress(OSError):
      if [path.name for path in folder.iterdir()] == [LOCK]:
        (folder / LOCK).unlink()
        folder.rmdir()
    os.close(file)


@contextlib.contextmanager
def _writable(folder):
  try:
    yield
    if not os.access(folder, os.W_OK | os.X_OK):
      raise PermissionError(None, "Permission denied", str(folder))
  except (NotADirectoryError, FileExistsError) as e:
    raise UserError(
      f"--workdir={folder} lies in a file, not a folder; name another --workdir"
    ) from e
  except OSError as e:
    raise UserError(
      f"cannot write {e.filename or folder}: {e.strerror or e}; make it"
      " writable, free space there, or name another --workdir"
    ) from e


def check(folder, config):
  """Raise UserError unless a run of this config is there, or none."""
  export.check_folder(folder / DRAFT)
  before = trainlog.config_of(folder)
  if before is None:
    return
  saved = checkpoint.numbers(folder / SAVES)
  if not saved and trainlog.read(folder):
    raise UserError(
      f"{folder} has metrics of a run but none of its checkpoints: put them"
      f" back into {folder / SAVES}, or name a new --workdir"
    )
  changed = recipe.differing(before, recipe.plain(config))
  if saved and changed:
    raise UserError(
      f"--workdir={folder} holds a run of another config"
      f" ({'; '.join(changed)}); name a new --workdir, or set these back"
    )


def begin(folder, config):
  """Make a run's folder; without checkpoints, what another run left goes.

  That run's best draft would be compared with and exported as this one's, its
  draft's answers trained on, its costs believed.
  """
  multihost.meet("folder checked")
  if multihost.first() and not checkpoint.numbers(folder / SAVES):
    with trainlog.written(folder):
      for name in (BEST, feed.DRAFTED):
        if (folder / name).exists():
          shutil.rmtree(folder / name)
      for name in (COSTS, trainlog.RECORD):
        (folder / name).unlink(missing_ok=True)
  trainlog.begin(folder, recipe.plain(config))
  multihost.meet("folder begun")


def check_best(best, rows, run):
  """Raise UserError unless the best draft so far is there, and is this run's.

  Args:
    best: of `checkpoint.opened`; rows: of the log, one of an evaluation is
      there only if its best draft was saved.
    run: what `checkpoint.meta` says of every draft of this run.
  """
  number, where = checkpoint.latest(best), best.directory
  if number is None:
    if any(summary.KEY in row for row in rows):
      raise UserError(
        f"{where} is missing or empty, where the best draft so far was: put it"
        " back, or name a new --workdir"
      )
    return
  kept = checkpoint.meta(best, number)
  # one of an earlier version does not say
  if any(kept.get(key, value) != value for key, value in run.items()):
    raise UserError(
      f"{where / str(number)} is the best draft of another run: put this run's"
      " back, or name a new --workdir"
    )
