"""An exported draft drafts what it drafted, and is nothing else to anyone."""

import dataclasses
import functools
import itertools
import json
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import student_test as trained
from pair_test import write_model

from configs import tiny
from specjax import (
  export,
  generate,
  memory,
  overlap,
  pair,
  request,
  student,
)
from specjax.drafters import lm
from specjax.errors import UserError
from specjax.models import describe, exported, families, load, tokenizer

V, D = trained.V, trained.D
CARD = {
  "Metrics": {"E[N]": 2.51234, "a|b": "c\nd"},
  "Command": "python train_draft.py",
}
DRAFTS = trained.DRAFTS
NAMES = ("own", "shared", "trimmed", "both")


@functools.cache
def _student(kind="tied", name="own"):
  """Some layers of a target after what stands for training: noise."""
  draft = trained.make(trained.teacher(kind), **DRAFTS[name])
  rng = np.random.default_rng(1)
  noisy = lambda x: x + 0.1 * np.std(x) * rng.normal(size=x.shape)
  params = jax.tree.map(lambda x: jnp.float32(noisy(x)), draft.params)
  return draft._replace(params=params)


def _save(folder, draft, model=None, params=None, **options):
  model = trained.teacher() if model is None else model
  params = draft.params if params is None else params
  options = dict(teacher=model, reference="random", card=CARD) | options
  export.save(folder, draft, params, **options)
  return folder


def _target(model):
  """The `load.Opened` of a loaded model."""
  return load.Opened(model.config, model.tokenizer, None)


def _load(folder, model, dtype="float32", **draft):
  """The `pair.Pair` of a folder, as decode.py makes it."""
  config = tiny.get_config()
  config.draft.update(name="lm", weights=str(folder), **draft)
  opened = pair.opened(config, _target(model))
  return pair.load(opened, model, dtype=dtype)


def _refused(call, *args, **kwargs):
  with pytest.raises(UserError) as error:
    call(*args, **kwargs)
  assert "\n" not in str(error.value)
  return str(error.value)


# Round trips


@trained.KINDS
@pytest.mark.parametrize("name", DRAFTS)
def test_every_number_comes_back(tmp_path, kind, name):
  """B17, B24: the tree is bit for bit what it was, tied or not."""
  model, draft = trained.teacher(kind), _student(kind, name)
  folder = _save(tmp_path / "draft", draft, model)
  method = "feature" if draft.features else "lm"
  depths = (1.0,) if draft.features else ()
  options = dict(name=method, depth_weights=depths, embedding=_kind(draft))
  again = trained.make(model, weights=str(folder), **options)
  assert again.config == draft.config and again.ids == draft.ids
  assert again.shared.keys() == draft.shared.keys()
  assert jax.tree.structure(again.params) == jax.tree.structure(draft.params)
  trees = jax.tree.leaves(again.params), jax.tree.leaves(draft.params)
  for a, b in zip(*trees, strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_array_equal(a, b)


def test_hashes_of_prompts_are_read_with_the_config(tmp_path):
  """A damaged file is told before anything is decoded, not behind it."""
  draft, hashes = _student("tied", "both"), np.array([3, 5], np.uint64)
  folder = _save(tmp_path / "draft", draft, prompts=hashes)
  opened = _load(folder, trained.teacher()).opened
  np.testing.assert_array_equal(opened.own.prompts, hashes)
  np.save(folder / overlap.FILE, hashes[::-1])
  told = _refused(load.opened, str(folder), draft=True)
  assert f"{folder / overlap.FILE} is damaged" in told
  _save(folder, draft)  # unknown
  assert load.opened(str(folder), draft=True).prompts is None


def _kind(draft):
  return "shared" if draft.shared else "own"


@pytest.mark.parametrize(
  "kind, name",
  [
    ("tied", "shared"),
    ("tied", "both"),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in itertools.product(("untied", "untied here"), NAMES)
    ),
  ],
)
def test_it_decodes_as_it_did_in_memory(tmp_path, kind, name):
  """Token for token, and round for round: greedy, and coupled at T = 1."""
  model, draft = trained.teacher(kind), _student(kind, name)
  _save(tmp_path / "draft", draft, model)
  loaded = _load(tmp_path / "draft", model)
  assert loaded.opened.ids == draft.ids
  np.testing.assert_allclose(
    trained.logits(loaded.model.target, loaded.model.params),
    trained.said(draft),
    atol=2e-5,
  )
  ask = request.make(
    [[1, 2], [3], [4, 5, 6]], max_new=40, temperature=[0.0, 0.0, 1.0], seed=3
  )
  ours = lm.make(draft.model, V, ids=draft.ids)
  tree = student.merged(draft.shared, draft.params)
  run = lambda drafter, params: generate.speculative(
    *(model.target, drafter, model.params, params, ask),
    num_draft=3,
    max_new_tokens=40,
    verifier="coupled",
  )
  want, got = run(ours, tree), run(loaded.drafter, loaded.model.params)
  for field in ("tokens", "length", "round", "accepted"):
    np.testing.assert_array_equal(getattr(got, field), getattr(want, field))
  drafted = np.asarray(want.accepted)
  assert drafted.any() and not drafted[:, 1:].all()


@pytest.mark.parametrize("name", NAMES)
def test_a_shared_embedding_is_the_targets_memory(tmp_path, name):
  """And so is a tied head that was copied when the target was read."""
  model = load.model(load.random(trained.ARCHITECTURE | _TIED))
  assert load.untie_here() and model.params["head"].ndim >= 2
  draft = trained.make(model, **DRAFTS[name])
  loaded = _load(_save(tmp_path / "draft", draft, model), model).model
  same = lambda key: loaded.params[key] is model.params[key]
  assert same("embed") == ("embed" in draft.shared)
  assert same("head") == (name == "shared")


_TIED = dict(tie_word_embeddings=True)


def test_in_blocks_like_others(tmp_path):
  """Where a processor wants them; a head of 64 ids is one, of 20 is none."""
  model = load.model(load.random(trained.ARCHITECTURE | _TIED))
  for head, shape in ((64, (1, D, 64)), (20, (D, 20))):
    draft = trained.make(model, layers=(0,), embedding="shared", head=head)
    loaded = _load(_save(tmp_path / "draft", draft, model), model).model
    assert loaded.params["head"].shape == shape
    assert loaded.params["layer_0"]["qkv"]["kernel"].shape == (1, D, 64)


def test_a_tied_draft_beside_an_untied_target(tmp_path):
  """Its head is the embedding, not the target's head."""
  model = trained.teacher("untied")
  tied = dict(tie_word_embeddings=True, num_hidden_layers=1)
  draft = trained.make(model, architecture=tied, embedding="shared")
  assert draft.params.keys() == {"layer_0", "norm"}
  loaded = _load(_save(tmp_path / "draft", draft, model), model).model
  got = trained.logits(loaded.target, loaded.params)
  np.testing.assert_allclose(got, trained.said(draft), atol=2e-5)


def test_the_map_is_no_other_on_a_warm_start(tmp_path):
  """B61: other data, another size asked for; each logit is the same token."""
  model, draft = trained.teacher(), _student("tied", "trimmed")
  folder = str(_save(tmp_path / "draft", draft))
  other = trained.trajectories.make([([1], [290, 291, 292], 1.0)])
  assert not {290, 291, 292} & {*draft.ids}
  for head in (0, 5, 20):
    again = trained.make(model, other, weights=folder, head=head)
    assert again.ids == draft.ids
    np.testing.assert_array_equal(again.params["head"], draft.params["head"])
  message = _refused(trained.make, model, ids=(1, 2), weights=folder)
  assert "other ids than the checkpoint" in message


def test_a_shared_embedding_becomes_its_own(tmp_path):
  """It is asked for on a warm start: a copy, which is then trained."""
  model, draft = trained.teacher(), _student("tied", "both")
  folder = str(_save(tmp_path / "draft", draft))
  again = trained.make(model, weights=folder, embedding="own")
  assert not again.shared and again.ids == draft.ids
  np.testing.assert_array_equal(again.params["embed"], model.params["embed"])
  assert again.params["embed"] is not model.params["embed"]


# Narrow weights


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights(tmp_path, dtype):
  """What comes back is `rounded`, half as large, and the card says so."""
  draft = _student("tied", "both")
  wide = _save(tmp_path / "wide", draft)
  folder = _save(tmp_path / "draft", draft, dtype=dtype)
  sizes = [(f / exported.WEIGHTS).stat().st_size for f in (wide, folder)]
  assert sizes[1] < 0.6 * sizes[0]
  again = trained.make(
    trained.teacher(), weights=str(folder), embedding="shared"
  )
  want = export.rounded(draft.params, dtype)
  for a, b, c in zip(
    *map(jax.tree.leaves, (again.params, want, draft.params)), strict=True
  ):
    assert a.dtype == b.dtype == jnp.float32
    np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(a, c, rtol=2**-8, atol=1e-7)
  card = (folder / "README.md").read_text()
  assert f"{dtype}, rounded from float32: lossy" in card
  assert "lossy" not in (wide / "README.md").read_text()


def test_numbers_that_do_not_fit(tmp_path):
  """float16 ends at 65,504; what was there stays."""
  draft = _student()
  folder = _save(tmp_path / "draft", draft)
  before = _files(folder)
  norm = draft.params["norm"]["scale"].at[3].set(1e5)
  large = draft.params | {"norm": {"scale": norm}}
  message = _refused(_save, folder, draft, params=large, dtype="float16")
  assert "model.norm.weight is not finite as float16" in message
  broken = draft.params | {"norm": {"scale": norm.at[3].set(np.nan)}}
  message = _refused(_save, folder, draft, params=broken)
  assert "model.norm.weight is not finite; export an earlier" in message
  message = _refused(_save, folder, draft, dtype="int8")
  assert "float32, bfloat16, float16, got 'int8'" in message
  assert _files(folder) == before


@pytest.mark.parametrize("was", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("now", ["float32", "bfloat16", "float16"])
def test_one_embedding_in_three_types(tmp_path, was, now):
  """The same file, read into other types when training and when decoding."""
  read = lambda dtype: load.model(_wide(), dtype=dtype)
  model = read(was)
  draft = trained.make(model, layers=(0,), embedding="shared")
  folder = _save(tmp_path / "draft", draft, model)
  if {was, now} == {"bfloat16", "float16"}:
    message = _refused(_load, folder, read(now), now)
    assert f"cannot tell a {now} embedding from the {was}" in message
  else:
    target = read(now)
    loaded = _load(folder, target, now)
    assert loaded.model.params["embed"] is target.params["embed"]


def _wide():
  """Numbers that float16 rounds otherwise than bfloat16 does."""
  file = load.random(trained.ARCHITECTURE | _TIED)

  def read(*, dtype, **how):
    params, config = file.read(dtype=jnp.float32, **how)
    return jax.tree.map(lambda x: x.astype(dtype), params), config

  return file._replace(read=read)


# Whole or not at all


def _files(folder):
  return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_what_is_written(tmp_path):
  folder = _save(tmp_path / "a" / "draft", _student())
  names = {"README.md", "config.json", "generation_config.json"}
  names |= {"tokenizer.json", "tokenizer_config.json"}
  assert _files(folder).keys() == names | {"model.safetensors"}
  folder = _save(tmp_path / "a" / "both", _student("tied", "both"))
  names |= {"draft.safetensors", "specjax.json", "ids.json"}
  assert _files(folder).keys() == names
  assert {p.name for p in folder.parent.iterdir()} == {"draft", "both"}
  assert folder.stat().st_mode == folder.parent.stat().st_mode
  assert len({p.stat().st_mode for p in folder.iterdir()}) == 1  # all readable


def test_an_earlier_export_is_replaced(tmp_path):
  """By another kind, none of whose files is left."""
  folder = _save(tmp_path / "draft", _student("tied", "both"))
  _save(folder, _student())
  assert "specjax.json" not in _files(folder)
  assert load.opened(str(folder)).config.layers == 2
  assert [p.name for p in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize(
  "there", ["notes.txt", "model.safetensors", "README.md"]
)
def test_what_is_no_export_is_not_replaced(tmp_path, there):
  folder = tmp_path / "mine"
  folder.mkdir()
  (folder / there).write_text("mine")
  message = _refused(_save, folder, _student())
  assert f"cannot export to {folder}: there is something else" in message
  message = _refused(_save, folder / there, _student())
  assert f"{there}: it is a file; choose another folder" in message
  assert _files(folder) == {there: b"mine"}


def test_an_empty_folder_is_filled(tmp_path):
  _save(tmp_path, _student())
  assert load.opened(str(tmp_path)).config.layers == 2


@pytest.mark.parametrize("most", [0, 10_000, 100_000])
def test_a_full_disk(tmp_path, most):
  """A limit on the size of a file stands for it: one line, nothing changed."""
  folder = _save(tmp_path / "draft", _student("tied", "both"))
  before, draft = _files(folder), _student()
  limit = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (most, limit[1]))
  try:
    message = _refused(_save, folder, draft)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
  assert message.startswith(f"cannot write {folder}: ")
  assert "too large" in message and "is unchanged" in message
  assert _files(folder) == before
  assert [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_a_name_that_cannot_be_given(tmp_path, monkeypatch):
  """The last step fails: the earlier export has its name again."""
  folder = _save(tmp_path / "draft", _student("tied", "both"))
  before, rename = _files(folder), export.os.rename

  def fails(old, new):
    if str(old).endswith("/new"):
      raise OSError(28, "No space left on device")
    rename(old, new)

  monkeypatch.setattr(export.os, "rename", fails)
  message = _refused(_save, folder, _student())
  assert "No space left on device" in message
  assert _files(folder) == before
  assert [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_the_card(tmp_path):
  """What was measured, how it was made, and why it is no `assistant_model`."""
  text = (_save(tmp_path / "a", _student()) / "README.md").read_text()
  assert "| E[N] | 2.512 |" in text and "| a\\|b | c d |" in text
  assert "## Command\n\npython train_draft.py\n" in text
  assert "assistant_model=draft" in text
  folder = _save(tmp_path / "b", _student("tied", "both"))
  text = (folder / "README.md").read_text()
  assert "It cannot be an `assistant_model` in transformers." in text
  assert "| vocabulary | 20 of 300 ids |" in text
  assert "Its embedding is its target's" in text
  assert "--config.draft.weights=THIS_FOLDER" in text


# Its tokenizer


def _same_tokenizer(a, b):
  assert a._replace(backend=None) == b._replace(backend=None)
  pair.same_tokens(a, b)
  texts = ("Hello  world\n\n12345 naïve 🙂", "", "a<|im_end|>b ⟨280⟩<|end|>")
  for text in texts:
    assert tokenizer.encode(a, text) == tokenizer.encode(b, text)
    ids = tokenizer.encode(a, text)
    assert tokenizer.decode(a, ids) == tokenizer.decode(b, ids)


def test_the_tokenizer_of_bytes(tmp_path):
  folder = _save(tmp_path / "draft", _student())
  got = tokenizer.from_folder(folder)
  _same_tokenizer(trained.teacher().tokenizer, got)


def test_the_tokenizer_of_a_gguf(tmp_path, smollm2_gguf):
  """SmolLM2's: the same ids, end tokens and chat template."""
  tok = load.opened(str(smollm2_gguf)).tokenizer
  assert len(tok.stop_ids) > 1 and tok.chat_template
  small = dict(vocab_size=49152, hidden_size=8, num_attention_heads=1)
  small |= dict(num_key_value_heads=1)
  model = load.model(load.random(trained.ARCHITECTURE | small | _TIED))
  model = load.whole(model)._replace(tokenizer=tok)
  draft = trained.make(model, layers=(0,), embedding="shared")
  options = dict(reference=str(smollm2_gguf))
  folder = _save(tmp_path / "draft", draft, model, **options)
  _same_tokenizer(tok, tokenizer.from_folder(folder))
  said = json.loads((folder / "specjax.json").read_text())["target"]
  assert said["reference"] == str(smollm2_gguf) and len(said["sha256"]) == 64


def test_the_tokenizer_of_a_folder(tmp_path):
  """Its files are copied; end tokens may stand in any of three."""
  source = tmp_path / "target"
  reference = write_model(source, layers=2)
  (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
  (source / "generation_config.json").write_text('{"eos_token_id": [256, 270]}')
  model = load.whole(load.model(reference))
  assert model.tokenizer.stop_ids == (256, 270)
  draft = trained.make(model, layers=(0,))
  folder = _save(tmp_path / "draft", draft, model, reference=reference)
  _same_tokenizer(model.tokenizer, tokenizer.from_folder(folder))
  for name in ("tokenizer.json", "chat_template.jinja"):
    assert (folder / name).read_bytes() == (source / name).read_bytes()


# Refusals


def test_it_is_no_target(tmp_path):
  """By name, with what to type; and without specjax.json by its model type."""
  draft = _student("tied", "both")
  folder = _save(tmp_path / "draft", draft)
  _change(folder, target__reference="hf://org/name")
  message = _refused(load.opened, str(folder))
  assert "knows 20 ids and shares its target's embedding" in message
  assert f"{folder} is a draft" in message
  assert "--config.draft.weights with --config.target=hf://org/name" in message
  config = json.loads((folder / "config.json").read_text())
  message = _refused(families.from_hf, config)
  assert "model type 'specjax-draft' is not supported" in message
  names = safetensors.safe_open(folder / exported.WEIGHTS, "np").keys()
  assert "model.embed_tokens.weight" not in names
  (folder / exported.FILE).unlink()
  message = _refused(load.opened, str(folder), draft=True)
  assert f"{folder} lacks specjax.json; copy the whole folder again" in message
  (folder / exported.WEIGHTS).rename(folder / "model.safetensors")
  message = _refused(load.opened, str(folder))
  assert "is a draft without its specjax.json" in message


def test_another_target(tmp_path):
  """One number of its embedding is another; other sizes, before any weight."""
  model, draft = trained.teacher(), _student("tied", "shared")
  folder = _save(tmp_path / "draft", draft)
  _change(folder, target__reference="hf://org/name")
  embed = model.params["embed"].at[299, 31].multiply(1.01)
  other = model._replace(params=model.params | {"embed": embed})
  message = _refused(_load, folder, other)
  assert "this target has another one" in message
  assert "trained for hf://org/name" in message
  message = _refused(trained.make, other, weights=str(folder))
  assert "this target has another one" in message
  # layers are not compared: only what is shared is
  tuned = jax.tree.map(lambda x: x * 2, model.params["layer_0"])
  tuned = model._replace(params=model.params | {"layer_0": tuned})
  assert _load(folder, tuned).model
  wide = trained.ARCHITECTURE | dict(hidden_size=64, tie_word_embeddings=True)
  message = _refused(_load, folder, load.model(load.random(wide)))
  assert "300 ids and width 32, the target's has 300 and 64" in message
  # nor is anything of one that shares nothing, but for its tokens
  trimmed = _save(tmp_path / "trimmed", _student("tied", "trimmed"))
  assert _load(trimmed, other).model
  assert _load(trimmed, load.model(load.random(wide))).model


def test_other_tokens(tmp_path):
  draft = _student("tied", "trimmed")
  folder = _save(tmp_path / "draft", draft)
  more = trained.ARCHITECTURE | dict(vocab_size=301)
  message = _refused(_load, folder, load.model(load.random(more)))
  assert "the target's tokenizer has 301 ids, the draft's 300" in message


def test_a_head_of_its_own_is_not_trimmed_again(tmp_path):
  folder = _save(tmp_path / "draft", _student("tied", "trimmed"))
  message = _refused(_load, folder, trained.teacher(), head=10)
  assert "trained for its own 20 ids; leave draft.head away" in message
  whole = _save(tmp_path / "whole", _student("tied", "shared"))
  loaded = _load(whole, trained.teacher(), head=10)
  assert loaded.opened.ids == (*range(10), 256)


def test_an_id_that_the_target_lacks(tmp_path):
  """Padded vocabularies differ (B11): an id of the draft's padding."""
  model, draft = trained.teacher(), _student("tied", "trimmed")
  ids = (*draft.ids[:-1], V - 1)
  folder = _save(tmp_path / "draft", draft._replace(ids=ids))
  config = dataclasses.replace(model.config, vocab_size=V - 1)
  message = _refused(_load, folder, model._replace(config=config))
  assert f"drafts id {V - 1}, the target's vocabulary has {V - 1}" in message


def _change(folder, **changes):
  path = folder / exported.FILE
  value = json.loads(path.read_text())
  for key, new in changes.items():
    group, _, name = key.rpartition("__")
    part = value[group] if group else value
    part.pop(name)
    if new is not None:
      part[name] = new
  path.write_text(json.dumps(value))


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(format=2), "has format 2, this reads 1"),
    (dict(format=None), "has format None, this reads 1"),
    (dict(family=None), "'family' is None"),
    (dict(family="gemma"), "model type 'gemma' is not supported"),
    (dict(target=None), "'target' is None"),
    (dict(target__reference=7), "'reference' is 7"),
    (dict(target__sha256=None), "'sha256' is None"),
    (dict(embedding=None), "'embedding' is None"),
    (dict(embedding="lent"), "its embedding is 'lent'"),
    (dict(embedding="own"), "has no tensor model.embed_tokens.weight"),
    (dict(embedding_sha256=None), "'embedding_sha256' is None"),
    (dict(embedding_sha256={}), "'embedding_sha256' is {}"),
    (dict(vocabulary=None), "has shape [20, 32], the config implies [300, 32]"),
    (dict(vocabulary=[]), "'vocabulary' is []"),
    (dict(vocabulary__size="20"), "'size' is '20'"),
    (dict(vocabulary__size=21), "must hold 21 different ids"),
    (dict(vocabulary__sha256="0" * 64), "its sha256 is not the one in"),
    (dict(vocabulary__sha256=None), "'sha256' is None"),
  ],
)
def test_a_damaged_specjax_json(tmp_path, changes, message):
  folder = _save(tmp_path / "draft", _student("tied", "both"))
  _change(folder, **changes)
  found = _refused(load.opened, str(folder), draft=True)
  assert message in found and str(folder) in found


@pytest.mark.parametrize(
  "ids, size, message",
  [
    ([*range(19)], 19, "has shape [20, 32], the config implies [19, 32]"),
    ([*range(21)], 21, "has shape [20, 32], the config implies [21, 32]"),
    ([*range(19), 0], 20, "must hold 20 different ids"),
    ([*range(19), V], 20, f"must hold token ids below {V}"),
    ([*range(19), -1], 20, f"must hold token ids below {V}"),
    ([*range(19), True], 20, f"must hold token ids below {V}"),
    ([], 0, f"must hold token ids below {V}"),
    ({"0": 1}, 1, f"must hold token ids below {V}"),
    ("[1, 2", 2, "it is not valid JSON"),
  ],
)
def test_a_map_that_does_not_fit(tmp_path, ids, size, message):
  """B61: even if its hash is the one that is written."""
  folder = _save(tmp_path / "draft", _student("tied", "both"))
  text = ids if isinstance(ids, str) else json.dumps(ids)
  (folder / exported.IDS).write_text(text)
  sha256 = export.exported.hashlib.sha256(text.encode()).hexdigest()
  _change(folder, vocabulary__size=size, vocabulary__sha256=sha256)
  assert message in _refused(load.opened, str(folder), draft=True)


@pytest.mark.parametrize(
  "name, message",
  [
    ("specjax.json", "is a draft without its specjax.json"),
    ("ids.json", "ids.json: No such file"),
    ("draft.safetensors", "lacks draft.safetensors"),
    ("config.json", "lacks config.json"),
    ("tokenizer.json", "no tokenizer.json"),
  ],
)
def test_a_file_that_is_missing(tmp_path, name, message):
  folder = _save(tmp_path / "draft", _student("tied", "both"))
  (folder / name).unlink()
  if name == "specjax.json":  # so that something is there to be misread
    shutil.copy(folder / exported.WEIGHTS, folder / exported.MODEL)
  assert message in _refused(load.opened, str(folder), draft=True)


def test_a_file_that_is_cut(tmp_path):
  folder = _save(tmp_path / "draft", _student("tied", "both"))
  path = folder / exported.WEIGHTS
  data = path.read_bytes()
  path.write_bytes(data[:-100])
  assert "corrupt, truncated" in _refused(load.opened, str(folder), draft=True)
  path.write_bytes(data)
  (folder / exported.FILE).write_text("{")
  assert "not valid JSON" in _refused(load.opened, str(folder), draft=True)
  (folder / exported.FILE).write_text("[]")
  assert "must hold an object" in _refused(load.opened, str(folder), draft=True)


def test_specjax_json_beside_a_whole_model(tmp_path):
  folder = _save(tmp_path / "draft", _student("tied", "both"))
  whole = _save(tmp_path / "whole", _student())
  shutil.copy(folder / exported.FILE, whole)
  shutil.copy(whole / exported.MODEL, whole / exported.WEIGHTS)
  message = _refused(load.opened, str(whole), draft=True)
  assert "config.json beside it is no specjax-draft's" in message


def test_memory_counts_it_once(tmp_path):
  """A shared embedding, and a tied head's copy, are the target's."""
  model = trained.teacher()
  shape = dict(dtype="float32", batch=1, slots=64)

  def weights(name, untie):
    folder = _save(tmp_path / name, _student("tied", name))
    config = tiny.get_config()
    config.draft.update(name="lm", weights=str(folder))
    draft = pair.opened(config, _target(model))
    found = memory.estimate(model.config, draft=draft, untie=untie, **shape)
    return found["draft weights"]

  for name in NAMES:
    own = sum(x.nbytes for x in jax.tree.leaves(_student("tied", name).params))
    assert weights(name, False) == own
    assert weights(name, True) == own + (4 * V * D if name == "own" else 0)


# Elsewhere


def test_in_transformers(tmp_path):
  """A whole draft says the same there; a lacking one is refused there."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  tokens = torch.tensor(trained.TOKENS)
  auto = transformers.AutoModelForCausalLM
  for kind in ("tied", "untied"):
    draft = _student(kind)
    folder = _save(tmp_path / kind, draft, trained.teacher(kind))
    model = auto.from_pretrained(folder)
    assert model.dtype == torch.float32
    with torch.no_grad():
      got = model(tokens).logits.numpy()
    gap = np.abs(got - trained.said(draft)).max()
    print(f"{kind}: max difference of logits {gap:.2e}")
    assert gap < 1e-4
    target = _save(
      tmp_path / "target",
      trained.make(trained.teacher(kind), layers=(0, 1, 2)),
      trained.teacher(kind),
    )
    target = auto.from_pretrained(target)
    how = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    plain = target.generate(tokens[:1], **how)
    assisted = target.generate(tokens[:1], assistant_model=model, **how)
    assert plain.tolist() == assisted.tolist()
    names = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Hello  wörld"
    ours = trained.teacher(kind).tokenizer
    assert names(text)["input_ids"] == tokenizer.encode(ours, text)
  narrow = _save(tmp_path / "narrow", _student(), dtype="bfloat16")
  assert auto.from_pretrained(narrow).dtype == torch.bfloat16
  for name in ("shared", "trimmed", "both"):
    folder = _save(tmp_path / name, _student("tied", name))
    for kind in (auto, transformers.LlamaForCausalLM):
      with pytest.raises((OSError, ValueError)) as error:
        kind.from_pretrained(folder)
      print(f"{name}, {kind.__name__}: {str(error.value).splitlines()[0]}")


def test_descriptions_are_read_back():
  """Of every rotary scaling, from a folder or, with factors, from a GGUF."""
  for theta in (1e4, 1e5, 5e5, 1e6, 130000.0):
    for head_dim in (16, 64, 128):
      for scaling in _SCALINGS:
        base = trained.ARCHITECTURE | dict(rope_theta=theta, head_dim=head_dim)
        values = base | ({"rope_scaling": scaling} if scaling else {})
        config = families.from_hf(values)
        again = families.from_hf(describe.to_hf(config))
        assert again == config
        # a GGUF has the factors, and in float32
        plain = np.array(families.from_hf(base).inv_freq)
        factors = (plain / config.inv_freq).astype(np.float32)
        freq = tuple((plain / factors).tolist())
        narrow = dataclasses.replace(config, inv_freq=freq)
        again = families.from_hf(describe.to_hf(narrow))
        np.testing.assert_allclose(again.inv_freq, freq, rtol=1e-6)


_LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
_SCALINGS = (
  None,
  dict(rope_type="linear", factor=4.0),
  dict(_LLAMA3, factor=8.0, original_max_position_embeddings=64),
  dict(_LLAMA3, factor=8.0, original_max_position_embeddings=8192),
  dict(_LLAMA3, factor=32.0, original_max_position_embeddings=8192),
)


def test_what_has_no_description():
  config = families.from_hf(trained.ARCHITECTURE)
  first, second, *rest = config.inv_freq
  odd = dataclasses.replace(config, inv_freq=(first, 1.3 * second, *rest))
  assert "rotary frequencies have no desc" in _refused(describe.to_hf, odd)
  odd = dataclasses.replace(config, out_bias=True)
  assert "combination of parts has no desc" in _refused(describe.to_hf, odd)
