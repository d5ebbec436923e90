"""Play prompts through a decoder, batch by batch and turn by turn.

Everything that touches the host while tokens are made is here: it feeds the
compiled programs of `generate.py` and hands what they emit to a `show`.
"""

import time
from typing import NamedTuple

import jax
import numpy as np

from specjax import generate, prompts, request, types
from specjax.errors import UserError
from specjax.models import tokenizer

CHUNK_STEPS = 8  # tokens between two looks of the host; costs about 10 us


class Sizes(NamedTuple):
  """The static sizes of a run; one program serves all of its prompts."""

  batch: int
  slots: int
  max_new: int


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


class Batch(NamedTuple):
  """What one call decoded, and how long it took without compiling."""

  answers: tuple[Answer, ...]
  slots: int
  compile_seconds: float  # 0 unless the conversations outgrew the slots
  prefill_seconds: float
  seconds: float  # of the decode loop
  steps: int  # target calls of the loop
  interrupted: bool  # by Ctrl-C: answers may stop anywhere


class Show(NamedTuple):
  """What is done with the answers as they come; each may do nothing."""

  begin: object  # (answers-to-be: list of Turn) -> None
  tokens: object  # (row, new ids) -> None
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
  return Sizes(config.batch_size, slots, max_new)


def warm_up(model, sizes):
  """Compile both programs by running them for one token.

  Returns:
    Seconds it took; near zero when the compilation cache has them.
  """
  began = time.perf_counter()
  one = request.make([[0]], max_new=1, batch=sizes.batch, width=sizes.slots)
  generate.autoregressive(
    model.target, model.params, one, max_new_tokens=1, slots=sizes.slots
  )
  return time.perf_counter() - began


def play(model, todo, config, sizes, show):
  """Yield a `Batch` for each turn of each group of prompts.

  Args:
    model: a `load.Model`.
    todo: list of `Prompt`.
    sizes: a `Sizes`, warmed up.
    show: a `Show`.
  """
  for at in range(0, len(todo), sizes.batch):
    group = todo[at : at + sizes.batch]
    talks = [list(prompt.history) for prompt in group]
    for number in range(max(len(prompt.turns) for prompt in group)):
      rows = [i for i, p in enumerate(group) if number < len(p.turns)]
      turns = [Turn(at + i, group[i], number) for i in rows]
      talks_now = [talks[i] for i in rows]
      batch, sizes = _batch(model, turns, talks_now, config, sizes, show)
      yield batch
      if batch.interrupted:
        raise KeyboardInterrupt


def _batch(model, turns, talks, config, sizes, show):
  """Decode one turn of some conversations, which grow by it."""
  for turn, talk in zip(turns, talks, strict=True):
    talk.append(_message("user", turn.prompt.turns[turn.number]))
  ids = [
    _encode(model.tokenizer, talk, turn.prompt, config)
    for turn, talk in zip(turns, talks, strict=True)
  ]
  sizes, compile_seconds = _grown(model, sizes, max(map(len, ids)))
  seeds = [turn.prompt.seed for turn in turns]
  ask = request.make(
    # one that fills the context ends at once, with the reason "context"
    [row[: model.target.context] for row in ids],
    max_new=sizes.max_new,
    seed=[config.seed if seed is None else seed for seed in seeds],
    stop_ids=model.tokenizer.stop_ids,
    width=sizes.slots,
    batch=sizes.batch,
    **config.sampling,
  )
  show.begin(turns)
  out, prefill_seconds, seconds, interrupted = _decode(
    model, ask, sizes, show.tokens
  )
  show.end()
  answers = [
    _answer(model, out, row, turn, ids[row]) for row, turn in enumerate(turns)
  ]
  for talk, answer in zip(talks, answers, strict=True):
    talk.append(_message("assistant", answer.text))
  batch = Batch(
    answers=tuple(answers),
    slots=sizes.slots,
    compile_seconds=compile_seconds,
    prefill_seconds=prefill_seconds,
    seconds=seconds,
    steps=int(out.stats.steps),
    interrupted=interrupted,
  )
  return batch, sizes


def _encode(tok, talk, prompt, config):
  try:
    return prompts.encode(tok, talk, as_chat=config.chat)
  except UserError as e:
    raise UserError(f"the prompt {prompt.id!r}: {e}") from e


def _grown(model, sizes, width):
  """Return the sizes that prompts of a width need, and seconds to compile them.

  They differ from `sizes` only where an answer's text has more tokens when
  it is encoded again than were decoded: broken characters do that.
  """
  need = generate.num_slots(model.target.context, width, sizes.max_new)
  if need <= sizes.slots:
    return sizes, 0.0
  sizes = sizes._replace(slots=need)
  return sizes, warm_up(model, sizes)


def _decode(model, ask, sizes, on_tokens):
  """Run one request to its end, or to Ctrl-C once there is something to keep.

  The clock stops while the host looks.
  """
  target, params = model.target, model.params
  began = time.perf_counter()
  state = generate.start(
    target, params, ask, max_new_tokens=sizes.max_new, slots=sizes.slots
  )
  jax.block_until_ready(state)
  prefill_seconds = time.perf_counter() - began
  out, seconds, seen = None, 0.0, np.zeros(sizes.batch, int)
  try:
    while out is None or (out.finish_reason == types.RUNNING).any():
      began = time.perf_counter()
      state = generate.advance(target, params, state, steps=CHUNK_STEPS)
      out = generate.output(state, sizes.max_new)
      seconds += time.perf_counter() - began
      for row in np.flatnonzero(out.length > seen):
        on_tokens(row, out.tokens[row, seen[row] : out.length[row]].tolist())
      seen = out.length
  except KeyboardInterrupt:
    if out is None:
      raise
    return out, prefill_seconds, seconds, True
  return out, prefill_seconds, seconds, False


def _answer(model, out, row, turn, prompt_ids):
  n = out.length[row]
  ids = tuple(out.tokens[row, :n].tolist())
  return Answer(
    turn=turn,
    prompt_ids=tuple(prompt_ids),
    token_ids=ids,
    text=tokenizer.decode(model.tokenizer, ids),
    finish_reason=_reason(out.finish_reason[row]),
    rounds=tuple(out.round[row, :n].tolist()),
  )


def _reason(code):
  """A row that was running when the clock stopped was interrupted."""
  name = types.FINISH_REASONS[code]
  return "interrupted" if name == "running" else name


def _message(role, content):
  return {"role": role, "content": content}
