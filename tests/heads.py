"""Feature heads that nobody trained: random numbers, or a target's own."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax import export, student
from specjax.drafters import feature
from specjax.models import load


def random(model, *, features, ids=None, layers=1, seed=1):
  """A `Student` whose every number matters, beside a loaded target."""
  model = load.whole(model)
  config = _config(model, ids, layers)

  def leaf(path, spec):
    key = jax.random.key(seed + sum(map(ord, str(path))))
    x = 0.3 * jax.random.normal(key, spec.shape)
    return 1 + x if path[-1].key == "scale" else x

  tree = feature.shapes(feature.Config(config, features))
  params = jax.tree_util.tree_map_with_path(leaf, tree)
  return _student(model, config, params, features, ids)


def made(model, *, features, ids=None, layers=1, token=1.0, noise=0.0):
  """A `Student` of the target's last layers, norm and head.

  Its layers see `token` of the token and the rest of the features' mean. Where
  a target's layers do little it says about what the target says.
  """
  model = load.whole(model)
  config, params = _config(model, ids, layers), model.params
  depth, F, D = model.loaded.layers, len(features), model.config.width
  one, scale = jnp.eye(D), lambda: {"scale": jnp.ones(D)}
  head = params["head"] if "head" in params else params["embed"].T
  own = [params[f"layer_{i}"] for i in range(depth - layers, depth)]
  tree = {f"layer_{i}": layer for i, layer in enumerate(own)} | {
    "norm": params["norm"],
    "head": head if ids is None else head[:, jnp.array(ids)],
    "fuse": {"kernel": jnp.concatenate([one / F] * F)},
    "join": {"kernel": jnp.concatenate([token * one, (1 - token) * one])},
    "token_norm": scale(),
    "feature_norm": scale(),
  }
  keys = iter(jax.random.split(jax.random.key(0), 99))
  tree = jax.tree.map(
    lambda x: x + noise * x.std() * jax.random.normal(next(keys), x.shape), tree
  )
  return _student(model, config, tree, features, ids)


def _config(model, ids, layers):
  size = len(ids) if ids else None
  return dataclasses.replace(
    model.loaded, layers=layers, tied=False, head_size=size
  )


def _student(model, config, params, features, ids):
  shared = {"embed": model.params["embed"]}
  params = {k: x for k, x in params.items() if k not in shared}
  return student.Student(None, config, shared, params, ids, features)


def saved(folder, model, head):
  """The name of the folder that a head was exported to."""
  options = dict(teacher=model, reference="random", card={})
  export.save(folder, head, head.params, **options)
  return str(folder)


def drafter(head, vocab_size):
  """(`Drafter`, its parameters) of a head."""
  architecture = feature.Config(head.config, head.features)
  tree = student.merged(head.shared, head.params)
  return feature.make(architecture, vocab_size, ids=head.ids), tree
