"""What a training config's `draft` asks for, before anything is read."""

import numpy as np

from specjax.errors import UserError
from specjax.models import exported


def check(asked):
  """Raise UserError for a config's `draft` that says no draft to train.

  What needs the target is left to `student.check_target`, what needs its data
  to `student.make`.
  """
  if asked.name not in ("lm", "feature"):
    raise UserError(
      f"--config.draft.name must be lm or feature, got {asked.name!r}"
    )
  for key in ("layers", "features"):
    if not all(type(i) is int for i in asked[key]):
      raise UserError(
        f"--config.draft.{key} must be layer numbers, such as 0,1,29, got"
        f" {','.join(map(str, asked[key]))}"
      )
  if asked.head < 0:
    raise UserError(f"--config.draft.head must be at least 0, got {asked.head}")
  (_check_feature if asked.name == "feature" else _check_lm)(asked)


def _check_lm(asked):
  starts = ("weights", "layers", "architecture")
  given = [key for key in starts if asked[key]]
  if len(given) != 1:
    # a tuple has no blank on the command line
    fewer = "; type --config.draft.layers='()'" if "layers" in given else ""
    raise UserError(
      "a draft starts from exactly one of --config.draft.weights=REF,"
      " --config.draft.layers=0,1 and draft.architecture, a dict in the config;"
      f" got {' and '.join(given) or 'none'}{fewer}"
    )
  if asked.embedding not in exported.EMBEDDINGS:
    raise UserError(
      f"--config.draft.embedding must be own or shared, got {asked.embedding!r}"
    )
  for key in ("features", "depth_weights"):
    if asked[key]:
      raise UserError(
        f"--config.draft.{key} is for --config.draft.name=feature: a language"
        " model reads no features and is the same at every depth"
      )


def _check_feature(asked):
  if asked.architecture or (asked.weights and asked.layers):
    raise UserError(
      "a feature head starts from --config.draft.weights=FOLDER, an earlier"
      " one, or from --config.draft.layers=-1, one or two of the target's;"
      " leave the rest away"
    )
  if len(asked.layers) > 2:
    raise UserError(
      "a feature head has one or two layers of its own; type"
      f" --config.draft.layers=-1, got {','.join(map(str, asked.layers))}"
    )
  if asked.embedding != "shared":
    raise UserError(
      "a feature head reads the target's embedding; type"
      f" --config.draft.embedding=shared, got {asked.embedding!r}"
    )
  if not asked.features and not asked.weights:
    raise UserError(
      "a feature head reads some of the target's layers; type"
      " --config.draft.features=-1 for the last, or name a low, a middle and a"
      " high one"
    )
  try:
    weights = np.array(asked.depth_weights, float)
    right = weights.ndim == 1 and np.isfinite(weights).all()
    right = right and weights.sum() > 0 and (weights >= 0).all()
  except (TypeError, ValueError):
    right = False
  if not right:
    raise UserError(
      "--config.draft.depth_weights must be a number >= 0 for each depth that"
      " the head is unrolled to, such as 1.0,0.8,0.64, got"
      f" {asked.depth_weights}"
    )
