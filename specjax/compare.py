"""Which draft, how many tokens a round, which verifier: predicted side by side.

What `python -m specjax.predict` does between its flags and its files.
"""

import copy
import functools
import itertools
import re
import time
from typing import NamedTuple

from specjax import (
  forecast,
  memory,
  pair,
  play,
  report,
  request,
  roofline,
  settings,
  sharding,
  terminal,
  timing,
  title,
)
from specjax.errors import UserError
from specjax.models import load

TIMED = "block"  # the verifier of the timed rounds; the other costs no more
_LAYERS = re.compile(r"-?\d+(\+-?\d+)*")
LOOKUP = 2  # tokens that repeat, of draft.lookup where the config has none
_LONGEST = 1000  # K; more is a slip of the hand


class Asked(NamedTuple):
  """What is to be compared."""

  configs: dict  # {draft as it was typed: a config that decodes with it}
  lengths: tuple[int, ...]  # K, rising
  variants: tuple[dict, ...]  # of a language model's sampling, {}: as it is
  turns: int  # times that each cost is measured
  there: roofline.There | None = None  # a size to foretell, None: as timed


class Found(NamedTuple):
  """What came of it."""

  plain: dict  # `report.build` of the plain run
  seeds: list[int]  # of its answers
  drafts: dict  # {name: `pair.Opened`}
  texts: dict  # {name: [(variant, `predict.Texts`)]}
  costs: dict  # {name: `timing.Costs`}


def asked(config, drafts, lengths, temperatures=(), top_ps=(), turns=5):
  """Return the `Asked` of some lists of texts.

  Args:
    config: whose prompts, target and sampling are meant.
    drafts: `ngram`, layers of the target joined by `+`, or a weight reference;
      one of a feature head with `+ngram` behind it copies first, see LOOKUP.
    lengths: K; temperatures, top_ps: of language models; none, or one below
      0: as in the config.
    turns: times that each cost is measured.

  Raises:
    UserError: one that cannot be meant.
  """
  K = sorted({_number("lengths", x, int) for x in lengths})
  if not K or K[0] < 1 or K[-1] > _LONGEST:
    raise UserError(
      f"--lengths must be in 1..{_LONGEST}, got {','.join(lengths) or 'none'}"
    )
  names = list(dict.fromkeys(filter(None, drafts)))
  if not names:
    raise UserError("no drafts: type --drafts=ngram,0+29 or weight references")
  variants = [
    {k: v for k, v in (("temperature", T), ("top_p", p)) if v is not None}
    for T, p in itertools.product(
      _grid("temperatures", temperatures), _grid("top_ps", top_ps)
    )
  ]
  for variant in variants:
    try:
      request.check(**variant)
    except ValueError as e:
      raise UserError(f"--temperatures and --top_ps: {e}") from e
  if turns < 1:
    raise UserError(f"--turns must be at least 1, got {turns}")
  configs = {name: _config(name, config, K[-1]) for name in names}
  return Asked(configs, tuple(K), tuple(variants), turns)


def _number(flag, text, kind):
  try:
    return kind(text)
  except ValueError:
    raise UserError(f"--{flag}: expected numbers, got {text!r}") from None


def _grid(flag, texts):
  """Numbers, or [None] for nothing to change; one below 0 is None too."""
  numbers = [_number(flag, x, float) for x in texts if x]
  return [None if x < 0 else x for x in dict.fromkeys(numbers)] or [None]


def _config(name, config, K):
  """The config that decodes with a draft, K tokens a round."""
  if name == "replay":
    raise UserError(
      "--drafts=replay: it knows the answer; there is nothing to predict"
    )
  c = copy.deepcopy(config)
  copies, name = name.endswith(title.COPIES), title.without_copies(name)
  with c.unlocked():
    c.decoder, c.verifier = "both", TIMED
    c.draft.num_tokens, c.draft.weights, c.draft.layers = K, "", ()
    c.draft.lookup = (c.draft.lookup or LOOKUP) if copies else 0
    usual = "ngram" if name == "ngram" else "lm"
    c.draft.name = "feature" if copies else usual
    if _LAYERS.fullmatch(name):
      c.draft.layers = tuple(map(int, name.split("+")))
    elif name == "ngram":
      c.draft.head, c.draft.temperature, c.draft.top_p = 0, -1.0, -1.0
    else:
      c.draft.weights = name
  settings.check(c)
  return c


def named(config, open_model):
  """The config with the draft.name that its draft's weights are for."""
  if not config.draft.weights:
    return config
  c = copy.deepcopy(config)
  with c.unlocked():
    c.draft.name = pair.method(open_model(config.draft.weights))
  settings.check(c)
  return c


def opened(asked, target, sizes, open_model):
  """{name: `pair.Opened`} of what is compared, checked against the target.

  Args:
    target: a `load.Opened`; sizes: the `play.Sizes` of the plain run.
    open_model: what makes a weight reference a draft's `load.Opened`.

  Raises:
    UserError: a draft that does not fit, or a round that is too long.
  """
  room = min(sizes.slots, target.config.context)
  K = asked.lengths[-1]
  if room < K + 2:
    raise UserError(
      f"--lengths={K}: this run's cache holds {room} tokens, so K may be 1 to"
      f" {room - 2}"
    )
  found = {}
  for name, config in asked.configs.items():
    try:
      config = named(config, open_model)
      found[name] = pair.opened(config, target, open_model)
      pair.check_context(found[name], max(sizes.tokens, K + 2))
    except UserError as e:
      raise UserError(f"--drafts={name}: {e}") from e
  return found


def run(out, config, asked, todo, dtype):
  """Decode plainly, feed the answers to every draft, measure: a `Found`.

  Args:
    out: the console of stderr, told how far it is.
    todo: list of `Prompt`; dtype: of weights and caches.
  """
  began = time.perf_counter()
  plain = copy.deepcopy(config)
  with plain.unlocked():
    plain.decoder = "autoregressive"
  target = terminal.open_target(out, config)
  settings.sampling(config, target.config.vocab_size)  # ids that it has
  sizes = play.sizes(target, todo, plain)
  # asked for a draft's method, then for the draft
  get = functools.cache(functools.partial(terminal.open_model, out, draft=True))
  drafts = opened(asked, target, sizes, get)
  model, pairs = _load(out, config, target, drafts, sizes, dtype)
  seconds = {"load": time.perf_counter() - began}
  with terminal.waiting(out, "compiling"):
    seconds["compile"] = play.warm_up(model, None, plain, sizes)
  terminal.note(out, f"ready in {time.perf_counter() - began:.0f} s")
  with terminal.decoding(out, todo, sizes) as show:
    batches = list(play.play(model, None, todo, plain, sizes, show))
  answers = [(a.prompt_ids, a.token_ids) for b in batches for a in b.answers]
  slots = max(batch.slots for batch in batches)
  bar = functools.partial(terminal.track, out)
  some = texts(model, pairs, asked, answers, sizes, slots, bar)
  terminal.note(out, "timing drafted tokens, target calls and rounds")
  timed = costs(model, pairs, asked, answers, config, slots, bar("timing"))
  if asked.there:
    timed = roofline.elsewhere(timed, model, pairs, asked.there)
  base = report.build(
    plain, model, None, dtype, sizes, batches, seconds, interrupted=False
  )
  return Found(base, seeds(batches, config), drafts, some, timed)


def _load(out, config, target, drafts, sizes, dtype):
  """The `load.Model` and {name: `pair.Pair`}."""
  shape = dict(dtype=dtype, batch=sizes.batch, slots=sizes.slots)
  shape |= dict(untie=load.untie_here())
  estimates = [
    memory.estimate(target.config, draft=draft, **shape)
    for draft in drafts.values()
  ]
  largest = max(estimates, key=lambda parts: sum(parts.values()))
  mesh = sharding.make(config)
  terminal.note(out, memory.check(memory.on(mesh, largest)))
  terminal.told_mesh(out, mesh, target.config)
  bar = terminal.track(out, "reading weights")
  model = load.model(target, dtype=dtype, track=bar, mesh=mesh)
  return model, {
    name: pair.load(draft, model, dtype=dtype, track=bar)
    for name, draft in drafts.items()
  }


def texts(model, pairs, asked, answers, sizes, slots, track):
  """{name: [(variant, its `predict.Texts`)]} of plain answers.

  Args:
    pairs: {name: `pair.Pair`}.
    answers: list of (prompt token ids, answer token ids).
    track: (text) -> what wraps a list, for a progress bar.
  """
  if not any(ids for _, ids in answers):
    raise UserError("the plain answers are empty: nothing to predict from")
  found = {}
  for name, draft in pairs.items():
    bar = track(f"the draft {name}")
    own = draft.opened.config is not None  # else no law to sweep
    variants = asked.variants if own else ({},)
    some = forecast.texts(
      model,
      draft,
      answers,
      asked.configs[name],
      num_draft=asked.lengths[-1],
      batch=sizes.batch,
      slots=slots,
      variants=variants,
      track=bar,
    )
    found[name] = list(zip(variants, some, strict=True))
  return found


def costs(model, pairs, asked, answers, config, slots, track):
  """{name: `timing.Costs`} of one row, all drafts taking turns."""
  V, K = model.target.vocab_size, asked.lengths[-1]
  space = min(forecast.room(model, draft, slots) for draft in pairs.values())
  context, steps = timing.fit(
    space, forecast.mean_context([[x] for x in answers]), K, 16
  )
  return timing.measure(
    model.target,
    model.params,
    {
      name: forecast.timed(draft, asked.configs[name], V, 1)
      for name, draft in pairs.items()
    },
    batch=1,
    slots=slots,
    context=context,
    widths=asked.lengths,
    sampling=settings.sampling(config, V),
    steps=steps,
    turns=asked.turns,
    track=track,
  )


def seeds(batches, config):
  """The seed of each answer, by its prompt and turn."""
  turns = [a.turn for batch in batches for a in batch.answers]
  turns.sort(key=lambda turn: (turn.index, turn.number))
  own = [turn.prompt.seed for turn in turns]
  return [config.seed if seed is None else seed for seed in own]
