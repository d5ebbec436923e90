"""The objectives of a draft: against float64 NumPy by definition, the closed
forms of their gradients, finite differences, and the shipped verifiers."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specjax import losses, objective, renewal, theory, verify
from specjax.types import Sampling

# Every loss of one position, some with an option away from its default.
LOSSES = {
  "forward_kl": {},
  "reverse_kl": {},
  "js": {"beta": 0.3},
  "total_variation": {},
  "negative_log_acceptance": {},
  "likelihood_hybrid": {"eta": 2.0},
  "tvd_plus_plus": {},
}
each_loss = pytest.mark.parametrize("name", LOSSES)


def sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  temperature, top_p, min_p = np.array([temperature, top_p, min_p], float)
  return Sampling(temperature, np.int32(top_k), top_p, min_p)


DEPLOYMENTS = {
  "plain": sampling(),
  "cool": sampling(0.7),
  "top_k": sampling(1.3, top_k=3),
  "top_p": sampling(0.8, top_p=0.7),
  "min_p": sampling(1.0, min_p=0.2),
  "greedy": sampling(0.0),
}


@functools.cache
def _weighted(name, ids):
  """(teacher [n, V], student [n, Vq], weights) -> [n], [n, Vq]."""

  def value(student, *args):
    teacher, weights = args
    loss = functools.partial(getattr(losses, name), **LOSSES[name])
    loss = loss(teacher, student, ids=ids, weights=weights)
    return loss.sum(), loss

  gradient = jax.jit(jax.grad(value, has_aux=True))
  return lambda teacher, student, w: gradient(student, teacher, w)[::-1]


# The definitions, in NumPy


def _law(logits, s):
  """p [V] by sorting; no ties in these tests."""
  V = len(logits)
  if s.temperature == 0:
    return np.eye(V)[np.argmax(logits)]
  p = np.exp((logits - logits.max()) / s.temperature)
  p /= p.sum()
  order = np.argsort(-p)
  if 0 < s.top_k < V:
    p[order[s.top_k :]] = 0
  if s.top_p < 1:
    enough = np.cumsum(p[order]) >= s.top_p * p.sum()
    p[order[np.argmax(enough) + 1 :]] = 0
  p[p < s.min_p * p.max()] = 0
  return p / p.sum()


def _log_softmax(z):
  z = z - z.max()
  return z - np.log(np.exp(z).sum())


def _kl(a, b):
  """KL(a || b) of weights that need not sum to 1."""
  a, b = a[a > 0], b[a > 0]
  return float((a * np.log(a / b)).sum())


def _define(name, p, q, ids):
  """The loss of laws p, q [V], q = 0 outside ids."""
  alpha = np.minimum(p, q).sum()
  tv = np.abs(p - q).sum() / 2
  mass = p[ids].sum()
  kl = mass * _kl(p[ids] / mass, q[ids]) if mass else 0.0
  if name == "forward_kl":
    return kl
  if name == "reverse_kl":
    return _kl(q, np.maximum(p, 1e-30))
  if name == "js":
    m = 0.3 * p + 0.7 * q
    return 0.3 * _kl(p, m) + 0.7 * _kl(q, m)
  if name == "negative_log_acceptance":
    return -np.log(alpha) if alpha else 0.0
  if name == "likelihood_hybrid":
    w = np.exp(-2 * alpha)
    return w * kl + (1 - w) * tv
  return tv


def _closed_form(name, p, q):
  """Its gradient by z, q = softmax(z), p and q [Vq] on the draft's ids."""
  less = (q < p).astype(float)
  Q = (q * less).sum()
  tv = q * (Q - less)
  alpha = np.minimum(p, q).sum()
  kl = p.sum() * q - p
  if name == "forward_kl":
    return kl
  if name == "reverse_kl":
    log = np.log(q / np.maximum(p, 1e-30))
    return q * (log - (q * log).sum())
  if name == "js":
    log = np.log(q / (0.3 * p + 0.7 * q))
    return 0.7 * q * (log - (q * log).sum())
  if name == "negative_log_acceptance":
    return tv / alpha if alpha else 0 * tv
  if name == "likelihood_hybrid":
    w = np.exp(-2 * alpha)
    return w * kl + (1 - w) * tv
  sigma = np.sqrt(Q * (1 - Q)) if name == "tvd_plus_plus" else 1
  return tv / sigma if sigma else 0 * tv


def _draft_law(z, ids, V, temperature):
  q = np.zeros(V)
  q[ids] = np.exp(_log_softmax(z / (temperature or 1)))
  return q


@functools.cache
def _every(ids=None):
  """{name: (values, gradients)} in one program, the laws made once."""

  @jax.jit
  def every(teacher, student, s=losses.PLAIN):
    def value(equation, z):
      loss = equation(*losses.laws(teacher, z, sampling=s, ids=ids))
      return loss.sum(), loss

    out = {}
    for name, options in LOSSES.items():
      equation = getattr(losses, name).equation
      equation = functools.partial(equation, **options)
      gradient = jax.grad(functools.partial(value, equation), has_aux=True)
      out[name] = gradient(student)[::-1]
    return out

  return every


def _cases(trimmed, n=12, V=16, seed=0):
  """teacher [n, V], student [n, Vq], ids in no order."""
  rng = np.random.default_rng(seed)
  ids = rng.permutation(V)[: 5 if trimmed else V]
  if not trimmed:
    ids = np.arange(V)
  return rng.normal(0, 2, (n, V)), rng.normal(0, 2, (n, len(ids))), ids


# Values and gradients


@pytest.mark.parametrize("trimmed", [False, True])
@each_loss
def test_values_and_gradients(name, trimmed):
  """float64: values and closed forms to rounding, under every deployment."""
  teachers, students, ids = _cases(trimmed)
  every, worst = _every(tuple(ids) if trimmed else None), np.zeros(2)
  for kind, s in DEPLOYMENTS.items():
    with jax.enable_x64(True):
      got = every(teachers, students, s)[name]
      values, gradients = map(np.asarray, got)
    assert values.dtype == gradients.dtype == jnp.float64
    for n, (teacher, student) in enumerate(
      zip(teachers, students, strict=True)
    ):
      p, T = _law(teacher, s), s.temperature or 1
      q = _draft_law(student, ids, len(p), s.temperature)
      want = _define(name, p, q, ids), _closed_form(name, p[ids], q[ids]) / T
      for i, got in enumerate((values[n], gradients[n])):
        close = functools.partial(np.testing.assert_allclose, err_msg=kind)
        close(got, want[i], rtol=1e-12, atol=1e-13)
        worst[i] = max(worst[i], np.abs(got - want[i]).max())
  print(f"{name}, trimmed {trimmed}: {worst}")


@pytest.mark.parametrize("trimmed", [False, True])
@each_loss
def test_finite_differences(name, trimmed):
  """To 1e-6, float64, of what is not held constant."""
  if name == "likelihood_hybrid":
    pytest.skip("its weight is a constant: the closed form is all there is")
  teachers, students, ids = _cases(trimmed, seed=1)
  every, worst = _every(tuple(ids) if trimmed else None), 0
  # of TVD++ the value is TV's; the gradient is not
  of = "total_variation" if name == "tvd_plus_plus" else name
  s = DEPLOYMENTS["top_p"]
  with jax.enable_x64(True):
    _, gradients = every(teachers, students, s)[of]
    for j, step in enumerate(1e-5 * np.eye(len(ids))):
      steps = (students + step, students - step)
      up, down = (every(teachers, x, s)[name][0] for x in steps)
      worst = max(worst, np.abs((up - down) / 2e-5 - gradients[:, j]).max())
  print(f"{name}, trimmed {trimmed}: {worst:.1e}")
  assert worst < 1e-6


@each_loss
def test_float32(name):
  """float32 whatever is given, and near the float64 value."""
  teachers, students, ids = _cases(False, seed=2)
  for s in (DEPLOYMENTS["plain"], DEPLOYMENTS["top_p"]):
    for dtype, tolerance in ((jnp.float32, 3e-6), (jnp.bfloat16, 1e-2)):
      teacher, student = (jnp.asarray(x, dtype) for x in (teachers, students))
      values, gradients = _every()(teacher, student, s)[name]
      assert values.dtype == jnp.float32 and gradients.dtype == dtype
      teacher, student = (np.asarray(x, float) for x in (teacher, student))
      for n in range(len(values)):
        p = _law(teacher[n], s)
        q = _draft_law(student[n], ids, len(p), s.temperature)
        value = _define(name, p, q, ids)
        np.testing.assert_allclose(values[n], value, rtol=3e-6, atol=1e-6)
        want = _closed_form(name, p, q) / s.temperature
        got = gradients[n].astype(jnp.float32)
        close = functools.partial(np.testing.assert_allclose, rtol=tolerance)
        close(got, want, atol=tolerance * (1 + abs(value)))


def _pathologies(V=16):
  """teacher and student logits [n, V] that have broken such losses."""
  rng = np.random.default_rng(3)
  x = rng.choice([-100.0, 100.0], (2, V))
  one_hot = np.where(np.arange(V) == 3, 0.0, -np.inf)
  padded = np.where(np.arange(V) < 10, rng.normal(0, 1, V), -np.inf)
  one, other = 100 * np.eye(V)[[2, 5]]
  zeros, some = np.zeros(V), rng.normal(0, 1, V)
  return np.array(
    [
      (some, some),  # p = q
      (zeros, zeros),
      (x[0], x[1]),
      (x[0], x[0]),
      (one, other),  # each is sure of another token
      (one_hot, some),
      (one_hot, 100 * some),
      (padded, some),
      (padded, padded),  # the draft has the same padding
      (some, one),
      (some, 1000 * other),
      (1e4 * some, -1e4 * some),
    ]
  ).swapaxes(0, 1)


@jax.jit
def _target_law(teacher, s):
  return losses.laws(teacher, teacher, sampling=s)[0]


@jax.jit
def _equations(p, z):
  """{name: values [n]} of laws p [n, V] and logits z."""
  return {
    name: getattr(losses, name).equation(p, jax.nn.log_softmax(z), **options)
    for name, options in LOSSES.items()
  }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@each_loss
def test_pathologies_are_finite(name, dtype):
  """B21: value and gradient finite, and near the float64 value."""
  teachers, students = (jnp.asarray(x, dtype) for x in _pathologies())
  cold = sampling(0.05)
  for s in (cold, *DEPLOYMENTS.values()):
    values, gradients = _every()(teachers, students, s)[name]
    assert jnp.isfinite(values).all(), values
    assert jnp.isfinite(gradients.astype(jnp.float32)).all(), gradients
    p = np.float64(_target_law(teachers, s))  # float32's, as in decoding
    with jax.enable_x64(True):
      z = np.asarray(students, np.float64) / (s.temperature or 1)
      want = _equations(p, z)[name]
    np.testing.assert_allclose(values, want, rtol=1e-5, atol=2e-6)


@each_loss
def test_zero_gradient_at_the_target(name):
  """At p = q: value 0 and gradient 0, but for TV's, which may be anything."""
  with jax.enable_x64(True):
    x, _, _ = _cases(False, seed=3)
    x[0], x[1, 8:] = 0, -90
    values, gradients = map(np.asarray, _every()(x, x)[name])
  np.testing.assert_allclose(values, 0, atol=1e-14)
  size = np.abs(gradients).sum(1)
  if name in ("forward_kl", "reverse_kl", "js"):
    assert (size < 1e-14).all()
  assert (size < (1 if name == "tvd_plus_plus" else 0.5) + 1e-9).all()
  np.testing.assert_allclose(gradients[0], 0, atol=1e-16)  # all are ties


def test_ties_are_strict():
  """A token with q = p to the bit has [q < p] = 0."""
  z = jnp.array([1.0, 0.0, 0.5])
  q = jnp.exp(jax.nn.log_softmax(z))
  p = q + jnp.array([0, -0.1, 0.1])
  for name in ("total_variation", "tvd_plus_plus"):
    loss = getattr(losses, name).equation
    got = jax.grad(lambda z: loss(p, jax.nn.log_softmax(z)))(z)  # noqa: B023
    np.testing.assert_allclose(got, _closed_form(name, p, q), rtol=1e-5)


def test_gradients_of_a_confidently_wrong_draft():
  """float32 keeps the relative precision of gradients that vanish."""
  teacher = jnp.array([[20.0, 0, 0, 0]])
  student = jnp.array([[0, 20.0, 0, 0]])
  every = _every()(teacher, student)
  for name in ("total_variation", "tvd_plus_plus", "negative_log_acceptance"):
    _, gradient = every[name]
    p, q = (np.exp(_log_softmax(np.float64(x[0]))) for x in (teacher, student))
    want = _closed_form(name, p, q)
    worst = np.abs(gradient[0] - want)[:2] / np.abs(want[:2])
    print(name, worst)
    assert (worst < 1e-4).all(), (gradient, want)


def test_huge_vocabulary():
  """150,000 tokens, an untrained draft: finite, and what float64 says."""
  rng = np.random.default_rng(4)
  teacher = np.float32(rng.normal(0, 4, (1, 150_000)))
  student = np.float32(rng.normal(0, 0.01, (1, 150_000)))
  p, q = (np.exp(_log_softmax(np.float64(x[0]))) for x in (teacher, student))
  ids = np.arange(150_000)
  for name, (value, gradient) in _every()(teacher, student).items():
    np.testing.assert_allclose(value[0], _define(name, p, q, ids), rtol=2e-5)
    error = np.abs(gradient[0] - (want := _closed_form(name, p, q))).sum()
    assert error < 1e-4 * np.abs(want).sum(), name


def test_hybrid_and_js_tend_to_their_parts():
  teachers, students, _ = _cases(False)
  with jax.enable_x64(True):
    every = _every()(teachers, students)
    kl, reverse = every["forward_kl"][0], every["reverse_kl"][0]
    tv, laws = every["total_variation"][0], losses.laws(teachers, students)
    hybrid = lambda eta: losses.likelihood_hybrid.equation(*laws, eta=eta)
    np.testing.assert_allclose(hybrid(0.0), kl)
    np.testing.assert_allclose(hybrid(1e9), tv)
    js = lambda beta: losses.js.equation(*laws, beta=beta)
    np.testing.assert_allclose(js(1e-7) / 1e-7, kl, rtol=1e-4)
    np.testing.assert_allclose(js(1 - 1e-7) / 1e-7, reverse, rtol=1e-4)
    alpha = losses.acceptance(teachers, students)
    want = theory.acceptance(jax.nn.softmax(teachers), jax.nn.softmax(students))
    np.testing.assert_allclose(alpha, want, rtol=1e-12)
    np.testing.assert_allclose(tv, 1 - want, rtol=1e-12)
  for beta in (0, 1, -0.1, 2):
    with pytest.raises(ValueError, match="beta"):
      js(beta)


# Where it is computed


def test_leading_axes_are_positions():
  """[B, T, V] is B T positions."""
  teachers, students, _ = (np.float32(x) for x in _cases(False))
  loss = jax.jit(losses.js)
  want = loss(teachers, students)
  got = loss(teachers.reshape(3, 4, -1), students.reshape(3, 4, -1))
  np.testing.assert_allclose(got, want.reshape(3, 4), rtol=1e-5, atol=1e-6)
  got = loss(teachers[5], students[5])
  assert got.shape == () and abs(got - want[5]) < 1e-5


def test_nothing_flows_to_the_teacher():
  teachers, students, _ = (np.float32(x) for x in _cases(False))

  @jax.jit
  @jax.grad
  def gradient(teacher):
    s = DEPLOYMENTS["top_p"]
    every = (getattr(losses, name) for name in LOSSES)
    return sum(loss(teacher, students, sampling=s).sum() for loss in every)

  np.testing.assert_array_equal(gradient(teachers), 0)


@each_loss
def test_masked_positions_leak_nothing(name):
  """B20, B21: NaN and -inf there change neither values nor gradients.

  And the public function is the equation on the laws.
  """
  teachers, students, ids = _cases(True)
  weights = np.array([1.0, 0.5, 0, 2, 0, 0, 1, 1, 0, 0, 1, 0], np.float32)
  broken = np.where(np.arange(12) % 3 == 2, -np.inf, np.nan)[:, None]
  masked = weights[:, None] == 0
  dirty = (
    np.float32(np.where(masked, broken, x)) for x in (teachers, students)
  )
  clean = (np.float32(x) for x in (teachers, students))
  ids = tuple(ids.tolist())
  got, gradients = _weighted(name, ids)(*dirty, weights)
  want, g = _every(ids)(*clean)[name]
  want = np.where(weights > 0, want, 0) * weights
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  g = np.where(masked, 0, g) * weights[:, None]
  np.testing.assert_allclose(gradients, g, rtol=1e-5, atol=1e-6)
  nothing = np.full((12, 16), np.nan, np.float32)
  got, gradients = _weighted(name, ids)(nothing, nothing[:, :5], 0 * weights)
  np.testing.assert_array_equal(got, 0)
  np.testing.assert_array_equal(gradients, 0)


@each_loss
def test_what_is_broken_is_seen(name):
  """A NaN that counts stops the run, from either side, at its position."""
  for place in (0, 1):
    pair = [np.zeros((12, 16), np.float32), np.ones((12, 16), np.float32)]
    pair[place][4, 4] = np.nan
    got, _ = _every()(*pair)[name]
    assert jnp.isnan(got[4]) and jnp.isfinite(np.delete(got, 4)).all()


def test_trimmed_vocabulary():
  """q = 0 outside ids: alpha and TV use p as it is, KL a constant less."""
  teachers, students, ids = _cases(True)
  how = dict(ids=ids, sampling=DEPLOYMENTS["cool"])
  with jax.enable_x64(True):
    alpha = losses.acceptance(teachers, students, **how)
    p, log_q = losses.laws(teachers, students, **how)
    kl = losses.forward_kl(teachers, students, **how)
    for n, teacher in enumerate(teachers):
      want_p = _law(teacher, how["sampling"])
      q = _draft_law(students[n], ids, 16, 0.7)
      np.testing.assert_allclose(p[n], want_p[ids])
      np.testing.assert_allclose(np.exp(log_q[n]), q[ids])
      np.testing.assert_allclose(alpha[n], np.minimum(want_p, q).sum())
    best = jnp.log(p)  # of p / sum p
    np.testing.assert_allclose(
      losses.forward_kl.equation(p, best - jnp.log(p.sum(-1, keepdims=True))),
      0,
      atol=1e-15,
    )
    mass = p.sum(-1)
    cross = -(p * log_q).sum(-1) + (p * jnp.log(p)).sum(-1)
    np.testing.assert_allclose(kl, cross - mass * np.log(mass))
  for bad in ([0, 1], [0, 1, 2, 3, 16], [0, 1, 2, 3, -1], [0, 1, 2, 3, 3]):
    with pytest.raises(ValueError, match="ids"):
      losses.total_variation(teachers, students, ids=bad)


def test_nothing_the_draft_can_say():
  """A greedy target outside ids: a finite loss without a gradient."""
  teacher, student = jnp.zeros((1, 9)).at[0, 8].set(5.0), jnp.ones((1, 5))
  every = _every((0, 1, 2, 3, 4))
  every = every(teacher, student, DEPLOYMENTS["greedy"])
  for name, (value, gradient) in every.items():
    assert jnp.isfinite(value).all(), name
    np.testing.assert_allclose(gradient, 0, atol=1e-6, err_msg=name)


def test_unequal_paddings():
  """Logits beyond the target's vocabulary are never drafted, missing ones 0."""
  rng = np.random.default_rng(6)
  teacher, student = np.float32(rng.normal(0, 2, (2, 8)))
  longer = np.append(student, [50.0, 60.0]).astype(np.float32)
  got = losses.total_variation(teacher, longer)
  assert got == losses.total_variation(teacher, student)
  got = losses.total_variation(teacher, student[:6])
  q = np.append(np.exp(_log_softmax(student[:6])), [0, 0])
  want = np.abs(np.exp(_log_softmax(teacher)) - q).sum() / 2
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_what_laws_refuses():
  with pytest.raises(ValueError, match="bias"):
    s = losses.PLAIN._replace(bias=jnp.zeros(3))
    losses.laws(jnp.zeros(3), jnp.zeros(3), sampling=s)


def test_draft_temperature():
  teachers, students, ids = _cases(False)
  with jax.enable_x64(True):
    tv = functools.partial(losses.total_variation, teachers)
    how = dict(sampling=DEPLOYMENTS["cool"])
    np.testing.assert_array_equal(
      tv(students, **how), tv(students, draft_temperature=0.7, **how)
    )
    np.testing.assert_allclose(
      tv(students * 0.7, **how), tv(students, draft_temperature=1.0, **how)
    )


# The expected length


def _bigram(V=3, seed=0):
  """Laws p, q [V, V] by the last token."""
  rng = np.random.default_rng(seed)
  return rng.dirichlet(np.ones(V), V), rng.dirichlet(np.ones(V), V)


def _paths(P, K, start=0):
  """(probability, tokens, the token before each) of all texts of K tokens."""
  for x in itertools.product(range(len(P)), repeat=K):
    before = (start, *x[:-1])
    yield np.prod([P[a, b] for a, b in zip(before, x, strict=True)]), x, before


def _thresholds(p, q, x, before, verifier):
  """[K] below which each uniform keeps its prefix, by halving: shipped code."""
  K = len(x)
  judge, ends = getattr(verify, verifier), jnp.append(before, x[-1])
  rest = 0.0 if verifier == "token" else 1.0  # the others: kept, not kept

  def keeps(i, u):
    others = jnp.full(K, rest).at[i].set(u)
    return judge(p[ends], q[before], x, others).num_accepted > i

  def halve(_, bounds):
    low, high = bounds
    kept = jax.vmap(keeps)(jnp.arange(K), (low + high) / 2)
    middle = (low + high) / 2
    return jnp.where(kept, middle, low), jnp.where(kept, high, middle)

  return lax.fori_loop(0, 50, halve, (jnp.zeros(K), jnp.ones(K)))[1]


def _round(p, q, K, verifier):
  """E[N] of the shipped verifier, over all drafts and uniforms."""
  probability, x, before = map(jnp.array, zip(*_paths(q, K), strict=True))
  of_draft = functools.partial(_thresholds, p, q, verifier=verifier)
  total = 1.0
  for w, h in zip(
    probability, jax.jit(jax.vmap(of_draft))(x, before), strict=True
  ):
    if verifier == "token":  # stops at the first that is not kept
      total += w * np.cumprod(h).sum()
    else:  # the longest that is kept
      total += w * sum(1 - np.prod(1 - h[j:]) for j in range(K))
  return float(total)


def _expected_length(p, q, x, before, **how):
  """-E[N] from each start of one text [T]; weights are 1."""
  p, log_q = p[jnp.array(before)], jnp.log(q)[jnp.array(before)]
  alpha = losses.acceptance.equation(p, log_q)
  rho = losses.log_ratio(p, log_q, jnp.array(x))
  return losses.expected_length(rho, alpha, jnp.ones(len(x)), **how)


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_expected_length_is_that_of_the_decoder(verifier):
  """Mean over all texts of the target = E[N] of the verifier, in float64."""
  K = 3
  P, Q = _bigram()
  how = dict(num_draft=K, verifier=verifier)
  with jax.enable_x64(True):
    p, q = jnp.asarray(P), jnp.asarray(Q)
    value = lambda q, x, b: -_expected_length(p, q, x, b, **how)[0]
    probability, x, before = zip(*_paths(P, K), strict=True)
    values = jax.vmap(value, (None, 0, 0))(q, jnp.array(x), jnp.array(before))
    mean = np.array(probability) @ np.array(values)
    # token: sum over drafts of prod min(p, q), the law of the accepted prefix
    overlap = np.minimum(P, Q)
    want = 1 + sum(
      sum(w for w, *_ in _paths(overlap, j)) for j in range(1, K + 1)
    )
    if verifier == "token":
      np.testing.assert_allclose(mean, want, rtol=1e-13)
    else:
      assert mean > want + 1e-3  # block verification keeps more
    got = _round(p, q, K, verifier)
    assert abs(got - mean) < 1e-13


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_expected_length_gradient(verifier):
  """Of the enumerated mean by the draft's logits: finite differences, 1e-6."""
  K = 3
  P, Q = _bigram(seed=1)
  how = dict(num_draft=K, verifier=verifier)
  probability, x, before = map(np.array, zip(*_paths(P, K), strict=True))
  with jax.enable_x64(True):
    value = lambda q, x, b: _expected_length(jnp.array(P), q, x, b, **how)[0]
    each = jax.vmap(value, (None, 0, 0))
    loss = lambda z: probability @ each(jax.nn.softmax(z), x, before)
    z = jnp.log(Q)
    gradient, loss = np.array(jax.jit(jax.grad(loss))(z)), jax.jit(loss)
    worst = 0
    for i, j in np.ndindex(3, 3):
      d = jnp.zeros((3, 3)).at[i, j].set(1e-6)
      slope = (loss(z + d) - loss(z - d)) / 2e-6
      worst = max(worst, abs(float(slope) - gradient[i, j]))
  print(f"{verifier}: {float(worst):.1e}")
  assert worst < 1e-6 and np.abs(gradient).max() > 0.1


def _along(log_ratio, alpha, there, K, verifier):
  """E[N] from each start by loops, [T]."""
  T = len(alpha)
  lengths = np.ones(T)
  for s in range(T):
    product = least = survival = 1.0
    for i in range(s, min(s + K, T)):
      if not there[i]:
        break
      broken = log_ratio[i] == np.inf
      rho = 0.0 if broken else np.exp(log_ratio[i])
      product *= rho
      least = min(least, product)
      lengths[s] += survival * alpha[i] if verifier == "token" else least
      survival *= min(1, rho)
  return lengths


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_expected_length_along_rows(verifier):
  """Ends, holes, words that p or q cannot say, NaN where weights are 0."""
  rng = np.random.default_rng(7)
  B, T, K = 4, 11, 4
  ratio, alpha = rng.normal(0, 1, (B, T)), rng.random((B, T))
  weights = np.where(rng.random((B, T)) < 0.8, rng.uniform(0.5, 2, (B, T)), 0)
  weights[0], weights[1] = 1, 0
  ratio[0, 3], ratio[0, 7], ratio[2, 1] = -np.inf, np.inf, 0
  dirty = [np.where(weights > 0, x, np.nan) for x in (ratio, alpha)]
  how = dict(num_draft=K, verifier=verifier)
  steps = rng.normal(0, 1e-6, (2, B, T))
  values = functools.partial(losses.expected_length, **how)

  @jax.jit
  @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
  def gradient(*args):
    loss = values(*args)
    return loss.sum(), loss

  with jax.enable_x64(True):
    gradients, got = gradient(*dirty, weights)
    move = lambda e: (ratio + e * steps[0], alpha + e * steps[1], weights)
    up, down = (float(gradient(*move(e))[1].sum()) for e in (1, -1))
    got, *gradients = map(np.asarray, (got, *gradients))
  for b in range(B):
    want = _along(ratio[b], alpha[b], weights[b] > 0, K, verifier)
    np.testing.assert_allclose(got[b], -want * weights[b], rtol=1e-12)
  assert all(np.isfinite(g).all() for g in gradients)
  for g in gradients:
    np.testing.assert_array_equal(np.where(weights > 0, 0, g), 0)
  slope = sum((g * d).sum() for g, d in zip(gradients, steps, strict=True))
  np.testing.assert_allclose(slope, (up - down) / 2, rtol=1e-6)
  with pytest.raises(ValueError, match="verifier"):
    losses.expected_length(ratio, alpha, weights, num_draft=2, verifier="x")


def test_expected_length_is_the_survival_that_theory_reads():
  """Block: sum_j A_{s,j} of the renewal recursion's own survival."""
  rng = np.random.default_rng(8)
  n, K = 30, 5
  rho = np.append(np.exp(rng.normal(-0.2, 0.8, n)), np.zeros(K))
  survival = np.ones((n, K + 1))
  for s, j in np.ndindex(n, K):
    products = np.cumprod(rho[s : s + j + 1])
    survival[s, j + 1] = min(1, products.min())
  with jax.enable_x64(True):
    got = losses.expected_length(
      jnp.log(rho[:n]), jnp.ones(n), jnp.ones(n), num_draft=K
    )
  np.testing.assert_allclose(
    -got, theory.expected_tokens_from_survival(survival)
  )
  rounds = theory.expected_rounds_along(survival)
  assert 1 < n / rounds < K + 1


def test_log_ratio():
  p = jnp.array([[0.5, 0.5, 0.0]] * 3)
  log_q = jnp.log(jnp.array([[0.2, 0.3, 0.5]] * 3))
  got = losses.log_ratio(p, log_q, jnp.array([0, 1, 2]))
  np.testing.assert_allclose(got, [np.log(0.4), np.log(0.6), np.inf], rtol=1e-6)
  got = losses.log_ratio(p, log_q, jnp.array([7, 2, 3]), ids=(7, 3, 5))
  np.testing.assert_allclose(
    got, [np.log(0.4), -np.inf, np.log(0.6)], rtol=1e-6
  )


# Over a batch, in chunks of positions

B, T, D, V = 3, 10, 4, 7
IDS = (5, 0, 3, 6)
EVERY = {
  **LOSSES,
  "expected_length": {"num_draft": 3, "verifier": "token"},
  "expected_rounds": {"num_draft": 3, "verifier": "block"},
}
ALONG = {
  "expected_length": losses.expected_length,
  "expected_rounds": renewal.expected_rounds,
}
every_loss = pytest.mark.parametrize("name", EVERY)
some_losses = pytest.mark.parametrize(
  "name", ["forward_kl", "tvd_plus_plus", "expected_length"]
)


def _batch(seed=9, dtype=np.float64):
  rng = np.random.default_rng(seed)
  hidden = rng.normal(0, 1, (2, B, T, D)).astype(dtype)
  heads = rng.normal(0, 1, (2, D, V)).astype(dtype)
  weights = np.where(rng.random((B, T)) < 0.7, rng.uniform(0.5, 2, (B, T)), 0)
  labels = rng.integers(0, V, (B, T)).astype(np.int32)
  return hidden, heads, weights.astype(dtype), labels


def _total(name, head, student, batch, **how):
  """`objective.total` of one loss, student head and states apart."""
  (teacher, _), (teacher_head, _), weights, labels = batch
  return objective.total(
    ((name, 1.0, EVERY[name]),),
    0.5,
    jnp.asarray(teacher),
    student,
    jnp.asarray(weights),
    labels if labels is None else jnp.asarray(labels),
    teacher_unembed=lambda x: x @ teacher_head,
    student_unembed=lambda x: x @ head,
    **how,
  )


@functools.cache
def _whole(ids=None, sampling=losses.PLAIN):
  """{name: (sums, gradients by 3 loss)} of `_batch`, without chunks."""
  (teacher, _), (teacher_head, _), weights, labels = _batch()
  there = (weights > 0)[..., None]

  def value(name, head, student):
    student = jnp.where(there, student, 0) @ head
    how = dict(ids=ids, sampling=sampling)
    p, log_q = losses.laws(teacher @ teacher_head, student, **how)
    alpha = losses.acceptance.equation(p, log_q)
    if name in ALONG:
      rho = losses.log_ratio(p, log_q, labels, ids=ids)
      loss = ALONG[name](rho, alpha, weights, **EVERY[name])
    else:
      loss = getattr(losses, name).equation(p, log_q, **EVERY[name])
      loss = weights * loss
    sums = loss.sum(), weights.sum(), (weights * alpha).sum()
    return 3 * sums[0], sums

  @jax.jit
  def every(head, student):
    def of(name):
      f = functools.partial(value, name)
      gradient = jax.grad(f, (0, 1), has_aux=True)
      return gradient(head, student)[::-1]

    return {name: of(name) for name in EVERY}

  return every


TOP_P = DEPLOYMENTS["top_p"]


@pytest.mark.parametrize(
  "name, ids, chunk, sampling",
  [
    ("tvd_plus_plus", None, 4, losses.PLAIN),
    ("likelihood_hybrid", None, 10, losses.PLAIN),
    ("expected_length", None, 3, losses.PLAIN),
    ("expected_rounds", None, 3, losses.PLAIN),
    ("forward_kl", IDS, 64, TOP_P),
    ("expected_length", IDS, 1, TOP_P),
  ],
)
def test_chunked_is_whole(name, ids, chunk, sampling):
  """Sums, and gradients by states and head; full and trimmed; 1e-12."""
  batch = _batch()
  how = dict(ids=ids, sampling=sampling)
  with jax.enable_x64(True):
    student = jnp.asarray(batch[0][1])
    head = jnp.asarray(batch[1][1][:, : len(ids) if ids else V])

    def chunked(head, student):
      sums = _total(name, head, student, batch, chunk=chunk, **how)
      return 3 * sums.loss, sums

    chunked = jax.jit(jax.grad(chunked, (0, 1), has_aux=True))
    gradients, sums = chunked(head, student)
    want_sums, want = _whole(**how)(head, student)[name]
  np.testing.assert_allclose(sums, want_sums, rtol=1e-12)
  for g, w in zip(gradients, want, strict=True):
    np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-12)
    assert g.dtype == jnp.float64 and np.isfinite(g).all()


@some_losses
def test_masked_states_leak_nothing(name):
  """NaN states of weight 0, which the head's gradient would multiply by 0."""
  hidden, heads, weights, labels = _batch(dtype=np.float32)
  masked = (weights == 0)[..., None]
  labels = np.where(weights > 0, labels, -1)
  dirty = np.where(masked, np.array([np.nan, np.inf, -np.inf, 0])[:D], hidden)
  f = lambda head, student, batch: _total(name, head, student, batch, chunk=4)[
    0
  ]
  f = jax.jit(jax.value_and_grad(f, (0, 1)))
  got = f(heads[1], dirty[1], (dirty, heads, weights, labels))
  want = f(heads[1], hidden[1], (hidden, heads, weights, labels))
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert np.isfinite(want[0]) and np.abs(want[1][0]).max() > 0.01
  np.testing.assert_array_equal(np.where(masked, want[1][1], 0), 0)
  nothing = np.zeros_like(weights)  # B20
  got = f(heads[1], dirty[1], (dirty, heads, nothing, labels))
  jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), got)


@some_losses
def test_sums_of_micro_batches(name):
  """B19: sums over rows add up to the whole, gradients too."""
  hidden, heads, weights, labels = _batch(dtype=np.float32)
  weights[0], weights[1, 2:] = 0, 0  # a row with nothing, one with little

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def f(head, weights):
    batch = hidden, heads, weights, labels
    sums = _total(name, head, hidden[1], batch, chunk=4)
    return sums.loss, sums

  weights = weights > 0
  rows = np.eye(B, dtype=bool)[:, :, None]
  whole, *parts = (f(heads[1], weights & row) for row in (True, *rows))
  added = jax.tree.map(lambda *x: sum(x), *parts)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  jax.tree.map(close, added, whole)
  assert whole[1].weight == weights.sum() and parts[0][1].weight == 0


MIX = np.array([0.0, 0.7, 1.0, np.nan], np.float32)  # of four rows


def test_laws_of_mixed_rows():
  """Each row's p at its own temperature, and q at it: NumPy, 1e-12."""
  rng = np.random.default_rng(13)
  teacher, student = rng.normal(0, 2, (2, 4, 3, V))
  own = np.array([0.0, 0.7, 1.0, 1.3])  # MIX, in a deployment at 1.3
  for asked in (sampling(1.3), sampling(1.3, top_p=0.7)):
    s = asked._replace(temperature=own[:, None])
    with jax.enable_x64(True):
      p, log_q = map(np.asarray, losses.laws(teacher, student, sampling=s))
      _, cool = losses.laws(teacher, student, sampling=s, draft_temperature=0.5)
    for b, t in np.ndindex(4, 3):
      want = _law(teacher[b, t], asked._replace(temperature=own[b]))
      np.testing.assert_allclose(p[b, t], want, rtol=1e-12)
      want = _log_softmax(student[b, t] / (own[b] or 1))
      np.testing.assert_allclose(log_q[b, t], want, rtol=1e-12)
    want = jax.nn.log_softmax(2 * student)
    np.testing.assert_allclose(cool, want, rtol=1e-6, atol=1e-6)
  assert set(np.unique(p[0])) == {0, 1}  # greedy


@pytest.mark.parametrize("name", ["total_variation", "forward_kl"])
@pytest.mark.parametrize("ids", [None, IDS])
def test_total_of_mixed_rows(name, ids):
  """Value and gradient by the states: the definitions in NumPy, row by row."""
  rng = np.random.default_rng(14)
  hidden, weights = rng.normal(0, 2, (2, 4, 5, D)), rng.random((4, 5))
  heads = rng.normal(0, 1, (D, V)), rng.normal(0, 1, (D, len(ids or range(V))))
  asked, at = sampling(1.3, top_p=0.8), np.array(ids or range(V))
  with jax.enable_x64(True):

    def loss(student, mix, asked):  # both traced, as in a training step
      batch = (hidden[0], None), (heads[0], None), weights, None
      how = dict(temperature=mix, sampling=asked, ids=ids, chunk=2)
      sums = _total(name, heads[1], student, batch, **how)
      return sums.loss, sums

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    gradient, sums = gradient(hidden[1], MIX, asked)
  value = alpha = 0
  for b, t in np.ndindex(4, 5):
    T = (0.0, np.float32(0.7), 1.0, 1.3)[b]
    p = _law(hidden[0, b, t] @ heads[0], asked._replace(temperature=T))
    q = _draft_law(hidden[1, b, t] @ heads[1], at, V, T)
    value += weights[b, t] * _define(name, p, q, at)
    alpha += weights[b, t] * np.minimum(p, q).sum()
    want = heads[1] @ _closed_form(name, p[at], q[at]) / (T or 1)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
    close(gradient[b, t], weights[b, t] * want)
  np.testing.assert_allclose(sums, (value, weights.sum(), alpha), rtol=1e-12)


def test_expected_length_of_mixed_rows():
  """Each row is what it is alone, in a deployment at its temperature."""
  rng = np.random.default_rng(15)
  hidden, heads = rng.normal(0, 1, (2, 4, 6, D)), rng.normal(0, 1, (2, D, V))
  hidden, heads = np.float32(hidden), np.float32(heads)
  # what the greedy row says is its argmax
  labels = rng.integers(0, V, (4, 6))
  labels[0] = (hidden[0, 0] @ heads[0]).argmax(-1)
  every = hidden, heads, np.ones((4, 6), np.float32), labels.astype(np.int32)

  @functools.partial(jax.jit, static_argnames="own")
  @functools.partial(jax.grad, has_aux=True)
  def f(student, hidden, heads, weights, labels, how, own):
    batch = hidden, heads, weights, labels
    how = how if own else dict(sampling=how["sampling"])
    sums = _total("expected_length", heads[1], student, batch, chunk=4, **how)
    return sums.loss, sums

  how = dict(sampling=sampling(1.3), temperature=MIX)
  gradient, sums = f(hidden[1], *every, how, own=True)
  alone = []
  for b, T in enumerate((0.0, 0.7, 1.0, 1.3)):
    row = hidden[:, b : b + 1], heads, *(x[b : b + 1] for x in every[2:])
    how = dict(sampling=sampling(T), temperature=MIX)
    want, part = f(hidden[1, b : b + 1], *row, how, own=False)
    np.testing.assert_allclose(gradient[b], want[0], rtol=1e-4, atol=1e-6)
    alone.append(part)
  np.testing.assert_allclose(sums, np.sum(alone, 0), rtol=1e-5)
  assert len({round(float(x.loss), 3) for x in alone}) == 4


def _shapes(jaxpr):
  """Every (primitive, shape) that a program makes, inner ones included."""
  for eqn in jaxpr.eqns:
    for x in eqn.outvars:
      yield eqn.primitive.name, x.aval.shape
    for inner in jax.tree.leaves(
      eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")
    ):
      inner = getattr(inner, "jaxpr", inner)
      if hasattr(inner, "eqns"):
        yield from _shapes(inner)


@every_loss
def test_logits_of_a_chunk_at_a_time(name):
  """B40: nothing of B T V entries is made, with the gradient."""
  batch = _batch(dtype=np.float32)
  f = lambda head, student: _total(name, head, student, batch, chunk=2)[0]
  f = jax.grad(f, (0, 1))
  shapes = list(_shapes(jax.make_jaxpr(f)(batch[1][1], batch[0][1]).jaxpr))
  logits = [shape for _, shape in shapes if V in shape and 2 in shape]
  assert (B, 2, V) in logits
  assert max(np.prod(shape) for _, shape in shapes) < B * T * V / 1.2
  products = [shape for kind, shape in shapes if kind == "dot_general"]
  # each head forward, the student's twice backward; `positions` makes them anew
  want = 6 if name in ALONG else 4
  assert len(products) == want, products


@pytest.mark.parametrize("name", ["total_variation", "expected_length"])
@pytest.mark.parametrize("jit", [False, True])
def test_a_head_that_both_share(name, jit):
  """A tied head gets the student's gradient alone."""
  if not jit and name == "expected_length":
    pytest.skip("slow, and has no rule of its own")
  hidden, (head, _), weights, labels = _batch(dtype=np.float32)

  def tied(head, teacher_head):
    batch = hidden, (teacher_head, None), weights, labels
    return _total(name, head, hidden[1], batch, chunk=4)[0]

  both = jax.grad(lambda head: tied(head, head))
  got = (jax.jit(both) if jit else both)(head)
  want = jax.jit(jax.grad(tied))(head, head)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_bfloat16_heads():
  """Sums are float32 over the chunks, gradients have the parameters' dtype."""
  (teacher, student), heads, _, _ = _batch(dtype=np.float32)
  long = lambda x: np.repeat(x[:1, :1], 600, 1)
  batch = (long(teacher), None), heads, np.ones((1, 600), np.float32), None

  @jax.jit
  @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
  def f(head, student):
    sums = _total("forward_kl", head, student, batch, chunk=1)
    return sums.loss, sums

  narrow = [jnp.asarray(x, jnp.bfloat16) for x in (heads[1], long(student))]
  got, sums = f(*narrow)
  want, _ = f(*(x.astype(jnp.float32) for x in narrow))
  assert all(x.dtype == jnp.float32 for x in sums) and sums.weight == 600
  for a, b in zip(got, want, strict=True):  # bfloat16 sums would stop at 256
    assert a.dtype == jnp.bfloat16
    assert jnp.abs(a - b).max() < 0.05 * jnp.abs(b).max()


# Schedules

KL_THEN_TV = (("forward_kl", 1 / 3), ("total_variation", 1.0))


def test_phase():
  for fraction, want in ((0, 0), (0.33, 0), (0.34, 1), (0.999, 1), (1.0, 1)):
    assert objective.phase(KL_THEN_TV, fraction) == want
  assert objective.phase((("js", 1.0),), 1.0) == 0
  three = (("js", 0.25), ("reverse_kl", 0.5), ("forward_kl", 1))
  assert [int(objective.phase(three, x)) for x in (0, 0.25, 0.5)] == [0, 1, 2]


def test_a_switch_compiles_nothing_and_computes_one_loss():
  hidden, heads, weights, labels = _batch(dtype=np.float32)
  last = ("expected_length", 1.0, EVERY["expected_length"])
  traced = []

  @jax.jit
  @jax.value_and_grad
  def step(head, fraction):
    traced.append(1)
    return objective.total(
      (*KL_THEN_TV[:1], last),
      fraction,
      *hidden,
      weights,
      labels,
      teacher_unembed=lambda x: x @ heads[0],
      student_unembed=lambda x: x @ head,
      chunk=4,
    ).loss

  every = _whole()(heads[1], hidden[1])
  for fraction, name in ((0.1, "forward_kl"), (0.9, "expected_length")):
    loss, gradient = step(heads[1], jnp.float32(fraction))
    sums, (want, _) = every[name]
    np.testing.assert_allclose(loss, sums[0], rtol=1e-5)
    np.testing.assert_allclose(3 * gradient, want, rtol=1e-4, atol=1e-4)
  assert len(traced) == 1
  text = step.lower(heads[1], jnp.float32(0)).compile().as_text()
  assert re.search(r"\bconditional\(", text)  # not a select of both


def test_a_switch_takes_traced_temperatures():
  """A schedule of two losses, rows' temperatures an argument of the step."""
  hidden, heads, weights, _ = _batch(dtype=np.float32)

  @jax.jit
  def step(head, fraction, temperature):
    how = dict(
      teacher_unembed=lambda x: x @ heads[0], temperature=temperature, chunk=4
    )

    def loss(head):
      unembed = lambda x: x @ head
      args = KL_THEN_TV, fraction, *hidden, weights
      return objective.total(*args, student_unembed=unembed, **how).loss

    return jax.value_and_grad(loss)(head)

  mix, batch = MIX[[0, 1, 3]], (hidden, heads, weights, None)
  for fraction, name in ((0.1, "forward_kl"), (0.9, "total_variation")):
    of = lambda head: _total(name, head, hidden[1], batch, temperature=mix)[0]  # noqa: B023
    want = jax.value_and_grad(of)(heads[1])
    got = step(heads[1], np.float32(fraction), mix)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, got, want)


@pytest.mark.parametrize(
  "schedule, words",
  [
    ((("kl", 1.0),), "no loss 'kl'; there are forward_kl"),
    ((), "ends must rise to 1"),
    ((("js", 0.5),), "ends must rise to 1"),
    ((("js", 0.5), ("forward_kl", 0.5), ("js", 1)), "ends must rise to 1"),
    ((("js", 1.0, {"bta": 1}),), "js has no option 'bta', but .*beta"),
    ((("expected_length", 1.0, {"k": 1}),), "num_draft.*verifier"),
    ((("expected_length", 1.0),), "needs the option 'num_draft'"),
  ],
)
def test_bad_schedules(schedule, words):
  with pytest.raises(ValueError, match=words):
    objective.phase(schedule, 0.0)


@pytest.mark.parametrize("name", ALONG)
def test_losses_along_rows_need_labels(name):
  hidden, heads, weights, _ = _batch(dtype=np.float32)
  with pytest.raises(ValueError, match=f"{name} needs the labels"):
    _total(name, heads[1], hidden[1], (hidden, heads, weights, None))
