"""Every config builds, passes its own checks and does what its lines say."""

import dataclasses
import importlib
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from configs import common, training
from specjax import cache, cli, prompts, recipe, settings
from specjax.errors import UserError
from specjax.models import families, transformer, weights

ROOT = Path(__file__).parents[1]
NAMES = [p.stem for p in sorted((ROOT / "configs").glob("*.py"))]
TRAINING = ["smollm2_feature_train", "smollm2_train", "tiny_train"]
DEFAULTS = ("common", "training")
SPECS = [(n, "") for n in NAMES if n not in (*DEFAULTS, *TRAINING)]
SPECS += [("smollm2", "random"), ("tiny_train", "decode")]
# Layers, heads, heads of keys, head width, width, hidden width, vocabulary,
# tied: as the models' config.json have them.
SHAPES = {
  "Llama-3.2-1B-Instruct": (16, 32, 8, 64, 2048, 8192, 128256, True),
  "Llama-3.2-3B-Instruct": (28, 24, 8, 128, 3072, 8192, 128256, True),
  "Llama-3.1-8B-Instruct": (32, 32, 8, 128, 4096, 14336, 128256, False),
  "Llama-3.1-70B-Instruct": (80, 64, 8, 128, 8192, 28672, 128256, False),
  "Qwen3-0.6B": (28, 16, 8, 128, 1024, 3072, 151936, True),
  "Qwen3-1.7B": (28, 16, 8, 128, 2048, 6144, 151936, True),
  "Qwen3-4B": (36, 32, 8, 128, 2560, 9728, 151936, True),
  "Qwen3-8B": (36, 32, 8, 128, 4096, 12288, 151936, False),
  "Qwen3-14B": (40, 40, 8, 128, 5120, 17408, 151936, False),
  "Qwen3-32B": (64, 64, 8, 128, 5120, 25600, 151936, False),
  "gemma-3-1b-it": (26, 4, 1, 256, 1152, 6912, 262144, True),
  "gemma-3-4b-it": (34, 8, 4, 256, 2560, 10240, 262208, True),
  "gemma-3-12b-it": (48, 16, 8, 256, 3840, 15360, 262208, True),
  "gemma-3-27b-it": (62, 32, 16, 128, 5376, 21504, 262208, True),
}
FAMILY = {"llama3": "llama", "qwen3": "qwen3", "gemma3": "gemma3_text"}
SIZES = [("llama3", size) for size in ("3b", "8b", "70b")]
SIZES += [("qwen3", size) for size in ("1.7b", "4b", "8b", "14b", "32b")]
SIZES += [("gemma3", size) for size in ("4b", "12b", "27b")]
SPECS += SIZES


def _build(name, arg):
  return importlib.import_module(f"configs.{name}").get_config(arg)


@pytest.mark.parametrize("name, arg", SPECS)
def test_config(name, arg):
  config = _build(name, arg)
  config = settings.checked(config)
  assert prompts.read(config)[0].turns[0]
  assert set(cli.flatten(common.decoding())) <= set(cli.flatten(config))
  if config.target == "random":
    families.from_hf(config.architecture)


def _shape(name, reference):
  """The `transformer.Config` of a model on the hub, by SHAPES."""
  keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
  keys += ("head_dim", "hidden_size", "intermediate_size", "vocab_size")
  keys += ("tie_word_embeddings",)
  values = SHAPES[reference.rpartition("/")[2]]
  rest = dict(rope_theta=1e6, rms_norm_eps=1e-6, max_position_embeddings=8192)
  found = dict(zip(keys, values, strict=True), model_type=FAMILY[name])
  return families.from_hf(found | rest)


@pytest.mark.parametrize("name, size", SIZES)
def test_a_pair_of_models(name, size):
  """What its docstring says of its memory, and its mesh divides the heads."""
  config = _build(name, size)
  assert size in config.target.rpartition("/")[2].lower()
  assert config.draft.name == "lm" and config.dtype == "bfloat16"
  pair = [_shape(name, x) for x in (config.target, config.draft.weights)]
  assert all(x.kv_heads % config.mesh[1] == 0 for x in pair)
  doc = importlib.import_module(f"configs.{name}").__doc__
  row = rf":{re.escape(size)} +([\d.]+) \+ ([\d.]+) GB, +(\d+) kB a token"
  said = [float(x) for x in re.search(row, doc).groups()]
  held = [2 * weights.num_parameters(x) / 1e9 for x in pair]
  shape = dict(batch=1, slots=1, dtype=jnp.bfloat16)
  of = lambda x: cache.num_bytes(**shape, **transformer.cache_shape(x))
  slot = sum(of(x) for x in pair) / 1e3
  assert said == [*(pytest.approx(x, abs=0.051) for x in held), round(slot)]
  # weights alone take most of a device of 80 GB at most
  assert held[0] / config.mesh[1] + held[1] < 60


@pytest.mark.parametrize(
  "name, arg",
  [(name, "") for name in TRAINING]
  + [("smollm2_feature_train", arg) for arg in ("texts", "answers")],
)
def test_training_config(name, arg):
  config = _build(name, arg)
  if arg == "answers":
    config.draft.weights = "runs/texts/draft"  # as its docstring has it
  if not config.data.path:  # the user's
    config.data.path = "configs/tiny_prompts.jsonl"
  recipe.check(config)
  assert prompts.from_file(config.data.path)
  assert set(cli.flatten(training.training())) <= set(cli.flatten(config))
  if config.target == "random":
    families.from_hf(config.architecture)


def test_every_training_key_is_explained():
  lines = (ROOT / "configs/training.py").read_text().split("\n")
  keys = [line for line in lines if re.match(r"  (c\.\w+ =|  \w+=)", line)]
  groups = [line for line in keys if line.endswith("dict(")]
  bare = [line for line in keys if "  # " not in line and line not in groups]
  # betas have the names of the paper, temperatures a line above
  known = ("c.seed", "beta1", "beta2", "temperatures", "c.loss", "batch=8")
  assert not [line for line in bare if not line.strip().startswith(known)]
  assert len(keys) > 40


@pytest.mark.parametrize("name", sorted({name for name, _ in SPECS}))
def test_unknown_argument_is_named(name):
  with pytest.raises(ValueError, match="unknown config argument 'huge'"):
    _build(name, "huge")


def test_random_has_the_shapes_of_the_real_model(smollm2_gguf):
  from specjax.models import load

  real = load.opened(str(smollm2_gguf)).config
  fake = families.from_hf(_build("smollm2", "random").architecture)
  # the GGUF rounds it to float32
  assert fake.norm_eps == pytest.approx(real.norm_eps)
  assert fake == dataclasses.replace(real, norm_eps=fake.norm_eps)


@pytest.mark.parametrize("path", [f"configs/{n}.py" for n in NAMES])
def test_commands_in_docstrings_name_this_config(path):
  doc = importlib.import_module(path[:-3].replace("/", ".")).__doc__
  commands = re.findall(r"--config=(\S+)", doc)
  assert {command.partition(":")[0] for command in commands} <= {path}
  assert commands or path in [f"configs/{name}.py" for name in DEFAULTS]


@pytest.mark.parametrize(
  "key, value, why",
  [
    ("dtype", "float23", "dtype must be one of auto, float32"),
    ("decoder", "speculativ", "decoder must be one of"),
    ("batch_size", 0, "batch_size must be at least 1"),
    ("max_new_tokens", -1, "max_new_tokens must be at least 0"),
    ("prompts.limit", -1, "prompts.limit must be at least 0"),
    ("seed", -1, "seed must be in"),
    ("seed", 2**32, "seed must be in"),
    ("sampling.temperature", -0.1, "sampling.temperature must be >= 0"),
    ("sampling.temperature", float("nan"), "sampling.temperature must be"),
    ("sampling.temperature", float("inf"), "sampling.temperature must be"),
    ("sampling.top_p", 0.0, "sampling.top_p must be in"),
    ("sampling.top_p", 1.5, "sampling.top_p must be in"),
    ("sampling.min_p", -0.5, "sampling.min_p must be in"),
    ("sampling.top_k", 2**31, "sampling.top_k must be in"),
    ("verifier", "blok", "verifier must be one of block, token, coupled"),
    ("draft.name", "ngam", "draft.name must be one of lm, feature, ngram"),
    ("draft.num_tokens", -1, "draft.num_tokens must be at least 0"),
    ("draft.head", -1, "draft.head must be at least 0"),
    ("draft.top_p", 0.0, "draft.top_p must be in"),
    ("draft.top_p", float("nan"), "draft.top_p must be in"),
    ("draft.temperature", float("nan"), "draft.temperature must be finite"),
    ("draft.temperature", float("inf"), "draft.temperature must be finite"),
    ("draft.alpha", 1.5, "draft.alpha must be in 0..1"),
    ("draft.alpha", float("nan"), "draft.alpha must be in 0..1"),
    ("draft.layers", ("a",), "draft.layers must be layer numbers"),
    ("draft.layers", (0.5, 1), "draft.layers must be layer numbers"),
    ("draft.layers", (0,), "draft.layers is for --config.draft.name=lm"),
    ("draft.weights", "a.gguf", "draft.weights is for --config.draft.name=lm"),
    ("draft.head", 100, "draft.head is for --config.draft.name=lm"),
    ("draft.lookup", 9, "draft.lookup must be in 0..8"),
    (
      "draft.name",
      "lm",
      "draft.name=lm needs exactly one of --config.draft.weights",
    ),
  ],
)
def test_impossible_value(key, value, why):
  config = _build("tiny", "")
  config.update_from_flattened_dict({key: value})
  with pytest.raises(UserError) as error:
    settings.check(config)
  assert f"--config.{why}" in str(error.value)


def test_a_slip_is_named():
  config = _build("tiny", "")
  config.draft.name = "ngrm"
  with pytest.raises(UserError, match="did you mean ngram"):
    settings.check(config)


@pytest.mark.parametrize("decoder", settings.DECODERS)
def test_replay_needs_both_decoders(decoder):
  config = _build("tiny", "")
  config.update(decoder=decoder)
  config.draft.name = "replay"
  with pytest.raises(UserError, match="needs --config.decoder=both"):
    settings.check(config)


def test_a_draft_is_a_model_or_layers():
  config = _build("tiny", "")
  config.draft.update(name="lm", weights="a.gguf", layers=(0,))
  with pytest.raises(UserError, match="got weights and layers"):
    settings.check(config)


def test_random_needs_an_architecture():
  config = common.decoding()
  config.target = "random"
  with pytest.raises(UserError, match=r"configs/tiny\.py"):
    settings.check(config)


def test_a_shipped_head_is_named(tmp_path, monkeypatch):
  """From anywhere; weights that are named win; other methods need none."""
  config = _build("tiny", "")
  config.draft.update(name="feature", shipped="configs", weights="")
  assert settings.checked(config).draft.weights == "configs"
  assert config.draft.weights == ""  # what was given stays as it is
  monkeypatch.chdir(tmp_path)
  found = Path(settings.checked(config).draft.weights)
  assert found.samefile(ROOT / "configs")
  config.draft.shipped = "none"
  assert settings.checked(config).draft.weights == "none"
  config.draft.weights = "mine"
  assert settings.checked(config) is config
  config.draft.update(name="ngram", weights="", shipped="configs")
  assert settings.checked(config) is config
