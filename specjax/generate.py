"""Decoding: one compiled `while_loop` for a whole batch.

`loop.start` prefills the prompts and `advance` runs the loop; `autoregressive`,
`speculative` and `stream` drive those two programs, so streamed and unstreamed
text are equal. `round` is the body of the speculative loop. Nothing comes back
to the host inside either.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import sampling, types, verify
from specjax.loop import commit, num_slots, output, positions, start

__all__ = [
  "advance",
  "autoregressive",
  "num_slots",
  "output",
  "round",
  "speculative",
  "start",
  "stream",
]

# What a request's key is folded with for each use of a round; no token of an
# answer, whose number plain decoding folds with, ever has such a number.
_DRAFT, _ACCEPT, _NEXT = (np.uint32(2**32 - i) for i in (1, 2, 3))


def autoregressive(target, params, request, *, max_new_tokens, slots=None):
  """Decode every row to its end, one token a target call.

  Token t of a row's answer is drawn from sampling.probabilities(logits) with
  the key fold_in(request.key, t), so it depends on the row's prompt,
  key and sampling values alone: not on its neighbours, its place in the batch
  or how the call is cut into chunks.

  Args:
    target: a `Target`; params: its parameters.
    request: a `Request` of B rows.
    max_new_tokens: the width of the answer; a row's own max_new may be less.
    slots: cache slots, by default `num_slots`. Each (B, slots) is one program.

  Returns:
    `Output` of numpy arrays.

  Raises:
    ValueError: a prompt is empty, or longer than the context or the slots.
  """
  sizes = dict(max_new_tokens=max_new_tokens, slots=slots)
  return _to_the_end(target, params, request, None, sizes)


def speculative(
  target,
  drafter,
  params,
  draft_params,
  request,
  *,
  num_draft,
  max_new_tokens,
  verifier="token",
  draft_sampling=None,
  slots=None,
):
  """Decode every row to its end, up to num_draft + 1 tokens a target call.

  The answer has the law of `autoregressive` for every drafter (Leviathan et
  al. 2023; Chen et al. 2023); at T = 0 it is the same answer. As there, a
  row's tokens depend on nothing but its own prompt, key and sampling values
  and on the draft.

  Args:
    target, params, request, max_new_tokens, slots: as in `autoregressive`.
    drafter: a `Drafter`; draft_params: its parameters.
    num_draft: K >= 0, drafted tokens a round. Each K is one program.
    verifier: which function of `verify.py` judges them, "token".
    draft_sampling: a `Sampling` of the draft, fields [B]; by default the
      request's. It changes how much is accepted, never the law.

  Returns:
    `Output` of numpy arrays; see `metrics.py` for what it tells.

  Raises:
    ValueError: as there, or the draft does not fit the request.
  """
  draft = types.Draft(
    drafter, draft_params, num_draft, verifier, draft_sampling
  )
  sizes = dict(max_new_tokens=max_new_tokens, slots=slots)
  return _to_the_end(target, params, request, draft, sizes)


def _to_the_end(target, params, request, draft, sizes):
  state = start(target, params, request, draft=draft, **sizes)
  most = sizes["max_new_tokens"]  # a step emits a token or ends its row
  state = advance(target, params, state, draft=draft, steps=most)
  return output(state, most)


def stream(
  target,
  params,
  request,
  *,
  max_new_tokens,
  slots=None,
  chunk_steps=8,
  draft=None,
):
  """Decode, yielding the `Output` so far every `chunk_steps` target calls.

  Rows that go on say "running". The last one yielded equals what
  `autoregressive`, or with a `types.Draft` `speculative`, returns.
  """
  if chunk_steps < 1:
    raise ValueError(f"chunk_steps must be at least 1, got {chunk_steps}")
  state = start(
    target,
    params,
    request,
    max_new_tokens=max_new_tokens,
    slots=slots,
    draft=draft,
  )
  while True:
    state = advance(target, params, state, steps=chunk_steps, draft=draft)
    result = output(state, max_new_tokens)
    yield result
    if not (result.finish_reason == types.RUNNING).any():
      return


def advance(target, params, state, *, steps, draft=None):
  """Run the loop for at most `steps` target calls, or until all rows end.

  `state` is donated: use what is returned. `draft` is the `types.Draft` that
  the state was started with, None for plain decoding.
  """
  steps = np.int32(min(steps, 2**31 - 1))
  if draft is None:
    return _advance(target, params, state, steps)
  return _speculate(
    target,
    draft.drafter,
    params,
    draft.params,
    state,
    steps,
    num_draft=draft.num_draft,
    verifier=draft.verifier,
  )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _advance(target, params, state, steps):
  return _loop(functools.partial(_step, target, params), state, steps)


@functools.partial(
  jax.jit,
  static_argnums=(0, 1),
  static_argnames=("num_draft", "verifier"),
  donate_argnums=4,
)
def _speculate(
  target, drafter, params, draft_params, state, steps, *, num_draft, verifier
):
  def body(state):
    return round(
      target,
      drafter,
      params,
      draft_params,
      state,
      _noise(state, num_draft),
      num_draft=num_draft,
      verifier=verifier,
    )

  return _loop(body, state, steps)


def _loop(body, state, steps):
  most = jnp.iinfo(jnp.int32).max
  last = state.steps + jnp.minimum(steps, most - state.steps)
  return lax.while_loop(
    lambda s: (s.steps < last) & (s.finish == types.RUNNING).any(), body, state
  )


def _step(target, params, state):
  """Feed the last token, draw the next, commit it: one target call."""
  rows = jnp.arange(len(state.tokens))
  token = state.tokens[rows, state.length - 1]
  hidden, _, cache = target.apply(
    params, token[:, None], positions(state, 1), state.cache
  )
  logits = target.unembed(params, hidden[:, 0])  # [B, V]
  p = jax.vmap(sampling.probabilities)(logits, state.sampling)
  t = state.length - state.prompt_length
  keys = jax.vmap(jax.random.fold_in)(state.key, t)
  token = jax.vmap(sampling.draw)(p, keys)
  finite = jnp.isfinite(p[:, 0])  # a broken row is NaN everywhere
  state, _ = commit(
    target, state._replace(cache=cache), token[:, None], finite, ~finite
  )
  return state


def _noise(state, num_draft):
  """The `Noise` of a round: no key serves twice, in no round and no row.

  A row's own round is state.steps, since all rows start together.
  """
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


def round(
  target,
  drafter,
  params,
  draft_params,
  state,
  noise,
  *,
  num_draft,
  verifier="token",
):
  """Propose, score, verify, sample the next token, commit.

  The target is called once, on the last committed token and the K drafted
  ones; what it emits has the law of plain decoding for every drafter
  (`verify.token`). Rejected tokens leave stale cache slots behind the row's
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
  K, rows = num_draft, jnp.arange(len(state.tokens))
  context = types.Context(state.tokens, state.length, state.draft_sampling, K)
  proposal, draft = drafter.propose(draft_params, state.draft, context, noise)

  last = state.tokens[rows, state.length - 1]
  fed = jnp.concatenate([last[:, None], proposal.tokens], 1)  # [B, K + 1]
  hidden, taps, cache = target.apply(
    params, fed, positions(state, K + 1), state.cache, features=drafter.features
  )
  logits = target.unembed(params, hidden)  # [B, K + 1, V]
  law = jax.vmap(sampling.probabilities, (0, None))  # one row's positions
  p = jax.vmap(law)(logits, state.sampling)

  verdict = jax.vmap(getattr(verify, verifier))(
    p, proposal.probs, proposal.tokens, noise.accept, length=proposal.length
  )
  n = verdict.num_accepted  # [B]
  following = noise.next(n, verdict.next_probs)  # [B]
  i = jnp.arange(K + 1)
  padded = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
  tokens = jnp.where(i == n[:, None], following[:, None], padded)
  finite = jnp.isfinite(verdict.next_probs[:, 0])

  before = state.length
  state, emitted = commit(
    target, state._replace(cache=cache), tokens, n + finite, ~finite
  )
  state = _mark(state, before, emitted, n, _overlap(p, proposal))
  outcome = types.Outcome(tokens, emitted, before, taps)
  return state._replace(draft=drafter.commit(draft_params, draft, outcome))


def _overlap(p, proposal):
  """sum min(p, q) [B, K + 1] where a draft was tested, else NaN."""
  K = proposal.tokens.shape[1]
  overlap = jnp.minimum(p[:, :K], proposal.probs).sum(-1)
  overlap = jnp.where(jnp.isfinite(overlap), overlap, 0)  # a broken q
  real = jnp.arange(K) < proposal.length[:, None]
  overlap = jnp.where(real, overlap, jnp.nan)
  return jnp.pad(overlap, ((0, 0), (0, 1)), constant_values=jnp.nan)


def _mark(state, before, emitted, num_accepted, overlap):
  """Note beside the tokens of a round where they came from."""
  rows = jnp.arange(len(state.tokens))[:, None]
  i = jnp.arange(overlap.shape[1])
  at = jnp.where(
    i < emitted[:, None], before[:, None] + i, state.tokens.shape[1]
  )
  accepted = jnp.broadcast_to(i < num_accepted[:, None], at.shape)
  overlap = overlap.astype(state.overlap.dtype)
  return state._replace(
    accepted=state.accepted.at[rows, at].set(accepted, mode="drop"),
    overlap=state.overlap.at[rows, at].set(overlap, mode="drop"),
  )
