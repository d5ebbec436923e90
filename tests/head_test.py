"""A feature head in a folder: what comes back, where it fits, what it is told.

`feature_test.py` has its law and its cache.
"""

import dataclasses
import functools
import json

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import student_test as trained
from export_test import _change, _refused, _save, _student, _target
from pair_test import write_model
from part_test import ARCHITECTURE

from configs import tiny
from specjax import (
  export,
  generate,
  memory,
  pair,
  request,
  settings,
)
from specjax.drafters import feature
from specjax.models import exported, load, matrix, transformer, weights

V, D = trained.V, trained.D
IDS = (*range(0, 240, 3), 256)
HEADS = {
  "last": dict(features=(2,)),
  "three": dict(features=(0, 1, 2), ids=IDS),
  "deep": dict(features=(0, 2), layers=2, ids=IDS),
}
NAMES = pytest.mark.parametrize("name", HEADS)


@functools.cache
def _named(kind, name):
  head = heads.random(trained.teacher(kind), **HEADS[name])
  if head.ids is None and kind == "tied":  # no head of its own
    head.params.pop("head")
    head = head._replace(config=dataclasses.replace(head.config, tied=True))
  return head


def _saved(folder, kind="tied", name="three", **options):
  return _save(folder, _named(kind, name), trained.teacher(kind), **options)


def _config(folder, **draft):
  config = tiny.get_config()
  config.draft.update(name="feature", weights=str(folder), **draft)
  settings.check(config)
  return config


def _load(folder, model, dtype="float32", **draft):
  """The `pair.Pair` of a folder, as decode.py makes it."""
  opened = pair.opened(_config(folder, **draft), _target(model))
  return pair.load(opened, model, dtype=dtype)


# Round trips


@trained.KINDS
@NAMES
def test_every_number_comes_back(tmp_path, kind, name):
  """B17, B24: the tree is bit for bit what it was; tied heads are shared."""
  model, head = trained.teacher(kind), _named(kind, name)
  file = load.opened(str(_saved(tmp_path / "head", kind, name)), draft=True)
  assert file.lacks.features == head.features and file.lacks.ids == head.ids
  read = functools.partial(file.read, block=0, lent=load.borrowed(file, model))
  params, config = read(dtype=jnp.float32, untie=False)
  assert config == head.config
  assert params.pop("embed") is model.params["embed"]
  same = lambda a, b: np.testing.assert_array_equal(a, b, strict=True)
  assert jax.tree.structure(params) == jax.tree.structure(head.params)
  jax.tree.map(same, params, head.params)
  assert ("head" in params) == (not head.config.tied)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights(tmp_path, dtype):
  """What comes back is `rounded`; it decodes beside a bfloat16 target."""
  model, head = trained.teacher(), _named("tied", "deep")
  folder = _saved(tmp_path / "head", name="deep", dtype=dtype)
  file = load.opened(str(folder), draft=True)
  lent = load.borrowed(file, model)
  params, _ = file.read(dtype=jnp.float32, untie=False, block=0, lent=lent)
  want = {**export.rounded(head.params, dtype), "embed": params["embed"]}
  jax.tree.map(np.testing.assert_array_equal, params, want)
  bfloat16 = jnp.dtype(jnp.bfloat16)
  narrow = model._replace(
    target=transformer.make(model.loaded, bfloat16),
    params=jax.tree.map(lambda x: x.astype(bfloat16), model.params),
  )
  loaded = _load(folder, narrow, "bfloat16")
  leaves = jax.tree.leaves(loaded.params(None))
  assert {x.dtype for x in leaves} == {bfloat16}
  out = _speculate(narrow, loaded.drafter, loaded.params(None), num_draft=3)
  assert out.length.tolist() == [40] * 3


WIDE = ARCHITECTURE | dict(hidden_size=64, tie_word_embeddings=True)


def _wide():
  """A target whose matrices are in blocks, and a head for it."""
  model = load.model(load.random(WIDE))
  if not model.loaded.block:
    pytest.skip("matrices are whole here")
  return model, heads.random(model, **HEADS["deep"])


def test_in_blocks(tmp_path):
  """Where a processor wants them; the numbers are the same."""
  model, head = _wide()
  file = load.opened(str(_save(tmp_path / "head", head, model)), draft=True)
  params, config = load.read(file, dtype=jnp.float32, target=model)
  assert params["fuse"]["kernel"].shape == (1, 2 * 64, 64)
  assert params["join"]["kernel"].shape == (1, 2 * 64, 64)
  shape = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  want = feature.shapes(feature.Config(config, head.features))
  assert shape(params) == shape(want)
  for name in ("fuse", "join"):
    np.testing.assert_array_equal(
      matrix.whole(params[name]["kernel"]), head.params[name]["kernel"]
    )


def test_what_it_shares_is_the_targets_memory(tmp_path):
  """And a head tied to it is the copy that was made when that was read."""
  model = load.model(load.random(WIDE))
  assert load.untie_here() and not model.loaded.tied
  head = heads.random(model, features=(2,))
  head = head._replace(config=dataclasses.replace(head.config, tied=True))
  head.params.pop("head")
  loaded = _load(_save(tmp_path / "head", head, model), model)
  params = loaded.params(None)
  assert params["embed"] is model.params["embed"]
  assert params["head"] is model.params["head"]


def _speculate(model, drafter, params, **options):
  ask = request.make(
    [[1, 2], [3], [4, 5, 6]], max_new=40, temperature=[0.0, 0.0, 1.0], seed=3
  )
  return generate.speculative(
    *(model.target, drafter, model.params, params, ask),
    max_new_tokens=40,
    verifier="coupled",
    **options,
  )


@pytest.mark.parametrize(
  "kind, name",
  [
    ("tied", "three"),
    pytest.param("untied", "last", marks=pytest.mark.slow),
    pytest.param("untied here", "deep", marks=pytest.mark.slow),
  ],
)
def test_it_decodes_as_it_did_in_memory(tmp_path, kind, name):
  """Token for token, and round for round: greedy, and coupled at T = 1."""
  model, head = trained.teacher(kind), _named(kind, name)
  loaded = _load(_saved(tmp_path / "head", kind, name), model)
  want = _speculate(model, *heads.drafter(head, V), num_draft=3)
  got = _speculate(model, loaded.drafter, loaded.params(None), num_draft=3)
  for field in ("tokens", "length", "round", "accepted"):
    np.testing.assert_array_equal(getattr(got, field), getattr(want, field))
  np.testing.assert_allclose(got.overlap, want.overlap, atol=1e-4)
  plain = generate.autoregressive(
    *(model.target, model.params),
    request.make(
      [[1, 2], [3], [4, 5, 6]], max_new=40, temperature=[0.0, 0, 1], seed=3
    ),
    max_new_tokens=40,
  )
  np.testing.assert_array_equal(got.tokens, plain.tokens)


# What is written


def test_what_is_written(tmp_path):
  folder = _saved(tmp_path / "head")
  said = json.loads((folder / exported.FILE).read_text())
  assert said["features"] == [0, 1, 2] and said["embedding"] == "shared"
  names = set(safetensors.safe_open(folder / exported.WEIGHTS, "np").keys())
  own = {"fuse", "join", "token_norm", "feature_norm", "lm_head", "model.norm"}
  assert {f"{name}.weight" for name in own} <= names
  assert "model.embed_tokens.weight" not in names
  shapes = weights.num_parameters(_named("tied", "three").config, (0, 1, 2))
  stored = sum(
    x.size
    for x in safetensors.numpy.load_file(folder / exported.WEIGHTS).values()
  )
  assert shapes == stored + V * D
  card = (folder / "README.md").read_text()
  assert "--config.draft.name=feature --config.draft.weights=THIS" in card
  assert "| reads | outputs of the target's layers 0, 1, 2 |" in card
  assert f"| parameters | {shapes:,} |" in card
  assert "It reads the outputs of its target's layers 0, 1, 2" in card


def test_memory_counts_it(tmp_path):
  """The embedding once, and the prompts' features."""
  model, head = trained.teacher(), _named("tied", "three")
  folder = _saved(tmp_path / "head")
  draft = pair.opened(_config(folder), _target(model))
  shape = dict(dtype="float32", batch=3, slots=64)
  found = memory.estimate(model.config, draft=draft, untie=True, **shape)
  own = sum(x.nbytes for x in jax.tree.leaves(head.params))
  assert found["draft weights"] == own
  assert found["features"] == 4 * 3 * 64 * 3 * D
  assert found["draft cache"] * 3 == found["cache"]  # one layer of three


# Refusals


def test_another_method(tmp_path):
  """A head is no model and a model no head; what to type is said."""
  model = trained.teacher()
  head = _saved(tmp_path / "head")
  small = _save(tmp_path / "small", _student("tied", "both"))
  whole = write_model(tmp_path / "whole", vocab_size=V, tokens=V)
  config = _config(head)
  config.draft.name = "lm"
  message = _refused(pair.opened, config, _target(model))
  assert f"--config.draft.name=lm: {head} reads its target's hidden" in message
  assert message.endswith("type --config.draft.name=feature")
  for folder in (small, whole):
    message = _refused(_load, folder, model)
    assert f"{folder} is a language model, no head" in message
    assert message.endswith("type --config.draft.name=lm")


@pytest.mark.parametrize(
  "draft, message",
  [
    (dict(weights=""), "feature needs --config.draft.weights=FOLDER"),
    (dict(layers=(0,)), "draft.layers is for --config.draft.name=lm"),
    (dict(head=20), "draft.head is for --config.draft.name=lm"),
    (dict(num_tokens=-1), "draft.num_tokens must be at least 0"),
  ],
)
def test_a_config_that_cannot_be(draft, message):
  config = tiny.get_config()
  config.draft.update(name="feature", **{"weights": "somewhere", **draft})
  assert message in _refused(settings.check, config)


def test_it_is_no_target(tmp_path):
  folder = _saved(tmp_path / "head")
  message = _refused(load.opened, str(folder))
  assert "and reads its target's hidden states, no model by itself" in message


def test_another_target(tmp_path):
  """Of another width or depth, before any weight; of another embedding."""
  folder = _saved(tmp_path / "head")
  _change(folder, target__reference="hf://org/name")
  wide = ARCHITECTURE | dict(hidden_size=64)
  message = _refused(_load, folder, load.model(load.random(wide)))
  assert f"of {V} ids and width 32, the target's has {V} and 64" in message
  flat = ARCHITECTURE | dict(num_hidden_layers=2)
  message = _refused(_load, folder, load.model(load.random(flat)))
  assert "reads layer 2 of its target, this one has layers 0 to 1" in message
  assert "trained for hf://org/name" in message
  model = trained.teacher()
  embed = model.params["embed"].at[299, 31].multiply(1.01)
  other = model._replace(params=model.params | {"embed": embed})
  assert "this target has another one" in _refused(_load, folder, other)


def test_another_context(tmp_path):
  folder = _saved(tmp_path / "head")
  draft = pair.opened(_config(folder), _target(trained.teacher()))
  pair.check_context(draft, 512)
  message = _refused(pair.check_context, draft, 513)
  assert "the draft's context holds 512 tokens" in message


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(features={"0": 1}), "'features' is {'0': 1}"),
    (dict(features=[]), "'features' is []"),
    (dict(features=[0, -1, 2]), "'features' is [0, -1, 2]"),
    (dict(features=[0, "1", 2]), "'features' is [0, '1', 2]"),
    (dict(features=[0, True, 2]), "'features' is [0, True, 2]"),
    (dict(features=[0, 2]), "fuse.weight has shape [32, 96], the config"),
    (dict(features=None), "has a tensor 'feature_norm.weight' that its config"),
    (dict(embedding="own"), "a feature head's embedding is its target's"),
  ],
)
def test_a_damaged_specjax_json(tmp_path, changes, message):
  """Of features that are not said, a head would be read as a model."""
  folder = _saved(tmp_path / "head")
  _change(folder, **changes)
  found = _refused(load.opened, str(folder), draft=True)
  assert message in found and str(folder) in found


@pytest.mark.parametrize(
  "name", ["fuse", "join", "token_norm", "feature_norm", "lm_head"]
)
def test_a_tensor_that_is_missing_or_of_another_shape(tmp_path, name):
  """B17: by name, before anything is read."""
  folder = _saved(tmp_path / "head")
  path, name = folder / exported.WEIGHTS, f"{name}.weight"
  whole = safetensors.numpy.load_file(path)
  part = {k: x for k, x in whole.items() if k != name}
  safetensors.numpy.save_file(part, path)
  message = _refused(load.opened, str(folder), draft=True)
  assert f"{folder} has no tensor {name} (1 missing)" in message
  cut = np.ascontiguousarray(whole[name][:-1])
  safetensors.numpy.save_file(part | {name: cut}, path)
  message = _refused(load.opened, str(folder), draft=True)
  assert f"{name} has shape {list(cut.shape)}, the config implies" in message
