"""Open a GGUF file: one file with weights, architecture and tokenizer.

Tensors are presented under Hugging Face's names and layout. llama.cpp's
converter stores the rows of Llama's q and k projections permuted for its
interleaved rotary embedding; that is undone here. Loaded as stored, such a
file gives fluent nonsense.
"""

import numpy as np

from specjax.errors import UserError
from specjax.models import families, tokenizer
from specjax.models.weights import BLOCKS, Source

_PERMUTED = {"llama": ("attn_q", "attn_k")}  # architecture -> its permuted ones
_ROPE_FACTORS = "rope_freqs.weight"


def open_file(path):
  """Return the `Source` of a file; tensors are dequantised when read.

  Raises:
    UserError: the file is corrupt or truncated, or holds a model, tokenizer
      or quantisation that is not known.
  """
  import gguf  # only needed for this format, and slow to import

  try:
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
  except (ValueError, IndexError, KeyError, OSError, UnicodeError) as e:
    raise UserError(f"{path} is corrupt, truncated or no GGUF file: {e}") from e
  tensors = {t.name: t for t in reader.tensors}

  def dequantise(name):
    t = tensors[name]
    try:
      return gguf.dequantize(t.data, t.tensor_type)
    except NotImplementedError as e:
      kind = t.tensor_type.name
      raise UserError(
        f"{path}: {name} is stored as {kind}, which cannot be dequantised;"
        " F32, F16, BF16, Q8_0, Q4_0, Q4_1 and K-quants can"
      ) from e

  factors = dequantise(_ROPE_FACTORS) if _ROPE_FACTORS in tensors else None
  config = families.from_gguf(fields, tensors, factors)
  family = fields["general.architecture"]
  names = _hf_names(gguf, family, config.layers, tensors)

  def read(name):
    stored = names[name]
    x = dequantise(stored)
    block = stored.split(".")[-2]
    if block in _PERMUTED.get(family, ()):
      heads = config.heads if block == "attn_q" else config.kv_heads
      x = unpermute(x, heads)
    return x

  return Source(
    where=str(path),
    config=config,
    names=frozenset(names),
    read=read,
    tokenizer=lambda: tokenizer.from_gguf(fields),
  )


def unpermute(x, heads):
  """Rows from interleaved rotary pairs (2i, 2i + 1) to halves (i, i + d / 2).

  Args:
    x: [heads * head_dim, ...] as stored.
  """
  pairs = x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:])
  return np.swapaxes(pairs, 1, 2).reshape(x.shape)


def _hf_names(gguf, family, layers, tensors):
  """Hugging Face name -> name in the file; what has no such name keeps its own.

  The `gguf` package's table maps the other way: it knows each HF spelling.
  """
  arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
  table = gguf.get_tensor_name_map(arch, layers)
  hf = ["model.embed_tokens", "model.norm", "lm_head"]
  hf += [
    f"model.layers.{i}.{part}"
    for i in range(layers)
    for parts in BLOCKS.values()
    for part in parts
  ]
  stored = {table.get_name(name): name for name in hf}
  names = {}
  for name in tensors:
    stem, _, kind = name.rpartition(".")
    known = stem in stored
    names[f"{stored[stem]}.{kind}" if known else name] = name
  return names
