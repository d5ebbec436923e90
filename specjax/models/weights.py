"""From named tensors in a file to the parameter tree, one tensor at a time.

Both formats are read under Hugging Face's names and shapes ([out, in]), so
one table of names serves them. q/k/v and gate/up are written into one
input-major matrix each as they are read; a second copy of the model never
exists.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from specjax.errors import UserError
from specjax.models import transformer


class Source(NamedTuple):
  """An opened weight file."""

  where: str  # for messages
  config: transformer.Config
  names: frozenset  # Hugging Face names of the tensors that it holds
  read: Callable  # name -> numpy array, a float type, [out, in] for matrices
  tokenizer: Callable  # () -> Tokenizer


_EMBED, _HEAD, _NORM = "model.embed_tokens", "lm_head", "model.norm"
# buffers that old files carry and that the config already says
_IGNORED = re.compile(r".*rotary_emb\.inv_freq|rope_freqs\.weight")
BLOCKS = {  # a layer's own names -> ours, the parts in order
  "attn_norm": ["input_layernorm"],
  "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
  "out": ["self_attn.o_proj"],
  "mlp_norm": ["post_attention_layernorm"],
  "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
  "down": ["mlp.down_proj"],
}
_LEAVES = {"scale": "weight", "kernel": "weight", "bias": "bias"}


def plan(config):
  """Return {path in the tree: (names of its parts, is it stored transposed)}.

  A path is a tuple of keys; a fused matrix has several parts, side by side.
  """
  parts = {("embed",): (["model.embed_tokens.weight"], False)}
  if not config.tied:
    parts["head",] = ([f"{_HEAD}.weight"], True)
  parts["norm", "scale"] = ([f"{_NORM}.weight"], False)
  for path in _paths(transformer.shapes(config)):
    if path in parts:
      continue
    layer, block, leaf = path
    i = layer.removeprefix("layer_")
    names = [
      f"model.layers.{i}.{part}.{_LEAVES[leaf]}" for part in BLOCKS[block]
    ]
    parts[path] = (names, leaf == "kernel")
  return parts


def load(source, *, dtype, untie=False, track=lambda names: names):
  """Read the parameter tree of `source` onto the default device.

  Args:
    source: an opened file.
    dtype: of every parameter.
    untie: give a tied model its own head, the transposed embedding. It costs
      one more [D, V] matrix and saves XLA's CPU backend from reading the
      embedding the slow way round in every step.
    track: wraps the list of paths that is read, for a progress bar.

  Returns:
    (params, config); the config says tied=False after `untie`.

  Raises:
    UserError: a tensor is missing, left over, or has another shape than the
      config implies; each is named.
  """
  config = source.config
  wanted = plan(config)
  _check_names(source, wanted)
  shapes = transformer.shapes(config)
  params = {}
  for path in track(list(wanted)):
    names, transposed = wanted[path]
    shape = _at(shapes, path).shape
    value = _read(source, names, shape, transposed, dtype)
    _put(params, path, jax.device_put(value))
    if path == ("embed",) and untie and config.tied:
      params["head"] = jax.device_put(np.ascontiguousarray(value.T))
  return params, as_loaded(config, untie)


def as_loaded(config, untie):
  """The config of the parameter tree that `load` returns."""
  return dataclasses.replace(config, tied=config.tied and not untie)


def _read(source, names, shape, transposed, dtype):
  value = np.empty(shape, dtype)
  at = 0
  for name in names:
    x = source.read(name)
    x = x.T if transposed else x
    end = at + x.shape[-1]
    if len(names) == 1:
      fits = x.shape == shape
    else:
      fits = x.shape[:-1] == shape[:-1] and end <= shape[-1]
    if not fits:
      raise UserError(
        f"{source.where}: {name} has shape {list(x.shape)}, the config implies"
        f" {list(shape)}{' with its neighbours' if len(names) > 1 else ''}"
      )
    value[..., at:end] = x
    at = end
  return value


def _check_names(source, wanted):
  needed = {name for names, _ in wanted.values() for name in names}
  missing = sorted(needed - source.names)
  if missing:
    raise UserError(
      f"{source.where} has no tensor {missing[0]} ({len(missing)} missing)"
    )
  # A tied file may repeat the embedding as its head; the embedding is used.
  spare = {f"{_HEAD}.weight"} if source.config.tied else set()
  left = sorted(
    name
    for name in source.names - needed - spare
    if not _IGNORED.fullmatch(name)
  )
  if left:
    raise UserError(
      f"{source.where} has a tensor {left[0]} that its config does not know"
      f" ({len(left)} left over)"
    )


def _paths(tree):
  return [
    tuple(key.key for key in path)
    for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  ]


def _at(tree, path):
  for key in path:
    tree = tree[key]
  return tree


def _put(tree, path, value):
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value
