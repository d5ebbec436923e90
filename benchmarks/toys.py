"""Toy pairs whose optimum is known, and a draft's training on them.

The target is a Markov chain, softmax(U V / sqrt(16) * SHARP) of two normal
matrices of rank 16: like a language model sure at most places. Both drafts know
the last token alone and less than the chain does; both start sure and wrong.

`rank`: logits E[x] W + b, of rank 3, all trained. What is best is not convex
in these; the best of many longer runs from mild starts stands for it.

`classes`: a law for each of 8 classes of tokens, logits W[class of x]. The
alpha of the best one is known: sum_x mu_x sum_y min(P[x, y], q[c(x), y]) is a
concave, piecewise linear function of q, so that filling each class's law by the
steepest pieces first is optimal.

Everything but training is NumPy in float64. Tokens a call of token
verification are exact: with M = min(P, Q), round starts are a Markov chain over
the last token, G = sum_{j<K} M^j (P - M) + M^K P, and in its stationary law
E[N] = sum_{j<=K} M^j 1. Those of block verification depend on products of
ratios: the renewal form on long texts, with an interval over texts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from specjax import forced, objective, predict, theory

V, K = 32, 6
RANK, CLASSES = 3, 8
SHARP = 3.0
SURE = 3.0  # standard deviation of E at the start; W's is 1
ROWS, LENGTH = 16, 64  # of a batch


class Toy(NamedTuple):
  """One seed's."""

  P: np.ndarray  # [V, V] float64
  classes: np.ndarray  # [V] int
  texts: np.ndarray  # [n, LENGTH + 1] to train on
  held_out: np.ndarray  # [n, 513]


def make(seed):
  """Return the `Toy` of a seed."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(V, 16)) @ rng.normal(size=(16, V)) / 4
  P = softmax(SHARP * logits)
  draw = functools.partial(_texts, rng, P)
  return Toy(
    P, rng.permutation(V) % CLASSES, draw(4096, LENGTH), draw(128, 512)
  )


def softmax(z):
  z = np.exp(z - z.max(-1, keepdims=True))
  return z / z.sum(-1, keepdims=True)


def _texts(rng, P, count, length):
  """[count, length + 1] tokens, the first from the stationary law."""
  cumulative = P.cumsum(1)
  x = [rng.choice(V, count, p=stationary(P))]
  for _ in range(length):
    u = rng.random((count, 1))
    x.append((u > cumulative[x[-1]]).sum(1).clip(max=V - 1))
  return np.stack(x, 1).astype(np.int32)


def stationary(G):
  """The law that a stochastic matrix keeps."""
  A = np.concatenate([G.T - np.eye(len(G)), np.ones((1, len(G)))])
  return np.linalg.lstsq(A, np.append(np.zeros(len(G)), 1), rcond=None)[0]


def exact(P, Q):
  """(alpha, tokens a call of token verification, E[N] of all starts alike)."""
  M, n = np.minimum(P, Q), len(P)
  reach, G, length = np.eye(n), np.zeros((n, n)), np.ones(n)
  for _ in range(K):
    G = G + reach @ (P - M)
    reach = reach @ M
    length = length + reach.sum(1)
  mu = stationary(P)
  return mu @ M.sum(1), stationary(G + reach @ P) @ length, mu @ length


def block(toy, Q):
  """Tokens a call of block verification, (mean, low, high)."""
  before, x = toy.held_out[:, :-1], toy.held_out[:, 1:]
  log_p, log_q = (np.log(np.maximum(p[before, x], 1e-300)) for p in (toy.P, Q))
  A = predict.survival(log_p, forced.windows(log_q, K), "block")
  length = np.full(len(x), x.shape[1])
  rounds = theory.expected_rounds_along(A)[:, None]
  return [float(x[0]) for x in predict.tokens_a_round(length, rounds)]


def best_of_classes(toy):
  """The Q [V, V] of the largest alpha that a law a class can have."""
  mu, q = stationary(toy.P), np.zeros((CLASSES, V))
  for c in range(CLASSES):
    rows = np.flatnonzero(toy.classes == c)
    order = np.argsort(toy.P[rows], 0)  # [rows, V]
    levels = np.take_along_axis(toy.P[rows], order, 0)
    width = np.diff(levels, axis=0, prepend=0)
    gain = mu[rows][order][::-1].cumsum(0)[::-1]  # of those not yet filled
    token = np.broadcast_to(np.arange(V), gain.shape).ravel()
    steepest = np.argsort(-gain.ravel(), kind="stable")
    width = width.ravel()[steepest]
    room = np.clip(1 - (width.cumsum() - width), 0, width)
    np.add.at(q[c], token[steepest], room)
  return q[toy.classes]


def start(kind, key, sure):
  """What is trained of a draft, before it is."""
  a, b = jax.random.split(key)
  if kind == "classes":  # as sure as the other
    return {"W": jax.random.normal(b, (CLASSES, V)) * sure * RANK**0.5}
  E = jax.random.normal(a, (V, RANK)) * sure
  W = jax.random.normal(b, (RANK, V))
  return {"E": E, "W": W, "b": jnp.zeros(V)}


def hidden(params, toy_classes):
  """The draft's state [V, D] behind each token."""
  if "E" in params:
    return params["E"]
  return jax.nn.one_hot(toy_classes, CLASSES)


def unembed(params, states):
  return states @ params["W"] + params.get("b", 0)


def train(kind, schedule, steps, toys, keys, rates, sure):
  """Train a draft on each toy at each rate: Q [toys, rates, V, V], float64.

  Adam, cosine to zero. All that is compared sees the same starts and texts.

  Args:
    kind: "rank" or "classes"; schedule: of `objective.phase`.
    toys: list of `Toy`; keys: [toys] a start each; rates: [R].
    sure: standard deviation of what a start says.
  """
  log_P = jnp.asarray(np.log([toy.P for toy in toys]), jnp.float32)
  classes = jnp.stack([toy.classes for toy in toys])
  texts = jnp.stack([toy.texts for toy in toys])

  def run(log_P, classes, texts, key, rate):
    begin, order = jax.random.split(key)
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    params = start(kind, begin, sure)

    def loss(params, i):
      rows = jax.random.fold_in(order, i)
      x = texts[jax.random.randint(rows, (ROWS,), 0, len(texts))]
      sums = objective.total(
        schedule,
        i / steps,
        log_P[x[:, :-1]],
        hidden(params, classes)[x[:, :-1]],
        jnp.ones((ROWS, LENGTH)),
        x[:, 1:],
        teacher_unembed=lambda logits: logits,
        student_unembed=functools.partial(unembed, params),
        chunk=LENGTH,
      )
      return sums.loss / sums.weight

    def step(carry, i):
      params, state = carry
      updates, state = optimizer.update(jax.grad(loss)(params, i), state)
      return (optax.apply_updates(params, updates), state), None

    carry = params, optimizer.init(params)
    (params, _), _ = lax.scan(step, carry, jnp.arange(steps))
    return unembed(params, hidden(params, classes))

  rate_axis = jax.vmap(run, (None, None, None, None, 0))
  every = jax.jit(jax.vmap(rate_axis, (0, 0, 0, 0, None)))
  logits = every(log_P, classes, texts, keys, jnp.asarray(rates))
  return softmax(np.asarray(logits, np.float64))


TV, KL = "total_variation", "forward_kl"


def _then(name, **options):
  """KL for the first third, as a schedule."""
  return (KL, 1 / 3), (name, 1.0, options)


SCHEDULES = {
  "KL": ((KL, 1.0),),
  "TV": ((TV, 1.0),),
  "KL > TV": _then(TV),
  "KL > length, token": _then("expected_length", num_draft=K, verifier="token"),
  "KL > length, block": _then("expected_length", num_draft=K),
  "KL > rounds, token": _then("expected_rounds", num_draft=K, verifier="token"),
  "KL > rounds, block": _then("expected_rounds", num_draft=K),
  "hybrid": (("likelihood_hybrid", 1.0),),
  "-log alpha": (("negative_log_acceptance", 1.0),),
  "TVD++": (("tvd_plus_plus", 1.0),),
  "JS": (("js", 1.0),),
  "reverse KL": (("reverse_kl", 1.0),),
}


def best(kind, made, steps):
  """The Q of each toy that stands for the optimum; see the module."""
  if kind == "classes":
    return np.stack([best_of_classes(toy) for toy in made])
  found = []
  for toy in made:
    keys = jax.random.split(jax.random.key(1), 8)
    many, rates = [toy] * len(keys), (0.1,)
    Q = train(kind, SCHEDULES["KL > TV"], 4 * steps, many, keys, rates, 0.5)
    found.append(max(Q[:, 0], key=lambda q: exact(toy.P, q)[1]))
  return np.stack(found)


def best_rate(made, Q):
  """Which of Q [toys, rates, V, V] has the most tokens a call in the mean."""
  every = [
    [exact(toy.P, q)[1] for q in some]
    for toy, some in zip(made, Q, strict=True)
  ]
  return int(np.mean(every, 0).argmax())


def numbers(made, Q):
  """{name: list by seed} of a draft's laws Q [toys, V, V]."""
  alpha, tokens, alike = zip(
    *(exact(toy.P, q) for toy, q in zip(made, Q, strict=True)), strict=True
  )
  mean, low, high = zip(
    *(block(toy, q) for toy, q in zip(made, Q, strict=True)), strict=True
  )
  every = dict(alpha=alpha, tokens=tokens, starts_alike=alike)
  every |= dict(block=mean, block_low=low, block_high=high)
  return {key: [float(x) for x in row] for key, row in every.items()}


def verdicts(found):
  """Lines on what is claimed of the objectives."""
  of = lambda name, key="tokens": np.array(found[name][key])
  base = of("KL > TV")
  for other in ("TV", "KL"):
    wins = int((base > of(other)).sum())
    gain = base.mean() / of(other).mean() - 1
    yield f"KL > TV over {other}: on {wins} of {len(base)} seeds, {gain:+.1%}"
  for name in found:
    rule = name.rpartition(", ")[2]
    if rule in ("token", "block"):
      key = {"token": "tokens", "block": "block"}[rule]
      gain = of(name, key).mean() / of("KL > TV", key).mean() - 1
      yield f"{name} over KL > TV: {gain:+.2%} in the mean, {rule} verification"
