"""From a `transformer.Config` back to a config.json: `families.from_hf` undone.

A config holds rotary frequencies, not what they were made from. That is found
again: theta from the ratio of two that a scaling has left alone or divided
alike, which the last two are or the first two, and the scaling from the rest.
"""

import dataclasses

import numpy as np

from specjax.errors import UserError
from specjax.models import families

_FREQS = dict(inv_freq=(), local_inv_freq=())


def to_hf(config):
  """Return the dict of a config.json that `families.from_hf` reads back.

  A trimmed head and blocks are not part of it.

  Raises:
    UserError: the architecture has no such description.
  """
  found = _sizes(config) | _switches(config)
  f = np.array(config.inv_freq)
  guesses = [found | _rotary(f, i) for i in (len(f) - 2, 0)]
  if config.local_inv_freq:
    near = _rotary(np.array(config.local_inv_freq), 0)
    for guess in guesses:
      guess["rope_local_base_freq"] = near["rope_theta"]
  parts = False
  for guess in guesses:
    same_parts, same_rotary = _describes(guess, config)
    if same_parts and same_rotary:
      return guess
    parts |= same_parts
  what = "rotary frequencies have" if parts else "combination of parts has"
  raise UserError(
    f"the model's {what} no description in Hugging Face layout; choose another"
    " target or draft"
  )


def _family(c):
  """The model type that has the switches of a config."""
  if c.post_norms:
    return "gemma3_text" if c.qk_norm else "gemma2"
  if c.qk_norm:
    return "qwen3"
  if c.qkv_bias and not c.out_bias:
    return "qwen2"
  return "mistral" if c.windows else "llama"


def _sizes(c):
  return {
    "model_type": _family(c),
    "vocab_size": c.vocab_size,
    "hidden_size": c.width,
    "intermediate_size": c.hidden,
    "num_hidden_layers": c.layers,
    "num_attention_heads": c.heads,
    "num_key_value_heads": c.kv_heads,
    "head_dim": c.head_dim,
    "max_position_embeddings": c.context,
    "rms_norm_eps": c.norm_eps,
    "tie_word_embeddings": c.tied,
    "attention_bias": c.out_bias,
    "mlp_bias": c.mlp_bias,
  }


def _switches(c):
  """What only some families have, each key where its family has it."""
  kind = _family(c)
  family = families.FAMILIES[kind]
  name = "gelu_pytorch_tanh" if c.gelu else "silu"
  gemma = kind.startswith("gemma")
  found = {"hidden_activation" if gemma else "hidden_act": name}
  if gemma:
    found["query_pre_attn_scalar"] = c.query_scalar or c.head_dim
    found["attn_logit_softcapping"] = c.score_cap
    found["final_logit_softcapping"] = c.logit_cap
  if family.pattern is not None:
    found["sliding_window"] = max(c.windows, default=None)
  if family.optional:
    found["use_sliding_window"] = bool(c.windows)
  if c.windows and family.pattern != 0:
    kinds = families.LOCAL, families.FULL
    found["layer_types"] = [kinds[not n] for n in c.windows]
  return found


def _describes(found, config):
  """Whether it has a config's parts, and its rotary frequencies."""
  try:
    again = families.from_hf(found)
  except UserError:  # a guess that is no scaling
    return False, False
  fixed = dict(head_size=None, block=0, shards=1, tied=False, **_FREQS)
  plain = lambda c: dataclasses.replace(c, **fixed)
  close = lambda a, b: len(a) == len(b) and np.allclose(a, b, rtol=1e-6, atol=0)
  return plain(again) == plain(config), (
    close(again.inv_freq, config.inv_freq)
    and close(again.local_inv_freq, config.local_inv_freq)
  )


def _rotary(f, i):
  """rope_theta and rope_scaling that give the frequencies f [head_dim / 2].

  If i and i + 1 are divided alike.
  """
  if len(f) == 1:
    return {"rope_theta": 10000.0}  # 1 whatever theta is
  n = len(f)
  theta = _round((f[i] / f[i + 1]) ** n)
  plain = theta ** -(np.arange(n) / n)
  by = plain / f  # what they were divided by
  if np.allclose(by, 1, rtol=1e-6):
    return {"rope_theta": theta}
  factor = _round(by[-1])
  if factor <= 1 or np.allclose(by, factor, rtol=1e-6):
    scaling = {"rope_type": "linear", "factor": factor}
  else:
    with np.errstate(divide="ignore", invalid="ignore"):
      scaling = {"rope_type": "llama3", "factor": factor, **_blend(plain, by)}
  return {"rope_theta": theta, "rope_scaling": scaling}


def _blend(plain, by):
  """The rest of a llama3 scaling, from the frequencies that are blended.

  Of those the share keep = (original turns - low) / (high - low) is kept. Only
  the ratios of original, low and high matter: low is 1, as Llama's is. Two
  blended frequencies say the rest; with fewer, Llama's high of 4 is as good.
  """
  keep = (1 / by - 1 / by[-1]) / (1 - 1 / by[-1])
  inside = np.flatnonzero((keep > 1e-4) & (keep < 1 - 1e-4))
  turns, high = plain / (2 * np.pi), 4.0
  if len(inside) > 1:
    slope, start = np.polyfit(turns[inside], keep[inside], 1)
    high = 1 - 1 / start
    original = slope * (high - 1)
  elif len(inside):
    original = float(((1 + 3 * keep) / turns)[inside[0]])
  else:  # between the last that is kept and the first that is divided
    n = int((keep > 0.5).sum())
    original = (high / (turns[n - 1] * turns[n])) ** 0.5
  return {
    "low_freq_factor": 1.0,
    "high_freq_factor": _round(high),
    # 0 is refused
    "original_max_position_embeddings": round(
      np.nan_to_num(original, posinf=0)
    ),
  }


def _round(x):
  """A number as it was written, if rounding has touched its last digits."""
  near = float(f"{x:.6g}")
  return near if abs(near - x) < 1e-6 * abs(x) else float(x)
