"""An architecture that is unknown, or that cannot be, is refused by name."""

import math

import numpy as np
import pytest
import weights_test
from ml_collections import ConfigDict

from specjax.errors import UserError
from specjax.models import families, rope

LLAMA = weights_test.LLAMA
CONFIG, TENSORS = weights_test.read_folder(LLAMA / "gqa_untied")
LLAMA3 = dict(
  rope_type="llama3",
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=64,
)


def refused(call, *args):
  """Return the one line with which a description is refused."""
  with pytest.raises(UserError) as caught:
    call(*args)
  assert len(str(caught.value).splitlines()) == 1
  return str(caught.value)


NEEDED = (
  "vocab_size",
  "hidden_size",
  "num_hidden_layers",
  "num_attention_heads",
  "intermediate_size",
  "max_position_embeddings",
  "rms_norm_eps",
)


@pytest.mark.parametrize("key", NEEDED)
def test_needed_keys_of_a_config(key):
  """Absent, null, of another type, or no size at all; the key is named."""
  rest = {k: v for k, v in CONFIG.items() if k != key}
  assert f"config.json has no '{key}'" in refused(families.from_hf, rest)
  assert f"config.json has no '{key}'" in refused(
    families.from_hf, rest | {key: None}
  )
  for bad in ("64", [64], {}, True, 0, -64, 10**32, math.nan, math.inf):
    line = refused(families.from_hf, rest | {key: bad})
    assert f"config.json: '{key}' must be " in line
    assert line.endswith(f"found {bad!r}")


UNKNOWN = {  # what a config says instead, and what the refusal names
  "family": (dict(model_type="mamba"), "model type 'mamba'", "known: llama"),
  "none": (dict(model_type=None), "model type None"),
  "list": (dict(model_type=["llama"]), "model type ['llama']"),
  "activation": (dict(hidden_act="gelu"), "activation 'gelu'", "known: silu"),
  "gptq": (
    dict(quantization_config=dict(quant_method="gptq", bits=4)),
    "quantisation 'gptq'",
  ),
  "group": (dict(quantization_config=4), "quantization_config", "found 4"),
  "flag": (dict(tie_word_embeddings="no"), "tie_word_embeddings", "'no'"),
  "heads": (
    dict(num_attention_heads=4, num_key_value_heads=3),
    "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3",
  ),
  "width": (
    dict(num_attention_heads=6, head_dim=None),
    "width 64 is not a multiple of num_attention_heads = 6",
  ),
  "odd": (dict(head_dim=15), "head width 15 is odd"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_parts_of_a_config(case):
  changes, *said = UNKNOWN[case]
  line = refused(families.from_hf, CONFIG | changes)
  assert all(part in line for part in said), line


def scalings():
  """(rotary settings, what the refusal names)."""
  for kind in ("yarn", "dynamic", "longrope", "su", "mrope", "", 8, None):
    yield dict(rope_type=kind, factor=2.0), f"rotary scaling {kind!r}"
  yield dict(type="yarn", factor=2.0), "rotary scaling 'yarn'"
  yield dict(rope_type="linear"), "has no 'factor'"
  for key in LLAMA3:
    if key != "rope_type":
      rest = {k: v for k, v in LLAMA3.items() if k != key}
      yield rest, f"has no '{key}'"
      yield rest | {key: "8"}, f"'{key}' must be a positive number, found '8'"
      yield rest | {key: 0}, f"'{key}' must be a positive number, found 0"
  yield LLAMA3 | dict(low_freq_factor=4), "4 is not below high_freq_factor 4.0"
  yield LLAMA3 | dict(partial_rotary_factor=0.5), "partial rotary factor 0.5"
  yield dict(full_attention=dict(rope_type="default")), "'full_attention'"
  yield [1.0, 2.0], "must be a group of keys, found [1.0, 2.0]"


@pytest.mark.parametrize("rope, said", list(scalings()))
def test_rotary_scalings_that_are_refused(rope, said):
  """In both spellings; none is taken for no scaling (B23)."""
  plain = {k: v for k, v in CONFIG.items() if k != "rope_parameters"}
  assert said in refused(families.from_hf, plain | dict(rope_scaling=rope))
  assert said in refused(families.from_hf, plain | dict(rope_parameters=rope))


def test_both_spellings_of_rotary_scaling_are_one():
  """Also through a ConfigDict, as a script's config brings it (B23)."""
  plain = {k: v for k, v in CONFIG.items() if k != "rope_parameters"}
  old = plain | dict(rope_theta=500.0, rope_scaling=LLAMA3)
  older = plain | dict(
    rope_theta=500, rope_scaling={**LLAMA3, "rope_type": None, "type": "llama3"}
  )
  new = plain | dict(rope_parameters=dict(LLAMA3, rope_theta=500.0))
  want = rope.inv_freq(16, theta=500, kind="llama3", scaling=LLAMA3)
  for config in (old, older, new, ConfigDict(new)):
    assert families.from_hf(config).inv_freq == want
  halved = plain | dict(
    rope_theta=500.0, rope_scaling=dict(type="linear", factor=2.0)
  )
  base = families.from_hf(plain | dict(rope_theta=500.0)).inv_freq
  assert families.from_hf(halved).inv_freq == tuple(f / 2 for f in base)


def test_defaults_of_a_config():
  """What transformers takes for an absent or null key."""
  config = {k: CONFIG[k] for k in (*NEEDED, "model_type")}
  got = families.from_hf(config)
  assert (got.kv_heads, got.head_dim, got.tied) == (4, 16, False)
  assert not (got.qkv_bias or got.out_bias or got.mlp_bias)
  assert got.inv_freq[1] == 10000 ** (-2 / 16)
  none = dict.fromkeys(["num_key_value_heads", "head_dim", "rope_scaling"])
  assert families.from_hf(config | none) == got


def metadata(**changes):
  """GGUF fields of a tiny model; None removes one."""
  fields = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
  }
  fields |= {k.replace("__", "."): v for k, v in changes.items()}
  return {k: v for k, v in fields.items() if v is not None}


def test_defaults_of_gguf_metadata():
  got = families.from_gguf(metadata(), ())
  assert (got.kv_heads, got.head_dim, got.vocab_size) == (4, 16, 3)
  assert got.tied and not families.from_gguf(metadata(), ["output.weight"]).tied
  assert families.from_gguf(metadata(llama__vocab_size=4), ()).vocab_size == 4


GGUF_UNKNOWN = {
  "family": (dict(general__architecture="rwkv"), "architecture 'rwkv'"),
  "no family": (dict(general__architecture=None), "architecture None"),
  "yarn": (dict(llama__rope__scaling__type="yarn"), "rotary scaling 'yarn'"),
  "linear": (dict(llama__rope__scaling__type="linear"), "has no 'factor'"),
  "old": (dict(llama__rope__scale_linear=2.0), "rope.scale_linear 2.0"),
  "partial": (dict(llama__rope__dimension_count=8), "rotary dimensions 8"),
  "no layers": (dict(llama__block_count=None), "has no 'llama.block_count'"),
  "list": (dict(llama__attention__head_count=[4, 4]), "found [4, 4]"),
  "heads": (
    dict(llama__attention__head_count_kv=3),
    "llama.attention.head_count = 4 is not a multiple",
  ),
  "no tokens": (
    dict(tokenizer__ggml__tokens=None),
    "has no 'llama.vocab_size'",
  ),
}


@pytest.mark.parametrize("case", GGUF_UNKNOWN)
def test_unknown_parts_of_gguf_metadata(case):
  changes, said = GGUF_UNKNOWN[case]
  assert said in refused(families.from_gguf, metadata(**changes), ())


@pytest.mark.parametrize("bad", [np.ones(7), np.zeros(8), np.full(8, np.nan)])
def test_rope_factors_must_be_usable(bad):
  line = refused(families.from_gguf, metadata(), (), bad)
  assert "rope_freqs.weight must be 8 positive numbers" in line
  got = families.from_gguf(metadata(), (), np.full(8, 2.0)).inv_freq
  want = families.from_gguf(metadata(), ()).inv_freq
  assert got == tuple(f / 2 for f in want)


# Tensors that are not those of the description


def without(tensors, name):
  return {k: x for k, x in tensors.items() if k != name}


NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"
MISFITS = {  # changes of the config, of the tensors, and what is said
  "more layers": (dict(num_hidden_layers=3), {}, "of 2 layers", "says 3"),
  "fewer layers": (dict(num_hidden_layers=1), {}, "of 2 layers", "says 1"),
  "vocabulary": (dict(vocab_size=97), {}, "embed", "[96, 64]", "[97, 64]"),
  "width": (dict(hidden_size=32), {}, "embed", "[96, 64]", "[96, 32]"),
  "mlp": (dict(intermediate_size=64), {}, "down", "[64, 96]", "[64, 64]"),
  "head width": (dict(head_dim=8), {}, "o_proj", "[64, 64]", "[64, 32]"),
  "kv": (dict(num_key_value_heads=1), {}, "k_proj", "[32, 64]", "[16, 64]"),
  "bias": (dict(attention_bias=True), {}, "_proj.bias", "(8 missing)"),
  "left over": ({}, {"model.x": np.ones(3)}, "'model.x'", "(1 left over)"),
  "missing": ({}, {NORM: None}, f"no tensor {NORM}", "(1 missing)"),
  "vector": ({}, {NORM: np.ones(63)}, NORM, "[63]", "[64]"),
  "turned": ({}, {GATE: np.ones((64, 96))}, GATE, "[64, 96]", "[96, 64]"),
  "flat": ({}, {GATE: np.ones(96 * 64)}, GATE, "[6144]", "[96, 64]"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_tensors_that_the_config_does_not_imply(tmp_path, case):
  """The tensor, the shape found and the shape implied are named (B17)."""
  changes, new, *said = MISFITS[case]
  config, tensors = weights_test.read_folder(LLAMA / "gqa_untied")
  for name, x in new.items():
    tensors = without(tensors, name)
    if x is not None:
      tensors[name] = x.astype(np.float32)
  line = weights_test.complaint(
    weights_test.write_folder(tmp_path, config | changes, tensors)
  )
  assert all(part in line for part in said), line


def test_gguf_tensors_that_its_header_does_not_imply(tmp_path):
  """The same checks, from the GGUF's own header (B17)."""
  config, tensors = weights_test.read_folder(LLAMA / "gqa_untied")
  path = tmp_path / "tiny.gguf"
  weights_test.write_gguf(path, config, tensors, block_count=3)
  assert "of 2 layers, but its config says 3" in weights_test.complaint(path)
  weights_test.write_gguf(path, config, tensors, block_count=2**24)
  assert "of 2 layers, but its config says" in weights_test.complaint(path)
  weights_test.write_gguf(path, config, tensors, vocab_size=95)
  assert (
    "has shape [96, 64], the config implies [95, 64]"
    in weights_test.complaint(path)
  )
  weights_test.write_gguf(path, config, without(tensors, GATE))
  assert f"no tensor {GATE} (1 missing)" in weights_test.complaint(path)
  weights_test.write_gguf(
    path, config, tensors, **{"attention.head_count_kv": 4}
  )
  assert "k_proj.weight has shape [32, 64]" in weights_test.complaint(path)


def test_a_factor_without_a_type_is_linear():
  """B23: llama.cpp's default where a GGUF has only the factor."""
  plain = families.from_gguf(metadata(), ()).inv_freq
  scaled = metadata() | {"llama.rope.scaling.factor": 4.0}
  got = families.from_gguf(scaled, ()).inv_freq
  np.testing.assert_allclose(got, np.array(plain) / 4)


# Windows, caps and what else families have

TINY = weights_test.LLAMA.parent / "families"


def family(name):
  return weights_test.read_folder(TINY / name)[0]


FAMILY_UNKNOWN = {  # a folder, what its config says instead, what is named
  "kind": (
    "gemma2",
    dict(layer_types=["full_attention", "chunked_attention", "x"]),
    "layer type 'chunked_attention' is not supported; known: full_attention",
  ),
  "length": (
    "gemma3_text",
    dict(layer_types=["full_attention"]),
    "'layer_types' must be a list of 3",
  ),
  "window": ("mistral", dict(sliding_window="12"), "'sliding_window' must be"),
  "no window": ("gemma2", dict(sliding_window=None), "no 'sliding_window'"),
  "pattern": (
    "gemma3_old",
    dict(sliding_window_pattern=0),
    "_pattern' must be",
  ),
  "use": ("qwen2", dict(use_sliding_window=1), "'use_sliding_window' must be"),
  "cap": ("gemma2", dict(final_logit_softcapping=-1), "softcapping' must be"),
  "activation": ("gemma2", dict(hidden_activation="gelu"), "activation 'gelu'"),
  "both ways": (
    "gemma3_text",
    dict(use_bidirectional_attention=True),
    "bidirectional attention True",
  ),
  "flat": (
    "gemma3_text",
    dict(rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    "rotary setting 'rope_type'",
  ),
  "yarn": (
    "gemma3_text",
    dict(rope_parameters=dict(full_attention=dict(rope_type="yarn"))),
    "rotary scaling 'yarn'",
  ),
  "no text": ("gemma3_text", dict(model_type="gemma3"), ""),
}


@pytest.mark.parametrize("case", FAMILY_UNKNOWN)
def test_unknown_parts_of_a_family(case):
  """By name, never taken for what is known (B23)."""
  name, changes, said = FAMILY_UNKNOWN[case]
  if case == "no text":
    changes = changes | dict(text_config={"vocab_size": 4})
    said = "has no 'hidden_size'"
  assert said in refused(families.from_hf, family(name) | changes)


def test_absent_keys_of_families():
  """What transformers takes: Gemma's heads, caps and windows; Mistral's."""
  few = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=7)
  got = families.from_hf(
    dict(model_type="gemma3", text_config=few | dict(sliding_window=8))
  )
  assert (got.heads, got.kv_heads, got.head_dim) == (8, 4, 256)
  assert got.tied and got.gelu and got.vocab_size == 262208
  assert got.windows == (8, 8, 8, 8, 8, 0, 8)
  assert (got.query_scalar, got.score_cap, got.logit_cap) == (None, None, None)
  old = {k: v for k, v in family("gemma2").items() if "softcapping" not in k}
  assert families.from_hf(old).score_cap == 50
  mistral = family("mistral")
  del mistral["sliding_window"]
  assert families.from_hf(mistral).windows == (4096, 4096)
  none = families.from_hf(mistral | dict(sliding_window=None))
  assert none.windows == ()


def test_ggufs_of_gemma():
  """As llama.cpp: windows, caps and the 27B models' scores, without keys."""
  of = lambda arch, **changes: families.from_gguf(
    {k.replace("llama.", f"{arch}."): v for k, v in metadata().items()}
    | {"general.architecture": arch}
    | {f"{arch}.{k}": v for k, v in changes.items()},
    (),
  )
  two = of("gemma2")
  assert two.windows == (4096, 0)
  assert (two.score_cap, two.logit_cap) == (50, 30)
  assert of("gemma3").windows == ()
  dim = {"attention.key_length": 8}
  assert of("gemma2", block_count=42, **dim).query_scalar is None
  assert of("gemma2", block_count=46, **dim).query_scalar == 16
  assert of("gemma3", block_count=62, **dim).query_scalar == 16
  with pytest.raises(UserError, match="sliding_window 8 is not supported"):
    of("qwen2", **{"attention.sliding_window": 8})
