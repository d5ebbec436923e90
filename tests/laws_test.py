"""A law from some logits and a normaliser is that of all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import laws, objective

B, T, V, D = 4, 11, 37, 5
IDS = (3, 0, 36, 7, 20, 21)
HEAT = np.array([0.0, 0.3, 1.0, np.nan], np.float32)  # of the four rows
GIVEN = laws.PLAIN._replace(temperature=np.float32(0.7))  # where it is NaN


def _normaliser(logits, temperature):
  """By the definition, in NumPy: logits [..., V], temperature [...]."""
  z = logits / np.where(temperature > 0, temperature, 1)[..., None]
  with np.errstate(invalid="ignore", over="ignore"):
    largest = z.max(-1, keepdims=True)
    log_sum = np.log(np.exp(z - largest).sum(-1)) + largest[..., 0]
  return laws.Normaliser(logits.argmax(-1).astype(np.int32), log_sum)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_some_logits_are_enough(temperature):
  """To 1e-14, of equal largest ones the first, nothing of a broken row."""
  rng = np.random.default_rng(0)
  teacher = rng.normal(0, 3, (6, V))
  teacher[1, [7, 20, 30]] = 20.0  # 7 and 20 are drafted, the first wins
  teacher[2, [5, 20]] = 20.0  # the first is not drafted
  teacher[3, 9] = np.nan
  teacher[4, 11] = np.inf
  student = rng.normal(0, 1, (6, len(IDS)))
  own = laws.PLAIN._replace(temperature=np.full(6, temperature))
  with jax.enable_x64(True):
    how = dict(sampling=own, ids=IDS)
    want = laws.laws(jnp.asarray(teacher), jnp.asarray(student), **how)
    known = _normaliser(teacher, own.temperature)
    some = jnp.asarray(teacher[:, IDS])
    got = laws.laws(some, jnp.asarray(student), **how, known=known)
  for x, y in zip(got, want, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-15)
  p = np.asarray(got[0])
  assert np.isnan(p[3:5]).all() and np.isfinite(p[[0, 1, 2, 5]]).all()
  if temperature == 0:
    assert p[1].tolist() == [0, 0, 0, 1, 0, 0] and not p[2].any()


def _case():
  rng = np.random.default_rng(1)
  teacher, student = rng.normal(0, 1, (2, B, T, D))
  heads = rng.normal(0, 1, (2, D, V))
  mask = np.arange(T) < np.array([T, 4, 9, 0])[:, None]
  labels = rng.choice(IDS, (B, T)).astype(np.int32)
  return teacher, student, heads, mask.astype(float), labels


@pytest.mark.parametrize(
  "loss, options",
  [
    ("forward_kl", {}),
    ("total_variation", {}),
    ("expected_rounds", {"num_draft": 3}),
  ],
)
def test_a_loss_and_its_gradient(loss, options):
  """Chunked, rows at T = 0, .3, 1 and given, masked positions dirty; 1e-12."""
  teacher, student, (head, own), mask, labels = _case()
  heat = np.where(np.isnan(HEAT), GIVEN.temperature, HEAT).astype(float)
  wide = np.broadcast_to(heat[:, None], (B, T))
  known = _normaliser(teacher @ head, wide)
  dirty = lambda x: np.where(mask > 0, x, 0).astype(x.dtype)
  student = np.where(mask[..., None] > 0, student, np.nan)

  def total(own, student, head, known):
    return objective.total(
      ((loss, 1.0, options),),
      0.5,
      jnp.asarray(teacher),
      student,
      jnp.asarray(mask),
      jnp.asarray(labels),
      teacher_unembed=lambda x: x @ head,
      student_unembed=lambda x: x @ own,
      temperature=jnp.asarray(HEAT),
      sampling=GIVEN,
      ids=IDS,
      chunk=4,
      known=known,
    )

  def found(head, known):
    f = lambda *args: (lambda sums: (sums.loss, sums))(total(*args))
    gradient = jax.jit(jax.grad(f, (0, 1), has_aux=True))
    some = jnp.asarray(own[:, list(IDS)])
    return gradient(some, jnp.asarray(student), head, known)

  with jax.enable_x64(True):
    want = found(jnp.asarray(head), None)
    known = laws.Normaliser(*map(jnp.asarray, map(dirty, known)))
    got = found(jnp.asarray(head[:, list(IDS)]), known)
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
  jax.tree.map(close, got, want)
  assert np.abs(np.asarray(want[0][0])).max() > 0.01
