"""A head that reads the target's hidden states: its cache, law and output."""

import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import round_test
from generate_test import PROMPTS, _tiny
from lm_test import _slots

from specjax import adaptive, generate, loop, request, types
from specjax.drafters import feature
from specjax.models import rope, transformer

N, K = 24, 3
FEATURES = {(1,): 1, (0, 1): 1, (0, 1, 1): 2}  # and how many layers


def _config(features, *, width=32, vocab_size=97, layers=1, head_size=None):
  layers = transformer.Config(
    vocab_size=vocab_size,
    width=width,
    layers=layers,
    heads=2,
    kv_heads=1,
    head_dim=4,
    hidden=24,
    context=4096,
    inv_freq=rope.inv_freq(4, theta=1e4, kind="default", scaling={}),
    head_size=head_size,
  )
  return feature.Config(layers, features)


@functools.cache
def _params(config, seed=0, scale=0.3):
  """Random numbers that make every input matter."""

  def leaf(path, spec):
    key = jax.random.key(seed + 7919 * len(str(path)))
    x = scale * jax.random.normal(key, spec.shape)
    return 1 + x if path[-1].key == "scale" else x

  return jax.tree_util.tree_map_with_path(leaf, feature.shapes(config))


def _draft(features=(0, 1), num_draft=K, ids=None, **options):
  config = _config(features, **options)
  drafter = feature.make(config, 97, ids=ids)
  # what two layers make of numbers as large as one's is rounded at 1e-5
  scale = 0.3 if config.layers.layers == 1 else 0.2
  return types.Draft(drafter, _params(config, scale=scale), num_draft)


# What comes out is the target's


MANY = [*PROMPTS, [7, 7], [2] * 5, [50, 60, 50, 60], [96] * 70]
MIXED = dict(
  temperature=[0.3, 1.0, 1.7, 1.7, 1.0, 0.3, 1.7, 0.0],
  top_k=[0, 0, 0, 20, 5, 0, 0, 0],
  top_p=[1, 1, 1, 0.9, 1, 0.8, 0.9, 1],
  seed=range(8),
)


@functools.cache
def _plain(greedy):
  target, params = _tiny()
  ask = _ask(range(8), greedy)
  return generate.autoregressive(target, params, ask, max_new_tokens=N)


def _ask(rows, greedy):
  how = {key: [value[i] for i in rows] for key, value in MIXED.items()}
  how = {"seed": how["seed"]} if greedy else how
  prompts = [MANY[i] for i in rows]
  return request.make(prompts, max_new=N, stop_ids=[7], **how)


QUICK = {(1, 1), (3, 8), (8, 3)}
CASES = [
  pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
  for case in itertools.product(range(1, 9), [1, 3, 8])
]


@pytest.mark.parametrize("num_draft, batch", CASES)
@pytest.mark.parametrize("greedy", [True, False])
def test_tokens_are_those_of_plain_decoding(num_draft, batch, greedy):
  """At T = 0 by block verification, at others coupled, in any company."""
  target, params = _tiny()
  draft = _draft()
  want = _plain(greedy)
  for first in range(0, len(MANY), batch):
    rows = [(first + i) % len(MANY) for i in range(batch)]
    got = generate.speculative(
      target,
      draft.drafter,
      params,
      draft.params,
      _ask(rows, greedy),
      num_draft=num_draft,
      max_new_tokens=N,
      verifier="block" if greedy else "coupled",
    )
    np.testing.assert_array_equal(got.tokens, want.tokens[rows])
    np.testing.assert_array_equal(got.finish_reason, want.finish_reason[rows])


def test_rows_that_stop_drafting():
  """A policy by which each row decides: lengths differ, tokens do not."""
  target, params = _tiny()
  draft = _draft((0, 1, 0))
  policy = adaptive.Policy(0.05, 1 + 0.2 * np.arange(5), 0.0)
  rows, accepted = range(8), 0
  for greedy, verifier in ((True, "block"), (False, "coupled")):
    got = generate.speculative(
      *(target, draft.drafter, params, draft.params, _ask(rows, greedy)),
      num_draft=4,
      max_new_tokens=N,
      verifier=verifier,
      policy=policy,
    )
    want = _plain(greedy)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.finish_reason, want.finish_reason)
    drafted = ~np.isnan(got.overlap)
    accepted += got.accepted.sum()
    assert 0 < drafted.sum() < 0.8 * got.length.sum()
  assert accepted


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_joint_law(verifier):
  """Every outcome summed, on a toy target that shows its hidden states.

  The draft's laws depend on all of the text, so thresholds are found in the
  code and drafts are weighed by what they were really drawn from.
  """
  V = 3
  rng = np.random.default_rng(0)
  p = rng.dirichlet(np.ones(V), (V, V))
  config = _config((0,), width=V, vocab_size=V)
  case = round_test.Case(
    p=p,
    q=np.full((V, V, V), 1 / V),  # where a draft is possible: everywhere
    drafter=feature.make(config, V),
    params=_params(config, scale=1.0),
    num_draft=2,
    length=4,
    dtype=np.float32,
    checks=False,
    verifier=verifier,
    probe=True,
  )
  found = round_test.joint_law(case)
  assert len(found) == V**4
  for text, got in found.items():
    want, before = 1.0, (0, 0)
    for token in text:
      want *= p[(*before, token)]
      before = before[1], token
    assert got == pytest.approx(want, abs=2e-6)


# Its cache


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="num_draft")
def _round(target, drafter, params, draft_params, state, accept, num_draft):
  """A round that accepts so many [B]: u = 0 keeps, u = inf rejects."""
  i = jnp.arange(num_draft)
  u = jnp.where(i < accept[:, None], 0.0, jnp.inf)
  noise = generate.keyed_noise(state, num_draft, "token")._replace(accept=u)
  options = dict(num_draft=num_draft, verifier="token")
  return generate.round(
    target, drafter, params, draft_params, state, noise, **options
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fresh(target, drafter, params, draft_params, tokens, length):
  """A pass over the committed tokens with the target's own features."""
  at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  features = drafter.features
  _, taps, _ = target.apply(params, tokens, at, None, features=features)
  return drafter.init(draft_params, tokens, length, taps, tokens.shape[1])


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("plan", [[3], [0], [3, 0, 2, 1, 3], ["-", 3, 0, "-"]])
def test_its_cache_holds_no_guess(plan, features):
  """B04: after rounds that accept all, none, some, and rounds of K = 0 ("-").

  Every committed token is there with the target's features, and what the next
  round starts from is what a fresh pass ends in. Rows begin elsewhere in the
  plan.
  """
  _check_cache(_draft(features, layers=FEATURES[features]), plan)


def test_its_cache_under_a_policy():
  """B04: a target call of the width that the longest draft needs has taps."""
  every = adaptive.Policy(0.0, np.ones(K + 1), 0.0)  # drafting costs nothing
  _check_cache(_draft()._replace(policy=every), [3, 0, 2, 1, 3])


def _check_cache(draft, plan):
  prompts = [[1], [2, 3], list(range(5, 35)), [7] * 63, [8] * 64, [9] * 65]
  target, params = _tiny()
  ask = request.make(prompts, max_new=60, temperature=1.0)
  state = loop.start(target, params, ask, max_new_tokens=60, draft=draft)
  counts = [n for n in plan if n != "-"]
  fed = target, draft.drafter, params, draft.params
  for t in range(len(plan) + 2):
    k = 0 if plan[t % len(plan)] == "-" else K
    n = [counts[(t + row) % len(counts)] for row in range(len(prompts))]
    n = np.minimum(np.array(n), k)
    before = np.asarray(state.length)
    state = _round(*fed, state, n, num_draft=k)
    length = np.asarray(state.length)
    np.testing.assert_array_equal(length, before + n + 1)
    fresh = _fresh(*fed, state.tokens, state.length)
    np.testing.assert_allclose(state.draft.last, fresh.last, atol=1e-5)
    got, want = (_slots(x.cache, length) for x in (state.draft, fresh))
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, atol=1e-5), got, want
    )


def test_a_prompts_features_come_from_its_prefill():
  """As one pass would have them; a row of one token has none before it."""
  target, params = _tiny()
  draft = _draft()
  ask = request.make([[1], [96] * 130, [5, 6]], max_new=4)
  state = loop.start(target, params, ask, max_new_tokens=4, draft=draft)
  fed = target, draft.drafter, params, draft.params
  fresh = _fresh(*fed, jnp.asarray(state.tokens), jnp.asarray(state.length))
  np.testing.assert_allclose(state.draft.last, fresh.last, atol=1e-5)


# Its law


def test_the_first_law_by_hand():
  """q behind a prompt of two tokens, written out with NumPy."""
  target, params = _tiny()
  draft = _draft((0, 1))
  config, own = _config((0, 1)), jax.device_get(draft.params)
  ids = np.array([[3, 8]])
  _, taps, _ = target.apply(
    params, ids, np.array([[0, 1]]), None, features=(0, 1)
  )
  eps = config.layers.norm_eps
  norm = lambda x, scale: x / np.sqrt((x**2).mean(-1) + eps)[..., None] * scale
  g = np.asarray(taps)[0].reshape(2, -1) @ own["fuse"]["kernel"]
  before = np.stack([np.zeros(32), g[0]])
  token = norm(own["embed"][ids[0]], own["token_norm"]["scale"])
  x = np.concatenate([token, norm(before, own["feature_norm"]["scale"])], -1)
  x = x @ own["join"]["kernel"]
  at = jnp.array([[0, 1]])
  mask = jnp.tril(jnp.ones((1, 2, 2), bool))
  a, _ = transformer.layers(
    config.layers, own, jnp.asarray(x, jnp.float32)[None], at, mask, None
  )
  want = norm(np.asarray(a)[0, 1], own["norm"]["scale"]) @ own["head"]
  ask = request.make(ids.tolist(), max_new=2)
  state = loop.start(target, params, ask, max_new_tokens=2, draft=draft)
  got = feature.head(config, draft.params, state.draft.last)[0]
  np.testing.assert_allclose(got, want, atol=1e-4)


def test_a_trimmed_head_speaks_in_the_targets_ids():
  """Only its ids are drafted; the output stays plain decoding's."""
  ids = tuple(range(0, 97, 3))
  draft = _draft((1,), ids=ids, head_size=len(ids))
  target, params = _tiny()
  ask = _ask(range(8), False)
  out = generate.speculative(
    target,
    draft.drafter,
    params,
    draft.params,
    ask,
    num_draft=4,
    max_new_tokens=N,
    verifier="coupled",
  )
  np.testing.assert_array_equal(out.tokens, _plain(False).tokens)
  assert set(out.tokens[out.accepted]) <= set(ids)
  with pytest.raises(ValueError, match="differ"):
    feature.make(_config((1,)), 97, ids=(1, 1))


def test_the_readme_counts_its_lines():
  """What it says that a drafter costs is what this one does."""
  root = pathlib.Path(__file__).parents[1]
  lines = (root / "specjax/drafters/feature.py").read_text().count("\n")
  assert f"feature.py),\n{lines} lines, is" in (root / "README.md").read_text()
