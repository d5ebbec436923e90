"""From named tensors in a file to the parameter tree, one tensor at a time.

Both formats are read under Hugging Face's names and shapes ([out, in]), so
one table of names serves them. q/k/v and gate/up are written into one
input-major matrix each as they are read; a second copy of the model never
exists.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from specjax import sharding
from specjax.drafters import feature
from specjax.errors import UserError
from specjax.models import exported, matrix, transformer


class Source(NamedTuple):
  """An opened weight file."""

  where: str  # for messages
  config: transformer.Config
  shapes: Mapping  # Hugging Face name of each tensor that it holds -> shape
  read: Callable  # name -> numpy array, a float type, [out, in] for matrices
  tokenizer: Callable  # () -> Tokenizer
  lacks: exported.Exported | None = None  # of a draft: its target's, or ids

  @property
  def lent(self):
    """Leaves outside the layers that it takes from its target."""
    if not self.lacks or self.lacks.embedding == "own":
      return ()
    return ("embed", "head") if self.config.tied else ("embed",)

  @property
  def features(self):
    """Layers of its target that a feature head reads, () for a model."""
    return self.lacks.features if self.lacks else ()


class Leaf(NamedTuple):
  """One array of the parameter tree and the tensors that it is made of."""

  path: tuple[str, ...]  # keys
  shape: tuple[int, ...]
  parts: Mapping  # name of a tensor -> its shape, side by side in the array
  transposed: bool  # they are stored [out, in]


_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OUTER = {  # a path outside the layers -> its tensor, is that transposed
  ("embed",): (_EMBED, False),
  ("head",): (_HEAD, True),
  ("norm", "scale"): ("model.norm.weight", False),
  # of a `drafters.feature` head
  ("fuse", "kernel"): ("fuse.weight", True),
  ("join", "kernel"): ("join.weight", True),
  ("token_norm", "scale"): ("token_norm.weight", False),
  ("feature_norm", "scale"): ("feature_norm.weight", False),
}
BLOCKS = {  # a layer's own names -> the tensors', the parts in order
  "attn_norm": ["input_layernorm"],
  "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
  "out": ["self_attn.o_proj"],
  "mlp_norm": ["post_attention_layernorm"],
  "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
  "down": ["mlp.down_proj"],
  "q_norm": ["self_attn.q_norm"],
  "k_norm": ["self_attn.k_norm"],
}
_FOUR_NORMS = {  # with norms also behind: one name has another meaning
  "attn_post_norm": ["post_attention_layernorm"],
  "mlp_norm": ["pre_feedforward_layernorm"],
  "mlp_post_norm": ["post_feedforward_layernorm"],
}
_STRIP = 64  # rows transposed at a time, so that both sides stay in the cache
_LEAVES = {"scale": "weight", "kernel": "weight", "bias": "bias"}
_LAYER = re.compile(r"model\.layers\.(\d+)\..*")
# buffers that old files carry and that the config already says
_IGNORED = re.compile(r".*rotary_emb\.inv_freq|rope_freqs\.weight")


def shapes(config, features=()):
  """The tree of a model, or of the feature head that reads some layers."""
  if features:
    return feature.shapes(feature.Config(config, features))
  return transformer.shapes(config)


def num_parameters(config, features=()):
  """How many numbers such a tree has."""
  return sum(x.size for x in jax.tree.leaves(shapes(config, features)))


def blocks(post_norms=False):
  """BLOCKS of a model with or without `Config.post_norms`."""
  return BLOCKS | _FOUR_NORMS if post_norms else BLOCKS


def plan(config, features=()):
  """Return the `Leaf`s of such a tree, the large outer ones first."""
  tree = jax.tree_util.tree_leaves_with_path(shapes(config, features))
  return [
    _leaf(config, tuple(key.key for key in path), x.shape) for path, x in tree
  ]


def _leaf(config, path, shape):
  if path in _OUTER:
    name, transposed = _OUTER[path]
    return Leaf(
      path, shape, {name: shape[:: -1 if transposed else 1]}, transposed
    )
  layer, block, kind = path
  widths = matrix.widths(config).get(block, shape[-1:])
  i = layer.removeprefix("layer_")
  transposed = kind == "kernel"
  parts = {}
  names = blocks(config.post_norms)[block]
  for part, width in zip(names, widths, strict=True):
    name = f"model.layers.{i}.{part}.{_LEAVES[kind]}"
    parts[name] = (width, shape[0]) if transposed else (width,)
  return Leaf(path, shape, parts, transposed)


def checked(source):
  """Return the source if it holds the tensors that its config implies.

  Nothing is read for that: names and shapes are known when a file is open. A
  tied model may bring a head all the same; it is the embedding that is used.

  Raises:
    UserError: a tensor is missing, left over or of another shape, by name.
  """
  where, config, found = source.where, source.config, source.shapes
  layers = {m[1] for m in map(_LAYER.fullmatch, found) if m}
  if len(layers) != config.layers:  # asked first: the rest is slow if absurd
    raise UserError(
      f"{where} has tensors of {len(layers)} layers, but its config says"
      f" {config.layers}"
    )
  every = plan(config, source.features)
  own = [leaf for leaf in every if leaf.path[0] not in source.lent]
  wanted = {k: v for leaf in own for k, v in leaf.parts.items()}
  missing = [name for name in wanted if name not in found]
  if missing:
    hint = "; its config says the head is not tied to the embedding"
    raise UserError(
      f"{where} has no tensor {missing[0]} ({len(missing)} missing)"
      f"{hint if missing == [_HEAD] else ''}"
    )
  spare = config.tied and not source.lent
  known = {*wanted, _HEAD} if spare else {*wanted}
  left = [n for n in found if n not in known and not _IGNORED.fullmatch(n)]
  if left:
    raise UserError(
      f"{where} has a tensor {min(left)!r} that its config does not know"
      f" ({len(left)} left over)"
    )
  for name, shape in wanted.items():
    if found[name] != shape:
      raise UserError(
        f"{where}: {name} has shape {list(found[name])}, the config implies"
        f" {list(shape)}"
      )
  return source


def load(
  source,
  *,
  dtype,
  untie=False,
  block=0,
  track=lambda leaves: leaves,
  lent=None,
  put=None,
):
  """Read the parameter tree of `source` onto the default device.

  Args:
    source: an opened file, `checked`.
    dtype: of every parameter.
    untie: give a tied model its own head, the transposed embedding. It costs
      one more [D, V] matrix and saves XLA's CPU backend from reading the
      embedding the slow way round in every step.
    block: columns of a block that matrices are stored in, 0 for whole ones;
      see `matrix.product`.
    track: wraps the list of leaves that is read, for a progress bar.
    lent: {"embed": array, "head": array} that the source takes from its target,
      as they are to be in the tree.
    put: (path, array) -> array where it is to lie; None: on the default device.

  Returns:
    (params, config); the config says tied=False after `untie`, and the block.

  Raises:
    UserError: the file cannot be read to its end.
  """
  params = {}
  config = as_loaded(source.config, untie)
  for leaf in track(plan(config, source.features)):
    if leaf.path[0] in source.lent:
      params[leaf.path[0]] = lent[leaf.path[0]]
      continue
    if leaf.path == ("head",) and source.config.tied:
      leaf = leaf._replace(parts={_EMBED: leaf.shape[::-1]})
    # JAX may keep this very buffer as its own, so nothing writes to it again.
    # Waiting for the copy, if it makes one, bounds the memory to one leaf more.
    value = stored(leaf.path[-1], _read(source, leaf, dtype), block)
    value = np.ascontiguousarray(value)
    value = put(leaf.path, value) if put else jax.device_put(value)
    value = jax.block_until_ready(value)
    _put(params, leaf.path, value)
  return params, as_loaded(source.config, untie, block)


def tensors(config, params, skip=(), features=()):
  """Yield (Hugging Face name, array [out, in]) of a tree: `load` undone.

  Args:
    params: with whole matrices; skip: leaves outside the layers to leave out.
    features: layers of the target that a feature head reads.
  """
  for leaf in plan(config, features):
    if leaf.path[0] in skip:
      continue
    value, at = params, 0
    for key in leaf.path:
      value = value[key]
    value = np.asarray(value)
    for name, shape in leaf.parts.items():
      width = shape[0] if leaf.transposed else shape[-1]
      part = value[..., at : at + width]
      at += width
      # a view would be written in the order of what it is a view of
      yield name, np.ascontiguousarray(part.T if leaf.transposed else part)


def stored(name, value, block):
  """A leaf of the tree, in blocks if it is a matrix that rows multiply."""
  if name not in ("kernel", "head"):
    return value
  return matrix.in_blocks(value, block)


def in_blocks(params, block):
  """A whole tree as `load` stores it."""
  return sharding.map_named(lambda path, x: stored(path[-1], x, block), params)


def as_loaded(config, untie, block=0):
  """The config of the parameter tree that `load` returns."""
  tied = config.tied and not untie
  return dataclasses.replace(config, tied=tied, block=block)


def _read(source, leaf, dtype):
  """Return a new array, never a view of the file."""
  value = np.empty(leaf.shape, dtype)
  at = 0
  for name in leaf.parts:
    x = source.read(name)
    width = len(x) if leaf.transposed else x.shape[-1]
    part = value[..., at : at + width]
    at += width
    if not leaf.transposed:
      part[...] = x
      continue
    for i in range(0, width, _STRIP):
      part[:, i : i + _STRIP] = x[i : i + _STRIP].T
  return value


def _put(tree, path, value):
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value
