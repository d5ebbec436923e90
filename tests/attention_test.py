"""Rows that take turns attend as they do at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.models import attention

B, T, H, G, D, S = 6, 5, 4, 2, 8, 12


def _case(seed=0):
  keys = jax.random.split(jax.random.key(seed), 3)
  normal = lambda key, *shape: jax.random.normal(key, shape)
  layer = kv.KV(normal(keys[0], B * G, D, S), normal(keys[1], B * G, S, D))
  q = normal(keys[2], B, T, H, D)
  # each row at a place of its own
  positions = jnp.arange(T) + jnp.arange(B)[:, None]
  return q, layer, kv.visible(positions, S)


def _turns(monkeypatch, rows):
  """Let so many rows take a turn; return what was asked for of each."""
  asked = []
  monkeypatch.setattr(attention, "_MANY", 0)
  monkeypatch.setattr(attention, "_TURN", rows * T * H * S * 4)

  def attend(q, layer, mask):
    asked.append(len(q))
    return attention.attend(q, layer, mask)

  return attend, asked


@pytest.mark.parametrize("rows, n", [(0.5, 1), (1, 1), (2, 2), (5, 3), (6, 6)])
def test_turns_change_nothing(monkeypatch, rows, n):
  """Each row sees its own slots in its turn; the gradient is the same too."""
  attend, asked = _turns(monkeypatch, rows)
  q, layer, mask = _case()
  weight = jax.random.normal(jax.random.key(3), q.shape)
  loss = lambda attend: lambda q, layer: (weight * attend(q, layer, mask)).sum()
  mine = lambda q, layer, mask: attention.in_turns(attend, q, layer, mask)
  both = mine, attention.attend
  a, b = (jax.jit(f)(q, layer, mask) for f in both)
  np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
  assert set(asked) == {n}
  a, b = (jax.jit(jax.grad(loss(f), (0, 1)))(q, layer) for f in both)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_few_scores_are_made_at_once(monkeypatch):
  """As in decoding: a loop over rows would only cost."""
  attend, asked = _turns(monkeypatch, 1)
  monkeypatch.setattr(attention, "_MANY", B * T * H * S * 4 + 1)
  attention.in_turns(attend, *_case())
  assert asked == [B]


def test_on_a_mesh_rows_stay_where_they_are(monkeypatch):
  """In turns each device would be sent the others' rows."""
  attend, asked = _turns(monkeypatch, 1)
  q, layer, mask = _case()
  got = attention.in_turns(attend, q, kv.apart(layer, B), mask)
  assert asked == [B]
  want = attention.attend(q, layer, mask)
  np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
