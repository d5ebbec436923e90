"""Whether speculation gives the tokens of plain decoding, prompt by prompt."""

import contextlib
import time
from typing import Any, NamedTuple

import numpy as np

from specjax import attribution, generate, pair, request, settings


class Asked(NamedTuple):
  """A prompt of the check."""

  id: str
  ids: tuple[int, ...]
  seed: int


class Case(NamedTuple):
  """All that is checked: a pair on a device, and what to decode with it."""

  model: Any  # a `load.Model`
  pair: Any  # a `pair.Pair`
  config: Any  # the ConfigDict
  asked: tuple[Asked, ...]
  max_new: int  # most tokens of an answer
  slots: int
  dtype: Any  # of weights and cache


def make_request(case, asked, *, temperature, max_new, batch):
  """Return the `Request` of some `Asked` with the config's sampling values.

  Stop texts are cut on the host and play no part.

  Args:
    temperature: takes the place of the config's.
  """
  config, model = case.config, case.model
  values = settings.sampling(config, model.target.vocab_size)
  return request.make(
    [x.ids for x in asked],
    seed=[x.seed for x in asked],
    max_new=max_new,
    stop_ids=() if config.ignore_eos else model.tokenizer.stop_ids,
    width=case.slots,
    batch=batch,
    **{**values, "temperature": temperature},
  )


def joiner(case, verifier):
  """Return what makes the `types.Draft` of a request, judged by `verifier`.

  It takes the request and the tokens [B, N] that plain decoding made of it.
  """

  def join(ask, plain):
    return pair.join(case.pair, ask, plain)._replace(verifier=verifier)

  return join


def equality(case, verifier, *, temperature, track):
  """Compare the answers to all prompts token by token; return what is found.

  Args:
    verifier: of `types.VERIFIERS`; at temperature > 0 only "coupled" promises
      equal tokens.
    track: wraps the list of batches, for a progress bar.
  """
  batch, began = case.config.batch_size, time.perf_counter()
  groups = [
    case.asked[at : at + batch] for at in range(0, len(case.asked), batch)
  ]
  tokens, mismatches = 0, []
  with contextlib.closing(track(groups)) as bar:
    for group in bar:
      length, found = compare(
        case.model.target,
        case.model.params,
        make_request(
          case,
          group,
          temperature=temperature,
          max_new=case.max_new,
          batch=batch,
        ),
        joiner(case, verifier),
        max_new_tokens=case.max_new,
        slots=case.slots,
        dtype=case.dtype,
      )
      tokens += int(length.sum())
      mismatches += [_told(group[x.row].id, x, case.dtype) for x in found]
  return {
    "fault": not all(x["tie_flip"] for x in mismatches),
    "answers": len(case.asked),
    "tokens": tokens,
    "temperature": temperature,
    "verifier": verifier,
    "mismatches": mismatches,
    "seconds": time.perf_counter() - began,
  }


def compare(target, params, ask, join, *, max_new_tokens, slots, dtype):
  """Decode a request both ways; return the plain lengths and `Mismatch`es.

  Args:
    target: a `Target`; params: its parameters.
    ask: a `Request` of B rows, greedy where the verifier is not "coupled".
    join: (request, plain tokens [B, N]) -> the `types.Draft`.
    max_new_tokens, slots: as in `generate.autoregressive`.
    dtype: of weights and cache, which says what rounding is.

  Returns:
    [B] tokens of the plain answers, and a list of `Mismatch`.
  """
  size = dict(max_new_tokens=max_new_tokens, slots=slots)
  plain = generate.autoregressive(target, params, ask, **size)
  draft = join(ask, plain.tokens)
  other = generate.speculative(
    target,
    draft.drafter,
    params,
    draft.params,
    ask,
    num_draft=draft.num_draft,
    verifier=draft.verifier,
    draft_sampling=draft.sampling,
    **size,
  )
  places = _differences(plain, other)
  if not places:
    return plain.length, []
  return plain.length, attribution.explain(
    *(target, params, ask, (plain, other), places),
    slots=slots,
    num_draft=draft.num_draft,
    dtype=dtype,
  )


def _differences(plain, other):
  """{row: place of its first differing token, or behind equal ones}."""
  found = {}
  for row in range(len(plain.length)):
    unequal = plain.tokens[row] != other.tokens[row]
    if unequal.any():
      found[row] = int(unequal.argmax())
    elif plain.finish_reason[row] != other.finish_reason[row]:
      found[row] = int(plain.length[row])
  return found


def _told(prompt, x, dtype):
  """An `attribution.Mismatch` for JSON, which has no infinity."""
  finite = lambda value: value if np.isfinite(value) else None
  return {
    "prompt": prompt,
    "place": x.place,
    "plain": x.plain,
    "speculative": x.speculative,
    "gap": finite(x.gap),
    "difference": finite(x.difference),
    "ulp": x.ulp,
    "most_ulps": attribution.ROUNDING[str(np.dtype(dtype))],
    "reproduced": x.reproduced,
    "tie_flip": x.tie,
  }
