"""The decoder-only transformer, as a Flax module that ends in a `Target`.

RMSNorm before each block, rotary positions, grouped-query attention, SwiGLU
(Touvron et al. 2023; Dubey et al. 2024), and switches for what other families
do besides; one that is off leaves nothing in the program. Layers are unrolled,
each with its own arrays, and q/k/v and gate/up are one matrix each, input-major
[in, out] or in blocks of columns: a decode step reads every weight once and XLA
copies none of them. Nothing outside this file knows Flax.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
from flax import linen as nn

from specjax import cache as kv
from specjax.models import attention, matrix
from specjax.types import Target


@dataclasses.dataclass(frozen=True)
class Config:
  """An architecture; `families.py` makes it from a file's own description."""

  vocab_size: int
  width: int  # D
  layers: int  # L
  heads: int  # H
  kv_heads: int  # G
  head_dim: int
  hidden: int  # width of the MLP
  context: int  # positions the model was trained for
  inv_freq: tuple[float, ...]  # [head_dim / 2] rotary frequencies, rad/token
  norm_eps: float = 1e-5
  tied: bool = False  # the head is the transposed embedding
  head_size: int | None = None  # logits of a trimmed head, None: vocab_size
  block: int = 0  # columns of a block that matrices are stored in, 0: whole
  shards: int = 1  # of the columns of fused matrices, see `matrix.order`
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  # Switches of families; `families.py` says which has which.
  qk_norm: bool = False  # RMSNorm of each head's query and key
  post_norms: bool = False  # RMSNorm also of what attention and MLP add
  norm_offset: bool = False  # norms multiply by 1 + scale
  gelu: bool = False  # the MLP's gate is GELU (tanh form), not SiLU
  embed_scaled: bool = False  # embeddings are multiplied by sqrt(width)
  query_scalar: float | None = None  # scores / its root, None: head_dim
  score_cap: float | None = None  # scores become cap * tanh(scores / cap)
  logit_cap: float | None = None  # and so do logits
  windows: tuple[int, ...] = ()  # [L] tokens that a layer sees, its own the
  # last; 0: all. () if all layers see all
  local_inv_freq: tuple[
    float, ...
  ] = ()  # of layers with a window, (): no other


# Flax asks for an initialiser and takes the shape from it; `init` below makes
# the values.
_SHAPE_ONLY = nn.initializers.zeros


class RMSNorm(nn.Module):
  """x / sqrt(mean(x^2) + eps) * scale (Zhang and Sennrich 2019).

  With an offset, * (1 + scale), in float32: narrow types have no 1 + 1e-3.
  """

  eps: float
  offset: bool = False

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", _SHAPE_ONLY, x.shape[-1:])
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
    if self.offset:
      return (y * (1 + scale.astype(jnp.float32))).astype(x.dtype)
    return y.astype(x.dtype) * scale


class Linear(nn.Module):
  """x @ kernel + bias."""

  features: int
  bias: bool = False
  block: int = 0

  @nn.compact
  def __call__(self, x):
    shape = matrix.shape(x.shape[-1], self.features, self.block)
    y = matrix.product(x, self.param("kernel", _SHAPE_ONLY, shape))
    if self.bias:
      y = y + self.param("bias", _SHAPE_ONLY, (self.features,))
    return y


class Layer(nn.Module):
  """x + attention(norm(x)), then x + mlp(norm(x))."""

  config: Config

  @nn.compact
  def __call__(self, x, positions, view, cache):
    c = self.config
    B, T, _ = x.shape
    norm = functools.partial(RMSNorm, c.norm_eps, c.norm_offset)
    y = norm(name="attn_norm")(x)
    heads = c.heads + 2 * c.kv_heads
    linear = functools.partial(Linear, block=c.block)
    y = linear(heads * c.head_dim, c.qkv_bias, name="qkv")(y)
    y = y.reshape(B, T, heads, c.head_dim)
    keys, n = c.heads + c.kv_heads, matrix.shards(c)
    own = functools.partial(matrix.cut, shards=n["qkv"], axis=2)
    if c.qk_norm:
      q = norm(name="q_norm")(own(y, 0, c.heads))
      k = norm(name="k_norm")(own(y, c.heads, keys))
      q, k = (attention.rotate(x, *view.angles) for x in (q, k))
    else:
      turned = attention.rotate(own(y, 0, keys), *view.angles)
      q, k = own(turned, 0, c.heads), own(turned, c.heads, keys)
    v = own(y, keys, heads)
    if cache is None or isinstance(cache, kv.Passes):
      own = kv.from_tokens(k, v)
      seen = own if cache is None else kv.side_by_side((*cache.before, own))
      cache = own
    else:
      seen = cache = kv.write(cache, k, v, positions)
    attend = functools.partial(
      attention.attend, scalar=c.query_scalar, cap=c.score_cap
    )
    attend = functools.partial(attention.in_turns, attend)
    y = attention.within(attend, q, seen, view).reshape(B, T, -1)
    y = linear(c.width, c.out_bias, name="out")(y)
    x = x + (norm(name="attn_post_norm")(y) if c.post_norms else y)

    y = norm(name="mlp_norm")(x)
    y = linear(2 * c.hidden, c.mlp_bias, name="gate_up")(y)
    own = functools.partial(matrix.cut, shards=n["gate_up"])
    gate, up = own(y, 0, c.hidden), own(y, c.hidden, 2 * c.hidden)
    y = (jax.nn.gelu if c.gelu else jax.nn.silu)(gate) * up
    y = linear(c.width, c.mlp_bias, name="down")(y)
    x = x + (norm(name="mlp_post_norm")(y) if c.post_norms else y)
    return x, cache


class Transformer(nn.Module):
  """tokens [B, T] -> hidden [B, T, D] after the last norm; see `Target`."""

  config: Config

  def setup(self):
    c = self.config
    self.embed = self.param("embed", _SHAPE_ONLY, (c.vocab_size, c.width))
    if not c.tied:
      shape = matrix.shape(c.width, c.head_size or c.vocab_size, c.block)
      self.head = self.param("head", _SHAPE_ONLY, shape)
    self.layers = [Layer(c, name=f"layer_{i}") for i in range(c.layers)]
    self.norm = RMSNorm(c.norm_eps, c.norm_offset)

  def __call__(self, tokens, positions, cache=None, features=()):
    c = self.config
    x = self.embed[tokens]  # [B, T, D]
    if c.embed_scaled:
      x = x * jnp.asarray(c.width**0.5, x.dtype)
    if cache is None:
      places = positions[:, None, :]
    else:
      places = jnp.arange(kv.num_slots(cache))
    mask = places <= positions[:, :, None]
    views = attention.views(c, positions, mask, places, cache)
    taps, caches = {}, []
    for i, layer in enumerate(self.layers):
      x, new = layer(x, positions, views[i], cache and cache[i])
      taps[i] = x
      caches.append(new)
    B, T, D = x.shape
    none = jnp.zeros((B, T, 0, D), x.dtype)
    tapped = jnp.stack([taps[i] for i in features], 2) if features else none
    return self.norm(x), tapped, None if cache is None else tuple(caches)

  def unembed(self, hidden):
    head = self.embed.T if self.config.tied else self.head
    # narrow weights still give float32 logits, which decide the law
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = matrix.product(hidden, head, wide)
    return attention.capped(logits, self.config.logit_cap)


def init(config, key, dtype=jnp.float32):
  """Return seeded random parameters of this architecture.

  Norms multiply by 1, biases are 0, all else is normal(0, 0.02). Leaf by leaf:
  as one program, thirty layers of random numbers take ten seconds to compile.
  """

  def leaf(path, spec):
    name = path[-1].key
    if name in ("scale", "bias"):
      one = name == "scale" and not config.norm_offset
      return jnp.full(spec.shape, one, dtype)
    leaf_key = jax.random.fold_in(key, zlib.crc32(str(path).encode()))
    return _normal(leaf_key, spec.shape, dtype)

  return jax.tree_util.tree_map_with_path(leaf, shapes(config))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
  return (0.02 * jax.random.normal(key, shape)).astype(dtype)


@functools.cache  # it traces the whole model
def shapes(config):
  """Return the parameter tree as `jax.ShapeDtypeStruct`s, in float32."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  init = Transformer(config).init
  return jax.eval_shape(init, jax.random.key(0), tokens, tokens)["params"]


def num_parameters(config):
  """Return how many numbers the architecture has."""
  return sum(leaf.size for leaf in jax.tree.leaves(shapes(config)))


def make(config, dtype=jnp.float32):
  """Return the `Target` of an architecture; `dtype` is its cache's.

  Equal arguments return the very same Target, hence share compiled programs.
  """
  return _make(config, jnp.dtype(dtype))


@functools.cache
def _make(config, dtype):
  module = Transformer(config)

  def apply(params, tokens, positions, cache, *, features=()):
    return module.apply({"params": params}, tokens, positions, cache, features)

  def unembed(params, hidden):
    return module.apply({"params": params}, hidden, method="unembed")

  def init_cache(batch, slots):
    return kv.init(batch=batch, slots=slots, dtype=dtype, **cache_shape(config))

  return Target(apply, unembed, init_cache, config.vocab_size, config.context)


def layers(config, params, x, positions, mask, caches):
  """Apply layers and nothing else.

  Args:
    params: a dict with "layer_0", "layer_1", ...
    x: [B, T, D]; positions: [B, T].
    mask: [B, T, S].
    caches: one a layer, as of `cache.init` or a `cache.Passes`; or None.

  Returns:
    x, and what each layer's keys and values are now.
  """
  # side by side, each of several passes has every place
  places = jnp.arange(mask.shape[-1])
  if caches and isinstance(caches[0], kv.Passes):
    places %= x.shape[1]
  views = attention.views(config, positions, mask, places, caches)
  found = []
  for i in range(config.layers):
    tree = {"params": params[f"layer_{i}"]}
    past = caches and caches[i]
    x, new = Layer(config).apply(tree, x, positions, views[i], past)
    found.append(new)
  return x, tuple(found)


def norm(scale, x, eps, offset=False):
  """x / sqrt(mean(x^2) + eps) * scale, or * (1 + scale)."""
  return RMSNorm(eps, offset).apply({"params": {"scale": scale}}, x)


def some_layers(config, layers):
  """The config of some of a model's layers, by their numbers."""
  windows = config.windows and tuple(config.windows[i] for i in layers)
  if not any(windows):  # one way to say it
    windows = ()
  local = config.local_inv_freq if windows else ()
  return dataclasses.replace(
    config, layers=len(layers), windows=windows, local_inv_freq=local
  )


def cache_shape(config):
  """The part of `cache.init`'s arguments that the architecture decides."""
  return dict(
    layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim
  )
