"""What the equations of `theory.py` are computed with.

NumPy or JAX, whichever the arguments are; checks of the arguments, as far as
they are known; and the quantities whose closed forms cancel.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_TOLERANCE = 1e-3  # of sums of float32 probabilities over a vocabulary


def floats(*args, like=()):
  """(namespace, *args as floating arrays of one precision).

  NumPy in float64, unless something in args or `like` is a JAX array: then JAX,
  in the precision of those, float32 at least.
  """
  given = [x for x in (*args, *like) if isinstance(x, jax.Array)]
  if not given:
    return np, *(np.asarray(x, np.float64) for x in args)
  kinds = [x.dtype for x in given if jnp.issubdtype(x.dtype, jnp.floating)]
  dtype = jnp.result_type(*kinds, jnp.float32) if kinds else float
  return jnp, *(jnp.asarray(x, dtype) for x in args)


def whole(xp, x, name):
  """x as an integer array; ValueError if it is negative or has a fraction.

  Or is more than an integer holds: infinity is no count.
  """
  ok = lambda x: (x >= 0) & (x == np.floor(x))
  check(ok, f"{name} must be a whole number >= 0", x)
  check(lambda x: x < 2.0**63, f"{name} must be below 2^63", x)
  x = xp.asarray(x)
  return x if xp.issubdtype(x.dtype, xp.integer) else x.astype(int)


def check(ok, message, *values):
  """ValueError unless ok(*values) everywhere; nothing where one is traced."""
  values = [_known(x) for x in values]
  if all(x is not None for x in values) and not np.all(ok(*values)):
    raise ValueError(message)


def check_alpha(alpha):
  check(lambda a: (a >= 0) & (a <= 1), "alpha must be in [0, 1]", alpha)


def check_cost_ratio(C):
  check(lambda C: C > 0, "cost_ratio must be positive", C)


def laws(p, q):
  """(namespace, p, q), checked to be laws [..., V]."""
  p_shape, q_shape = np.shape(p), np.shape(q)
  if not p_shape[-1:] == q_shape[-1:] != ():
    raise ValueError(f"p {p_shape} and q {q_shape} differ in their vocabulary")
  is_law = lambda p: (p >= 0).all(-1) & (abs(p.sum(-1) - 1) <= _TOLERANCE)
  check(is_law, "p must be >= 0 and sum to 1 over its last axis", p)
  check(is_law, "q must be >= 0 and sum to 1 over its last axis", q)
  return floats(p, q)


def survival(A, like=()):
  """(namespace, A), checked to be [..., K + 1], A_0 = 1, not increasing."""
  if np.shape(A)[-1:] in ((), (0,)):
    raise ValueError(f"survival must be [..., K + 1], got {np.shape(A)}")
  starts = lambda A: abs(A[..., 0] - 1) <= _TOLERANCE
  falls = lambda A: (A >= 0).all(-1) & (np.diff(A) <= _TOLERANCE).all(-1)
  check(starts, "survival must start with A_0 = 1", A)
  check(falls, "survival must be >= 0 and must not increase", A)
  return floats(A, like=like)


def costs(A, draft, verify, overhead):
  """(namespace, A [..., K + 1], c [..., K], v + o [..., K + 1]), checked."""
  survival(A)
  check(lambda c: c >= 0, "draft_cost must be >= 0", draft)
  check(lambda v: v > 0, "verify_cost must be positive", verify)
  xp, A, draft, verify, overhead = floats(A, draft, verify, overhead)
  K = A.shape[-1] - 1
  draft = _last_axis(xp, draft, K, "draft_cost")
  verify = _last_axis(xp, verify, K + 1, "verify_cost")
  overhead = _last_axis(xp, overhead, K + 1, "overhead")
  return xp, A, draft, verify + overhead


def _last_axis(xp, x, n, name):
  """x, a scalar or [..., 1] or [..., n], as [..., n]."""
  if x.shape[-1:] not in ((), (1,), (n,)):
    raise ValueError(f"{name} must be a scalar or [..., {n}], got {x.shape}")
  return xp.broadcast_to(x, (*x.shape[:-1], n))


def largest(x):
  """The largest of whole numbers x, 0 of none; an int unless x is traced."""
  value = _known(x)
  return x.max(initial=0) if value is None else int(value.max(initial=0))


def _known(x):
  """x in NumPy, None if it is traced."""
  try:
    return np.asarray(x, np.float64)
  except jax.errors.TracerArrayConversionError:
    return None


def repeat(xp, steps, body, carry):
  """carry after body(s, carry) for s = 0..steps - 1."""
  if xp is jnp:
    return lax.fori_loop(0, steps, body, carry)
  for s in range(steps):
    carry = body(s, carry)
  return carry


def accepted(alpha, k):
  """Mean and variance of tau, how many of k i.i.d. tests are passed in a row.

  Runs of a and of b tests join as tau = tau_a + [tau_a = a] tau_b. Runs of 2^i
  tests are doubled, and joined by the binary form of k. With E[a - tau_a] kept
  beside the moments, only positive terms are ever added: nothing cancels near
  alpha = 1, where the closed forms are 0 / 0, nor in derivatives.

  Args:
    alpha: [...] the probability to pass a test.
    k: [...] int >= 0.
  """
  check_alpha(alpha)
  xp, alpha = floats(alpha, like=(k,))
  k, most = whole(xp, k, "k"), largest(k)

  def step(i, carry):
    total, run, passes, fails, tests = carry
    pairs = zip(_join(passes, fails, run, total), total, strict=True)
    has = (k >> i) & 1 == 1
    total = tuple(xp.where(has, x, y) for x, y in pairs)
    run = _join(passes, fails, run, run)
    fails = fails + passes * fails
    tests = 2 * tests
    return total, run, alpha**tests, fails, tests  # passes**2 adds up errors

  zero = xp.zeros(np.broadcast_shapes(alpha.shape, k.shape), alpha.dtype)
  total = zero, zero, zero  # E tau, E[tests - tau], Var tau
  run = alpha, 1 - alpha, alpha * (1 - alpha)  # the same, of 2^i tests
  # passes: all of the 2^i tests, fails: not all of them
  carry = total, run, alpha, 1 - alpha, xp.ones((), alpha.dtype)
  if isinstance(most, int):
    for i in range(most.bit_length()):
      carry = step(i, carry)
  else:  # traced: it may be all that its type holds
    carry = lax.fori_loop(0, xp.iinfo(k.dtype).bits - 1, step, carry)
  (mean, _, variance), *_ = carry
  return mean[()], variance[()]  # [()]: no 0-d arrays


def _join(passes, fails, a, b):
  """The moments of run a and, if all of it passes, run b."""
  (mean_a, lost_a, var_a), (mean_b, lost_b, var_b) = a, b
  return (
    mean_a + passes * mean_b,
    lost_a + lost_b + fails * mean_b,
    var_a + passes * (var_b + fails * mean_b**2 + 2 * lost_a * mean_b),
  )


def log_lambert(xp, s):
  """w = ln(-W_{-1}(-e^(-1-s))), s > 0: the w > 0 with e^w - 1 - w = s.

  Newton on w itself: e^(-1-s) would underflow, and y = e^w cancels in y - 1
  for small s. The function is convex: after the first step each comes down to
  the root from above, and six are enough for float64 at any s.
  """
  w = xp.where(s < 1, xp.sqrt(2 * s), xp.log1p(s + xp.log1p(s)))
  for _ in range(6):
    series = xp.ones_like(w)  # 1 + w/3 + w^2/(3 4) + ..., for w < 1.2
    for i in range(18, 2, -1):
      series = 1 + w / i * series
    excess = xp.where(w < 1.2, w * w / 2 * series, xp.expm1(w) - w)
    w = w - (excess - s) / xp.expm1(w)
  return w
