"""Attention of many queries on a CPU, some rows at a time.

All scores at once are tens of megabytes that are written, read and given back
in every layer. Those of a few rows stay in the processor's cache.
"""

import jax

_MANY = 1 << 24  # bytes of scores from which on rows take turns
_TURN = 1 << 22  # bytes of scores of a turn, or one row's


def in_turns(attend, q, layer, mask):
  """`attend(q, layer, mask)`, some rows at a time where scores are many.

  Rows do not see one another, so it is the same function; its gradient makes
  the scores of a turn again. Other backends hold no scores in memory.

  Args:
    attend: see `transformer.attend`, with q [B, T, H, head_dim], a `cache.KV`
      of [B * G, ...] and mask [B, T, S].
  """
  B, T, H, _ = q.shape
  row = T * H * mask.shape[-1] * 4  # bytes
  n = _rows(B, row)
  # on a mesh, whose caches are [B, G, ...], rows are on several devices already
  few = B * row < _MANY or n == B or layer.k.ndim == 4
  if few or jax.default_backend() != "cpu":
    return attend(q, layer, mask)
  turns = lambda x: x.reshape(B // n, -1, *x.shape[1:])
  one = jax.checkpoint(lambda some: attend(*some))
  found = jax.lax.map(one, jax.tree.map(turns, (q, layer, mask)))
  return found.reshape(q.shape)


def _rows(B, row):
  """The most rows of a turn that divide B."""
  fit = max(min(_TURN // row, B), 1)
  return max(n for n in range(1, fit + 1) if B % n == 0)
