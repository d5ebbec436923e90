"""A mesh of devices, and where on it the arrays of a run lie.

A layout is all that this is: the programs are those of one device, arrays are
placed at the edges, and XLA cuts the work and adds what has to be exchanged
(Auto axes; GSPMD, Xu et al. 2021, arXiv:2105.04663). Axis "data" goes over the
rows of a batch; axis "model" over heads, the MLP's hidden dimension and the
vocabulary, one sum over devices behind attention and one behind the MLP
(Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053). What an axis does not
divide is replicated, and `undivided` says so. On one device there is no mesh:
None, and nothing is touched.
"""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.cache import KV, Pieces, apart
from specjax.errors import UserError
from specjax.models import matrix

DATA, MODEL = AXES = "data", "model"

# An array by the end of its path -> what of it goes over "model", which of its
# dimensions that is. The columns of a fused matrix are in `matrix.order`, so
# that each device has its heads' q, k and v, or its units' gate and up.
_RULES = {
  ("embed",): ("vocabulary", 0),
  ("head",): ("logits", 1),
  ("qkv", "kernel"): ("heads", 1),
  ("qkv", "bias"): ("heads", 0),
  ("out", "kernel"): ("heads", 0),
  ("gate_up", "kernel"): ("hidden", 1),
  ("gate_up", "bias"): ("hidden", 0),
  ("down", "kernel"): ("hidden", 0),
  # of a `drafters.feature` head
  ("fuse", "kernel"): ("width", 0),
  ("join", "kernel"): ("width", 0),
}


def sizes(mesh):
  """(devices of "data", devices of "model"); (1, 1) of None."""
  return (1, 1) if mesh is None else tuple(mesh.shape[a] for a in AXES)


def text(mesh):
  """'2x4'."""
  return "x".join(map(str, sizes(mesh)))


def check(config, *batches):
  """Raise UserError, naming the key, unless a config's mesh is one.

  No device is asked for. Rows that the axis "data" does not divide would be
  computed on every device: the batch has to be another.

  Args:
    batches: keys of the config, each a number of rows.
  """
  asked = tuple(config.mesh)
  if len(asked) != 2 or not all(type(n) is int and n > 0 for n in asked):
    raise UserError(
      "--config.mesh must be two numbers of devices, (data, model), such as"
      f" 2,4, got {','.join(map(str, asked)) or 'nothing'}"
    )
  data = asked[0]
  for key in batches:
    group, _, name = key.rpartition(".")
    rows = (config[group] if group else config)[name]
    if rows % data:
      near = max(round(rows / data), 1) * data
      raise UserError(
        f"--config.{key}={rows} is not divided by the {data} devices of"
        f" --config.mesh={asked[0]},{asked[1]}; type --config.{key}={near}"
      )


def make(config):
  """Return the mesh of a config, None for one device.

  Raises:
    UserError: there are not so many devices.
  """
  data, model = shape = tuple(config.mesh)
  need, have, processes = data * model, jax.device_count(), jax.process_count()
  if need > have or (processes > 1 and need != have):
    there = f"there {'is' if have == 1 else 'are'} {have}"
    if processes > 1:
      there += f" in {processes} processes, and each has to work"
    raise UserError(
      f"--config.mesh={data},{model} needs {need} devices, {there}; type"
      f" --config.mesh={have},1 or another product of {have}"
    )
  if need == 1:
    return None
  devices = jax.devices()[:need]
  types = (AxisType.Auto, AxisType.Auto)
  return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)


def counts(config):
  """What "model" has to divide, of a `transformer.Config`."""
  return {
    "heads": config.kv_heads,  # query heads stay with the key head they share
    "hidden": config.hidden,
    "vocabulary": config.vocab_size,
    "logits": config.head_size or config.vocab_size,
    "width": config.width,
  }


def undivided(mesh, config, whose=""):
  """One line about what of a model is replicated over "model", or None."""
  _, model = sizes(mesh)
  found = {k: n for k, n in counts(config).items() if n % model}
  found.pop("width", None)  # a feature head's own, told by nothing else
  if config.head_size is None:
    found.pop("logits", None)
  if not found:
    return None
  name = {"heads": "key and value heads", "hidden": "hidden units"}
  each = [f"{n:,} {name.get(k, k)}" for k, n in found.items()]
  return (
    f"mesh {text(mesh)}: {model} devices do not divide"
    f" {whose}{' and '.join(each)}: replicated on each of them"
  )


def spec(mesh, config, path, shape, *, over_data=False):
  """The PartitionSpec of an array of a parameter tree.

  Args:
    config: the tree's `transformer.Config`; path: its keys, or their end.
    over_data: also cut over "data", as what is trained and its moments are, so
      that their memory goes down with every device.
  """
  data, model = sizes(mesh)
  found = [None] * len(shape)
  what, at = _RULES.get(path[-2:]) or _RULES.get(path[-1:]) or (None, None)
  if what and counts(config)[what] % model == 0 and shape[at] % model == 0:
    found[at] = MODEL
  free = [i for i, n in enumerate(shape) if not (found[i] or n % data)]
  if over_data and len(shape) > 1 and free:
    found[max(free, key=lambda i: shape[i])] = DATA
  return P(*found)


def map_named(of, tree):
  """Map (path of keys, leaf) -> leaf over a tree of dicts."""
  return jax.tree_util.tree_map_with_path(
    lambda keys, x: of(tuple(key.key for key in keys), x), tree
  )


def cut(mesh, config):
  """The `transformer.Config` of a tree that `put` has placed."""
  return dataclasses.replace(config, shards=sizes(mesh)[1])


def order(config, path, x):
  """The places of a leaf's columns in the file's order; see `matrix.order`."""
  shards = matrix.shards(config).get(path[-2]) if path[1:] else None
  if shards is None:
    return np.arange(x.shape[-1])
  return matrix.order(matrix.widths(config)[path[-2]], shards)


def put(mesh, config):
  """Return (path, array as a file has it) -> array on the mesh.

  Each process hands its own devices their part and no more.

  Args:
    config: of the file; that of the tree is `cut`'s.
  """
  config = cut(mesh, config)
  place = _placing(mesh, config)

  def put(path, x):
    at = order(config, path, x)
    return place(path, x if (np.diff(at) == 1).all() else x[..., at])

  return put


def params(mesh, config, tree):
  """Return a parameter tree with its arrays where `put` has them."""
  return map_named(_placing(mesh, config), tree)


def _placing(mesh, config):
  def place(path, x):
    return put_one(x, NamedSharding(mesh, spec(mesh, config, path, x.shape)))

  return place


def put_one(x, sharding):
  """An array that lies so; itself if it does."""
  if isinstance(x, jax.Array) and (
    jax.process_count() == 1 or not x.is_fully_addressable
  ):
    return jax.device_put(x, sharding)
  x = np.asarray(x)
  return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])


def rows(mesh, tree):
  """Constrain arrays [B, ...] in a program: B over "data", if it divides B.

  Of a `cache.KV` [B, G, ...] also G over "model".
  """
  data, model = sizes(mesh)

  def lay(x):
    if isinstance(x, KV):
      return KV(*(_constrained(mesh, y, _cached(y, data, model)) for y in x))
    return _constrained(mesh, x, _by_row(x, data))

  return jax.tree.map(lay, tree, is_leaf=lambda x: isinstance(x, KV))


def _by_row(x, data):
  return P(DATA) if x.ndim and x.shape[0] % data == 0 else P()


def _cached(x, data, model):
  over = zip((DATA, MODEL), x.shape[:2], (data, model), strict=True)
  return P(*(axis if n % size == 0 else None for axis, n, size in over))


def _logits(x, data, model):
  """Of [B, ..., V]: rows over "data", the vocabulary over "model"."""
  rest = [None] * (x.ndim - 2)
  over = [None if x.shape[-1] % model else MODEL]
  return P(DATA if x.shape[0] % data == 0 else None, *rest, *over)


def _constrained(mesh, x, how):
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, how))


@functools.cache  # it is static in jitted programs
def target(of, mesh):
  """Return a `Target` that works on a mesh; itself on one device.

  Three places are held: what enters (tokens and cache, by the row), what
  leaves (hidden states), and the logits, whose laws are then made by the row.
  """
  if mesh is None:
    return of
  lay = functools.partial(rows, mesh)

  def apply(params, tokens, positions, cache, *, features=()):
    tokens, positions = lay((tokens, positions))
    found = of.apply(params, tokens, positions, cache, features=features)
    return lay(found)

  def unembed(params, hidden):
    logits = of.unembed(params, lay(hidden))
    # made where the head's columns are; else the head itself would travel
    return lay(_constrained(mesh, logits, _logits(logits, *sizes(mesh))))

  def init_cache(batch, slots):
    return lay(tuple(apart(x, batch) for x in of.init_cache(batch, slots)))

  return of._replace(
    apply=apply, unembed=unembed, init_cache=init_cache, place=lay
  )


@functools.cache  # as above
def drafter(of, mesh):
  """Return a `Drafter` whose state has its caches laid over a mesh."""
  if mesh is None:
    return of

  def init(params, prompt, length, taps, slots):
    state = of.init(params, prompt, length, taps, slots)
    is_cache = lambda x: isinstance(x, KV | Pieces)
    wide = lambda x: apart(x, len(prompt)) if is_cache(x) else x
    return rows(mesh, jax.tree.map(wide, state, is_leaf=is_cache))

  return of._replace(init=init)
