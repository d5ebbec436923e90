"""What the target makes of the training texts, computed once and kept.

A teacher's layers are most of a training step, and their outputs do not change:
with these at hand only its head is left to compute. They are kept as float16,
whose rounding (2^-11 of a value) is all that a run with them differs by; held
out texts are always judged with the target itself.
"""

import functools
import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import data, multihost, shards, step, trajectories
from specjax.errors import UserError

_ROWS = 64  # texts of a shard


class Hidden(NamedTuple):
  """The states of each text, real tokens alone, texts behind each other."""

  states: tuple  # of [N, 1 + F, D] float16, one for each `_ROWS` texts
  first: np.ndarray  # [M] int64, where a text begins in its array
  length: np.ndarray  # [M] int32, tokens that have states


def collect(root, teacher, found, *, features, length, batch, watch):
  """Return the `Hidden` of some texts, computed or found on disk.

  A state is the last hidden one, that the head reads, then the outputs of the
  layers that are asked for. A finished cache that has those layers and others
  will do: drafts that read some of its layers are compared without another
  pass.

  Args:
    root: where caches are; see `shards.collect`.
    teacher: a `load.Model`, its matrices whole.
    found: `Trajectories`; length: tokens of each that are fed at most.
    features: a tuple of layers.
    batch: rows of a pass; watch: a `shards.Watch`.

  Raises:
    UserError: the cache cannot be written, or a state is not finite in float16.
  """
  sizes = np.minimum(found.length, length).astype(np.int32)
  starts = range(0, len(sizes), _ROWS)
  settings = {
    "source": "hidden",
    "target": data.fingerprint(teacher),
    "features": list(features),
    "texts": _digest(found.tokens, sizes),
  }

  def shard(i):
    at = np.arange(starts[i], min(starts[i] + _ROWS, len(sizes)))
    return {
      "states": _states(teacher, found, sizes, at, features, batch),
      "count": sizes[at],
    }

  kept = _wider(root, settings, watch) or shards.collect(
    root, settings, len(starts), shard, tell=lambda _: {}, watch=watch
  )
  first = np.cumsum(sizes, dtype=np.int64) - sizes
  return Hidden(
    tuple(x["states"] for x in kept),
    first - first[np.arange(len(sizes)) // _ROWS * _ROWS],
    sizes,
  )


def _wider(root, settings, watch):
  """The shards of a finished cache with more layers than these, or None."""
  asked = settings["features"]
  for folder, other in shards.finished(root):
    has = other.get("features", [])
    if other == {**settings, "features": has} and set(asked) < set(has):
      watch.note(f"layers {asked} are read from those in {folder}")
      at = [0, *(1 + has.index(layer) for layer in asked)]
      return [
        {**shard, "states": shard["states"][:, at]}
        for shard in shards.load(folder)
      ]
  return None


def _states(teacher, texts, sizes, at, features, batch):
  """[N, 1 + F, D] of some rows."""
  wide = -(-int(sizes[at].max()) // _ROWS) * _ROWS  # few programs
  tokens, parts = trajectories.batch(texts, at, wide).tokens, []
  for i in range(0, len(at), batch):
    rows = np.arange(i, min(i + batch, len(at)))
    fed = tokens[np.resize(rows, batch)]
    found = _pass(teacher.target, teacher.params, fed, features)
    found = multihost.fetch(found)
    parts += [found[j, : sizes[at[r]]] for j, r in enumerate(rows)]
  found = np.concatenate(parts)
  if not np.isfinite(found).all():
    raise UserError(
      "a hidden state of the target is not finite in float16, so that it cannot"
      " be kept; train with --config.data.keep_hidden=False"
    )
  return found


def _digest(tokens, sizes):
  found = hashlib.sha256()
  for row, n in zip(tokens, sizes, strict=True):
    found.update(row[:n].astype("<i4").tobytes() + b"|")
  return found.hexdigest()


@functools.partial(jax.jit, static_argnums=(0, 3))
def _pass(target, params, tokens, features):
  hidden, taps = step.read(target, params, tokens, features)
  found = jnp.concatenate([hidden[:, :, None], taps], 2)
  return found.astype(jnp.float16)


def rows(kept, at, length):
  """Return [B, length, 1 + F, D] float16 of some texts, zeros behind each."""
  _, *shape = kept.states[0].shape
  found = np.zeros((len(at), length, *shape), np.float16)
  for out, row in zip(found, at, strict=True):
    first, n = kept.first[row], min(kept.length[row], length)
    out[:n] = kept.states[row // _ROWS][first : first + n]
  return found
