"""Why a token of speculation is not that of plain decoding.

The two feed the target different numbers of tokens at once, and numbers that
are added in another order are rounded otherwise. A token whose runner-up is as
close as that may change; anything else is a fault. So at the first difference,
where the texts before are still the same, both passes are made again.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax import sampling

# By how many units in the last place of the largest logit the passes may
# differ and still be called rounding. Thirty layers of SmolLM2-135M on a CPU
# differ by at most 20 in float32 (5e-5 of 25) and 4.2 in bfloat16 (0.8 of 23).
ROUNDING = {"float32": 32, "bfloat16": 6, "float16": 6}


class Mismatch(NamedTuple):
  """The first difference of an answer, and what the passes say there."""

  row: int
  place: int  # of the token in the answer, from 0
  plain: int  # the token, -1: the answer had ended
  speculative: int
  gap: float  # logits, see `_gap`
  difference: float  # the largest of |logits of one pass - of the other|
  ulp: float  # eps of the weights' dtype times the largest |logit|
  reproduced: bool  # the passes made again draw these two tokens
  tie: bool  # rounding explains it; else it is a fault


def explain(target, params, ask, outputs, places, *, slots, num_draft, dtype):
  """Return the `Mismatch` of each row that has one.

  Args:
    target: a `Target`; params: its parameters.
    ask: the `Request`; outputs: (plain, speculative) `Output`s of it.
    places: {row: place of its first difference}.
    slots, num_draft: as they were decoded with.
    dtype: of weights and cache, which says what rounding is.
  """
  given, (plain, other) = (target, params, ask), outputs
  narrow = _one_at_a_time(*given, plain, places, slots)
  wide = _as_verified(*given, other, places, slots, num_draft)
  return [
    _explain(
      target, ask, outputs, dtype, row, t, narrow.get(row), wide.get(row)
    )
    for row, t in places.items()
  ]


def _text(ask, output, slots):
  """Prompt and answer of each row as one array [B, slots], 0 behind."""
  text = np.zeros((len(ask.length), slots), np.int32)
  for row, length in enumerate(ask.length):
    answer = output.tokens[row, : output.length[row]]
    text[row, :length] = ask.prompt[row, :length]
    text[row, length : length + len(answer)] = answer
  return text


def _one_at_a_time(target, params, ask, plain, places, slots):
  """{row: logits [V] at its place}, fed as plain decoding feeds."""
  text, rows = _text(ask, plain, slots), np.arange(len(ask.length))
  cache = _prefill(target, params, text, ask.length)
  found = {}
  for t in range(max(places.values()) + 1):
    at = np.where(t < plain.length, ask.length - 1 + t, slots)
    fed = text[rows, np.minimum(at, slots - 1)]
    logits, cache = _feed(target, params, fed[:, None], at[:, None], cache)
    found |= {row: logits[row, 0] for row in places if places[row] == t}
  return found


def _as_verified(target, params, ask, other, places, slots, num_draft):
  """The same, fed as the rounds of a speculative run fed: K + 1 at once.

  What was drafted and rejected is not known; behind it the next tokens of the
  text stand in, which the place before cannot see.
  """
  text, rows = _text(ask, other, slots), np.arange(len(ask.length))[:, None]
  cache = _prefill(target, params, text, ask.length)
  before, found = np.zeros_like(ask.length), {}
  for i in range(int(other.stats.steps)):
    running = before < other.length
    first = np.where(running, ask.length - 1 + before, slots)
    at = first[:, None] + np.arange(num_draft + 1)
    fed = text[rows, np.minimum(at, slots - 1)]
    logits, cache = _feed(target, params, fed, at, cache)
    emitted = (other.round == i).sum(1)
    for row, t in places.items():
      if before[row] <= t < before[row] + emitted[row]:
        found[row] = logits[row, t - before[row]]
    before = before + emitted
  return found


@functools.partial(jax.jit, static_argnums=0)
def _prefill(target, params, text, length):
  return kv.prefill(target, params, text, length)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _feed(target, params, tokens, positions, cache):
  hidden, _, cache = target.apply(params, tokens, positions, cache)
  return target.unembed(params, hidden), cache


_law = jax.jit(sampling.probabilities)
_draw = jax.jit(sampling.draw)


def _explain(target, ask, outputs, dtype, row, place, narrow, wide):
  """The `Mismatch` of a row, from the logits [V] of both passes.

  Tokens can part by rounding if the logits of the passes differ (by no more
  than rounding does), and if either the passes made again draw these very
  tokens or a difference of that size closes the gap: it can lift one of two
  logits and lower the other, hence twice.
  """
  tokens = [
    int(x.tokens[row, place]) if place < x.length[row] else -1 for x in outputs
  ]
  nothing = Mismatch(row, place, *tokens, np.inf, np.inf, 0.0, False, False)
  if narrow is None or wide is None or min(tokens) < 0:
    return nothing  # one of the two had ended
  values = jax.tree.map(lambda x: x[row], ask.sampling)
  key = jax.random.fold_in(ask.key[row], place)
  history = _history(target, ask, row, outputs[0].tokens[row, :place], values)
  laws = [_law(x, values, history) for x in (narrow, wide)]
  drawn = [int(_draw(p, key)) for p in laws]
  gap = _gap(narrow, values, history, key, tokens)
  difference = float(jnp.abs(narrow - wide).max())
  ulp = float(jnp.finfo(dtype).eps * jnp.abs(narrow).max())
  small = 0 < difference <= ROUNDING[str(np.dtype(dtype))] * ulp
  reproduced = drawn == tokens
  return nothing._replace(
    gap=gap,
    difference=difference,
    ulp=ulp,
    reproduced=reproduced,
    tie=bool(small and (reproduced or gap <= 2 * difference)),
  )


def _history(target, ask, row, answer, values):
  """The `History` behind an answer, None where no option looks at one."""
  if not sampling.needs_history(values):
    return None
  begin = sampling.begin(ask.prompt[row], ask.length[row], target.vocab_size)
  if not len(answer):
    return begin
  return jax.tree.map(lambda x: x[-1], sampling.extend(begin, answer))


def _gap(logits, values, history, key, tokens):
  """By how many logits the winner of a draw beats the worse of two tokens.

  At T = 0 the logits are compared, penalties included. Else what
  `sampling.draw` compares, times T: log p plus Gumbel noise of blocks, then of
  the tokens of one. Infinite for a token that the truncation leaves out.
  """
  if values.temperature <= 0:
    one, off = np.float32(1), np.float32(0)
    whole = values._replace(
      temperature=one, top_k=np.int32(0), top_p=one, min_p=off
    )
    score = _log(np.asarray(_law(logits, whole, history)))
    return float(score.max() - score[tokens].min())
  size = sampling._BLOCK
  p = np.asarray(_law(logits, values, history))
  blocks = np.pad(p, (0, -len(p) % size)).reshape(-1, size)
  outer, inner = jax.random.split(key)
  of_block = _log(blocks.sum(1)) + _gumbel(outer, len(blocks))
  noise, gaps = _gumbel(inner, size), []
  for token in tokens:
    block, place = divmod(token, size)
    of_token = _log(blocks[block]) + noise
    gaps.append(of_block.max() - of_block[block])
    gaps.append(of_token.max() - of_token[place])
  return float(values.temperature * max(gaps))


def _log(x):
  with np.errstate(divide="ignore"):
    return np.log(x)


def _gumbel(key, n):
  """The noise of `sampling.draw`."""
  return np.asarray(jax.random.gumbel(key, (n,), jnp.float32, mode="high"))
