"""One micro-batch and one step: what is summed, divided, moved and donated."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

from specjax import losses, step, student, trajectories
from specjax.drafters import feature
from specjax.models import load

V, T, STEPS = 260, 128, 10
_COLD = 0.05  # random logits are small
_SIZES = dict(
  model_type="llama",
  vocab_size=V,
  hidden_size=16,
  intermediate_size=32,
  num_attention_heads=2,
  num_key_value_heads=1,
  max_position_embeddings=256,
  rms_norm_eps=1e-5,
  tie_word_embeddings=False,
)
_HOW = ml_collections.ConfigDict(
  dict(
    learning_rate=1e-2,
    warmup=0.2,
    beta1=0.9,
    beta2=0.95,
    weight_decay=0.1,
    clip=0.1,
  )
)


@pytest.fixture(scope="module")
def teacher():
  return load.whole(load.model(load.random(_SIZES | {"num_hidden_layers": 2})))


def _student(teacher, found=None, **more):
  asked = dict(
    name="lm",
    weights="",
    layers=(0,),
    architecture={},
    features=(),
    depth_weights=(),
    embedding="own",
    head=0,
  )
  config = ml_collections.ConfigDict(dict(seed=0, draft=asked | more))
  return student.make(config, teacher, found)


def _programs(
  teacher,
  draft,
  *,
  how=_HOW,
  dtype=jnp.float32,
  answer=None,
  depth_weights=(1.0,),
  **deployment,
):
  return step.make(
    teacher.target,
    step.forward(draft, len(depth_weights)),
    student.merged,
    step.optimiser(how, STEPS),
    step.learning_rate(how.learning_rate, round(how.warmup * STEPS), STEPS),
    schedule=(("forward_kl", 1.0),),
    steps=STEPS,
    log_every=3,
    dtype=dtype,
    answer=answer,
    depth_weights=depth_weights,
    ids=draft.ids,
    **deployment,
  )


class Pair(NamedTuple):
  """A draft and its programs, compiled once for all tests."""

  draft: student.Student
  programs: step.Steps


@pytest.fixture(scope="module")
def pair(teacher):
  draft = _student(teacher)
  return Pair(draft, _programs(teacher, draft))


def _start(draft, how=_HOW):
  fresh = jax.tree.map(lambda x: jnp.array(x, copy=True), draft.params)
  return step.start(fresh, step.optimiser(how, STEPS))


def _batch(*answers, rows=(0, 1), seed=0):
  """Two rows of 9 prompt tokens and answers of so many, at T = _COLD."""
  rng = np.random.default_rng(seed)
  draw = lambda n: rng.integers(0, V, n).tolist()
  found = trajectories.make([(draw(9), draw(n), _COLD) for n in answers])
  return trajectories.batch(found, np.array(rows), T)


def _run(programs, state, teacher, draft, batches):
  for batch in batches:
    state = programs.accumulate(state, batch, teacher.params, draft.shared)
  return state


def _close(a, b, **tolerance):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, **tolerance)


def test_heads_see_the_answers_alone(teacher, pair):
  """Any bound on a row's answer gives the same sums and gradient.

  One row's answer ends with the batch, so that the bound reaches behind it.
  """
  draft, programs = pair
  batch = _batch(9, T, seed=3)
  assert batch.mask.sum(1).tolist() == [9, T - 8]
  right = _run(programs, _start(draft), teacher, draft, [batch])
  for answer in (T - 8, T - 4):
    some = _programs(teacher, draft, answer=answer)
    found = _run(some, _start(draft), teacher, draft, [batch])
    assert found.sums.weight == right.sums.weight == T + 1
    _close(found.sums, right.sums, rtol=1e-5)
    _close(found.gradient, right.gradient, rtol=2e-4, atol=1e-5)


def test_a_step_weighs_tokens_not_micro_batches(teacher, pair):
  """11 and 101 tokens, apart and together: one gradient, one step (B19).

  A micro-batch without a supervised token adds nothing (B20).
  """
  draft, programs = pair
  sizes = 11, 101, 0  # the third row teaches nothing
  ways = {
    "together": [(0, 1)],
    "apart": [(0, 2), (2, 1)],
    "with one that has none": [(2, 2), (0, 2), (1, 2)],
  }
  ended = {}
  for name, rows in ways.items():
    batches = [_batch(*sizes, rows=each) for each in rows]
    state = _run(programs, _start(draft), teacher, draft, batches)
    assert int(state.micro) == len(rows) and float(state.sums.weight) == 112
    gradient = jax.tree.map(np.asarray, state.gradient)
    state, report = programs.update(state)
    assert int(state.micro) == 0 and int(state.step) == 1
    assert not any(x.any() for x in jax.tree.leaves(state.gradient))
    ended[name] = gradient, report
  for gradient, report in ended.values():
    _close(gradient, ended["together"][0], rtol=1e-3, atol=1e-3)
    _close(report, ended["together"][1], rtol=1e-4)
  # a mean of means would give the short row nine times its weight
  assert float(ended["together"][1].norm) > 0.01


def _plain_loss(teacher, draft, params, batch):
  """Mean KL(p || q) over the supervised tokens, all logits at once."""
  at = jnp.broadcast_to(jnp.arange(T), batch.tokens.shape)
  of = lambda model, params: model.unembed(
    params, model.apply(params, batch.tokens, at, None)[0]
  )
  p = of(teacher.target, teacher.params) / _COLD
  q = of(draft.model, student.merged(draft.shared, params)) / _COLD
  each = losses.forward_kl(p, q)
  return jnp.where(batch.mask, each, 0).sum() / batch.mask.sum()


@pytest.mark.parametrize("embedding", ["own", "shared"])
def test_a_step_is_adamw_on_the_plain_loss(teacher, pair, embedding):
  """AdamW by hand: gradient, clip, warm-up, decay of matrices alone."""
  draft, programs = pair
  if embedding == "shared":
    draft = _student(teacher, embedding=embedding)
    programs = _programs(teacher, draft)
  state, batch = _start(draft), _batch(30, 50)
  gradient_of = jax.jit(
    jax.grad(lambda params: _plain_loss(teacher, draft, params, batch))
  )
  params = jax.tree.map(np.asarray, draft.params)
  matrices = jax.tree.map(lambda x: x.ndim > 1, params)
  m, v = (jax.tree.map(np.zeros_like, params) for _ in range(2))
  for n in range(3):
    g = jax.tree.map(np.asarray, gradient_of(params))
    norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(g)))
    g = jax.tree.map(lambda x, norm=norm: x * min(1, 0.1 / norm), g)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g**2, v, g)
    rate = 1e-2 * min((n + 1) / 3, (1 + np.cos(np.pi * max(n - 2, 0) / 8)) / 2)
    params = jax.tree.map(
      functools.partial(_adamw, rate=rate, n=n + 1), params, m, v, matrices
    )
    state = _run(programs, state, teacher, draft, [batch])
    state, report = programs.update(state)
    np.testing.assert_allclose(report.rate, rate, rtol=1e-6)
    np.testing.assert_allclose(report.norm, norm, rtol=1e-3)
    assert norm > 0.1  # so that it is clipped
  _close(state.params, params, rtol=2e-3, atol=2e-4)


def _adamw(w, m, v, decayed, *, rate, n):
  """Loshchilov and Hutter 2019, Algorithm 2."""
  m, v = m / (1 - 0.9**n), v / (1 - 0.95**n)
  return w - rate * (m / (np.sqrt(v) + 1e-8) + 0.1 * decayed * w)


def test_the_learning_rate_ends_at_nothing():
  """Up in warm-up + 1 steps, half a cosine, 0; none without a warm-up (B54)."""
  for warmup in (0, 20):
    rate = jax.vmap(step.learning_rate(3.0, warmup, 100))(jnp.arange(101))
    assert rate.argmax() == warmup and rate.max() == 3
    np.testing.assert_allclose(rate[-1], 0, atol=1e-6)
    np.testing.assert_allclose(rate[(100 + warmup) // 2], 1.5, rtol=1e-5)
    assert (jnp.diff(rate[warmup:]) < 0).all() and rate[0] > 0


def test_a_step_without_a_supervised_token_is_told(teacher, pair):
  """It is not a loss of 0: the step and the state both say so (B20)."""
  draft, programs = pair
  failed, state = [], _start(draft)
  for answers in ((20, 20), (0, 0), (20, 20)):
    state = _run(programs, state, teacher, draft, [_batch(*answers)])
    state, report = programs.update(state)
    failed.append(int(report.failed))
  assert failed == [-1, 1, 1]  # the first one, from then on


def test_the_log_is_of_all_steps_since_its_last_line(teacher, pair):
  """Of three steps each here: their tokens' mean."""
  draft, programs = pair
  now, seen, state = [], [], _start(draft)
  for n in range(6):
    batch = _batch(1, 9 + 20 * n, seed=n)
    state = _run(programs, state, teacher, draft, [batch])
    state, report = programs.update(state)
    now.append((float(report.now), 10 + 20 * n))
    seen.append((float(report.loss), float(report.tokens)))
  for end in (3, 6):
    loss, tokens = np.array(now[end - 3 : end]).T
    assert seen[end - 1][1] == tokens.sum()
    want = (loss * tokens).sum() / tokens.sum()
    np.testing.assert_allclose(seen[end - 1][0], want, rtol=1e-5)


def test_masters_are_float32_where_the_draft_computes_in_bfloat16(
  teacher, pair
):
  """At a rate of 1e-5 nearly every weight moves, and no dtype changes (B56)."""
  draft = pair.draft
  how = ml_collections.ConfigDict(_HOW.to_dict() | {"learning_rate": 1e-5})
  narrow = lambda x: x.astype(jnp.bfloat16)
  low = teacher._replace(params=jax.tree.map(narrow, teacher.params))
  programs, state = _programs(low, draft, how=how, dtype=jnp.bfloat16), None
  state = _start(draft, how)
  types = jax.tree.map(lambda x: x.dtype, state)
  # the same as in float32, to bfloat16's digits
  batch = _batch(60, 60)
  exact = _run(pair.programs, _start(draft), teacher, draft, [batch])
  state = _run(programs, state, low, draft, [batch])
  a, b = (
    jnp.concatenate([x.ravel() for x in jax.tree.leaves(s.gradient)])
    for s in (exact, state)
  )
  cosine = jnp.vdot(a, b) / jnp.linalg.norm(a) / jnp.linalg.norm(b)
  assert 0.98 < cosine < 1 - 1e-6
  for _ in range(2):
    before = jax.tree.map(np.array, state.params)
    state, _ = programs.update(state)
    state = _run(programs, state, low, draft, [batch])
  assert jax.tree.map(lambda x: x.dtype, state) == types
  for x in jax.tree.leaves((state.params, state.gradient, state.moments)):
    assert x.dtype == (jnp.float32 if x.ndim else jnp.int32)
  for name in ("layer_0", "head"):
    pairs = zip(
      jax.tree.leaves(state.params[name]),
      jax.tree.leaves(before[name]),
      strict=True,
    )
    moved = np.concatenate([(x != y).ravel() for x, y in pairs])
    assert moved.mean() > 0.95


def test_only_the_state_is_donated(teacher, pair):
  """Its arrays are nobody else's; the target's live on (B32)."""
  draft, programs = pair
  state = _start(draft)
  large = lambda s: jax.tree.leaves((s.params, s.moments[1][0].mu, s.gradient))
  places = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)}
  assert len(places) == len(jax.tree.leaves(state))
  before = large(state)
  state = _run(programs, state, teacher, draft, [_batch(5, 5)])
  assert all(x.is_deleted() for x in before)
  before = large(state)
  programs.update(state)
  assert all(x.is_deleted() for x in before)
  assert not any(x.is_deleted() for x in jax.tree.leaves(teacher.params))


def test_a_shared_embedding_stays(teacher):
  """It is the target's very array, and no part of what is trained."""
  draft = _student(teacher, embedding="shared")
  assert draft.shared["embed"] is teacher.params["embed"]
  programs, state = _programs(teacher, draft), _start(draft)
  assert "embed" not in state.params
  before = np.array(teacher.params["embed"])
  state = _run(programs, state, teacher, draft, [_batch(5, 5)] * 2)
  state, _ = programs.update(state)
  np.testing.assert_array_equal(teacher.params["embed"], before)


@functools.partial(jax.jit, static_argnums=(0, 1))
@functools.partial(jax.grad, argnums=2)
def _unrolled_loss(target, config, params, shared, teacher_params, batch):
  """Sum of KL at depth 1 and half of it at depth 2, over 1.5: all at once."""
  at = jnp.broadcast_to(jnp.arange(T), batch.tokens.shape)
  hidden, taps, _ = target.apply(
    teacher_params, batch.tokens, at, None, features=config.features
  )
  p = target.unembed(teacher_params, hidden) / _COLD
  tree = student.merged(shared, params)
  a = feature.unroll(config, tree, batch.tokens, taps, 2)
  q = feature.head(config, tree, a) / _COLD
  first, second = (losses.forward_kl(p, q[:, :, j]) for j in range(2))
  deep = batch.mask[:, 1:] & batch.mask[:, :-1]  # its round began one before
  total = jnp.where(batch.mask, first, 0).sum()
  return (total + jnp.where(deep, second[:, 1:], 0).sum() / 2) / 1.5


def test_a_feature_heads_gradient(teacher):
  """Of every array, as by the whole logits of the unrolled head (B38)."""
  draft = _student(
    teacher,
    name="feature",
    layers=(),
    features=(0, -1),
    depth_weights=(1.0, 0.5),
    embedding="shared",
    head=0,
  )
  programs = _programs(teacher, draft, depth_weights=(1.0, 0.5))
  batch = _batch(11, 60)
  state = _run(programs, _start(draft), teacher, draft, [batch])
  config = feature.Config(draft.config, draft.features)
  args = draft.params, draft.shared, teacher.params, batch
  want = _unrolled_loss(teacher.target, config, *args)
  assert float(state.sums.weight) == 71
  for got, leaf in zip(
    *map(jax.tree.leaves, (state.gradient, want)), strict=True
  ):
    most = np.abs(leaf).max()
    assert most > 1e-3 and np.abs(got - leaf).max() < 1e-3 * most


def test_the_head_alone_is_cast_in_each_chunk(pair):
  """Whatever else were, would get a gradient of its size in every chunk."""
  draft = pair.draft
  forward, low = step.lm(draft.model), jnp.bfloat16
  hidden = jnp.ones((1, 2, 16), low)
  of = functools.partial(step._head, forward, low)
  program = jax.make_jaxpr(of)(draft.params, hidden)
  cast = [
    e.invars[0].aval.shape
    for e in program.eqns
    if e.primitive.name == "convert_element_type"
  ]
  assert cast == [draft.params["head"].shape]


def test_the_forward_is_a_seam(teacher):
  """A draft that reads the target's hidden states and taps is one, too."""

  def hidden(params, batch, teacher_hidden, taps):
    assert taps.shape == (2, T, 1, 16)
    return (taps[:, :, 0] + teacher_hidden) @ params["mix"]

  forward = step.Forward((0,), hidden, lambda params, x: x @ params["head"])
  params = {
    "mix": jnp.zeros((16, 16)),
    "head": jnp.copy(teacher.params["head"]),
  }
  optimiser = optax.adam(1e-2)
  programs = step.make(
    teacher.target,
    forward,
    student.merged,
    optimiser,
    lambda count: 1e-2,
    schedule=(("forward_kl", 1.0),),
    steps=STEPS,
    log_every=1,
  )
  state, batch, found = step.start(params, optimiser), _batch(60, 60), []
  for _ in range(20):
    state = programs.accumulate(state, batch, teacher.params, {})
    state, report = programs.update(state)
    found.append(float(report.now))
  assert found[-1] < 0.5 * found[0] and found[0] > 0.1
