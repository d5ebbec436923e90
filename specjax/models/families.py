"""From a file's own description of a model to `transformer.Config`.

One transformer with switches; a family is a row of a table that says which are
on. What is not known is refused by name, and so is a value that is no size, or
sizes that do not fit together, before anything is allocated after them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from specjax.errors import UserError
from specjax.models import rope
from specjax.models.header import Header, require
from specjax.models.transformer import Config

_ACTIVATIONS = {"silu": False, "gelu_pytorch_tanh": True}  # is it `Config.gelu`
_MOST_HEAD_DIM = 2**12
FULL, LOCAL = "full_attention", "sliding_attention"  # of layer_types


class Family(NamedTuple):
  """What a model type implies.

  Of every `pattern` layers the last sees all tokens and the others a window: 1
  for all layers, 0 for none. None: the family has no windows.
  """

  switches: Mapping = MappingProxyType({})  # of `Config`
  # keys that its config.json may leave out, and what transformers takes then
  absent: Mapping = MappingProxyType({})
  pattern: int | None = None
  optional: bool = False  # windows are used if use_sliding_window says so
  local_theta: float | None = None  # rotary base of layers with a window


_QWEN = dict(num_key_value_heads=32, sliding_window=4096, max_window_layers=28)
_GEMMA = dict(
  num_key_value_heads=4,
  head_dim=256,
  hidden_act="gelu_pytorch_tanh",
  query_pre_attn_scalar=256,
  rms_norm_eps=1e-6,
  sliding_window=4096,
  tie_word_embeddings=True,
)
_NORMS = dict(post_norms=True, norm_offset=True, embed_scaled=True)
_CAPS = dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
_GEMMA3 = dict(
  num_attention_heads=8,
  vocab_size=262208,
  max_position_embeddings=131072,
  rope_theta=1000000.0,
)
FAMILIES = {  # by model type: Llama has SmolLM2 too, Qwen2 has 2.5
  "llama": Family(),
  "mistral": Family(
    absent=dict(num_key_value_heads=8, sliding_window=4096), pattern=0
  ),
  "qwen2": Family(
    switches=dict(qkv_bias=True), absent=_QWEN, pattern=1, optional=True
  ),
  "qwen3": Family(
    switches=dict(qk_norm=True),
    absent=_QWEN | dict(head_dim=128),
    pattern=1,
    optional=True,
  ),
  "gemma2": Family(switches=_NORMS, absent=_GEMMA | _CAPS, pattern=2),
  "gemma3_text": Family(
    switches=_NORMS | dict(qk_norm=True),
    absent=_GEMMA | _GEMMA3,
    pattern=6,
    local_theta=10000.0,
  ),
}
WITH_IMAGES = "gemma3"  # the text model is a group of its description
# GGUF architecture -> model type. A Mistral is a "llama" there.
_GGUF = {k: k for k in ("llama", "qwen2", "qwen3", "gemma2")}
_GGUF["gemma3"] = "gemma3_text"
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models


def from_hf(config, where="config.json"):
  """Read a parsed config.json, in the old or the new spelling.

  Args:
    config: a mapping.
    where: what to call it in messages.

  Raises:
    UserError: a family, activation, quantisation or rotary scaling that is not
      known, a missing key, or values that cannot be.
  """
  header, kind = Header(where, config), config.get("model_type")
  if kind == WITH_IMAGES:
    header, kind = header.group("text_config"), "gemma3_text"
  require(header, "model type", kind, FAMILIES)
  family = FAMILIES[kind]
  header = Header(header.where, {**family.absent, **header.values})
  packed = Header(where, config).group("quantization_config").values
  if packed:
    require(header, "quantisation", packed.get("quant_method"), ())
  width = header.whole("hidden_size")
  heads, kv_heads, head_dim = _heads(
    header, width, "num_attention_heads", "num_key_value_heads", "head_dim"
  )
  layers = header.whole("num_hidden_layers")
  windows = _hf_windows(header, family, layers)
  inv_freq, local = rope.from_hf(header, head_dim, family.local_theta)
  bias = header.flag("attention_bias")
  found = dict(
    vocab_size=header.whole("vocab_size"),
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    hidden=header.whole("intermediate_size"),
    context=header.whole("max_position_embeddings"),
    inv_freq=inv_freq,
    norm_eps=header.number("rms_norm_eps"),
    tied=header.flag("tie_word_embeddings"),
    qkv_bias=bias,
    out_bias=bias,
    mlp_bias=header.flag("mlp_bias"),
    gelu=_gelu(header, kind),
    windows=windows,
    local_inv_freq=local if windows else (),
  )
  return Config(**found | _scores(header, head_dim) | family.switches)


def _gelu(header, kind):
  # Gemma's own key for it; its hidden_act is older, and not read
  key = "hidden_act"
  if kind.startswith("gemma") and header.has("hidden_activation"):
    key = "hidden_activation"
  name = header.values.get(key)
  name = "silu" if name is None else name
  require(header, "activation", name, _ACTIVATIONS)
  return _ACTIVATIONS[name]


def _scores(header, head_dim):
  """What Gemma does to scores and logits; other families have no such keys."""
  both = header.values.get("use_bidirectional_attention")
  require(header, "bidirectional attention", both, (False, None))
  maybe = lambda key: float(header.number(key)) if header.has(key) else None
  scalar = maybe("query_pre_attn_scalar")
  return dict(
    query_scalar=None if scalar == head_dim else scalar,
    score_cap=maybe("attn_logit_softcapping"),
    logit_cap=maybe("final_logit_softcapping"),
  )


def _hf_windows(header, family, layers):
  """`Config.windows`, from layer_types, or as it was written before."""
  unused = family.optional and not header.flag("use_sliding_window")
  if family.pattern is None or unused or not header.has("sliding_window"):
    kinds = header.values.get("layer_types") or ()
    if family.pattern is not None and not unused and LOCAL in kinds:
      header.whole("sliding_window")  # there is none
    return ()
  window = header.whole("sliding_window")
  if header.has("layer_types"):
    kinds = header.each("layer_types", layers)
    for kind in kinds:
      require(header, "layer type", kind, (FULL, LOCAL))
    near = [kind == LOCAL for kind in kinds]
  elif family.optional:  # of Qwen the first see all
    first = header.whole("max_window_layers")
    near = [i >= first for i in range(layers)]
  else:
    near = _pattern(header, "sliding_window_pattern", family.pattern, layers)
  return _windows(near, window)


def _pattern(header, key, n, layers):
  """Which layers have a window: see `Family`; a key's value replaces n."""
  n = header.whole(key) if header.has(key) else n
  return [n == 0 or (i + 1) % n != 0 for i in range(layers)]


def _windows(near, window):
  return tuple(window * bool(x) for x in near) if any(near) else ()


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
  arch = fields.get("general.architecture")
  require(header, "GGUF architecture", arch, _GGUF)
  family = FAMILIES[_GGUF[arch]]
  key = lambda name: f"{arch}.{name}"
  width = header.whole(key("embedding_length"))
  heads, kv_heads, head_dim = _heads(
    header,
    width,
    key("attention.head_count"),
    key("attention.head_count_kv"),
    key("attention.key_length"),
  )
  layers = header.whole(key("block_count"))
  tokens = fields.get("tokenizer.ggml.tokens")
  known = len(tokens) if isinstance(tokens, list) else None
  windows = _gguf_windows(header, key, arch, family, layers)
  inv_freq, local = rope.from_gguf(
    header, key, head_dim, rope_factors, family.local_theta
  )
  found = dict(
    vocab_size=header.whole(key("vocab_size"), known),
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    hidden=header.whole(key("feed_forward_length")),
    context=header.whole(key("context_length")),
    inv_freq=inv_freq,
    norm_eps=header.number(key("attention.layer_norm_rms_epsilon")),
    tied="output.weight" not in names,
    qkv_bias="blk.0.attn_q.bias" in names,
    out_bias="blk.0.attn_output.bias" in names,
    mlp_bias="blk.0.ffn_gate.bias" in names,
    windows=windows,
    local_inv_freq=local if windows else (),
  )
  if arch in _LARGEST:
    found |= _gguf_scores(header, key, arch, family)
    found["gelu"] = True
    if layers == _LARGEST[arch]:  # no key says it: as in llama.cpp
      scalar = float(width // heads)
      found["query_scalar"] = None if scalar == head_dim else scalar
  return Config(**found | family.switches)


def _gguf_scores(header, key, arch, family):
  names = dict(score_cap="attn_logit_softcapping")
  names |= dict(logit_cap="final_logit_softcapping")
  found = {}
  for switch, name in names.items():
    absent = family.absent.get(name)
    if absent is not None or header.has(key(name)):
      found[switch] = float(header.number(key(name), absent))
  return found


def _gguf_windows(header, key, arch, family, layers):
  """As llama.cpp; of a "llama" with a window, Mistral, every layer has it."""
  name, every = key("attention.sliding_window"), family.pattern
  if arch == "llama":
    every = FAMILIES["mistral"].pattern
  if family.optional and header.has(name):
    require(header, name, header.values[name], ())
  if family.optional or not (header.has(name) or arch == "gemma2"):
    return ()
  window = header.whole(name, family.absent.get("sliding_window"))
  pattern = f"{name}_pattern"
  if isinstance(header.values.get(pattern), list):
    return _windows(header.each(pattern, layers), window)
  return _windows(_pattern(header, pattern, every, layers), window)


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
