"""Draft with a head that reads the target's own hidden states.

Some of the target's layers have worked out most of what the next token hangs
on; the token itself was then drawn, and the target has not seen it yet. So

  g_i = fuse(outputs of the target's layers at token i)
  a_i = layers(join(embed(x_i), g_{i-1}));   logits of x_{i+1} = head(norm(a_i))

Behind the committed tokens g is not known, and the draft's own a takes its
place. (EAGLE: Li et al. 2024, arXiv:2401.15077; EAGLE-3: Li et al. 2025,
arXiv:2503.01840, three layers fused, and trained on its own states.)

After verification the emitted tokens are fed again with the target's features,
in one pass of as few places as hold them, so that the cache never holds a guess
about a token that is committed. Training sees what decoding sees: `unroll`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax import adaptive
from specjax import cache as kv
from specjax.drafters import chain, lm
from specjax.models import attention, matrix, transformer
from specjax.types import Drafter


@dataclasses.dataclass(frozen=True)
class Config:
  """The architecture; its width is the target's."""

  layers: transformer.Config  # the draft's own, with the head
  features: tuple[int, ...]  # layers of the target that it reads


class State(NamedTuple):
  """Valid for every committed token, since `commit` feeds them all."""

  cache: Any  # of the draft's layers
  last: jax.Array  # [B, D] a at the last committed token


def shapes(config):
  """Return the parameter tree as `jax.ShapeDtypeStruct`s, in float32."""
  c, F = config.layers, len(config.features)
  tree = dict(transformer.shapes(c))
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  square = lambda n: array(*matrix.shape(n * c.width, c.width, c.block))
  tree["fuse"] = {"kernel": square(F)}
  tree["join"] = {"kernel": square(2)}
  tree["token_norm"] = {"scale": array(c.width)}
  tree["feature_norm"] = {"scale": array(c.width)}
  return tree


def fuse(config, params, taps):
  """g [B, T, D] of taps [B, T, F, D]."""
  x = taps.reshape(*taps.shape[:2], -1)
  return matrix.product(x, params["fuse"]["kernel"])


def joined(config, params, tokens, before):
  """What enters the layers at tokens [B, T], g or a [B, T, D] one before."""
  c = config.layers
  norm = lambda name, x: _norm(c, params[name], x)
  token = params["embed"][lm.known(c, tokens)]
  both = norm("token_norm", token), norm("feature_norm", before)
  return matrix.product(jnp.concatenate(both, -1), params["join"]["kernel"])


def head(config, params, a):
  """Logits [..., Vq] of a [..., D]."""
  c = config.layers
  x = _norm(c, params["norm"], a)
  weights = params["embed"].T if c.tied else params["head"]
  wide = jnp.promote_types(x.dtype, jnp.float32)
  return attention.capped(matrix.product(x, weights, wide), c.logit_cap)


def _norm(layers, leaf, x):
  return transformer.norm(leaf["scale"], x, layers.norm_eps, layers.norm_offset)


def begin(config, size):
  """The arrays that no layer of a target has, as training begins with them.

  g is the last of the features: a head that reads three layers begins as the
  one that reads the last alone, whatever their sizes, and learns what the
  others add. Both parts are normalised; g then gets the size that a layer's
  input has in the target, and the token a tenth of it. A layer adds to its
  input what it was trained to add to one of that size: to a smaller one, so
  much that the first laws are sure of wrong tokens.

  Args:
    size: RMS of the outputs of the target's layer, see `student.size`.
  """
  c = config.layers
  one, none = jnp.eye(c.width), jnp.zeros((c.width, c.width))
  scale = jnp.full(c.width, 0.0 if c.norm_offset else 1.0)  # multiplies by 1
  return {
    "fuse": {
      "kernel": jnp.concatenate([none] * (len(config.features) - 1) + [one])
    },
    "join": {"kernel": jnp.concatenate([one / 10, one]) * size},
    "token_norm": {"scale": scale},
    "feature_norm": {"scale": scale},
  }


def unroll(config, params, tokens, taps, depths):
  """a [B, T, J, D] of every token at each depth of a round, J = `depths`.

  Depth j of place i is what `make`'s drafter has there when x_i is the token
  that was drafted (j - 1)-th, so that the round began behind place i - j + 1,
  and all its draws are the text's. Depth 1 reads the target's features, depth
  j what depth j - 1 said one place before. It sees the keys of depth 1 up to
  where the round began, and behind that its own round's: of depth d at place
  i - j + d. One pass a depth over all places. (The training-time test of
  EAGLE-3, Li et al. 2025, section 3; HASS, Zhang et al. 2025,
  arXiv:2408.15766.)

  Args:
    tokens: [B, T]; taps: [B, T, F, D] of the target's layers, constants.

  Returns:
    a; where i < j - 1 no round can have begun, and it is arbitrary.
  """
  (B, T), c = tokens.shape, config.layers
  places = jnp.arange(T)
  at = jnp.broadcast_to(places, (B, T))
  before, found, passes = fuse(config, params, taps), [], []
  for j in range(depths):
    behind = jnp.pad(before, ((0, 0), (1, 0), (0, 0)))[:, :T]
    x = joined(config, params, tokens, behind)
    ago = places[:, None] - places  # [T, T], of a query's and a key's place
    seen = [ago >= j, *(ago == j - d for d in range(1, j + 1))]
    mask = jnp.broadcast_to(jnp.concatenate(seen, 1), (B, T, (j + 1) * T))
    caches = [kv.Passes(tuple(p[i] for p in passes)) for i in range(c.layers)]
    before, keys = transformer.layers(c, params, x, at, mask, caches)
    passes.append(keys)
    found.append(before)
  return jnp.stack(found, 2)


@functools.cache
def make(config, vocab_size, *, ids=None):
  """Return the `Drafter` of a `Config`.

  Equal arguments return the very same Drafter, hence share compiled programs.

  Args:
    vocab_size, ids: as of `lm.make`.

  Raises:
    ValueError: an id that the target does not have, or one given twice.
  """
  ids = None if ids is None else chain.checked(ids, vocab_size)
  c = config.layers

  def feed(params, cache, tokens, before, positions):
    """a [B, T, D] at tokens, and the cache."""
    x = joined(config, params, tokens, before)
    mask = kv.visible(positions, kv.num_slots(cache))
    return transformer.layers(c, params, x, positions, mask, cache)

  def init(params, prompt, length, taps, slots):
    return _prefill(config, feed, params, prompt, length, taps, slots)

  def propose(params, state, context, noise):
    if not context.num_draft:
      return chain.nothing(len(context.tokens), vocab_size), state

    def more(i, token, carry):
      cache, last = carry
      at = (context.length - 1 + i)[:, None]
      a, cache = feed(params, cache, token[:, None], last[:, None], at)
      return a[:, 0], (cache, a[:, 0])

    proposal, (cache, _) = chain.propose(
      context,
      noise,
      functools.partial(head, config, params),
      more,
      state.last,
      (state.cache, state.last),
      vocab_size=vocab_size,
      ids=ids,
    )
    return proposal, state._replace(cache=cache)

  def commit(params, state, outcome):
    return _commit(config, feed, params, state, outcome)

  return Drafter(
    features=config.features,
    init=init,
    propose=propose,
    commit=commit,
    context=c.context,
  )


def _prefill(config, feed, params, prompt, length, taps, slots):
  """The `State` of prompts [B, S], each token with the features before it."""
  B, S = prompt.shape
  c = config.layers
  dtype = params["embed"].dtype
  cache = kv.init(
    batch=B, slots=slots, dtype=dtype, **transformer.cache_shape(c)
  )
  before = jnp.pad(taps, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :S]
  piece = functools.partial(lax.dynamic_slice_in_dim, axis=1)

  def step(carry):
    at, cache, last = carry
    positions = at + jnp.arange(kv.PREFILL)
    real = positions < length[:, None]
    chunk = piece(prompt, at, kv.PREFILL)
    g = fuse(config, params, piece(before, at, kv.PREFILL))
    where = jnp.where(real, positions, slots)
    a, cache = feed(params, cache, chunk, g, where)
    is_last = (positions == length[:, None] - 1)[..., None]
    last = last + jnp.where(is_last, a, 0).sum(1)
    return at + kv.PREFILL, cache, last

  _, cache, last = lax.while_loop(
    lambda carry: carry[0] < length.max(),
    step,
    (jnp.int32(0), cache, jnp.zeros((B, c.width), dtype)),
  )
  return State(cache, last)


def _commit(config, feed, params, state, outcome):
  """The `State` with the emitted tokens fed, by the target's features."""
  B, N = outcome.tokens.shape
  S, i = kv.num_slots(state.cache), jnp.arange(N)
  real = i < outcome.count[:, None]
  at = jnp.where(real, outcome.length[:, None] + i, S)
  # a row that emits nothing has ended, and its state is nobody's
  last = jnp.maximum(outcome.count - 1, 0)

  def some(width, first, state):  # most rounds keep few of K + 1 tokens
    g = fuse(config, params, first(outcome.taps, width))
    tokens, where = first(outcome.tokens, width), first(at, width)
    a, cache = feed(params, state.cache, tokens, g, where)
    return State(cache, a[jnp.arange(B), jnp.minimum(last, width - 1)])

  return adaptive.by_width(outcome.count.max(), N - 1, some, state)
