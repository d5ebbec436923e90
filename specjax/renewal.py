"""The rounds that a text takes, as something to minimise.

`losses.expected_length` counts every start of a round alike. Rounds do not
start everywhere alike: one begins where the last was rejected, so that a draft
that leaves hard places to the target meets them again at every start. Here
starts are what they are, a renewal chain along the text; its sum is what
`theory.expected_rounds_along` reads from a draft and what a run is paid by.

For endless drafts, K -> inf, token verification tests every token once and
rounds are its rejections: rounds a token = 1 - alpha, and this is
`losses.total_variation`.
"""

import jax.numpy as jnp
from jax import lax

from specjax import losses, reach


def expected_rounds(log_ratio, alpha, weights, *, num_draft, verifier="block"):
  """r_s, the chance that a round starts at each position of a text x ~ p.

  With A_{s,j} as in `losses.expected_length` and A_{s,K+1} = 0,

    r_s = sum_{j<=K} r_{s-j-1} (A_{s-j-1,j} - A_{s-j-1,j+1}),

  and 1 where the text begins, behind a position of weight 0 too. Its sum is the
  expected number of rounds, its mean 1 / E[N]. Texts do not depend on the
  draft: the derivative goes straight through, by the starts' chances too.

  Args:
    log_ratio, weights: of `losses.expected_length`.
    alpha: not needed.
    num_draft: K.
    verifier: "token" or "block".

  Returns:
    [..., T], by start, times weights.
  """
  del alpha
  A = jnp.exp(reach.log_survival(log_ratio, weights, num_draft, verifier))
  law = A - jnp.concatenate([A[1:], jnp.zeros_like(A[:1])])  # P(N = 1..K+1)
  there = weights > 0
  before = jnp.pad(there, [(0, 0)] * (there.ndim - 1) + [(1, 0)])[..., :-1]

  def step(ahead, at):
    law, first = at  # [K + 1, ...], [...]
    r = jnp.where(first, 1, ahead[0])
    ahead = jnp.concatenate([ahead[1:], jnp.zeros_like(ahead[:1])])
    return ahead + r * law, r

  along = [jnp.moveaxis(x, -1, 0) for x in (law, there & ~before)]
  _, r = lax.scan(step, jnp.zeros_like(law[..., 0]), along)
  return losses.weighted(jnp.moveaxis(r, 0, -1), weights)
