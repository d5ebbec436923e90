"""Drafting fewer tokens where more would not pay keeps the target's law."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import outcomes
import pytest
import toy
from coupled_test import _noisy
from generate_test import PROMPTS, _tiny

from specjax import adaptive, generate, loop, metrics, request, rounds, types
from specjax.drafters import chain, lm, ngram

K, N = 3, 24
LINEAR = 1 + 0.05 * np.arange(K + 1)


def _policy(draft=0.05, verify=LINEAR, overhead=0.02):
  return adaptive.Policy(draft, verify, overhead)


def _drafts():
  target, _ = _tiny()
  V = target.vocab_size
  return {"lm": (lm.make(target, V), _noisy()), "ngram": (ngram.make(V), ())}


@functools.cache
def _plain(temperature):
  target, params = _tiny()
  ask = _ask(temperature)
  return generate.autoregressive(target, params, ask, max_new_tokens=N)


def _ask(temperature, rows=slice(None)):
  seeds = np.arange(len(PROMPTS))[rows]
  return request.make(
    PROMPTS[rows], max_new=N, temperature=temperature, seed=seeds, stop_ids=[3]
  )


def _speculate(name, ask, policy, verifier="block", num_draft=K):
  target, params = _tiny()
  drafter, draft_params = _drafts()[name]
  return generate.speculative(
    target,
    drafter,
    params,
    draft_params,
    ask,
    num_draft=num_draft,
    max_new_tokens=N,
    verifier=verifier,
    policy=policy,
  )


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("draft", [0.0, 0.3])
@pytest.mark.parametrize("name", ["lm", "ngram"])
def test_joint_law(name, draft, verifier):
  """Every outcome of successive rounds, each length decided on the way."""
  V, K, T = 3, 2, 4
  p = outcomes.laws(V)
  if name == "lm":
    target = toy.trigram(V)
    drafter, q = lm.make(target, V), outcomes.laws(V, seed=1) + 0.02
    params, choices = jnp.log(jnp.asarray(q, jnp.float32)), V
  else:
    drafter, params, choices = ngram.make(V), (), 1
  policy = adaptive.Policy(draft, 1 + 0.2 * np.arange(K + 1), 0.1)
  prompt = [0, 1, 2, 0, 1]
  sizes = dict(K=K, T=T, choices=choices, verifier=verifier)
  got = outcomes.joint_law(p, drafter, params, prompt, policy=policy, **sizes)
  assert outcomes.error(got, outcomes.target_law(p, prompt, T)) < 1e-6


@pytest.mark.parametrize(
  "name, temperature, verifier",
  [
    ("lm", 0.0, "block"),
    ("ngram", 0.8, "coupled"),
    pytest.param("lm", 0.8, "coupled", marks=pytest.mark.slow),
    pytest.param("ngram", 0.0, "block", marks=pytest.mark.slow),
  ],
)
def test_tokens_are_those_of_plain_decoding(name, temperature, verifier):
  got = _speculate(name, _ask(temperature), _policy(), verifier)
  want = _plain(temperature)
  np.testing.assert_array_equal(got.tokens, want.tokens)
  np.testing.assert_array_equal(got.finish_reason, want.finish_reason)


@pytest.mark.parametrize(
  "name", ["lm", pytest.param("ngram", marks=pytest.mark.slow)]
)
def test_rows_do_not_see_their_neighbours(name):
  """B15: what a row has learned is its own, whatever width it is called at."""
  together = _speculate(name, _ask(0.8), _policy())
  for row in range(len(PROMPTS)):
    alone = _speculate(name, _ask(0.8, slice(row, row + 1)), _policy())
    for field in ("tokens", "round", "accepted"):
      a, b = getattr(alone, field), getattr(together, field)
      np.testing.assert_array_equal(a[0], b[row])


def test_costs_decide_how_much_is_drafted():
  """Free tokens: K in every round. Dear ones: none at all."""
  ask = _ask(0.0)
  constant = _speculate("lm", ask, None)
  free = _speculate("lm", ask, _policy(0.0, np.ones(K + 1), 0.0))
  np.testing.assert_array_equal(free.round, constant.round)
  dear = _speculate("lm", ask, _policy(verify=1 + 10.0 * np.arange(K + 1)))
  assert not dear.accepted.any()
  some = metrics.acceptance(_speculate("lm", ask, _policy()), K)
  assert 0 < some.tested.sum() < metrics.acceptance(constant, K).tested.sum()


@pytest.mark.parametrize("n", range(K + 1))
def test_exactly(n):
  """Rows draft so many tokens in each round, if they can."""
  got = _speculate("lm", _ask(0.0), adaptive.exactly(K, n))
  np.testing.assert_array_equal(got.tokens, _plain(0.0).tokens)
  some = metrics.acceptance(got, K).tested
  assert (some[:n] > 0).all() and not some[n:].any()


def test_decide():
  """survival of the next token > lambda (c + v_{i+1} - v_i), by hand."""
  learned = adaptive.begin(2)._replace(
    tokens=jnp.array([2.0, 4.0]), cost=jnp.array([2.0, 2.0])
  )
  policy = adaptive.Policy(*map(jnp.asarray, (0.1, [1.0, 1.1, 1.2], 0.0)))
  sure = jnp.array([0.75, 0.75])  # in the bin from 3/4 to 7/8
  belief = 0.1 + 0.5 * 13 / 16
  go, survival = adaptive.decide(policy, learned, 1, jnp.ones(2), sure)
  np.testing.assert_allclose(survival, [belief] * 2)
  assert go.tolist() == [True, True]  # 0.2 and 0.4 are less
  go, survival = adaptive.decide(policy, learned, 0, survival, sure)
  np.testing.assert_allclose(survival, [belief**2] * 2, rtol=1e-6)
  assert go.tolist() == [True, False]  # 0.2 is less, 0.4 is more


def test_learn():
  """Means by bin of what was tested; ended rows learn nothing."""
  policy = adaptive.Policy(*map(jnp.asarray, (0.1, [1.0, 1.5, 2.0], 0.2)))
  before = adaptive.begin(3)
  got = adaptive.learn(
    policy,
    before,
    confidence=jnp.array([[0.99, 1.0], [0.0, 0.6], [0.9, 0.9]]),
    overlap=jnp.array([[0.5, jnp.nan], [0.25, 0.75], [0.5, 0.5]]),
    drafted=jnp.array([1, 2, 2]),
    emitted=jnp.array([2, 1, 0]),
  )
  more = jax.tree.map(lambda x, y: np.asarray(x - y), got, before)
  tested, overlap = np.zeros((2, 3, 2 * adaptive.BINS))
  tested[0, 7], overlap[0, 7] = 1, 0.5
  tested[1, [0, 4]], overlap[1, [0, 4]] = 1, [0.25, 0.75]
  np.testing.assert_allclose(more.tested, tested)
  np.testing.assert_allclose(more.overlap, overlap, atol=1e-6)
  assert more.tokens.tolist() == [2, 1, 0]
  np.testing.assert_allclose(more.cost, [1.8, 2.4, 0], atol=1e-6)


def test_confidence_is_not_that_of_a_greedy_law():
  """Which is 1 for every token, so that no round could be told from another."""
  logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]))
  context = types.Context(
    tokens=jnp.zeros((2, 4), jnp.int32),
    length=jnp.ones(2, jnp.int32),
    sampling=request.make([[1]] * 2, max_new=1, temperature=0.0).sampling,
    num_draft=2,
    more=lambda i, survival, confidence: (confidence > 0.4, survival),
  )
  noise = types.Noise(lambda i, q: q.argmax(-1), None, None)
  feed = lambda i, token, carry: (logits[::-1], carry)
  got, _ = chain.propose(context, noise, logits, feed, (), vocab_size=3)
  np.testing.assert_allclose(got.confidence, [[0.5, 0.6], [0.6, 0.5]], 1e-6)
  assert got.tokens.tolist() == [[0, 2], [2, 0]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verifier", types.VERIFIERS)
@pytest.mark.parametrize("own", [True, False])
def test_a_narrow_round_is_the_wide_one(verifier, temperature, own):
  """All that is made of the logits, at the width of the longest draft."""
  target, params = _tiny()
  drafter, draft_params = _drafts()["lm"]
  draft_params = params if own else draft_params
  ask = _ask(temperature)
  draft = types.Draft(drafter, draft_params, 8, verifier=verifier)
  state = loop.start(target, params, ask, max_new_tokens=N, draft=draft)
  noise = rounds.keyed_noise(state, 8, verifier)
  context = types.Context(
    state.tokens, state.length, state.draft_sampling, 8, None
  )
  proposal, _ = drafter.propose(draft_params, state.draft, context, noise)
  B = len(PROMPTS)
  proposal = proposal._replace(length=jnp.arange(B, dtype=jnp.int32) % 3)
  last = state.tokens[np.arange(B), state.length - 1]
  fed = jnp.concatenate([last[:, None], proposal.tokens], 1)
  first = lambda x, n: x[:, :n]
  judge = lambda width: jax.jit(
    lambda cache: rounds._judged(
      *(target, (), params, verifier, noise, state, proposal, fed),
      *(width, first, cache),
    )[0]
  )(state.cache)
  wide, narrow = judge(9), judge(3)
  assert not own or narrow.accepted.tolist() == [0, 1, 2, 0]
  np.testing.assert_array_equal(wide.accepted, narrow.accepted)
  np.testing.assert_array_equal(wide.broken, narrow.broken)
  kept = np.arange(3) <= np.asarray(wide.accepted)[:, None]
  for name in ("tokens", "overlap"):
    a, b = getattr(wide, name)[:, :3], getattr(narrow, name)
    np.testing.assert_allclose(a[kept], b[kept], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("num_draft, want", [(0, (1,)), (1, (1, 2))])
def test_few_widths(num_draft, want):
  assert adaptive.widths(num_draft) == want
  assert adaptive.widths(5) == (1, 2, 3, 5, 6)
  assert adaptive.widths(8) == (1, 2, 3, 5, 9)
