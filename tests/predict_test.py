"""What plain texts say of a draft is what speculation then does."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import round_test
import toy
from theory_test import _enumerated_rounds, _random_pair, _sample, _sticky_pair

from specjax import forced, generate, metrics, predict, request, theory, timing
from specjax.drafters import lm, ngram, replay

RULES = ("token", "block")

# Survival


def _by_definition(log_p, log_q, rule):
  """A_{s,j}, one text [N], one product at a time."""
  N, K = log_q.shape
  A = np.zeros((N, K + 1))
  for s, j in np.ndindex(N, K + 1):
    ratios = [
      np.exp(log_q[s, i] - log_p[s + i]) if s + i < N else 0.0 for i in range(j)
    ]
    paths = [np.prod(ratios[:i]) for i in range(j + 1)]
    A[s, j] = {
      "token": np.prod(np.minimum(1, ratios)),
      "block": min(paths),
      "ideal": min(1, paths[-1]),
    }[rule]
  return A


def _random_texts(P=3, N=9, K=4, seed=0):
  """(log_p [P, N], log_q [P, N, K]), a tenth of q zero."""
  rng = np.random.default_rng(seed)
  log_q = np.log(rng.uniform(0.05, 1, (P, N, K)))
  log_q[rng.random(log_q.shape) < 0.1] = -np.inf
  behind = np.arange(N)[:, None] + np.arange(K) >= N
  log_q[:, behind] = -np.inf
  return np.log(rng.uniform(0.05, 1, (P, N))), log_q


@pytest.mark.parametrize("rule", predict.RULES)
def test_survival_by_definition(rule):
  log_p, log_q = _random_texts()
  got = predict.survival(log_p, log_q, rule)
  want = [_by_definition(*x, rule) for x in zip(log_p, log_q, strict=True)]
  np.testing.assert_allclose(got, want, rtol=1e-12, atol=0)


def test_token_at_most_block_at_most_ideal():
  """Everywhere, and somewhere less."""
  token, block, ideal = (
    predict.survival(*_random_texts(P=50, N=20), rule) for rule in predict.RULES
  )
  assert (token <= block * (1 + 1e-12)).all() and (block <= ideal).all()
  assert (token < 0.9 * block).any() and (block < 0.9 * ideal).any()


def test_long_drafts_do_not_underflow():
  """Of 2,000 tokens at a ratio of 1/10, then 10."""
  log_p = np.zeros(2000)
  log_q = np.full((2000, 2000), np.log(0.1))
  log_q[:, 1000:] = np.log(10)
  A = predict.survival(log_p, log_q, "ideal")
  assert A[0, 1000] == 0 and A[0, 2000] == pytest.approx(1)


def test_unknown_rule():
  with pytest.raises(ValueError, match="one of token, block, ideal, got 'x'"):
    predict.survival(*_random_texts(), "x")


# Rounds, against the loop that ships


def _short_sticky_pair():
  """One token of easy text (alpha .95), one of hard (alpha .3)."""
  p = np.array([[0.95, 0.05], [0.15, 0.85]])
  q = np.array([[0.9, 0.1], [0.85, 0.15]])
  np.testing.assert_allclose(theory.acceptance(p, q), [0.95, 0.3])
  return p, q


def _rounds_of_the_loop(p, q, rule, K, T):
  """Expected rounds of `generate.round` until T tokens, by enumeration.

  What a round does next is p's and q's of the last token, so that states with
  one length and last token stand for each other.
  """
  V = len(p)
  wide = np.broadcast_to(p, (V, V, V)), np.broadcast_to(q, (V, V, V))
  case = round_test.Case(
    *wide, toy.bigram_drafter(V), q, K, T, jnp.float64, verifier=rule
  )
  case = case._replace(params=jnp.asarray(q), checks=False)
  nodes = [{} for _ in range(T)]  # by tokens emitted: {last: [weight, state]}
  nodes[0][0] = [1.0, (), round_test._start(case)]
  rounds = 0.0
  for here in nodes:
    rounds += sum(weight for weight, _, _ in here.values())
    texts = [text for _, text, _ in here.values()]
    some = [(weight, state) for weight, _, state in here.values()]
    for text, weight, state in round_test._go_on(case, texts, some):
      if len(text) < T:
        node = nodes[len(text)].setdefault(text[-1], [0.0, text, state])
        node[0] += weight
  return rounds


def _every_text(p, q, N, K):
  """(weight [P], log_p [P, N], log_q [P, N, K]) of all texts behind 0."""
  texts = np.array(list(itertools.product(range(len(p)), repeat=N)))
  last = np.concatenate([np.zeros((len(texts), 1), int), texts[:, :-1]], 1)
  with np.errstate(divide="ignore"):
    log_p, log_q = np.log(p[last, texts]), np.log(q[last, texts])
  real = np.isfinite(log_p).all(1)
  log_p, log_q = log_p[real], log_q[real]
  return np.exp(log_p.sum(1)), log_p, forced.windows(log_q, K)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("K", [1, 4])
def test_rounds_of_easy_and_hard_text(K, rule):
  """To 1e-12, where the mean over positions is more than 10 % off at K = 4."""
  (p, q), T = _short_sticky_pair(), 12
  with jax.enable_x64(True):
    want = _rounds_of_the_loop(p, q, rule, K, T)
  weight, log_p, log_q = _every_text(p, q, T, K)
  A = predict.survival(log_p, log_q, rule)
  rounds = predict.expected_rounds(A, np.full(len(A), T))
  assert weight @ rounds[:, K] == pytest.approx(want, abs=1e-12)
  # over positions that all have K tokens behind them: no end in the way
  weight, log_p, log_q = _every_text(p, q, T + K, K)
  A = predict.survival(log_p, log_q, rule)[:, :T]
  assert weight @ A.sum(-1).mean(1) > (1.25 if K == 4 else 1.03) * T / want


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("K, T", [(0, 4), (2, 5), (3, 4)])
def test_rounds_of_laws_with_zeros(K, T, rule):
  p, q = _random_pair(3, seed=K)
  with jax.enable_x64(True):
    want = _rounds_of_the_loop(p, q, rule, K, T)
  weight, log_p, log_q = _every_text(p, q, T, K)
  A = predict.survival(log_p, log_q, rule)
  rounds = predict.expected_rounds(A, np.full(len(A), T))
  assert weight @ rounds[:, K] == pytest.approx(want, abs=1e-12)


# Whole runs of a small model

V, NEW = 11, [64, 64, 40, 64, 64, 64, 1, 64]
PROMPTS = [[1], [2, 3, 4], [9] * 30, [3, 1, 4, 1], [5, 6], [7], [8, 2], [10]]


@functools.cache
def _pair():
  rng = np.random.default_rng(3)
  table = toy.table(V)
  close = table + jnp.asarray(rng.normal(0, 0.7, table.shape), table.dtype)
  return (toy.trigram(V), table), (toy.trigram(V), close)


def _draft(name, plain):
  """(drafter, its parameters)."""
  if name == "ngram":
    return ngram.make(V), ()
  if name == "replay":
    return replay.make(V), replay.Params(plain.tokens, np.float32(0.8))
  model, params = _pair()[1]
  return lm.make(model, V), params


def _texts(name, K, *, temperature, seed=0, own=None):
  """(plain output, the `Texts`, the draft and its sampling)."""
  ask = request.make(PROMPTS, max_new=NEW, temperature=temperature, seed=seed)
  target = _pair()[0]
  plain = generate.autoregressive(*target, ask, max_new_tokens=64, slots=128)
  text = forced.text(ask, plain, 128)
  own = own or ask.sampling
  drafter, params = _draft(name, plain)
  if name == "lm":
    log_p, ((log_q, alpha),) = forced.of_model(
      *target, *_pair()[1], text, [own]
    )
    real = np.arange(64) < plain.length[:, None]
    log_q = forced.windows(np.where(real, log_q, -np.inf), K)
  else:
    log_p, _ = forced.of_model(*target, None, None, text, [])
    log_q = forced.of_drafter(drafter, params, text, own, num_draft=K)
    alpha = np.exp(np.minimum(log_q[..., 0] - log_p, 0))
  texts = predict.Texts(plain.length, log_p, log_q, alpha)
  return ask, plain, texts, (drafter, params)


def _run(ask, draft, K, rule, **options):
  (target, params), (drafter, draft_params) = _pair()[0], draft
  return generate.speculative(
    target,
    drafter,
    params,
    draft_params,
    ask,
    num_draft=K,
    max_new_tokens=64,
    verifier=rule,
    slots=128,
    **options,
  )


@pytest.mark.parametrize(
  "name", ["ngram", pytest.param("lm", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("rule", RULES)
def test_at_temperature_0_every_round_is_foretold(name, rule):
  """The text is the same and nothing is random: each row's very count."""
  ask, plain, texts, draft = _texts(name, 4, temperature=0.0)
  found = predict.predict(texts, rule)
  for K in (1, 2, 4):
    out = _run(ask, draft, K, rule)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    rounds = [
      len(np.unique(out.round[row, :n])) for row, n in enumerate(out.length)
    ]
    np.testing.assert_allclose(found.rounds[:, K], rounds, atol=1e-9)
    got = metrics.acceptance(out, K).tokens_per_call
    assert found.tokens.mean[K] == pytest.approx(got, rel=1e-9)
    assert found.tokens.mean[K] > 1.1


@pytest.mark.parametrize(
  "name",
  [
    "lm",
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("ngram", "replay")),
  ],
)
def test_at_temperature_1_it_is_the_mean(name):
  """Of 40 runs of 8 rows with other seeds; 4 standard errors.

  The replay's draft is drawn, even where the target is greedy.
  """
  K, temperature = 3, 0.0 if name == "replay" else 1.0
  rounds = {rule: [] for rule in RULES}
  foretold, tokens = {rule: [] for rule in RULES}, 0
  for seed in range(40):
    options = dict(temperature=temperature)
    ask, plain, texts, draft = _texts(name, K, seed=seed, **options)
    for rule in RULES:
      found = predict.predict(texts, rule)
      foretold[rule].append(found.rounds[:, K].sum() / plain.length.sum())
      out = _run(ask._replace(key=_other(ask.key)), draft, K, rule)
      number = metrics.acceptance(out, K)
      rounds[rule].append(number.rounds / number.tokens)
    tokens += plain.length.sum()
  for rule in RULES:
    a, b = np.array(foretold[rule]), np.array(rounds[rule])
    error = np.hypot(a.std(), b.std()) / np.sqrt(len(a))
    assert abs(a.mean() - b.mean()) < 4 * error + 1e-9 < 0.05 * b.mean()
  assert np.mean(rounds["block"]) < np.mean(rounds["token"]) + 1e-9


@jax.jit
@jax.vmap
def _other(key):
  return jax.random.fold_in(key, 77)


def test_a_smaller_k_needs_no_texts_of_its_own():
  for name in ("lm", "ngram"):
    long, short = (_texts(name, K, temperature=1.0)[2] for K in (4, 2))
    for rule in RULES:
      a, b = (predict.predict(texts, rule) for texts in (long, short))
      np.testing.assert_allclose(a.rounds[:, :3], b.rounds, rtol=1e-12)
      np.testing.assert_allclose(a.iid[:3], b.iid, rtol=1e-12)


def test_a_prediction_by_hand():
  """Two texts: one all alike, one where nothing is drafted."""
  log_p = np.zeros((2, 4))
  log_q = np.full((2, 4, 2), -np.inf)
  for s, i in np.ndindex(4, 2):
    if s + i < 4:
      log_q[0, s, i] = 0.0
  alpha = np.array([[1.0] * 4, [0, 0, 0, 9]])
  found = predict.predict(
    predict.Texts(np.array([4, 3]), log_p, log_q, alpha), "token"
  )
  # the first takes 4, 2, 2 rounds at K = 0, 1, 2, the second always 3
  np.testing.assert_allclose(found.rounds, [[4, 2, 2], [3, 3, 3]])
  np.testing.assert_allclose(found.tokens.mean, [1, 7 / 5, 7 / 5])
  assert found.alpha == pytest.approx(4 / 7)
  np.testing.assert_allclose(found.iid[:2], [1, 1 + 4 / 7])
  want = [1, 7 / sum(theory.expected_rounds([4, 3], [1, 4 / 7]))]
  np.testing.assert_allclose(found.iid_finite[:2], want)
  np.testing.assert_allclose(found.survival, [1, 4 / 7, 3 / 5])
  np.testing.assert_allclose(found.by_position, [1, 11 / 7, 11 / 7 + 3 / 5])


# Intervals


def _rounds(p, q, texts, length, K, rule):
  texts = np.array(texts)
  last = np.concatenate([np.zeros((len(texts), 1), int), texts[:, :-1]], 1)
  log_q = forced.windows(np.log(q[last, texts]), K)
  A = predict.survival(np.log(p[last, texts]), log_q, rule)
  return predict.expected_rounds(A[..., : K + 1], length)


@pytest.mark.parametrize("rule", RULES)
def test_intervals_cover_the_mean(rule):
  """In 95 +- 4 % of 400 experiments with 40 texts of easy and hard runs each.

  The mean is that of the shipped verifier, every outcome of it summed.
  """
  (p, q), K, n, P = _sticky_pair(), 3, 48, 40
  want = n / _enumerated_rounds(rule, p, q, K, n)[n]
  texts = _sample(p, 400 * P, n)
  length = np.full(400 * P, n)
  rounds = _rounds(p, q, texts, length, K, rule).reshape(400, P, K + 1)
  found = [
    predict.tokens_a_round(length[:P], r, seed=seed)
    for seed, r in enumerate(rounds)
  ]
  covered = np.mean([x.low[K] <= want <= x.high[K] for x in found])
  assert 0.91 <= covered <= 0.99
  assert abs(np.mean([x.mean[K] for x in found]) / want - 1) < 0.01
  width = np.mean([x.high[K] - x.low[K] for x in found])
  assert 0.05 < width / want < 0.4  # neither nothing nor anything


def test_few_texts():
  """One has no interval; two have the range of what they say."""
  one = predict.tokens_a_round(np.array([8]), np.array([[8.0, 5.0]]))
  np.testing.assert_array_equal(one.low, one.mean)
  np.testing.assert_array_equal(one.high, one.mean)
  two = predict.tokens_a_round(np.array([8, 8]), np.array([[8, 5], [8, 3.2]]))
  np.testing.assert_allclose([two.low[1], two.high[1]], [8 / 5, 8 / 3.2])


# Speed-ups


def _costs(plain=10.0, call=((1, 9.0), (5, 13.0)), draft=0.5, rounds=None):
  cost = lambda x: timing.Cost(x, x * 0.9, x * 1.1)
  rounds = rounds or {0: 10.0, 4: 18.0}
  return timing.Costs(
    plain=cost(plain),
    target={n: cost(x) for n, x in call},
    draft=cost(draft),
    round={k: cost(x) for k, x in rounds.items()},
    batch=1,
    context=64,
  )


@functools.cache
def _prediction():
  return predict.predict(_texts("lm", 4, temperature=1.0)[2], "block")


def test_speedups_are_tokens_over_a_rounds_time():
  found, costs = _prediction(), _costs()
  S = predict.speedups(found, costs)
  for k in (0, 4):
    want = found.tokens.mean[k] / (costs.round[k].median / 10.0)
    assert S.mean[k] == pytest.approx(want, rel=1e-12)
    assert S.low[k] <= S.mean[k] <= S.high[k]
  # between: draft 2 * .5, a call on 3 tokens 11, the rest of a round 2
  want = found.tokens.mean[2] * 10 / (2 * 0.5 + 11 + (1.0 + 3.0) / 2)
  assert S.mean[2] == pytest.approx(want, rel=1e-12)
  assert S.iid[4] == pytest.approx(found.iid[4] / (1 + 4 / 18), rel=1e-12)
  assert S.best == np.argmax(S.mean) > 0
  slow = predict.speedups(found, _costs(draft=20.0, rounds={0: 10.0, 4: 99.0}))
  assert slow.best == 0
  free = predict.speedups(found, _costs(draft=0.0))
  np.testing.assert_allclose(free.iid, found.iid)


@pytest.mark.parametrize("k", [0, 1, 3, 4])
@pytest.mark.parametrize("draft", [0.0, 0.5])
def test_parts_multiply_to_the_speedup(k, draft):
  found, costs = _prediction(), _costs(draft=draft)
  parts = predict.parts(found, costs, k)
  assert list(parts) == [
    "textbook",
    "finite length",
    "alpha varies",
    "verification grows",
    "overhead",
  ]
  want = predict.speedups(found, costs).mean[k]
  assert np.prod(list(parts.values())) == pytest.approx(want, rel=1e-12)
  assert parts["finite length"] <= 1 + 1e-12
  if k == 4:
    cost = 1 + k * draft / 9
    grown = 13 / 9 + k * draft / 9
    assert parts["verification grows"] == pytest.approx(cost / grown)
    assert parts["overhead"] == pytest.approx(grown * 10 / 18)


def test_the_sweep_finds_a_better_draft_temperature():
  """The draft's own knob: S changes, and the best is not the target's."""
  ask, plain, _, _ = _texts("lm", 3, temperature=1.0)
  text = forced.text(ask, plain, 128)
  grid = [0.25, 0.5, 1.0, 2.0, 4.0]
  own = [
    ask.sampling._replace(temperature=np.full(8, T, np.float32)) for T in grid
  ]
  log_p, found = forced.of_model(*_pair()[0], *_pair()[1], text, own)
  real = np.arange(64) < plain.length[:, None]
  mean = [
    predict.predict(
      predict.Texts(
        plain.length,
        log_p,
        forced.windows(np.where(real, log_q, -np.inf), 3),
        alpha,
      ),
      "block",
    ).tokens.mean[3]
    for log_q, alpha in found
  ]
  assert max(mean) - min(mean) > 0.3
  alone = _texts("lm", 3, temperature=1.0, own=own[3])[2]
  assert predict.predict(alone, "block").tokens.mean[3] == pytest.approx(
    mean[3], rel=1e-5
  )
