r"""Gemma 3 (text) with gemma-3-1b-it as the draft: `:4b`, `:12b`, `:27b`.

  python decode.py --config=configs/gemma3.py:12b \
      --config.prompt="Why is the sky blue?"

Written for accelerators and not run yet: no machine here had one. In bfloat16,
2 bytes a weight, target (without what reads images) + draft, and both caches
for each token of a row; layers with a window keep caches as long as the others:

  :4b    7.8 + 2.0 GB,  166 kB a token
  :12b  23.5 + 2.0 GB,  420 kB a token
  :27b  54.0 + 2.0 GB,  535 kB a token

The repositories are gated: accept Google's terms on each model's page, then
type `hf auth login`, or set HF_TOKEN. Names of copies that are not gated, or of
folders, go into --config.target and --config.draft.weights.

Temperature, top-k and top-p are those of the models' generation_config.json.
`auto` drafts the k <= 8 that a calibration at the start likes best. All have
one tokenizer, which is compared before any weight is read; the draft has no
embedding of its last id, which stands for an image.

The sweep is K x temperature, 8 points:

  python -m specjax.sweep --config=configs/gemma3.py:12b \
      --workdir=sweeps/gemma --config.prompts.path=configs/prompts.jsonl
"""

from configs import common

_SIZES = ("4b", "12b", "27b")


def get_config(arg=""):
  common.no_argument(arg, _SIZES)
  arg = arg or "12b"
  c = common.pair(f"hf://google/gemma-3-{arg}-it", "hf://google/gemma-3-1b-it")
  c.sampling.update(temperature=1.0, top_k=64, top_p=0.95)
  return c


def sweep(add):
  for temperature in (0.0, 1.0):
    common.lengths(add, {"sampling.temperature": temperature})
