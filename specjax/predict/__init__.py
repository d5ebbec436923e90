r"""Predict the speed-up of a draft from plain text, without speculating.

A text x that plain decoding drew is fed to both models once. Given the text, a
round that starts behind s of its tokens keeps j drafted ones with probability

  token    A_{s,j} = prod_{i<=j} min(1, rho_i),   rho_i = q / p of token s + i
  block    A_{s,j} = min_{i<=j} rho_1 ... rho_i,  rho_1 ... rho_0 = 1

so that round starts are a renewal chain along x and the expected number of
rounds is exact for every K and both rules (`theory.expected_rounds_along`). No
verifier's mean survival exceeds that of min(1, rho_1 ... rho_j), "ideal"; its
rounds would not leave the target's law behind, so it has no chain. Coupled
decoding keeps other tokens and is not predicted.
"""

from typing import NamedTuple

import numpy as np
from scipy import special

from specjax import theory, timing

RULES = ("token", "block", "ideal")


class Texts(NamedTuple):
  """What both models think of P texts of at most N tokens."""

  length: np.ndarray  # [P] tokens of each
  log_p: np.ndarray  # [P, N]
  log_q: np.ndarray  # [P, N, K]: of token s + i, in a round that starts at s
  alpha: np.ndarray  # [P, N] sum min(p, q) of the first token drafted at s


class Tokens(NamedTuple):
  """Tokens a round for every k = 0..K, in one order."""

  mean: np.ndarray  # [K + 1] total tokens / total expected rounds
  low: np.ndarray  # [K + 1] the interval over texts
  high: np.ndarray


class Prediction(NamedTuple):
  """Of one draft, rule and set of texts; [K + 1] for k = 0..K."""

  tokens: Tokens
  length: np.ndarray  # [P] tokens of each text
  rounds: np.ndarray  # [P, K + 1] expected of each text
  alpha: float  # mean over positions
  iid: np.ndarray  # E[N] of that alpha at every place, endless text
  iid_finite: np.ndarray  # the same, n / R(n) over these texts' lengths
  survival: np.ndarray  # mean of A_{s,j} over starts with j tokens behind them
  by_position: np.ndarray  # its sum to k: a baseline, not what speculation does


def survival(log_p, log_q, rule):
  """A_{s,j} [..., N, K + 1] by round start s and depth j.

  In log space: products of many ratios do not underflow.

  Args:
    log_p: [..., N] of each token; finite, since the text was drawn from p.
    log_q: [..., N, K] of token s + i in a round that starts at s; -inf where it
      could not be drafted and behind the end.
    rule: one of RULES.
  """
  N, K = log_q.shape[-2:]
  padded = np.pad(log_p, [(0, 0)] * (log_p.ndim - 1) + [(0, K)])
  ahead = padded[..., np.arange(N)[:, None] + np.arange(K)]  # [..., N, K]
  ratio = log_q.astype(np.float64) - ahead
  if rule == "token":
    log_A = np.minimum(ratio, 0).cumsum(-1)
  elif rule == "block":
    log_A = np.minimum.accumulate(np.minimum(ratio.cumsum(-1), 0), -1)
  elif rule == "ideal":
    log_A = np.minimum(ratio.cumsum(-1), 0)
  else:
    raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
  return np.concatenate([np.ones((*log_p.shape, 1)), np.exp(log_A)], -1)


def expected_rounds(A, length):
  """Rounds [P, K + 1] of P texts for every k = 0..K.

  Args:
    A: [P, N, K + 1] survival by "token" or "block"; length: [P].
  """
  along = theory.expected_rounds_along
  every = [
    along(A[..., : k + 1], num_tokens=length) for k in range(A.shape[-1])
  ]
  return np.stack(every, -1)


def tokens_a_round(length, rounds, *, level=0.95, resamples=1000, seed=0):
  """Total tokens / total rounds with a bootstrap interval over texts.

  Texts are resampled whole: what happens inside one is dependent. The
  percentiles are those of Student's t at P - 1 degrees of freedom: at the
  normal's own, few texts would give intervals that are too short, by
  sqrt((P - 1) / P) and more. (Expanded percentile interval: Hesterberg 2015,
  arXiv:1411.5279.)

  Args:
    length: [P] tokens; rounds: [P, K + 1].

  Returns:
    `Tokens`; low and high are the mean's where there is one text.
  """
  P = len(length)
  rng = np.random.default_rng(seed)
  weight = rng.multinomial(P, np.full(P, 1 / P), resamples)  # [R, P]
  found = (weight @ length)[:, None] / (weight @ rounds)
  tail = 0.5
  if P > 1:
    t = special.stdtrit(P - 1, (1 + level) / 2)
    tail = special.ndtr(-t * np.sqrt(P / (P - 1)))
  low, high = np.quantile(found, [tail, 1 - tail], 0)
  return Tokens(length.sum() / rounds.sum(0), low, high)


def predict(texts, rule):
  """Return the `Prediction` of some `Texts`; see the module."""
  A = survival(texts.log_p, texts.log_q, rule)
  N, K = texts.log_q.shape[-2:]
  real = np.arange(N) < texts.length[:, None]  # [P, N]
  alpha = float(np.clip(texts.alpha[real].mean(), 0, 1))
  k, n = np.arange(K + 1), texts.length
  iid = np.where(k <= k[:, None], alpha**k, 0)  # A_j of k drafted tokens
  iid_rounds = theory.expected_rounds(n[:, None], iid)  # [P, K + 1]
  rounds = expected_rounds(A, n)
  whole = np.arange(N)[:, None] + k <= n[:, None, None]  # [P, N, K + 1]
  whole &= real[..., None]
  mean = np.where(whole, A, 0).sum((0, 1)) / np.maximum(whole.sum((0, 1)), 1)
  return Prediction(
    tokens=tokens_a_round(n, rounds),
    length=n,
    rounds=rounds,
    alpha=alpha,
    iid=theory.expected_tokens(alpha, k),
    iid_finite=n.sum() / iid_rounds.sum(0),
    survival=mean,
    by_position=mean.cumsum(),
  )


class Speedups(NamedTuple):
  """S for every k = 0..K; 1 is plain decoding."""

  mean: np.ndarray  # [K + 1]
  low: np.ndarray  # of the interval over texts: costs are taken as they are
  high: np.ndarray
  iid: np.ndarray  # E[N] / (1 + k / C), the textbook's
  best: int  # k of the largest mean; 0 where plain decoding is faster


def speedups(prediction, costs):
  """Return the `Speedups` of a prediction at measured costs, batch 1.

  S(k) = tokens a round / (v_k + k c + o_k), in units of a plain step.
  """
  K = len(prediction.iid) - 1
  c, v, o = timing.units(costs, K)
  cost = v + c * np.arange(K + 1) + o
  S = Tokens(*(x / cost for x in prediction.tokens))
  k, C = np.arange(K + 1), costs.cost_ratio
  return Speedups(
    *S,
    iid=theory.speedup(prediction.alpha, k, C),
    best=int(np.argmax(np.append(1, S.mean[1:]))),
  )


def parts(prediction, costs, k):
  """Factors that lead from the textbook's S to the predicted one at k.

  Returns:
    {name: factor}; E[N] / (1 + k / C) times their product is S(k).
  """
  c, v, o = timing.units(costs, k)
  textbook = theory.speedup(prediction.alpha, k, costs.cost_ratio)
  finite = prediction.iid_finite[k] / prediction.iid[k]
  varies = prediction.tokens.mean[k] / prediction.iid_finite[k]
  cost = 1 + k / costs.cost_ratio
  grown = v[k] / v[0] + k / costs.cost_ratio  # in units of a bare call
  whole = (v[k] + k * c + o[k]) / v[0]
  return {
    "textbook": float(textbook),
    "finite length": float(finite),
    "alpha varies": float(varies),
    "verification grows": float(cost / grown),
    "overhead": float(grown / whole / v[0]),
  }
