r"""A draft of SmolLM2-135M-Instruct: two of its layers and a small head.

  python train_draft.py --config=configs/smollm2_train.py \
      --workdir=runs/smollm2 --config.data.path=prompts.jsonl

and then decode.py with configs/smollm2.py, --config.draft.name=lm and
--config.draft.weights=runs/smollm2/draft.

The prompts are the user's: JSONL with a "prompt" a row. Its answers are
sampled from the target, some 100 tokens each, at T = 0, 0.7 and 1; the cache of
these is kept between runs, and grows by 2,048 prompts at a time. So is what
the target makes of them, 1.2 kB a token: a step then skips its layers.

The embedding is the target's and stays as it is: two layers and the head are
7.1 M + 4.7 M numbers to train.
"""

from configs import common, smollm2, training


def get_config(arg=""):
  common.no_argument(arg)
  c = training.training()
  c.target = smollm2.get_config().target
  c.draft.layers = (0, 29)
  c.draft.embedding = "shared"
  c.draft.head = 8192
  c.draft.num_tokens = 6
  c.data.max_new = 160
  c.data.keep_hidden = True
  c.decode_with = "configs/smollm2.py"
  c.steps = 2000
  c.optimiser.learning_rate = 1e-3
  c.evaluation.every = 200
  c.checkpoint.every = 100
  return c
