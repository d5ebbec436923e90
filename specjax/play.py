"""Play prompts through the decoders, batch by batch and turn by turn.

Everything that touches the host while tokens are made is here: it feeds the
compiled programs of `generate.py` and hands what they emit to a `show`.
"""

import time
from typing import NamedTuple

import jax
import numpy as np

from specjax import generate, metrics, pair, prompts, request, settings, types
from specjax.errors import UserError
from specjax.models import tokenizer

CHUNK_STEPS = 8  # target calls between two looks of the host: some 10 us


class Sizes(NamedTuple):
  """The static sizes of a run; one program a decoder serves all prompts."""

  batch: int
  slots: int
  max_new: int
  tokens: int  # of the longest conversation, its last answer included


class Turn(NamedTuple):
  """What is asked: a prompt, by its place among all, and which of its turns."""

  index: int
  prompt: prompts.Prompt
  number: int


class Answer(NamedTuple):
  """What came of a turn."""

  turn: Turn
  prompt_ids: tuple[int, ...]
  token_ids: tuple[int, ...]
  text: str
  finish_reason: str
  rounds: tuple[int, ...]  # which target call emitted each token
  accepted: tuple[bool, ...]  # whether it is the draft's


class Batch(NamedTuple):
  """What one decoder made of a turn, and how long it took without compiling."""

  decoder: str  # one of settings.DECODERS
  answers: tuple[Answer, ...]
  slots: int
  compile_seconds: float  # 0 unless the conversations outgrew the slots
  prefill_seconds: float  # of the target and of the draft
  seconds: float  # of the decode loop
  steps: int  # target calls of the loop
  acceptance: metrics.Acceptance | None  # None in plain decoding
  interrupted: bool  # by Ctrl-C: answers may stop anywhere


class Show(NamedTuple):
  """What is done with the answers as they come; each may do nothing."""

  begin: object  # (decoder, answers-to-be: list of Turn) -> None
  tokens: object  # (row, new ids, which of them are the draft's) -> None
  end: object  # () -> None


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

  Returns:
    {decoder: seconds it took}; near zero when the compilation cache has them.
  """
  spent = {}
  one = request.make([[0]], max_new=1, batch=sizes.batch, width=sizes.slots)
  nothing = np.full((sizes.batch, sizes.max_new), -1, np.int32)
  for name in settings.decoders(config):
    began = time.perf_counter()
    with_draft = _draft(name, draft, one, nothing)
    size = dict(max_new_tokens=1, slots=sizes.slots)
    list(
      generate.stream(model.target, model.params, one, draft=with_draft, **size)
    )
    spent[name] = time.perf_counter() - began
  return spent


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
      plain = None
      for name in names:
        ask = _request(model, turns, ids[name], config, sizes)
        with_draft = _draft(name, draft, ask, plain)
        show.begin(name, turns)
        run = _decode(model, ask, sizes, with_draft, show.tokens)
        show.end()
        answers = _answers(model, run.output, turns, ids[name])
        for talk, answer in zip(now[name], answers, strict=True):
          talk.append(_message("assistant", answer.text))
        yield _batch(name, answers, sizes, compiling[name], run, with_draft)
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


def _request(model, turns, ids, config, sizes):
  seeds = [turn.prompt.seed for turn in turns]
  return request.make(
    # one that fills the context ends at once, with the reason "context"
    [row[: model.target.context] for row in ids],
    max_new=sizes.max_new,
    seed=[config.seed if seed is None else seed for seed in seeds],
    stop_ids=model.tokenizer.stop_ids,
    width=sizes.slots,
    batch=sizes.batch,
    **config.sampling,
  )


class _Run(NamedTuple):
  """What came back from the loop."""

  output: types.Output
  prefill_seconds: float
  seconds: float
  interrupted: bool


def _decode(model, ask, sizes, draft, on_tokens):
  """Run one request to its end, or to Ctrl-C once there is something to keep.

  The clock stops while the host looks.
  """
  target, params = model.target, model.params
  began = time.perf_counter()
  size = dict(max_new_tokens=sizes.max_new, slots=sizes.slots)
  state = generate.start(target, params, ask, draft=draft, **size)
  jax.block_until_ready(state)
  prefill_seconds = time.perf_counter() - began
  out, seconds, seen = None, 0.0, np.zeros(sizes.batch, int)
  try:
    while out is None or (out.finish_reason == types.RUNNING).any():
      began = time.perf_counter()
      state = generate.advance(
        target, params, state, steps=CHUNK_STEPS, draft=draft
      )
      out = generate.output(state, sizes.max_new)
      seconds += time.perf_counter() - began
      for row in np.flatnonzero(out.length > seen):
        new = np.s_[row, seen[row] : out.length[row]]
        on_tokens(row, out.tokens[new].tolist(), out.accepted[new].tolist())
      seen = out.length
  except KeyboardInterrupt:
    if out is None:
      raise
    return _Run(out, prefill_seconds, seconds, True)
  return _Run(out, prefill_seconds, seconds, False)


def _answers(model, out, turns, ids):
  return tuple(
    _answer(model, out, row, turn, ids[row]) for row, turn in enumerate(turns)
  )


def _answer(model, out, row, turn, prompt_ids):
  new = np.s_[row, : out.length[row]]
  ids = tuple(out.tokens[new].tolist())
  reason = types.FINISH_REASONS[out.finish_reason[row]]
  return Answer(
    turn=turn,
    prompt_ids=tuple(prompt_ids),
    token_ids=ids,
    text=tokenizer.decode(model.tokenizer, ids),
    # a row that was running when the clock stopped was interrupted
    finish_reason="interrupted" if reason == "running" else reason,
    rounds=tuple(out.round[new].tolist()),
    accepted=tuple(out.accepted[new].tolist()),
  )


def _batch(decoder, answers, sizes, compile_seconds, run, draft):
  return Batch(
    decoder=decoder,
    answers=answers,
    slots=sizes.slots,
    compile_seconds=compile_seconds,
    prefill_seconds=run.prefill_seconds,
    seconds=run.seconds,
    steps=int(run.output.stats.steps),
    acceptance=draft and metrics.acceptance(run.output, draft.num_draft),
    interrupted=run.interrupted,
  )


def _message(role, content):
  return {"role": role, "content": content}
