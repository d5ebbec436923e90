"""Make a `Request` from lists of token ids and plain numbers."""

import zlib

import jax
import numpy as np

from specjax import types


def make(
  prompts,
  *,
  max_new,
  seed=0,
  temperature=0.0,
  top_k=0,
  top_p=1.0,
  min_p=0.0,
  stop_ids=(),
  width=None,
  batch=None,
):
  """Return a `Request`; every number may also be a sequence, one a row.

  A row's key is fold_in(key(seed), crc32 of its prompt's ids): the same seed
  and prompt give the same answer in any batch, different prompts get
  independent noise, and a prompt repeated with other seeds is resampled.

  Args:
    prompts: non-empty lists of token ids.
    max_new: most tokens to emit.
    stop_ids: at most STOP_IDS ids, any of which ends a row.
    width: columns of the padded prompt, by default the longest prompt's.
    batch: rows, by default len(prompts); the rest ask for nothing.

  Raises:
    ValueError: an empty prompt, or a value outside its range.
  """
  check(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
  if len(stop_ids) > types.STOP_IDS:
    raise ValueError(
      f"at most {types.STOP_IDS} stop ids, got {len(stop_ids)}: {stop_ids}"
    )
  for i, prompt in enumerate(prompts):
    if not len(prompt):
      raise ValueError(f"prompt {i} is empty")
  spare = (batch or len(prompts)) - len(prompts)
  if not len(prompts) or spare < 0:
    raise ValueError(f"{len(prompts)} prompts do not fit a batch of {batch}")
  seeds = np.asarray(seed)
  if not ((seeds >= 0) & (seeds < 2**32)).all():
    raise ValueError(f"seed must be in 0..2^32 - 1, got {seed}")
  rows = [*map(list, prompts), *([[0]] * spare)]
  B = len(rows)
  length = np.array([len(row) for row in rows], np.int32)
  width = width or length.max()
  if width < length.max():
    raise ValueError(f"a prompt of {length.max()} does not fit width {width}")
  prompt = np.zeros((B, width), np.int32)
  for i, row in enumerate(rows):
    prompt[i, : len(row)] = row

  def fill(x, dtype, rest):
    x = np.broadcast_to(np.asarray(x, dtype), (len(prompts),))
    return np.concatenate([x, np.full(spare, rest, dtype)])

  hashes = [zlib.crc32(row.tobytes()) for row in _ids(rows)]
  return types.Request(
    prompt=prompt,
    length=length,
    key=_keys(fill(seed, np.uint32, 0), np.array(hashes, np.uint32)),
    sampling=types.Sampling(
      temperature=fill(temperature, np.float32, 0),
      top_k=fill(top_k, np.int32, 0),
      top_p=fill(top_p, np.float32, 1),
      min_p=fill(min_p, np.float32, 0),
    ),
    stop_ids=np.array(
      [*stop_ids, *([-1] * (types.STOP_IDS - len(stop_ids)))], np.int32
    ),
    max_new=fill(max_new, np.int32, 0),
  )


def check(*, temperature, top_k, top_p, min_p):
  """Raise ValueError, naming the value, where one is outside its range."""
  del top_k  # any integer: <= 0 and >= V both mean off
  rules = (
    ("temperature", temperature, lambda x: x >= 0, ">= 0 and finite"),
    ("top_p", top_p, lambda x: (x > 0) & (x <= 1), "in (0, 1]"),
    ("min_p", min_p, lambda x: (x >= 0) & (x <= 1), "in [0, 1]"),
  )
  for name, value, holds, rule in rules:
    x = np.asarray(value, float)
    if not (np.isfinite(x) & holds(x)).all():
      raise ValueError(f"{name} must be {rule}, got {value}")


def _ids(rows):
  return [np.array(row, np.int32) for row in rows]


@jax.jit
@jax.vmap
def _keys(seed, prompt_hash):
  return jax.random.fold_in(jax.random.key(seed), prompt_hash)
