"""The law of coupled verification, its shared noise enumerated.

A place of the text has one outcome w of m equally likely ones. It makes the
target's token there, by an inverse CDF, in every round that comes by; the draft
draws with the same w, or does with it what it likes. The laws are multiples of
1 / m, so that probabilities are counts of rows and must agree exactly.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import round_test
import toy

from specjax import generate, loop, request, types
from specjax.drafters import lm

SLOTS = 64


@functools.cache
def target_of(V):
  return toy.trigram(V)


def inverse(law, w, m):
  """The token [B] whose part of [0, m) holds w + 1/2; law [B, V]."""
  below = jnp.cumsum(law, -1) * m <= w[:, None] + 0.5
  return jnp.minimum(below.sum(-1), law.shape[-1] - 1).astype(jnp.int32)


class Case(NamedTuple):
  """Laws after (before, last) and how the draft is coupled with the target."""

  p: np.ndarray  # [V, V, V]
  q: np.ndarray  # [V, V, V]
  m: int
  num_draft: int  # K
  drafter: types.Drafter
  params: Callable  # dtype -> the drafter's
  match: Callable  # (before, last, w, next w) -> the draft's token, None: none
  permutation: np.ndarray  # [m] the draft draws with permutation[w]
  length: int  # T


def _laws(V, m, seed):
  """p and q [V, V, V], multiples of 1 / m, with zeros."""
  rng = np.random.default_rng(seed)
  laws = rng.dirichlet(np.full(V, 0.8), (2, V, V))
  p, q = (rng.multinomial(m, x) / m for x in laws)
  return p, q


def _token(law, w, m):
  return int((np.cumsum(law) * m <= w + 0.5).sum())


def plain_case(V, K, m, seed, coupling):
  """The draft draws from a law of its own, with a cache of its own."""
  p, q = _laws(V, m, seed)
  permutation = {
    "same": np.arange(m),
    "opposite": np.arange(m)[::-1].copy(),
    "shuffled": np.random.default_rng(seed).permutation(m),
  }[coupling]

  def params(dtype):
    with np.errstate(divide="ignore"):
      return jnp.asarray(np.log(q), dtype)

  def match(before, last, w, later):
    return _token(q[before, last], permutation[w], m)

  drafter = lm.make(target_of(V), V)
  return Case(p, q, m, K, drafter, params, match, permutation, K + 2)


# What a draft may do that has seen the target's own token y and the noise of
# the next place: the token that it drafts, or None to end the draft before it.
ADVERSARIES = {
  "always right": lambda y, later, V: y,
  "always wrong": lambda y, later, V: (y + 1) % V,
  "right if the next place is even": lambda y, later, V: (y + later % 2) % V,
  "ends before it is wrong": lambda y, later, V: y if later % 2 else None,
  "drafts one token only": lambda y, later, V: 0,
}


def adversary(V, K, m, seed, name):
  """A draft that knows the target's law and looks at everything."""
  p, q = _laws(V, m, seed)
  choose = ADVERSARIES[name]
  choice = np.array(
    [[choose(y, later, V) for later in range(m)] for y in range(V)], object
  )
  ends = np.equal(choice, None)  # [V, m]
  token = np.where(ends, 0, choice).astype(np.int32)

  def propose(table, state, context, noise):
    rows = jnp.arange(len(context.tokens))
    last = context.tokens[rows, context.length - 1]
    before = context.tokens[rows, jnp.maximum(context.length - 2, 0)]
    before = jnp.where(context.length > 1, before, 0)
    tokens, real = [], []
    for i in range(K):
      y = noise.draft(i, table[before, last])  # the target's own
      uniform = jnp.full((len(rows), m), 1 / m)
      later = noise.draft(i + 1, uniform)  # w of the next place itself
      before, last = last, jnp.asarray(token)[y, later]
      tokens.append(last)
      real.append(~jnp.asarray(ends)[y, later])
    length = jnp.cumprod(jnp.stack(real, 1).astype(jnp.int32), 1).sum(1)
    probs = jnp.full((len(rows), K, V), 1 / V)
    return types.Proposal(jnp.stack(tokens, 1), probs, length), state

  def match(before, last, w, later):
    return choice[_token(p[before, last], w, m), later]

  return Case(
    p,
    q,
    m,
    K,
    toy._stateless(propose),
    lambda dtype: jnp.asarray(p, dtype),
    match,
    np.arange(m),
    K + 2,
  )


def _noise_of_places(case):
  """w [m^T, T + K + 2]: all of the first T, something behind them."""
  T, K = case.length, case.num_draft
  every = np.array(list(itertools.product(range(case.m), repeat=T)))
  rest = np.random.default_rng(0).integers(case.m, size=(len(every), K + 2))
  return np.concatenate([every, rest], 1).astype(np.int32)


@functools.cache
def _program(V, drafter, K):
  """One shipped round of rows with the noise w of their places."""

  @jax.jit
  def one_round(table, params, state, w, permutation):
    rows, m = jnp.arange(len(w)), len(permutation)

    def here(i):  # each place has its noise, whichever round comes by
      place = state.length - state.prompt_length + i
      return w[rows, jnp.minimum(place, w.shape[1] - 1)]

    noise = types.Noise(
      draft=lambda i, q: inverse(q, permutation[here(i)], m),
      accept=None,
      next=lambda i, p: inverse(p, here(i), m),
    )
    return generate.round(
      target_of(V),
      drafter,
      table,
      params,
      state,
      noise,
      num_draft=K,
      verifier="coupled",
    )

  return one_round


def run(case, dtype):
  """Rounds of the shipped code: w, and the tokens, marks and rounds [n, T]."""
  V, K, T = len(case.p), case.num_draft, case.length
  w = _noise_of_places(case)
  with np.errstate(divide="ignore"):
    table = jnp.asarray(np.log(case.p), dtype)
  ask = request.make([[0]] * len(w), max_new=T + K, temperature=1.0)
  draft = types.Draft(case.drafter, case.params(dtype), K, "coupled")
  state = loop.start(
    target_of(V), table, ask, max_new_tokens=T + K, slots=SLOTS, draft=draft
  )
  one_round = _program(V, case.drafter, K)
  for _ in range(T):  # each emits something
    state = one_round(table, draft.params, state, w, case.permutation)
  slots = slice(1, 1 + T)
  assert (state.length > T).all()
  fields = state.tokens, state.accepted, state.round
  return w, *(np.asarray(x[:, slots]) for x in fields)


def counts(case, tokens):
  """Rows of each text [V^T], and as many as the target's law says."""
  V, T = len(case.p), case.length
  law = round_test.target_law(case.p, T)  # texts in order
  want = len(tokens) * np.array(list(law.values()))
  got = np.bincount(tokens @ V ** np.arange(T)[::-1], minlength=V**T)
  np.testing.assert_allclose(want, np.rint(want), atol=1e-6)
  return got, np.rint(want).astype(int)


def plain_text(case, w):
  """What plain decoding makes of the noise w of a row."""
  seen = [0, 0]
  for t in range(case.length):
    seen.append(_token(case.p[seen[-2], seen[-1]], w[t], case.m))
  return seen[2:]


def plain_marks(case, text, w):
  """Which tokens are the draft's, and the round of each."""
  seen, accepted, rounds = [0, 0, *text], [], []
  n = r = 0  # drafts accepted in this round
  for t in range(len(text)):
    right = n < case.num_draft and text[t] == case.match(
      seen[t], seen[t + 1], w[t], w[t + 1]
    )
    accepted.append(right)
    rounds.append(r)
    n, r = (n + 1, r) if right else (0, r + 1)
  return accepted, rounds


def check_law(case, dtype):
  """Exactly: got and want are whole numbers."""
  outcome = run(case, dtype)
  np.testing.assert_array_equal(*counts(case, outcome[1]))
  return outcome


def check_coupling(case, dtype):
  """The law, each row's text, and what of it the draft is credited with."""
  w, tokens, accepted, rounds = check_law(case, dtype)
  for row in range(len(w)):
    text = plain_text(case, w[row])
    assert text == tokens[row].tolist()
    marks = plain_marks(case, text, w[row])
    assert marks == (accepted[row].tolist(), rounds[row].tolist())
  return accepted


SIZES = [  # V, K, m
  (3, 1, 8, jnp.float64),
  (3, 2, 6, jnp.float64),
  (3, 2, 6, jnp.float32),
  (3, 3, 4, jnp.float64),
  (2, 4, 3, jnp.float64),
  (4, 2, 5, jnp.float32),
]


@pytest.mark.parametrize("V, K, m, dtype", SIZES)
def test_joint_law(V, K, m, dtype):
  """Of K + 2 tokens: exactly the target's, and the plain text of each w."""
  for coupling in ("same", "opposite", "shuffled"):
    with jax.enable_x64(True):
      accepted = check_coupling(plain_case(V, K, m, V + K, coupling), dtype)
    assert 0 < accepted.mean() < 1


@pytest.mark.parametrize("name", ADVERSARIES)
def test_joint_law_with_a_draft_that_knows_the_noise(name):
  """It sees the target's token and what is drawn next: all in vain."""
  with jax.enable_x64(True):
    case = adversary(3, 2, 6, 1, name)
    accepted = check_coupling(case, jnp.float64)
  if name == "always right":
    assert accepted[:, :2].all() and not accepted[:, 2].any()
  if name == "always wrong":
    assert not accepted.any()


def test_no_draft_is_plain_decoding():
  with jax.enable_x64(True):
    check_coupling(plain_case(3, 0, 8, 0, "same"), jnp.float64)
