"""What the target makes of the training texts, computed once and kept.

A teacher's layers are most of a training step, and their outputs do not change:
with these at hand only its head is left to compute; and of that, if laws are
not truncated, only the columns that a draft's trimmed head has. They are kept
as float16, whose rounding (2^-11 of a value) is all that a run with them
differs by; held out texts are always judged with the target itself.
"""

import functools
import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import (
  chunks,
  data,
  laws,
  multihost,
  shards,
  step,
  trajectories,
)
from specjax.errors import UserError

_ROWS = 64  # texts of a shard
_CHUNK = 32  # positions of a text that have logits at one time


class Hidden(NamedTuple):
  """The states of each text, real tokens alone, texts behind each other."""

  states: tuple  # of [N, 1 + F, D] float16, one for each `_ROWS` texts
  first: np.ndarray  # [M] int64, where a text begins in its array
  length: np.ndarray  # [M] int32, tokens that have states
  # (top, log_sum) [N] each, as states are; None: laws are truncated, or the
  # draft's head is whole
  normalisers: tuple | None = None


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


def normalised(root, teacher, found, kept, *, temperature, batch, watch):
  """Return a `Hidden` with what its laws' logits of some tokens lack.

  Args:
    kept: of `collect`, of the same texts; temperature: of given texts.
    root, teacher, found, batch, watch: see `collect`.
  """
  own = np.where(np.isnan(found.temperature), temperature, found.temperature)
  own = own.astype("<f4")
  settings = {
    "source": "normalisers",
    "target": data.fingerprint(teacher),
    "texts": _digest(found.tokens, kept.length),
    "temperatures": hashlib.sha256(own.tobytes()).hexdigest(),
  }

  def shard(i):
    at = np.arange(len(own))[i * _ROWS : (i + 1) * _ROWS]
    parts = []
    for rows in [at[j : j + batch] for j in range(0, len(at), batch)]:
      full = np.resize(rows, batch)
      wide = -(-int(kept.length[at].max()) // _ROWS) * _ROWS
      states, _ = take(kept._replace(normalisers=None), full, wide)
      args = teacher.params, states[:, :, 0], own[full]
      some = multihost.fetch(_normalisers(teacher.target, *args))
      parts += [
        [x[j, : kept.length[r]] for x in some] for j, r in enumerate(rows)
      ]
    top, log_sum = map(np.concatenate, zip(*parts, strict=True))
    return {"top": top, "log_sum": log_sum, "count": kept.length[at]}

  made = shards.collect(
    root,
    settings,
    len(kept.states),
    shard,
    tell=lambda _: {},
    watch=watch,
  )
  return kept._replace(
    normalisers=tuple((x["top"], x["log_sum"]) for x in made)
  )


@functools.partial(jax.jit, static_argnums=0)
def _normalisers(target, params, hidden, temperature):
  """`laws.Normaliser` [B, T] of hidden states, some positions at a time."""
  T = jnp.where(temperature > 0, temperature, 1)[:, None, None]

  def some(hidden):
    logits = target.unembed(params, hidden.astype(jnp.float32))
    largest = logits.max(-1, keepdims=True)
    ids = jnp.arange(logits.shape[-1])
    top = jnp.where(logits == largest, ids, ids[-1]).min(-1)
    return top, jax.nn.logsumexp(logits / T, axis=-1)

  found = jax.lax.map(some, chunks.split(hidden, _CHUNK))
  wide = lambda x: jnp.moveaxis(x, 0, 1).reshape(len(hidden), -1)
  return laws.Normaliser(*map(wide, found))


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


def take(kept, at, length):
  """What there is of some texts, zeros behind each.

  Returns:
    states [B, length, 1 + F, D] float16 and the `laws.Normaliser` [B, length],
    None where there are none.
  """
  states = _laid(kept, kept.states, at, length)
  if kept.normalisers is None:
    return states, None
  each = zip(*kept.normalisers, strict=True)
  return states, laws.Normaliser(*(_laid(kept, x, at, length) for x in each))


def _laid(kept, parts, at, length):
  """[B, length, ...] of some texts' parts of [N, ...] arrays."""
  _, *shape = parts[0].shape
  found = np.zeros((len(at), length, *shape), parts[0].dtype)
  for out, row in zip(found, at, strict=True):
    first, n = kept.first[row], min(kept.length[row], length)
    out[:n] = parts[row // _ROWS][first : first + n]
  return found
