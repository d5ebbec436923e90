"""One round of speculation: propose, score, verify, sample, commit.

`round` is the body of the speculative loop and `keyed_noise` all of its
randomness, so that a test can put its own in place and sum over every outcome.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import adaptive, sampling, types, verify
from specjax.loop import commit, places, positions

# What a request's key is folded with for each use of a round; no token of an
# answer, whose number plain decoding folds with, ever has such a number.
_DRAFT, _ACCEPT, _NEXT = (np.uint32(2**32 - i) for i in (1, 2, 3))


def round(
  target,
  drafter,
  params,
  draft_params,
  state,
  noise,
  *,
  num_draft,
  verifier="block",
):
  """Propose, score, verify, sample the next token, commit.

  The target is called once, on the last committed token and the K drafted
  ones; what it emits has the law of plain decoding for every drafter
  (`verify.py`). Rejected tokens leave stale cache slots behind the row's
  length, which nothing sees.

  Args:
    target, drafter: `Target` and `Drafter`; params, draft_params: theirs.
    state: a `loop.State` whose `draft` is the drafter's.
    noise: a `Noise`, all the randomness that is used.
    num_draft: K >= 0.
    verifier: a function of `verify.py`, by its name.

  Returns:
    The state, one round older.
  """
  K = num_draft
  context = types.Context(
    state.tokens, state.length, state.draft_sampling, K, *rule(state)
  )
  proposal, draft = drafter.propose(draft_params, state.draft, context, noise)

  rows = jnp.arange(len(state.tokens))
  last = state.tokens[rows, state.length - 1]
  fed = jnp.concatenate([last[:, None], proposal.tokens], 1)  # [B, K + 1]
  judge = functools.partial(
    _judged, target, drafter.features, params, verifier, noise, state, proposal
  )
  found, cache = _narrowest(functools.partial(judge, fed), state, proposal)

  before = state.length
  count = found.accepted + ~found.broken
  state, emitted = commit(
    target, state._replace(cache=cache), found.tokens, count, found.broken
  )
  state = _mark(state, before, emitted, found.accepted, found.overlap)
  state = _learn(state, proposal, found.overlap, found.accepted, emitted)
  state = score(state, before, emitted, found.logprobs)
  outcome = types.Outcome(found.tokens, emitted, before, found.taps)
  return state._replace(draft=drafter.commit(draft_params, draft, outcome))


class _Judged(NamedTuple):
  """What the target makes of a draft, N tokens of a row being fed."""

  tokens: jax.Array  # [B, N] those kept, then the one drawn behind them
  accepted: jax.Array  # [B] int32, how many are kept
  broken: jax.Array  # [B] bool, the law behind them is not finite
  overlap: jax.Array  # [B, N] sum min(p, q) where a draft was tested, else NaN
  taps: jax.Array | None  # [B, N, F, D]
  logprobs: types.Logprobs | None  # [B, N] of the tokens, if they are kept


def rule(state):
  """`Context.more` and `Context.ask`, None where rows never stop drafting."""
  if state.adaptive is None:
    return None, None
  of = lambda function: functools.partial(function, *state.adaptive)
  running = state.finish == types.RUNNING  # or an ended row would ask for ever
  ask = of(adaptive.ask)
  return of(adaptive.decide), lambda i, survival: running & ask(i, survival)


def _learn(state, proposal, overlap, num_accepted, emitted):
  """What the round teaches a row about its draft, if it is to learn."""
  if state.adaptive is None:
    return state
  policy, learned = state.adaptive
  K = proposal.tokens.shape[1]
  # behind the first rejection the prefix is not the target's
  reached = jnp.arange(K) <= num_accepted[:, None]
  learned = adaptive.learn(
    policy,
    learned,
    proposal.confidence,
    jnp.where(reached, overlap[:, :K], jnp.nan),
    proposal.length,
    emitted,
  )
  return state._replace(adaptive=adaptive.Adaptive(policy, learned))


def _narrowest(judge, state, proposal):
  """What `judge` finds with as few tokens fed as the rows drafted.

  Where rows may draft less, the call and all that is made of its logits have
  the smallest compiled width that holds the longest draft of the batch; what
  lies behind it is not real.
  """
  N = proposal.tokens.shape[1] + 1
  whole = functools.partial(judge, N, lambda x, n: x[:, :n])
  if state.adaptive is None:
    return whole(state.cache)
  running = state.finish == types.RUNNING
  need = jnp.where(running, proposal.length, 0).max() + 1

  def body(width, first, carry):
    found, cache = judge(width, first, carry[1])
    extend = lambda x, like: jnp.pad(
      x, [(0, n - m) for m, n in zip(x.shape, like.shape, strict=True)]
    )
    return jax.tree.map(extend, found, carry[0]), cache

  shapes = jax.eval_shape(whole, state.cache)[0]
  nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return adaptive.by_width(need, N - 1, body, (nothing, state.cache))


def _judged(
  target,
  features,
  params,
  verifier,
  noise,
  state,
  proposal,
  fed,
  width,
  first,
  cache,
):
  """`_Judged` of the first `width` tokens of fed [B, K + 1], and the cache.

  Args:
    first: (x, n) -> the first n columns of x, see `adaptive.by_width`.
  """
  hidden, taps, cache = target.apply(
    params,
    first(fed, width),
    positions(state, width),
    cache,
    features=features,
  )
  logits = target.unembed(params, hidden)
  draft = first(proposal.tokens, width - 1)
  p = _laws(logits, state, draft)
  proposal = proposal._replace(
    tokens=draft,
    probs=first(proposal.probs, width - 1),
    length=jnp.minimum(proposal.length, width - 1),
  )
  if noise.accept is not None:
    noise = noise._replace(accept=first(noise.accept, width - 1))
  n, following = _judge(verifier, p, proposal, noise)
  padded = jnp.pad(draft, ((0, 0), (0, 1)))
  kept = jnp.arange(width) == n[:, None]
  tokens = jnp.where(kept, following[:, None], padded)
  return _Judged(
    tokens=tokens,
    accepted=n,
    # a broken law is NaN everywhere
    broken=~jnp.isfinite(p[jnp.arange(len(n)), n, 0]),
    overlap=_overlap(p, proposal),
    taps=taps,
    logprobs=logprobs(state, tokens, logits, p),
  ), cache


def _laws(logits, state, drafted):
  """p [B, K + 1, V]: at each position what plain decoding would have there."""
  if state.history is None:
    law = jax.vmap(sampling.probabilities, (0, None))  # one row's positions
    return jax.vmap(law)(logits, state.sampling)
  histories = jax.vmap(sampling.extend)(state.history, drafted)
  law = jax.vmap(sampling.probabilities, (0, None, 0))
  return jax.vmap(law)(logits, state.sampling, histories)


def _judge(verifier, p, proposal, noise):
  """How many drafted tokens are kept [B], and the token behind them [B]."""
  draft, length = proposal.tokens, proposal.length
  if verifier == "coupled":
    B, N, _ = p.shape
    sample = [noise.next(jnp.full(B, i), p[:, i]) for i in range(N)]
    sample = jnp.stack(sample, 1)  # [B, K + 1]
    # nothing is drawn from a broken law, so the draft ends before one
    whole = jnp.isfinite(p[:, :, 0]).astype(jnp.int32)
    length = jnp.minimum(length, jnp.cumprod(whole, 1).sum(1))
    verdict = jax.vmap(verify.coupled)(draft, sample, length=length)
    n = verdict.num_accepted
    return n, sample[jnp.arange(B), n]
  verdict = jax.vmap(getattr(verify, verifier))(
    p, proposal.probs, draft, noise.accept, length=length
  )
  n = verdict.num_accepted
  return n, noise.next(n, verdict.next_probs)


def _overlap(p, proposal):
  """sum min(p, q) [B, K + 1] where a draft was tested, else NaN."""
  K = proposal.tokens.shape[1]
  overlap = jnp.minimum(p[:, :K], proposal.probs).sum(-1)
  overlap = jnp.where(jnp.isfinite(overlap), overlap, 0)  # a broken q
  real = jnp.arange(K) < proposal.length[:, None]
  overlap = jnp.where(real, overlap, jnp.nan)
  return jnp.pad(overlap, ((0, 0), (0, 1)), constant_values=jnp.nan)


def logprobs(state, tokens, logits, p):
  """`types.Logprobs` of tokens [B, N] under logits and p [B, N, V].

  None if the state keeps none.
  """
  if state.logprobs is None:
    return None
  chosen = lambda x: jnp.take_along_axis(x, tokens[..., None], -1)[..., 0]
  raw = chosen(logits) - jax.nn.logsumexp(logits, -1)
  return types.Logprobs(raw, jnp.log(chosen(p)))


def score(state, before, emitted, found):
  """Note the log-probabilities `found` [B, N] of the emitted tokens."""
  if found is None:
    return state
  rows, at = places(state, before, emitted, found.raw.shape[1])
  put = lambda into, x: into.at[rows, at].set(x, mode="drop")
  return state._replace(
    logprobs=types.Logprobs(*map(put, state.logprobs, found))
  )


def _mark(state, before, emitted, num_accepted, overlap):
  """Note beside the tokens of a round where they came from."""
  rows, at = places(state, before, emitted, overlap.shape[1])
  i = jnp.arange(overlap.shape[1])
  accepted = jnp.broadcast_to(i < num_accepted[:, None], at.shape)
  overlap = overlap.astype(state.overlap.dtype)
  return state._replace(
    accepted=state.accepted.at[rows, at].set(accepted, mode="drop"),
    overlap=state.overlap.at[rows, at].set(overlap, mode="drop"),
  )


def keyed_noise(state, num_draft, verifier):
  """The `Noise` of a round: no key serves twice, in no round and no row.

  A row's own round is state.steps, since all rows start together. Coupled
  draws of draft and target share their noise on purpose: that of the token.
  """
  if verifier == "coupled":
    return types.Noise(
      draft=lambda i, q: draw_at(state, i, q),
      accept=None,
      next=lambda i, p: draw_at(state, i, p),
    )
  fold = jax.vmap(jax.random.fold_in, (0, None))
  keys = lambda tag: fold(fold(state.key, tag), state.steps)  # [B]
  draft_keys, next_keys = keys(_DRAFT), keys(_NEXT)
  # float32 by name: under jax_enable_x64 the default draws other bits
  uniform = lambda key: jax.random.uniform(key, (num_draft,), jnp.float32)
  return types.Noise(
    draft=lambda i, q: jax.vmap(sampling.draw)(q, fold(draft_keys, i)),
    accept=jax.vmap(uniform)(keys(_ACCEPT)),
    next=lambda n, p: jax.vmap(sampling.draw)(p, next_keys),
  )


def draw_at(state, i, p):
  """Draw from p [B, V] as plain decoding does i [B] tokens further on."""
  t = state.length - state.prompt_length + i
  keys = jax.vmap(jax.random.fold_in)(state.key, t)
  return jax.vmap(sampling.draw)(p, keys)
