"""From a file's own description of a model to `transformer.Config`.

What is not known is refused by name: a rotary scaling taken for none matches
on short prompts and drifts on long ones. So is a value that is no size, or
sizes that do not fit together, before anything is allocated after them.
"""

import math
import reprlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from specjax.errors import UserError
from specjax.models.transformer import Config

_FAMILIES = ("llama",)
_SCALINGS = ("default", "linear", "llama3")
# Larger than in any model: what exceeds it is a broken header.
_MOST, _MOST_HEAD_DIM = 2**24, 2**12


class Header(NamedTuple):
  """A description's keys and values, and what to call it in messages."""

  where: str
  values: Mapping

  def whole(self, key, default=None, most=_MOST):
    fits = lambda x: type(x) is int and 0 < x <= most
    return self._checked(key, default, fits, f"a whole number in 1..{most}")

  def number(self, key, default=None):
    fits = lambda x: type(x) in (int, float) and 0 < x < 1e30  # so no NaN
    return self._checked(key, default, fits, "a positive number")

  def flag(self, key, default=False):
    fits = lambda x: type(x) is bool
    return self._checked(key, default, fits, "true or false")

  def group(self, key):
    values = self._checked(key, {}, _is_group, "a group of keys")
    return Header(f"{self.where}: {key}", values)

  def _checked(self, key, default, fits, kind):
    """The value of a key; absent or null is the default, None for no default.

    Raises:
      UserError: there is none, or it does not fit.
    """
    value = self.values.get(key)
    if value is None:
      value = default
    if value is None:
      raise UserError(f"{self.where} has no {key!r}")
    if not fits(value):
      found = reprlib.repr(value)
      raise UserError(f"{self.where}: {key!r} must be {kind}, found {found}")
    return value


def from_hf(config, where="config.json"):
  """Read a parsed config.json, in the old or the new spelling.

  Args:
    config: a mapping.
    where: what to call it in messages.

  Raises:
    UserError: a family, activation, quantisation or rotary scaling that is not
      known, a missing key, or values that cannot be.
  """
  header = Header(where, config)
  _require(header, "model type", config.get("model_type"), _FAMILIES)
  _require(header, "activation", config.get("hidden_act", "silu"), ("silu",))
  if config.get("quantization_config") is not None:
    packed = header.group("quantization_config").values
    _require(header, "quantisation", packed.get("quant_method"), ())
  width = header.whole("hidden_size")
  heads, kv_heads, head_dim = _heads(
    header, width, "num_attention_heads", "num_key_value_heads", "head_dim"
  )
  bias = header.flag("attention_bias")
  return Config(
    vocab_size=header.whole("vocab_size"),
    width=width,
    layers=header.whole("num_hidden_layers"),
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    hidden=header.whole("intermediate_size"),
    context=header.whole("max_position_embeddings"),
    inv_freq=_hf_inv_freq(header, head_dim),
    norm_eps=header.number("rms_norm_eps"),
    tied=header.flag("tie_word_embeddings"),
    qkv_bias=bias,
    out_bias=bias,
    mlp_bias=header.flag("mlp_bias"),
  )


def _hf_inv_freq(header, head_dim):
  """From `rope_parameters` (transformers 5), or as it was written before."""
  new, old = header.group("rope_parameters"), header.group("rope_scaling")
  theta = header.number("rope_theta", 10000.0)
  if new.values:
    theta = new.number("rope_theta", theta)
  scaling = new if new.values else old
  for part in (header, scaling):
    turned = part.values.get("partial_rotary_factor", 1.0)
    _require(part, "partial rotary factor", turned, (1.0, None))
  nested = [k for k, v in scaling.values.items() if _is_group(v)]
  if nested:  # one scaling for each kind of layer
    _require(scaling, "rotary scaling", nested[0], _SCALINGS)
  kind = scaling.values.get("rope_type")
  kind = scaling.values.get("type") if kind is None else kind
  plain = kind is None and "factor" not in scaling.values
  return inv_freq(
    head_dim,
    theta=theta,
    kind="default" if plain else kind,
    scaling=scaling.values,
    where=scaling.where,
  )


def from_gguf(fields, names, rope_factors=None, where="the GGUF file"):
  """Read GGUF metadata.

  Args:
    fields: metadata, key -> value.
    names: the names of the file's tensors; without output.weight the head is
      the embedding.
    rope_factors: [head_dim / 2] the tensor rope_freqs.weight if there is one:
      llama3 scaling is only there, frequencies are divided by it.
    where: what to call the file in messages.
  """
  header = Header(where, fields)
  family = fields.get("general.architecture")
  _require(header, "GGUF architecture", family, _FAMILIES)
  key = lambda name: f"{family}.{name}"
  width = header.whole(key("embedding_length"))
  heads, kv_heads, head_dim = _heads(
    header,
    width,
    key("attention.head_count"),
    key("attention.head_count_kv"),
    key("attention.key_length"),
  )
  tokens = fields.get("tokenizer.ggml.tokens")
  known = len(tokens) if isinstance(tokens, list) else None
  return Config(
    vocab_size=header.whole(key("vocab_size"), known),
    width=width,
    layers=header.whole(key("block_count")),
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    hidden=header.whole(key("feed_forward_length")),
    context=header.whole(key("context_length")),
    inv_freq=_gguf_inv_freq(header, key, head_dim, rope_factors),
    norm_eps=header.number(key("attention.layer_norm_rms_epsilon")),
    tied="output.weight" not in names,
    qkv_bias="blk.0.attn_q.bias" in names,
    out_bias="blk.0.attn_output.bias" in names,
    mlp_bias="blk.0.ffn_gate.bias" in names,
  )


def _gguf_inv_freq(header, key, head_dim, factors):
  turned = header.whole(key("rope.dimension_count"), head_dim)
  _require(header, "number of rotary dimensions", turned, (head_dim,))
  old = header.number(key("rope.scale_linear"), 1.0)
  _require(header, "rope.scale_linear", old, (1.0,))
  # a factor without a type is linear, as in llama.cpp
  factor = header.values.get(key("rope.scaling.factor"))
  absent = "none" if factor is None else "linear"
  kind = header.values.get(key("rope.scaling.type"), absent)
  freq = inv_freq(
    head_dim,
    theta=header.number(key("rope.freq_base"), 10000.0),
    kind="default" if kind == "none" else kind,
    scaling={"factor": factor},
    where=header.where,
  )
  if factors is None:
    return freq
  if factors.shape != (head_dim // 2,) or not (factors > 0).all():
    raise UserError(
      f"{header.where}: rope_freqs.weight must be {head_dim // 2} positive"
      f" numbers, found shape {list(factors.shape)}"
    )
  return tuple((np.array(freq) / factors).tolist())


def inv_freq(head_dim, *, theta, kind, scaling, where="rotary scaling"):
  """Return the rotary frequencies theta^(-2i / head_dim), scaled.

  "linear" divides them by a factor. "llama3" divides the ones whose wavelength
  exceeds original_max_position_embeddings / low_freq_factor, keeps the ones
  below original / high_freq_factor, and blends in between (Dubey et al. 2024).
  """
  header = Header(where, scaling)
  _require(header, "rotary scaling", kind, _SCALINGS)
  f = float(theta) ** -(np.arange(0, head_dim, 2) / head_dim)
  if kind == "linear":
    f = f / header.number("factor")
  if kind == "llama3":
    factor = header.number("factor")
    original = header.number("original_max_position_embeddings")
    low = header.number("low_freq_factor")
    high = header.number("high_freq_factor")
    if low >= high:
      raise UserError(
        f"{where}: low_freq_factor {low} is not below high_freq_factor {high}"
      )
    turns = original * f / (2 * math.pi)  # within the original context
    keep = np.clip((turns - low) / (high - low), 0, 1)
    f = keep * f + (1 - keep) * f / factor
  return tuple(f.tolist())


def _heads(header, width, heads_key, kv_key, dim_key):
  """Return (heads, kv_heads, head_dim), each checked against the others."""
  heads = header.whole(heads_key)
  kv_heads = header.whole(kv_key, heads)
  if heads % kv_heads:
    raise UserError(
      f"{header.where}: {heads_key} = {heads} is not a multiple of"
      f" {kv_key} = {kv_heads}"
    )
  if header.values.get(dim_key) is None and width % heads:
    raise UserError(
      f"{header.where}: the width {width} is not a multiple of"
      f" {heads_key} = {heads}, and there is no {dim_key!r}"
    )
  head_dim = header.whole(dim_key, width // heads, _MOST_HEAD_DIM)
  if head_dim % 2:  # rotated in pairs
    raise UserError(f"{header.where}: the head width {head_dim} is odd")
  return heads, kv_heads, head_dim


def _is_group(value):
  return hasattr(value, "items")  # a ConfigDict is no Mapping


def _require(header, what, found, known):
  if found not in known:
    raise UserError(
      f"{header.where}: {what} {reprlib.repr(found)} is not supported;"
      f" known: {', '.join(map(str, known)) or 'none'}"
    )
