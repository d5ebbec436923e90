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
@pytest.mark.parametrize(
  "name, draft, more, met",
  [
    ("lm", 0.0, 0.2, {"drafted"}),
    ("lm", 0.025, 0.4, {"not asked", "declined", "drafted"}),
    ("ngram", 0.0, 0.2, {"drafted"}),
    ("ngram", 0.0, 0.4, {"declined", "drafted"}),
  ],
)
def test_joint_law(name, draft, more, met, verifier):
  """Every outcome of successive rounds, each length decided on the way."""
  V, K, T = 3, 2, 4
  p = outcomes.laws(V)
  if name == "lm":
    target = toy.trigram(V)
    drafter, q = lm.make(target, V), outcomes.laws(V, seed=1) + 0.02
    params, choices = jnp.log(jnp.asarray(q, jnp.float32)), V
  else:
    drafter, params, choices = ngram.make(V), (), 1
  policy = adaptive.Policy(draft, 1 + more * np.arange(K + 1), 0.1)
  prompt = [0, 1, 2, 0, 1]
  sizes = dict(K=K, T=T, choices=choices, verifier=verifier)
  drafter, seen = watched(drafter)
  got = outcomes.joint_law(p, drafter, params, prompt, policy=policy, **sizes)
  assert outcomes.error(got, outcomes.target_law(p, prompt, T)) < 1e-6
  assert met <= seen


def watched(drafter):
  """The drafter, and a set of what its rounds come to."""
  seen = set()

  def note(length, confidence):
    for n, sure in zip(length, confidence, strict=True):
      first = "not asked" if np.isnan(sure[0]) else "declined"
      seen.add("drafted" if n else first)

  def propose(*args):
    proposal, state = drafter.propose(*args)
    jax.debug.callback(note, proposal.length, proposal.confidence)
    return proposal, state

  return drafter._replace(propose=propose), seen


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


def _learned(**fields):
  return adaptive.begin(np.zeros(2))._replace(
    tokens=jnp.array([2.0, 4.0]), cost=jnp.array([2.0, 2.0]), **fields
  )


def test_decide():
  """survival of the next token > lambda (v_{i+1} - v_i), by hand."""
  policy = adaptive.Policy(*map(jnp.asarray, (9.9, [1.0, 1.2, 1.4], 0.0)))
  sure = jnp.array([0.75, 0.75])  # in the bin from 3/4 to 7/8
  belief = 0.1 + 0.5 * 13 / 16
  go, survival = adaptive.decide(policy, _learned(), 1, jnp.ones(2), sure)
  np.testing.assert_allclose(survival, [belief] * 2, rtol=1e-6)
  assert go.tolist() == [True, True]  # 0.2 and 0.4 are less
  go, survival = adaptive.decide(policy, _learned(), 0, survival, sure)
  np.testing.assert_allclose(survival, [belief**2] * 2, rtol=1e-6)
  assert go.tolist() == [True, False]  # 0.2 is less, 0.4 is more
  tested = jnp.zeros((2, 2 * adaptive.BINS)).at[:, 6].set(12.0)
  known = _learned(tested=tested, overlap=tested / 4)
  _, survival = adaptive.decide(policy, known, 0, jnp.ones(2), sure)
  np.testing.assert_allclose(survival, [(4 * belief + 3) / 16] * 2, rtol=1e-6)


@pytest.mark.parametrize("survival", [1.0, 0.4])
@pytest.mark.parametrize("seen", [0.0, 5.0])
def test_ask(seen, survival):
  """E[max(0, survival of the next token - its price)] > lambda c, by hand."""
  belief = 0.1 + 0.5 * (np.arange(8) + 0.5) / 8
  often = np.full(8, 0.5)
  often[0] += seen  # answers of which none is worth 0.2
  known = np.zeros((2, 8), np.float32)
  known[:, 0] = seen
  gain = lambda price: (
    np.maximum(survival * belief - price, 0) @ often / often.sum()
  )
  # lambda is 1 and 2, the price of verification .2 and .4
  for scale, want in [(0.99, True), (1.01, False)]:
    for row, rate in enumerate([1, 2]):
      c = scale * gain(rate * 0.2) / rate
      policy = adaptive.Policy(*map(jnp.asarray, (c, [1.0, 1.2], 0.0)))
      got = adaptive.ask(policy, _learned(seen=known), 0, jnp.full(2, survival))
      assert got[row] == (want and c > 0)


def test_begin():
  """Beliefs by the draft's temperature; above 1 they are those of 1."""
  got = adaptive.begin(np.array([0.0, 0.5, 1.0, 3.0]))
  n = adaptive.BINS
  at = (np.arange(n) + 0.5) / n
  greedy = np.concatenate([0.1 + 0.5 * at, 0.35 + 0.6 * at])
  sampled = np.concatenate([0.23 + 0.3 * at, 0.2 + 0.5 * at])
  want = [greedy, (greedy + sampled) / 2, sampled, sampled]
  np.testing.assert_allclose(got.belief, want, rtol=1e-6)


def test_learn():
  """What was asked and tested, by bin; ended rows learn nothing."""
  policy = adaptive.Policy(*map(jnp.asarray, (0.1, [1.0, 1.5, 2.0], 0.2)))
  before = adaptive.begin(np.zeros(3))
  nan = jnp.nan
  round = dict(
    confidence=jnp.array([[0.99, 1.0], [0.0, 0.6], [0.9, 0.9]]),
    overlap=jnp.array([[0.5, nan], [0.25, 0.75], [0.5, 0.5]]),
    drafted=jnp.array([1, 2, 2]),
    emitted=jnp.array([2, 1, 0]),
  )
  got = adaptive.learn(policy, before, **round)
  seen, (tested, overlap) = np.zeros((3, 8)), np.zeros((2, 3, 16))
  seen[0, 7], seen[1, [0, 4]] = 2, 1
  tested[0, 7], overlap[0, 7] = 1, 0.5
  tested[1, [0, 4]], overlap[1, [0, 4]] = 1, [0.25, 0.75]
  np.testing.assert_allclose(got.seen, seen)
  np.testing.assert_allclose(got.tested, tested)
  np.testing.assert_allclose(got.overlap, overlap, atol=1e-6)
  assert (got.tokens - before.tokens).tolist() == [2, 1, 0]
  np.testing.assert_allclose(got.cost - before.cost, [1.9, 2.4, 0], atol=1e-6)
  # a second round without a question: all fades, and only where a row runs
  round |= dict(confidence=jnp.full((3, 2), nan), overlap=jnp.full((3, 2), nan))
  round |= dict(drafted=jnp.zeros(3, int), emitted=jnp.array([1, 0, 0]))
  later = adaptive.learn(policy, got, **round)
  for name in ("seen", "tested", "overlap"):
    want = np.array(getattr(got, name))
    want[0] *= 63 / 64
    np.testing.assert_allclose(getattr(later, name), want, rtol=1e-6)
  np.testing.assert_allclose(later.cost - got.cost, [1.2, 0, 0], atol=1e-6)


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
  head = lambda x: x
  args = noise, head, feed, logits, ()
  got, _ = chain.propose(context, *args, vocab_size=3)
  np.testing.assert_allclose(got.confidence, [[0.5, 0.6], [0.6, 0.5]], 1e-6)
  assert got.tokens.tolist() == [[0, 2], [2, 0]]


@pytest.mark.parametrize("asked", [(0, 0), (0, 3), (2, 1), (3, 3)])
def test_a_row_that_does_not_ask_stops(asked):
  """What it was told is NaN from there on; its neighbour's is its own."""
  target, params = _tiny()
  ask, rows = _ask(0.0, slice(0, 2)), jnp.array(asked)
  draft = types.Draft(lm.make(target, target.vocab_size), _noisy(), 3)
  state = loop.start(target, params, ask, max_new_tokens=N, draft=draft)
  noise = rounds.keyed_noise(state, 3, "block")
  context = types.Context(
    state.tokens, state.length, state.draft_sampling, 3, None
  )
  every = lambda i, survival, confidence: (confidence >= 0, survival)
  propose = jax.jit(
    lambda **how: draft.drafter.propose(
      draft.params, state.draft, context._replace(more=every, **how), noise
    )[0],
    static_argnames="ask",
  )
  whole = propose(ask=None)
  got = propose(ask=lambda i, survival: i < rows)
  assert got.length.tolist() == list(asked)
  told = np.arange(3) < np.array(asked)[:, None]
  np.testing.assert_array_equal(np.isnan(got.confidence), ~told)
  np.testing.assert_array_equal(got.tokens[told], whole.tokens[told])
  np.testing.assert_allclose(got.probs[told], whole.probs[told], atol=1e-6)


@pytest.mark.parametrize(
  "asked, drafted, heads, draws",
  [(0, 3, 0, 0), (1, 0, 1, 0), (1, 3, 1, 1), (3, 1, 2, 1), (3, 3, 3, 3)],
)
def test_what_is_not_asked_is_not_computed(asked, drafted, heads, draws):
  """Neither the head nor a draw runs where no row has a use for it."""
  done = []

  def count(name, x):
    jax.debug.callback(lambda: done.append(name))
    return x

  @jax.jit
  def propose(x):
    context = types.Context(
      tokens=jnp.zeros((2, 4), jnp.int32),
      length=jnp.ones(2, jnp.int32),
      sampling=request.make([[1]] * 2, max_new=1, temperature=0.0).sampling,
      num_draft=3,
      more=lambda i, survival, c: (jnp.full(2, i < drafted), survival),
      ask=lambda i, survival: jnp.full(2, i < asked),
    )
    noise = types.Noise(lambda i, q: count("draw", q.argmax(-1)), None, None)
    head = functools.partial(count, "head")
    feed = lambda i, token, carry: (x[::-1], carry)
    return chain.propose(context, noise, head, feed, x, (), vocab_size=3)[0]

  got = jax.block_until_ready(propose(jnp.log(jnp.eye(2, 3) + 0.1)))
  jax.effects_barrier()
  assert got.length.tolist() == [min(asked, drafted)] * 2
  assert [done.count("head"), done.count("draw")] == [heads, draws]


@pytest.mark.parametrize("name", ["lm", "ngram"])
@pytest.mark.parametrize("num_draft", [1, K])
def test_x64_changes_nothing(name, num_draft):
  """B59: of what a row has learned, too."""
  target, params = _tiny()
  drafter, draft_params = _drafts()[name]
  draft = types.Draft(drafter, draft_params, num_draft, policy=_policy())
  ask = _ask(0.8)

  def run():
    sizes = dict(max_new_tokens=N, draft=draft)
    state = generate.start(target, params, ask, **sizes)
    return generate.advance(target, params, state, steps=9, draft=draft)

  want = run()
  with jax.enable_x64(True):
    got = run()
  np.testing.assert_array_equal(got.tokens, want.tokens)
  for x in jax.tree.leaves(got.adaptive):
    assert x.dtype == jnp.float32
    assert np.isfinite(x).all()
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-4),
    *(got.adaptive, want.adaptive),
  )


def test_an_ended_row_asks_nothing():
  """Or it would keep the draft of a batch at work."""
  target, params = _tiny()
  drafter, draft_params = _drafts()["lm"]
  draft = types.Draft(drafter, draft_params, K, policy=_policy())
  sizes = dict(max_new_tokens=N, draft=draft)
  state = generate.start(target, params, _ask(0.8), **sizes)
  ended = np.arange(len(PROMPTS)) % 2 == 0
  finish = np.where(ended, types.STOP, types.RUNNING)
  _, asks = rounds.rule(state._replace(finish=finish))
  got = asks(0, jnp.ones(len(PROMPTS)))
  np.testing.assert_array_equal(got, ~ended)


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
