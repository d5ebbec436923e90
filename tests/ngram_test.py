"""Looking up: what is found, in what order, and the law of what it emits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import outcomes
import pytest
import toy

from specjax import generate, request, types
from specjax.drafters import ngram

V, S = 9, 64


@functools.partial(jax.jit, static_argnums=(0, 3))
def _propose(drafter, tokens, length, num_draft):
  context = types.Context(tokens, length, None, num_draft)
  return drafter.propose((), (), context, None)[0]


def _drafts(texts, num_draft, *, behind=None, **options):
  """A list of drafts; behind [S] is what stands behind the texts."""
  tokens = np.zeros((len(texts), S), np.int32)
  tokens[:] = 0 if behind is None else behind
  for row, text in zip(tokens, texts, strict=True):
    row[: len(text)] = text
  length = np.array([len(text) for text in texts], np.int32)
  drafter = ngram.make(V, **options)
  got = jax.device_get(_propose(drafter, tokens, length, num_draft))
  assert got.tokens.dtype == np.int32 and got.probs.dtype == np.float32
  np.testing.assert_array_equal(got.probs, np.eye(V)[got.tokens])  # one-hot
  pairs = zip(got.tokens.tolist(), got.length.tolist(), strict=True)
  return [row[:n] for row, n in pairs]


def _by_definition(text, num_draft, *, longest=8, shortest=1):
  best, at = 0, None
  for s in range(len(text) - 1):
    n = 0
    while n < longest and n <= s and text[s - n] == text[len(text) - 1 - n]:
      n += 1
    if n >= best:  # the latest among equals
      best, at = n, s
  if best < shortest:
    return []
  text, period = list(text), len(text) - 1 - at
  for _ in range(num_draft):
    text.append(text[-period])
  return text[len(text) - num_draft :]


def _texts(seed, alphabet, count=200):
  rng = np.random.default_rng(seed)
  lengths = [1, 2, 3, S - 1, S, *rng.integers(1, S + 1, count)]
  return [rng.integers(0, alphabet, n).tolist() for n in lengths]


@pytest.mark.parametrize("alphabet", [1, 2, 4, 9])
@pytest.mark.parametrize(
  "num_draft, longest, shortest",
  [(0, 8, 1), (1, 8, 1), (4, 8, 1), (9, 3, 2), (3, 1, 1), (4, 70, 3)],
)
def test_equals_its_definition(alphabet, num_draft, longest, shortest):
  """On random texts of all lengths, from hardly any match to nothing else."""
  texts = _texts(alphabet, alphabet)
  options = dict(longest=longest, shortest=shortest)
  got = _drafts(texts, num_draft, **options)
  assert got == [_by_definition(t, num_draft, **options) for t in texts]


@pytest.mark.parametrize(
  "text, draft",
  [
    ([1, 2, 3, 1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2]),  # goes on as the period
    ([5, 5], [5] * 6),
    ([4], []),
    ([1, 2, 3, 4], []),
    ([1, 2, 7, 1, 2, 8, 3, 2, 6, 1, 2], [8, 3, 2, 6, 1, 2]),  # two, the latest
    ([1, 2, 7, 0, 2, 8, 1, 2], [7, 0, 2, 8, 1, 2]),  # two before one
    ([2, 7, 2, 8, 2, 6, 2], [6, 2, 6, 2, 6, 2]),  # the latest of one
  ],
)
def test_by_hand(text, draft):
  assert _drafts([text], 6) == [draft]


@pytest.mark.parametrize("alphabet", [2, 4])
def test_what_stands_behind_a_row_is_not_read(alphabet):
  """Neither searched nor drafted, though it would match best (B15)."""
  texts = _texts(7, alphabet)
  want = [_by_definition(text, 4) for text in texts]
  for i, text in enumerate(texts[:20]):
    behind = np.resize(text[-9:], S)  # shifted so as to go on where it ends
    behind = np.roll(behind, len(text) % len(text[-9:]))
    assert _drafts([text], 4, behind=behind) == [want[i]]
  for behind in (-1, 10**6, np.arange(S) % alphabet):
    assert _drafts(texts, 4, behind=behind) == want


def test_nothing_found_feeds_no_padding():
  """What is fed where nothing was found is still a token of the text."""
  tokens = np.full((2, S), 10**6, np.int32)
  tokens[0, :1], tokens[1] = 4, 10**6
  tokens[1, :3] = 1, 2, 3
  got = _propose(ngram.make(V), tokens, np.array([1, 3], np.int32), 4)
  assert got.length.tolist() == [0, 0]
  assert got.tokens.tolist() == [[4] * 4, [3] * 4]


@pytest.mark.parametrize("shortest, longest", [(0, 8), (3, 2), (-1, 1)])
def test_bad_sizes(shortest, longest):
  with pytest.raises(ValueError, match=f"shortest {shortest} and longest"):
    ngram.make(V, shortest=shortest, longest=longest)


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize(
  "V, prompt", [(2, [0, 1, 0, 1]), (3, [0, 1, 0]), (3, [2, 1, 0, 2])]
)
def test_joint_law(V, prompt, verifier):
  """B05: the law of 4 tokens is the target's, in float64."""
  with jax.enable_x64(True):
    p = outcomes.laws(V, 1)
    sizes = dict(K=2, T=4, choices=1, verifier=verifier)
    got = outcomes.joint_law(p, ngram.make(V), (), prompt, **sizes)
  assert outcomes.error(got, outcomes.target_law(p, prompt, 4)) <= 1e-12


@functools.cache
def _toy():
  return toy.trigram(V), toy.table(V, scale=3.0)


PROMPTS = [[1], [2, 3, 2], [1, 2, 3, 4] * 8, [3] * 5]


def _run(prompts, **options):
  target, table = _toy()
  ask = request.make(prompts, max_new=150, **options)
  sizes = dict(num_draft=3, max_new_tokens=150)
  return generate.speculative(target, ngram.make(V), table, (), ask, **sizes)


def test_accepted_with_the_probability_of_the_token():
  """B05: overlap = p(x) at T = 1, and so many of the tested are accepted."""
  out = _run(PROMPTS, seed=[1, 2, 3, 4], temperature=1.0)
  table = np.asarray(_toy()[1], np.float64)
  p = np.exp(table) / np.exp(table).sum(-1, keepdims=True)
  for prompt, row, accepted, overlap in zip(
    PROMPTS, out.tokens, out.accepted, out.overlap, strict=True
  ):
    text = [0, *prompt, *row]  # the token before the first counts as 0
    first = len(text) - len(row)
    want = [p[tuple(text[t - 2 : t + 1])] for t in range(first, len(text))]
    np.testing.assert_allclose(
      overlap[accepted], np.array(want)[accepted], atol=1e-5
    )
  tested = ~np.isnan(out.overlap)
  o = out.overlap[tested].astype(float)
  assert tested.sum() > 300
  spread = np.sqrt((o * (1 - o)).sum())
  assert abs(out.accepted[tested].sum() - o.sum()) < 4 * spread


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_do_not_see_each_other(temperature):
  """B15: a row alone is the row in a batch; at T = 0 it is the plain answer."""
  options = dict(temperature=temperature)
  together = _run(PROMPTS, seed=5, **options)
  for i, prompt in enumerate(PROMPTS):
    alone = _run([prompt], seed=5, **options)
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[i])
    np.testing.assert_array_equal(alone.round[0], together.round[i])
  if not temperature:
    ask = request.make(PROMPTS, max_new=150)
    plain = generate.autoregressive(*_toy(), ask, max_new_tokens=150)
    np.testing.assert_array_equal(together.tokens, plain.tokens)
    assert together.accepted.mean() > 0.5  # a table at T = 0 soon repeats


def test_x64_makes_no_wide_law():
  """B59: it would widen the target's and draw other tokens."""
  with jax.enable_x64(True):
    tokens, length = np.ones((1, S), np.int32), np.ones(1, np.int32)
    got = _propose(ngram.make(V), tokens, length, 2)
  assert got.probs.dtype == jnp.float32
  assert got.tokens.dtype == got.length.dtype == jnp.int32
