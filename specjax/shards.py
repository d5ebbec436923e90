"""Sampled data on disk: a folder a setting, a file a shard.

The folder's name holds the hash of all settings that decide what is sampled,
and a shard is a pure function of these and its number. So the same settings
find the same folder, and a run that was stopped goes on with the first shard
that is missing or damaged. Files appear whole: they are written beside their
name, then renamed.
"""

import contextlib
import hashlib
import json
import os
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import rich.progress

from specjax import multihost
from specjax.errors import UserError

FORMAT = 1  # of the files; another one is another folder
_META = "meta.json"


class Progress(NamedTuple):
  """How far a set of shards is."""

  done: int  # shards, those that were found included
  total: int
  made: int  # shards that this run has made
  tokens: int  # that this run has sampled
  seconds: float  # that this run has taken

  @property
  def left(self):
    """Seconds to go at the pace so far, None before there is one."""
    return self.made and self.seconds / self.made * (self.total - self.done)


class Watch(NamedTuple):
  """What is done with the news; each may do nothing."""

  note: Callable  # (line) -> None
  step: Callable  # (Progress) -> None


QUIET = Watch(lambda line: None, lambda progress: None)


def name(settings):
  """Return a folder's name: the source of the data and its settings' hash."""
  text = json.dumps({"format": FORMAT, **settings}, sort_keys=True)
  return (
    f"{settings['source']}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
  )


def collect(root, settings, count, make, *, tell, watch=QUIET):
  """Return the arrays of shards 0 .. count - 1, made or found.

  A damaged shard is made again, with a note. Ctrl-C and SIGKILL lose no more
  than the shard that is being made.

  Args:
    root: where the folder is or will be; None: nothing is kept.
    settings: JSON-like, all that decides the data; "source" is its kind.
    make: number -> {name: array}, with "count": sampled tokens a row.
    tell: shards -> JSON-like, what people may want to know of them.

  Raises:
    UserError: the folder cannot be written.
  """
  folder = root and Path(root) / name(settings)
  found, before = {}, 0.0
  if folder:
    before = _seconds(folder)
    again = lambda line: watch.note(f"{line}; making it again")
    found = _found(folder, range(count), again)
  began, tokens, made = time.perf_counter(), 0, 0
  try:
    watch.step(Progress(len(found), count, 0, 0, 0.0))
    for i in range(count):
      if i in found:
        continue
      shard = make(i)
      seconds = time.perf_counter() - began
      found[i] = shard
      if folder:
        _write(_file(folder, i), lambda file, i=i: _pack(file, i, found[i]))
        meta = {"format": FORMAT, "settings": settings, "shards": count}
        meta |= {"done": len(found), "seconds": round(before + seconds, 3)}
        _write_meta(folder, meta | tell(list(found.values())))
      made, tokens = made + 1, tokens + int(shard["count"].sum())
      watch.step(Progress(len(found), count, made, tokens, seconds))
  except KeyboardInterrupt:
    if folder:
      kept = f"{len(found)} of {count} shards are in {folder}"
      watch.note(f"{kept}; the same settings go on from there")
    raise
  return [found[i] for i in range(count)]


def _found(folder, numbers, note):
  """{number: shard} of those that are there, the same in every process."""
  read = lambda some: {
    i: shard
    for i in some
    if (shard := _read(_file(folder, i), note)) is not None
  }
  found = read(numbers) if multihost.first() else {}
  there = multihost.same(list(found))
  if not multihost.first():
    found = read(there)
    if list(found) != there:
      raise UserError(
        f"the first process finds {len(there)} shards in {folder}, this one"
        f" {len(found)}: --multihost needs a folder that every process sees"
      )
  return found


def load(folder):
  """Return the shards that a folder holds, complete or not.

  Raises:
    UserError: it is no such folder, holds none, or one is damaged.
  """
  folder = Path(folder)
  if not (folder / _META).is_file():
    raise UserError(f"{folder} holds no sampled data: it has no {_META}")
  numbers = sorted(map(_number, folder.glob(f"shard-{'[0-9]' * 5}.npz")))
  problems = []
  found = [_read(_file(folder, i), problems.append) for i in numbers]
  if problems:
    raise UserError(f"{problems[0]}; delete it, and it will be made again")
  if not found:
    raise UserError(f"{folder} holds no shard yet; let its first one end")
  return found


def finished(root):
  """Yield (folder, settings) of each set of shards below root that is whole."""
  for path in sorted(Path(root).glob(f"*/{_META}")) if root else ():
    try:
      meta = json.loads(path.read_text())
      whole = meta["format"] == FORMAT and meta["done"] == meta["shards"]
      found = meta["settings"] if whole else None
    except (OSError, ValueError, TypeError, KeyError):
      continue  # of a run that was killed while it began
    if isinstance(found, dict):
      yield path.parent, found


def _file(folder, i):
  return folder / f"shard-{i:05d}.npz"


def _number(path):
  return int(path.stem.removeprefix("shard-"))


def _pack(file, i, arrays):
  np.savez(file, **arrays, sha256=np.array(_digest(i, arrays)))


def _digest(i, arrays):
  """Of the shard's number too: a renamed file is a damaged one."""
  digest = hashlib.sha256(str(i).encode())
  for key, x in sorted(arrays.items()):
    digest.update(f"{key} {x.dtype.str} {x.shape}".encode())
    digest.update(np.ascontiguousarray(x).tobytes())
  return digest.hexdigest()


def _read(path, note):
  """The arrays of a file; None where there is none or it is damaged."""
  try:
    with np.load(path, allow_pickle=False) as file:
      arrays = dict(file)
    if arrays.pop("sha256") == _digest(_number(path), arrays):
      return arrays
    reason = "its checksum differs"
  except FileNotFoundError:
    return None
  # all that a cut or overwritten archive has been seen to raise
  except (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    RuntimeError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
  ) as e:
    reason = " ".join(str(e).split()) or type(e).__name__
  note(f"{path} is damaged ({reason})")
  return None


def _seconds(folder):
  """What the shards so far have taken; the file is for people, made anew."""
  try:
    return float(json.loads((folder / _META).read_text())["seconds"])
  except (OSError, ValueError, TypeError, KeyError):
    return 0.0


def _write_meta(folder, meta):
  text = json.dumps(meta, indent=2, ensure_ascii=False) + "\n"
  _write(folder / _META, lambda file: file.write(text.encode()))


def _write(path, fill):
  """Write a file so that it is there whole or not at all."""
  if not multihost.first():
    return
  part = path.with_name(f".{path.name}.{os.getpid()}.part")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "wb") as file:
      fill(file)
      file.flush()
      os.fsync(file.fileno())
    os.replace(part, path)
  except OSError as e:
    raise UserError(
      f"cannot write {path}: {e.strerror or e}; free space there or keep the"
      " data elsewhere"
    ) from e
  finally:
    with contextlib.suppress(OSError):
      part.unlink()


@contextlib.contextmanager
def shown(out, what):
  """Give a `Watch` that tells of progress on a rich console.

  On a terminal that is a bar with tokens a second and the time left, else a
  line a minute.
  """
  columns = (
    "{task.description}",
    rich.progress.BarColumn(),
    "{task.fields[told]}",
  )
  bar = rich.progress.Progress(
    *columns, console=out, transient=True, disable=not out.is_terminal
  )
  task = bar.add_task(what, told="")
  last = time.perf_counter()

  def step(now):
    nonlocal last
    told = f"{now.done} of {now.total} shards"
    if now.made:
      told += (
        f", {now.tokens / now.seconds:,.0f} tokens/s, {_clock(now.left)} left"
      )
    bar.update(task, completed=now.done, total=now.total, told=told)
    due = time.perf_counter() - last > 60 or now.done == now.total
    if due and not out.is_terminal:
      out.print(f"{what}: {told}", soft_wrap=True)
      last = time.perf_counter()

  note = lambda line: out.print(line, style="dim", soft_wrap=True)
  with bar:
    yield Watch(note, step)


def _clock(seconds):
  minutes, seconds = divmod(round(seconds), 60)
  return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
