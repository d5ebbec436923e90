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
  pass at u = 0. A row of q that is negative or not finite counts as q = 0: a
  rejection whose residual is p. Where p and q agree to rounding the residual
  may vanish; it is then p.

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


def block(p, q, draft, u, *, length=None):
  """Judge the drafted tokens together: keep the longest prefix that passes.

  With pi_0 = 1 and pi_i = min(1, pi_{i-1} p_i(x_i) / q_i(x_i)), a prefix of i
  tokens passes if u_i < h_i, where

    S_i = sum max(0, pi_i p_{i+1} - q_{i+1}),   h_i = S_i / (S_i + 1 - pi_i),

  h_K = pi_K, and the empty prefix always does. Behind the longest one that
  passes the law is norm(max(0, pi_i p_{i+1} - q_{i+1})), behind all K p_{K+1}:
  q_{K+1} = 0 makes these the same two formulas. Its expected length is never
  less than `token`'s. (Sun et al. 2025, "Block verification accelerates
  speculative decoding", Algorithm 2.)

  Arguments, result and what counts as a rejection are those of `token`; u[i] is
  compared with h_{i+1}. For K = 1 and for one-hot p both accept alike.
  """
  K, _ = q.shape
  q = _usable(q, K if length is None else length)
  i = jnp.arange(K)
  p_draft, q_draft = p[i, draft], q[i, draft]  # [K]
  possible = (q_draft > 0) & (p_draft > 0)  # a NaN is not
  ratio = jnp.where(possible, p_draft / jnp.where(possible, q_draft, 1), 0)
  ratio = jnp.minimum(ratio, jnp.finfo(p.dtype).max)  # or 0 * inf is NaN
  pi = [jnp.ones((), p.dtype)]
  for r in ratio:
    pi.append(jnp.minimum(1, pi[-1] * r))
  pi = jnp.stack(pi)  # [K + 1]
  q = jnp.concatenate([q, jnp.zeros_like(p[:1])])  # [K + 1, V]
  S = jnp.maximum(pi[:, None] * p - q, 0).sum(1)  # [K + 1]
  below = S + 1 - pi  # 0 only where p = q follows a prefix that must pass
  h = jnp.where(below > 0, S / jnp.where(below > 0, below, 1), 1)
  # Behind i tokens the target is broken: the block ends there, as if q = 0.
  h = jnp.where(jnp.isnan(S), pi, h)
  passes = jnp.concatenate([jnp.ones(1, bool), u < h[1:]])
  n = (passes * jnp.arange(K + 1)).max().astype(jnp.int32)
  return Verdict(n, _residual(pi[n] * p[n], q[n]))


def coupled(draft, sample, *, length=None):
  """Keep the draft while it says what the target itself has drawn.

  The target draws a token for each position, with the noise that plain decoding
  uses there, and those draws are the output: any draft leaves it unchanged. The
  draft draws with the same noise, so that it often agrees: at least with
  probability (1 - TV) / (1 + TV) for Gumbel-max over the whole vocabulary;
  `sampling.draw` has two levels, for which that is no proof. (Daliri et al.
  2024, "Coupling without communication".)

  Args:
    draft: [K] int32 drafted tokens.
    sample: [K + 1] int32, the target's own draw behind each prefix.
    length: [] how many drafted tokens are real, by default K.

  Returns:
    `Verdict` whose next_probs is None: the next token is
    sample[num_accepted].
  """
  (K,) = draft.shape
  real = jnp.arange(K) < (K if length is None else length)
  same = (real & (draft == sample[:K])).astype(jnp.int32)
  return Verdict(jnp.cumprod(same).sum().astype(jnp.int32), None)


def _usable(q, length):
  """q [K, V] with 0 for the rows that are not real or no law."""
  # a NaN compares false
  real = (jnp.arange(len(q)) < length) & ((q >= 0) & (q < jnp.inf)).all(1)
  return jnp.where(real[:, None], q, 0)


def _residual(p, q):
  """norm(max(0, p - q)) [V], or p where that vanishes."""
  rest = jnp.maximum(p - q, 0)
  total = rest.sum()
  # a NaN total compares false and p, then NaN too, shows the broken target
  return jnp.where(total > 0, rest / total, p)
