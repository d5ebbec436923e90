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


class Answer(NamedTuple):
  """One turn's answer."""

  prompt: prompts.Prompt
  turn: int
  prompt_ids: tuple[int, ...]
  token_ids: tuple[int, ...]
  text: str
  finish_reason: str
  rounds: tuple[int, ...]  # which target call emitted each token


class Batch(NamedTuple):
  """What one call decoded, and how long it took without compiling."""

  answers: tuple[Answer, ...]
  prefill_seconds: float
  seconds: float  # of the decode loop
  steps: int  # target calls of the loop


class Show(NamedTuple):
  """What is done with the answers as they come; each may do nothing."""

  begin: object  # (answers-to-be: list of (Prompt, turn)) -> None
  tokens: object  # (row, new ids) -> None
  end: object  # () -> None


def slots(opened, todo, *, as_chat, max_new_tokens):
  """Cache slots that serve every prompt, so that one program does.

  A later turn's prompt holds the answers before it, each at most
  max_new_tokens long.

  Args:
    opened: a `load.Opened`.

  Raises:
    UserError: a first prompt that is empty or longer than the context.
  """
  context, most = opened.config.context, 1
  for prompt in todo:
    talk = list(prompt.history)
    for turn, text in enumerate(prompt.turns):
      talk.append(_message("user", text))
      ids = prompts.encode(opened.tokenizer, talk, as_chat=as_chat)
      most = max(most, len(ids) + turn * max_new_tokens)
      if turn == 0 and not 0 < len(ids) <= context:
        raise UserError(
          f"prompt {prompt.id} has {len(ids)} tokens; the model's context"
          f" holds 1 to {context}"
        )
      talk.append(_message("assistant", ""))
  return generate.num_slots(context, most, max_new_tokens)


def warm_up(model, *, batch_size, slots):
  """Compile both programs by running them on rows that ask for nothing.

  Returns:
    Seconds it took; near zero when the compilation cache has them.
  """
  began = time.perf_counter()
  nothing = request.make([[0]], max_new=0, batch=batch_size, width=slots)
  out = generate.autoregressive(
    model.target, model.params, nothing, max_new_tokens=0, slots=slots
  )
  jax.block_until_ready(out)
  return time.perf_counter() - began


def play(
  model,
  todo,
  *,
  sampling,
  batch_size,
  slots,
  max_new_tokens,
  as_chat,
  seed,
  show,
):
  """Yield a `Batch` for each turn of each group of `batch_size` prompts.

  Args:
    model: a `load.Model`.
    todo: list of `Prompt`.
    sampling: keyword arguments of `request.make`: temperature, top_p, ...
    slots: see `slots`; seed: for prompts that bring none.
    show: a `Show`.
  """
  for at in range(0, len(todo), batch_size):
    group = todo[at : at + batch_size]
    talks = [list(prompt.history) for prompt in group]
    for turn in range(max(len(prompt.turns) for prompt in group)):
      rows = [i for i, p in enumerate(group) if turn < len(p.turns)]
      for i in rows:
        talks[i].append(_message("user", group[i].turns[turn]))
      ids = [
        prompts.encode(model.tokenizer, talks[i], as_chat=as_chat) for i in rows
      ]
      ask = request.make(
        [row[: model.target.context] for row in ids],
        max_new=max_new_tokens,
        seed=[seed if group[i].seed is None else group[i].seed for i in rows],
        stop_ids=model.tokenizer.stop_ids,
        width=slots,
        batch=batch_size,
        **sampling,
      )
      show.begin([(group[i], turn) for i in rows])
      out, prefill_seconds, seconds = _decode(
        model, ask, max_new_tokens, slots, len(rows), show.tokens
      )
      show.end()
      answers = [
        _answer(model, out, row, group[i], turn, ids[row])
        for row, i in enumerate(rows)
      ]
      for i, answer in zip(rows, answers, strict=True):
        talks[i].append(_message("assistant", answer.text))
      yield Batch(
        tuple(answers), prefill_seconds, seconds, int(out.stats.steps)
      )


def _decode(model, ask, max_new_tokens, slots, num_rows, on_tokens):
  """Run one request to its end; the clock stops while the host looks."""
  target, params = model.target, model.params
  began = time.perf_counter()
  state = generate.start(
    target, params, ask, max_new_tokens=max_new_tokens, slots=slots
  )
  jax.block_until_ready(state)
  prefill_seconds = time.perf_counter() - began
  seconds, seen = 0.0, np.zeros(num_rows, int)
  while True:
    began = time.perf_counter()
    state = generate.advance(target, params, state, steps=CHUNK_STEPS)
    out = generate.output(state, max_new_tokens)
    seconds += time.perf_counter() - began
    for row in range(num_rows):
      new = out.tokens[row, seen[row] : out.length[row]].tolist()
      on_tokens(row, new)
      seen[row] = out.length[row]
    if not (out.finish_reason == types.RUNNING).any():
      return out, prefill_seconds, seconds


def _answer(model, out, row, prompt, turn, prompt_ids):
  n = out.length[row]
  ids = tuple(out.tokens[row, :n].tolist())
  return Answer(
    prompt=prompt,
    turn=turn,
    prompt_ids=tuple(prompt_ids),
    token_ids=ids,
    text=tokenizer.decode(model.tokenizer, ids),
    finish_reason=types.FINISH_REASONS[out.finish_reason[row]],
    rounds=tuple(out.round[row, :n].tolist()),
  )


def _message(role, content):
  return {"role": role, "content": content}
