"""Checkpoints of a run: a folder each, there whole or not at all (Orbax).

A save goes on in the background; it shows its failure at the next call. Old
checkpoints are removed once a newer one is complete, never before (B36).
"""

import contextlib
import logging
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from specjax import multihost
from specjax.errors import UserError

FORMAT = 1


@contextlib.contextmanager
def opened(folder, keep):
  """Give the Orbax manager of a folder, which is made if need be.

  What a killed process left half-written is removed. Leaving waits for the
  last save, but not on Ctrl-C.

  Args:
    keep: the newest so many checkpoints stay.

  Raises:
    UserError: the folder, or what was being saved, cannot be written.
  """
  # they log each failure at length, before it is raised or after
  for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  with _quiet(), _opened(folder, keep) as manager:
    yield manager


@contextlib.contextmanager
def _opened(folder, keep):
  with _told(folder):
    manager = ocp.CheckpointManager(
      Path(folder).absolute(),
      options=ocp.CheckpointManagerOptions(
        preservation_policy=preservation_policy.LatestN(keep),
        enable_async_checkpointing=True,
        cleanup_tmp_directories=True,
      ),
    )
  try:
    yield manager
  except Exception:
    # its own error would hide this one
    with contextlib.suppress(Exception):
      manager.close()
    raise
  with _told(folder):
    manager.close()


@contextlib.contextmanager
def _quiet():
  """Keep from the screen what is behind an error that is told in one line."""
  hook = sys.unraisablehook

  def told(unraisable):
    # reads and writes that are under way when another one fails report to a
    # loop that Orbax has closed by then, a traceback each
    if "Event loop is closed" not in str(unraisable.exc_value):
      hook(unraisable)

  sys.unraisablehook = told
  yield
  # not where something was raised: some of them end later
  sys.unraisablehook = hook


def save(manager, number, tree, meta):
  """Begin to save; return once the arrays may be donated.

  Args:
    number: larger than any before.
    tree: of arrays; meta: JSON-like.

  Raises:
    UserError: this save cannot begin, or the one before has failed.
  """
  args = ocp.args.Composite(
    tree=ocp.args.StandardSave(tree),
    meta=ocp.args.JsonSave({"format": FORMAT, "sum": _sum(tree), **meta}),
  )
  with _told(manager.directory):
    manager.wait_until_finished()
    manager.save(number, args=args, force=True)


def wait(manager):
  """Wait until the last save is on disk; raise UserError if it failed."""
  with _told(manager.directory):
    manager.wait_until_finished()


@contextlib.contextmanager
def _told(folder):
  """Turn what Orbax and TensorStore raise into one line."""
  try:
    yield
  except Exception as e:  # of many kinds, background threads' too
    raise UserError(
      f"cannot write a checkpoint into {folder}: {_short(e)}; the ones before"
      " it are whole: free space there and type the same command again"
    ) from e


def _short(error):
  """Of a long chain of places, the last, which says what is wrong."""
  text = " ".join(str(error).split()) or type(error).__name__
  return text if len(text) < 200 else f"... {text[-200:]}"


def numbers(folder):
  """Return the numbers of a folder's whole checkpoints, which is not opened."""
  found = Path(folder).glob("[0-9]*")
  return sorted(int(path.name) for path in found if path.name.isdigit())


def latest(manager):
  """Return the number of the newest whole checkpoint, None if there is none."""
  return manager.latest_step()


def meta(manager, number):
  """Return what was saved beside the arrays.

  Raises:
    UserError: it is missing, damaged or of another format.
  """
  with _damage(manager, number):
    args = ocp.args.Composite(meta=ocp.args.JsonRestore())
    found = manager.restore(number, args=args).meta
  if found.get("format") != FORMAT:
    raise UserError(
      f"{manager.directory / str(number)} is a checkpoint of format"
      f" {found.get('format')}, this program reads {FORMAT}; use the version"
      " that wrote it, or another --workdir"
    )
  return found


def restore(manager, number, like):
  """Return a saved tree, in arrays that may be donated.

  It may have been saved on any other number of devices (B35).

  Args:
    like: a tree of `jax.ShapeDtypeStruct`s: what it has to be, and where; those
      without a sharding come to lie on the default device.

  Raises:
    UserError: it is damaged, or an array is missing, left over, or of another
      shape or dtype (B17), by name.
  """
  folder = manager.directory / str(number)
  here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=getattr(x, "sharding", None) or here
    ),
    like,
  )
  reader = contextlib.closing(ocp.StandardCheckpointer())
  with _damage(manager, number), reader as open_reader:
    held = open_reader.metadata(folder / "tree").item_metadata
    if held is None:  # it logs why, and returns
      raise ValueError("its arrays cannot be read")
  _same(_shapes(held.tree), _shapes(like), folder)
  with _damage(manager, number):
    args = ocp.args.Composite(tree=ocp.args.StandardRestore(like))
    tree = manager.restore(number, args=args).tree
  wanted = meta(manager, number)["sum"]
  with _damage(manager, number):
    if _sum(tree) != wanted:
      raise ValueError("its arrays are not what was saved")
  return tree


def _shapes(tree):
  """{path: shape and dtype}; tuples and fields have their names or numbers."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  name = lambda key: str(getattr(key, "name", getattr(key, "key", None)))
  path = lambda keys: "/".join(
    str(key.idx) if hasattr(key, "idx") else name(key) for key in keys
  )
  return {path(k): f"{list(x.shape)} {np.dtype(x.dtype)}" for k, x in leaves}


def _sum(tree):
  """A checksum of all bytes: Orbax reads a flipped bit as it stands."""
  found = 0
  for x in map(multihost.fetch, jax.tree.leaves(tree)):
    found = zlib.crc32(np.ascontiguousarray(x).view(np.uint8), found)
  return found


def _same(held, wanted, folder):
  for name in sorted({*held, *wanted}):
    found, asked = held.get(name, "nothing"), wanted.get(name, "nothing")
    if found != asked:
      raise UserError(
        f"{folder} does not fit: it has {found} as {name!r}, this run has"
        f" {asked}; take the config that it was saved with, or another"
        " --workdir"
      )


@contextlib.contextmanager
def _damage(manager, number):
  """Turn what reading a damaged checkpoint raises into what to do."""
  try:
    yield
  except UserError:
    raise
  except Exception as e:
    folder = manager.directory / str(number)
    others = [n for n in manager.all_steps() if n < number]
    then = "put it back, or name a new --workdir"  # its run has nothing else
    if others:
      then = f"delete that folder to go on from {max(others)}"
    raise UserError(
      f"the checkpoint {folder} is damaged ({_short(e)}); {then}"
    ) from e
