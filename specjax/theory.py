"""Speed-up theory: acceptance, tokens a round, rounds a text, the best length.

alpha is the probability that a drafted token is accepted, k the number of
drafted tokens a round, C = `cost_ratio` = time of a target step / time of a
draft step, N the tokens that a round emits: the accepted ones and one of the
target's own. A `survival` is [..., K + 1]: A_j = P(the first j drafted tokens
are accepted), A_0 = 1. Times are in units of one target step.

All arguments broadcast. Python and NumPy values are computed by NumPy in
float64; a JAX array among them makes the result one, in its precision, and
every function but `choose_draft` can be traced. ValueError says what is out of
range, unless it is traced: then there is no value to look at.
"""

from typing import NamedTuple

import jax
import numpy as np

from specjax import numerics
from specjax.numerics import check, floats, whole


class Optimum(NamedTuple):
  """The number of drafted tokens that makes the speed-up largest."""

  k: jax.Array  # [...] int, 0: do not speculate
  k_continuous: jax.Array | None  # [...] where dS/dk = 0; None: k is measured
  speedup: jax.Array  # [...] S(k), 1 where k = 0


class Candidate(NamedTuple):
  """A draft that could be used; a plain tuple will do."""

  name: str
  alpha: float
  cost_ratio: float


class Ranked(NamedTuple):
  """A candidate at its own best length."""

  name: str
  k: int
  speedup: float
  alpha: float
  cost_ratio: float


def acceptance(p, q):
  """alpha = sum min(p, q) = 1 - TV(p, q), of laws [..., V] -> [...].

  The probability that a token drawn from q is accepted for p. (Leviathan et
  al. 2023, Theorem 3.5.) ValueError if p or q is no law.
  """
  xp, p, q = numerics.laws(p, q)
  return xp.minimum(p, q).sum(-1)


def total_variation(p, q):
  """TV(p, q) = sum |p - q| / 2, of laws [..., V] -> [...]; see `acceptance`."""
  xp, p, q = numerics.laws(p, q)
  return xp.abs(p - q).sum(-1) / 2


def expected_tokens(alpha, k):
  """E[N] = (1 - alpha^(k+1)) / (1 - alpha), and k + 1 at alpha = 1.

  For k drafted tokens that are accepted with probability alpha each,
  independently, up to the first rejection. (Leviathan et al. 2023, Eq. 1.)
  Accurate at every alpha, derivatives too: see `numerics.accepted`.
  """
  mean, _ = numerics.accepted(alpha, k)
  return 1 + mean


def variance_tokens(alpha, k):
  """Var[N] for the N of `expected_tokens`, 0 at alpha = 0 and alpha = 1.

  (alpha - (2k+1) alpha^(k+1) (1 - alpha) - alpha^(2k+2)) / (1 - alpha)^2, from
  P(N = j) = alpha^(j-1) (1 - alpha) for j <= k and P(N = k+1) = alpha^k.
  """
  _, variance = numerics.accepted(alpha, k)
  return variance


def expected_tokens_from_survival(survival):
  """E[N] = sum_j A_j, of a survival [..., K + 1] -> [...]."""
  _, survival = numerics.survival(survival)
  return survival.sum(-1)


def expected_rounds(num_tokens, survival):
  """R(n), the expected number of rounds until n tokens are emitted.

  R(n) = 1 + sum_j P(N = j) R(n - j), R(n <= 0) = 0, if rounds are alike and
  independent. The last one may emit more than is wanted, so n / R(n) < E[N]:
  R(n) is about n / E[N] + (E[N^2] - E[N]) / (2 E[N]^2).

  Args:
    num_tokens: [...] int >= 0, n. (A prefill that emits a token is no round.)
    survival: [..., K + 1].

  Returns:
    [...], in O(n K).
  """
  xp, survival = numerics.survival(survival, like=(num_tokens,))
  n, most = whole(xp, num_tokens, "num_tokens"), numerics.largest(num_tokens)
  law = _law(xp, survival)
  return _rounds(xp, lambda s: law, law, n, most)


def expected_rounds_along(survival, *, num_tokens=None):
  """The expected number of rounds that emit one given text of n tokens.

  Row s is the survival of a round that starts behind s tokens of this text,
  given the text: with rho_i = q / p of its token s + i, A_{s,j} is
  prod_{i<=j} min(1, rho_i) for `verify.token` and min_{0<=i<=j} rho_1 ... rho_i
  for `verify.block`. Round starts are a renewal chain along the text,

    r_0 = 1;   r_{s+j+1} += r_s (A_{s,j} - A_{s,j+1}), j <= K, A_{s,K+1} = 0;
    rounds = sum_{s < n} r_s.

  Over texts drawn from the target, sum n / sum rounds is the decode loop's
  tokens a round. The mean over s of sum_j A_{s,j} is not: a long accepted run
  uses up easy text in one round. A round that gets to the text's end is the
  last, whatever it does beyond: A_{s,j} of j > 0, s + j >= n changes nothing.

  Args:
    survival: [..., n, K + 1] by round start; leading axes are other texts.
    num_tokens: [...] int, the lengths of texts that are padded to n.

  Returns:
    [...], in O(n K).
  """
  xp, survival = numerics.survival(survival, like=(num_tokens,))
  if survival.ndim < 2:
    raise ValueError(f"survival must be [..., n, K + 1], got {survival.shape}")
  n = survival.shape[-2]
  length = whole(xp, n if num_tokens is None else num_tokens, "num_tokens")
  check(lambda m: m <= n, f"num_tokens must be at most n = {n}", length)
  law = _law(xp, survival)
  one = law[..., :1, :].sum(-2)  # there is no law[0] if n = 0
  return _rounds(xp, lambda s: law[..., s, :], one, length, n)


def _law(xp, survival):
  """P(N = 1..K+1) = A_j - A_{j+1}, A_{K+1} = 0."""
  end = xp.zeros_like(survival[..., :1])
  return survival - xp.concatenate([survival[..., 1:], end], -1)


def _rounds(xp, law, like, n, steps):
  """sum_{s < n} r_s; law(s), of like's shape, is P(N) of a round from s."""

  def step(s, carry):
    ahead, rounds = carry  # ahead[..., i] = r_{s+i}, what is known of it
    here = ahead[..., :1]
    rounds = rounds + xp.where(s < n, here[..., 0], 0)
    ahead = xp.concatenate([ahead[..., 1:], xp.zeros_like(here)], -1)
    return ahead + here * law(s), rounds

  shape = np.broadcast_shapes(like.shape[:-1], n.shape)
  ahead = xp.zeros((*shape, like.shape[-1]), like.dtype)
  ahead = xp.where(xp.arange(ahead.shape[-1]) == 0, 1, ahead)  # r_0 = 1
  return numerics.repeat(xp, steps, step, (ahead, ahead[..., 0] * 0))[1]


def speedup(alpha, k, cost_ratio):
  """S = E[N] / (1 + k / C): how much faster than plain decoding.

  If a target call on k + 1 tokens takes the time of a call on one. C = inf is a
  free draft. S(k) <= `speedup(1, k, cost_ratio)` = (k + 1) / (1 + k / C).
  (Leviathan et al. 2023, Theorem 3.8, whose c is 1 / C.)
  """
  numerics.check_cost_ratio(cost_ratio)
  xp, alpha, C = floats(alpha, cost_ratio, like=(k,))
  return expected_tokens(alpha, k) / (1 + xp.asarray(k) / C)


def speedup_from_costs(survival, draft_cost, verify_cost, overhead=0.0):
  """S(k) = sum_{j<=k} A_j / (v_k + sum_{i<=k} c_i + o), for every k = 0..K.

  Of any survival and any costs, in units of one target step; `speedup` is
  A_j = alpha^j, c_i = 1 / C, v_k = 1, o = 0.

  Args:
    survival: [..., K + 1].
    draft_cost: c_i of the i-th drafted token; a scalar or [..., K].
    verify_cost: v_k = t(k + 1) / t(1), t(n) the time of a target call on n
      tokens; a scalar (1: it does not grow) or [..., K + 1].
    overhead: o of a round; a scalar, [..., 1] or, if it depends on k,
      [..., K + 1].

  Returns:
    [..., K + 1]. S(0) is the speculative loop with no draft, overhead and all;
    plain decoding is 1.
  """
  xp, A, draft, call = numerics.costs(
    survival, draft_cost, verify_cost, overhead
  )
  none = xp.zeros((*draft.shape[:-1], 1), draft.dtype)
  cost = call + xp.concatenate([none, draft], -1).cumsum(-1)
  check(lambda x: x > 0, "the cost of a round must be positive", cost)
  return A.cumsum(-1) / cost


def optimal_length(alpha, cost_ratio):
  """The k that makes `speedup(alpha, k, cost_ratio)` largest.

  With L = -ln alpha and y = alpha^-(k+1), dS/dk = 0 is

    y - ln y = 1 + L (C - 1),   y = -W_{-1}(-alpha^(C-1) / e),

  W_{-1} the lower real branch of Lambert's W, so k_continuous = ln(y) / L - 1.
  S is unimodal: k is the better of its floor and its ceiling, and then
  alpha^(k+1) C <= S <= alpha^k C; k = 0 exactly if alpha <= 1 / C.

  Returns:
    `Optimum`. k_continuous may be negative, and is -1 if alpha = 0 or C <= 1.
    If alpha = 1 < C there is no best length: k_continuous is inf, and k about
    1 / eps, where counts stop being exact.
  """
  numerics.check_alpha(alpha)
  numerics.check_cost_ratio(cost_ratio)
  check(np.isfinite, "a free draft, C = inf, has no best length", cost_ratio)
  xp, alpha, C = floats(alpha, cost_ratio)
  info = np.finfo(alpha.dtype)
  L = -xp.log(xp.maximum(alpha, info.tiny))
  ln_y = numerics.log_lambert(xp, xp.maximum(L * (C - 1), info.tiny))
  x = ln_y / xp.where(alpha < 1, L, 1) - 1
  x = xp.where(alpha < 1, x, xp.inf)
  x = xp.where((alpha > 0) & (C > 1), x, -1)
  k = xp.floor(xp.clip(x, 0, 1 / info.eps)).astype(int)
  floor, ceiling = speedup(alpha, xp.stack([k, k + 1]), C)
  k = k + (ceiling > floor)
  S = xp.maximum(floor, ceiling)
  return Optimum(k[()], x[()], S[()])  # [()]: no 0-d arrays


def optimal_length_from_costs(survival, draft_cost, verify_cost, overhead=0.0):
  """The k in 0..K that makes `speedup_from_costs` largest.

  S(k) > S(k-1) exactly if A_k / (c_k + v_k - v_{k-1}) > S(k-1): while the next
  token brings more for its cost than the round so far. Where costs are convex
  the first k at which that ends is the best; measured costs have bumps, so
  every k is compared. k = 0 is plain decoding, S = 1; a tie is the smaller k's.

  Returns:
    `Optimum` of [...], with k_continuous None.
  """
  S = speedup_from_costs(survival, draft_cost, verify_cost, overhead)
  xp, S = floats(S)
  S = xp.concatenate([xp.ones_like(S[..., :1]), S[..., 1:]], -1)
  return Optimum(S.argmax(-1), None, S.max(-1))


def break_even_alpha(cost_ratio):
  """1 / C: some k makes S > 1 exactly if alpha is larger, and then k = 1 does.

  Above 1 (C < 1) no draft pays. (Leviathan et al. 2023, Corollary 3.9, and its
  converse: the mean of A_1..A_k, which must exceed 1 / C, falls with k.)
  """
  numerics.check_cost_ratio(cost_ratio)
  _, C = floats(cost_ratio)
  return 1 / C


def speedup_bound(alpha, cost_ratio):
  """min(1 / (1 - alpha), max(1, C)), which S exceeds at no k.

  The first is E[N] of endless free drafts, the second the draft's own speed.
  """
  numerics.check_alpha(alpha)
  numerics.check_cost_ratio(cost_ratio)
  xp, alpha, C = floats(alpha, cost_ratio)
  with np.errstate(divide="ignore"):
    return xp.minimum(1 / (1 - alpha), xp.maximum(1, C))


def choose_draft(candidates):
  """Rank drafts by the speed-up of each at its own best length, not by alpha.

  A draft with a larger alpha is the better one only while E[N] gains more by it
  than the cost of a round does.

  Args:
    candidates: of (name, alpha, cost_ratio), see `Candidate`.

  Returns:
    list of `Ranked`, the fastest first, equals in the order given.
  """
  ranked = []
  for name, alpha, cost_ratio in candidates:
    best = optimal_length(alpha, cost_ratio)
    k, S = int(best.k), float(best.speedup)
    ranked.append(Ranked(name, k, S, float(alpha), float(cost_ratio)))
  return sorted(ranked, key=lambda draft: -draft.speedup)
