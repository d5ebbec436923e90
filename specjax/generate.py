"""Decoding: one compiled `while_loop` for a whole batch.

`loop.start` prefills the prompts and `advance` runs the loop; `autoregressive`,
`speculative` and `stream` drive those two programs, so streamed and unstreamed
text are equal. `rounds.round` is the body of the speculative loop. Nothing
comes back to the host inside either.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import sampling, types
from specjax.loop import (
  commit,
  cut,
  num_slots,
  output,
  placed,
  positions,
  start,
)
from specjax.rounds import draw_at, keyed_noise, logprobs, round, score

__all__ = [
  "advance",
  "autoregressive",
  "cut",
  "num_slots",
  "output",
  "round",
  "speculative",
  "start",
  "stream",
]


def autoregressive(
  target, params, request, *, max_new_tokens, slots=None, logprobs=False
):
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
    logprobs: also return the tokens' log-probabilities.

  Returns:
    `Output` of numpy arrays.

  Raises:
    ValueError: a prompt is empty, or longer than the context or the slots.
  """
  sizes = dict(max_new_tokens=max_new_tokens, slots=slots, logprobs=logprobs)
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
  verifier="block",
  draft_sampling=None,
  policy=None,
  slots=None,
  logprobs=False,
):
  """Decode every row to its end, up to num_draft + 1 tokens a target call.

  The answer has the law of `autoregressive` for every drafter (Leviathan et
  al. 2023; Chen et al. 2023); at T = 0 it is the same answer. As there, a
  row's tokens depend on nothing but its own prompt, key and sampling values
  and on the draft.

  Args:
    target, params, request, max_new_tokens, slots, logprobs: as in
      `autoregressive`.
    drafter: a `Drafter`; draft_params: its parameters.
    num_draft: K >= 0, drafted tokens a round. Each K is one program.
    verifier: which function of `verify.py` judges them: "block", "token", or
      "coupled", whose output is that of `autoregressive`, token for token.
    draft_sampling: a `Sampling` of the draft, fields [B]; by default the
      request's. It changes how much is accepted, never the law.
    policy: an `adaptive.Policy` by which rows draft fewer than num_draft tokens
      where more would not pay; None: num_draft in every round.

  Returns:
    `Output` of numpy arrays; see `metrics.py` for what it tells.

  Raises:
    ValueError: as there, or the draft does not fit the request.
  """
  draft = types.Draft(
    drafter, draft_params, num_draft, verifier, draft_sampling, policy
  )
  sizes = dict(max_new_tokens=max_new_tokens, slots=slots, logprobs=logprobs)
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
  logprobs=False,
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
    logprobs=logprobs,
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
  return _loop(target, functools.partial(_step, target, params), state, steps)


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
      keyed_noise(state, num_draft, verifier),
      num_draft=num_draft,
      verifier=verifier,
    )

  return _loop(target, body, state, steps)


def _loop(target, body, state, steps):
  most = jnp.iinfo(jnp.int32).max
  last = state.steps + jnp.minimum(steps, most - state.steps)
  return lax.while_loop(
    lambda s: (s.steps < last) & (s.finish == types.RUNNING).any(),
    lambda s: placed(target, body(s)),
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
  p = jax.vmap(sampling.probabilities)(logits, state.sampling, state.history)
  token = draw_at(state, jnp.zeros_like(token), p)[:, None]
  finite = jnp.isfinite(p[:, 0])  # a broken row is NaN everywhere
  before = state.length
  state, emitted = commit(
    target, state._replace(cache=cache), token, finite, ~finite
  )
  found = logprobs(state, token, logits[:, None], p[:, None])
  return score(state, before, emitted, found)
