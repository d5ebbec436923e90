"""A head that sits out the rounds in which the text repeats itself."""

import functools
import itertools

import adaptive_test
import feature_test
import jax
import jax.numpy as jnp
import numpy as np
import outcomes
import pytest
import toy
from generate_test import _tiny

from specjax import adaptive, forced, generate, loop, rounds, types
from specjax.drafters import hybrid, lm, ngram

K, V = 3, 97


def _draft(least=2, num_draft=K, policy=None):
  own = feature_test._draft()
  drafter = hybrid.make(own.drafter, V, least=least)
  return own._replace(drafter=drafter, num_draft=num_draft, policy=policy)


def _copies(least, vocab_size):
  """context -> which rows copy, by the look-up's own word."""
  lookup = ngram.make(vocab_size, longest=8, shortest=least)

  def copies(context):
    copy, _ = lookup.propose((), (), context, None)
    return copy.length > 0

  return copies


@pytest.mark.parametrize(
  "verifier, least, draft, more",
  [
    ("token", 2, None, 0),
    ("block", 2, 0.0, 0.2),
    ("block", 1, 0.025, 0.4),  # some copies are not worth that
  ],
)
def test_joint_law(verifier, least, draft, more):
  """Every outcome of rounds that copy and of rounds that do not."""
  V, T = 3, 4
  p, target, K = outcomes.laws(V), toy.trigram(V), 2
  q = outcomes.laws(V, seed=1) + 0.02
  # its own cache has holes where it sat out, which only makes q another law
  head = lm.make(target, V)
  policy = adaptive.Policy(draft, 1 + more * np.arange(K + 1), 0.1)
  asked = []

  def copies(context):
    found = _copies(least, V)(context)
    jax.debug.callback(lambda x: asked.extend(x.tolist()), found)
    return found

  drafter, seen = hybrid.make(head, V, least=least), set()
  if draft is not None:
    drafter, seen = adaptive_test.watched(drafter)
  prompt = [0, 1, 2, 0]
  got = outcomes.joint_law(
    p,
    drafter,
    jnp.log(jnp.asarray(q, jnp.float32)),
    prompt,
    K=K,
    T=T,
    choices=V,
    verifier=verifier,
    policy=None if draft is None else policy,
    copies=copies,
  )
  assert outcomes.error(got, outcomes.target_law(p, prompt, T)) < 1e-6
  assert {*asked} == {True, False}
  assert not draft or seen == {"not asked", "declined", "drafted"}


ROWS = range(8)


@functools.cache
def _decoded(greedy, num_draft, adapt, least=2):
  target, params = _tiny()
  costs = adaptive.Policy(0.1, 1 + 0.05 * np.arange(num_draft + 1), 0.0)
  draft = _draft(least, num_draft, costs if adapt else None)
  return generate.speculative(
    *(target, draft.drafter, params, draft.params),
    feature_test._ask(ROWS, greedy),
    num_draft=num_draft,
    max_new_tokens=feature_test.N,
    verifier="block" if greedy else "coupled",
    policy=draft.policy,
  )


QUICK = {(True, 1, False), (True, 5, True), (False, 5, True)}
CASES = [
  pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
  for case in itertools.product([True, False], [1, 5], [False, True])
]


@pytest.mark.parametrize("greedy, num_draft, adapt", CASES)
def test_tokens_are_those_of_plain_decoding(greedy, num_draft, adapt):
  """At T = 0 by block verification, at others coupled."""
  got, want = _decoded(greedy, num_draft, adapt), feature_test._plain(greedy)
  np.testing.assert_array_equal(got.tokens, want.tokens)
  np.testing.assert_array_equal(got.finish_reason, want.finish_reason)
  assert got.accepted.any()


def _proposal(draft, more=None):
  """What a draft proposes behind prompts, and what its parts do."""
  target, params = _tiny()
  ask = feature_test._ask(ROWS, False)
  state = loop.start(
    target, params, ask, max_new_tokens=feature_test.N, draft=draft
  )
  noise = generate.keyed_noise(state, K, "block")
  context = types.Context(
    state.tokens, state.length, state.draft_sampling, K, more
  )
  # compiled, so that a law in a branch is rounded as one outside
  propose = jax.jit(
    lambda params, state: draft.drafter.propose(params, state, context, noise)
  )
  return propose(draft.params, state.draft)[0]


def test_each_row_has_one_of_the_two():
  """A copy where two tokens repeat, elsewhere the head's tokens and laws."""
  own = feature_test._draft()
  both, head = _proposal(_draft()), _proposal(own)
  copy = _proposal(types.Draft(ngram.make(V, shortest=2), (), K))
  copies = np.asarray(copy.length) > 0
  assert copies.any() and not copies.all()
  assert both.confidence is None
  for name in ("tokens", "probs", "length"):
    got, ours, theirs = (getattr(x, name) for x in (both, copy, head))
    np.testing.assert_array_equal(got[copies], ours[copies])
    np.testing.assert_array_equal(got[~copies], theirs[~copies])


def test_what_no_copy_is_worth_the_head_drafts():
  """Under a rule that hears what is asked: copies are above 1, the head not."""

  def more(i, survival, confidence):
    return confidence < 1, survival  # no copy is worth anything

  got, head = _proposal(_draft(), more), _proposal(feature_test._draft(), more)
  for ours, theirs in zip(got, head, strict=True):
    np.testing.assert_array_equal(ours, theirs)
  only = _proposal(_draft(), lambda i, s, c: (c > 1, s))
  copy = _proposal(types.Draft(ngram.make(V, shortest=2), (), K))
  np.testing.assert_array_equal(only.length, copy.length)
  copies = np.asarray(copy.length) > 0
  assert (np.asarray(only.confidence)[copies] > 1).all()
  assert not (np.asarray(only.confidence)[~copies] > 1).any()


def test_copies_have_beliefs_of_their_own():
  """And cost nothing to draft."""
  policy = adaptive.Policy(*map(jnp.asarray, (0.5, [1.0, 1.5, 2.0], 0.2)))
  before = adaptive.begin(np.zeros(2))
  got = adaptive.learn(
    policy,
    before,
    confidence=jnp.array([[1.25, 1.25], [0.25, 0.25]]),
    overlap=jnp.array([[1.0, 0.0], [1.0, 0.0]]),
    drafted=jnp.array([2, 2]),
    emitted=jnp.array([2, 2]),
  )
  assert np.argwhere(got.tested).tolist() == [[0, 10], [1, 2]]
  assert np.argwhere(got.seen).tolist() == [[1, 2]]
  np.testing.assert_allclose(got.cost - before.cost, [2.2, 3.2], rtol=1e-6)
  same = before._replace(tokens=jnp.ones(2), cost=jnp.ones(2))
  sure = jnp.array([1.95, 0.95])  # .91 and .57 are more than .5
  go, survival = adaptive.decide(policy, same, 0, jnp.ones(2), sure)
  assert go.tolist() == [True, True]
  m = 15 / 16  # the middle of the last bin
  np.testing.assert_allclose(survival, [0.35 + 0.6 * m, 0.1 + 0.5 * m])


def test_the_heads_cache_holds_no_guess():
  """B04: what was copied was fed to it as what it drafted is."""
  feature_test._check_cache(_draft(least=1), [3, 0, 2, 1, 3])


def test_a_prediction_asks_for_both():
  """q = 1 where a copy is right, none where it is wrong, else the head's."""
  target, params = _tiny()
  ask, out = feature_test._ask(ROWS, False), feature_test._plain(False)
  text = forced.text(ask, out, 128)

  def asked(draft):
    taps = forced.features(target, params, text, draft.drafter.features)
    how = dict(num_draft=K, taps=taps)
    args = draft.drafter, draft.params, text, ask.sampling
    return forced.of_drafter(*args, **how)

  lookup = types.Draft(ngram.make(V, shortest=2), (), K)
  both, head, copy = map(asked, (_draft(), feature_test._draft(), lookup))
  differ = (both != head).any(-1)
  np.testing.assert_array_equal(both[differ], copy[differ])
  right = copy[..., 0] == 0
  assert right.any() and (both[right] == copy[right]).all()
  assert differ.any() and not differ.all()


def test_a_round_of_no_draft():
  target, params = _tiny()
  draft, ask = _draft(), feature_test._ask(ROWS, True)
  state = loop.start(
    target, params, ask, max_new_tokens=feature_test.N, draft=draft
  )
  noise = rounds.keyed_noise(state, 0, "block")
  args = target, draft.drafter, params, draft.params, state, noise
  new = generate.round(*args, num_draft=0)
  assert (np.asarray(new.length) == np.asarray(state.length) + 1).all()
