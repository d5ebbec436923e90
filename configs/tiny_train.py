r"""A tiny random pair, trained in seconds: the whole path, no download.

  python train_draft.py --config=configs/tiny_train.py --workdir=runs/tiny

It shows the path and no speed-up: a target of this size is not slower than its
draft. The costs that it is judged by are those of a real pair.

The target's weights are random, and cold sampling makes a language of them
that is mostly a table of which token follows which. The draft begins as the
first of its three layers, and can learn most of that table.

`:decode` is the same target for decode.py, on the same prompts:

  python decode.py --config=configs/tiny_train.py:decode \
      --config.draft.name=lm --config.draft.weights=runs/tiny/draft

The sweep is three losses x two seeds, in some minutes:

  python -m specjax.sweep --config=configs/tiny_train.py --workdir=sweeps/loss
"""

from configs import common, training

_TEMPERATURE = 0.05
_PROMPTS = "configs/tiny_prompts.jsonl"


def get_config(arg=""):
  common.no_argument(arg, ("decode",))
  c = common.decoding() if arg else training.training()
  c.target = "random"
  c.architecture = dict(
    model_type="llama",
    vocab_size=288,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
  )
  c.sampling.temperature = _TEMPERATURE
  if arg:
    c.chat = False
    c.prompts.path = _PROMPTS
    c.batch_size = 8
    c.max_new_tokens = 48
    return c
  c.draft.layers = (0,)
  c.draft.num_tokens = 4
  c.data.update(
    path=_PROMPTS,
    chat=False,
    max_prompt=32,
    max_new=48,
    samples=8,
    temperatures=((_TEMPERATURE, 1.0),),
    held_out=0.2,
  )
  c.decode_with = "configs/tiny_train.py:decode"
  c.steps = 240
  c.batch_size = 8
  c.accumulate = 2
  c.length = 64
  c.optimiser.learning_rate = 3e-3
  c.evaluation.every = 60
  # as on a small machine with a real pair, where a draft is a tenth
  c.costs.update(draft=0.1, verify=((1, 1.0), (5, 1.35)))
  c.checkpoint.every = 60
  return c


def sweep(add):
  kl, tv = ("forward_kl", 1.0), ("total_variation", 1.0)
  for loss in ((kl,), (("forward_kl", 1 / 3), tv), (tv,)):
    for seed in (0, 1):
      add(loss=loss, seed=seed)
