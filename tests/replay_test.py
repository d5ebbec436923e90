"""The instrument: a draft whose alpha is what was asked for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import outcomes
import pytest
import toy

from specjax import generate, metrics, request, types
from specjax.drafters import replay

V, K, N = 11, 4, 200
PROMPTS = [[1], [2, 3, 4], [9] * 30, [3, 1, 4, 1], [5, 6], [7], [8, 2], [10]]


@functools.cache
def _toy(V):
  return toy.trigram(V), toy.table(V)


@functools.cache
def _plain(V=V, temperature=0.0, seed=0):
  ask = request.make(_prompts(V), max_new=N, temperature=temperature, seed=seed)
  return generate.autoregressive(*_toy(V), ask, max_new_tokens=N)


def _prompts(V):
  return [[i % V for i in prompt] for prompt in PROMPTS]


def _replayed(tokens, alpha, *, V=V, temperature=0.0, seed=0):
  target, table = _toy(V)
  ask = request.make(_prompts(V), max_new=N, temperature=temperature, seed=seed)
  params = replay.Params(np.asarray(tokens, np.int32), alpha)
  return generate.speculative(
    target,
    replay.make(V),
    table,
    params,
    ask,
    num_draft=K,
    max_new_tokens=N,
  )


@pytest.mark.parametrize("V", [2, 11])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
def test_greedy(V, alpha):
  """At T = 0: the plain answer, overlap = alpha, so many accepted."""
  seeds = np.arange(len(PROMPTS))  # the answers do not depend on them
  plain = _plain(V)
  runs = [
    _replayed(plain.tokens, alpha, V=V, seed=100 * i + seeds) for i in range(3)
  ]
  tested = accepted = 0
  for out in runs:
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    real = ~np.isnan(out.overlap)
    assert (out.overlap[real] == np.float32(alpha)).all()
    tested += real.sum()
    accepted += out.accepted[real].sum()
    assert not out.accepted[~real].any()
  assert tested > 2000
  spread = np.sqrt(tested * alpha * (1 - alpha))
  assert abs(accepted - tested * alpha) <= 4 * spread
  assert metrics.acceptance(runs[0], K).alpha == pytest.approx(
    np.float32(alpha)
  )


def test_places_are_independent():
  """The chance of place i of a round is alpha given those before it."""
  out = _replayed(_plain().tokens, 0.7)
  got = metrics.acceptance(out, K)
  reached = got.histogram[::-1].cumsum()[::-1]
  for before, after in zip(reached, reached[1:], strict=False):
    assert abs(after - 0.7 * before) < 4 * np.sqrt(before * 0.21)


@pytest.mark.parametrize("length", [0, 3, N - 1])
def test_a_shorter_earlier_run(length):
  """Behind its end, here each row's own, nothing is drafted."""
  plain = _plain()
  ends = np.minimum(length + np.arange(len(PROMPTS)), N)
  tokens = np.where(np.arange(N) < ends[:, None], plain.tokens, -1)
  if length == 3:  # an array that ends, and not only its rows
    tokens = tokens[:, : ends.max()]
  out = _replayed(tokens, 1.0)
  np.testing.assert_array_equal(out.tokens, plain.tokens)
  tested = ~np.isnan(out.overlap)
  np.testing.assert_array_equal(out.accepted, tested)
  for row, end in zip(tested, ends, strict=True):
    want = np.arange(N) % (K + 1) < K
    assert row[:end].tolist() == want[:end].tolist()
    assert not row[end:].any()


def test_no_earlier_run():
  """[B, 0] tokens: plain decoding."""
  out = _replayed(np.zeros((len(PROMPTS), 0)), 0.5)
  np.testing.assert_array_equal(out.tokens, _plain().tokens)
  assert np.isnan(out.overlap).all() and out.stats.steps == N


def test_any_tokens_are_exact_at_zero_temperature():
  """An answer to other prompts is a bad draft and no more."""
  wrong = _plain().tokens[::-1]
  out = _replayed(wrong, 0.9)
  np.testing.assert_array_equal(out.tokens, _plain().tokens)


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("V, alpha", [(2, 0.6), (3, 0.6), (3, 0.0), (3, 1.0)])
def test_joint_law(V, alpha, verifier):
  """At T = 1 of 4 tokens, the earlier run ending after 3."""
  p = outcomes.laws(V, 2)
  drafter = replay.make(V)
  rows = V**2 * 4 * V
  earlier = np.tile(np.array([1, 0, V - 1, -1], np.int32), (rows, 1))
  with jax.enable_x64(True):
    params = replay.Params(earlier, jnp.float32(alpha))
    sizes = dict(K=2, T=4, choices=V, verifier=verifier)
    got = outcomes.joint_law(p, drafter, params, [0, 1], **sizes)
  want = outcomes.target_law(p, [0, 1], 4)
  assert outcomes.error(got, want) <= 1e-6  # alpha is float32


def test_sampled_overlap():
  """At T = 1 it is sum min(p, q) of the two-valued q (B05)."""
  plain = _plain(temperature=1.0, seed=3)
  out = _replayed(plain.tokens, 0.6, temperature=1.0, seed=4)
  table = np.asarray(_toy(V)[1], np.float64)
  p = np.exp(table) / np.exp(table).sum(-1, keepdims=True)
  checked = 0
  rows = zip(_prompts(V), plain.tokens, out.tokens, out.overlap, strict=True)
  for prompt, earlier, answer, overlap in rows:
    text = [0, *prompt, *answer]
    for t in np.flatnonzero(~np.isnan(overlap)):
      law = p[tuple(text[len(prompt) + t - 1 :][:2])]
      q = np.zeros(V)
      q[earlier[t]], q[(earlier[t] + 1) % V] = 0.6, 0.4
      assert overlap[t] == pytest.approx(np.minimum(law, q).sum(), abs=1e-5)
      checked += 1
  assert checked > 500


def test_x64_makes_no_wide_law():
  """B59, with an alpha that is a plain number."""
  with jax.enable_x64(True):
    params = replay.Params(jnp.array([[1, 2, -1]], jnp.int32), 0.5)
    ones = jnp.ones(1, jnp.int32)
    context = types.Context(jnp.ones((1, 64), jnp.int32), ones, None, 2)
    noise = types.Noise(lambda i, q: q.argmax(1).astype(jnp.int32), None, None)
    got, _ = replay.make(V).propose(params, ones, context, noise)
  assert got.probs.dtype == jnp.float32
  assert got.tokens.dtype == got.length.dtype == jnp.int32
  assert got.tokens.tolist() == [[1, 2]] and got.length.tolist() == [2]


def test_its_state_is_its_own():
  """B32: a state is donated, and no buffer can be given twice."""
  length = jnp.array([1, 2], jnp.int32)
  state = replay.make(V).init(None, None, length, None, 64)
  assert state.unsafe_buffer_pointer() != length.unsafe_buffer_pointer()
