"""The roofline by hand, and what it makes of measured costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny
from specjax import predict, roofline, timing
from specjax.models import load

BIG = roofline.Work(10**9, 2 * 10**9, 10**5, 24)
SMALL = roofline.Work(10**8, 2 * 10**8, 10**4, 4)
MACHINE = roofline.Machine(bandwidth=1e12, peak=2e14)


@pytest.mark.parametrize("tied", [True, False])
def test_work_of_a_model(tied):
  """Two FLOP a weight; of a separate embedding one row is read."""
  shape = tiny.get_config().architecture.to_dict()
  opened = load.random(shape | dict(tie_word_embeddings=tied))
  params, config = opened.read(
    dtype=jnp.float32, untie=False, track=lambda x: x
  )
  got = roofline.work(config, params)
  D, F, G, H = 64, 192, 2, 4
  matrices = 3 * (D * 16 * (H + 2 * G) + H * 16 * D + 3 * D * F) + D * 384
  norms = (2 * 3 + 1) * D
  assert got.weights == matrices + norms
  assert got.weight_bytes == 4 * got.weights
  assert got.cache_bytes == 3 * 2 * G * 16 * 4  # keys and values, float32
  assert got.layers == 3


def test_seconds_by_hand():
  run = lambda machine=MACHINE, **sizes: roofline.seconds(
    BIG, machine, **dict(tokens=1, batch=1, context=0) | sizes
  )
  assert run() == pytest.approx(2e9 / 1e12)  # the weights' bytes
  assert run(tokens=200) == pytest.approx(2e-3)  # the ridge F / BW
  assert run(tokens=400) == pytest.approx(4e-3)
  assert run(tokens=5, batch=80) == pytest.approx(4e-3)
  assert run(batch=10, context=2000) == pytest.approx(4e-3)  # and the cache's
  launched = run(MACHINE._replace(launch=1e-5))
  assert launched == pytest.approx(2e-3 + 24e-5)
  for machine in (MACHINE._replace(peak=0.0), roofline.Machine(-1.0, 1.0)):
    with pytest.raises(ValueError, match="must be positive"):
      run(machine)


def _costs():
  cost = lambda x: timing.Cost(x, 0.9 * x, 1.1 * x)
  return timing.Costs(
    plain=cost(2.5e-3),
    target={1: cost(2.2e-3), 5: cost(2.4e-3)},
    draft=cost(0.3e-3),
    round={4: cost(4.0e-3)},
    batch=1,
    context=100,
  )


def _extrapolate(draft=SMALL, **there):
  return roofline.extrapolate(_costs(), BIG, draft, MACHINE, **there)


def test_nothing_changes_where_it_was_measured():
  got = _extrapolate(batch=1, context=100)
  assert got.modelled
  leaves = zip(*map(jax.tree.leaves, (got, _costs())), strict=True)
  # the last is `modelled`
  assert all(x == pytest.approx(y) for x, y in [*leaves][:-1])


def test_large_batches():
  """Calls are bound by FLOPs there: 5 tokens cost 5 times as much."""
  got = _extrapolate(batch=1000, context=10)
  ratio = lambda n: got.call(n) / _costs().call(n)
  want = (2e9 * 1000 / 2e14) / ((2e9 + 1e7) / 1e12)
  assert ratio(1) == pytest.approx(want)
  assert ratio(5) == pytest.approx(5 * want)
  assert (got.batch, got.context, got.modelled) == (1000, 10, True)
  # what is neither a call nor a draft stays
  assert got.overhead(4) == pytest.approx(_costs().overhead(4))
  rest = lambda costs: costs.plain.median - costs.call(1)
  assert rest(got) == pytest.approx(rest(_costs()))
  c, v, o = timing.units(got, 4)
  whole = got.round[4].median / got.plain.median
  assert 4 * c + v[4] + o[4] == pytest.approx(whole)


def test_long_contexts_are_where_speculation_pays_again():
  """Bound by the cache's bytes, a wide call costs what a narrow one does."""
  got = _extrapolate(batch=100, context=10**5)
  assert got.call(5) / got.call(1) == pytest.approx(2.4 / 2.2, rel=1e-6)


def test_a_look_up_costs_what_it_did():
  got = _extrapolate(draft=None, batch=64, context=100)
  assert got.draft == _costs().draft


def test_predictions_take_modelled_costs():
  length, log_p = np.array([4, 3]), np.zeros((2, 4))
  texts = predict.Texts(length, log_p, np.zeros((2, 4, 4)), np.ones((2, 4)))
  found = predict.predict(texts, "block")
  near = predict.speedups(found, _costs())
  far = predict.speedups(found, _extrapolate(batch=1000, context=100))
  assert far.mean[4] < near.mean[4]
