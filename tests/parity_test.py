"""Every family computes what transformers computes, from folder and GGUF.

The models in data/families are random, with every bias and norm away from its
default; prompts are five times as long as the windows. See
data/make_families.py.
"""

import dataclasses
import functools
import pathlib

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import weights_test
from weights_test import permute, read, read_folder, write_folder

from specjax import generate, request
from specjax.drafters import feature, lm
from specjax.errors import UserError
from specjax.models import describe, families, load, transformer, weights

FAMILIES = pathlib.Path(__file__).parent / "data" / "families"
NAMES = sorted(path.name for path in FAMILIES.iterdir())
# What a GGUF cannot say: windows of Qwen, and a query scalar of its own.
IN_GGUF = [n for n in NAMES if n not in ("qwen2_window", "gemma3_text")]
PARTS = weights_test.GGUF_NAMES | {  # written out, as llama.cpp has them
  "self_attn.q_norm": "attn_q_norm",
  "self_attn.k_norm": "attn_k_norm",
}
GEMMA = {
  "post_attention_layernorm": "post_attention_norm",
  "pre_feedforward_layernorm": "ffn_norm",
  "post_feedforward_layernorm": "post_ffw_norm",
}
ARCH = {"mistral": "llama", "gemma3_text": "gemma3"}


def write_gguf(path, name):
  """Write a folder's model as llama.cpp's converter does."""
  config, tensors = read_folder(FAMILIES / name)
  kind = config["model_type"]
  arch, gemma = ARCH.get(kind, kind), kind.startswith("gemma")
  writer = gguf.GGUFWriter(path, arch)
  writer.add_context_length(config["max_position_embeddings"])
  writer.add_embedding_length(config["hidden_size"])
  writer.add_block_count(config["num_hidden_layers"])
  writer.add_feed_forward_length(config["intermediate_size"])
  writer.add_head_count(config["num_attention_heads"])
  writer.add_head_count_kv(config["num_key_value_heads"])
  if "head_dim" in config:
    writer.add_key_length(config["head_dim"])
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  rope = config.get("rope_parameters") or config
  if kind != "gemma2":  # its converter leaves the base away
    writer.add_rope_freq_base(rope["rope_theta"])
  if config.get("rope_scaling"):
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
  if gemma or kind == "mistral":
    writer.add_sliding_window(config["sliding_window"])
  if "sliding_window_pattern" in config:
    pattern = config["sliding_window_pattern"]
    writer.add_uint32(f"{arch}.attention.sliding_window_pattern", pattern)
  if config.get("attn_logit_softcapping"):
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
  _write_tensors(writer, config, tensors, arch, gemma)
  return path


def _write_tensors(writer, config, tensors, arch, gemma):
  heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
  writer.add_token_list([chr(65 + i) for i in range(64)])
  names = PARTS | (GEMMA if gemma else {})
  for name, x in tensors.items():
    stem, _, kind = name.rpartition(".")
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
      x = permute(x, heads if "q_proj" in name else kv)
    if gemma and name.endswith("norm.weight"):
      x = x + 1
    layer = stem.split(".", 3)
    if stem.startswith("model.layers."):
      new = f"blk.{layer[2]}.{names[layer[3]]}"
    else:
      new = names[stem]
    writer.add_tensor(f"{new}.{kind}", x)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@functools.cache
def opened(name):
  """(target, params, config, tokens, logprobs) of a folder."""
  params, config = read(FAMILIES / name)
  found = np.load(FAMILIES / name / "reference.npz")
  target = transformer.make(config)
  return target, params, config, found["tokens"], found["logprobs"]


@functools.partial(jax.jit, static_argnums=0)
def _run(target, params, tokens, positions, cache):
  hidden, _, cache = target.apply(params, tokens, positions, cache)
  return jax.nn.log_softmax(target.unembed(params, hidden)), cache


def whole(target, params, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return _run(target, params, jnp.asarray(tokens), positions, None)[0]


def error(name, source, tmp_path):
  """The largest difference of a log-probability, over all positions."""
  target, params, _, tokens, want = opened(name)
  if source == "gguf":
    params, config = read(write_gguf(tmp_path / "tiny.gguf", name))
    target = transformer.make(config)
  return float(np.abs(whole(target, params, tokens) - want).max())


@pytest.mark.parametrize(
  "name, source",
  [(n, "folder") for n in NAMES] + [(n, "gguf") for n in IN_GGUF],
)
def test_agrees_with_transformers(name, source, tmp_path):
  """At every one of 60 positions, to 1e-4 in float32 (B23, B26, B27)."""
  found = error(name, source, tmp_path)
  print(f"| {name} | {source} | {found:.1e} |")
  assert found < 1e-4


# One token at a time is a program of its own: by default for the families that
# have, together, every switch.
ONE = ("qwen2_window", "gemma2", "gemma3_text")


@pytest.mark.parametrize(
  "name, chunk",
  [(name, 7) for name in NAMES]
  + [(name, 1) for name in ONE]
  + [
    pytest.param(name, 1, marks=pytest.mark.slow)
    for name in NAMES
    if name not in ONE
  ],
)
def test_cached_and_ragged(name, chunk):
  """In pieces, the second row five tokens behind the first (B45)."""
  target, params, _, tokens, want = opened(name)
  (B, T), late = tokens.shape, np.array([0, 5])
  cache, slots = target.init_cache(B, 64), 64
  for at in range(0, T + 5, chunk):
    places = at + np.arange(chunk) - late[:, None]  # [B, chunk]
    real = (places >= 0) & (places < T)
    fed = np.take_along_axis(tokens, np.clip(places, 0, T - 1), 1)
    ours, cache = _run(
      target, params, jnp.asarray(fed), np.where(real, places, slots), cache
    )
    for b in range(B):
      ok = real[b]
      np.testing.assert_allclose(
        np.asarray(ours)[b, ok], want[b, places[b, ok]], atol=1e-4
      )


def _asked(tokens, n):
  """A prompt longer than the window, and a shorter one."""
  return request.make(
    [tokens[0, :30].tolist(), tokens[1, :9].tolist()], max_new=n
  )


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text"])
def test_rolling_back_behind_a_window(name):
  """Greedy with a random draft = plain, K = 4 and a window of 12 (B58)."""
  target, params, config, tokens, _ = opened(name)
  other = jax.tree.map(lambda x: x + 0.04 * jnp.sin(99 * x), params)
  ask = _asked(tokens, 40)
  plain = generate.autoregressive(target, params, ask, max_new_tokens=40)
  draft = lm.make(target, config.vocab_size)
  out = generate.speculative(
    target, draft, params, other, ask, num_draft=4, max_new_tokens=40
  )
  np.testing.assert_array_equal(out.tokens, plain.tokens)
  rounds = out.round.max(1) + 1
  assert 8 < rounds.max() < 40  # some were kept, and some were not


def test_a_window_matters():
  """The references see it: all tokens give other numbers."""
  _, params, config, tokens, want = opened("mistral")
  wide = transformer.make(dataclasses.replace(config, windows=()))
  got = whole(wide, params, tokens)
  np.testing.assert_allclose(got[:, :12], want[:, :12], atol=1e-4)
  assert np.abs(got - want)[:, 13:].max() > 0.1


def test_switches_that_are_off_leave_nothing():
  """A Llama's program has one table of angles, and no norm or tanh more."""
  params, config = read(weights_test.LLAMA / "gqa_untied")
  target = transformer.make(config)
  tokens = jnp.zeros((1, 1), jnp.int32)

  def step(params, cache):
    hidden, _, cache = target.apply(params, tokens, tokens, cache)
    return target.unembed(params, hidden), cache

  text = str(jax.make_jaxpr(step)(params, target.init_cache(1, 64)))
  count = lambda name: text.count(f"= {name} ")
  assert (count("cos"), count("sin"), count("tanh")) == (1, 1, 0)
  assert count("rsqrt") == 2 * config.layers + 1
  assert count("and") == 0


# Descriptions and drafts


@pytest.mark.parametrize("name", NAMES)
def test_descriptions_are_read_back(name):
  """Of a model, and of some of its layers as a draft has them."""
  config = opened(name)[2]
  for layers in [range(config.layers), (0,), (config.layers - 1, 1)]:
    part = transformer.some_layers(config, tuple(layers))
    assert families.from_hf(describe.to_hf(part)) == part
  kind = describe.to_hf(config)["model_type"]
  assert kind == read_folder(FAMILIES / name)[0]["model_type"]


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_an_exported_model_is_the_model(name, tmp_path):
  """Tensors go back under their names: `weights.tensors` undoes `load`."""
  _, params, config, _, _ = opened(name)
  folder = write_folder(
    tmp_path / "again",
    describe.to_hf(config),
    dict(weights.tensors(config, params)),
  )
  again, found = read(folder)
  assert found == config
  weights_test.assert_same(again, params)


def test_a_feature_head_of_gemma():
  """Its layers, norms and cap are the family's; greedy output is plain's.

  Training unrolls what decoding does (`feature.unroll`), windows too.
  """
  target, params, config, tokens, _ = opened("gemma2")
  layers = transformer.some_layers(config, (0,))  # one with a window
  head = feature.Config(layers, (0, 2))
  own = {k: params[k] for k in ("embed", "norm", "layer_0")}
  own |= feature.begin(head, 1.0)
  ask = _asked(tokens, 30)
  plain = generate.autoregressive(target, params, ask, max_new_tokens=30)
  drafter = feature.make(head, config.vocab_size)
  out = generate.speculative(
    target, drafter, params, own, ask, num_draft=4, max_new_tokens=30
  )
  np.testing.assert_array_equal(out.tokens, plain.tokens)
  _unrolled(target, params, head, own, tokens)


def _unrolled(target, params, head, own, tokens):
  """Depth 1 of `unroll` is one pass with the cache that decoding has."""
  at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  _, taps, _ = target.apply(
    params, jnp.asarray(tokens), at, None, features=head.features
  )
  a = feature.unroll(head, own, jnp.asarray(tokens), taps, 2)
  before = jnp.pad(feature.fuse(head, own, taps), ((0, 0), (1, 0), (0, 0)))
  x = feature.joined(head, own, jnp.asarray(tokens), before[:, :-1])
  near = (at[:, None] <= at[:, :, None]) & (at[:, :, None] - at[:, None] < 12)
  blind = dataclasses.replace(head.layers, windows=())
  want, _ = transformer.layers(blind, own, x, at, near, None)
  np.testing.assert_allclose(a[:, :, 0], want, atol=1e-4)


# Files


PREFIXES = "language_model.model", "model.language_model"


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_text_model_of_one_that_reads_images(tmp_path, prefix):
  """Its tensors alone are read, and its group of the description."""
  text, tensors = read_folder(FAMILIES / "gemma3_text")
  config = dict(model_type="gemma3", text_config=text)
  named = {k.replace("model.", f"{prefix}.", 1): x for k, x in tensors.items()}
  named["vision_tower.x.weight"] = np.ones((2, 2), np.float32)
  named["multi_modal_projector.y"] = np.ones(2, np.float32)
  got, found = read(write_folder(tmp_path / "both", config, named))
  assert found == opened("gemma3_text")[2]
  weights_test.assert_same(got, opened("gemma3_text")[1])
  named["other.x"] = np.ones(2, np.float32)
  folder = write_folder(tmp_path / "other", config, named)
  with pytest.raises(UserError, match=r"has a tensor 'other\.x'"):
    load.source(str(folder))


K_QUANTS = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants(tmp_path, kind):
  """A model with every matrix in blocks of 256, whole rows at once (B27)."""
  size, halves = K_QUANTS[kind]
  rng, stored = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
  config = dict(
    model_type="llama",
    vocab_size=64,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
  )
  like = families.from_hf(config)
  shapes = {k: s for leaf in weights.plan(like) for k, s in leaf.parts.items()}
  tensors = {k: np.ones(s, np.float32) for k, s in shapes.items()}
  blocks = {}

  def quantise(x, _):
    if x.ndim == 1:
      return x
    raw = rng.integers(0, 256, (x.shape[0], size), np.uint8)
    for at in halves:  # scales: a random half may be no number
      one = np.full((x.shape[0], 1), 0.01, np.float16).view(np.uint8)
      raw[:, at : at + 2] = one
    blocks[len(blocks)] = raw
    return raw

  patched = pytest.MonkeyPatch()
  with patched.context() as patch:
    patch.setattr(gguf, "quantize", quantise)
    # not permuted, as its rows are of no numbers yet
    path = weights_test.write_gguf(tmp_path / "k.gguf", config, tensors, kind)
  matrices = [name for name, x in tensors.items() if x.ndim > 1]
  values = {k: x for k, x in tensors.items() if x.ndim == 1}
  for raw, name in zip(blocks.values(), matrices, strict=True):
    x = gguf.dequantize(raw, stored)
    if "q_proj" in name or "k_proj" in name:
      x = x.reshape(2, 64, 2, 256).swapaxes(1, 2).reshape(256, 256)
    values[name] = np.ascontiguousarray(x)
  want, _ = read(write_folder(tmp_path / "folder", config, values))
  weights_test.assert_same(read(path)[0], want)
