"""How far the rounds that start along a text x ~ p come, from ln q / p of it.

A draft's q may depend on the text alone, and then has one value a position; or
also on where its round began, and then has one for each depth of a round.
"""

import jax.numpy as jnp
import numpy as np


def log_survival(log_ratio, weights, num_draft, verifier):
  """ln P(the first j drafted tokens are kept | text) [K + 1, ..., T], by start.

  Args:
    log_ratio, weights, num_draft, verifier: of `losses.expected_length`.

  Raises:
    ValueError: an unknown verifier, or more drafted tokens than depths.
  """
  if verifier not in ("token", "block"):
    raise ValueError(f"verifier must be token or block, not {verifier!r}")
  if log_ratio.ndim > weights.ndim and log_ratio.shape[-1] < num_draft:
    raise ValueError(
      f"num_draft={num_draft} needs as many depths, there are"
      f" {log_ratio.shape[-1]}"
    )

  def tested(i):  # ln rho of the token that is drafted i-th, from 0
    rho = at_depth(log_ratio, i, weights)
    real = (weights > 0) & (rho != jnp.inf)
    return ahead(jnp.where(real, rho, -jnp.inf), i, -jnp.inf)

  log_A = log_product = jnp.zeros_like(at_depth(log_ratio, 0, weights))
  found = [log_A]
  for i in range(num_draft):
    log_rho = tested(i)
    if verifier == "token":
      # min(0, .), whose derivative at 0 is 0; a NaN passes
      log_A = log_A + jnp.where(log_rho >= 0, 0.0, log_rho)
    else:
      log_product = log_product + log_rho
      log_A = jnp.minimum(log_A, log_product)
    found.append(log_A)
  return jnp.stack(found)


def at_depth(x, i, weights):
  """x [..., T] at the i-th depth, from 0, of x [..., T, J] or alike at all.

  Args:
    weights: [..., T], whose axes tell which it is.
  """
  return x if x.ndim == weights.ndim else x[..., i]


def ahead(x, i, end):
  """x of the i-th position from each start, `end` behind the last."""
  more = jnp.full((*x.shape[:-1], i), end, x.dtype)
  return jnp.concatenate([x[..., i:], more[..., : x.shape[-1]]], -1)


def reached(weights, depths):
  """weights [..., T] as [..., T, J], J = depths: 0 where no round can be.

  Depth j of a position is that of a round that began j - 1 positions before:
  there is one only where these are of weight > 0 too.
  """
  found = [weights]
  for _ in range(depths - 1):
    last = [(0, 0)] * (weights.ndim - 1) + [(1, 0)]
    before = jnp.pad(found[-1], last)[..., :-1]
    found.append(jnp.where(before > 0, weights, 0))
  return jnp.stack(found, -1)


def by_start(x, K, end):
  """[n, K] by [start, depth] of a text's x [n, J] by position, NumPy's.

  The j-th token of a round is judged where it stands, by depth j; J = 1 is
  alike at all. `end` is behind the last position.
  """
  x = np.broadcast_to(x, (len(x), K)) if x.shape[1] == 1 else x
  x = np.pad(x, ((0, K), (0, 0)), constant_values=end)
  depth = np.arange(K)
  return x[np.arange(len(x) - K)[:, None] + depth, depth]
