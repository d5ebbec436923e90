r"""A draft of SmolLM2-135M-Instruct: a head that reads the target's own states.

  python train_draft.py --config=configs/smollm2_feature_train.py \
      --workdir=runs/smollm2_feature --config.data.path=prompts.jsonl

and then decode.py with configs/smollm2.py, --config.draft.name=feature and
--config.draft.weights=runs/smollm2_feature/draft.

Data, steps and evaluation are those of configs/smollm2_train.py, so that the
two drafts can be compared. The head has one decoder layer, which begins as the
target's last and reads what that layer says, and is unrolled on its own states
to two depths (EAGLE: Li et al. 2024; EAGLE-3: Li et al. 2025). It has 3.5 M
(layer) + 1.0 M (features and token to the layer's width) + 4.7 M (head) numbers
to train. To fuse a low, a middle and the last layer, as EAGLE-3 does, add

  --config.draft.features=2,15,29

drafts/smollm2-135m-instruct was trained in three runs. The first one reads long
prompts as texts, which costs no sampling; the others begin with what came of
the one before and learn the target's answers, to other prompts each:

  jq -c 'select(.prompt | length >= 1000)' prompts.jsonl > long.jsonl
  sed -n 2049,3584p prompts.jsonl > more.jsonl
  python train_draft.py --config=configs/smollm2_feature_train.py:texts \
      --workdir=runs/texts --config.data.path=long.jsonl
  python train_draft.py --config=configs/smollm2_feature_train.py:answers \
      --workdir=runs/answers --config.data.path=prompts.jsonl \
      --config.draft.weights=runs/texts/draft
  python train_draft.py --config=configs/smollm2_feature_train.py:answers \
      --workdir=runs/more --config.data.path=more.jsonl \
      --config.draft.weights=runs/answers/draft

on the prompts that its card names: some four hours on two CPU cores, most of
them for sampling answers beside other programs.
"""

from configs import common, smollm2_train


def get_config(arg=""):
  common.no_argument(arg, ("texts", "answers"))
  c = smollm2_train.get_config()
  c.draft.name = "feature"
  c.draft.layers = (29,)
  c.draft.features = (29,)
  c.draft.depth_weights = (1.0, 0.8)
  if arg == "texts":
    c.draft.depth_weights = (1.0,)
    c.data.source = "given"
    c.data.learn_prompts = True
    c.data.limit = 2400
    c.sampling.temperature = 1.0
    c.loss = (("forward_kl", 1.0),)
    c.length = 256
    c.steps = 500
  if arg == "answers":
    c.draft.layers = ()
    c.data.limit = 2048
    c.steps = 300
    c.optimiser.learning_rate = 5e-4
    c.evaluation.every = 100
    c.export_dtype = "float16"
  return c
