"""Where a draft's training data comes from.

`from_target` answers given prompts with the target, `self_started` lets it
write the prompts too, `from_draft` lets the draft itself answer, and `given`
reads answers from a file. What is sampled goes through the one decoding loop,
at the temperatures of the deployment, since acceptance depends on them.
"""

import dataclasses
import hashlib
import itertools
from collections import Counter

import jax
import numpy as np

from specjax import prompts, shards, speak, trajectories, types
from specjax.errors import UserError
from specjax.models import chat, load, tokenizer
from specjax.speak import Ask, Plan, from_draft

__all__ = [
  "Ask",
  "Plan",
  "encode",
  "fingerprint",
  "from_draft",
  "from_target",
  "given",
  "load_cache",
  "self_started",
]


def from_target(
  model, todo, plan, *, as_chat=True, root=None, watch=shards.QUIET
):
  """Return the target's answers to some prompts.

  Row i * samples + j is sample j of the i-th prompt that was kept: what
  `generate.autoregressive` makes of it under the plan, end token included.

  Args:
    model: a `load.Model`; todo: list of `prompts.Prompt`; plan: a `Plan`.
    as_chat: render the chat template.
    root: where caches are; see `shards.collect`. None: nothing is kept.
    watch: a `shards.Watch`.

  Returns:
    `Trajectories`.

  Raises:
    UserError: no prompt is short enough, or the cache cannot be written.
    ValueError: a field of the plan is out of its range.
  """
  speak.check(plan)
  model = load.whole(model)
  most = min(plan.max_prompt, model.target.context - 1)
  asks, dropped = encode(model.tokenizer, todo, most, as_chat=as_chat)
  for why, count in dropped.items():
    watch.note(f"dropped {count:,} {why}")
  rows = speak.rows(asks, plan)
  batch = min(plan.batch, len(rows))
  groups = speak.groups(rows, batch, plan.seed)
  settings = _settings("prompts", model, plan)
  settings["prompts"] = hashlib.sha256(repr(asks).encode()).hexdigest()
  found = shards.collect(
    root,
    settings,
    len(groups),
    lambda i: _answers(model, groups[i], plan, batch),
    tell=lambda found: speak.tell(found) | {"dropped": dropped},
    watch=watch,
  )
  return speak.join(found)


def _answers(model, rows, plan, batch):
  stop_ids = model.tokenizer.stop_ids
  return speak.answers(
    model.target, model.params, rows, plan, stop_ids=stop_ids, batch=batch
  )


def encode(tok, todo, most, *, as_chat):
  """Return the `Ask`s of some prompts, {why: how many were dropped}.

  Of a prompt with several turns the first is asked. One that is there twice
  would get the same answers twice, and is asked once.

  Args:
    tok: a `Tokenizer`; todo: list of `prompts.Prompt`.
    most: tokens of a prompt; a longer one is dropped.

  Raises:
    UserError: nothing is left to ask.
  """
  asks, dropped = {}, Counter()
  for prompt in todo:
    ids = prompts.encode(tok, _talk(prompt), as_chat=as_chat)
    ask = Ask(tuple(ids), prompt.seed)
    if not 0 < len(ids) <= most:
      dropped[f"prompts with none or over {most} tokens"] += 1
    elif ask in asks:
      dropped["repeated prompts"] += 1
    else:
      asks[ask] = None
  if not asks:
    raise UserError(
      f"none of {len(todo)} prompts has 1 to {most} tokens; take"
      " others or a larger max_prompt"
    )
  return list(asks), dict(dropped)


def _talk(prompt):
  return [*prompt.history, {"role": "user", "content": prompt.turns[0]}]


def self_started(
  model, count, plan, *, max_user=64, root=None, watch=shards.QUIET
):
  """Return answers to prompts that the target wrote itself.

  It continues the chat template's text before a user's words, at temperature
  1 up to an end token; that text is then asked as any prompt is. One that is
  empty or has no end within `max_user` tokens is dropped.

  Args:
    model: a `load.Model` whose tokenizer has a chat template.
    count: prompts that are begun.
    plan, root, watch: as in `from_target`.

  Raises:
    UserError: as there, or the template does not show a user's words.
  """
  speak.check(plan)
  model = load.whole(model)
  start = tuple(_before_user(model.tokenizer))
  free = plan._replace(max_new=max_user, top_k=0, top_p=1.0, min_p=0.0)
  mix = speak.mix(plan, count)  # [count, samples]
  batch = min(plan.batch, count)

  def make(i):
    numbers = range(i * batch, min((i + 1) * batch, count))
    # alike but for their seeds
    begun = [speak.Row(n, start, (plan.seed + n) % 2**32, 1.0) for n in numbers]
    asked = _ended(model.tokenizer, _answers(model, begun, free, batch), plan)
    rows = []
    for n, ids in asked:
      seed = (plan.seed + n * plan.samples) % 2**32  # words may repeat
      rows += speak.samples(n, Ask(ids, seed), plan, mix[n])
    return _answers(model, rows, plan, batch)

  settings = _settings("self", model, plan)
  settings |= {"count": count, "max_user": max_user, "start": start}
  total = -(-count // batch)
  found = shards.collect(
    root, settings, total, make, tell=speak.tell, watch=watch
  )
  result = speak.join(found)
  lost = count - len(result.length) // plan.samples
  if lost:
    watch.note(f"dropped {lost:,} of {count:,} prompts that did not end well")
  return result


_MARK = "specjax:user"  # any text that no template contains


def _before_user(tok):
  """The ids of the chat template before a user's words."""
  if not tok.chat_template:
    raise UserError(
      "self-started prompts begin with the chat template, and this target has"
      " none; type --config.data.source=prompts or given"
    )
  text = chat.render(tok, [{"role": "user", "content": _MARK}])
  before, found, _ = text.partition(_MARK)
  ids = tokenizer.encode(tok, before, special=False)
  if not found or not ids:
    raise UserError(
      "the chat template has nothing before a user's words that a model could"
      " go on from; give prompts instead of self-started ones"
    )
  return ids


def _ended(tok, shard, plan):
  """Yield (number, prompt ids) of the user's turns that can be asked."""
  kept = shard["finish"] == types.STOP
  columns = ("number", "tokens", "prompt_length", "length")
  for n, ids, start, stop in zip(
    *(shard[key][kept] for key in columns), strict=True
  ):
    text = tokenizer.decode(tok, ids[start : stop - 1])
    if text.strip():
      talk = [{"role": "user", "content": text}]
      asked = prompts.encode(tok, talk, as_chat=True)
      if len(asked) <= plan.max_prompt:
        yield int(n), tuple(asked)


def given(tok, path, *, as_chat, most, prompts_alone=False, limit=0):
  """Return the sequences of a JSONL file; nothing is sampled.

  A row has "text", all of which is learned but for its first token, or
  "answer" and a prompt as `prompts.read` takes it, of which the answer is
  learned, end token included.

  Args:
    tok: a `Tokenizer`; path: the file, "-" for standard input.
    as_chat: render prompts and answers through the chat template.
    most: tokens of a sequence; an answer is cut there, to no less than one.
    prompts_alone: a row may have no answer, and then its prompt is a text.
    limit: only the first so many rows, 0 for all.

  Raises:
    UserError: a row that is neither, each with its line.
  """
  rows = []
  for row, where, number in itertools.islice(prompts.rows(path), limit or None):
    prompt, answer = _given(tok, row, where, number, as_chat, prompts_alone)
    # behind a prompt that is too long, one token: it has an answer all the same
    room = max(most - len(prompt), 1)
    rows.append((prompt, answer[:room], np.nan))
  if not rows:
    raise UserError(f"{path} holds no sequences")
  return trajectories.make(rows)


def _given(tok, row, where, number, as_chat, prompts_alone):
  """(prompt ids, answer ids) of a parsed row."""
  if isinstance(row, dict) and "text" in row:
    ids = tokenizer.encode(tok, prompts.text(row["text"], f"{where}: 'text'"))
    return ids[:1], ids[1:]
  if prompts_alone and isinstance(row, dict) and "answer" not in row:
    talk = _talk(prompts.parse(row, where, number))
    ids = prompts.encode(tok, talk, as_chat=as_chat)
    return ids[:1], ids[1:]
  if not isinstance(row, dict) or "answer" not in row:
    raise UserError(f'{where}: needs "text", or "prompt" and "answer"')
  answer = prompts.text(row["answer"], f"{where}: 'answer'")
  talk = _talk(prompts.parse(row, where, number))
  prompt = prompts.encode(tok, talk, as_chat=as_chat)
  if not as_chat:
    end = [] if tok.eos is None else [tok.backend.token_to_id(tok.eos)]
    return prompt, tokenizer.encode(tok, answer, special=False) + end
  before = chat.render(tok, talk)
  talk = [*talk, {"role": "assistant", "content": answer}]
  whole = chat.render(tok, talk, add_generation_prompt=False)
  if not whole.startswith(before):
    raise UserError(
      f"{where}: the chat template writes a prompt in another way once it has"
      ' an answer, so where that begins is unknown; give the row as "text"'
    )
  ids = tokenizer.encode(tok, whole[len(before) :], special=False)
  # behind the end token a template may write what no model is to say
  ends = [i for i, token in enumerate(ids) if token in tok.stop_ids]
  return prompt, ids[: ends[0] + 1] if ends else ids


def _settings(source, model, plan):
  """What decides the data; all of it is in the name of the cache."""
  plan = plan._asdict()
  plan["temperatures"] = [list(map(float, x)) for x in plan["temperatures"]]
  return {
    "source": source,
    "target": fingerprint(model),
    "stop_ids": list(model.tokenizer.stop_ids),
    **plan,
  }


def load_cache(folder):
  """Return the `Trajectories` of a cache's folder, complete or not.

  Raises:
    UserError: it is no such folder, holds nothing yet, or is damaged.
  """
  return speak.join(shards.load(folder))


def fingerprint(model):
  """Return a hash of a `load.Model`: architecture, weights and their dtype.

  How its matrices are laid out on this device does not matter, nor do switches
  of other architectures that were added since.
  """
  fields = dataclasses.fields(model.config)
  own = {f.name: getattr(model.config, f.name) for f in fields}
  own = {f.name: own[f.name] for f in fields if own[f.name] != f.default}
  digest = hashlib.sha256(repr(own).encode())
  for path, x in jax.tree_util.tree_leaves_with_path(load.whole(model).params):
    name = jax.tree_util.keystr(path)
    if name == "['head']" and model.config.tied:
      continue  # a copy
    digest.update(f"{name} {x.dtype} {x.shape}".encode())
    digest.update(np.asarray(x).tobytes())
  return digest.hexdigest()
