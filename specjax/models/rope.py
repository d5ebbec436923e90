"""Rotary frequencies of a model, from its description.

A scaling that is not known is refused by name: taken for none it matches on
short prompts and drifts on long ones.
"""

import math

import numpy as np

from specjax.errors import UserError
from specjax.models.header import Header, is_group, require

_SCALINGS = ("default", "linear", "llama3")
_FULL, _LOCAL = "full_attention", "sliding_attention"


def from_hf(header, head_dim, local=None):
  """Frequencies from `rope_parameters` (transformers 5), or as before that.

  Args:
    local: of a family whose layers with a window have a base of their own, that
      base where the file has none; their frequencies are not scaled.

  Returns:
    (inv_freq, that of layers with a window), the latter () without `local`.
  """
  new, old = header.group("rope_parameters"), header.group("rope_scaling")
  near = ()
  if local is not None:
    base = header.number("rope_local_base_freq", local)
    near = _group(Header(header.where, {}), {}, head_dim, base)
    if new.values:
      for kind in new.values:
        require(new, "rotary setting", kind, (_FULL, _LOCAL))
      part = new.group(_LOCAL)
      near = _group(
        part, part.values, head_dim, part.number("rope_theta", base)
      )
      new = new.group(_FULL)
  theta = header.number("rope_theta", 10000.0)
  if new.values:
    theta = new.number("rope_theta", theta)
  scaling = new if new.values else old
  _whole_head(header)
  return _group(scaling, scaling.values, head_dim, theta), near


def _whole_head(header):
  turned = header.values.get("partial_rotary_factor", 1.0)
  require(header, "partial rotary factor", turned, (1.0, None))


def _group(header, values, head_dim, theta):
  """Frequencies of one group of settings."""
  _whole_head(header)
  nested = [k for k, v in values.items() if is_group(v)]
  if nested:  # one scaling for each kind of layer
    require(header, "rotary scaling", nested[0], _SCALINGS)
  kind = values.get("rope_type")
  kind = values.get("type") if kind is None else kind
  plain = kind is None and "factor" not in values
  return inv_freq(
    head_dim,
    theta=theta,
    kind="default" if plain else kind,
    scaling=values,
    where=header.where,
  )


def from_gguf(header, key, head_dim, factors, local=None):
  """As `from_hf`; see `families.from_gguf`."""
  turned = header.whole(key("rope.dimension_count"), head_dim)
  require(header, "number of rotary dimensions", turned, (head_dim,))
  old = header.number(key("rope.scale_linear"), 1.0)
  require(header, "rope.scale_linear", old, (1.0,))
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
  near = ()
  if local is not None:
    theta = header.number(key("rope.freq_base_swa"), local)
    near = inv_freq(head_dim, theta=theta, kind="default", scaling={})
  if factors is None:
    return freq, near
  if factors.shape != (head_dim // 2,) or not (factors > 0).all():
    raise UserError(
      f"{header.where}: rope_freqs.weight must be {head_dim // 2} positive"
      f" numbers, found shape {list(factors.shape)}"
    )
  return tuple((np.array(freq) / factors).tolist()), near


def inv_freq(head_dim, *, theta, kind, scaling, where="rotary scaling"):
  """Return the rotary frequencies theta^(-2i / head_dim), scaled.

  "linear" divides them by a factor. "llama3" divides the ones whose wavelength
  exceeds original_max_position_embeddings / low_freq_factor, keeps the ones
  below original / high_freq_factor, and blends in between (Dubey et al. 2024).
  """
  header = Header(where, scaling)
  require(header, "rotary scaling", kind, _SCALINGS)
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
