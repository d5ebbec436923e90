"""specjax.json: what a trained draft takes from its target, and which that is.

A draft whose head keeps some token ids, or whose embedding is its target's, is
no model by itself. Read as one it would be silently wrong: a head's row would
be taken for another token, an embedding that is not there for a new one. So
its weights have a file name and its config.json a model type that nothing else
reads, and specjax.json beside them says what is missing.
"""

import hashlib
import json
import reprlib
from typing import NamedTuple

import numpy as np

from specjax.errors import UserError

FILE, WEIGHTS, IDS = "specjax.json", "draft.safetensors", "ids.json"
MODEL = "model.safetensors"  # of an ordinary model
MODEL_TYPE = "specjax-draft"
FORMAT = 1
EMBEDDINGS = ("own", "shared")
_ROUNDED = ("bfloat16", "float16")


class Exported(NamedTuple):
  """What specjax.json says."""

  family: str  # model type of the layers
  reference: str  # of the target
  target: str  # `data.fingerprint` of the target, to know it by
  embedding: str  # one of EMBEDDINGS
  digests: dict  # of the shared embedding, {} if it is the draft's own
  ids: tuple | None  # the token of each logit, None: all
  features: tuple = ()  # layers of the target that a feature head reads


def digests(embed):
  """Return {dtype: sha256} of an embedding [V, D] rounded to narrower types.

  Weights are loaded in one of three types. Two loads are of the same embedding
  if they agree in a type that both can be rounded to.
  """
  known = [embed.dtype.name] if embed.dtype.name in _ROUNDED else _ROUNDED
  found = {}
  for name in known:
    x = np.asarray(embed.astype(name))
    digest = hashlib.sha256(repr(x.shape).encode())
    digest.update(x.tobytes())
    found[name] = digest.hexdigest()
  return found


def check_embedding(found, embed, where):
  """Raise UserError unless a target's embedding is the one that is missing."""
  ours = digests(embed)
  common = ours.keys() & found.digests.keys()
  target = f"it was trained for {found.reference}"
  if not common:
    raise UserError(
      f"{where}: cannot tell a {embed.dtype.name} embedding from the"
      f" {', '.join(found.digests)} one that it was trained with; decode with"
      " --config.dtype=float32 or as it was trained"
    )
  if any(ours[name] != found.digests[name] for name in common):
    raise UserError(
      f"{where} shares its target's embedding, and this target has another"
      f" one; {target}: choose that target or other draft weights"
    )


def weights(folder):
  """Name the file that holds the weights of a folder, or its only shard.

  It is FILE where that is lost: what holds a draft's weights cannot be read.
  """
  there = lambda name: (folder / name).is_file()
  if there(FILE):
    return WEIGHTS
  return FILE if there(WEIGHTS) and not there(MODEL) else MODEL


def lacking(missing, forms):
  """What a folder lacks, and what to do: see `weights`, or give other forms."""
  return f"{missing}; {_COPY if missing == FILE else forms}"


def refusal(folder, found):
  """Why such a draft is not opened as a model."""
  lacks = [f"knows {len(found.ids):,} ids"] if found.ids is not None else []
  lacks += ["shares its target's embedding"] * (found.embedding == "shared")
  return (
    f"{folder} is a draft that {' and '.join(lacks)}, no model by itself; give"
    f" it as --config.draft.weights with --config.target={found.reference}"
  )


def write(folder, found):
  """Write specjax.json, and ids.json where the vocabulary is trimmed."""
  value = {
    "format": FORMAT,
    "family": found.family,
    "target": {"reference": found.reference, "sha256": found.target},
    "embedding": found.embedding,
  }
  if found.embedding == "shared":
    value["embedding_sha256"] = found.digests
  if found.ids is not None:
    data = (json.dumps(list(found.ids)) + "\n").encode()
    (folder / IDS).write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    size = len(found.ids)
    value["vocabulary"] = {"file": IDS, "size": size, "sha256": sha256}
  text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
  (folder / FILE).write_text(text, encoding="utf-8")


def read(folder, config):
  """Return the `Exported` of a folder, None for an ordinary model's.

  Args:
    config: its parsed config.json.

  Raises:
    UserError: specjax.json is missing, damaged or of another format, or its
      token ids are not those that were written.
  """
  path, known = folder / FILE, config.get("model_type") == MODEL_TYPE
  if not path.is_file():
    if known:
      raise UserError(f"{folder} is a draft without its {FILE}; {_COPY}")
    return None
  value = load_json(path)
  if not known:
    raise _damaged(path, f"config.json beside it is no {MODEL_TYPE}'s")
  if value.get("format") != FORMAT:
    raise UserError(
      f"{path} has format {value.get('format')!r}, this reads {FORMAT}; export"
      " the draft again"
    )
  target = _get(path, value, "target", dict)
  embedding = _get(path, value, "embedding", str)
  if embedding not in EMBEDDINGS:
    raise _damaged(path, f"its embedding is {embedding!r}")
  shared = embedding == "shared"
  found = Exported(
    family=_get(path, value, "family", str),
    reference=_get(path, target, "reference", str),
    target=_get(path, target, "sha256", str),
    embedding=embedding,
    digests=_digests(path, value) if shared else {},
    ids=_ids(path, config, value) if "vocabulary" in value else None,
  )
  if found.ids is None and not shared:
    raise _damaged(path, "it says nothing that the draft lacks")
  return found


def _digests(path, value):
  found = _get(path, value, "embedding_sha256", dict)
  if not found.keys() & {*_ROUNDED}:
    raise _damaged(path, f"'embedding_sha256' is {reprlib.repr(found)}")
  return found


def _ids(path, config, value):
  """The token of each logit, checked against what was written."""
  said = _get(path, value, "vocabulary", dict)
  size = _get(path, said, "size", int)
  file = path.with_name(IDS)
  try:
    data = file.read_bytes()
  except OSError as e:
    raise UserError(f"cannot read {file}: {e.strerror}; {_COPY}") from e
  if hashlib.sha256(data).hexdigest() != _get(path, said, "sha256", str):
    raise _damaged(file, f"its sha256 is not the one in {FILE}")
  try:
    ids = json.loads(data)
  except (ValueError, RecursionError) as e:
    raise _damaged(file, "it is not valid JSON") from e
  most = config.get("vocab_size")
  fits = lambda i: type(i) is int and type(most) is int and 0 <= i < most
  if not isinstance(ids, list) or not all(map(fits, ids)) or not ids:
    raise _damaged(file, f"it must hold token ids below {most}")
  if len(set(ids)) < len(ids) or len(ids) != size:
    raise _damaged(file, f"it must hold {size} different ids")
  return tuple(ids)


def _get(path, value, key, kind):
  found = value.get(key)
  if type(found) is not kind:
    raise _damaged(path, f"{key!r} is {reprlib.repr(found)}")
  return found


_COPY = "copy the whole folder again, or export the draft again"


def _damaged(path, why):
  return UserError(f"{path} is damaged: {why}; {_COPY}")


def load_json(path):
  """Return the object that a JSON file holds.

  Raises:
    UserError: there is none.
  """
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except OSError as e:
    raise UserError(f"cannot read {path}: {e.strerror}") from e
  except (ValueError, RecursionError) as e:
    raise UserError(f"{path} is not valid JSON: {e}") from e
  if not isinstance(value, dict):
    raise UserError(f"{path} must hold an object, found {reprlib.repr(value)}")
  return value
