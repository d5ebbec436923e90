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
  repetition_penalty=1.0,
  presence_penalty=0.0,
  frequency_penalty=0.0,
  min_new_tokens=0,
  bias=None,
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
    temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
      frequency_penalty: see `sampling.probabilities`.
    min_new_tokens: no stop id before so many tokens.
    bias: [V] or [rows, V] added to the logits, -inf bans; see `bias_of`.
    stop_ids: at most STOP_IDS ids, any of which ends a row.
    width: columns of the padded prompt, by default the longest prompt's.
    batch: rows, by default len(prompts); the rest ask for nothing.

  Raises:
    ValueError: an empty prompt, or a value outside its range.
  """
  values = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
  penalties = dict(
    repetition_penalty=repetition_penalty,
    presence_penalty=presence_penalty,
    frequency_penalty=frequency_penalty,
  )
  check(**values, **penalties, min_new_tokens=min_new_tokens, max_new=max_new)
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
  rows = [np.array(row, np.int32) for row in [*prompts, *([[0]] * spare)]]
  hashes = [zlib.crc32(row.tobytes()) for row in rows]

  def fill(x, dtype, rest):
    x = np.broadcast_to(np.asarray(x, dtype), (len(prompts),))
    return np.concatenate([x, np.full(spare, rest, dtype)])

  stops = [*stop_ids, *([-1] * (types.STOP_IDS - len(stop_ids)))]
  stops = np.array(stops, np.int32)
  return types.Request(
    prompt=_padded(rows, width),
    length=np.array([len(row) for row in rows], np.int32),
    key=_keys(fill(seed, np.uint32, 0), np.array(hashes, np.uint32)),
    sampling=types.Sampling(
      temperature=fill(temperature, np.float32, 0),
      top_k=fill(top_k, np.int32, 0),
      top_p=fill(top_p, np.float32, 1),
      min_p=fill(min_p, np.float32, 0),
      bias=_bias(bias, len(prompts), spare),
      penalties=_penalties(penalties.values(), fill),
      minimum=_minimum(min_new_tokens, stops, fill),
    ),
    stop_ids=stops,
    max_new=fill(max_new, np.int32, 0),
  )


def _padded(rows, width):
  """The prompts as one array [B, width], by default as wide as the longest."""
  most = max(map(len, rows))
  width = width or most
  if width < most:
    raise ValueError(f"a prompt of {most} does not fit width {width}")
  prompt = np.zeros((len(rows), width), np.int32)
  for i, row in enumerate(rows):
    prompt[i, : len(row)] = row
  return prompt


def _used(value, off):
  return (np.asarray(value) != off).any()


def _penalties(values, fill):
  """The `Penalties` of some values, None where all of them are off."""
  asked, off = types.Penalties(*values), types.Penalties(1, 0, 0)
  if not any(map(_used, asked, off)):
    return None
  return types.Penalties(
    *(fill(x, np.float32, y) for x, y in zip(asked, off, strict=True))
  )


def _minimum(tokens, stop_ids, fill):
  """The `Minimum` of a number of tokens, None where it is off."""
  if not _used(tokens, 0):
    return None
  tokens = fill(tokens, np.int32, 0)
  return types.Minimum(tokens, np.tile(stop_ids, (len(tokens), 1)))


def bias_of(vocab_size, values, banned=()):
  """Return the bias [V] of {token id: added logit} and some banned ids.

  Raises:
    ValueError: an id outside the vocabulary, or a value that is too large.
  """
  bias = np.zeros(vocab_size, np.float32)
  for token, value in [*values.items(), *((i, -np.inf) for i in banned)]:
    if not 0 <= token < vocab_size:
      raise ValueError(f"token id {token} is outside 0..{vocab_size - 1}")
    if value != -np.inf and not abs(value) <= _LARGE:
      raise ValueError(
        f"the bias of token {token} must be finite or -inf, within"
        f" +-{_LARGE:g}, got {value:g}"
      )
    bias[token] += value
  return bias


def _bias(bias, rows, spare):
  if bias is None:
    return None
  bias = np.asarray(bias, np.float32)
  bias = np.broadcast_to(bias, (rows, bias.shape[-1]))
  return np.concatenate([bias, np.zeros((spare, bias.shape[-1]), np.float32)])


def check(**values):
  """Raise ValueError, naming the value, where one is outside its range."""
  for name, value in values.items():
    rule, holds = _RULES.get(name, (None, None))  # any integer top_k will do
    x = np.asarray(value, float)
    if holds is not None and not (np.isfinite(x) & holds(x)).all():
      raise ValueError(f"{name} must be {rule}, got {value}")


_LARGE = 1e6  # with more, float32 logits come to their end
_WHOLE = 2**31 - 1
_small = lambda x: abs(x) <= _LARGE
_RULES = {
  "temperature": (
    f">= 0 and finite, up to {_LARGE:g}",
    lambda x: (x >= 0) & _small(x),
  ),
  "top_p": ("in (0, 1]", lambda x: (x > 0) & (x <= 1)),
  "min_p": ("in [0, 1]", lambda x: (x >= 0) & (x <= 1)),
  "repetition_penalty": (
    f"> 0 and finite, within {1 / _LARGE:g}..{_LARGE:g}",
    lambda x: (x >= 1 / _LARGE) & _small(x),
  ),
  "presence_penalty": (f"finite, within +-{_LARGE:g}", _small),
  "frequency_penalty": (f"finite, within +-{_LARGE:g}", _small),
  "min_new_tokens": (">= 0 and < 2^31", lambda x: (x >= 0) & (x <= _WHOLE)),
  "max_new": ("< 2^31", lambda x: x <= _WHOLE),
}


@jax.jit
@jax.vmap
def _keys(seed, prompt_hash):
  return jax.random.fold_in(jax.random.key(seed), prompt_hash)
