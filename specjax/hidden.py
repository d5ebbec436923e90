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


def collect(
  root, teacher, found, *, features, length, batch, watch, temperature=None
):
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
    temperature: of given texts; None: no `normalisers` are wanted.

  Raises:
    UserError: the cache cannot be written, or a state is not finite in float16.
  """
  sizes = np.minimum(found.length, length).astype(np.int32)
  count = -(-len(sizes) // _ROWS)
  of = {
    "target": data.fingerprint(teacher),
    "texts": _digest(found.tokens, sizes),
  }
  settings = {"source": "hidden", "features": list(features), **of}
  rows = lambda i: np.arange(len(sizes))[i * _ROWS : (i + 1) * _ROWS]

  def shard(i):
    states = _states(teacher, found, sizes, rows(i), features, batch)
    return {"states": states, "count": sizes[rows(i)]}

  keep = functools.partial(shards.collect, tell=lambda _: {}, watch=watch)
  parts = _wider(root, settings, watch) or keep(root, settings, count, shard)
  first = np.cumsum(sizes, dtype=np.int64) - sizes
  first -= first[np.arange(len(sizes)) // _ROWS * _ROWS]
  kept = Hidden(tuple(x["states"] for x in parts), first, sizes)
  if temperature is None:
    return kept
  own = np.where(np.isnan(found.temperature), temperature, found.temperature)
  own = own.astype("<f4")
  heat = hashlib.sha256(own.tobytes()).hexdigest()
  settings = {"source": "normalisers", "temperatures": heat, **of}

  def normalised(i):
    top, log_sum = _rest(teacher, kept, own, rows(i), batch)
    return {"top": top, "log_sum": log_sum, "count": sizes[rows(i)]}

  parts = keep(root, settings, count, normalised)
  each = tuple((x["top"], x["log_sum"]) for x in parts)
  return kept._replace(normalisers=each)


def _rest(teacher, kept, temperature, at, batch):
  """(top, log_sum) [N] each of some rows."""
  wide = _wide(kept.length[at])

  def run(rows):
    states, _ = take(kept, rows, wide)
    args = teacher.params, states[:, :, 0], temperature[rows]
    return _normalisers(teacher.target, *args)

  found = [
    [x[: kept.length[row]] for x in some]
    for row, some in _by_batch(at, batch, run)
  ]
  return tuple(map(np.concatenate, zip(*found, strict=True)))


def _by_batch(at, batch, run):
  """(row, what `run` makes of it) of some rows, a batch of them at a time."""
  for i in range(0, len(at), batch):
    rows = at[i : i + batch]
    found = multihost.fetch(run(np.resize(rows, batch)))
    for j, row in enumerate(rows):
      yield row, jax.tree.map(lambda x, j=j: x[j], found)


def _wide(sizes):
  """Positions that hold texts of some sizes: few different ones."""
  return -(-int(sizes.max()) // _ROWS) * _ROWS


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
  wide = _wide(sizes[at])

  def run(rows):
    tokens = trajectories.batch(texts, rows, wide).tokens
    return _pass(teacher.target, teacher.params, tokens, features)

  found = [x[: sizes[row]] for row, x in _by_batch(at, batch, run)]
  found = np.concatenate(found)
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
