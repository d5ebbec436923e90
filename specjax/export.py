"""Write a trained draft as a folder in Hugging Face layout, all of it or none.

A draft with the whole vocabulary and an embedding of its own is a model like
any other, and transformers reads it. Another one lacks what its target has: it
gets specjax.json, see `models/exported.py`, and is a draft of that target only.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import safetensors
import safetensors.numpy

from specjax import card as cards
from specjax import data, multihost, overlap
from specjax.errors import UserError
from specjax.models import describe, exported, hub, weights

DTYPES = ("float32", "bfloat16", "float16")
_CARD = "README.md"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_TOKENIZER = "tokenizer.json"
_COPIED = (  # of a target's folder, those that are there
  _TOKENIZER,
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.jinja",
)
_FILES = {_CARD, _CONFIG, _GENERATION, *_COPIED}
_FILES |= {exported.MODEL, exported.WEIGHTS, exported.FILE, exported.IDS}
_FILES |= {overlap.FILE}


def rounded(params, dtype):
  """Return parameters as they are read back from an export, in float32.

  What is reported of an export is to be measured with these.
  """
  _check_dtype(dtype)
  if dtype == "float32":
    return params
  return jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), params)


def save(
  folder,
  draft,
  params,
  *,
  teacher,
  reference,
  card,
  prompts=None,
  dtype="float32",
):
  """Write a draft's folder; one that is there is replaced when all is written.

  Files are written in a hidden folder beside it, which then gets its name. A
  run that is killed may leave that behind, between the two renames with the
  earlier export in it.

  Args:
    folder: a folder of an earlier export, or nothing yet.
    draft: a `Student`; params: what became of its `params`.
    teacher: the target, a `load.Model`; reference: the string that names it.
    card: {title: text, or {name: value}}: what README.md is to tell, such as
      metrics, data and the command.
    prompts: of `overlap.of`, None: unknown.
    dtype: of the stored weights; a narrow one rounds them, and the card says
      so.

  Raises:
    UserError: there is something else at `folder`, it cannot be written, a
      parameter is not finite, in this dtype or at all.
  """
  folder = Path(os.path.realpath(folder))
  _check_dtype(dtype)
  check_folder(folder)
  params = multihost.fetch(params)
  tensors = _tensors(draft, params, dtype)
  lacks = _lacks(draft, teacher, reference)
  if not multihost.first():
    return

  def fill(new):
    _write_model(new, draft, tensors, lacks)
    _write_tokenizer(new, teacher, reference)
    if prompts is not None:
      overlap.write(new, prompts)
    text = cards.text(folder.name, draft, tensors, lacks, reference, card)
    (new / _CARD).write_text(text, encoding="utf-8")

  _replace(folder, fill)


def _replace(folder, fill):
  """Make a folder anew, with `fill(folder to write in)`, or leave it."""
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
      prefix=f".{folder.name}.", dir=folder.parent
    ) as scratch:
      new = Path(scratch) / "new"
      new.mkdir()  # unlike `scratch`, with the rights that folders get here
      fill(new)
      for file in new.iterdir():
        _sync(file)
      _put(new, folder, Path(scratch) / "old")
  except (OSError, safetensors.SafetensorError) as e:
    reason = getattr(e, "strerror", None) or e
    raise UserError(
      f"cannot write {folder}: {reason}; free space there, or choose another"
      " folder. What was there is unchanged"
    ) from e


def _check_dtype(dtype):
  if dtype not in DTYPES:
    names = ", ".join(DTYPES)
    raise UserError(f"an export is stored as one of {names}, got {dtype!r}")


def check_folder(folder):
  """Raise UserError if an export would overwrite anything but an export."""
  folder = Path(os.path.realpath(folder))
  if not folder.exists():
    return
  if not folder.is_dir():
    raise UserError(
      f"cannot export to {folder}: it is a file; choose another folder"
    )
  found = {p.name for p in folder.iterdir()}
  if found and not {_CONFIG} <= found <= _FILES:
    foreign = ", ".join(sorted(found - _FILES)[:3])
    why = f"holds {foreign}" if foreign else f"has no {_CONFIG}"
    raise UserError(
      f"cannot export to {folder}: there is something else than an earlier"
      f" export, it {why}; choose another folder"
    )


def _tensors(draft, params, dtype):
  """{Hugging Face name: array} of what is trained, in the stored dtype."""
  found = {}
  how = dict(skip=draft.shared, features=draft.features)
  for name, x in weights.tensors(draft.config, params, **how):
    with np.errstate(over="ignore"):
      found[name] = x.astype(dtype)
    if not np.isfinite(found[name].astype(np.float32)).all():
      limit = "" if not np.isfinite(x).all() else f" as {dtype}"
      raise UserError(
        f"{name} is not finite{limit}; export an earlier checkpoint"
        f"{' or as float32' if limit else ''}"
      )
  return found


def _lacks(draft, teacher, reference):
  """The `Exported` of a draft that is no model by itself, else None."""
  if draft.ids is None and not draft.shared and not draft.features:
    return None
  embed = draft.shared.get("embed")
  return exported.Exported(
    family=describe.to_hf(draft.config)["model_type"],
    reference=reference,
    target=data.fingerprint(teacher),
    embedding="own" if embed is None else "shared",
    digests={} if embed is None else exported.digests(embed),
    ids=draft.ids,
    features=draft.features,
  )


def _write_model(folder, draft, tensors, lacks):
  """Weights and their description."""
  config = describe.to_hf(draft.config)
  dtype = next(iter(tensors.values())).dtype.name
  config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": dtype}
  name, kind = exported.MODEL, "pt"
  if lacks:
    # whatever reads the type, the class or the file's name stops there
    config |= {"model_type": exported.MODEL_TYPE}
    config |= {"architectures": ["SpecjaxDraft"]}
    name, kind = exported.WEIGHTS, "specjax"
    exported.write(folder, lacks)
  _write_json(folder / _CONFIG, config)
  safetensors.numpy.save_file(tensors, folder / name, {"format": kind})
  # the library lets nobody else read it
  os.chmod(folder / name, (folder / _CONFIG).stat().st_mode)


def _write_tokenizer(folder, teacher, reference):
  """The target's tokenizer: its own files, or what they would be."""
  tok = teacher.tokenizer
  source = None if reference == "random" else hub.resolve(reference)
  if source is not None and source.is_dir():
    for name in _COPIED:
      if (source / name).is_file():
        shutil.copyfile(source / name, folder / name)
  else:
    tok.backend.save(str(folder / _TOKENIZER))
    config = {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "bos_token": tok.bos,
      "eos_token": tok.eos,
      "chat_template": tok.chat_template,
      "model_max_length": teacher.config.context,
      "clean_up_tokenization_spaces": False,
    }
    config = {k: x for k, x in config.items() if x is not None}
    _write_json(folder / "tokenizer_config.json", config)
  ends = {"eos_token_id": list(tok.stop_ids)}
  if tok.bos is not None:
    ends["bos_token_id"] = tok.backend.token_to_id(tok.bos)
  _write_json(folder / _GENERATION, ends)
  path = folder / _CONFIG
  _write_json(path, exported.load_json(path) | ends)


def _write_json(path, value):
  text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
  path.write_text(text, encoding="utf-8")


def _sync(path):
  with open(path, "rb") as file:
    os.fsync(file.fileno())


def _put(new, folder, old):
  """Give a folder its name; what had it goes to `old`, or stays."""
  try:
    if folder.exists():
      os.rename(folder, old)
    os.rename(new, folder)
  except BaseException:
    if old.exists() and not folder.exists():
      os.rename(old, folder)
    raise
