"""Speculative decoding emits what plain decoding does, for every draft.

Token for token at T = 0 in float32, in any company, near every end.
"""

import functools
import logging
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from generate_test import _tiny, _toy

from specjax import generate, metrics, request, types
from specjax.drafters import lm, ngram, replay
from specjax.models import transformer

SLOTS = 64
N = 12
# Both pairs know these ids. One token, two tokens; a prompt that repeats.
PROMPTS = [[1], [2, 3], [5, 6, 5, 6, 5], [9] * 30, [3, 1, 4, 1, 5], [8], [0, 0]]
B = len(PROMPTS)


def _prompts(seed):
  """Random ones of 1, 2 and more tokens, in random order."""
  rng = np.random.default_rng(seed)
  lengths = rng.permutation([1, 2, 1 + seed, 3, 7, 17, 30])
  return [rng.integers(0, 11, n).tolist() for n in lengths]


def _mixed(params, seed, share):
  """The parameters, moved towards others: a draft that is right at times."""
  key = jax.random.key(seed)
  leaves, tree = jax.tree.flatten(params)
  other = [
    x.std() * jax.random.normal(jax.random.fold_in(key, i), x.shape)
    for i, x in enumerate(leaves)
  ]
  mix = lambda x, y: (1 - share) * x + share * y
  return jax.tree.unflatten(tree, list(map(mix, leaves, other)))


@functools.cache
def _drafter(pair, kind):
  """A `Drafter` and three sets of parameters; None: what was decoded."""
  target, params = pair()
  V = target.vocab_size
  if kind == "random":
    return toy.random_drafter(V), [jax.random.key(i) for i in range(3)]
  if kind == "lm":  # itself, half itself, other weights altogether
    return lm.make(target, V), [_mixed(params, 1, s) for s in (0, 0.3, 1)]
  if kind == "ngram":
    return ngram.make(V), [(), (), ()]
  return replay.make(V), [None] * 3


def _draft(pair, kind, which, K, earlier=None, **options):
  drafter, params = _drafter(pair, kind)
  given = params[which]
  if kind == "replay":
    given = replay.Params(earlier.tokens, np.float32([1, 0.7, 0][which]))
  return types.Draft(drafter, given, K, **options)


def _plain(pair, ask, n=N):
  target, params = pair()
  return generate.autoregressive(
    target, params, ask, max_new_tokens=n, slots=SLOTS
  )


def _speculate(pair, ask, draft, n=N):
  target, params = pair()
  return generate.speculative(
    target,
    draft.drafter,
    params,
    draft.params,
    ask,
    num_draft=draft.num_draft,
    draft_sampling=draft.sampling,
    max_new_tokens=n,
    slots=SLOTS,
  )


def _check(plain, out, K):
  """The same answer, and marks that add up."""
  np.testing.assert_array_equal(out.tokens, plain.tokens)
  np.testing.assert_array_equal(out.length, plain.length)
  np.testing.assert_array_equal(out.finish_reason, plain.finish_reason)
  _check_marks(out, K)


def _check_marks(out, K):
  """B02: the marks are of what was emitted, round by round, no more."""
  assert out.stats.steps == out.round.max(initial=-1) + 1
  behind = np.arange(out.tokens.shape[1]) >= out.length[:, None]
  assert (out.tokens[behind] == -1).all() and (out.round[behind] == -1).all()
  assert not out.accepted[behind].any() and np.isnan(out.overlap[behind]).all()
  emitted = 0
  for row, n in enumerate(out.length):
    rounds, counts = np.unique(out.round[row, :n], return_counts=True)
    np.testing.assert_array_equal(rounds, np.arange(len(rounds)))  # no hole
    for r, count in zip(rounds, counts, strict=True):
      mine = out.round[row] == r
      accepted, overlap = out.accepted[row, mine], out.overlap[row, mine]
      assert count <= K + 1 and (np.diff(np.flatnonzero(mine)) == 1).all()
      # the draft's first, then one of the target's; the last round may be cut
      assert accepted[:-1].all()
      assert not accepted[-1] or r == rounds[-1]
      assert not np.isnan(overlap[accepted]).any()
      assert np.isnan(overlap[K:]).all()  # the bonus token was not tested
      emitted += count
  got = metrics.acceptance(out, K)
  assert got.tokens == emitted == out.length.sum()
  assert got.histogram.sum() == got.rounds
  assert got.histogram @ np.arange(K + 1) == out.accepted.sum()


CASES = [
  (_toy, "random", 3),
  (_toy, "random", 8),
  (_toy, "lm", 0),
  (_toy, "lm", 1),
  (_toy, "lm", 4),
  (_toy, "lm", 7),
  (_toy, "ngram", 5),
  (_toy, "replay", 6),
  (_tiny, "random", 2),
  (_tiny, "lm", 4),
  (_tiny, "ngram", 3),
  (_tiny, "replay", 3),
]


@pytest.mark.parametrize("pair, kind, K", CASES)
def test_greedy_equals_plain_decoding(pair, kind, K):
  """Random prompts, drafts and limits; rows end at 0 .. K + 2 and at N."""
  accepted = 0
  for seed in range(3):
    rng = np.random.default_rng(seed)
    limits = [N, 1, *rng.integers(0, min(K + 3, N), B - 2)]
    ask = request.make(_prompts(seed), max_new=rng.permutation(limits))
    plain = _plain(pair, ask)
    out = _speculate(pair, ask, _draft(pair, kind, seed, K, plain))
    _check(plain, out, K)
    accepted += out.accepted.sum()
  assert accepted or not K  # else nothing but rejections was seen


@pytest.mark.parametrize("pair", [_toy, _tiny])
def test_any_token_may_be_the_stop(pair):
  """T3, B01, B30: whichever token is declared the end, wherever it falls.

  The draft is the target, so that blocks are as long as they can be.
  """
  K, places = 4, set()
  draft = _draft(pair, "lm", 0, K)
  free = _plain(pair, request.make(PROMPTS, max_new=N))
  for i in range(N):
    # row 1 has the limit i + 1: its stop comes exactly at the cap, and wins
    limits = [N, i + 1] + [N] * (B - 2)
    stops = [int(free.tokens[i % B, i]), int(free.tokens[1, i])]
    ask = request.make(PROMPTS, max_new=limits, stop_ids=stops)
    plain, out = _plain(pair, ask), _speculate(pair, ask, draft)
    _check(plain, out, K)
    assert out.finish_reason[1] == types.STOP
    for row in np.flatnonzero(out.finish_reason == types.STOP):
      last = out.length[row] - 1
      places.add(last - np.argmax(out.round[row] == out.round[row, last]))
  assert places == set(range(K + 1))


@pytest.mark.parametrize("pair", [_toy, _tiny])
def test_every_limit(pair):
  """max_new from 0 to K + 2, in one batch: never a token more."""
  K = 4
  ask = request.make(PROMPTS, max_new=range(K + 3))
  plain = _plain(pair, ask)
  for which in range(3):
    out = _speculate(pair, ask, _draft(pair, "lm", which, K))
    _check(plain, out, K)
    np.testing.assert_array_equal(out.length, range(K + 3))
    assert (out.finish_reason == types.LENGTH).all()


@pytest.mark.parametrize("pair", [_toy, _tiny])
def test_an_equal_draft_is_always_accepted(pair):
  """B04: K + 1 tokens a round to the end, after prompts of any length."""
  K, n = 4, 30
  ask = request.make(PROMPTS, max_new=n)
  out = _speculate(pair, ask, _draft(pair, "lm", 0, K), n)
  _check(_plain(pair, ask, n), out, K)
  assert out.stats.steps == n // (K + 1)
  assert metrics.acceptance(out, K).tokens_per_call == K + 1


@pytest.mark.parametrize("pair", [_toy, _tiny])
def test_the_last_slot(pair):
  """B03: prompt + max_new fills the cache; K reaches past its end."""
  K = 4
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 11, SLOTS - N - b).tolist() for b in range(B)]
  # rows end in the last slot, and in the ones before it
  limits = [N + b for b in range(B)]
  ask = request.make(prompts, max_new=limits)
  n = max(limits)
  for which in range(3):
    draft = _draft(pair, "lm", which, K)
    plain, out = _plain(pair, ask, n), _speculate(pair, ask, draft, n)
    _check(plain, out, K)
    np.testing.assert_array_equal(out.length, limits)
  target, params = pair()
  roomy = generate.autoregressive(target, params, ask, max_new_tokens=n)
  np.testing.assert_array_equal(roomy.tokens, out.tokens)


def test_the_context_ends_a_row():
  """B03: as plain decoding does, at the very same token."""
  kind, K = "lm", 4
  table = _toy()[1]
  target = toy.trigram(11, context=SLOTS)
  pair = lambda: (target, table)
  rng = np.random.default_rng(1)
  lengths = [SLOTS, SLOTS - 1, SLOTS - 2, SLOTS - 5, SLOTS - 9, 30, 1]
  prompts = [rng.integers(0, 11, length).tolist() for length in lengths]
  ask = request.make(prompts, max_new=N)
  plain = _plain(pair, ask)
  for which in range(3):
    out = _speculate(pair, ask, _draft(_toy, kind, which, K))
    _check(plain, out, K)
  ends = [min(SLOTS - length, N) for length in lengths]
  np.testing.assert_array_equal(out.length, ends)
  assert (out.finish_reason[:5] == types.CONTEXT).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind, K", [("lm", 4), ("random", 8)])
def test_a_broken_target_ends_its_row(kind, K, bad):
  """B47: with what stood before it; the neighbours notice nothing."""
  target, table = _toy()
  free = _plain(_toy, request.make(PROMPTS, max_new=N)).tokens
  # the law behind the third and fourth tokens of row 4
  a, b = free[4, 2:4]
  broken = table.at[a, b, 3].set(bad)
  pair = lambda: (target, broken)
  ask = request.make(PROMPTS, max_new=N)
  plain = _plain(pair, ask)
  for which in range(3):
    out = _speculate(pair, ask, _draft(_toy, kind, which, K))
    _check(plain, out, K)
  assert out.finish_reason[4] == types.NONFINITE and out.length[4] <= 4
  others = out.finish_reason == types.LENGTH
  assert others.any()
  np.testing.assert_array_equal(out.tokens[others], free[others])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_draft_is_rejected(bad):
  """B47: its token is not taken, its law leaves no trace in the output."""
  drafter, params = _drafter(_toy, "lm")
  ask = request.make(PROMPTS, max_new=N)
  plain = _plain(_toy, ask)
  half = params[0].at[::2].set(bad)  # half of the laws
  for broken in (half, jnp.full_like(half, bad)):
    out = _speculate(_toy, ask, types.Draft(drafter, broken, 4))
    _check(plain, out, 4)
  assert not out.accepted.any()
  assert np.nansum(out.overlap) == 0


MIXED = dict(
  temperature=[0, 0.8, 0, 1.0, 0.8, 1.5, 0.8],
  top_p=[1, 1, 0.9, 0.8, 1, 1, 0.5],
  top_k=[0, 0, 0, 0, 5, 0, 0],
  seed=[1, 2, 3, 4, 5, 6, 7],
)


def _answers(out, rows=None):
  """All that is said of some rows."""
  out = out._replace(stats=None, logprobs=None)
  return jax.tree.map(lambda x: x[rows], out) if rows is not None else out


@pytest.mark.parametrize(
  "pair, kind, K",
  [(_toy, "random", 3), (_toy, "ngram", 5), (_tiny, "lm", 4)],
)
def test_rows_do_not_see_each_other(pair, kind, K):
  """B15, B08: greedy and sampled rows alone, permuted, among empty rows."""
  draft = _draft(pair, kind, 1, K)
  ask = request.make(PROMPTS, max_new=N, **MIXED)
  together = _speculate(pair, ask, draft)
  plain = _plain(pair, ask)
  greedy = np.flatnonzero(np.array(MIXED["temperature"]) == 0)
  np.testing.assert_array_equal(together.tokens[greedy], plain.tokens[greedy])
  _check_marks(together, K)

  def agree(rows, **options):
    some = {key: [value[i] for i in rows] for key, value in MIXED.items()}
    prompts = [PROMPTS[i] for i in rows]
    ask = request.make(prompts, max_new=N, **some, **options)
    got = _answers(_speculate(pair, ask, draft), range(len(rows)))
    want = _answers(together, np.array(rows))
    for name, a, b in zip(got._fields, got, want, strict=True):
      if a is not None and name != "stats":
        # laws differ in their last bits between batch sizes
        check = np.testing.assert_allclose
        check(np.asarray(a, float), np.asarray(b, float), atol=1e-5)

  agree([6, 2, 5, 0, 4, 1, 3])
  agree([4, 1, 3], batch=B)
  for i in range(B):
    agree([i])


@pytest.mark.parametrize("chunk_steps", [1, 3, 100])
@pytest.mark.parametrize("pair", [_toy, _tiny])
def test_streaming_changes_nothing(pair, chunk_steps):
  target, params = pair()
  draft = _draft(pair, "lm", 1, 4)
  ask = request.make(PROMPTS, max_new=N, stop_ids=[7], **MIXED)
  whole = _speculate(pair, ask, draft)
  parts = list(
    generate.stream(
      target,
      params,
      ask,
      max_new_tokens=N,
      slots=SLOTS,
      chunk_steps=chunk_steps,
      draft=draft,
    )
  )
  jax.tree.map(np.testing.assert_array_equal, parts[-1], whole)
  assert len(parts) == max(1, -(-int(whole.stats.steps) // chunk_steps))
  for early, late in zip(parts, parts[1:], strict=False):
    for row, n in enumerate(early.length):
      for name in ("tokens", "round", "accepted", "overlap"):
        a, b = getattr(early, name), getattr(late, name)
        np.testing.assert_array_equal(a[row, :n], b[row, :n])


@pytest.mark.parametrize(
  "pair, kind, K",
  [
    (_toy, "ngram", 5),
    (_toy, "replay", 6),
    (_tiny, "lm", 4),
  ],
)
def test_x64_changes_nothing(pair, kind, K):
  """B59: the same tokens, marks and types with 64-bit types enabled."""
  ask = request.make(PROMPTS, max_new=N, stop_ids=[7], **MIXED)
  draft = _draft(pair, kind, 1, K, _plain(pair, ask))
  want = _speculate(pair, ask, draft)
  with jax.enable_x64(True):
    got = _speculate(pair, ask, draft)
  for name, a, b in zip(got._fields, got, want, strict=True):
    if name == "overlap":
      np.testing.assert_allclose(a, b, atol=1e-6)
    else:
      jax.tree.map(np.testing.assert_array_equal, a, b)
    types_of = lambda x: [y.dtype for y in jax.tree.leaves(x)]
    assert types_of(a) == types_of(b)


@pytest.mark.parametrize("kind, K", [("lm", 4), ("ngram", 5), ("replay", 6)])
def test_what_is_passed_survives(kind, K):
  """B32: of request, parameters and draft nothing is donated."""
  ask = request.make(PROMPTS, max_new=N, **MIXED)
  ask = jax.tree.map(jnp.asarray, ask)
  draft = _draft(_toy, kind, 1, K, _plain(_toy, ask), sampling=ask.sampling)
  draft = draft._replace(params=jax.tree.map(jnp.asarray, draft.params))
  first, again = (_speculate(_toy, ask, draft) for _ in range(2))
  jax.tree.map(np.testing.assert_array_equal, first, again)
  kept = jax.tree.leaves((ask, draft.params, _toy()[1]))
  assert not any(x.is_deleted() for x in kept)


@pytest.mark.parametrize("kind, K", [("lm", 4), ("ngram", 5), ("replay", 6)])
def test_one_compilation_for_a_setting(kind, K, caplog):
  """B09: nothing that is data compiles anything, not even a helper."""

  def run(prompts, n, draft_sampling=None, **options):
    ask = request.make(prompts, max_new=n, **options)
    draft = _draft(_toy, kind, 1, K, earlier)
    draft = draft._replace(sampling=draft_sampling)
    _speculate(_toy, ask, draft, np.max(n))

  earlier = _plain(_toy, request.make(PROMPTS, max_new=N))
  run(PROMPTS, N)
  other = [[1, 2], [3] * 31, [4] * 17, [5], [6], [7, 7], [8, 9]]
  sharper = request.make(other, max_new=1, temperature=0.3, top_p=0.7, top_k=2)
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    run(
      other,
      [30, 1, 0, 7, 7, 7, 20],
      draft_sampling=sharper.sampling,
      stop_ids=[1, 2, 3],
      min_p=0.01,
      **MIXED,
    )
    run(other, 9, temperature=0.7)
  compiled = [r.message for r in caplog.records if "ompil" in r.message]
  assert not compiled
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    jax.jit(lambda x: x + K)(1.0)  # a program is seen where there is one
  assert [r.message for r in caplog.records if "ompil" in r.message]


def _one_layer(**changes):
  config = dict(
    vocab_size=97,
    width=32,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=8,
    hidden=48,
    context=4096,
    inv_freq=(1.0, 0.1, 0.01, 0.001),
  )
  config = transformer.Config(**config | changes)
  return transformer.make(config), transformer.init(config, jax.random.key(1))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("K", [1, 4])
def test_no_copy_of_a_cache_in_the_loop(batch, K):
  """Both caches are updated in place, in the loop over drafts too."""
  target, params = _one_layer()
  model, draft_params = _one_layer(kv_heads=4, head_dim=4, inv_freq=(1.0, 0.1))
  drafter = lm.make(model, 97)
  draft = types.Draft(drafter, draft_params, K)
  ask = request.make(PROMPTS[:batch], max_new=N)
  state = generate.start(target, params, ask, max_new_tokens=N, draft=draft)
  lowered = generate._speculate.lower(
    target,
    drafter,
    params,
    draft_params,
    state,
    np.int32(4),
    num_draft=K,
    verifier="token",
  )
  text = lowered.compile().as_text()
  shape = lambda x: f"f32[{','.join(map(str, x.shape))}]"
  caches = [
    {shape(x) for x in jax.tree.leaves(cache)}
    for cache in (state.cache, state.draft)
  ]
  assert caches[0].isdisjoint(caches[1])
  copies = [
    line.strip()
    for line in text.splitlines()
    if re.search(r" (copy|copy-start|transpose)\(", line)
    and any(f"= {s}" in line for s in caches[0] | caches[1])
  ]
  assert all(s in text for s in caches[0] | caches[1])
  assert not copies, copies[:3]


SCRIPT = """
import sys
sys.path[:0] = [".", "tests"]
import numpy as np
import speculative_test as t
from specjax import metrics, request
how, path = sys.argv[1:]
ask = request.make(t.PROMPTS, max_new=30)
if how == "plain":
  out = t._plain(t._tiny, ask, 30)
else:
  out = t._speculate(t._tiny, ask, t._draft(t._tiny, "lm", 1, 4), 30)
  print(metrics.acceptance(out, 4).tokens_per_call)
np.savetxt(path, out.tokens, "%d")
"""
COMPARE = """
import pathlib, sys
a, b = (pathlib.Path(path).read_text() for path in sys.argv[1:])
sys.exit(a != b or not a)
"""


def test_two_processes_write_the_same_tokens(tmp_path):
  """Each its own, and a third one compares the files."""

  def python(script, *args):
    return subprocess.run(
      [sys.executable, "-c", script, *map(str, args)],
      cwd=pathlib.Path(__file__).parents[1],
      capture_output=True,
      text=True,
      check=False,
    )

  plain, speculative = tmp_path / "plain.txt", tmp_path / "speculative.txt"
  one = python(SCRIPT, "plain", plain)
  assert one.returncode == 0, one.stderr
  two = python(SCRIPT, "speculative", speculative)
  assert two.returncode == 0, two.stderr
  assert 1.5 < float(two.stdout) < 5
  assert python(COMPARE, plain, speculative).returncode == 0
  assert len(plain.read_text().split()) == B * 30
  speculative.write_text(speculative.read_text().replace("7", "8"))
  assert python(COMPARE, plain, speculative).returncode == 1


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(verifier="tokn"), "verifier must be one of block, token, coupled"),
    (dict(verifier="Verdict"), "verifier must be one of"),
    (dict(num_draft=-1), "num_draft must be a whole number of 0 or more"),
    (dict(num_draft=3.0), "num_draft must be a whole number"),
    (
      dict(draft_sampling=types.Sampling(0.5, 0, 1.0, 0.0)),
      r"must have shape \(2,\), got",
    ),
  ],
)
def test_mistakes_in_words(change, message):
  target, params = _toy()
  ask = request.make([[1], [2]], max_new=2)
  options = dict(num_draft=1, max_new_tokens=2) | change
  with pytest.raises(ValueError, match=message):
    generate.speculative(
      target, ngram.make(target.vocab_size), params, (), ask, **options
    )
