"""From a file's own description of a model to `transformer.Config`.

What is not known is refused by name: a rotary scaling taken for none matches
on short prompts and drifts on long ones.
"""

import math

import numpy as np

from specjax.errors import UserError
from specjax.models.transformer import Config

_FAMILIES = ("llama",)


def from_hf(config):
  """Read a parsed config.json, in the old or the new spelling.

  Raises:
    UserError: a family, activation or rotary scaling that is not known, or a
      missing key.
  """
  family = config.get("model_type")
  _require(family in _FAMILIES, "model type", family, _FAMILIES)
  act = config.get("hidden_act", "silu")
  _require(act == "silu", "activation", act, ("silu",))
  try:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    bias = config.get("attention_bias", False)
    return Config(
      vocab_size=config["vocab_size"],
      width=config["hidden_size"],
      layers=config["num_hidden_layers"],
      heads=heads,
      kv_heads=config.get("num_key_value_heads") or heads,
      head_dim=head_dim,
      hidden=config["intermediate_size"],
      context=config["max_position_embeddings"],
      inv_freq=inv_freq(head_dim, **_rope(config)),
      norm_eps=config["rms_norm_eps"],
      tied=config.get("tie_word_embeddings", False),
      qkv_bias=bias,
      out_bias=bias,
      mlp_bias=config.get("mlp_bias", False),
    )
  except KeyError as e:
    raise UserError(f"config.json has no {e.args[0]!r}") from e


def _rope(config):
  """theta and scaling, from `rope_parameters` (transformers 5) or before."""
  new = config.get("rope_parameters") or {}
  scaling = new or config.get("rope_scaling") or {}
  return dict(
    theta=new.get("rope_theta", config.get("rope_theta", 10000.0)),
    kind=scaling.get("rope_type") or scaling.get("type") or "default",
    scaling=scaling,
  )


def from_gguf(fields, names, rope_factors=None):
  """Read GGUF metadata.

  Args:
    fields: metadata, key -> value.
    names: the names of the file's tensors; without output.weight the head is
      the embedding.
    rope_factors: [head_dim / 2] the tensor rope_freqs.weight if there is one:
      llama3 scaling is only there, frequencies are divided by it.
  """
  family = fields.get("general.architecture")
  _require(family in _FAMILIES, "GGUF architecture", family, _FAMILIES)
  try:
    get = lambda key: fields[f"{family}.{key}"]
    heads = get("attention.head_count")
    width = get("embedding_length")
    head_dim = fields.get(f"{family}.attention.key_length", width // heads)
    kind = fields.get(f"{family}.rope.scaling.type", "none")
    freq = inv_freq(
      head_dim,
      theta=fields.get(f"{family}.rope.freq_base", 10000.0),
      kind={"none": "default"}.get(kind, kind),
      scaling={"factor": fields.get(f"{family}.rope.scaling.factor")},
    )
    if rope_factors is not None:
      freq = tuple((np.array(freq) / rope_factors).tolist())
    return Config(
      vocab_size=len(fields["tokenizer.ggml.tokens"]),
      width=width,
      layers=get("block_count"),
      heads=heads,
      kv_heads=fields.get(f"{family}.attention.head_count_kv", heads),
      head_dim=head_dim,
      hidden=get("feed_forward_length"),
      context=get("context_length"),
      inv_freq=freq,
      norm_eps=get("attention.layer_norm_rms_epsilon"),
      tied="output.weight" not in names,
      qkv_bias="blk.0.attn_q.bias" in names,
      out_bias="blk.0.attn_output.bias" in names,
      mlp_bias="blk.0.ffn_gate.bias" in names,
    )
  except KeyError as e:
    raise UserError(f"the GGUF file has no {e.args[0]!r}") from e


def inv_freq(head_dim, *, theta, kind, scaling):
  """Return the rotary frequencies theta^(-2i / head_dim), scaled.

  "linear" divides them by a factor. "llama3" divides the ones whose wavelength
  exceeds original_max_position_embeddings / low_freq_factor, keeps the ones
  below original / high_freq_factor, and blends in between (Dubey et al. 2024).
  """
  known = ("default", "linear", "llama3")
  _require(kind in known, "rotary scaling", kind, known)
  f = float(theta) ** -(np.arange(0, head_dim, 2) / head_dim)
  if kind == "linear":
    f = f / scaling["factor"]
  if kind == "llama3":
    factor, original = (
      scaling["factor"],
      scaling["original_max_position_embeddings"],
    )
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * f / (2 * math.pi)  # within the original context
    keep = np.clip((turns - low) / (high - low), 0, 1)
    f = keep * f + (1 - keep) * f / factor
  return tuple(f.tolist())


def _require(ok, what, found, known):
  if not ok:
    raise UserError(f"{what} {found!r} is not supported; known: {list(known)}")
