"""Decoding: one compiled `while_loop` for a whole batch.

`loop.start` prefills the prompts and `advance` runs the loop; `autoregressive`
and `stream` drive those two programs, so streamed and unstreamed text are
equal. `round` is the body of the speculative loop. Nothing comes back to the
host inside either.
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
  "start",
  "stream",
]


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
  state = start(
    target, params, request, max_new_tokens=max_new_tokens, slots=slots
  )
  state = advance(target, params, state, steps=max_new_tokens)
  return output(state, max_new_tokens)


def stream(
  target, params, request, *, max_new_tokens, slots=None, chunk_steps=8
):
  """`autoregressive`, yielding the `Output` so far every `chunk_steps` steps.

  Rows that go on say "running". The last one yielded equals what
  `autoregressive` returns.
  """
  if chunk_steps < 1:
    raise ValueError(f"chunk_steps must be at least 1, got {chunk_steps}")
  state = start(
    target, params, request, max_new_tokens=max_new_tokens, slots=slots
  )
  while True:
    state = advance(target, params, state, steps=chunk_steps)
    result = output(state, max_new_tokens)
    yield result
    if not (result.finish_reason == types.RUNNING).any():
      return


def advance(target, params, state, *, steps):
  """Run the loop for at most `steps` target calls, or until all rows end.

  `state` is donated: use what is returned.
  """
  return _advance(target, params, state, np.int32(min(steps, 2**31 - 1)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _advance(target, params, state, steps):
  most = jnp.iinfo(jnp.int32).max
  last = state.steps + jnp.minimum(steps, most - state.steps)
  return lax.while_loop(
    lambda s: (s.steps < last) & (s.finish == types.RUNNING).any(),
    functools.partial(_step, target, params),
    state,
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


def round(target, drafter, params, draft_params, state, noise, *, num_draft):
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

  Returns:
    The state, one round older.
  """
  K, rows = num_draft, jnp.arange(len(state.tokens))
  context = types.Context(state.tokens, state.length, state.sampling, K)
  proposal, draft = drafter.propose(draft_params, state.draft, context, noise)

  last = state.tokens[rows, state.length - 1]
  fed = jnp.concatenate([last[:, None], proposal.tokens], 1)  # [B, K + 1]
  hidden, taps, cache = target.apply(
    params, fed, positions(state, K + 1), state.cache, features=drafter.features
  )
  logits = target.unembed(params, hidden)  # [B, K + 1, V]
  law = jax.vmap(sampling.probabilities, (0, None))  # one row's positions
  p = jax.vmap(law)(logits, state.sampling)

  verdict = jax.vmap(verify.token)(
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
  outcome = types.Outcome(tokens, emitted, before, taps)
  return state._replace(draft=drafter.commit(draft_params, draft, outcome))
