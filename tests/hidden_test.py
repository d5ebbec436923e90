"""The target's hidden states, kept: what a step makes of them is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import step_test

from specjax import feed, hidden, laws, shards, trajectories
from specjax.errors import UserError

FEATURES = (1, 0)
_SIZES = ((9, 5), (3, 0), (1, 30), (20, 11), (7, 7))

teacher = step_test.teacher


def _texts(seed=0, sizes=_SIZES):
  rng = np.random.default_rng(seed)
  draw = lambda n: rng.integers(0, step_test.V, n).tolist()
  return trajectories.make([(draw(p), draw(a), 0.7) for p, a in sizes])


def _collect(teacher, found, root=None, watch=shards.QUIET, **how):
  how = dict(features=FEATURES, length=24, batch=2, watch=watch) | how
  return hidden.collect(root, teacher, found, **how)


def test_states_are_those_of_the_target(teacher, monkeypatch):
  """Every real token's, whatever the shard, the padding and the batch."""
  monkeypatch.setattr(hidden, "_ROWS", 2)
  found = _texts()
  kept = _collect(teacher, found)
  at = np.array([3, 0, 4, 1, 2])
  mine, none = hidden.take(kept, at, 28)
  assert none is None
  tokens = trajectories.batch(found, at, 28).tokens
  places = jnp.broadcast_to(jnp.arange(28), tokens.shape)
  state, taps, _ = teacher.target.apply(
    teacher.params, tokens, places, None, features=FEATURES
  )
  right = np.concatenate([state[:, :, None], taps], 2)
  spacing = dict(rtol=2**-10, atol=6e-8)  # of float16; the second near 0
  for row, text in enumerate(at):
    n = min(found.length[text], 24)
    np.testing.assert_allclose(mine[row, :n], right[row, :n], **spacing)
    assert (mine[row, n:] == 0).all()


def test_they_are_computed_once(teacher, tmp_path, monkeypatch):
  """A second run reads them; other texts, layers or lengths are others."""
  found, made = _texts(), []
  watch = shards.Watch(lambda line: None, lambda p: made.append(p.made))
  first = _collect(teacher, found, tmp_path, watch)
  assert made[-1] == 1
  monkeypatch.setattr(hidden, "_pass", None)  # not needed any more
  again = _collect(teacher, found, tmp_path, watch)
  assert made[-1] == 0
  for x, y in zip(first.states, again.states, strict=True):
    np.testing.assert_array_equal(x, y)
  double = jax.tree.map(lambda x: 2 * x, teacher.params)
  for other in (
    dict(found=_texts(1)),
    dict(length=23),
    dict(features=(0, 1)),
    dict(teacher=teacher._replace(params=double)),
  ):
    same = dict(teacher=teacher, found=found, root=tmp_path, watch=watch)
    with pytest.raises(TypeError, match="not callable"):
      _collect(**same | other)


def test_fewer_layers_are_read_from_a_finished_cache(
  teacher, tmp_path, monkeypatch
):
  """Of the same texts; one with a shard missing is not read."""
  monkeypatch.setattr(hidden, "_ROWS", 2)
  found, notes = _texts(), []
  _collect(teacher, found, tmp_path)
  right = [_collect(teacher, found, features=f) for f in ((0,), (1,), ())]
  whole, folders = hidden._pass, set(tmp_path.iterdir())
  monkeypatch.setattr(hidden, "_pass", None)  # not needed any more
  watch = shards.Watch(notes.append, lambda progress: None)
  for features, one in zip(((0,), (1,), ()), right, strict=True):
    mine = _collect(teacher, found, tmp_path, watch, features=features)
    for x, y in zip(mine.states, one.states, strict=True):
      np.testing.assert_array_equal(x, y)
  assert set(tmp_path.iterdir()) == folders
  assert notes[0].startswith("layers [0] are read from those in")
  with pytest.raises(TypeError, match="not callable"):
    _collect(teacher, _texts(1), tmp_path, watch, features=(0,))
  monkeypatch.setattr(hidden, "_pass", whole)
  (folder,) = folders
  meta = folder / "meta.json"
  meta.write_text(meta.read_text().replace('"done": 3', '"done": 2'))
  _collect(teacher, found, tmp_path, features=(0,))
  assert set(tmp_path.iterdir()) > folders


def test_what_float16_cannot_hold_is_refused(teacher):
  """Residual streams have outliers: 65,504 is the largest of float16."""
  norm = teacher.params["norm"]
  params = teacher.params | {"norm": {"scale": norm["scale"] * 1e6}}
  with pytest.raises(UserError, match="keep_hidden=False"):
    _collect(teacher._replace(params=params), _texts())


def test_a_step_with_them_is_the_same_step(teacher):
  """Gradient and loss agree to float16's rounding, and need no layers."""
  draft = step_test._student(teacher)
  programs = step_test._programs(teacher, draft)
  found, at = _texts(sizes=((9, 30), (9, 12))), np.arange(2)
  batch = trajectories.batch(found, at, step_test.T)
  kept = _collect(teacher, found, features=(), length=step_test.T)
  states, _ = hidden.take(kept, at, step_test.T)
  # a head is all that is read of the teacher
  head = {"embed": teacher.params["embed"], "head": teacher.params.get("head")}
  broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), teacher.params)
  broken |= {k: x for k, x in head.items() if x is not None}
  run = lambda batch, params: programs.accumulate(
    step_test._start(draft), batch, params, draft.shared
  )
  right = run(batch, teacher.params)
  mine = run(batch._replace(states=states), broken)
  assert mine.sums.weight == right.sums.weight == 42
  assert float(mine.sums.loss) == pytest.approx(
    float(right.sums.loss), rel=1e-3
  )
  # T = 0.05 makes 20 times as much of a logit's rounding
  off = jax.tree.map(jnp.subtract, mine.gradient, right.gradient)
  assert optax.tree.norm(off) < 5e-3 * optax.tree.norm(right.gradient)


def _heat(found):
  """Texts at T = 0, .7 and given, of a deployment at T = .3."""
  heat = np.array([0, 0.7, np.nan, np.nan, 0], np.float32)
  return found._replace(temperature=heat), np.array([0, 0.7, 0.3, 0.3, 0])


def _normalised(teacher, found, root=None, temperature=0.3):
  return _collect(teacher, found, root, temperature=temperature)


def test_normalisers_are_those_of_the_kept_states(teacher, monkeypatch):
  """Whatever the shard, the padding, the batch and the chunk."""
  monkeypatch.setattr(hidden, "_ROWS", 2)
  found, heat = _heat(_texts())
  kept, at = _normalised(teacher, found), np.array([3, 0, 4, 1, 2])
  states, got = hidden.take(kept, at, 28)
  states = states[:, :, 0].astype(np.float32)
  logits = np.asarray(teacher.target.unembed(teacher.params, states))
  z = logits / np.where(heat > 0, heat, 1)[at, None, None]
  log_sum = np.asarray(jax.nn.logsumexp(z, axis=-1))
  for row, text in enumerate(at):
    n = min(found.length[text], 24)
    np.testing.assert_array_equal(got.top[row, :n], logits.argmax(-1)[row, :n])
    np.testing.assert_allclose(got.log_sum[row, :n], log_sum[row, :n], 1e-5)
    assert not got.top[row, n:].any() and not got.log_sum[row, n:].any()


def test_normalisers_are_computed_once(teacher, tmp_path, monkeypatch):
  """Other temperatures are others, of the texts and of the deployment."""
  found, _ = _heat(_texts())
  first = _normalised(teacher, found, tmp_path).normalisers
  monkeypatch.setattr(hidden, "_normalisers", None)  # not needed any more
  again = _normalised(teacher, found, tmp_path).normalisers
  jax.tree.map(np.testing.assert_array_equal, first, again)
  warm = found._replace(temperature=found.temperature + np.float32(0.1))
  for other in (dict(found=warm), dict(temperature=0.4)):
    with pytest.raises(TypeError, match="not callable"):
      _normalised(**dict(teacher=teacher, found=found, root=tmp_path) | other)


def test_a_step_with_a_trimmed_teacher_is_the_same_step(teacher):
  """Gradient and loss of a trimmed draft, the target's other logits unmade."""
  sizes = (9, 30), (9, 12), (3, 3), (4, 4), (1, 30)
  found, _ = _heat(_texts(sizes=sizes))
  draft = step_test._student(teacher, found, head=50)
  how = dict(features=(), length=step_test.T, temperature=0.3)
  kept = _collect(teacher, found, **how)
  fed = feed.Feed(found, found, None, kept)
  taught = feed.taught(fed, teacher, draft.ids)
  own = laws.PLAIN._replace(temperature=np.float32(0.3))
  at = np.arange(5)
  states, known = hidden.take(kept, at, step_test.T)
  batch = trajectories.batch(found, at, step_test.T)._replace(states=states)

  def run(teacher, batch):
    programs = step_test._programs(teacher, draft, sampling=own, answer=31)
    args = step_test._start(draft), batch, teacher.params, draft.shared
    return programs.accumulate(*args)

  assert taught.params["head"].shape[1] == len(draft.ids) == 50
  right = run(teacher, batch)
  mine = run(taught, batch._replace(normaliser=known))
  for x, y in zip(mine.sums, right.sums, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5)
  off = jax.tree.map(jnp.subtract, mine.gradient, right.gradient)
  assert optax.tree.norm(off) < 1e-4 * optax.tree.norm(right.gradient)
