"""Every file format gives the same parameter tree, or one line of complaint."""

import json
import math
import pathlib
import random
import shutil
import sys
import time
import tracemalloc

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from tokenizers import Tokenizer, models

from benchmarks import loading
from specjax.errors import UserError
from specjax.models import describe, hf, load, transformer, weights

LLAMA = pathlib.Path(__file__).parent / "data" / "llama"
TINY = sorted(path.name for path in LLAMA.iterdir())
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")

# The names of llama.cpp, written out: the code asks the gguf package instead.
GGUF_NAMES = {
  "model.embed_tokens": "token_embd",
  "model.norm": "output_norm",
  "lm_head": "output",
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}
TOKENS = [chr(33 + i) for i in range(94)] + ["ab", "cd"]  # 96, as the models


def read_folder(folder):
  """Return (config.json, {name: tensor as stored})."""
  tensors = {}
  for path in sorted(folder.glob("*.safetensors")):
    tensors |= safetensors.numpy.load_file(path)
  return json.loads((folder / "config.json").read_text()), tensors


def write_folder(folder, config, tensors):
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config))
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  return folder


def gguf_name(name):
  stem, _, kind = name.rpartition(".")
  if not stem.startswith("model.layers."):
    return f"{GGUF_NAMES[stem]}.{kind}"
  _, _, i, part = stem.split(".", 3)
  return f"blk.{i}.{GGUF_NAMES[part]}.{kind}"


def permute(x, heads):
  """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
  halves = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
  return halves.swapaxes(1, 2).reshape(x.shape)


def rope_factors(rope, dim):
  """The tensor rope_freqs of the same converter."""
  low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
  high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
  factors = []
  for i in range(0, dim, 2):
    wave = 2 * math.pi * rope["rope_theta"] ** (i / dim)
    smooth = (low / wave - 1) / (low / high - 1)
    blend = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors.append(
      1 if wave < high else rope["factor"] if wave > low else blend
    )
  return np.array(factors, np.float32)


def write_gguf(path, config, tensors, kind="F32", tokens=TOKENS, **fields):
  """Write a model as llama.cpp's converter does; `fields` replace metadata."""
  heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
  dim = config["head_dim"]
  rope = config.get("rope_parameters") or dict(
    config["rope_scaling"], rope_theta=config["rope_theta"]
  )
  metadata = {
    "context_length": config["max_position_embeddings"],
    "embedding_length": config["hidden_size"],
    "block_count": config["num_hidden_layers"],
    "feed_forward_length": config["intermediate_size"],
    "attention.head_count": heads,
    "attention.head_count_kv": kv,
    "attention.key_length": dim,
    "vocab_size": config["vocab_size"],
  }
  writer = gguf.GGUFWriter(path, "llama")
  for key, value in (metadata | fields).items():
    writer.add_uint32(f"llama.{key}", value)
  writer.add_float32("llama.rope.freq_base", rope["rope_theta"])
  eps = config["rms_norm_eps"]
  writer.add_float32("llama.attention.layer_norm_rms_epsilon", eps)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("gpt-2")
  writer.add_token_list(tokens)
  writer.add_token_types([1] * len(tokens))
  writer.add_token_merges(["a b", "c d"])
  if rope["rope_type"] == "llama3":
    writer.add_tensor("rope_freqs.weight", rope_factors(rope, dim))
  for name, x in tensors.items():
    x = np.asarray(x, np.float32)
    if "q_proj" in name or "k_proj" in name:
      x = permute(x, heads if "q_proj" in name else kv)
    stored = gguf.GGMLQuantizationType[kind if x.ndim > 1 else "F32"]
    data = gguf.quantize(x, stored)
    writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.fixture
def tiny_gguf(tmp_path):
  """A tied model with llama3's rope_freqs, stored as Q8_0."""
  config, tensors = read_folder(LLAMA / "mha_llama3")
  return write_gguf(tmp_path / "tiny.gguf", config, tensors, "Q8_0")


def read(reference, dtype=jnp.float32, **kwargs):
  """Return (params, config)."""
  return weights.load(load.source(str(reference)), dtype=dtype, **kwargs)


def assert_same(got, want):
  """The same keys, and every leaf equal in shape, type and each number."""
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
  ):
    assert (a.dtype, a.shape) == (b.dtype, b.shape), path
    np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def complaint(reference):
  """Return the one line with which a reference is refused."""
  with pytest.raises(UserError) as caught:
    load.opened(str(reference))
  assert len(str(caught.value).splitlines()) == 1
  return str(caught.value)


@pytest.mark.parametrize("name", TINY)
def test_a_float32_gguf_is_the_folder_it_came_from(tmp_path, name):
  """Every leaf, and the log-probabilities at 200 positions (B26, B27).

  With GQA, biases, an explicit head width, a tied head (no output.weight) and
  llama3 scaling, which a GGUF has in its tensor rope_freqs alone.
  """
  config, tensors = read_folder(LLAMA / name)
  path = write_gguf(tmp_path / "tiny.gguf", config, tensors)
  params, ours = read(path)
  want, theirs = read(LLAMA / name)
  assert_same(params, want)
  np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq, rtol=1e-6)
  fixed = dict(inv_freq=(), norm_eps=0)
  assert ours.__dict__ | fixed == theirs.__dict__ | fixed
  reference = np.load(LLAMA / name / "reference.npz")
  target, tokens = transformer.make(ours), reference["tokens"]
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden, _, _ = target.apply(params, tokens, positions, None)
  logprobs = jax.nn.log_softmax(target.unembed(params, hidden))
  np.testing.assert_allclose(logprobs, reference["logprobs"], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gqa_untied", "gqa_tied", "bias"])
def test_a_quantised_gguf_is_the_folder_of_its_values(tmp_path, kind, name):
  """Exactly what `gguf.dequantize` makes of each tensor's blocks (B27)."""
  config, tensors = read_folder(LLAMA / name)
  path = write_gguf(tmp_path / "tiny.gguf", config, tensors, kind)
  stored = gguf.GGMLQuantizationType[kind]
  values = {
    name: gguf.dequantize(gguf.quantize(x, stored), stored) if x.ndim > 1 else x
    for name, x in tensors.items()
  }
  want, _ = read(write_folder(tmp_path / "folder", config, values))
  assert_same(read(path)[0], want)


def test_types_may_differ_from_tensor_to_tensor(tmp_path, monkeypatch):
  """One file with every type, read in pieces of two blocks (B27)."""
  config, tensors = read_folder(LLAMA / "gqa_untied")
  kinds = [*KINDS, "Q5_0", "Q5_1"]
  mixed = {n: kinds[i % len(kinds)] for i, n in enumerate(sorted(tensors))}
  write = gguf.GGUFWriter.add_tensor
  values = {}
  for name, x in tensors.items():
    kind = gguf.GGMLQuantizationType[mixed[name] if x.ndim > 1 else "F32"]
    values[name] = gguf.dequantize(gguf.quantize(x, kind), kind)

  def requantise(writer, name, data, raw_dtype=None):
    hf = {gguf_name(n): n for n in tensors}[name]
    kind = mixed[hf] if data.ndim > 1 else "F32"
    raw_dtype = gguf.GGMLQuantizationType[kind]
    write(writer, name, gguf.quantize(data, raw_dtype), raw_dtype=raw_dtype)

  monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", requantise)
  monkeypatch.setattr("specjax.models.gguf._CHUNK", 64)
  path = write_gguf(tmp_path / "tiny.gguf", config, tensors)
  want, _ = read(write_folder(tmp_path / "folder", config, values))
  assert_same(read(path)[0], want)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_folders_are_cast_exactly(tmp_path, dtype):
  """Widening float16 and bfloat16 changes no number."""
  config, tensors = read_folder(LLAMA / "gqa_tied")
  half = {name: x.astype(dtype) for name, x in tensors.items()}
  wide = {name: x.astype(np.float32) for name, x in half.items()}
  got, _ = read(write_folder(tmp_path / "half", config, half))
  want, _ = read(write_folder(tmp_path / "wide", config, wide))
  assert_same(got, want)


def test_shards_are_one_model(tmp_path):
  config, tensors = read_folder(LLAMA / "sharded")
  assert len(list((LLAMA / "sharded").glob("*.safetensors"))) == 3
  want, _ = read(write_folder(tmp_path / "single", config, tensors))
  assert_same(read(LLAMA / "sharded")[0], want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_are_rounded_once(tiny_gguf, dtype):
  """Each leaf is the float32 one, rounded to nearest."""
  for path in (tiny_gguf, LLAMA / "bias"):
    want = jax.tree.map(lambda x: x.astype(dtype), read(path)[0])
    assert_same(read(path, dtype)[0], want)


@pytest.mark.parametrize(
  "name, untie", [("gqa_tied", False), ("gqa_tied", True), ("bias", False)]
)
def test_random_weights_have_the_tree_of_a_file(monkeypatch, name, untie):
  """And are the same for a seed, others for another."""
  monkeypatch.setattr(load.tokenizer, "byte_level", lambda vocab_size: None)
  architecture, _ = read_folder(LLAMA / name)
  options = dict(dtype=jnp.bfloat16, untie=untie, track=lambda leaves: leaves)
  make = lambda seed: load.random(architecture, seed=seed).read(**options)
  params, config = make(0)
  want, loaded = read(LLAMA / name, jnp.bfloat16, untie=untie)
  like = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert (like(params), config) == (like(want), loaded)
  assert_same(make(0)[0], params)
  other = make(1)[0]
  assert not np.array_equal(other["embed"], params["embed"])
  if untie:
    for tree in (params, want):
      np.testing.assert_array_equal(tree["head"], tree["embed"].T)


def test_the_progress_bar_counts_the_leaves(tiny_gguf):
  """Each array of the tree is one item, an untied head too."""
  for path, untie in ((tiny_gguf, False), (LLAMA / "gqa_tied", True)):
    seen = []
    track = lambda leaves, seen=seen: (seen.append(x) or x for x in leaves)
    params, _ = read(path, untie=untie, track=track)
    assert len(seen) == len(jax.tree.leaves(params))


@pytest.mark.parametrize("name", TINY)
def test_the_plan_is_the_tree_of_the_module(name):
  """Each leaf's parts fill it, and no tensor of the file is left over."""
  source = load.source(str(LLAMA / name))
  for leaf in weights.plan(source.config):
    sizes = [math.prod(shape) for shape in leaf.parts.values()]
    assert sum(sizes) == math.prod(leaf.shape), leaf
  parts = [n for leaf in weights.plan(source.config) for n in leaf.parts]
  assert sorted(parts) == sorted(source.shapes)


def test_parameters_outlive_their_file(tmp_path):
  """No leaf is a view of the file, which another program may write over."""
  config, tensors = read_folder(LLAMA / "gqa_tied")
  path = write_gguf(tmp_path / "tiny.gguf", config, tensors)
  folder = write_folder(tmp_path / "folder", config, tensors)
  for reference, file in ((path, path), (folder, folder / "model.safetensors")):
    params, _ = read(reference)
    before = jax.tree.map(np.array, params)
    with open(file, "r+b") as f:
      f.write(bytes(file.stat().st_size))
    assert_same(params, before)


# What does not fit together


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_head_present_or_absent(tmp_path, tied, head):
  """Tied: the embedding, even beside a head; untied: the head or none (B24)."""
  config, tensors = read_folder(LLAMA / "gqa_tied")
  config["tie_word_embeddings"] = tied
  if head:
    tensors["lm_head.weight"] = 1 + tensors["model.embed_tokens.weight"]
  folder = write_folder(tmp_path, config, tensors)
  if not tied and not head:
    assert "no tensor lm_head.weight" in complaint(folder)
    return
  params, _ = read(folder)
  assert ("head" in params) == (not tied)
  if not tied:
    np.testing.assert_array_equal(params["head"].T, 1 + params["embed"])
  tied_again, _ = read(folder, untie=True)
  moved = 0 if tied else 1
  np.testing.assert_array_equal(
    tied_again["head"].T, moved + tied_again["embed"]
  )


GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize("kind, dtype", [("I8", np.int8), ("F64", float)])
def test_folders_stored_in_other_types(tmp_path, kind, dtype):
  """Whole numbers are a quantised model, and would load as nonsense."""
  config, tensors = read_folder(LLAMA / "gqa_untied")
  tensors[GATE] = tensors[GATE].astype(dtype)
  line = complaint(write_folder(tmp_path, config, tensors))
  assert f"'{GATE}' is stored as {kind}; F32, F16, BF16 can be read" in line


@pytest.mark.parametrize("kind", ["I32", "F64", "Q8_K"])
def test_gguf_stored_in_other_types(tmp_path, monkeypatch, kind):
  """Types that `gguf` knows and does not decode are named (B27)."""
  stored = gguf.GGMLQuantizationType[kind]
  block, size = gguf.GGML_QUANT_SIZES[stored]
  config, tensors = read_folder(LLAMA / "gqa_untied")
  write = gguf.GGUFWriter.add_tensor

  def add(writer, name, data, raw_dtype=None):
    if name == "blk.1.ffn_gate.weight":
      data = np.zeros((96, -(-64 // block) * size), np.uint8)
      raw_dtype = stored
    write(writer, name, data, raw_dtype=raw_dtype)

  monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
  line = complaint(write_gguf(tmp_path / "tiny.gguf", config, tensors))
  assert f"'blk.1.ffn_gate.weight' is stored as {kind}; F32," in line


@pytest.mark.parametrize(
  "text, said",
  [
    ('["a"]', "config.json must hold an object, found ['a']"),
    ("5", "config.json must hold an object, found 5"),
    ('{"a":', "config.json is not valid JSON"),
    ("[" * 99_999, "config.json is not valid JSON"),
    ("", "config.json is not valid JSON"),
    ("{}", "config.json: model type None is not supported"),
  ],
)
def test_a_config_that_is_no_object(tmp_path, text, said):
  folder = write_folder(tmp_path, *read_folder(LLAMA / "bias"))
  (folder / "config.json").write_text(text)
  assert said in complaint(folder)
  (folder / "config.json").write_bytes(b"\xff\xfe{}")
  assert "config.json is not valid JSON" in complaint(folder)


def test_index_and_shards_that_do_not_fit(tmp_path):
  """A shard that is absent, a tensor that no shard has, no names at all."""
  shutil.copytree(LLAMA / "sharded", tmp_path, dirs_exist_ok=True)
  index = tmp_path / "model.safetensors.index.json"
  whole = json.loads(index.read_text())
  first, *_, last = sorted(set(whole["weight_map"].values()))
  text = lambda change: json.dumps(whole | {"weight_map": change})
  index.write_text(text(dict.fromkeys(whole["weight_map"], first)))
  assert "tensors of 1 layers, but its config says 2" in complaint(tmp_path)
  for bad in (["a"], {"a": 5}, {"a": ["b"]}, {"a": "../a"}, {}, None, "text"):
    index.write_text(text(bad))
    with pytest.raises(
      UserError, match="weight_map does not name files|of 0 l"
    ):
      hf.open_folder(tmp_path)
  index.write_text(json.dumps(whole))
  (tmp_path / last).unlink()
  assert last in complaint(tmp_path)
  with pytest.raises(UserError, match=f"{last} is corrupt, trunc.* or missing"):
    hf.open_folder(tmp_path)


@pytest.mark.parametrize("tokens", [95, 96, 97])
def test_tokenizer_and_vocabulary(tmp_path, tokens):
  """Padded is fine (B11); an id without an embedding is refused.

  JAX's gather would take it for the last one.
  """
  config, tensors = read_folder(LLAMA / "gqa_untied")
  folder = write_folder(tmp_path / "folder", config, tensors)
  names = ["xx", *TOKENS][-tokens:]
  bpe = models.BPE({name: i for i, name in enumerate(names)}, [])
  Tokenizer(bpe).save(str(folder / "tokenizer.json"))
  path = write_gguf(tmp_path / "tiny.gguf", config, tensors, tokens=names)
  for reference in (folder, path):
    if tokens <= 96:
      assert load.opened(str(reference)).config.vocab_size == 96
    else:
      assert "up to 96, the model a vocabulary of 96" in complaint(reference)


# Files that are broken


def test_a_gguf_cut_anywhere_is_refused(tiny_gguf):
  """In the header, between tensors, in the last one; also no byte at all."""
  whole = tiny_gguf.read_bytes()
  ends = {*range(0, 64), *range(64, len(whole), 997), len(whole) - 32}
  for end in ends:
    tiny_gguf.write_bytes(whole[:end])
    assert "tiny.gguf is corrupt, truncated or no GGUF" in complaint(tiny_gguf)
  tiny_gguf.write_text("All work and no play makes Jack a dull boy.\n" * 99)
  assert "GGUF magic invalid" in complaint(tiny_gguf)


def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path):
  folder = write_folder(tmp_path, *read_folder(LLAMA / "gqa_tied"))
  file = folder / "model.safetensors"
  whole = file.read_bytes()
  for end in {*range(0, 16), *range(16, len(whole), 4999), len(whole) - 1}:
    file.write_bytes(whole[:end])
    assert "safetensors is corrupt, truncated" in complaint(folder)
  file.write_text("All work and no play makes Jack a dull boy.\n" * 99)
  assert "safetensors is corrupt, truncated" in complaint(folder)


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_byte_is_a_complaint_or_another_model(tmp_path, seed):
  """Never another exception, and never more memory than the file's size asks.

  Some bytes of a header may be anything: a name in the metadata, a frequency.
  """
  rng = random.Random(seed)
  config, tensors = read_folder(LLAMA / "mha_llama3")
  path = write_gguf(tmp_path / "tiny.gguf", config, tensors, "Q4_0")
  folder = write_folder(tmp_path / "folder", config, tensors)
  file = folder / "model.safetensors"
  single = folder / "model.safetensors"
  refused = 0
  tracemalloc.start()
  for reference, file, size in ((path, path, 4600), (folder, single, 2500)):
    whole = file.read_bytes()
    for _ in range(100):
      broken = bytearray(whole)
      broken[rng.randrange(size)] = rng.choice([0, 1, 127, 128, 255])
      file.write_bytes(broken)
      try:
        read(reference)
        load.opened(str(reference))
      except UserError as e:
        assert len(str(e).splitlines()) == 1
        refused += 1
  assert 50 < refused < 200
  assert tracemalloc.get_traced_memory()[1] < 50e6
  tracemalloc.stop()


@pytest.mark.parametrize("count", [2**20, 2**31, 2**40, 2**63, 2**64 - 1])
def test_absurd_counts_end_at_once(tiny_gguf, count):
  """Of tensors, keys, bytes of a string, items of an array, dimensions."""
  whole = tiny_gguf.read_bytes()
  key = b"tokenizer.ggml."
  places = {
    "tensors": 8,
    "keys": 16,
    "bytes of a key": 24,
    "bytes of a text": whole.index(key + b"model") + len(key) + 5 + 4,
    "texts": whole.index(key + b"tokens") + len(key) + 6 + 8,
    "numbers": whole.index(key + b"token_type") + len(key) + 10 + 8,
    "rows": whole.index(b"token_embd.weight") + 17 + 4 + 8,
  }
  tracemalloc.start()
  began = time.perf_counter()
  for place, at in places.items():
    broken = whole[:at] + count.to_bytes(8, "little") + whole[at + 8 :]
    tiny_gguf.write_bytes(broken)
    assert "is corrupt, truncated" in complaint(tiny_gguf), place
  assert time.perf_counter() - began < 5
  assert tracemalloc.get_traced_memory()[1] < 20e6
  tracemalloc.stop()


@pytest.mark.parametrize("kind", [9, 13, 2**31])
def test_arrays_of_what_is_no_number(tiny_gguf, kind):
  """Arrays of arrays, which no model has, and of types that do not exist."""
  whole = tiny_gguf.read_bytes()
  at = whole.index(b"tokenizer.ggml.token_type") + 25 + 4
  broken = whole[:at] + kind.to_bytes(4, "little") + whole[at + 4 :]
  tiny_gguf.write_bytes(broken)
  assert f"an array of type {kind}" in complaint(tiny_gguf)


def test_absurd_counts_of_a_safetensors_header(tmp_path):
  folder = write_folder(tmp_path, *read_folder(LLAMA / "gqa_tied"))
  file = folder / "model.safetensors"
  whole = file.read_bytes()
  for count in (0, 1, 2**20, 2**40, 2**64 - 1):
    file.write_bytes(count.to_bytes(8, "little") + whole[8:])
    assert "is corrupt, truncated" in complaint(folder)


def test_overlapping_tensors_are_refused(tiny_gguf):
  """An offset that points at another tensor would load as nonsense."""
  whole = tiny_gguf.read_bytes()
  at = whole.index(b"blk.0.attn_k.weight") + 19 + 4 + 16 + 4
  assert int.from_bytes(whole[at : at + 8], "little") > 0
  tiny_gguf.write_bytes(whole[:at] + bytes(8) + whole[at + 8 :])
  assert "'blk.0.attn_k.weight' is at byte" in complaint(tiny_gguf)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
  "form, dtype",
  [("gguf", "float32"), ("gguf", "bfloat16"), ("folder", "float32")],
)
def test_loading_holds_one_copy(smollm2_gguf, tmp_path, form, dtype):
  """The real model's peak is under 1.6 times its parameters (B27).

  They have 651 MB in float32, with the untied head, and half that in bfloat16,
  where the mapped file's 98 MB come on top. A folder's tensors are copied out
  of its file, which is not mapped longer than for one.
  """
  path = smollm2_gguf
  if form == "folder":
    source, path = load.source(str(path)), tmp_path / "folder"
    names = [x for leaf in weights.plan(source.config) for x in leaf.parts]
    tensors = {name: source.read(name) for name in names}
    write_folder(path, describe.to_hf(source.config), tensors)
    load.opened(str(smollm2_gguf)).tokenizer.backend.save(
      str(path / "tokenizer.json")
    )
  found = loading.measure(path, dtype)
  held = 162.8e6 * jnp.dtype(dtype).itemsize
  assert found["weights"] == pytest.approx(held, rel=0.01)
  assert found["peak"] < 1.6 * held + (98e6 if dtype == "bfloat16" else 0)
