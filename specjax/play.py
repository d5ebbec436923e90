"""Play prompts through the decoders, batch by batch and turn by turn."""

import time
from typing import NamedTuple

import numpy as np

from specjax import (
  adaptive,
  answers,
  generate,
  pair,
  prompts,
  request,
  settings,
)
from specjax.answers import Show, Turn
from specjax.errors import UserError

_ALIKE = 12  # tokens of the prompt that warms up, all the same

__all__ = ["Show", "Sizes", "Turn", "play", "sizes", "warm_up"]


class Sizes(NamedTuple):
  """The static sizes of a run; one program a decoder serves all prompts."""

  batch: int
  slots: int
  max_new: int
  tokens: int  # of the longest conversation, its last answer included


def sizes(opened, todo, config):
  """Return sizes that serve every prompt, so that one program does.

  A later turn's prompt holds the answers before it, each at most
  max_new_tokens long.

  Args:
    opened: a `load.Opened`.
    todo: list of `Prompt`.

  Raises:
    UserError: a first prompt that is empty or longer than the context.
  """
  context, most = opened.config.context, 1
  max_new = min(config.max_new_tokens, context)  # no answer can be longer
  for prompt in todo:
    talk = list(prompt.history)
    for number, text in enumerate(prompt.turns):
      talk.append(_message("user", text))
      ids = _encode(opened.tokenizer, talk, prompt, config)
      most = max(most, len(ids) + number * max_new)
      if number == 0 and not 0 < len(ids) <= context:
        raise UserError(
          f"the prompt {prompt.id!r} has {len(ids)} tokens; the model's"
          f" context holds 1 to {context}"
        )
      talk.append(_message("assistant", ""))
  slots = generate.num_slots(context, most, max_new)
  tokens = min(most + max_new, context)
  return Sizes(config.batch_size, slots, max_new, tokens)


def warm_up(model, draft, config, sizes):
  """Compile every program that the run needs by running it for one token.

  And once at each width of an adaptive target call: its first run takes longer
  on a CPU, which would fall on the first answers (LOG.md).

  Returns:
    {decoder: seconds it took}; near zero when the compilation cache has them.
  """
  spent = {}
  # a prompt of which a copy can be made
  alike = [[0] * min(_ALIKE, sizes.slots - 1, model.target.context - 1)]
  one = _request(model, alike, 0, config, sizes._replace(max_new=1))
  nothing = np.full((sizes.batch, sizes.max_new), -1, np.int32)
  for name in settings.decoders(config):
    began = time.perf_counter()
    with_draft = _draft(name, draft, one, nothing)
    few = sizes._replace(max_new=1)
    for how in _each_width(with_draft):
      state = answers.start(model, one, few, how, config)
      state = generate.advance(
        model.target, model.params, state, steps=1, draft=how
      )
      generate.output(state, 1)
    spent[name] = time.perf_counter() - began
  return spent


def _each_width(draft):
  """A draft, once for each width that it may call its target at."""
  if draft is None or draft.policy is None:
    return [draft]
  K = draft.num_draft
  exactly = lambda n: draft._replace(policy=adaptive.exactly(K, n))
  return [exactly(width - 1) for width in adaptive.widths(K)]


def _draft(decoder, draft, ask, plain):
  """The `types.Draft` to decode with, None for plain decoding."""
  if decoder == "autoregressive":
    return None
  return pair.join(draft, ask, plain)


def play(model, draft, todo, config, sizes, show):
  """Yield a `Batch` for each turn of each group of prompts and each decoder.

  The decoders take turns, so that what drifts meets both alike. Each has its
  own conversation, with its own answers in it.

  Args:
    model: a `load.Model`.
    draft: a `pair.Pair`, None for plain decoding alone.
    todo: list of `Prompt`.
    sizes: a `Sizes`, warmed up.
    show: a `Show`.
  """
  names = settings.decoders(config)
  for at in range(0, len(todo), sizes.batch):
    group = todo[at : at + sizes.batch]
    talks = {name: [list(p.history) for p in group] for name in names}
    for number in range(max(len(prompt.turns) for prompt in group)):
      rows = [i for i, p in enumerate(group) if number < len(p.turns)]
      turns = [Turn(at + i, group[i], number) for i in rows]
      now = {name: [talks[name][i] for i in rows] for name in names}
      ids = {name: _asked(model, turns, now[name], config) for name in names}
      sizes, compiling = _grown(model, draft, config, sizes, ids)
      seeds = [turn.prompt.seed for turn in turns]
      seeds = [config.seed if seed is None else seed for seed in seeds]
      plain = None
      for name in names:
        ask = _request(model, ids[name], seeds, config, sizes)
        with_draft = _draft(name, draft, ask, plain)
        show.begin(name, turns)
        run = answers.decode(model, ask, sizes, with_draft, config, show.tokens)
        show.end()
        found = answers.answers(model, run, turns, ids[name])
        for talk, answer in zip(now[name], found, strict=True):
          talk.append(_message("assistant", answer.text))
        yield answers.batch(
          name, found, sizes, compiling[name], run, with_draft
        )
        if run.interrupted:
          raise KeyboardInterrupt
        plain = run.output.tokens


def _asked(model, turns, talks, config):
  """Let the conversations grow by the user's turn; return their ids."""
  for turn, talk in zip(turns, talks, strict=True):
    talk.append(_message("user", turn.prompt.turns[turn.number]))
  return [
    _encode(model.tokenizer, talk, turn.prompt, config)
    for turn, talk in zip(turns, talks, strict=True)
  ]


def _encode(tok, talk, prompt, config):
  try:
    return prompts.encode(tok, talk, as_chat=config.chat)
  except UserError as e:
    raise UserError(f"the prompt {prompt.id!r}: {e}") from e


def _grown(model, draft, config, sizes, ids):
  """Return sizes that hold these prompts, and {decoder: seconds to compile}.

  They differ from `sizes` only where an answer's text has more tokens when
  it is encoded again than were decoded: broken characters do that. Both
  decoders get the same slots, so that their times can be compared.
  """
  context = model.target.context
  width = max(len(row) for rows in ids.values() for row in rows)
  pair.check_context(
    draft and draft.opened, min(width + sizes.max_new, context)
  )
  need = generate.num_slots(context, width, sizes.max_new)
  if need <= sizes.slots:
    return sizes, dict.fromkeys(ids, 0.0)
  sizes = sizes._replace(slots=need)
  return sizes, warm_up(model, draft, config, sizes)


def _request(model, ids, seeds, config, sizes):
  return request.make(
    # one that fills the context ends at once, with the reason "context"
    [row[: model.target.context] for row in ids],
    max_new=sizes.max_new,
    seed=seeds,
    stop_ids=() if config.ignore_eos else model.tokenizer.stop_ids,
    width=sizes.slots,
    batch=sizes.batch,
    **settings.sampling(config, model.target.vocab_size),
  )


def _message(role, content):
  return {"role": role, "content": content}
