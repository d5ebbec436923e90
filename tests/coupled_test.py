"""Coupled verification: the output is the plain sample of that seed.

Whatever drafts, and however many tokens: also with options that look at the
tokens before, whose laws on a drafted prefix must be those of plain decoding.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from generate_test import PROMPTS, _tiny

from specjax import generate, request, types, verify
from specjax.drafters import lm, ngram

N = 24


@functools.cache
def _noisy():
  """A draft that often agrees with the target."""
  target, params = _tiny()
  head = params["head"]
  noise = jax.random.normal(jax.random.key(5), head.shape)
  return {**params, "head": head + 0.1 * noise}


@functools.cache
def _drafts():
  target, _ = _tiny()
  V = target.vocab_size
  return {
    "lm": (lm.make(target, V), _noisy()),
    "ngram": (ngram.make(V), ()),
    "random": (toy.random_drafter(V), jax.random.key(3)),
  }


def _speculate(name, ask, K, verifier="coupled", **options):
  target, params = _tiny()
  drafter, draft_params = _drafts()[name]
  return generate.speculative(
    target,
    drafter,
    params,
    draft_params,
    ask,
    num_draft=K,
    max_new_tokens=N,
    verifier=verifier,
    **options,
  )


def _same(got, want, rows=slice(None)):
  """What was got is what some rows of the other are."""
  np.testing.assert_array_equal(got.tokens, want.tokens[rows])
  np.testing.assert_array_equal(got.finish_reason, want.finish_reason[rows])


# A row each; values are data, so that a program serves them all.
MANY = [*PROMPTS, [7, 7], [2] * 5, [50, 60, 50, 60], [96] * 17]
MIXED = dict(
  temperature=[0.3, 1.0, 1.7, 1.7, 1.0, 0.3, 1.7, 0.0],
  top_k=[8, 0, 20, 20, 5, 0, 0, 0],
  top_p=[1, 0.85, 1, 0.9, 1, 0.8, 0.9, 1],
  seed=range(8),
)


@functools.cache
def _plain():
  """All of MANY at once."""
  target, params = _tiny()
  ask = request.make(MANY, max_new=N, stop_ids=[7], **MIXED)
  return generate.autoregressive(target, params, ask, max_new_tokens=N)


def _some(rows):
  """The request of some rows of MANY."""
  some = {key: [value[i] for i in rows] for key, value in MIXED.items()}
  prompts = [MANY[i] for i in rows]
  return request.make(prompts, max_new=N, stop_ids=[7], **some)


# Each drafter in some batches and most K; the others are slow.
QUICK = {
  ("lm", 1, 1),
  ("ngram", 2, 3),
  ("random", 3, 8),
  ("lm", 4, 3),
  ("ngram", 5, 8),
  ("lm", 8, 8),
  ("random", 1, 3),
}
CASES = itertools.product(["lm", "ngram", "random"], range(1, 9), [1, 3, 8])
CASES = [
  pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
  for case in CASES
]


@pytest.mark.parametrize("name, K, batch", CASES)
def test_tokens_are_those_of_plain_decoding(name, K, batch):
  """At T = 0.3, 1, 1.7 and with truncation, in any company (B05, B12)."""
  accepted = []
  for first in range(0, len(MANY), batch):
    rows = [(first + i) % len(MANY) for i in range(batch)]
    got = _speculate(name, _some(rows), K)
    _same(got, _plain(), rows)
    accepted.extend(got.accepted[got.tokens >= 0])
  assert any(accepted) and not all(accepted)  # the draft was right at times


# A row each: what is off, penalties, a minimum, all of it at T > 0.
HISTORIES = dict(
  temperature=[0.0, 0.0, 0.0, 0.9],
  repetition_penalty=[1, 1.4, 1, 1.2],
  presence_penalty=[0, 0.3, 0, -0.2],
  frequency_penalty=[0, 0.5, 0, 0.3],
  min_new_tokens=[0, 0, 15, 9],
)


@pytest.mark.parametrize(
  "name, K",
  [
    ("lm", 0),
    ("lm", 5),
    ("ngram", 5),
    pytest.param("ngram", 0, marks=pytest.mark.slow),
  ],
)
def test_options_that_look_back(name, K):
  """B12, B49: the same law at every place of a block, whatever K is."""
  target, params = _tiny()
  V = target.vocab_size
  ask = request.make(
    PROMPTS,
    max_new=N,
    stop_ids=[3, 5, 7, 9, 11],
    bias=request.bias_of(V, {3: 1.5, 5: 1.0, 8: -4.0}, banned=[1, 2]),
    **HISTORIES,
  )
  want = generate.autoregressive(
    target, params, ask, max_new_tokens=N, logprobs=True
  )
  got = _speculate(name, ask, K, logprobs=True)
  _same(got, want)
  for a, b in zip(got.logprobs, want.logprobs, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  assert not np.isin(got.tokens, [1, 2]).any()
  assert (got.length[2:] >= [15, 9]).all()


def _slow_law(logits, ask, row, prompt, answer, stop_ids):
  """p behind an answer, by the words of `sampling.probabilities`."""
  x = np.asarray(logits, np.float64) + np.asarray(ask.sampling.bias[row])
  if len(answer) < ask.sampling.minimum.tokens[row]:
    x[stop_ids] = -np.inf
  repetition, presence, frequency = (v[row] for v in ask.sampling.penalties)
  for token in range(len(x)):
    if token in prompt or token in answer:
      x[token] *= 1 / repetition if x[token] > 0 else repetition
    if token in answer:
      x[token] -= presence + frequency * answer.count(token)
  p = np.exp((x - x.max()) / ask.sampling.temperature[row])
  return p / p.sum()


@functools.partial(jax.jit, static_argnums=0)
def _full_pass(target, params, text):
  places = jnp.arange(len(text))[None]
  hidden, _, _ = target.apply(params, text[None], places, None)
  return target.unembed(params, hidden[0])


def test_laws_by_their_definition():
  """Each token's probability, from a full pass and obvious NumPy."""
  target, params = _tiny()
  V, stop_ids = target.vocab_size, [3, 5]
  ask = request.make(
    PROMPTS[:2],
    max_new=N,
    stop_ids=stop_ids,
    temperature=0.9,
    repetition_penalty=[1.3, 0.8],
    presence_penalty=[0.2, -0.4],
    frequency_penalty=[0.4, 0.1],
    min_new_tokens=[9, 0],
    bias=request.bias_of(V, {5: 3.0}, banned=[2]),
  )
  out = generate.autoregressive(
    target, params, ask, max_new_tokens=N, logprobs=True
  )
  for row, prompt in enumerate(PROMPTS[:2]):
    answer = out.tokens[row, : out.length[row]].tolist()
    text = np.zeros(64, np.int32)
    text[: len(prompt) + len(answer)] = prompt + answer
    logits = _full_pass(target, params, text)
    for t, token in enumerate(answer):
      x = logits[len(prompt) + t - 1]
      p = _slow_law(x, ask, row, prompt, answer[:t], stop_ids)
      raw = jax.nn.log_softmax(x)[token]
      np.testing.assert_allclose(
        out.logprobs.law[row, t], np.log(p[token]), atol=2e-4
      )
      np.testing.assert_allclose(out.logprobs.raw[row, t], raw, atol=2e-4)
    assert np.isnan(out.logprobs.law[row, len(answer) :]).all()


@pytest.mark.parametrize(
  "verifier", ["block", pytest.param("token", marks=pytest.mark.slow)]
)
def test_greedy_with_penalties(verifier):
  """B49: at T = 0 the other verifiers give the plain tokens too."""
  target, params = _tiny()
  options = {**HISTORIES, "temperature": 0.0}
  ask = request.make(PROMPTS, max_new=N, stop_ids=[3, 5, 7], **options)
  want = generate.autoregressive(target, params, ask, max_new_tokens=N)
  got = _speculate("lm", ask, 4, verifier)
  _same(got, want)


def test_coupled_keeps_while_equal():
  draft, sample = jnp.array([4, 5, 6]), jnp.array([4, 5, 7, 8])
  count = lambda *args, **more: verify.coupled(*args, **more).num_accepted
  assert count(draft, sample) == 2
  assert count(draft, sample, length=1) == 1
  assert count(draft, sample.at[0].set(0)) == 0
  assert count(draft, sample.at[2].set(6)) == 3
  assert count(jnp.zeros(0, int), sample[:1]) == 0


def test_a_broken_target_in_coupled_mode():
  """B47: no draft is kept behind the place where the logits broke."""
  target = toy.trigram(3)
  table = toy.table(3).at[1, 2].set(jnp.nan)
  ask = request.make([[1, 2], [0, 0]], max_new=6, temperature=1.0)
  want = generate.autoregressive(target, table, ask, max_new_tokens=6)
  got = generate.speculative(
    target,
    lm.make(target, 3),
    table,
    jnp.zeros((3, 3, 3)),
    ask,
    num_draft=3,
    max_new_tokens=6,
    verifier="coupled",
  )
  _same(got, want)
  assert got.finish_reason[0] == types.NONFINITE and got.length[0] == 0


def test_match_rate_lies_between_its_bounds():
  """(1 - TV) / (1 + TV) <= P(equal) <= 1 - TV of shared Gumbel noise.

  Daliri et al. 2024, Theorem 1; 4096 first drafts, five standard errors.
  """
  rows, V = 4096, 5
  rng = np.random.default_rng(0)
  p, q = rng.dirichlet(np.ones(V), 2)
  fill = lambda law: jnp.broadcast_to(jnp.log(law), (V, V, V))
  target = toy.trigram(V)
  ask = request.make(
    [[0]] * rows, max_new=2, seed=np.arange(rows), temperature=1.0
  )
  out = generate.speculative(
    target,
    lm.make(target, V),
    fill(p),
    fill(q),
    ask,
    num_draft=1,
    max_new_tokens=2,
    verifier="coupled",
    slots=64,
  )
  rate, tv = out.accepted[:, 0].mean(), np.abs(p - q).sum() / 2
  slack = 5 * 0.5 / np.sqrt(rows)
  assert (1 - tv) / (1 + tv) - slack <= rate <= 1 - tv + slack
  np.testing.assert_allclose(out.overlap[:, 0], 1 - tv, atol=1e-5)


def test_match_rate_of_a_transformer_lies_between_its_bounds():
  """The same at every place of a text, the mean against the bounds' means.

  Given the text before it, a tested place is equal with a probability between
  its bounds, so the sums differ by a martingale: four standard errors of as
  many fair coins.
  """
  rows = 256
  ask = request.make(
    [[i % 97, i // 97] for i in range(rows)],
    max_new=N,
    seed=7,
    temperature=1.0,
  )
  out = _speculate("lm", ask, 2)
  tested = ~np.isnan(out.overlap)  # 1 - TV
  alpha, n = out.overlap[tested].astype(float), tested.sum()
  low, high = (alpha / (2 - alpha)).mean(), alpha.mean()
  slack = 4 * 0.5 / np.sqrt(n)
  rate = out.accepted[tested].mean()
  assert slack < (high - low) / 2  # the interval says something
  assert low - slack <= rate <= high + slack


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(repetition_penalty=0.0), "repetition_penalty must be > 0"),
    (dict(repetition_penalty=1e-38), "repetition_penalty must be > 0"),
    (dict(frequency_penalty=1e39), "frequency_penalty must be finite"),
    (dict(temperature=1e39), "temperature must be >= 0"),
    (dict(min_new_tokens=3 * 10**9), "min_new_tokens must be >= 0 and <"),
    (dict(presence_penalty=np.nan), "presence_penalty must be finite"),
    (dict(frequency_penalty=np.inf), "frequency_penalty must be finite"),
    (dict(min_new_tokens=-1), "min_new_tokens must be >= 0"),
  ],
)
def test_values_outside_their_range(change, message):
  with pytest.raises(ValueError, match=message):
    request.make([[1]], max_new=1, **change)


@pytest.mark.parametrize(
  "values, banned, message",
  [
    ({7: 1.0}, (), "token id 7 is outside 0..6"),
    ({}, (-1,), "token id -1"),
    ({1: np.inf}, (), "bias of token 1 must be finite or -inf"),
    ({1: 1e39}, (), "bias of token 1 must be finite or -inf"),
  ],
)
def test_bad_bias(values, banned, message):
  with pytest.raises(ValueError, match=message):
    request.bias_of(7, values, banned)
