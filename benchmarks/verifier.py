"""The verifier alone: what `verify.block` and `verify.token` cost of a round.

Each is vmapped over one row, as the loop has it, on laws over the model's
vocabulary, STEPS times in a compiled loop of its own. The round is the cheapest
one there is, so that its share is the largest: prompt lookup, at T = 1. Both
laws are still in the processor's cache here, as they are in a round, which has
just made them.
"""

import functools

import jax
import jax.numpy as jnp
import rich.table
from jax import lax

from benchmarks import clock
from specjax import request, types, verify
from specjax.drafters import ngram

STEPS = 50  # calls in a turn
WIDTHS = (4, 8)  # K
_NAMES = ("block", "token")


def variants(model):
  """Return {name: () -> seconds of STEPS calls}."""
  runs = {}
  for K in WIDTHS:
    runs[f"round({K})"] = functools.partial(_rounds, model, K)
    for name in _NAMES:
      loop, laws = _loop(name), _laws(model.target.vocab_size, K)
      runs[f"{name}({K})"] = functools.partial(_judge, loop, laws)
  return runs


def _rounds(model, K):
  """Seconds of STEPS rounds of prompt lookup."""
  most = clock.SLOTS - clock.PROMPT
  ask = request.make([clock.prompt()], max_new=most, temperature=1.0)
  draft = types.Draft(ngram.make(model.target.vocab_size), (), K)
  sizes = dict(max_new_tokens=most, slots=clock.SLOTS, draft=draft)
  spent, out = clock.decode(
    model.target, model.params, ask, steps=STEPS, **sizes
  )
  return spent * STEPS / int(out.stats.steps)


def _judge(loop, laws):
  return clock.seconds(lambda: loop(*laws))


def _laws(vocab_size, K):
  """p, q, draft and u of one row; the draft is drawn from q, alpha is 0.7."""
  keys = jax.random.split(jax.random.key(K), 4)
  logits = 3 * jax.random.normal(keys[0], (1, K + 1, vocab_size))
  other = logits + jax.random.normal(keys[1], logits.shape)
  draft = jax.random.categorical(keys[2], other[:, :K])
  u = jax.random.uniform(keys[3], (1, K))
  p, q = jax.nn.softmax(logits), jax.nn.softmax(other[:, :K])
  return jax.block_until_ready((p, q, draft, u))


@functools.cache
def _loop(name):
  """A jitted loop of STEPS calls of a verifier."""
  judge = jax.vmap(getattr(verify, name))

  @jax.jit
  def run(p, q, draft, u):
    def step(_, carry):
      # without this, what follows from the laws alone would be done once
      laws, carry = lax.optimization_barrier(((p, q, draft, u), carry))
      verdict = judge(*laws)
      return carry[0] + verdict.num_accepted, verdict.next_probs

    start = jnp.zeros(1, jnp.int32), jnp.zeros_like(p[:, 0])
    return lax.fori_loop(0, STEPS, step, start)

  return run


def table(times):
  """Medians; the shares are medians of a turn's ratios."""
  result = rich.table.Table(
    "K", "a round ms", "block ms", "token ms", "block's share", "token's share"
  )
  ms = lambda name: f"{clock.median(times[name]) / STEPS * 1e3:.3f}"
  for K in WIDTHS:
    names = [f"{name}({K})" for name in _NAMES]
    share = lambda name, K=K: clock.median_ratio(
      times[name], times[f"round({K})"]
    )
    result.add_row(
      str(K),
      ms(f"round({K})"),
      *map(ms, names),
      *(f"{share(name):.2%}" for name in names),
    )
  return result
