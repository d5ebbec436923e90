"""The law of the real loop under real keys.

`round_test` enumerates a round's noise; whether the noise that the loop makes
from keys is independent can only be seen in the loop. So tokens are counted
here, and keys compared. What these checks find is shown by `mutants_test`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import round_test
import toy
from scipy import stats

from specjax import generate, request, rounds, sampling
from specjax.drafters import lm

V, K, T = 3, 2, 3  # ids, drafted tokens a round, counted tokens of an answer
ROWS = 8192
LEVEL = 1e-4


@functools.cache
def _target():
  return toy.trigram(V)


@functools.cache
def laws():
  """p and q after (before, last), far from each other, no small entry."""
  rng = np.random.default_rng(1)
  p = 0.94 * rng.dirichlet(np.full(V, 2), (V, V)) + 0.02
  return p, 0.94 * rng.dirichlet(np.ones(V), (V, V)) + 0.02


def _speculate(verifier, num_draft=K, top_p=1.0, rows=ROWS, seed=0):
  """T tokens of many rows, each with a seed of its own."""
  ask = request.make(
    [[0]] * rows,
    max_new=T,
    seed=seed * rows + np.arange(rows),
    temperature=1.0,
    top_p=top_p,
  )
  table, q_table = (jnp.asarray(np.log(x), jnp.float32) for x in laws())
  return generate.speculative(
    _target(),
    lm.make(_target(), V),
    table,
    q_table,
    ask,
    num_draft=num_draft,
    max_new_tokens=T,
    verifier=verifier,
    slots=64,
  )


def counts(verifier, num_draft=K, top_p=1.0, **options):
  """How many rows are each text of T tokens, and the law of it."""
  out = _speculate(verifier, num_draft, top_p, **options)
  assert (out.length == T).all()
  p, _ = laws()
  p = round_test.truncated(p, top_p) if top_p < 1 else p
  law = np.array(list(round_test.target_law(p, T).values()))  # texts in order
  return np.bincount(out.tokens @ V ** np.arange(T)[::-1], minlength=V**T), law


def chi_square(*args, **options):
  """The p-value of `counts` against the exact joint law."""
  got, law = counts(*args, **options)
  want, possible = law * got.sum(), law > 0
  assert not got[~possible].any() and want[possible].min() > 5
  gap = (got - want)[possible] ** 2 / want[possible]
  return stats.chi2.sf(gap.sum(), possible.sum() - 1)


def check_counts():
  assert chi_square("token") > LEVEL


def check_counts_top_p():
  assert chi_square("token", top_p=0.8) > LEVEL


def check_counts_block():
  assert chi_square("block", 3) > LEVEL


PROMPTS = [[0], [1], [1, 2], [1, 2]]
SEEDS = [0, 0, 0, 1]


def _state(prompts, seed, steps):
  """Of a batch after some rounds: what `keyed_noise` reads."""
  ask = request.make(prompts, max_new=T, seed=seed, temperature=1.0)
  state = generate.start(_target(), jnp.zeros((V,) * 3), ask, max_new_tokens=T)
  return state._replace(steps=jnp.int32(steps))


def _keys_of(state, num_draft):
  """The raw keys that each use of a round consumes, [B, K + 2, 2].

  `sampling.draw` and `jax.random.uniform` are replaced by what they are given.
  """
  data = jax.random.key_data
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sampling, "draw", lambda p, key: data(key))
    patch.setattr(jax.random, "uniform", lambda key, *rest: data(key))
    noise = generate.keyed_noise(state, num_draft, "token")
    law = jnp.ones((len(state.key), V))
    drafts = [noise.draft(i, law) for i in range(num_draft)]
    n = jnp.zeros(len(law), jnp.int32)
    return np.stack([*drafts, noise.accept, noise.next(n, law)], 1)


def check_keys():
  """B07: none serves two uses, places, rounds or rows, nor plain decoding."""
  rounds, many = 6, 8
  states = [_state(PROMPTS, SEEDS, steps) for steps in range(rounds)]
  used = np.concatenate([_keys_of(state, many) for state in states])
  assert used.shape == (rounds * len(PROMPTS), many + 2, 2)
  used = used.reshape(-1, 2)
  # plain decoding draws token t with fold_in(key, t)
  by_token = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
  plain = by_token(states[0].key, jnp.arange(1000)).ravel()
  # `sampling.draw` splits what it is given
  split = jax.vmap(jax.random.split)(jax.random.wrap_key_data(used)).ravel()
  others = [jax.random.key_data(x) for x in (plain, split, states[0].key)]
  everything = np.concatenate([used, *others])
  assert len(np.unique(everything, axis=0)) == len(everything)


def test_counts_of_a_truncated_target():
  check_counts_top_p()


@pytest.mark.parametrize("verifier, num_draft", [("token", 2), ("block", 3)])
def test_every_path_is_counted(verifier, num_draft):
  """A first round accepts nothing, something and everything."""
  out = _speculate(verifier, num_draft)
  first = (out.accepted & (out.round == 0)).sum(1)
  assert set(first) == set(range(num_draft + 1))


def test_no_token_has_the_number_of_a_tag():
  """Keys of plain decoding are folded with the number of a token."""
  tags = {int(tag) for tag in (rounds._DRAFT, rounds._ACCEPT)}
  tags.add(int(rounds._NEXT))
  assert len(tags) == 3 and min(tags) > np.iinfo(np.int32).max


def _drawn(state, num_draft):
  """All that a `Noise` gives: drafts, uniforms and next tokens [B, ...]."""
  noise = generate.keyed_noise(state, num_draft, "token")
  B = len(state.key)
  law = jnp.full((B, 1000), 1e-3)
  drafts = [noise.draft(i, law) for i in range(num_draft)]
  return (
    np.stack(drafts, 1),
    np.asarray(noise.accept),
    np.asarray(noise.next(jnp.zeros(B, int), law)),
  )


def test_noise_does_not_depend_on_the_place_in_the_batch():
  """B08: a row's key is all that its noise is made of."""
  want = _drawn(_state(PROMPTS, SEEDS, 3), 4)
  assert len(np.unique(want[1])) == want[1].size
  order = [2, 0, 3]
  some = [PROMPTS[i] for i in order], [SEEDS[i] for i in order], 3
  for a, b in zip(_drawn(_state(*some), 4), want, strict=True):
    np.testing.assert_array_equal(a, b[order])


def test_noise_of_a_place_does_not_depend_on_the_number_of_drafts():
  state = _state(PROMPTS, SEEDS, 2)
  drafts, u, following = _drawn(state, 8)
  for k in (1, 3, 7):
    some = _drawn(state, k)
    np.testing.assert_array_equal(some[0], drafts[:, :k])
    np.testing.assert_array_equal(some[1], u[:, :k])
    np.testing.assert_array_equal(some[2], following)


def _one_key(state, num_draft, verifier):
  """The keys of the next token also make the uniforms."""
  noise = rounds.keyed_noise(state, num_draft, verifier)
  fold = jax.vmap(jax.random.fold_in, (0, None))
  keys = fold(fold(state.key, rounds._NEXT), state.steps)
  uniform = lambda key: jax.random.uniform(key, (num_draft,), jnp.float32)
  return noise._replace(
    accept=jax.vmap(uniform)(keys),
    next=lambda n, p: jax.vmap(sampling.draw)(p, keys),
  )


def test_jax_finds_no_key_reused(monkeypatch):
  """B07: JAX's own check, which follows keys but not how they were folded."""
  state = _state(PROMPTS, SEEDS, 1)
  with jax.debug_key_reuse(True):
    _drawn(state, K)
    monkeypatch.setattr(generate, "keyed_noise", _one_key)
    with pytest.raises(jax.errors.KeyReuseError):
      _drawn(state, K)
