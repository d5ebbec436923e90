"""A draft in training: whose numbers it starts from, whose memory it has."""

import collections
import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from pair_test import write_model
from part_test import ARCHITECTURE

from specjax import student, trajectories, vocabulary
from specjax.drafters import feature
from specjax.errors import UserError
from specjax.models import load, transformer

V, D = 300, 32
TOKENS = np.random.default_rng(0).integers(0, V, (2, 20))
DATA = trajectories.make(
  [
    ([7, 7, 7, 7], [40, 41, 41, 42, 256], 1.0),
    ([8], [41, 42, 50, 256], 1.0),
  ]
)


@functools.cache
def teacher(kind="tied", dtype="float32"):
  """Tied, untied as the file has it, or untied when it was read (B24)."""
  architecture = ARCHITECTURE | dict(tie_word_embeddings=kind != "untied")
  opened = load.random(architecture)
  params, config = opened.read(
    dtype=jnp.dtype(dtype), untie=kind == "untied here", track=None
  )
  # layers that matter: init's weights add next to nothing
  params = jax.tree.map(lambda x: x * 12 if x.ndim > 1 else x, params)
  target = transformer.make(config, dtype)
  return load.Model(target, params, opened.tokenizer, opened.config, config)


def asked(**draft):
  """A training config of a draft."""
  default = dict(
    name="lm",
    weights="",
    layers=(),
    architecture={},
    features=(),
    depth_weights=(),
    embedding="own",
    head=0,
  )
  return ml_collections.ConfigDict(dict(seed=0, draft=default | draft))


def make(model, found=DATA, ids=None, **draft):
  return student.make(asked(**draft), model, found, ids=ids)


def logits(target, params, tokens=TOKENS):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

  @jax.jit
  def run(params):
    hidden, _, _ = target.apply(params, tokens, positions, None)
    return target.unembed(params, hidden)

  return run(params)


def said(draft, params=None):
  """Logits of a student."""
  params = draft.params if params is None else params
  return logits(draft.model, student.merged(draft.shared, params))


KINDS = pytest.mark.parametrize("kind", ["tied", "untied", "untied here"])
DRAFTS = dict(
  own=dict(layers=(0, 2)),
  shared=dict(layers=(0, 2), embedding="shared"),
  trimmed=dict(layers=(0, 2), head=20),
  both=dict(layers=(0, 2), embedding="shared", head=20),
  twice=dict(layers=(1, 1)),
  fresh=dict(architecture=dict(num_hidden_layers=2)),
  beside=dict(architecture=dict(num_hidden_layers=1), embedding="shared"),
)
HEAD = dict(  # one that reads the target's features
  name="feature",
  features=(0, -1),
  depth_weights=(1.0,),
  embedding="shared",
  head=20,
)


def _pointers(tree):
  return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


@KINDS
@pytest.mark.parametrize("draft", [*DRAFTS.values(), HEAD])
def test_buffers_of_its_own(kind, draft):
  """B32: no leaf is another's nor the target's memory, whatever is donated."""
  model = teacher(kind)
  draft = make(model, **draft)
  ours, theirs = _pointers(draft.params), _pointers(model.params)
  assert len({*ours}) == len(ours) and not {*ours} & {*theirs}
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(draft.params))
  want = transformer.shapes(draft.config)
  if draft.features:
    want = feature.shapes(feature.Config(draft.config, draft.features))
  tree = student.merged(draft.shared, draft.params)
  shape = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  assert shape(tree) == shape(want)
  before = np.asarray(model.params["embed"]).copy()
  step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
  new = step(draft.params)
  assert all(x.is_deleted() for x in jax.tree.leaves(draft.params))
  assert np.isfinite(np.asarray(jax.tree.leaves(new)[0])).all()
  np.testing.assert_array_equal(model.params["embed"], before)


@KINDS
@pytest.mark.parametrize("embedding", ["own", "shared"])
def test_all_layers_say_what_the_target_says(kind, embedding):
  """And with a trimmed head: the logits of those ids, in their order."""
  model = teacher(kind)
  want = logits(model.target, model.params)
  start = dict(layers=(0, 1, 2), embedding=embedding)
  draft = make(model, **start)
  assert draft.ids is None and draft.config.tied == (kind != "untied")
  np.testing.assert_allclose(said(draft), want, atol=2e-5)
  draft = make(model, **start, head=20)
  assert len(draft.ids) == 20 and not draft.config.tied
  np.testing.assert_allclose(said(draft), want[..., draft.ids], atol=2e-5)


def test_layers_count_from_both_ends():
  model = teacher()
  draft = make(model, layers=(0, -1))
  for i, layer in enumerate((0, 2)):
    np.testing.assert_array_equal(
      draft.params[f"layer_{i}"]["qkv"]["kernel"],
      model.params[f"layer_{layer}"]["qkv"]["kernel"],
    )


def test_masters_of_a_bfloat16_target():
  """B56: float32, and the target's numbers; what is shared stays narrow."""
  model = teacher(dtype="bfloat16")
  assert model.params["embed"].dtype == jnp.bfloat16
  draft = make(model, layers=(1,), embedding="shared", head=30)
  kernel = model.params["layer_1"]["out"]["kernel"]
  ours = draft.params["layer_0"]["out"]["kernel"]
  assert {x.dtype.name for x in jax.tree.leaves(draft.params)} == {"float32"}
  np.testing.assert_array_equal(ours, kernel.astype(jnp.float32))
  assert draft.shared["embed"] is model.params["embed"]


@KINDS
def test_a_tied_head_is_one_array(kind):
  """B24: in the tree, in the gradient and behind a step of training."""
  draft = make(teacher(kind), layers=(0,))
  assert ("head" in draft.params) == (kind == "untied")
  if kind == "untied":
    return
  loss = lambda params: jax.nn.logsumexp(said(draft, params), -1).sum()
  gradient = jax.grad(loss)(draft.params)
  # the head has a gradient for ids that no text holds
  absent = np.setdiff1d(np.arange(V), TOKENS)
  assert (jnp.abs(gradient["embed"][absent]).max(-1) > 0).all()
  new = jax.tree.map(lambda x, g: x - 0.1 * g, draft.params, gradient)
  head = dict(new, embed=new["embed"].at[absent].add(1.0))  # seen by it alone
  moved = said(draft, head) - said(draft, new)
  assert (jnp.abs(moved[..., absent]).max((0, 1)) > 0.01).all()


def test_a_shared_embedding_is_no_parameter():
  model = teacher("untied here")
  draft = make(model, **DRAFTS["shared"])
  assert draft.params.keys() == {"layer_0", "layer_1", "norm"}
  assert draft.config.tied and draft.shared.keys() == {"embed"}
  assert (
    student.merged(draft.shared, draft.params)["embed"]
    is (model.params["embed"])
  )


def test_as_model():
  model = teacher()
  draft = make(model, **DRAFTS["both"])
  got = student.as_model(draft, draft.params, model)
  assert got.target is draft.model and got.params["embed"].shape == (V, D)
  assert got.config.head_size == 20 and got.tokenizer is model.tokenizer


# A head on the target's features


@KINDS
@pytest.mark.parametrize("layers", [(), (2,), (0, 2)])
def test_a_feature_head_begins_as_the_target(kind, layers):
  """Its layers, norm and head are the target's; the rest is said by hand."""
  model = teacher(kind)
  start = HEAD | dict(layers=layers)
  draft = make(model, **start)
  assert draft.model is None and draft.features == (0, 2)
  assert draft.shared["embed"] is model.params["embed"]
  assert draft.config.layers == len(layers) or not layers
  for i, layer in enumerate(layers or (2,)):
    ours, theirs = draft.params[f"layer_{i}"], model.params[f"layer_{layer}"]
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
  ours, theirs = (x["norm"]["scale"] for x in (draft.params, model.params))
  np.testing.assert_array_equal(ours, theirs)
  untied = kind == "untied"
  head = model.params["head"] if untied else model.params["embed"].T
  np.testing.assert_array_equal(
    draft.params["head"], np.asarray(head)[:, list(draft.ids)]
  )
  # g is the last feature; it has its size in what the layers see
  config = feature.Config(draft.config, draft.features)
  tree = student.merged(draft.shared, draft.params)
  rng = np.random.default_rng(0)
  taps = jnp.asarray(rng.normal(0, 3, (2, 20, 2, D)), jnp.float32)
  g = feature.fuse(config, tree, taps)
  np.testing.assert_array_equal(g, taps[:, :, 1])
  x = np.asarray(feature.joined(config, tree, jnp.asarray(TOKENS), g))
  normed = lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True))
  token = normed(np.asarray(model.params["embed"])[TOKENS])
  want = (token / 10 + normed(np.asarray(g))) * student.size(model, DATA, 2)
  np.testing.assert_allclose(x, want, rtol=2e-3, atol=2e-3)  # norm_eps


def _sizes(model, tokens):
  """[B, T] RMS of what layer 2 puts out at each token."""
  at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  _, taps, _ = model.target.apply(
    model.params, jnp.asarray(tokens), at, None, features=(2,)
  )
  return np.sqrt((np.asarray(taps[:, :, 0]) ** 2).mean(-1))


def test_a_layers_size_is_measured_on_real_tokens():
  """What pads a text does not count, nor how large a single token's is."""
  model, rng = teacher(), np.random.default_rng(0)
  draw = lambda n: rng.integers(0, V, n).tolist()
  found = trajectories.make([(draw(3), draw(n), 0.0) for n in (2, 30, 5)])
  sizes = _sizes(model, found.tokens)
  real = np.arange(33) < found.length[:, None]
  got = student.size(model, found, 2)
  np.testing.assert_allclose(got, np.median(sizes[real]), rtol=1e-5)
  assert got != pytest.approx(np.median(sizes), rel=1e-3)
  ids = np.arange(64)[None] % V
  got = student.size(model, None, 2)
  np.testing.assert_allclose(got, np.median(_sizes(model, ids)), rtol=1e-5)


def test_a_feature_heads_whole_head_is_the_targets():
  """A tied one that is not trimmed is the embedding, which stays (B24)."""
  for kind in ("tied", "untied here"):
    draft = make(teacher(kind), **HEAD | dict(head=0))
    assert draft.ids is None and draft.config.tied
    assert "head" not in draft.params
  draft = make(teacher("untied"), **HEAD | dict(head=0))
  assert draft.params["head"].shape == (D, V)


def test_masters_of_a_bfloat16_targets_feature_head():
  """B56: float32, what no layer of the target has too."""
  draft = make(teacher(dtype="bfloat16"), **HEAD)
  assert {x.dtype.name for x in jax.tree.leaves(draft.params)} == {"float32"}
  assert draft.shared["embed"].dtype == jnp.bfloat16


_NOT_A_HEAD = [
  (dict(architecture=dict(num_hidden_layers=1)), "starts from"),
  (dict(weights="x", layers=(0,)), "leave the rest away"),
  (dict(layers=(0, 1, 2)), "one or two layers of its own"),
  (dict(embedding="own"), "type --config.draft.embedding=shared, got 'own'"),
  (dict(features=()), "type --config.draft.features=-1 for the last"),
  (dict(features=(3,)), "draft.features=3: the target has layers 0 to 2"),
  (dict(features=(2, -1)), "draft.features=2,-1 names a layer twice"),
  (dict(features=("a",)), "draft.features must be layer numbers"),
  (dict(layers=(-4,)), "draft.layers=-4: the target has layers 0 to 2"),
  (dict(depth_weights=()), "a number >= 0 for each depth"),
  (dict(depth_weights=(1.0, -1.0)), "a number >= 0 for each depth"),
  (dict(depth_weights=(0.0, 0.0)), "a number >= 0 for each depth"),
  (dict(depth_weights=("a",)), "a number >= 0 for each depth"),
]


@pytest.mark.parametrize("draft, message", _NOT_A_HEAD)
def test_a_feature_head_that_cannot_be(draft, message):
  with pytest.raises(UserError) as error:
    make(teacher(), **HEAD | draft)
  assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["features", "depth_weights"])
def test_a_language_model_has_no_keys_of_a_feature_head(key):
  with pytest.raises(UserError, match=f"draft.{key} is for .*name=feature"):
    make(teacher(), **DRAFTS["own"] | {key: (1,)})


def test_weights_of_another_kind(tmp_path):
  model = load.whole(load.model(write_model(tmp_path / "target")))
  weights = write_model(tmp_path / "draft")
  with pytest.raises(
    UserError,
    match="no head that reads hidden states; type --config.draft.name=lm",
  ):
    make(model, **HEAD | dict(weights=weights, features=()))


# The vocabulary


def test_what_is_frequent():
  """Counted by hand: answers alone, end tokens first, then the lower id."""
  count = lambda n: vocabulary.frequent(
    DATA, n, vocab_size=V, stop_ids=(256, 299, 999)
  )
  # 41 three times, 42 twice, 40 and 50 once; 7 is in a prompt, 0 pads
  assert count(2) == (256, 299)
  assert count(3) == (41, 256, 299)
  assert count(4) == (41, 42, 256, 299)
  assert count(5) == (40, 41, 42, 256, 299)
  assert count(6) == (40, 41, 42, 50, 256, 299)
  assert count(8) == (0, 1, 40, 41, 42, 50, 256, 299)
  assert count(V) == tuple(range(V))


def test_frequencies_of_random_rows():
  rng = np.random.default_rng(1)
  rows = [
    (rng.integers(0, 50, 1 + i % 4), rng.zipf(1.5, i) % 50, np.nan)
    for i in range(60)
  ]
  counts = collections.Counter(int(t) for _, answer, _ in rows for t in answer)
  ranked = sorted(range(50), key=lambda i: (i != 9, -counts[i], i))
  for n in (1, 7, 31):
    got = vocabulary.frequent(
      trajectories.make(rows), n, vocab_size=50, stop_ids=(9,)
    )
    assert got == tuple(sorted(ranked[:n]))


@pytest.mark.parametrize("count", [1, V + 1, 10**6])
def test_a_vocabulary_that_cannot_be(count):
  with pytest.raises(UserError, match=r"draft.head must be 0 or in 2\.\.300"):
    vocabulary.frequent(DATA, count, vocab_size=V, stop_ids=(5, 256))


def test_no_answers_to_count():
  found = trajectories.make([([1, 2, 3], [], 1.0)])
  with pytest.raises(UserError, match="no trajectory has an answer"):
    make(teacher(), found, layers=(0,), head=20)
  with pytest.raises(ValueError, match="needs trajectories"):
    make(teacher(), None, layers=(0,), head=20)


def test_the_map_of_a_checkpoint_wins():
  """B61: whatever the data or the config would say now."""
  ids = (3, 1, 200)  # in no order that frequencies give
  for head in (0, 20):
    draft = make(teacher(), ids=ids, layers=(0,), head=head)
    assert draft.ids == ids and draft.params["head"].shape == (D, 3)
    np.testing.assert_array_equal(
      draft.params["head"], np.asarray(teacher().params["embed"])[[3, 1, 200]].T
    )


# Fresh ones, and models of their own


def test_fresh_numbers_are_the_seed():
  config = asked(**DRAFTS["fresh"])
  first, again = (student.make(config, teacher(), None) for _ in range(2))
  config.seed = 1
  other = student.make(config, teacher(), None)
  kernel = lambda draft: np.asarray(draft.params["layer_0"]["out"]["kernel"])
  np.testing.assert_array_equal(kernel(first), kernel(again))
  assert (kernel(first) != kernel(other)).mean() > 0.99
  assert first.config.layers == 2 and first.config.tied
  embed = np.asarray(first.params["embed"])
  assert abs(embed.std() - 0.02) < 1e-3  # none of the target's


def test_fresh_beside_a_shared_embedding():
  """An untied target's head is where the draft's own begins."""
  model = teacher("untied")
  draft = make(model, **DRAFTS["beside"])
  np.testing.assert_array_equal(draft.params["head"], model.params["head"])
  assert "head" not in make(teacher("tied"), **DRAFTS["beside"]).params


def test_another_width():
  architecture = dict(hidden_size=48)  # 4 heads of 12, the target's are of 8
  draft = make(teacher(), architecture=architecture, head=20)
  assert draft.config.width == 48 and draft.config.head_dim == 12
  assert draft.params["embed"].shape == (V, 48)
  assert draft.params["head"].shape == (48, 20)
  with pytest.raises(UserError, match="300 and 32; the draft's are 300 and 48"):
    make(teacher(), architecture=architecture, embedding="shared")


@pytest.mark.parametrize(
  "architecture, message",
  [
    (dict(num_layers=2), "'num_layers'; did you mean num_hidden_layers?"),
    (dict(vocab_size=299), "no room for the target's 300 ids"),
    (dict(num_attention_heads=3), "3 is not a multiple of"),
    (dict(hidden_act="gelu"), "activation 'gelu' is not supported"),
  ],
)
def test_an_architecture_that_cannot_be(architecture, message):
  with pytest.raises(UserError) as error:
    make(teacher(), architecture=architecture)
  assert message in str(error.value) and "\n" not in str(error.value)


def test_a_model_of_its_own(tmp_path):
  weights = write_model(tmp_path / "draft", layers=1)
  target = load.whole(load.model(write_model(tmp_path / "target", layers=2)))
  file = load.opened(weights)
  want, _ = file.read(dtype=jnp.float32, untie=False, track=lambda x: x)
  draft = make(target, weights=weights)
  assert jax.tree.structure(draft.params) == jax.tree.structure(want)
  for a, b in zip(*map(jax.tree.leaves, (draft.params, want)), strict=True):
    np.testing.assert_array_equal(a, b)
  # its own head's rows, its layers beside the target's embedding
  draft = make(target, weights=weights, head=20)
  np.testing.assert_array_equal(
    draft.params["head"], np.asarray(want["embed"])[list(draft.ids)].T
  )
  draft = make(target, weights=weights, embedding="shared")
  assert draft.shared["embed"] is target.params["embed"]
  np.testing.assert_array_equal(
    draft.params["layer_0"]["out"]["kernel"], want["layer_0"]["out"]["kernel"]
  )


def test_a_model_with_other_tokens(tmp_path):
  """B11: whatever a logit is called, it must be the same token."""
  target = load.whole(load.model(write_model(tmp_path / "target")))
  other = write_model(tmp_path / "draft", names={"⟨280⟩": "other"})
  with pytest.raises(UserError, match="id 280 is '⟨280⟩' in the target's"):
    make(target, weights=other)
  padded = write_model(tmp_path / "padded", vocab_size=384)
  assert make(target, weights=padded).params["embed"].shape[0] == 384
  with pytest.raises(UserError, match="320 and 32; the draft's are 384 and 32"):
    make(target, weights=padded, embedding="shared")


@pytest.mark.parametrize(
  "draft, message",
  [
    (dict(name="ngram", layers=(0,)), "must be lm or feature, got 'ngram'"),
    (dict(), "got none"),
    (dict(layers=(0,), weights="x"), "got weights and layers"),
    (dict(layers=("a",)), "draft.layers must be layer numbers"),
    (dict(layers=(0,), head=-1), "draft.head must be at least 0, got -1"),
    (dict(layers=(0,), embedding="none"), "must be own or shared, got 'none'"),
    (dict(layers=(3,)), "draft.layers=3: the target has layers 0 to 2"),
  ],
)
def test_a_draft_that_says_nothing(draft, message):
  with pytest.raises(UserError) as error:
    make(teacher(), **draft)
  assert message in str(error.value) and "\n" not in str(error.value)
