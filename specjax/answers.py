"""One request from its prompts to its answers, watched as the tokens come.

Everything that touches the host while tokens are made is here: it feeds the
compiled programs of `generate.py`, looks for stop texts between their chunks
and hands what they emit to a `Show`.
"""

import time
from typing import NamedTuple

import jax
import numpy as np

from specjax import generate, metrics, prompts, settings, stops, types
from specjax.models import tokenizer

CHUNK_STEPS = 8  # target calls between two looks of the host: some 10 us


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
  text: str  # without the stop text
  finish_reason: str
  rounds: tuple[int, ...]  # which target call emitted each token
  accepted: tuple[bool, ...]  # whether it is the draft's
  stop_text: str | None = None  # which of config.stop ended it
  logprobs: types.Logprobs | None = None  # of lists; None: not asked for


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
  # (row, new ids, which of them are the draft's, the answer's whole text if a
  # stop text has ended it, else None) -> None
  tokens: object
  end: object  # () -> None


class Run(NamedTuple):
  """What came back from the loop."""

  output: types.Output
  ends: dict  # {row: (tokens kept, text, stop text)} of `stops.first`
  prefill_seconds: float
  seconds: float
  interrupted: bool


def decode(model, ask, sizes, draft, config, on_tokens):
  """Run one request to its end, or to Ctrl-C once there is something to keep.

  The clock stops while the host looks.

  Args:
    model: a `load.Model`; ask: a `types.Request`; sizes: a `play.Sizes`.
    draft: a `types.Draft`, None for plain decoding.
    on_tokens: a `Show`'s.
  """
  target, params = model.target, model.params
  texts, minimum = settings.stop_texts(config), config.sampling.min_new_tokens
  began = time.perf_counter()
  state = start(model, ask, sizes, draft, config)
  jax.block_until_ready(state)
  prefill_seconds = time.perf_counter() - began
  out, seconds, seen = None, 0.0, np.zeros(sizes.batch, int)
  ends = {}
  try:
    while out is None or (out.finish_reason == types.RUNNING).any():
      began = time.perf_counter()
      state = generate.advance(
        target, params, state, steps=CHUNK_STEPS, draft=draft
      )
      uncut = generate.output(state, sizes.max_new)
      seconds += time.perf_counter() - began
      new_ends = _ends(model.tokenizer, uncut, seen, texts, minimum)
      keep = {row: count for row, (count, _, _) in new_ends.items()}
      state = generate.cut(state, keep) if keep else state
      ends |= new_ends
      out = generate.output(state, sizes.max_new) if keep else uncut
      for row in np.flatnonzero(out.length > seen):
        new = np.s_[row, seen[row] : out.length[row]]
        _, text, _ = new_ends.get(row, (None, None, None))
        on_tokens(
          row, out.tokens[new].tolist(), out.accepted[new].tolist(), text
        )
      seen = out.length
  except KeyboardInterrupt:
    if out is None:
      raise
    return Run(out, ends, prefill_seconds, seconds, True)
  return Run(out, ends, prefill_seconds, seconds, False)


def start(model, ask, sizes, draft, config):
  """Return the loop's state behind the prompts; see `generate.start`."""
  return generate.start(
    model.target,
    model.params,
    ask,
    draft=draft,
    max_new_tokens=sizes.max_new,
    slots=sizes.slots,
    logprobs=config.logprobs,
  )


def _ends(tok, out, seen, texts, minimum):
  """{row: `stops.first`} of the rows that a stop text ends among new tokens."""
  found = {}
  for row in np.flatnonzero(out.length > seen) if texts else ():
    ids = out.tokens[row, : out.length[row]].tolist()
    end = stops.first(tok, ids, texts, seen=seen[row], minimum=minimum)
    if end:
      found[row] = end
  return found


def answers(model, run, turns, ids):
  """Return the `Answer` of each turn; ids: their prompts' token ids."""
  return tuple(
    _answer(model, run, row, turn, ids[row]) for row, turn in enumerate(turns)
  )


def _answer(model, run, row, turn, prompt_ids):
  out = run.output
  new = np.s_[row, : out.length[row]]
  ids = tuple(out.tokens[new].tolist())
  reason = types.FINISH_REASONS[out.finish_reason[row]]
  _, text, stop_text = run.ends.get(row, (None, None, None))
  return Answer(
    turn=turn,
    prompt_ids=tuple(prompt_ids),
    token_ids=ids,
    text=tokenizer.decode(model.tokenizer, ids) if text is None else text,
    # a row that was running when the clock stopped was interrupted
    finish_reason="interrupted" if reason == "running" else reason,
    stop_text=stop_text,
    rounds=tuple(out.round[new].tolist()),
    accepted=tuple(out.accepted[new].tolist()),
    logprobs=out.logprobs
    and types.Logprobs(*(x[new].tolist() for x in out.logprobs)),
  )


def batch(decoder, found, sizes, compile_seconds, run, draft):
  """Return the `Batch` of a decoder's answers; draft: its `types.Draft`."""
  return Batch(
    decoder=decoder,
    answers=found,
    slots=sizes.slots,
    compile_seconds=compile_seconds,
    prefill_seconds=run.prefill_seconds,
    seconds=run.seconds,
    steps=int(run.output.stats.steps),
    acceptance=draft and metrics.acceptance(run.output, draft.num_draft),
    interrupted=run.interrupted,
  )
