"""Speculation: what a round costs beside its parts, and what comes of it.

`costs`: a round of K drafted tokens against K * t_draft + t_target(K + 1), the
parts each in a compiled loop of their own: plain decoding by the draft, and
bare target calls on K + 1 tokens. The draft is a slice of the target's layers.

`replay`: the speed-up at a known alpha against the one that the costs imply,
n t_target(1) / (R(n) (K t_draft + t_target(K + 1))), where R(n) is the expected
number of rounds for n tokens and t_target(1) a step of plain decoding.
"""

import functools

import numpy as np
import rich.table

from benchmarks import clock
from specjax import generate, metrics, request, theory, timing, types
from specjax.drafters import lm, replay
from specjax.errors import UserError
from specjax.models import load

STEPS = 50  # iterations of every timed loop
LAYERS = (0, 1, -1)  # of the target, the draft of `costs`
WIDTHS = (2, 4, 8)  # K
ALPHAS = (0.6, 0.8, 0.9)
TOKENS = 256  # n of `replay`


def cost_variants(model):
  """Return {name: () -> seconds of STEPS iterations}."""
  target, params = model.target, model.params
  layers = tuple(i % model.config.layers for i in LAYERS)
  part = load.part(model, layers=layers)
  drafter = lm.make(part.target, target.vocab_size)

  def rounds(K):
    draft = types.Draft(drafter, part.params, K)
    return _decode(target, params, STEPS * (K + 1), STEPS, draft)

  return {
    "draft": lambda: _decode(part.target, part.params, STEPS, STEPS),
    **{
      f"target({n})": clock.bare_calls(model, n, STEPS)
      for n in (1, *(K + 1 for K in WIDTHS))
    },
    **{f"round({K})": functools.partial(rounds, K) for K in WIDTHS},
  }


def _decode(target, params, max_new, steps, draft=None):
  """Seconds of `steps` target calls behind a prompt, prefill apart."""
  most = min(max_new, clock.SLOTS - clock.PROMPT)
  ask = request.make([clock.prompt()], max_new=most)
  sizes = dict(max_new_tokens=most, slots=clock.SLOTS)
  return clock.decode(target, params, ask, steps=steps, draft=draft, **sizes)[0]


def cost_table(times):
  """Medians; the last column is the median of a turn's ratios."""
  table = rich.table.Table("K", *_COLUMNS)
  ms = lambda name: clock.median(times[name]) / STEPS * 1e3
  for K in WIDTHS:
    parts = _parts(times, K)
    over = clock.median_ratio(times[f"round({K})"], parts)
    table.add_row(
      str(K),
      f"{ms('draft'):.2f}",
      f"{ms('target(1)'):.2f}",
      f"{ms(f'target({K + 1})'):.2f}",
      f"{ms(f'round({K})'):.2f}",
      f"{clock.median(parts) / STEPS * 1e3:.2f}",
      f"{over:.3f}",
    )
  return table


_COLUMNS = ("t_draft ms", "t(1)", "t(K+1)", "a round", "its parts", "ratio")


def _parts(times, K):
  """Seconds a turn of K t_draft + t_target(K + 1), STEPS times."""
  return [
    K * draft + target
    for draft, target in zip(
      times["draft"], times[f"target({K + 1})"], strict=True
    )
  ]


def replay_variants(model, K):
  """Return ({name: () -> seconds}, {alpha: [Acceptance a turn]}).

  A turn has a seed of its own for what is spoilt. Plain decoding makes the
  tokens once; timed again each turn, it is the yardstick.
  """
  target, params = model.target, model.params
  make = lambda seed: request.make([clock.prompt()], max_new=TOKENS, seed=seed)
  sizes = dict(max_new_tokens=TOKENS, slots=clock.SLOTS)
  plain = generate.autoregressive(target, params, make(0), **sizes)
  drafter = replay.make(target.vocab_size)
  accepted = {alpha: [] for alpha in ALPHAS}

  def speculate(alpha):
    found = accepted[alpha]
    draft = types.Draft(
      drafter, replay.Params(plain.tokens, np.float32(alpha)), K
    )
    ask = make(len(found) + 1)
    spent, out = clock.decode(
      target, params, ask, steps=TOKENS, draft=draft, **sizes
    )
    if not (out.tokens == plain.tokens).all():
      raise UserError("replay changed the answer")
    found.append(metrics.acceptance(out, K))
    return spent

  propose = timing.propose_loop(drafter, K, STEPS)
  ready = replay.Params(plain.tokens, np.float32(0.8))
  state = generate.start(
    target,
    params,
    make(0),
    draft=types.Draft(drafter, ready, K),
    **sizes,
  )
  return {
    "plain": lambda: _decode(target, params, TOKENS, TOKENS),
    "target": clock.bare_calls(model, K + 1, STEPS),
    "draft": functools.partial(clock.seconds, propose, ready, state),
    **{alpha: functools.partial(speculate, alpha) for alpha in ALPHAS},
  }, accepted


def replay_table(times, accepted, K):
  """Totals over the turns; `accepted` has one more, the first."""
  table = rich.table.Table(
    "alpha", "found", "tokens a call", "expected", "S", "predicted", "ratio"
  )
  per_step = sum(times["plain"]) / TOKENS  # of all turns
  per_round = (sum(times["draft"]) + sum(times["target"])) / STEPS
  for alpha in ALPHAS:
    total = metrics.add(accepted[alpha][1:], K)
    rounds = theory.expected_rounds(TOKENS, alpha ** np.arange(K + 1))
    predicted = TOKENS * per_step / (rounds * per_round)
    speedup = sum(times["plain"]) / sum(times[alpha])
    table.add_row(
      f"{alpha}",
      f"{total.alpha:.3f}",
      f"{total.tokens_per_call:.3f}",
      f"{TOKENS / rounds:.3f}",
      f"{speedup:.3f}",
      f"{predicted:.3f}",
      f"{speedup / predicted:.3f}",
    )
  return table
