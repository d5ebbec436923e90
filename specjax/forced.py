"""One text under both models: what the draft thinks of the target's tokens.

No speculative decoding: the text is plain decoding's, both models are fed it,
and log p and log q of its tokens are all that the predictor needs. A draft
whose q depends on the text alone, a plain language model, takes one pass; any
other is asked for a proposal at every place, with the text as its draws; a
draft that reads the target's features gets those of the text.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import loop, multihost, reach, sampling, types
from specjax.cache import prefill, prefill_taps
from specjax.drafters import lm

ROWS = 64  # tokens a target call of the pass, all rows together


class Text(NamedTuple):
  """What plain decoding made of some requests. Rows are independent."""

  tokens: jax.Array  # [B, S] int32, prompt then answer
  prompt_length: jax.Array  # [B] int32, >= 1
  length: jax.Array  # [B] int32, prompt and answer
  sampling: types.Sampling  # fields [B], as it was decoded


def text(request, output, slots):
  """Return the `Text` of a request and what `autoregressive` made of it."""
  prompt, length = np.asarray(request.prompt), np.asarray(request.length)
  tokens = np.zeros((len(prompt), slots), np.int32)
  width = min(prompt.shape[1], slots)
  tokens[:, :width] = prompt[:, :width]
  for row, n in enumerate(output.length):
    at = np.s_[row, length[row] : length[row] + n]
    tokens[at] = output.tokens[row, :n]
  return Text(tokens, length, length + output.length, request.sampling)


def windows(along, K):
  """[B, N] by position -> [B, N, K] by [start, depth], -inf behind the end."""
  return np.stack([reach.by_start(x[:, None], K, -np.inf) for x in along])


def of_model(
  target, params, draft, draft_params, text, samplings, *, ids=None, track=None
):
  """Feed a text to a target and to a draft that is a plain language model.

  Args:
    target, draft: `Target`s; params, draft_params: theirs. With draft None
      only log p is found, and there are no samplings.
    text: a `Text`.
    samplings: list of the draft's own `Sampling`s, fields [B]: temperatures and
      truncations to compare on the same logits.
    ids: the token of each of the draft's logits, None: 0, 1, 2, ...
    track: wraps the list of chunks, for a progress bar.

  Returns:
    log_p [B, N], and for each sampling (log_q [B, N], alpha [B, N]).
  """
  B, S = text.tokens.shape
  width = max(ROWS // B, 1)
  most = int((text.length - text.prompt_length).max())
  state = _begin(target, draft, params, draft_params, text)
  samplings = [loop.of_draft(x) for x in samplings]
  ids = None if ids is None else np.array(ids, np.int32)
  found = []
  chunks = range(0, most, width)
  for at in track(chunks) if track else chunks:
    state, part = _chunk(
      target,
      draft,
      params,
      draft_params,
      text,
      state,
      samplings,
      ids,
      np.int32(at),
      width=width,
    )
    found.append(multihost.fetch(part))
  join = lambda *parts: np.concatenate(parts, 1)[:, :most]
  log_p, drafts = jax.tree.map(join, *found)
  # the text was drawn from p: where a pass of another width rounds a token of
  # it away, by a flipped argmax or at the edge of a truncation, p is unknown
  return np.where(np.isneginf(log_p), 0, log_p), drafts


class _State(NamedTuple):
  cache: object
  draft_cache: object
  history: types.History | None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begin(target, draft, params, draft_params, text):
  """Caches that hold all but the prompt's last token."""
  history = None
  if sampling.needs_history(text.sampling):
    begin = jax.vmap(sampling.begin, (0, 0, None))
    history = begin(text.tokens, text.prompt_length, target.vocab_size)
  cache = prefill(target, params, text.tokens, text.prompt_length)
  if draft is None:
    return _State(cache, None, history)
  known = lm.known(draft, text.tokens)
  draft_cache = prefill(draft, draft_params, known, text.prompt_length)
  return _State(cache, draft_cache, history)


@functools.partial(
  jax.jit, static_argnums=(0, 1), static_argnames="width", donate_argnums=5
)
def _chunk(
  target,
  draft,
  params,
  draft_params,
  text,
  state,
  samplings,
  ids,
  at,
  *,
  width,
):
  """The next `width` answer tokens, `at` behind the prompt."""
  B, S = text.tokens.shape
  rows = jnp.arange(B)[:, None]
  places = (text.prompt_length + at - 1)[:, None] + jnp.arange(width)
  real = places + 1 < text.length[:, None]  # [B, width]
  fed = text.tokens[rows, jnp.minimum(places, S - 1)]
  following = text.tokens[rows, jnp.minimum(places + 1, S - 1)]
  where = jnp.where(real, places, S)
  hidden, _, cache = target.apply(params, fed, where, state.cache)
  logits = target.unembed(params, hidden)  # [B, width, V]
  p, history = _laws(logits, text.sampling, state.history, following, real)
  log_p = jnp.log(jnp.take_along_axis(p, following[..., None], -1)[..., 0])
  if draft is None:
    return _State(cache, None, history), (log_p, [])

  known = lm.known(draft, fed)
  hidden, _, draft_cache = draft.apply(
    draft_params, known, where, state.draft_cache
  )
  logits = draft.unembed(draft_params, hidden)
  found = [judged(p, logits, following, own, ids) for own in samplings]
  return _State(cache, draft_cache, history), (log_p, found)


def judged(p, logits, following, own, ids=None):
  """What p makes of a draft at each position.

  Args:
    p: [B, T, V] the target's laws.
    logits: [B, T, Vq] the draft's; following: [B, T] the text's next tokens.
    own: the draft's `Sampling`, fields [B].
    ids: [Vq] the token of each of the draft's logits, None: 0, 1, 2, ...

  Returns:
    log q of those tokens and alpha = sum min(p, q), [B, T].
  """
  logits = logits[..., : p.shape[-1]]
  q_ids = jnp.arange(logits.shape[-1]) if ids is None else ids
  its_p = p[..., : logits.shape[-1]] if ids is None else p[..., ids]
  q = jax.vmap(jax.vmap(sampling.probabilities, (0, None)))(logits, own)
  q = jnp.where(q > 0, q, 0)  # where q is not finite nothing is accepted
  is_next = q_ids == following[..., None]  # [B, T, Vq]
  log_q = jnp.log(jnp.where(is_next, q, 0).sum(-1))
  return log_q, jnp.minimum(its_p, q).sum(-1)


def _laws(logits, ask, history, following, real):
  """p [B, width, V] at each position, and the history behind the last."""
  if history is None:
    law = jax.vmap(jax.vmap(sampling.probabilities, (0, None)))
    return law(logits, ask), None
  V = logits.shape[-1]
  more = jax.vmap(sampling.extend)(history, jnp.where(real, following, V))
  law = jax.vmap(jax.vmap(sampling.probabilities, (0, None, 0)), (0, 0, 0))
  first = jax.tree.map(lambda x: x[:, :-1], more)
  return law(logits, ask, first), jax.tree.map(lambda x: x[:, -1], more)


def features(target, params, text, layers):
  """Return what layers of a target make of a text, None of no layers.

  Returns:
    taps [B, S, F, D] of each row's tokens but the last, as in `Drafter.init`.
  """
  if not layers:
    return None
  return _features(target, layers, params, text.tokens, text.length)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _features(target, layers, params, tokens, length):
  return prefill_taps(target, params, tokens, length, layers)[1]


def of_drafter(
  drafter, draft_params, text, ask, *, num_draft, own=None, taps=None
):
  """Ask a drafter for a proposal at every place of a text.

  It draws what the text says, and the text is then committed token by token.

  Args:
    ask: the draft's own `Sampling`, fields [B].
    num_draft: K.
    own: [V] the draft's index of each token of the vocabulary, by default the
      token itself; any for a token that it does not know, whose q is 0.
    taps: `features` of the text, for a drafter that reads some.

  Returns:
    log_q [B, N, K], -inf where nothing is drafted.
  """
  most = int((text.length - text.prompt_length).max())
  ask = loop.of_draft(ask)
  log_q = _replay(
    *(drafter, draft_params, text, ask, own, taps),
    num_draft=num_draft,
    most=most,
  )
  return np.asarray(log_q)


@functools.partial(
  jax.jit, static_argnums=0, static_argnames=("num_draft", "most")
)
def _replay(drafter, draft_params, text, ask, own, taps, *, num_draft, most):
  (B, S), K = text.tokens.shape, num_draft
  rows = jnp.arange(B)
  state = drafter.init(draft_params, text.tokens, text.prompt_length, taps, S)

  def step(s, carry):
    state, found = carry
    length = text.prompt_length + s
    at = length[:, None] + jnp.arange(K + 1)
    ahead = text.tokens[rows[:, None], jnp.minimum(at, S - 1)]  # [B, K + 1]
    draws = ahead if own is None else own[ahead]
    noise = types.Noise(lambda i, q: draws[:, i], None, None)
    context = types.Context(text.tokens, length, ask, K)
    proposal, state = drafter.propose(draft_params, state, context, noise)
    i = jnp.arange(K)
    q = proposal.probs[rows[:, None], i, ahead[:, :K]]
    real = (i < proposal.length[:, None]) & (at[:, :K] < text.length[:, None])
    log_q = jnp.where(real & (q > 0), jnp.log(q), -jnp.inf)
    one = jnp.ones(B, jnp.int32)
    fed = jnp.minimum(length - 1, S - 1)  # what a round would feed first
    known = None if taps is None else taps[rows, fed][:, None]
    outcome = types.Outcome(ahead[:, :1], one, length, known)
    state = drafter.commit(draft_params, state, outcome)
    return state, found.at[:, s].set(log_q.astype(jnp.float32))

  found = jnp.zeros((B, most, K), jnp.float32)
  return lax.fori_loop(0, most, step, (state, found))[1]
