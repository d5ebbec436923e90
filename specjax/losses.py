"""What a draft is trained to minimise: one function an equation.

p is the target's law under the deployment's temperature and truncation, q the
draft's under its temperature. An equation is written on p and log q; its public
function, of the same name, takes logits:

  loss(teacher [..., V], student [..., Vq], *, weights=None, sampling=PLAIN,
       draft_temperature=None, ids=None, **the equation's own) -> [...]

a loss a position, in float32 (float64 is kept), times `weights` [...] if given.
Positions of weight 0 may hold NaN: they give 0, and 0 to every gradient. p is a
constant: nothing flows to the teacher. The rest is said by `laws.laws`.

Nothing is averaged here; `objective.py` sums, over chunks of positions.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp, xlogy

from specjax import reach
from specjax.laws import PLAIN, checked, laws


def _of_logits(equation):
  """The public function of an equation on (p, log_q): see the module's text."""

  def loss(
    teacher,
    student,
    *,
    weights=None,
    sampling=PLAIN,
    draft_temperature=None,
    ids=None,
    **options,
  ):
    there = True if weights is None else (weights > 0)[..., None]
    # before anything else: 0 * NaN is NaN, in a gradient too
    p, log_q = laws(
      jnp.where(there, teacher, 0),
      jnp.where(there, student, 0),
      sampling=sampling,
      draft_temperature=draft_temperature,
      ids=ids,
    )
    values = equation(p, log_q, **options)
    return values if weights is None else weighted(values, weights)

  loss.__name__ = loss.__qualname__ = equation.__name__
  loss.__doc__, loss.equation = equation.__doc__, equation
  return loss


@_of_logits
def acceptance(p, log_q):
  """alpha = sum min(p, q), the probability that a drafted token is accepted.

  Not a loss: what all of them are about. (Leviathan et al. 2023, Theorem 3.5.)
  """
  return _least(p, jnp.exp(log_q)).sum(-1)


@_of_logits
def total_variation(p, log_q):
  """TV = 1 - sum min(p, q), one minus the acceptance probability.

  dTV/dz_j = q_j (Q - [q_j < p_j]), Q = sum of q where q < p, for z = log q up
  to a constant; 1-norm 2 Q (1 - Q) <= 1/2. It vanishes where a draft is
  confidently wrong: begin with `forward_kl`. This form, unlike sum |p - q| / 2,
  keeps the gradient's relative precision there.
  """
  return 1 - acceptance.equation(p, log_q)


@_of_logits
def forward_kl(p, log_q):
  """KL(p || q) = sum p ln(p / q); its gradient is q - p.

  On a trimmed vocabulary KL(p || q) is infinite. There it is m KL(p / m || q)
  with m = sum p: the cross-entropy -sum p ln q over the tokens that can be
  drafted, plus what makes it 0 at the best draft; gradient m q - p.
  """
  possible = ~(p <= 0)  # or NaN
  log_p = jnp.log(jnp.where(possible, p, 1))
  mass = p.sum(-1)
  cross = jnp.where(possible, p * (log_p - log_q), 0).sum(-1)
  return cross - xlogy(mass, mass)


@_of_logits
def reverse_kl(p, log_q, *, floor=1e-30):
  """KL(q || p) = sum q ln(q / p), where p < floor counts as floor.

  Without a floor it is infinite for a truncated or greedy target, whose p has
  zeros. Gradient q_j (ln(q_j / p_j) - KL(q || p)).
  """
  q = jnp.exp(log_q)
  log_q = jnp.where(q > 0, log_q, 0)  # 0 ln 0 = 0
  return (q * (log_q - jnp.log(jnp.maximum(p, floor)))).sum(-1)


@_of_logits
def js(p, log_q, *, beta=0.5):
  """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q.

  Gradient (1 - beta) q_j (ln(q_j / m_j) - sum q ln(q / m)). Divided by beta it
  tends to KL(p || q) for beta -> 0, divided by 1 - beta to KL(q || p) for
  beta -> 1. (Agarwal et al. 2024, "On-policy distillation", Eq. 1.)
  """
  if not 0 < beta < 1:
    raise ValueError(f"beta must be in (0, 1), got {beta}")
  q = jnp.exp(log_q)
  m = beta * p + (1 - beta) * q
  log_m = jnp.log(jnp.where(m > 0, m, 1))
  log_q = jnp.where(q > 0, log_q, log_m)
  outside = jnp.maximum(1 - p.sum(-1), 0)  # there m = beta p
  p_term = (xlogy(p, p) - p * log_m).sum(-1) - outside * np.log(beta)
  return beta * p_term + (1 - beta) * (q * (log_q - log_m)).sum(-1)


@_of_logits
def negative_log_acceptance(p, log_q):
  """-ln alpha, alpha = sum min(p, q), summed in log space.

  Gradient q_j (Q - [q_j < p_j]) / alpha; see `total_variation`. 0 where the
  draft has no token that the target may say: no draft is accepted there.
  (LK-alpha of "LK losses", 2026, arXiv:2602.23881.)
  """
  possible = ~(p <= 0) & (log_q != -jnp.inf)
  log_least = _least(jnp.log(jnp.where(possible, p, 1)), log_q)
  log_alpha = logsumexp(jnp.where(possible, log_least, -jnp.inf), -1)
  return jnp.where(possible.any(-1), -log_alpha, 0)


@_of_logits
def likelihood_hybrid(p, log_q, *, eta=3.0):
  """w KL(p || q) + (1 - w) TV, w = exp(-eta alpha), a position's own constant.

  KL while the draft is bad, TV as it gets good, without a schedule.
  (LK-lambda of "LK losses", 2026, arXiv:2602.23881, which takes the batch's
  mean of alpha; eta 3 for EAGLE-3 drafts, 10 for Medusa's.)
  """
  tv = total_variation.equation(p, log_q)
  w = jnp.exp(-eta * lax.stop_gradient(1 - tv))
  return w * forward_kl.equation(p, log_q) + (1 - w) * tv


@_of_logits
def tvd_plus_plus(p, log_q):
  """TV in value, in gradient TV's divided by sigma = sqrt(Q (1 - Q)).

  TVD++ is a policy gradient whose reward [q < p] is normalised by its mean Q
  and deviation sigma under q: dL/dz_j = q_j (Q - [q_j < p_j]) / sigma, 1-norm
  2 sigma. Expectations are exact here, not sampled: what is left is a scale for
  each position. 0 where sigma is. (Goel et al. 2024, arXiv:2403.00858.)
  """
  q = jnp.exp(log_q)
  below = q < p
  Q, R = (jnp.where(x, q, 0).sum(-1, keepdims=True) for x in (below, ~below))
  sigma = jnp.sqrt(Q) * jnp.sqrt(R)
  advantage = jnp.where(below, -R, Q) / jnp.where(sigma > 0, sigma, 1)
  surrogate = (q * lax.stop_gradient(advantage)).sum(-1)
  value = total_variation.equation(p, log_q) - surrogate
  return surrogate + lax.stop_gradient(value)


def _least(p, q):
  """min(p, q), whose derivative by q is [q < p]; a NaN of either passes."""
  return jnp.where(q < p, q, jnp.minimum(p, lax.stop_gradient(q)))


def log_ratio(p, log_q, labels, *, ids=None):
  """ln rho = ln(q(x) / p(x)) of a text's own tokens, labels [...] -> [...].

  p, log_q and ids are those of `laws`. -inf where the draft cannot say x; +inf
  where p(x) = 0: the text is not this target's.
  """
  here = labels[..., None] == checked(ids, np.inf, p.shape[-1])  # [..., Vq]
  p_x = jnp.where(here, p, 0).sum(-1)
  log_q_x = jnp.where(here, log_q, 0).sum(-1)
  ratio = log_q_x - jnp.log(jnp.where(p_x <= 0, 1, p_x))
  ratio = jnp.where(p_x <= 0, jnp.inf, ratio)
  return jnp.where(here.any(-1), ratio, -jnp.inf)


def expected_length(log_ratio, alpha, weights, *, num_draft, verifier="block"):
  """-E[N] of a round that starts at each position of a text x ~ p.

  With rho_i = q(x_i) / p(x_i) behind the start and K = num_draft,

    token:  E[N] = 1 + sum_{j<=K} (prod_{i<j} min(1, rho_i)) alpha_j
    block:  E[N] = 1 + sum_{j<=K} min_{0<=i<=j} rho_1 ... rho_i

  in the mean over texts, which do not depend on the draft: the derivative goes
  straight through. All starts count alike, as rounds' starts do not: tokens a
  call may fall while this rises; `renewal.expected_rounds` is what counts.

  Args:
    log_ratio: [..., T] ln rho of the token at each position, of `log_ratio`; or
      [..., T, J], J >= K, by what the position's token is to its round: drafted
      first, second, ...
    alpha: of `acceptance`, like log_ratio.
    weights: [..., T]. Where they are 0 the others may be anything; a round ends
      there, behind the last position, and at a token of p(x) = 0.
    num_draft: K.
    verifier: "token" or "block".

  Returns:
    [..., T], by start, times weights.
  """
  A = jnp.exp(reach.log_survival(log_ratio, weights, num_draft, verifier))
  if verifier == "block":
    return weighted(-A.sum(0), weights)

  def tested(i):  # alpha of the token that is drafted i-th, from 0
    found = jnp.where(weights > 0, reach.at_depth(alpha, i, weights), 0)
    return reach.ahead(found, i, 0)

  length = A[0] + sum(A[i] * tested(i) for i in range(num_draft))
  return weighted(-length, weights)


def weighted(values, weights):
  """weights * values, 0 where weights are, whatever the value is there."""
  values = jnp.where(weights > 0, values, 0)
  return jnp.asarray(weights, values.dtype) * values
