r"""A draft of SmolLM2-135M-Instruct: a head that reads the target's own states.

  python train_draft.py --config=configs/smollm2_feature_train.py \
      --workdir=runs/smollm2_feature --config.data.path=prompts.jsonl

and then decode.py with configs/smollm2.py, --config.draft.name=feature and
--config.draft.weights=runs/smollm2_feature/draft.

Data, steps and evaluation are those of configs/smollm2_train.py, so that the
two drafts can be compared. The head has one decoder layer, which begins as the
target's last; it reads a low, a middle and the last layer, and is unrolled on
its own states to four depths, weighted .8 to the depth's power (EAGLE-3, Li et
al. 2025). It has 3.5 M (layer) + 1.7 M (features and token to the layer's
width) + 4.7 M (head) numbers to train.

To read the last layer alone, as EAGLE did (Li et al. 2024), add

  --config.draft.features=-1

and to train without the head's own states --config.draft.depth_weights=1.0
"""

from configs import common, smollm2_train


def get_config(arg=""):
  common.no_argument(arg)
  c = smollm2_train.get_config()
  c.draft.name = "feature"
  c.draft.layers = (29,)
  c.draft.features = (2, 15, 29)
  c.draft.depth_weights = (1.0, 0.8, 0.64, 0.512)
  return c
