r"""Llama 3 with Llama-3.2-1B-Instruct as the draft: `:3b`, `:8b`, `:70b`.

  python decode.py --config=configs/llama3.py:8b \
      --config.prompt="Why is the sky blue?"

Written for accelerators and not run yet: no machine here had one. In bfloat16,
2 bytes a weight, target + draft, and both caches for each token of a row:

  :3b    6.4 + 2.5 GB,  147 kB a token
  :8b   16.1 + 2.5 GB,  164 kB a token
  :70b 141.1 + 2.5 GB,  360 kB a token; cut over 4 devices of 80 GB

The repositories are gated: accept Meta's terms on each model's page, then type
`hf auth login`, or set HF_TOKEN. Names of copies that are not gated, or of
folders, go into --config.target and --config.draft.weights.

Temperature and top-p are those of the models' generation_config.json. `auto`
drafts the k <= 8 that a calibration at the start likes best. All three have one
tokenizer, which is compared before any weight is read.

The sweep is K x temperature, 8 points:

  python -m specjax.sweep --config=configs/llama3.py:8b --workdir=sweeps/llama \
      --config.prompts.path=configs/prompts.jsonl
"""

from configs import common

_MESHES = {"3b": (1, 1), "8b": (1, 1), "70b": (1, 4)}
_TARGETS = {
  "3b": "hf://meta-llama/Llama-3.2-3B-Instruct",
  "8b": "hf://meta-llama/Llama-3.1-8B-Instruct",
  "70b": "hf://meta-llama/Llama-3.1-70B-Instruct",
}


def get_config(arg=""):
  common.no_argument(arg, _TARGETS)
  arg = arg or "8b"
  c = common.pair(_TARGETS[arg], "hf://meta-llama/Llama-3.2-1B-Instruct")
  c.mesh = _MESHES[arg]
  c.sampling.update(temperature=0.6, top_p=0.9)
  return c


def sweep(add):
  for temperature in (0.0, 0.6):
    common.lengths(add, {"sampling.temperature": temperature})
