"""A draft fits its target, or one line says why not before weights are read."""

import json
import time

import numpy as np
import pytest
import safetensors.numpy

from configs import tiny
from specjax import pair, play
from specjax.errors import UserError
from specjax.models import load, tokenizer
from specjax.prompts import Prompt

WIDTH = 32
QUIET = play.Show(lambda *x: None, lambda *x: None, lambda: None)


def write_model(
  folder, *, vocab_size=320, tokens=300, context=512, layers=1, names=None
):
  """A small model in Hugging Face layout, with the byte tokenizer.

  Args:
    vocab_size: of its logits; tokens: ids of its tokenizer.
    names: {a token's name: its new one}.
  """
  folder.mkdir(parents=True)
  text = tokenizer.byte_level(tokens).backend.to_str()
  for old, new in (names or {}).items():
    assert json.dumps(old, ensure_ascii=False) in text
    text = text.replace(
      json.dumps(old, ensure_ascii=False), json.dumps(new, ensure_ascii=False)
    )
  (folder / "tokenizer.json").write_text(text)
  config = dict(
    model_type="llama",
    vocab_size=vocab_size,
    hidden_size=WIDTH,
    intermediate_size=48,
    num_hidden_layers=layers,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=context,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    eos_token_id=256,
  )
  (folder / "config.json").write_text(json.dumps(config))
  shapes = {"model.embed_tokens": (vocab_size, WIDTH), "model.norm": (WIDTH,)}
  for i in range(layers):
    one = {
      "self_attn.q_proj": (WIDTH, WIDTH),
      "self_attn.k_proj": (WIDTH // 2, WIDTH),
      "self_attn.v_proj": (WIDTH // 2, WIDTH),
      "self_attn.o_proj": (WIDTH, WIDTH),
      "mlp.gate_proj": (48, WIDTH),
      "mlp.up_proj": (48, WIDTH),
      "mlp.down_proj": (WIDTH, 48),
      "input_layernorm": (WIDTH,),
      "post_attention_layernorm": (WIDTH,),
    }
    shapes |= {f"model.layers.{i}.{name}": s for name, s in one.items()}
  rng = np.random.default_rng(layers)
  tensors = {
    f"{name}.weight": rng.normal(0, 0.3, shape).astype(np.float32)
    for name, shape in shapes.items()
  }
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  return str(folder)


def _config(target="random", **draft):
  config = tiny.get_config()
  config.target = target
  config.max_new_tokens = 40
  config.sampling.temperature = 0.0
  config.draft.update(name="lm", num_tokens=3, **draft)
  return config


@pytest.fixture
def target(tmp_path):
  return write_model(tmp_path / "target", layers=2)


def _refused(target, **draft):
  with pytest.raises(UserError) as error:
    pair.opened(_config(**draft), load.opened(target))
  text = str(error.value)
  assert "\n" not in text
  return text


def test_other_number_of_ids(tmp_path, target):
  """B11, as between two tokenizers: both sizes are named."""
  draft = write_model(tmp_path / "draft", tokens=299)
  text = _refused(target, weights=draft)
  assert "target's tokenizer has 300 ids, the draft's 299" in text


def test_one_other_token(tmp_path, target):
  """The first id that means something else, with both its meanings."""
  draft = write_model(
    tmp_path / "draft", names={"⟨280⟩": "other", "⟨290⟩": "more"}
  )
  text = _refused(target, weights=draft)
  assert "id 280 is '⟨280⟩' in the target's tokenizer, 'other'" in text


def test_added_tokens_are_compared_too():
  """Those outside the vocabulary proper, as a chat model's marks."""
  toks = [tokenizer.byte_level(300) for _ in range(2)]
  for tok, name in zip(toks, ("<|user|>", "<|tool|>"), strict=True):
    tok.backend.add_special_tokens([name])
  a, b = (tok._replace(vocab_size=301) for tok in toks)
  pair.same_tokens(a, a)
  with pytest.raises(UserError, match=r"id 300 is '<\|user\|>' .*'<\|tool"):
    pair.same_tokens(a, b)
  with pytest.raises(UserError, match="id 300 is .* no token in the draft's"):
    pair.same_tokens(a, tokenizer.byte_level(300)._replace(vocab_size=301))


def test_comparing_is_fast():
  a, b = (tokenizer.byte_level(150_000) for _ in range(2))
  began = time.perf_counter()
  pair.same_tokens(a, b)
  assert time.perf_counter() - began < 2


@pytest.mark.parametrize("vocab_size", [300, 307, 384])
def test_padding_may_differ(tmp_path, target, vocab_size):
  """B11: the same tokenizer, more or fewer logits than the target's 320."""
  draft = write_model(tmp_path / "draft", vocab_size=vocab_size)
  config = _config(target, weights=draft)
  _both_agree(config)


def test_a_draft_without_a_control_token(tmp_path):
  """As gemma-3-1b-it: its tokenizer's last id has no embedding (B11).

  A draft may lack it; a target may not, nor may a draft lack other ids.
  """
  paths = [tmp_path / name for name in ("target", "draft")]
  for path, vocab_size in zip(paths, (320, 300), strict=True):
    write_model(path, vocab_size=vocab_size)
    tok = tokenizer.from_folder(path)
    tok.backend.add_special_tokens(["<image>"])
    tok.backend.save(str(path / "tokenizer.json"))
  target, draft = map(str, paths)
  config = _config(target, weights=draft)
  _both_agree(config, "To <image> be")
  with pytest.raises(UserError, match="ids up to 300, the model a vocabulary"):
    load.opened(draft)
  other = write_model(tmp_path / "other", vocab_size=299)
  with pytest.raises(UserError, match="ids up to 299, the model a vocabulary"):
    load.opened(other, draft=True)


@pytest.mark.parametrize(
  "draft",
  [
    dict(layers=(0, 1)),
    dict(layers=(-1,)),
    dict(layers=(0,), head=60),
    dict(weights="draft", head=100),
  ],
)
def test_drafts_of_a_language_model(tmp_path, target, draft):
  if "weights" in draft:
    draft["weights"] = write_model(tmp_path / "draft")
  found = _both_agree(_config(target, **draft))
  if draft.get("layers") == (0, 1):  # the target itself
    assert found.by_position == pytest.approx([1.0] * 3, abs=0.1)
    assert found.alpha == pytest.approx(1, abs=1e-5)


def _both_agree(config, text="To be, or not"):
  """Both decoders give the same tokens; return what was accepted."""
  opened = load.opened(config.target)
  todo = [Prompt("0", "", (), (text,), None)]
  sizes = play.sizes(opened, todo, config)
  chosen = pair.opened(config, opened)
  pair.check_context(chosen, sizes.tokens)
  model = load.model(opened)
  draft = pair.load(chosen, model, dtype="float32")
  plain, other = play.play(model, draft, todo, config, sizes, QUIET)
  assert len(plain.answers[0].token_ids) == config.max_new_tokens
  assert plain.answers[0].token_ids == other.answers[0].token_ids
  return other.acceptance


def test_layers_and_heads():
  opened = load.random(tiny.get_config().architecture)  # 3 layers, V = 384
  get = lambda **draft: pair.opened(_config(**draft), opened)
  assert get(layers=(0, 2, -1, -3)).layers == (0, 2, 2, 0)
  assert get(layers=(0,)).config.layers == 1
  assert get(layers=(0,)).ids is None
  assert get(layers=(0,), head=3).ids == (0, 1, 2, 256)  # and the end token
  assert get(layers=(0,), head=257).ids == tuple(range(257))
  assert get(layers=(0,), head=384).config.head_size == 384
  assert get(layers=(0,)).own is None


@pytest.mark.parametrize(
  "draft, message",
  [
    (dict(layers=(0, 3)), "draft.layers=0,3: the target has layers 0 to 2"),
    (dict(layers=(-4,)), "draft.layers=-4: the target has layers 0 to 2"),
    (dict(layers=(0,), head=385), "draft.head must be in 0..384"),
  ],
)
def test_what_the_target_lacks(draft, message):
  opened = load.random(tiny.get_config().architecture)
  with pytest.raises(UserError, match=message):
    pair.opened(_config(**draft), opened)


def test_context(tmp_path, target):
  """Both numbers and the key; what just fits is fine."""
  draft = write_model(tmp_path / "draft", context=100)
  chosen = pair.opened(_config(weights=draft), load.opened(target))
  pair.check_context(chosen, 100)
  with pytest.raises(UserError) as error:
    pair.check_context(chosen, 101)
  text = str(error.value)
  assert "draft's context holds 100 tokens" in text and "need 101" in text
  assert "--config.max_new_tokens" in text and "\n" not in text
  pair.check_context(None, 10**9)


def test_join_says_the_drafts_sampling():
  config = _config(layers=(0,))
  config.draft.temperature, config.draft.top_p = 0.5, 0.9
  opened = load.random(config.architecture)
  chosen = pair.opened(config, opened)
  draft = pair.Pair(None, lambda plain: plain, chosen)
  ask = play.request.make(
    [[1], [2]], max_new=1, temperature=[0.0, 2.0], top_k=[3, 4]
  )
  own = pair.join(draft, ask, "the plain run").sampling
  assert own.temperature.tolist() == [0.5, 0.5] and own.top_k.tolist() == [3, 4]
  assert own.top_p.tolist() == [np.float32(0.9)] * 2
  assert own.temperature.dtype == own.top_p.dtype == np.float32
  same = chosen._replace(temperature=-1.0, top_p=-1.0)
  same = draft._replace(opened=same)
  assert pair.join(same, ask, None).sampling is ask.sampling
  assert pair.join(draft, ask, "the plain run").params == "the plain run"
