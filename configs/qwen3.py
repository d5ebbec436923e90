r"""Qwen3 with Qwen3-0.6B as the draft: `:1.7b`, `:4b`, `:8b`, `:14b`, `:32b`.

  python decode.py --config=configs/qwen3.py:8b \
      --config.prompt="Why is the sky blue?"

Written for accelerators and not run yet: no machine here had one. In bfloat16,
2 bytes a weight, target + draft, and both caches for each token of a row:

  :1.7b   3.4 + 1.2 GB,  229 kB a token
  :4b     8.0 + 1.2 GB,  262 kB a token
  :8b    16.4 + 1.2 GB,  262 kB a token
  :14b   29.5 + 1.2 GB,  279 kB a token
  :32b   65.5 + 1.2 GB,  377 kB a token; cut over 2 devices of 80 GB

No repository is gated (Apache-2.0).

The models think before they answer, hence 1,024 tokens; temperature, top-k and
top-p are those of their generation_config.json, made for that. (Qwen advises
against T = 0 while thinking; the sweep has it as the exact baseline.) `auto`
drafts the k <= 8 that a calibration at the start likes best. All have one
tokenizer, which is compared before any weight is read.

The sweep is K x temperature, 8 points:

  python -m specjax.sweep --config=configs/qwen3.py:8b --workdir=sweeps/qwen \
      --config.prompts.path=configs/prompts.jsonl
"""

from configs import common

_MESHES = {
  "1.7b": (1, 1),
  "4b": (1, 1),
  "8b": (1, 1),
  "14b": (1, 1),
  "32b": (1, 2),
}


def get_config(arg=""):
  common.no_argument(arg, _MESHES)
  arg = arg or "8b"
  c = common.pair(f"hf://Qwen/Qwen3-{arg.upper()}", "hf://Qwen/Qwen3-0.6B")
  c.mesh = _MESHES[arg]
  c.max_new_tokens = 1024
  c.sampling.update(temperature=0.6, top_k=20, top_p=0.95)
  return c


def sweep(add):
  for temperature in (0.0, 0.6):
    common.lengths(add, {"sampling.temperature": temperature})
