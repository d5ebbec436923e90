"""A model of some layers of another: the same arrays, the layers' own sum."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import generate, request
from specjax.drafters import lm
from specjax.errors import UserError
from specjax.models import load, transformer

ARCHITECTURE = dict(
  model_type="llama",
  vocab_size=300,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=8,
  max_position_embeddings=512,
  rms_norm_eps=1e-5,
  rope_theta=1e4,
)
TOKENS = np.random.default_rng(0).integers(0, 300, (2, 20))


@functools.cache
def _model(kind):
  """Tied, untied as the file has it, or untied when it was read (B24)."""
  architecture = ARCHITECTURE | dict(tie_word_embeddings=kind != "untied")
  opened = load.random(architecture)
  params, config = opened.read(
    dtype=jnp.float32, untie=kind == "untied here", track=None
  )
  assert config.tied == ("head" not in params) == (kind == "tied")
  # layers that matter: init's weights add next to nothing
  params = jax.tree.map(lambda x: x * 12 if x.ndim > 1 else x, params)
  target = transformer.make(config)
  return load.Model(target, params, opened.tokenizer, opened.config, config)


KINDS = pytest.mark.parametrize("kind", ["tied", "untied", "untied here"])


def _logits(target, params, tokens=TOKENS, features=()):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

  @jax.jit
  def run(params):
    hidden, taps, _ = target.apply(
      params, tokens, positions, None, features=features
    )
    return target.unembed(params, hidden), taps

  return run(params)


def _head(model):
  params = model.params
  return params["head"] if "head" in params else params["embed"].T


def _leaves(params):
  return jax.tree.leaves(params)


@KINDS
@pytest.mark.parametrize("layers", [(0, 1), (2,), (2, 0), (1, 1, 0, 2), [0]])
def test_it_shares_the_arrays(kind, layers):
  """Every array is the model's own, in a tree of the part's own shapes."""
  model = _model(kind)
  before = dict(model.params)
  part = load.part(model, layers=layers)
  for i, layer in enumerate(layers):
    ours, theirs = part.params[f"layer_{i}"], before[f"layer_{layer}"]
    pairs = zip(_leaves(ours), _leaves(theirs), strict=True)
    assert all(a is b for a, b in pairs)
  assert part.params["embed"] is before["embed"]
  assert part.params.get("head") is before.get("head")
  assert part.config.layers == len(layers)
  _has_its_shapes(part)
  assert model.params == before or model.params.keys() == before.keys()


def _has_its_shapes(part):
  shape = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  want = transformer.shapes(part.config)
  assert shape(part.params) == shape(want)


@KINDS
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_first_layers(kind, depth):
  """Norm and head of what the whole model has behind its layer `depth`."""
  model = _model(kind)
  part = load.part(model, layers=range(depth))
  got, _ = _logits(part.target, part.params)
  _, taps = _logits(model.target, model.params, features=(depth - 1,))
  x = np.asarray(taps[:, :, 0], np.float64)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
  want = x * model.params["norm"]["scale"] @ np.asarray(_head(model))
  np.testing.assert_allclose(got, want, atol=1e-4)
  assert np.abs(want).max() > 1


@pytest.mark.parametrize("layers", [(1, 0), (2, 0), (1,), (2, 2), (0, 1, 1)])
def test_any_layers_in_any_order(layers):
  """The model that has these layers' weights, made by hand."""
  model = _model("untied")
  part = load.part(model, layers=layers)
  got, _ = _logits(part.target, part.params)
  config = dataclasses.replace(model.config, layers=len(layers))
  names = ("embed", "head", "norm")
  params = {name: model.params[name] for name in names}
  for i, layer in enumerate(layers):
    params[f"layer_{i}"] = model.params[f"layer_{layer}"]
  want, _ = _logits(transformer.make(config), params)
  np.testing.assert_array_equal(got, want)
  other, _ = _logits(*load.part(model, layers=sorted(layers)[:1])[:2])
  assert len(layers) == 1 or np.abs(got - other).max() > 0.1


@KINDS
def test_trimmed_head(kind):
  """Its logits are the model's at the ids, in their order."""
  model, ids = _model(kind), (299, 5, 17, 0, 120)
  part = load.part(model, layers=range(3), ids=ids)
  _has_its_shapes(part)
  assert part.params["embed"] is model.params["embed"]
  assert "head" in part.params and not part.config.tied
  assert ("head" in model.params) == (kind != "tied")
  got, _ = _logits(part.target, part.params)
  whole, _ = _logits(model.target, model.params)
  np.testing.assert_allclose(got, whole[..., np.array(ids)], atol=1e-5)


def test_a_part_of_a_part():
  """Layers and ids are numbers of what it is a part of."""
  model = _model("tied")
  first = load.part(model, layers=(2, 1, 0), ids=(7, 8, 9, 10))
  part = load.part(first, layers=(2, 0), ids=(3, 0))
  _has_its_shapes(part)
  got, _ = _logits(part.target, part.params)
  once = load.part(model, layers=(0, 2), ids=(10, 7))
  want, _ = _logits(once.target, once.params)
  np.testing.assert_array_equal(got, want)
  kept = load.part(first, layers=(1,))
  _has_its_shapes(kept)
  with pytest.raises(UserError, match=r"ids must be in 0\.\.3"):
    load.part(first, layers=(0,), ids=(4,))


@pytest.mark.parametrize("kind, ids", [("tied", None), ("untied here", (5, 9))])
def test_narrow_weights(kind, ids):
  """The cache is as narrow as the model's own."""
  model = _model(kind)
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
  part = load.part(model._replace(params=params), layers=(0,), ids=ids)
  leaves = _leaves((part.params, part.target.init_cache(1, 64)))
  assert {x.dtype for x in leaves} == {jnp.dtype(jnp.bfloat16)}


def test_equal_parts_share_a_target():
  """B09: the same layers of the same model compile nothing new."""
  model = _model("tied")
  make = lambda **options: load.part(model, **options).target
  assert make(layers=(0, 1)) is make(layers=(0, 1))
  assert make(layers=(0,), ids=(1, 2)) is make(layers=(0,), ids=(3, 4))
  assert make(layers=(0,), ids=(1, 2)) is not make(layers=(0,))


def test_all_layers_accept_everything():
  """As a draft the whole is the target itself."""
  model = _model("untied here")
  part = load.part(model, layers=range(3))
  ask = request.make([[1], [2, 3]], max_new=60, temperature=[0.0, 1.0])
  out = generate.speculative(
    model.target,
    lm.make(part.target, 300),
    model.params,
    part.params,
    ask,
    num_draft=3,
    max_new_tokens=60,
  )
  tested = ~np.isnan(out.overlap)
  np.testing.assert_array_equal(out.accepted, tested)
  assert tested.sum() == 2 * 45


@pytest.mark.parametrize(
  "change, said",
  [
    (dict(layers=()), "layers (): give some of the target's layers 0 to 2"),
    (dict(layers=(0, 3)), "layers (0, 3): give some"),
    (dict(layers=(-1,)), "layers (-1,)"),
    (dict(layers=(0,), ids=()), "ids must be in 0..299"),
    (dict(layers=(0,), ids=(300,)), "ids must be in 0..299"),
    (dict(layers=(0,), ids=(-1, 5)), "ids must be in 0..299"),
    (dict(layers=(0,), ids=(5, 5)), "ids must differ"),
  ],
)
def test_what_is_not_there(change, said):
  """JAX would clamp or wrap such a number."""
  with pytest.raises(UserError) as caught:
    load.part(_model("tied"), **change)
  assert said in str(caught.value)
  assert len(str(caught.value).splitlines()) == 1
