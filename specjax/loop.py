"""What the decode loops share: their state, prefill, commit and read-out.

Invariant: `length` tokens of a row are committed and the target's cache is
valid for length - 1 of them; the last one has not been fed. So a prompt needs
no logits, and going back to a shorter prefix touches nothing.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import adaptive, checks, multihost, sampling, types
from specjax.cache import prefill_taps

SLOT_STEP = 256  # slots come in multiples of this: one program a multiple


class State(NamedTuple):
  """All that a decode loop carries. Rows never read each other's entries."""

  tokens: jax.Array  # [B, S] int32, prompt then answer
  prompt_length: jax.Array  # [B] int32
  length: jax.Array  # [B] int32, committed tokens, prompt included
  max_new: jax.Array  # [B] int32, a row's limit
  finish: jax.Array  # [B] int32, see types.FINISH_REASONS
  key: jax.Array  # [B] a request's key, never consumed, only folded
  sampling: types.Sampling  # fields [B]
  draft_sampling: types.Sampling | None  # fields [B], None in plain decoding
  stop_ids: jax.Array  # [STOP_IDS] int32
  cache: Any
  round: jax.Array  # [B, S] int32, the round that emitted each token
  accepted: jax.Array  # [B, S] bool, see types.Output
  overlap: jax.Array  # [B, S] float32, see types.Output
  history: types.History | None  # fields [B, ...], None where none is needed
  logprobs: types.Logprobs | None  # fields [B, S], None: not asked for
  draft: Any  # the drafter's state, None in plain decoding
  adaptive: adaptive.Adaptive | None  # None: each round drafts K tokens
  steps: jax.Array  # [] int32, target calls made


def num_slots(context, prompt_width, max_new_tokens):
  """Cache slots for a request: the multiple of SLOT_STEP that holds it.

  No more than the model's context needs, since a row ends there.
  """
  most = min(prompt_width + max_new_tokens, context)
  return -(-max(most, 1) // SLOT_STEP) * SLOT_STEP


def start(
  target,
  params,
  request,
  *,
  max_new_tokens,
  slots=None,
  draft=None,
  logprobs=False,
):
  """Place the prompts and fill the caches for all but their last token.

  Args:
    draft: a `types.Draft` to speculate with, None for plain decoding.
    logprobs: keep the emitted tokens' log-probabilities.
  """
  prompt = np.asarray(request.prompt, np.int32)
  length = np.asarray(request.length, np.int32)
  max_new = np.asarray(request.max_new, np.int32)
  slots = slots or num_slots(target.context, prompt.shape[1], max_new_tokens)
  checks.lengths(target, prompt, length, max_new, max_new_tokens, slots)
  checks.ids(target, prompt, length, request.stop_ids)
  if draft is not None:
    checks.draft(target, draft, length, max_new)
  # numpy, because a jnp.pad would compile once for every prompt width
  tokens = np.zeros((len(prompt), slots), np.int32)
  width = min(prompt.shape[1], slots)
  tokens[:, :width] = prompt[:, :width]
  ended = np.where(length >= target.context, types.CONTEXT, types.RUNNING)
  own = draft and of_draft(draft.sampling or request.sampling)
  state = State(
    tokens=tokens,
    prompt_length=length,
    length=length.copy(),
    max_new=max_new,
    finish=np.where(max_new == 0, types.LENGTH, ended).astype(np.int32),
    key=request.key,
    sampling=_arrays(request.sampling),
    draft_sampling=own,
    stop_ids=np.asarray(request.stop_ids, np.int32),
    cache=None,
    round=np.zeros_like(tokens),
    accepted=np.zeros(tokens.shape, bool),
    overlap=np.full(tokens.shape, np.nan, np.float32),
    history=None,
    logprobs=_no_logprobs(tokens.shape) if logprobs else None,
    draft=None,
    adaptive=draft and _adaptive(draft.policy, own.temperature),
    steps=np.int32(0),
  )
  features = draft.drafter.features if draft else ()
  state, taps = _prefill(target, features, params, state)
  if draft is None:
    return state
  return _prefill_draft(target, draft.drafter, draft.params, state, taps)


def _arrays(ask):
  """The sampling values as arrays of one dtype each, whatever they were."""
  one = types.Sampling(
    temperature=np.float32,
    top_k=np.int32,
    top_p=np.float32,
    min_p=np.float32,
    bias=np.float32,
    penalties=types.Penalties(np.float32, np.float32, np.float32),
    minimum=types.Minimum(np.int32, np.int32),
  )

  def convert(dtype, value):
    if isinstance(dtype, tuple):
      return value and type(value)(*map(convert, dtype, value))
    return None if value is None else np.asarray(value, dtype)

  return convert(one, ask)


def of_draft(ask):
  """A draft sees the temperature and truncation alone; the law is p's."""
  return _arrays(ask._replace(bias=None, penalties=None, minimum=None))


def _adaptive(policy, temperature):
  if policy is None:
    return None
  policy = adaptive.Policy(*(np.asarray(x, np.float32) for x in policy))
  return adaptive.Adaptive(policy, adaptive.begin(temperature))


def _no_logprobs(shape):
  nothing = lambda: np.full(shape, np.nan, np.float32)
  return types.Logprobs(nothing(), nothing())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefill(target, features, params, state):
  state = placed(target, state)
  fed = state.tokens, _fed(state)
  cache, taps = prefill_taps(target, params, *fed, features)
  if not sampling.needs_history(state.sampling):
    return placed(target, state._replace(cache=cache)), taps
  begin = jax.vmap(sampling.begin, (0, 0, None))
  history = begin(state.tokens, state.length, target.vocab_size)
  return placed(target, state._replace(cache=cache, history=history)), taps


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefill_draft(target, drafter, draft_params, state, taps):
  slots = state.tokens.shape[1]
  draft = drafter.init(draft_params, state.tokens, _fed(state), taps, slots)
  return placed(target, state._replace(draft=draft))


def placed(target, state):
  """The state where its target wants it, the same from round to round."""
  if target.place is None:
    return state
  rest = dict(stop_ids=state.stop_ids, steps=state.steps)  # not by the row
  nothing = dict.fromkeys(rest)
  return target.place(state._replace(**nothing))._replace(**rest)


def _fed(state):
  """Lengths [B] for the prefill: a row that has ended needs none."""
  return jnp.where(state.finish == types.RUNNING, state.length, 1)


def positions(state, width):
  """Positions [B, width] from each row's last token on.

  A frozen row's lie outside the cache, where nothing is written.
  """
  running = state.finish == types.RUNNING
  first = jnp.where(running, state.length - 1, state.tokens.shape[1])
  return first[:, None] + jnp.arange(width)


def places(state, before, emitted, width):
  """Indices rows, at of the emitted ones of a round's [B, width] tokens.

  They follow the `before` [B] tokens of their row; those that were not emitted
  lie outside, where nothing is written.
  """
  i = jnp.arange(width)
  S = state.tokens.shape[1]
  at = jnp.where(i < emitted[:, None], before[:, None] + i, S)
  return jnp.arange(len(at))[:, None], at


def commit(target, state, tokens, count, broken):
  """Append tokens [B, N] to each row, up to the first event that ends it.

  Events in token order: a stop id (kept, the last one), max_new, the end of
  the context; then, if the target's law behind them is broken, that.

  Args:
    tokens: [B, N] candidates, the first `count` [B] of them real.
    broken: [B] whether the law of the token behind them is not finite.

  Returns:
    The state, one round older, and how many tokens each row emitted [B].
  """
  N = tokens.shape[1]
  running = state.finish == types.RUNNING
  i = jnp.arange(N)
  is_stop = (tokens[:, :, None] == state.stop_ids).any(2)  # [B, N]
  stopped_before = jnp.cumsum(is_stop, 1) - is_stop > 0
  left = state.max_new - (state.length - state.prompt_length)
  room = jnp.minimum(left, target.context - state.length)
  count = jnp.minimum(count, room) * running
  keep = (i < count[:, None]) & ~stopped_before
  emitted = keep.sum(1).astype(jnp.int32)
  length = state.length + emitted

  finish = jnp.where(broken, types.NONFINITE, types.RUNNING)
  finish = jnp.where(length >= target.context, types.CONTEXT, finish)
  finish = jnp.where(emitted >= left, types.LENGTH, finish)
  finish = jnp.where((keep & is_stop).any(1), types.STOP, finish)
  rows, at = places(state, state.length, emitted, N)  # keep is a prefix
  history = state.history
  if history is not None:
    ids = jnp.where(keep, tokens, target.vocab_size)
    history = history._replace(
      counts=history.counts.at[rows, ids].add(1, mode="drop"),
      generated=history.generated + emitted,
    )
  return state._replace(
    tokens=state.tokens.at[rows, at].set(tokens, mode="drop"),
    round=state.round.at[rows, at].set(state.steps, mode="drop"),
    length=length,
    history=history,
    finish=jnp.where(running, finish, state.finish).astype(jnp.int32),
    steps=state.steps + 1,
  ), emitted


def cut(state, keep):
  """End rows behind a token that the host chose, with the reason "stop".

  Compiles nothing. What the loop had made behind it is not counted.

  Args:
    keep: {row: tokens of its answer to keep}.
  """
  rows = state.length, state.finish, state.prompt_length
  length, finish, prompt_length = map(np.array, multihost.fetch(rows))
  for row, count in keep.items():
    length[row] = prompt_length[row] + count
    finish[row] = types.STOP
  # the devices that they were on; on one, no call of `advance` can tell
  mesh = isinstance(state.length.sharding, jax.sharding.NamedSharding)
  put = lambda x: jax.device_put(x, state.length.sharding if mesh else None)
  return state._replace(length=put(length), finish=put(finish))


def output(state, max_new_tokens):
  """Read what is committed so far back to the host, as an `Output`."""
  state = multihost.fetch(
    state._replace(
      cache=None,
      key=None,
      sampling=None,
      draft_sampling=None,
      stop_ids=None,
      history=None,
      draft=None,
      adaptive=None,
    )
  )
  t = np.arange(max_new_tokens)  # [N]
  count = state.length - state.prompt_length
  real = t < count[:, None]  # [B, N]
  at = np.minimum(state.prompt_length[:, None] + t, state.tokens.shape[1] - 1)
  answer = lambda x, rest: np.where(real, np.take_along_axis(x, at, 1), rest)
  return types.Output(
    tokens=answer(state.tokens, -1),
    length=count,
    finish_reason=state.finish,
    logprobs=state.logprobs
    and types.Logprobs(
      *(answer(x, np.float32(np.nan)) for x in state.logprobs)
    ),
    round=answer(state.round, -1),
    accepted=answer(state.accepted, False),
    overlap=answer(state.overlap, np.float32(np.nan)),
    stats=types.Stats(steps=state.steps),
  )
