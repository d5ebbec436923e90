"""Rows in turns attend as at once, and in a part of the slots as in all."""

import itertools
import types

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


# --- the slots that are in use ----------------------------------------------


@pytest.mark.parametrize(
  "slots, want",
  [
    (64, [64]),
    (256, [256]),
    (320, [256, 320]),
    (512, [256, 512]),
    (2048, [256, 512, 1024, 2048]),
  ],
)
def test_spans(slots, want):
  assert kv.spans(slots) == want
  shape = dict(batch=2, layers=1, kv_heads=G, head_dim=D, dtype=jnp.float32)
  (layer,) = kv.init(slots=slots, **shape)
  ends = itertools.accumulate(x.v.shape[1] for x in kv.parts(layer))
  assert [*ends] == want and kv.num_slots((layer,)) == slots
  assert isinstance(layer, kv.KV if len(want) == 1 else kv.Pieces)


SLOTS = 640


def _used(positions, slots=SLOTS, seed=1):
  """q, a cache with junk in every slot, whole and cut, and the `View`."""
  keys = jax.random.split(jax.random.key(seed), 3)
  positions = jnp.asarray(positions)
  rows, queries = positions.shape
  normal = lambda key, *shape: jax.random.normal(key, shape)
  layer = kv.KV(
    normal(keys[0], rows * G, D, slots), normal(keys[1], rows * G, slots, D)
  )
  q = normal(keys[2], rows, queries, H, D)
  pieces = _pieces(layer)
  return q, layer, pieces, _views(positions, (pieces,), ())[0]


def _pieces(layer):
  """A `KV` as `cache.init` has its slots."""
  ends = kv.spans(layer.v.shape[1])
  cuts = [slice(*x) for x in itertools.pairwise([0, *ends])]
  parts = tuple(kv.KV(layer.k[..., x], layer.v[:, x]) for x in cuts)
  return parts[0] if len(parts) == 1 else kv.Pieces(parts)


def _views(positions, caches, windows):
  config = types.SimpleNamespace(
    inv_freq=np.ones(D // 2), windows=windows, layers=1, local_inv_freq=()
  )
  slots = kv.num_slots(caches)
  mask = kv.visible(positions, slots)
  return attention.views(config, positions, mask, jnp.arange(slots), caches)


@pytest.mark.parametrize(
  "last, span",
  [(0, 0), (255, 0), (256, 1), (511, 1), (512, 2), (639, 2), (640, 0)],
)
@pytest.mark.parametrize("queries", [1, 5])
def test_a_span_holds_what_is_seen(last, span, queries):
  """All that the furthest query sees; one at S or behind is padding."""
  positions = np.arange(queries) + last + 1 - queries
  positions = np.maximum([positions, positions - 9], 0)
  if last == SLOTS:
    positions = np.full_like(positions, SLOTS)
    positions[0, 0] = 3
  q, layer, pieces, view = _used(positions)
  assert int(view.span) == span
  within = jax.jit(lambda *a: attention.within(attention.attend, *a))
  got = within(q, pieces, view)
  want = attention.attend(q, layer, view.mask)
  real = positions < SLOTS
  np.testing.assert_allclose(got[real], want[real], rtol=1e-5, atol=1e-6)
  # nothing behind the span is looked at, and all within it may be
  n = kv.spans(SLOTS)[span]
  nan = kv.KV(layer.k.at[..., n:].set(jnp.nan), layer.v.at[:, n:].set(jnp.nan))
  again = within(q, _pieces(nan), view)
  np.testing.assert_array_equal(again[real], np.asarray(got)[real])


@pytest.mark.parametrize("last, span", [(40, 0), (255, 0), (300, 1)])
def test_a_window_keeps_its_span(last, span):
  """Padding, whose window lies behind all spans, is finite none the less."""
  positions = jnp.array([[last, SLOTS], [last - 20, SLOTS + 9]])
  q, layer, pieces, _ = _used(positions)
  (view,) = _views(positions, (pieces,), (7,))
  assert int(view.span) == span
  assert view.mask.sum(-1)[:, 0].tolist() == [7, 7]
  got = attention.within(attention.attend, q, pieces, view)
  want = attention.attend(q, layer, view.mask)
  np.testing.assert_allclose(got[:, 0], want[:, 0], rtol=1e-5, atol=1e-6)
  assert np.isfinite(got).all()


@pytest.mark.parametrize("rows, queries", [(1, 1), (2, 5), (3, 70)])
def test_writes_find_their_piece(rows, queries):
  """Across borders too; what is behind the slots is written nowhere."""
  rng = np.random.default_rng(2)
  shape = dict(batch=rows, layers=1, kv_heads=G, head_dim=D, dtype=jnp.float32)
  (pieces,) = kv.init(slots=SLOTS, **shape)
  whole = kv.joined(pieces)
  for first in (0, 254, 480, 511, 600, 639, 640, 900):
    at = jnp.asarray(first - 7 * np.arange(rows)[:, None] + np.arange(queries))
    at = jnp.where(at < 0, SLOTS, at)
    k, v = (jnp.asarray(rng.normal(size=(rows, queries, G, D))) for _ in "kv")
    pieces, whole = (kv.write(x, k, v, at) for x in (pieces, whole))
    for a, b in zip(kv.joined(pieces), whole, strict=True):
      np.testing.assert_array_equal(a, b)
  assert np.asarray(whole.v).any(-1).sum() > 8


def test_where_all_slots_are_attended(monkeypatch):
  """In a short cache, on a mesh, without a cache, and beside a CPU."""
  positions = jnp.array([[3]])
  pieces = _used(positions)[2]
  assert isinstance(pieces, kv.Pieces)
  assert _used(positions, slots=256)[3].span is None
  mesh = kv.apart(pieces, 1)
  assert _views(positions, (mesh,), ())[0].span is None
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  shape = dict(batch=1, layers=1, kv_heads=G, head_dim=D, dtype=jnp.float32)
  (layer,) = kv.init(slots=SLOTS, **shape)
  assert isinstance(layer, kv.KV)
  assert _views(positions, (layer,), ())[0].span is None
