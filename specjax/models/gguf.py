"""Open a GGUF file: one file with weights, architecture and tokenizer.

Tensors are presented under Hugging Face's names and layout. llama.cpp's
converter stores the rows of Llama's q and k projections permuted for its
interleaved rotary embedding, and 1 + the scales of Gemma's norms; that is
undone here. Loaded as stored, such a file gives fluent nonsense.
"""

import re

import gguf
import numpy as np

from specjax.errors import UserError
from specjax.models import families, tokenizer, weights

_PERMUTED = {"llama": ("attn_q", "attn_k")}  # architecture -> its permuted ones
_ROPE_FACTORS = "rope_freqs.weight"
_CHUNK = 2**18  # numbers dequantised at a time: what stays in a CPU's cache


def open_file(path):
  """Return the checked `Source` of a file; tensors are dequantised when read.

  Raises:
    UserError: the file is corrupt or truncated, holds a model, tokenizer or
      quantisation that is not known, or other tensors than it describes.
  """
  fields, tensors = _parse(path)
  _check_types(path, tensors.values())
  factors = tensors.get(_ROPE_FACTORS)
  config = families.from_gguf(
    fields,
    tensors,
    None if factors is None else dequantise(factors),
    where=str(path),
  )
  family = fields["general.architecture"]
  names = _hf_names(family, tensors, config.post_norms)

  def read(name):
    stored = tensors[names[name]]
    x = dequantise(stored)
    block = stored.name.split(".")[-2]
    if block in _PERMUTED.get(family, ()):
      heads = config.heads if block == "attn_q" else config.kv_heads
      x = unpermute(x, heads)
    if config.norm_offset and stored.name.endswith("norm.weight"):
      x = x - 1
    return x

  return weights.checked(
    weights.Source(
      where=str(path),
      config=config,
      shapes={hf: _shape(tensors[name]) for hf, name in names.items()},
      read=read,
      tokenizer=lambda: tokenizer.from_gguf(fields),
    )
  )


def unpermute(x, heads):
  """Rows from interleaved rotary pairs (2i, 2i + 1) to halves (i, i + d / 2).

  Args:
    x: [heads * head_dim, ...] as stored.
  """
  pairs = x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:])
  return np.swapaxes(pairs, 1, 2).reshape(x.shape)


def dequantise(tensor):
  """Return the float32 values of a `gguf.ReaderTensor`.

  `gguf.dequantize` works on 16 rows at a time and holds all pieces twice. Given
  a few thousand blocks as one row it is three times faster and holds one.
  """
  block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]  # numbers, bytes
  stored = tensor.data.reshape(-1).view(np.uint8)
  stored = stored.reshape(-1, size)  # [blocks, bytes]
  values = np.empty((len(stored), block), np.float32)
  step = _CHUNK // block
  for at in range(0, len(stored), step):
    row = stored[at : at + step].reshape(1, -1)
    x = gguf.dequantize(row, tensor.tensor_type)
    values[at : at + step] = x.reshape(-1, block)
  return values.reshape(_shape(tensor))


class _Reader(gguf.GGUFReader):
  """The library's reader, which refuses to look behind the end of the file.

  As it comes, it takes what lies there for empty numbers and goes on, so that
  a wrong count in the header keeps it busy for ever.
  """

  def _get(self, offset, dtype, count=1, override_order=None):
    end = int(offset) + np.dtype(dtype).itemsize * int(count)
    if end > self.data.size:
      raise ValueError(f"it has {self.data.size} bytes, but needs {end}")
    if isinstance(self.data, np.memmap):  # whose views cost twice as much
      self.data = self.data.view(np.ndarray)
    return super()._get(offset, dtype, count, override_order)

  def _get_field_parts(self, orig_offs, raw_type):
    if raw_type != gguf.GGUFValueType.ARRAY:
      return super()._get_field_parts(orig_offs, raw_type)
    kind = self._get(orig_offs, np.uint32)
    length = self._get(orig_offs + 4, np.uint64)
    if kind[0] == gguf.GGUFValueType.STRING:
      return super()._get_field_parts(orig_offs, raw_type)
    # Numbers in one piece, not one by one: a count that is wrong, yet within
    # the file, would fill the memory with objects.
    dtype = self.gguf_scalar_to_np.get(kind[0])
    if dtype is None:
      raise ValueError(f"an array of type {kind[0]}")
    values = self._get(orig_offs + 12, dtype, length[0])
    types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind[0])]
    return 12 + values.nbytes, [kind, length, values], [2], types


def _parse(path):
  """Return metadata, key -> value, and tensors, name -> `ReaderTensor`."""
  try:
    with np.errstate(over="raise"):  # sums that wrap point back into the file
      reader = _Reader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    if reader.byte_order != "I":
      raise ValueError("it is big-endian")
    _check_places(reader)
  except (LookupError, ValueError, ArithmeticError, OSError) as e:
    reason = " ".join(str(e).split())
    raise UserError(
      f"{path} is corrupt, truncated or no GGUF file: {reason}"
    ) from e
  if fields.get("split.count", 0) not in (0, 1):
    raise UserError(
      f"{path} is one of several parts; join them: llama-gguf-split --merge"
    )
  return fields, {tensor.name: tensor for tensor in reader.tensors}


def _check_places(reader):
  """Tensors follow one another, as llama.cpp demands: none overlap."""
  end = int(reader.data_offset)
  for tensor in reader.tensors:
    if tensor.data_offset != end:
      raise ValueError(
        f"{tensor.name!r} is at byte {tensor.data_offset}, not at {end}"
      )
    end += -(-tensor.n_bytes // int(reader.alignment)) * int(reader.alignment)


def _check_types(path, tensors):
  for tensor in tensors:
    kind = tensor.tensor_type
    size = gguf.GGML_QUANT_SIZES[kind][1]
    try:
      gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError as e:
      raise UserError(
        f"{path}: {tensor.name!r} is stored as {kind.name}; F32, F16, BF16,"
        " Q8_0, Q4_0, Q4_1 and K-quants can be read"
      ) from e


def _shape(tensor):
  return tuple(tensor.shape[::-1].tolist())  # GGUF lists the last axis first


def _hf_names(family, tensors, post_norms):
  """Hugging Face name -> name in the file; what has no such name keeps its own.

  The `gguf` package's table maps the other way: it knows each HF spelling. One
  block of it serves all.
  """
  arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
  table = gguf.get_tensor_name_map(arch, 1)
  hf = ["model.embed_tokens", "model.norm", "lm_head"]
  blocks = weights.blocks(post_norms).values()
  hf += [f"model.layers.0.{part}" for block in blocks for part in block]
  known = {table.get_name(name): name for name in hf}
  known.pop(None, None)  # what this architecture does not have
  names = {}
  for name in tensors:
    stem, _, kind = name.rpartition(".")
    layer = re.match(r"blk\.(0|[1-9]\d*)\.", stem)
    first = f"blk.0.{stem[layer.end() :]}" if layer else stem
    new = known.get(first, stem)
    if layer and first in known:
      new = new.replace(".0.", f".{layer[1]}.", 1)
    names[f"{new}.{kind}" if first in known else name] = name
  return names
