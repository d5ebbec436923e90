"""Write tiny random models of each family, and what transformers says of them.

  python tests/data/make_families.py

Needs the `bench` extra (torch, transformers); takes some seconds. The tests
read the files and need neither.

Each folder of `families/` is a model in HF layout, and its `reference.npz` has
`tokens` [B, T] int32 and `logprobs` [B, T, V] float32, of float32 with eager
attention, normalised in float64, and the `versions` behind it. T is longer than
every window.
"""

import json
import pathlib
import shutil

import make_reference
import numpy as np
import torch
import transformers

SIZES = dict(
  vocab_size=64,
  hidden_size=32,
  intermediate_size=48,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=256,
  pad_token_id=0,
  bos_token_id=1,
  eos_token_id=2,
)
GEMMA = dict(
  num_hidden_layers=3, head_dim=12, query_pre_attn_scalar=12, sliding_window=12
)
LINEAR = dict(rope_type="linear", factor=4.0, rope_theta=1000000.0)
LOCAL = dict(rope_type="default", rope_theta=10000.0)
LINKED = dict(full_attention=LINEAR, sliding_attention=LOCAL)
# Folder -> its config's class, what differs from SIZES, is the config written
# as transformers 4 did.
TINY = {
  "mistral": ("Mistral", dict(num_hidden_layers=2, sliding_window=12), False),
  "qwen2": ("Qwen2", dict(num_hidden_layers=2), False),
  "qwen2_window": (
    "Qwen2",
    dict(
      num_hidden_layers=3,
      use_sliding_window=True,
      sliding_window=12,
      max_window_layers=1,
      tie_word_embeddings=True,
    ),
    True,
  ),
  "qwen3": ("Qwen3", dict(num_hidden_layers=2, head_dim=12), False),
  "gemma2": (
    "Gemma2",
    GEMMA | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    False,
  ),
  "gemma3_text": (
    "Gemma3Text",
    GEMMA
    | dict(
      layer_types=["sliding_attention", "full_attention", "sliding_attention"],
      query_pre_attn_scalar=20,
      rope_parameters=LINKED,
    ),
    False,
  ),
  "gemma3_old": (
    "Gemma3Text",
    GEMMA | dict(sliding_window_pattern=2, rope_parameters=LINKED),
    True,
  ),
}
BATCH, LENGTH = 2, 60


def random_model(name, settings):
  """Make a model whose every parameter matters, biases and norms too."""
  config = getattr(transformers, f"{name}Config")(
    **SIZES | settings, attn_implementation="eager", initializer_range=0.2
  )
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(config)
  for parameter in model.parameters():
    if parameter.ndim == 1:
      parameter.data += 0.2 * torch.randn_like(parameter)
  return model.eval()


def write_reference(folder):
  model = make_reference.load(folder)
  vocab = SIZES["vocab_size"]
  tokens = np.random.default_rng(0).integers(vocab, size=(BATCH, LENGTH))
  logprobs, _ = make_reference.score(model, tokens)
  np.savez_compressed(
    folder / "reference.npz",
    tokens=tokens.astype(np.int32),
    logprobs=logprobs.numpy().astype(np.float32),
    versions=make_reference.VERSIONS,
  )


def spell_old(folder):
  """Write config.json anew, as transformers 4 did."""
  path = folder / "config.json"
  config = json.loads(path.read_text())
  rope = config.pop("rope_parameters")
  config.pop("layer_types")
  config["torch_dtype"] = config.pop("dtype")
  if "full_attention" in rope:
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
    rope = rope["full_attention"]
  config["rope_theta"] = rope.pop("rope_theta")
  config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
  path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main():
  torch.set_num_threads(1)  # the order of sums must not depend on the machine
  transformers.utils.logging.disable_progress_bar()
  root = pathlib.Path(__file__).parent / "families"
  shutil.rmtree(root, ignore_errors=True)
  for name, (kind, settings, old) in TINY.items():
    random_model(kind, settings).save_pretrained(root / name)
    (root / name / "generation_config.json").unlink(missing_ok=True)
    if old:
      spell_old(root / name)
    write_reference(root / name)
  make_reference.print_table(root)


if __name__ == "__main__":
  main()
