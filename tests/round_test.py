"""The law of `generate.round`, its noise enumerated, is the target's.

Every draft, every side of every acceptance threshold and every next token of a
round is a row of one batch; the rounds that follow go on from the states that
the shipped code returned, stale cache slots included.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax import lax
from verify_test import TOLERANCE, tables

from specjax import generate, loop, request, types
from specjax.drafters import lm

ROWS = 4096  # of a call; all calls of a case share one program
SLOTS = 64


class Case(NamedTuple):
  """Laws after (before, last), and a drafter whose law q is."""

  p: np.ndarray  # [V, V, V]
  q: np.ndarray  # [V, V, V]
  drafter: types.Drafter
  params: Any
  num_draft: int  # K
  length: int  # T, tokens of the joint law
  dtype: Any
  checks: bool = True  # of marks and of the draft's laws too
  verifier: str = "token"
  raw: Any = None  # the model's laws, of which p is what top_p leaves
  top_p: float = 1.0
  probe: bool = False  # find the thresholds in the code, for a mutant's law


class Outcomes(NamedTuple):
  """Drafts, sides of the thresholds and next tokens: n = V^K 2^K V rows."""

  drafts: np.ndarray  # [n, K]
  accept: np.ndarray  # [n, K] 1 where u falls below the threshold
  following: np.ndarray  # [n]


@functools.cache
def _outcomes(V, K):
  rows = itertools.product(
    itertools.product(range(V), repeat=K),
    itertools.product((0, 1), repeat=K),
    range(V),
  )
  drafts, accept, following = zip(*rows, strict=True)
  shape = (len(drafts), K)
  return Outcomes(
    np.array(drafts, np.int32).reshape(shape),
    np.array(accept, np.int32).reshape(shape),
    np.array(following, np.int32),
  )


@functools.cache
def _target(V):
  return toy.trigram(V)


@functools.cache
def _bigram(V):
  return toy.bigram_drafter(V)


@functools.cache
def _program(V, drafter, K, verifier):
  """One shipped round of many rows, and the laws that its draws were given."""

  @jax.jit
  def run(table, params, state, drafts, u, following):
    next_probs = []

    def draft(i, probs):
      # inside a fori_loop a law cannot be returned; it can be sent out, as
      # bits, because a callback would make float32 of a float64
      bits = lax.bitcast_convert_type(probs, jnp.uint32)
      jax.debug.callback(_DRAWN.append, (i, bits))
      return drafts[:, i]

    def choose(n, probs):
      next_probs.append(probs)
      return following

    noise = types.Noise(draft=draft, accept=u, next=choose)
    state = generate.round(
      _target(V),
      drafter,
      table,
      params,
      state,
      noise,
      num_draft=K,
      verifier=verifier,
    )
    return state, next_probs[0]

  return run


_DRAWN = []  # what `draft` of the running round was given


def joint_law(case):
  """{text of T tokens: probability} over successive rounds, from token 0.

  `before` is read from the cache: a stale slot that is seen, or a wrong
  position, changes the law.
  """
  return _follow(case, {(): [1.0, _start(case)]})


def by_first_round(case):
  """K + 1 of these: where the first round accepts 0, 1, ..., K drafts."""
  first = [{} for _ in range(case.num_draft + 1)]
  for text, weight, row in _go_on(case, [()], [[1.0, _start(case)]]):
    first[len(text) - 1].setdefault(text, [0.0, row])[0] += weight
  return [_follow(case, nodes) for nodes in first]


def _follow(case, nodes):
  """{text of T tokens: probability} behind nodes {text: [weight, state]}."""
  T = case.length
  frontier = [{} for _ in range(T)]  # by length
  done = {}

  def put(text, weight, row):
    if len(text) >= T:
      done[text[:T]] = done.get(text[:T], 0) + weight
    else:
      frontier[len(text)].setdefault(text, [0.0, row])[0] += weight

  for text, (weight, row) in nodes.items():
    put(text, weight, row)
  group = max(1, ROWS * 4 // len(_outcomes(len(case.p), case.num_draft)[0]))
  for L in range(T):  # a round emits something, so this length is complete
    texts = [text for text, (weight, _) in frontier[L].items() if weight]
    for at in range(0, len(texts), group):
      part = texts[at : at + group]
      for outcome in _go_on(case, part, [frontier[L][text] for text in part]):
        put(*outcome)
    frontier[L] = {}
  return done


def _start(case):
  """The state of one row behind the prompt [0]."""
  K, T = case.num_draft, case.length
  options = dict(max_new=T + K, temperature=1.0)
  plain = request.make([[0]], **options).sampling
  state = loop.start(
    _target(len(case.p)),
    _table(case),
    request.make([[0]], top_p=case.top_p, **options),
    max_new_tokens=T + K,
    slots=SLOTS,
    draft=types.Draft(case.drafter, case.params, K, sampling=plain),
  )
  state = state._replace(key=jax.random.key_data(state.key))
  return _rows(jax.device_get(state), 0)


def _table(case):
  with np.errstate(divide="ignore"):
    raw = case.p if case.raw is None else case.raw
    return jnp.asarray(np.log(raw), case.dtype)


def _go_on(case, texts, nodes):
  """Every outcome of a round behind some texts: (text, weight, state) each."""
  L = len(texts[0])
  V, K = len(case.p), case.num_draft
  every = _outcomes(V, K)
  n = len(every.following)
  which = np.repeat(np.arange(len(texts)), n)
  drafts, accept, following = (np.tile(x.T, len(texts)).T for x in every)
  before = np.array([(0, 0, *text)[-2:] for text in texts])[which]
  seen = np.concatenate([before, drafts], 1)  # [N, K + 2]
  P, Q = (x[seen[:, :K], seen[:, 1 : K + 1]] for x in (case.p, case.q))
  pd, qd = (np.take_along_axis(x, drafts[..., None], 2)[..., 0] for x in (P, Q))
  a = _thresholds(case, P, Q, pd, qd)
  weights = np.array([weight for weight, _ in nodes])[which]
  states = _stack([state for _, state in nodes])
  sides = 1 if case.probe else _chance(a, accept)
  rows = np.flatnonzero(weights * sides * qd.prod(1))
  for at in range(0, len(rows), ROWS):
    r = rows[at : at + ROWS]
    full = np.resize(r, ROWS)  # the last call repeats some
    old = _rows(states, which[full])
    if case.probe:
      a[full] = _probe(case, old, drafts[full], following[full])
    u = np.where(accept, a / 2, (a + 1) / 2)[full]
    state, next_probs, drawn = _round(
      case, old, drafts[full], u, following[full]
    )
    drawn = [x[: len(r)] for x in drawn]
    if case.checks:
      _check_drawn(case, drawn, Q[r])
      n = _num_accepted(case, accept[r])
      _check_marks(state, L, n, np.minimum(P, Q)[r].sum(-1))
    weight = weights[r] * _chance(a[r], accept[r])
    i = np.arange(len(r))
    for x, q in zip(drafts[r].T, drawn, strict=True):
      weight *= q[i, x] / q.sum(1)  # of what it was really drawn from
    weight *= next_probs[i, following[r]]
    yield from _merge(state, L, texts, which[r], weight, V)


def _chance(a, accept):
  """That u [N, K] falls on these sides of a."""
  return np.where(accept, a, 1 - a).prod(1)


def _probe(case, state, drafts, following):
  """The u [N, K] at which the number of tokens that a round emits changes.

  By bisection, the earlier u at 0, the later ones at 1. Where it does not
  change it is 1: nothing depends on that u.
  """
  N, K = drafts.shape
  a = np.ones((N, K))
  state = jax.device_put(state)
  for i in range(K):

    def emitted(x, i=i):
      u = np.where(np.arange(K) < i, 0.0, 1.0) * np.ones((N, 1))
      u[:, i] = x
      new, _ = _run(case, state, drafts, u, following)
      return np.asarray(new.length)

    low, high = np.zeros(N), np.ones(N)
    most = emitted(low)
    for _ in range(53):
      middle = (low + high) / 2
      same = emitted(middle) == most
      low, high = np.where(same, middle, low), np.where(same, high, middle)
    a[:, i] = high
  return a


def _thresholds(case, P, Q, pd, qd):
  """What u [N, K] is compared with: P and Q [N, K, V], of the draft pd, qd."""
  ratio = np.where(qd > 0, pd / np.where(qd > 0, qd, 1), 0)
  if case.verifier == "token":
    return np.minimum(1, ratio)
  pi, h = np.ones(len(ratio)), np.zeros_like(ratio)
  for i in range(1, case.num_draft + 1):  # h_i decides on a prefix of i tokens
    pi = np.minimum(1, pi * ratio[:, i - 1])
    h[:, i - 1] = pi
    if i < case.num_draft:
      S = np.maximum(pi[:, None] * P[:, i] - Q[:, i], 0).sum(1)
      below = S + 1 - pi
      h[:, i - 1] = np.where(below > 0, S / np.where(below > 0, below, 1), 1)
  # where p and q are equal, h is 1 but for rounding, of which nothing depends
  return np.where(h > 1 - 1e-9, 1, h)


def _num_accepted(case, accept):
  """Of u below the thresholds or not [N, K]."""
  if case.verifier == "token":
    return np.cumprod(accept, 1).sum(1)
  i = np.arange(1, case.num_draft + 1)
  return (accept * i).max(1, initial=0)


def _run(case, state, drafts, u, following):
  run = _program(len(case.p), case.drafter, case.num_draft, case.verifier)
  state = state._replace(key=jax.random.wrap_key_data(state.key))
  u = u.astype(case.dtype)
  return run(_table(case), case.params, state, drafts, u, following)


def _round(case, state, drafts, u, following):
  jax.effects_barrier()
  _DRAWN.clear()
  state, next_probs = _run(case, state, drafts, u, following)
  state = state._replace(key=jax.random.key_data(state.key))
  state, next_probs = jax.device_get((state, next_probs))
  jax.effects_barrier()
  drawn = [
    np.asarray(bits).reshape(len(u), -1).view(case.dtype).astype(np.float64)
    for _, bits in sorted(_DRAWN, key=lambda x: int(x[0]))
  ]
  return state, next_probs.astype(np.float64), drawn


def _check_drawn(case, drawn, Q):
  """B04, B05: a draft is drawn from q behind the whole prefix.

  A stale or a missing slot of the draft's cache would leave the output exact.
  """
  assert len(drawn) == case.num_draft
  for i, probs in enumerate(drawn):
    np.testing.assert_allclose(probs, Q[:, i], atol=TOLERANCE[case.dtype])


def _check_marks(state, L, n, overlap):
  """What a row emitted is marked: whose it is, and sum min(p, q) of its test.

  n [N] drafts were accepted; overlap [N, K] of the laws at each position.
  """
  N, K = overlap.shape
  i = np.arange(K + 1)
  emitted = i <= n[:, None]
  slots = slice(1 + L, 2 + L + K)
  np.testing.assert_array_equal(state.length[:N], 2 + L + n)
  accepted = state.accepted[:N, slots]
  np.testing.assert_array_equal(accepted[emitted], (i < n[:, None])[emitted])
  want = np.pad(overlap, ((0, 0), (0, 1)), constant_values=np.nan)
  np.testing.assert_allclose(
    state.overlap[:N, slots][emitted], want[emitted], atol=1e-6
  )
  behind = state.overlap[:N, slots][~emitted]
  assert np.isnan(behind).all()  # nothing is noted behind a row's length


def _merge(state, L, texts, which, weight, V):
  """Sum the weights of rows with one text: (text, weight, a state of it)."""
  N, width = len(which), state.length[: len(which)].max() - 1 - L
  at = 1 + L + np.arange(width)
  real = at < state.length[:N, None]
  tokens = np.where(real, state.tokens[:N, at], V)  # [N, width]
  code = which * (V + 1) ** width + tokens @ (V + 1) ** np.arange(width)
  _, first, group = np.unique(code, return_index=True, return_inverse=True)
  total = np.bincount(group, weight)
  for g in np.flatnonzero(total):
    row = first[g]
    text = texts[which[row]] + tuple(tokens[row][real[row]].tolist())
    yield text, total[g], _rows(state, row)


def _rows(state, rows):
  """The state of some rows; what belongs to the whole batch stays."""
  shared = dict(steps=state.steps, stop_ids=state.stop_ids)
  per_row = state._replace(steps=(), stop_ids=())
  return jax.tree.map(lambda x: x[rows], per_row)._replace(**shared)


def _stack(states):
  shared = dict(steps=states[0].steps, stop_ids=states[0].stop_ids)
  per_row = [state._replace(steps=(), stop_ids=()) for state in states]
  return jax.tree.map(lambda *x: np.stack(x), *per_row)._replace(**shared)


def target_law(p, T):
  law = {}
  for text in itertools.product(range(len(p)), repeat=T):
    seen = (0, 0, *text)  # the token before the first counts as 0
    law[text] = np.prod([p[seen[t : t + 3]] for t in range(T)])
  return law


def law_error(case, checks=True):
  return max(_gaps(case._replace(checks=checks)))


def total_variation(case):
  """Of the law of the code as it is, which may be a mutant's."""
  return sum(_gaps(case._replace(checks=False, probe=True))) / 2


def _gaps(case):
  got, want = joint_law(case), target_law(case.p, case.length)
  return [abs(got.get(text, 0) - want.get(text, 0)) for text in got | want]


def _laws(V, seed, dense):
  """p and q after (before, last): `tables`, or all but a few entries > 0."""
  if not dense:
    pairs = [tables(V, seed + a) for a in range(V)]
    return (np.stack(x) for x in zip(*pairs, strict=True))
  rng = np.random.default_rng(seed)
  p, q = rng.dirichlet(np.ones(V), (2, V, V))
  p[0, 1, 0] = q[0, 1, 1] = q[1, 0, 0] = 0
  return (x / x.sum(-1, keepdims=True) for x in (p, q))


def bigram_case(V, K, seed, dtype, dense=False):
  """The draft's law knows the last token alone."""
  p, q = _laws(V, seed, dense)
  params = jnp.asarray(q[1], dtype)
  q = np.broadcast_to(q[1], p.shape)
  return Case(p, q, _bigram(V), params, K, K + 2, dtype)


def lm_case(V, K, seed, dtype, dense=False):
  """The draft is a model with a cache of its own."""
  p, q = _laws(V, seed, dense)
  with np.errstate(divide="ignore"):
    params = jnp.asarray(np.log(q), dtype)
  return Case(p, q, lm.make(_target(V), V), params, K, K + 2, dtype)


def truncated(p, top_p):
  """The smallest set of largest entries with at least top_p of the mass."""
  ordered = np.sort(p, -1)[..., ::-1]
  count = (ordered.cumsum(-1) < top_p).sum(-1, keepdims=True)  # all but one
  kept = np.where(p >= np.take_along_axis(ordered, count, -1), p, 0)
  return kept / kept.sum(-1, keepdims=True)


def with_top_p(case, top_p):
  """The same draft of a target whose law is cut."""
  return case._replace(p=truncated(case.p, top_p), raw=case.p, top_p=top_p)


def check_law(make, V, K, dtype, kinds, verifier="token"):
  """Of K + 2 tokens through successive rounds; `kinds` of (seed, dense)."""
  with jax.enable_x64(True):
    for seed, dense in kinds:
      case = make(V, K, seed, dtype, dense)._replace(verifier=verifier)
      assert law_error(case) <= TOLERANCE[dtype]


KINDS = [(0, False), (1, False), (2, False), (0, True)]
BIGRAM = [(3, 0), (3, 1), (3, 2), (4, 2), (3, 3), (4, 3), (3, 4)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("V, K", BIGRAM)
def test_joint_law(V, K, dtype):
  """In float64 and float32; the draft's law knows the last token alone."""
  check_law(bigram_case, V, K, dtype, KINDS)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("V, K", [(3, 0), (3, 1), (3, 2), (4, 3), (3, 4)])
def test_joint_law_of_block_verification(V, K, dtype):
  """B64: the same of verify.block."""
  check_law(bigram_case, V, K, dtype, KINDS, "block")


def test_joint_law_of_block_verification_with_a_cache_of_its_own():
  check_law(lm_case, 3, 3, jnp.float64, KINDS, "block")


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_joint_law_of_the_largest(dtype, verifier):
  """V = K = 4, with tables of many zeros."""
  check_law(bigram_case, 4, 4, dtype, [(1, False)], verifier)


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("make", [bigram_case, lm_case])
def test_joint_law_of_the_largest_dense(make, dtype):
  """V = K = 4, all of 4096 texts."""
  check_law(make, 4, 4, dtype, [(0, True)])


@pytest.mark.parametrize(
  "V, K, dtype",
  [
    (3, 0, jnp.float64),
    (3, 2, jnp.float32),
    (4, 3, jnp.float64),
    (3, 4, jnp.float64),
  ],
)
def test_joint_law_with_a_draft_of_its_own_cache(V, K, dtype):
  """B04: and each draft is drawn from the law behind its whole prefix."""
  check_law(lm_case, V, K, dtype, KINDS)


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_joint_law_of_a_truncated_target(verifier, dtype):
  """B12, B14: top-p cuts p in the ratio, the residual and the bonus alike."""
  with jax.enable_x64(True):
    for seed in range(2):
      case = lm_case(3, 2, seed, dtype, dense=True)
      case = with_top_p(case, 0.8)._replace(verifier=verifier)
      assert ((case.p == 0) & (case.raw > 0)).sum() > 5
      assert law_error(case) <= TOLERANCE[dtype]


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_thresholds_are_where_the_code_has_them(verifier):
  """Found by bisection, the law is the target's as well."""
  with jax.enable_x64(True):
    case = lm_case(3, 2, 0, jnp.float64, dense=True)
    case = case._replace(verifier=verifier, length=3)
    assert total_variation(case) <= 1e-12


def _adversary(verifier):
  """A function: a round of one row behind [0] whose draft is given.

  It returns how many passed and the law of the next token.
  """
  V, K = 3, 2
  p = np.full((V, V, V), [0.5, 0.3, 0.2])
  p[0, 0] = [0.5, 0.5, 0]
  with np.errstate(divide="ignore"):
    table = jnp.asarray(np.log(p), jnp.float32)
  target, drafter = _target(V), toy.fixed_drafter()
  ask = request.make([[0]], max_new=9, temperature=1.0)
  draft = types.Draft(drafter, None, K)
  state = loop.start(target, table, ask, max_new_tokens=9, draft=draft)

  @jax.jit
  def run(proposal):
    seen = []
    following = lambda n, probs: seen.append((n[0], probs[0])) or n
    noise = types.Noise(None, jnp.zeros((1, K)), following)  # u = 0
    after = generate.round(
      target,
      drafter,
      table,
      proposal,
      state,
      noise,
      num_draft=K,
      verifier=verifier,
    )
    return *seen[0], after.length, after.accepted

  def one(tokens, q, real=K):
    proposal = types.Proposal(
      jnp.array([tokens]), jnp.array([q], jnp.float32), jnp.array([real])
    )
    n, probs, length, accepted = run(proposal)
    assert length[0] == n + 2
    assert accepted[0, 1 : n + 2].tolist() == [True] * int(n) + [False]
    return n, probs

  return one


def check_adversaries(verifier="token"):
  """B05, B48: at u = 0 no token passes that has q = 0, p = 0 or no place."""
  fair, one = [0.4, 0.3, 0.3], _adversary(verifier)
  # behind (0, 0) p = (.5, .5, 0), then (.5, .3, .2)
  n, probs = one([1, 2], [[0.4, 0, 0.6], fair])
  assert n == 0  # q = 0 < p
  np.testing.assert_allclose(probs, [1 / 6, 5 / 6, 0], atol=1e-6)
  n, probs = one([2, 1], [[0.4, 0, 0.6], fair])
  assert n == 0  # p = 0 < q
  np.testing.assert_allclose(probs, [1 / 6, 5 / 6, 0], atol=1e-6)
  n, probs = one([1, 2], [fair, [0.9, 0.1, 0]])
  assert n == 1  # the second one, with q = 0 < p
  np.testing.assert_allclose(probs, [0, 0.5, 0.5], atol=1e-6)
  n, probs = one([1, 2], [fair, fair], 1)
  assert n == 1  # there is no second one
  np.testing.assert_allclose(probs, [0.5, 0.3, 0.2], atol=1e-6)
  n, probs = one([1, 2], [fair, fair])
  assert n == 2
  np.testing.assert_allclose(probs, [0.5, 0.3, 0.2], atol=1e-6)


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_adversaries(verifier):
  check_adversaries(verifier)
