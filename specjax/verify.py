"""Keep a prefix of a draft so that the output is distributed as the target.

Pure functions of one row's laws, draft and uniforms; nothing is drawn here.
What follows the accepted prefix is returned as a law and drawn by the caller,
so that tests can sum over every outcome of the shipped code.
"""

import jax.numpy as jnp

from specjax.types import Verdict


def token(p, q, draft, u, *, length=None):
  """Test each drafted token on its own, stop at the first rejection.

  Token x_i ~ q_i is kept with probability min(1, p_i(x_i) / q_i(x_i)). At the
  first rejection the next token's law is norm(max(0, p_i - q_i)); when all
  are kept it is p_{K+1}, which is the same rule with q = 0. (Leviathan et al.
  2023, Algorithm 1; Chen et al. 2023, Theorem 1.)

  The test is `q > 0 and u * q < p`, strict: with `<=` a token of p = 0 would
  pass at u = 0. A row of q that is not finite counts as q = 0, a rejection
  whose residual is p. Where p and q agree to rounding the residual may vanish;
  it is then p.

  Args:
    p: [K + 1, V] the target's laws.
    q: [K, V] the very laws that the draft was drawn from.
    draft: [K] int32 drafted tokens.
    u: [K] independent uniforms on [0, 1).
    length: [] how many drafted tokens are real, by default K.

  Returns:
    `Verdict`; next_probs is NaN where the target's law is.
  """
  K, _ = q.shape
  q = _usable(q, K if length is None else length)
  i = jnp.arange(K)
  p_draft, q_draft = p[i, draft], q[i, draft]  # [K]
  keep = (q_draft > 0) & (u * q_draft < p_draft)
  n = jnp.cumprod(keep.astype(jnp.int32)).sum().astype(jnp.int32)
  q_next = jnp.concatenate([q, jnp.zeros_like(p[:1])])[n]  # [V]
  return Verdict(n, _residual(p[n], q_next))


def _usable(q, length):
  """q [K, V] with 0 for the rows that are not real or not finite."""
  real = (jnp.arange(len(q)) < length) & jnp.isfinite(q).all(1)
  return jnp.where(real[:, None], q, 0)


def _residual(p, q):
  """norm(max(0, p - q)) [V], or p where that vanishes."""
  rest = jnp.maximum(p - q, 0)
  total = rest.sum()
  # a NaN total compares false and p, then NaN too, shows the broken target
  return jnp.where(total > 0, rest / total, p)
