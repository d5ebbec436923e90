"""From a `transformer.Config` back to a config.json: `families.from_hf` undone.

A config holds rotary frequencies, not what they were made from. That is found
again: theta from the ratio of two that a scaling has left alone or divided
alike, which the last two are or the first two, and the scaling from the rest.
"""

import numpy as np

from specjax.errors import UserError
from specjax.models import families


def to_hf(config):
  """Return the dict of a config.json that `families.from_hf` reads back.

  A trimmed head and blocks are not part of it.

  Raises:
    UserError: the architecture has no such description.
  """
  if config.qkv_bias != config.out_bias:
    raise UserError(
      "a model with biases in some of its attention's matrices cannot be"
      " written in Hugging Face layout; choose another target or draft"
    )
  found = {
    "model_type": "llama",
    "vocab_size": config.vocab_size,
    "hidden_size": config.width,
    "intermediate_size": config.hidden,
    "num_hidden_layers": config.layers,
    "num_attention_heads": config.heads,
    "num_key_value_heads": config.kv_heads,
    "head_dim": config.head_dim,
    "max_position_embeddings": config.context,
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tied,
    "attention_bias": config.qkv_bias,
    "mlp_bias": config.mlp_bias,
    "hidden_act": "silu",
  }
  f = np.array(config.inv_freq)
  for i in (len(f) - 2, 0):
    guess = found | _rotary(f, i)
    if _describes(guess, f):
      return guess
  raise UserError(
    "the model's rotary frequencies have no description in Hugging Face"
    " layout; choose another target or draft"
  )


def _describes(found, inv_freq):
  try:
    again = families.from_hf(found).inv_freq
  except UserError:  # a guess that is no scaling
    return False
  return np.allclose(again, inv_freq, rtol=1e-6, atol=0)


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
