"""One micro-batch and one step: what is summed, divided, moved and donated."""

import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

from specjax import losses, step, student, trajectories
from specjax.models import load

V, T, STEPS = 260, 128, 10
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
    clip=0.5,
  )
)


@pytest.fixture(scope="module")
def teacher():
  return load.whole(load.model(load.random(_SIZES | {"num_hidden_layers": 2})))


def _student(teacher, **more):
  asked = dict(
    name="lm",
    weights="",
    layers=(0,),
    architecture={},
    embedding="own",
    head=0,
  )
  config = ml_collections.ConfigDict(dict(seed=0, draft=asked | more))
  return student.make(config, teacher)


def _programs(teacher, draft, *, how=_HOW, **more):
  warmup = round(how.warmup * STEPS)
  optimiser = step.optimiser(how, STEPS)
  keywords = dict(
    schedule=(("forward_kl", 0.5), ("total_variation", 1.0)),
    steps=STEPS,
    log_every=3,
    ids=draft.ids,
  )
  programs = step.make(
    teacher.target,
    step.lm(draft.model),
    student.merged,
    optimiser,
    step.learning_rate(how.learning_rate, warmup, STEPS),
    **keywords | more,
  )
  fresh = jax.tree.map(lambda x: jnp.array(x, copy=True), draft.params)
  return programs, step.start(fresh, optimiser)


def _batch(*answers, rows=None, seed=0):
  """Rows of 9 prompt tokens and answers of so many; labels with an answer."""
  rng = np.random.default_rng(seed)
  draw = lambda n: rng.integers(0, V, n).tolist()
  found = trajectories.make([(draw(9), draw(n), 1.0) for n in answers])
  rows = np.arange(len(answers)) if rows is None else np.array(rows)
  return trajectories.batch(found, rows, T)


def _run(programs, state, teacher, draft, batches):
  for batch in batches:
    state = programs.accumulate(state, batch, teacher.params, draft.shared)
  return state


def _close(a, b, **tolerance):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, **tolerance)


def test_a_step_weighs_tokens_not_micro_batches(teacher):
  """11 and 101 tokens, apart and together: one gradient, one step (B19).

  A micro-batch without a supervised token adds nothing (B20).
  """
  draft = _student(teacher)
  sizes = 11, 101, 0
  ways = {
    "together": [_batch(*sizes)],
    "apart": [_batch(*sizes, rows=[i]) for i in (0, 1)],
    "with one that has none": [_batch(*sizes, rows=[i]) for i in (2, 0, 1)],
  }
  ended = {}
  for name, batches in ways.items():
    programs, state = _programs(teacher, draft)
    state = _run(programs, state, teacher, draft, batches)
    assert int(state.micro) == len(batches) and float(state.sums.weight) == 112
    gradient = jax.tree.map(np.asarray, state.gradient)
    state, report = programs.update(state)
    assert int(state.micro) == 0 and int(state.step) == 1
    assert not any(x.any() for x in jax.tree.leaves(state.gradient))
    ended[name] = gradient, jax.tree.map(np.asarray, state.params), report
  for name in list(ways)[1:]:
    _close(ended[name][0], ended["together"][0], rtol=2e-4, atol=1e-5)
    _close(ended[name][1], ended["together"][1], rtol=1e-4, atol=1e-5)
    _close(ended[name][2], ended["together"][2], rtol=1e-4)


def _plain_loss(teacher, draft, params, batch):
  """Mean KL(p || q) over the supervised tokens, all logits at once."""
  at = jnp.broadcast_to(jnp.arange(T), batch.tokens.shape)
  of = lambda model, params: model.unembed(
    params, model.apply(params, batch.tokens, at, None)[0]
  )
  p = of(teacher.target, teacher.params)
  q = of(draft.model, student.merged(draft.shared, params))
  each = losses.forward_kl(p, q)
  return jnp.where(batch.mask, each, 0).sum() / batch.mask.sum()


@pytest.mark.parametrize("embedding", ["own", "shared"])
def test_a_step_is_adamw_on_the_plain_loss(teacher, embedding):
  """Against optax by hand: gradient, clip, warm-up, decay of matrices alone."""
  draft, batch = _student(teacher, embedding=embedding), _batch(30, 50)
  programs, state = _programs(teacher, draft)
  params = jax.tree.map(np.asarray, draft.params)
  matrices = jax.tree.map(lambda x: x.ndim > 1, params)
  norms, m, v = [], *(jax.tree.map(np.zeros_like, params) for _ in range(2))
  for n in range(3):
    g = jax.grad(lambda params: _plain_loss(teacher, draft, params, batch))(
      params
    )
    norm = np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(g)))
    norms.append(norm)
    g = jax.tree.map(lambda x: np.asarray(x) * min(1, 0.5 / norm), g)  # noqa: B023
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g**2, v, g)
    rate = 1e-2 * min((n + 1) / 3, (1 + np.cos(np.pi * max(n - 2, 0) / 8)) / 2)
    move = lambda w, m, v, wide: (
      w
      - rate
      * (  # noqa: B023
        m / (1 - 0.9 ** (n + 1)) / (np.sqrt(v / (1 - 0.95 ** (n + 1))) + 1e-8)  # noqa: B023
        + 0.1 * wide * w
      )
    )
    params = jax.tree.map(move, params, m, v, matrices)
    state = _run(programs, state, teacher, draft, [batch])
    state, report = programs.update(state)
    np.testing.assert_allclose(report.rate, rate, rtol=1e-6)
    np.testing.assert_allclose(report.norm, norm, rtol=1e-4)
  _close(state.params, params, rtol=1e-3, atol=2e-5)


def test_the_learning_rate_ends_at_nothing():
  """Up in warm-up + 1 steps, half a cosine, 0; none without a warm-up (B54)."""
  for warmup in (0, 20):
    rate = jax.vmap(step.learning_rate(3.0, warmup, 100))(jnp.arange(101))
    assert rate.argmax() == warmup and rate.max() == 3
    np.testing.assert_allclose(rate[-1], 0, atol=1e-6)
    np.testing.assert_allclose(rate[(100 + warmup) // 2], 1.5, rtol=1e-5)
    assert (jnp.diff(rate[warmup:]) < 0).all() and rate[0] > 0


def test_a_step_without_a_supervised_token_is_told(teacher):
  """It is not a loss of 0: the step and the state both say so (B20)."""
  draft = _student(teacher)
  programs, state = _programs(teacher, draft)
  state = _run(programs, state, teacher, draft, [_batch(20)])
  state, report = programs.update(state)
  assert int(report.failed) == -1
  state = _run(programs, state, teacher, draft, [_batch(0, 0)])
  state, report = programs.update(state)
  assert int(report.failed) == 1 and np.isnan(report.now)
  state = _run(programs, state, teacher, draft, [_batch(20)])
  assert int(programs.update(state)[1].failed) == 1  # the first one


def test_the_log_is_of_all_steps_since_its_last_line(teacher):
  """Of three steps each here: their tokens' mean."""
  draft = _student(teacher)
  programs, state = _programs(teacher, draft)
  now, seen = [], []
  for n in range(6):
    state = _run(programs, state, teacher, draft, [_batch(10 + 20 * n, seed=n)])
    state, report = programs.update(state)
    now.append((float(report.now), 10 + 20 * n))
    seen.append((float(report.loss), float(report.tokens)))
  for end in (3, 6):
    loss, tokens = np.array(now[end - 3 : end]).T
    assert seen[end - 1][1] == tokens.sum()
    want = (loss * tokens).sum() / tokens.sum()
    np.testing.assert_allclose(seen[end - 1][0], want, rtol=1e-5)


def test_masters_are_float32_where_the_draft_computes_in_bfloat16(teacher):
  """At a rate of 1e-5 nearly every weight moves, and no dtype changes (B56)."""
  draft = _student(teacher)
  how = ml_collections.ConfigDict(_HOW.to_dict() | {"learning_rate": 1e-5})
  low = load.whole(
    load.model(
      load.random(_SIZES | {"num_hidden_layers": 2}), dtype=jnp.bfloat16
    )
  )
  programs, state = _programs(low, draft, how=how, dtype=jnp.bfloat16)
  types = jax.tree.map(lambda x: x.dtype, state)
  before = jax.tree.map(np.asarray, draft.params)
  for n in range(3):
    state = _run(programs, state, low, draft, [_batch(60, 60, seed=n)])
    state, report = programs.update(state)
  assert jax.tree.map(lambda x: x.dtype, state) == types
  masters = state.params, state.gradient, state.moments
  for x in jax.tree.leaves(masters):
    assert x.dtype == (jnp.float32 if x.ndim else jnp.int32)
  for name in ("layer_0", "head"):
    pairs = zip(
      jax.tree.leaves(state.params[name]),
      jax.tree.leaves(before[name]),
      strict=True,
    )
    moved = np.concatenate([(x != y).ravel() for x, y in pairs])
    assert moved.mean() > 0.95
  # the same as in float32, to bfloat16's digits
  programs, state = _programs(teacher, draft, how=how)
  exact = _run(programs, state, teacher, draft, [_batch(60, 60)])
  programs, state = _programs(low, draft, how=how, dtype=jnp.bfloat16)
  rough = _run(programs, state, low, draft, [_batch(60, 60)])
  a, b = (
    jnp.concatenate([x.ravel() for x in jax.tree.leaves(s.gradient)])
    for s in (exact, rough)
  )
  assert jnp.vdot(a, b) / jnp.linalg.norm(a) / jnp.linalg.norm(b) > 0.99


@pytest.mark.parametrize("embedding", ["own", "shared"])
def test_only_the_state_is_donated(teacher, embedding):
  """The target's arrays live on, a shared embedding among them (B32)."""
  draft = _student(teacher, embedding=embedding)
  programs, state = _programs(teacher, draft)
  leaves = jax.tree.leaves(state)
  places = {x.unsafe_buffer_pointer() for x in leaves if x.ndim}
  assert len(places) == len([x for x in leaves if x.ndim])
  state = _run(programs, state, teacher, draft, [_batch(5)])
  assert all(x.is_deleted() for x in leaves)
  leaves = jax.tree.leaves(state)
  state, _ = programs.update(state)
  assert all(x.is_deleted() for x in leaves)
  for x in jax.tree.leaves((teacher.params, draft.shared)):
    assert not x.is_deleted()
  if draft.shared:
    assert "embed" not in state.params


def test_the_head_alone_is_cast_in_each_chunk(teacher):
  """Whatever else were, would get a gradient of its size in every chunk."""
  draft = _student(teacher)
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
  draft = _student(teacher)

  def hidden(params, batch, teacher_hidden, taps):
    assert taps.shape == (2, T, 1, 16)
    return (taps[:, :, 0] + teacher_hidden) @ params["mix"]

  forward = step.Forward((0,), hidden, lambda params, x: x @ params["head"])
  params = {"mix": jnp.eye(16), "head": jnp.copy(teacher.params["head"])}
  optimiser = optax.sgd(0.5)
  programs = step.make(
    teacher.target,
    forward,
    student.merged,
    optimiser,
    lambda count: 0.5,
    schedule=(("forward_kl", 1.0),),
    steps=STEPS,
    log_every=1,
  )
  state, batch, found = step.start(params, optimiser), _batch(60, 60), []
  for _ in range(20):
    state = programs.accumulate(state, batch, teacher.params, {})
    state, report = programs.update(state)
    found.append(float(report.now))
  assert found[-1] < 0.5 * found[0]
