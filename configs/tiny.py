"""Random weights, 0.2 M parameters: the whole path in seconds, no download.

  python decode.py --config=configs/tiny.py

The text is noise, since nothing was learned; its bytes are the tokens.

  python -m specjax.sweep --config=configs/tiny.py --workdir=sweeps/tiny

is four points, K x draft, in a minute.
"""

from configs import common


def get_config(arg=""):
  common.no_argument(arg)
  c = common.decoding()
  c.target = "random"
  c.prompt = "To be, or not to be"
  c.chat = False
  c.max_new_tokens = 64
  c.sampling.temperature = 1.0
  c.architecture = dict(
    model_type="llama",
    vocab_size=384,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
  )
  return c


def sweep(add):
  lm = {"draft.name": "lm", "draft.layers": (0, 2)}
  for draft in ({"draft.name": "ngram"}, lm):
    for k in (2, 4):
      add(draft | {"draft.num_tokens": k})
