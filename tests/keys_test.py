"""The law of the real loop under real keys, and faults that must show in it.

`round_test` enumerates a round's noise; whether the noise that the loop makes
from keys is independent can only be seen in the loop. So tokens are counted
here, and the shipped code is broken on purpose: each fault moves the law.
"""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import round_test
import toy
from scipy import stats

from specjax import generate, loop, request, rounds, sampling, verify
from specjax.drafters import lm

V, K, T = 3, 2, 3  # ids, drafted tokens a round, tokens of an answer
ROWS = 8192
LEVEL = 1e-4


@functools.cache
def _target():
  return toy.trigram(V)


@functools.cache
def _laws():
  """p and q after (before, last), far from each other, no small entry."""
  rng = np.random.default_rng(1)
  p = 0.94 * rng.dirichlet(np.full(V, 2), (V, V)) + 0.02
  return p, 0.94 * rng.dirichlet(np.ones(V), (V, V)) + 0.02


def _truncated(p, top_p):
  """The smallest set of largest entries with at least top_p of the mass."""
  ordered = np.sort(p, -1)[..., ::-1]
  count = (ordered.cumsum(-1) < top_p).sum(-1, keepdims=True)  # all but one
  kept = np.where(p >= np.take_along_axis(ordered, count, -1), p, 0)
  return kept / kept.sum(-1, keepdims=True)


def chi_square(top_p=1.0):
  """p-value of T tokens of many rows against the exact joint law."""
  p, q = _laws()
  ask = request.make(
    [[0]] * ROWS,
    max_new=T,
    seed=np.arange(ROWS),
    temperature=1.0,
    top_p=top_p,
  )
  table, q_table = (jnp.asarray(np.log(x), jnp.float32) for x in (p, q))
  out = generate.speculative(
    _target(),
    lm.make(_target(), V),
    table,
    q_table,
    ask,
    num_draft=K,
    max_new_tokens=T,
    verifier="token",
    slots=64,
  )
  assert (out.length == T).all()
  # every path is taken: nothing, something and everything accepted
  assert len(np.unique(out.accepted.sum(1))) >= K + 1
  law = round_test.target_law(_truncated(p, top_p) if top_p < 1 else p, T)
  want = ROWS * np.array(list(law.values()))  # texts in order
  got = np.bincount(out.tokens @ V ** np.arange(T)[::-1], minlength=V**T)
  possible = want > 0
  assert not got[~possible].any() and want[possible].min() > 5
  gap = (got - want)[possible] ** 2 / want[possible]
  return stats.chi2.sf(gap.sum(), possible.sum() - 1)


def check_counts():
  assert chi_square() > LEVEL


def check_counts_top_p():
  assert chi_square(top_p=0.8) > LEVEL


def check_enumeration():
  """The law alone, without the marks that a round leaves."""
  with jax.enable_x64(True):
    case = round_test.lm_case(V, K, 0, jnp.float64, dense=True)
    assert round_test.law_error(case, checks=False) <= 1e-12


def check_prefixes():
  """The law, that each draft is drawn from its own, and the marks."""
  with jax.enable_x64(True):
    case = round_test.lm_case(V, K, 0, jnp.float64, dense=True)
    assert round_test.law_error(case) <= 1e-12


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


# what MUTANTS names: each passes on the shipped code
CHECKS = [
  check_keys,
  check_counts,
  check_counts_top_p,
  check_prefixes,
  check_enumeration,
]


@pytest.mark.parametrize("check", CHECKS)
def test_shipped_code(check):
  check()


def test_no_token_has_the_number_of_a_tag():
  """Keys of plain decoding are folded with the number of a token."""
  tags = {int(tag) for tag in (rounds._DRAFT, rounds._ACCEPT)}
  tags.add(int(rounds._NEXT))
  assert len(tags) == 3 and min(tags) > np.iinfo(np.int32).max


# Faults in the keys: the noise of a round, made wrongly.

_NOISE = generate.keyed_noise
_fold = jax.vmap(jax.random.fold_in, (0, None))


def _draw(p, keys):
  return jax.vmap(sampling.draw)(p, keys)


def _one_u(state, num_draft, verifier):
  """One u for all positions: each token has its law, two together do not."""
  del verifier
  noise = _NOISE(state, num_draft, "token")
  u = jnp.broadcast_to(noise.accept[:, :1], noise.accept.shape)
  return noise._replace(accept=u)


def _next_has_the_key_of_a_draft(state, num_draft, verifier):
  """B07: of the draft at the place that is drawn again."""
  del verifier
  keys = _fold(_fold(state.key, rounds._DRAFT), state.steps)

  def following(n, probs):
    return _draw(probs, jax.vmap(jax.random.fold_in)(keys, n))

  return _NOISE(state, num_draft, "token")._replace(next=following)


def _next_has_the_key_of_the_first_draft(state, num_draft, verifier):
  del verifier
  keys = _fold(_fold(state.key, rounds._DRAFT), state.steps)
  following = lambda n, probs: _draw(probs, _fold(keys, 0))
  return _NOISE(state, num_draft, "token")._replace(next=following)


def _rounds_share_keys(state, num_draft, verifier):
  del verifier
  return _NOISE(state._replace(steps=0 * state.steps), num_draft, "token")


def _drafts_share_a_key(state, num_draft, verifier):
  del verifier
  noise = _NOISE(state, num_draft, "token")
  return noise._replace(draft=lambda i, q: noise.draft(0, q))


def _rows_share_keys(state, num_draft, verifier):
  del verifier
  first = jnp.broadcast_to(state.key[:1], state.key.shape)
  return _NOISE(state._replace(key=first), num_draft, "token")


# Faults in the laws.


def _argmax_draft(state, num_draft, verifier):
  """B05: the most likely token is drafted, q says that it was drawn."""
  del verifier
  draft = lambda i, q: jnp.argmax(q, -1).astype(jnp.int32)
  return _NOISE(state, num_draft, "token")._replace(draft=draft)


def _cold_draft(state, num_draft, verifier):
  """B05: drafted at T = 0.7, q is that of T = 1."""
  del verifier
  noise = _NOISE(state, num_draft, "token")
  return noise._replace(draft=lambda i, q: noise.draft(i, q ** (1 / 0.7)))


def _text(module, name, *changes):
  """(module, name, the shipped function with some of its text replaced)."""
  source = inspect.getsource(getattr(module, name))
  for old, new in changes:
    assert source.count(old) == 1, old
    source = source.replace(old, new)
  names = dict(vars(module))
  exec(source, names)
  return module, name, names[name]


def _noise(function):
  return generate, "keyed_noise", function


RAW = (  # the ratio before top-p, the residual behind it
  (
    "  n, following = _judge(verifier, p, proposal, noise)",
    "  raw = jax.nn.softmax(logits)\n"
    "  n, _ = _judge(verifier, raw, proposal, noise)\n"
    "  behind = jnp.pad(proposal.probs, ((0, 0), (0, 1), (0, 0)))\n"
    "  following = noise.next(n, jax.vmap(verify._residual)("
    "p[rows, n], behind[rows, n]))",
  ),
)

# name: (what kills it, module, name, broken function)
MUTANTS = {
  "one u": (check_counts, *_noise(_one_u)),
  "next: the draft's key": (
    check_counts,
    *_noise(_next_has_the_key_of_a_draft),
  ),
  "next: the first draft's key": (
    check_keys,
    *_noise(_next_has_the_key_of_the_first_draft),
  ),
  "rounds share keys": (check_counts, *_noise(_rounds_share_keys)),
  "drafts share a key": (check_counts, *_noise(_drafts_share_a_key)),
  "rows share keys": (check_keys, *_noise(_rows_share_keys)),
  "argmax draft": (check_counts, *_noise(_argmax_draft)),
  "draft at T = 0.7": (check_counts, *_noise(_cold_draft)),
  "raw ratio": (check_counts_top_p, *_text(rounds, "round", *RAW)),
  "resample from p": (
    check_enumeration,
    verify,
    "_residual",
    lambda p, q: p,
  ),
  "bonus from the residual": (
    check_enumeration,
    *_text(
      verify, "token", ("jnp.concatenate([q, jnp.zeros_like(p[:1])])", "q")
    ),
  ),
  "drop what the draft finds unlikely": (
    check_enumeration,
    *_text(verify, "token", ("(q_draft > 0)", "(q_draft > 0.2)")),
  ),
  "count behind a reject": (
    check_enumeration,
    *_text(
      verify,
      "token",
      ("jnp.cumprod(keep.astype(jnp.int32))", "keep.astype(jnp.int32)"),
    ),
  ),
  "residual of the next place": (
    check_enumeration,
    *_text(verify, "token", ("_residual(p[n]", "_residual(p[n + 1]")),
  ),
  "scored one place too late": (
    check_enumeration,
    *_text(
      loop,
      "positions",
      ("state.length - 1, state", "state.length, state"),
    ),
  ),
  "u <= p / q": (
    round_test.check_adversaries,
    *_text(
      verify, "token", ("u * q_draft < p_draft", "u * q_draft <= p_draft")
    ),
  ),
  "without q > 0": (
    round_test.check_adversaries,
    *_text(verify, "token", ("(q_draft > 0) & ", "")),
  ),
  "the length of a draft is not passed": (
    round_test.check_adversaries,
    *_text(rounds, "_judge", ("noise.accept, length=length", "noise.accept")),
  ),
  "the draft misses an accepted token": (  # B04: exact, but slower
    check_prefixes,
    *_text(lm, "make", ("jnp.array([-2, -1])", "jnp.array([-1, -1])")),
  ),
  "overlap at the wrong place": (
    check_prefixes,
    *_text(rounds, "_overlap", ("p[:, :K]", "p[:, 1:]")),
  ),
}


@contextlib.contextmanager
def _broken(monkeypatch, module, name, function):
  """The shipped code with one fault, compiled anew, and whole again after."""

  def forget():
    generate._speculate.clear_cache()
    round_test._program.cache_clear()

  with monkeypatch.context() as patch:
    for place in {module, generate, rounds}:  # where it is imported by name
      if hasattr(place, name):
        patch.setattr(place, name, function)
    forget()
    yield
  forget()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name, monkeypatch):
  """B02, B04, B05, B07, B48: by a check that the shipped code passes."""
  check, *fault = MUTANTS[name]
  with _broken(monkeypatch, *fault), pytest.raises(AssertionError):
    check()


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
  del verifier
  keys = _fold(_fold(state.key, rounds._NEXT), state.steps)
  uniform = lambda key: jax.random.uniform(key, (num_draft,), jnp.float32)
  return _NOISE(state, num_draft, "token")._replace(
    accept=jax.vmap(uniform)(keys), next=lambda n, p: _draw(p, keys)
  )


def test_jax_finds_no_key_reused(monkeypatch):
  """B07: JAX's own check, which follows keys but not how they were folded."""
  state = _state(PROMPTS, SEEDS, 1)
  with jax.debug_key_reuse(True):
    _drawn(state, K)
    monkeypatch.setattr(generate, "keyed_noise", _one_key)
    with pytest.raises(jax.errors.KeyReuseError):
      _drawn(state, K)
