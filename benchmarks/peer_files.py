"""The same weights for every system: a folder for transformers, GGUF files.

The target's own file is read by our loader and written out in float32, in
Hugging Face layout and as GGUF, the latter in F16 and Q8_0 too. What is written
is read again and compared, number by number, before anything is timed.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy

from specjax import pair
from specjax.errors import UserError
from specjax.models import describe, hub, load, weights
from specjax.models import gguf as ours

CLASSES = {
  "llama": "LlamaForCausalLM",
  "mistral": "MistralForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "gemma2": "Gemma2ForCausalLM",
  "gemma3_text": "Gemma3ForCausalLM",
}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7}  # llama.cpp's general.file_type


def folder_of(reference, root=""):
  """The folder that a reference's copies are kept in."""
  path = hub.resolve(reference)
  stat = path.stat()
  key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
  name = hashlib.sha256(key.encode()).hexdigest()[:12]
  return Path(root or hub.cache_folder() / "peers") / name


def needed(reference, systems, root=""):
  """{library or precision: path} of what some `System`s read."""
  folder, found = folder_of(reference, root), {}
  for system in systems:
    if system.library == "transformers":
      found["transformers"] = folder / "hf"
    if system.library == "llama.cpp":
      kind = system.precision("F32")
      found[kind] = folder / f"{kind}.gguf"
  return found


def write(reference, paths, note):
  """Write what is not there yet; `note` is told what, and how large.

  Args:
    paths: of `needed`.

  Returns:
    {library or precision: why there is none}.
  """
  source, left_out = load.source(reference), {}
  for kind, path in paths.items():
    if kind != "transformers" and hub.resolve(reference).is_dir():
      left_out[kind] = "needs a target that is a GGUF file"
    elif not path.exists():
      note(f"writing {path}")
      fill = _write_folder if kind == "transformers" else _write_gguf
      whole(path, lambda new, fill=fill, kind=kind: fill(source, kind, new))
    if path.exists():
      note(f"{path}: {size(path) / 1e6:.0f} MB")
  return left_out


def whole(path, fill):
  """Make a file or folder by `fill(path to write)`, all of it or nothing."""
  path.parent.mkdir(parents=True, exist_ok=True)
  try:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
      new = Path(scratch) / path.name
      fill(new)
      os.rename(new, path)
  except OSError as e:
    raise UserError(f"cannot write {path}: {e.strerror}") from e


def size(path):
  """Bytes of a file or folder."""
  files = path.rglob("*") if path.is_dir() else [path]
  return sum(file.stat().st_size for file in files)


def _write_folder(source, kind, folder):
  del kind
  tensors = {name: source.read(name) for name in _names(source)}
  write_hf(folder, source.config, tensors)


def _names(source):
  return [name for leaf in weights.plan(source.config) for name in leaf.parts]


def write_hf(folder, config, tensors):
  """Write a folder that transformers reads, without a tokenizer."""
  folder.mkdir()
  found = describe.to_hf(config)
  found["architectures"] = [CLASSES[found["model_type"]]]
  (folder / "config.json").write_text(json.dumps(found, indent=1))
  tensors = {
    name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()
  }
  path = folder / "model.safetensors"
  safetensors.numpy.save_file(tensors, path, {"format": "pt"})


def _write_gguf(source, kind, path):
  """Copy a GGUF file's metadata; its matrices are stored as `kind`."""
  reader = gguf.GGUFReader(source.where)
  field = reader.fields["general.architecture"]
  writer = gguf.GGUFWriter(path, field.contents())
  writer.add_file_type(_FILE_TYPES[kind])
  skipped = {"general.architecture", "general.file_type", "general.alignment"}
  for field in reader.fields.values():
    if field.name in skipped or field.name.startswith("GGUF."):
      continue
    array = field.types[0] == gguf.GGUFValueType.ARRAY
    writer.add_key_value(
      field.name,
      field.contents(),
      field.types[0],
      sub_type=field.types[-1] if array else None,
    )
  for tensor in reader.tensors:
    x = ours.dequantise(tensor)
    stored = gguf.GGMLQuantizationType[kind if x.ndim > 1 else "F32"]
    data = gguf.quantize(x, stored)
    writer.add_tensor(tensor.name, data, raw_dtype=stored)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def digest(reference):
  """sha256 of all tensors of a reference as float32, under their HF names."""
  source, found = load.source(str(reference)), hashlib.sha256()
  for name in sorted(_names(source)):
    x = np.ascontiguousarray(source.read(name), np.float32)
    found.update(f"{name} {x.shape}".encode())
    found.update(x.tobytes())
  return found.hexdigest()


def check(reference, paths):
  """Return the digest that the target and its float32 copies share.

  Raises:
    UserError: a copy has other numbers.
  """
  want = digest(reference)
  for kind, path in paths.items():
    exact = kind in ("transformers", "F32") and path.exists()
    if exact and digest(path) != want:
      raise UserError(f"{path} has other weights than the target; remove it")
  return want


def assistant(draft, model, path):
  """Write a draft as a model that transformers can assist with.

  A head of some ids gets rows for the others, which transformers must have: the
  mean of its rows. Its logit is the mean of the logits, so that the largest
  stays the same: greedy drafts are those of the draft itself.

  Args:
    draft: its folder; model: the target, a `load.Model`; path: to write.

  Raises:
    UserError: it reads hidden states of the target: no model at all.
  """
  opened = load.opened(draft, draft=True)
  if pair.features(opened):
    raise UserError("reads hidden states of its target; no such assistant")
  dtype = model.params["embed"].dtype
  own = load.whole(load.model(opened, dtype=dtype, target=model))
  tensors = dict(weights.tensors(own.loaded, own.params))
  ids = opened.lacks.ids if opened.lacks else None
  if ids is not None:
    head = tensors["lm_head.weight"]
    full = np.tile(head.mean(0), (own.config.vocab_size, 1))
    full[list(ids)] = head
    tensors["lm_head.weight"] = full
  shutil.rmtree(path, ignore_errors=True)
  whole(path, lambda new: write_hf(new, own.loaded, tensors))
