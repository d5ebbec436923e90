"""What a micro-batch and a step of training do to the state, each one jit.

Teacher and student run in the same program, and neither's logits are ever held
for all positions (`objective.py`). Gradients are sums over positions: those of
all micro-batches are added, then divided once by the supervised tokens of them
all (B19, B20).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from specjax import chunks, objective
from specjax.drafters import feature as heads
from specjax.drafters import lm as drafting


class Forward(NamedTuple):
  """How a draft runs over a batch; another kind of draft is another of these.

  Parameters are whole here: what is trained, joined with what is shared.
  """

  features: tuple  # target layers whose outputs it reads, () for none
  # (params, `trajectories.Batch`, the teacher's last hidden states [B, T, D],
  #   taps [B, T, F, D]) -> [B, T, Dq], or [B, T, J, Dq] by depth of a round
  hidden: Callable
  unembed: Callable  # (params, [..., Dq]) -> logits [..., Vq]


def forward(student, depths):
  """Return the `Forward` of a `Student`, the very same one each time.

  Args:
    depths: J, to which a head that reads features is unrolled.
  """
  if not student.features:
    return lm(student.model)
  return feature(heads.Config(student.config, student.features), depths)


@functools.cache  # it is static in jitted programs
def lm(model):
  """Return the `Forward` of a plain language model, a `Target`."""

  def hidden(params, batch, teacher_hidden, taps):
    del teacher_hidden, taps
    tokens = drafting.known(model, batch.tokens)
    return model.apply(params, tokens, _positions(tokens), None)[0]

  return Forward((), hidden, model.unembed)


@functools.cache
def feature(config, depths):
  """Return the `Forward` of a head on the target's features, unrolled."""

  def hidden(params, batch, teacher_hidden, taps):
    del teacher_hidden
    return heads.unroll(config, params, batch.tokens, taps, depths)

  return Forward(config.features, hidden, functools.partial(heads.head, config))


class State(NamedTuple):
  """What a run goes on from: all of it is saved, and each array is donated.

  There is no key: nothing in a step is random. Which rows a step sees, and
  which noise the draft's own answers are drawn with, are functions of the
  config's seed and the step.
  """

  step: jax.Array  # [] int32, steps that are done
  micro: jax.Array  # [] int32, micro-batches of the next one that are added up
  params: Any  # what is trained, float32
  moments: Any  # the optimiser's, float32
  gradient: Any  # like params, the sum over those micro-batches
  sums: objective.Sums  # of those micro-batches
  recent: objective.Sums  # of the steps since the log's last line
  failed: jax.Array  # [] int32, the first step that came out wrong, else -1


class Report(NamedTuple):
  """What is told of a step; not donated, so that it can be read later."""

  loss: jax.Array  # [] mean over the supervised tokens since the last line
  alpha: jax.Array  # [] the same, of the first drafted token
  tokens: jax.Array  # [] how many these are
  now: jax.Array  # [] the loss of this step alone
  norm: jax.Array  # [] of the mean gradient, before clipping
  rate: jax.Array  # [] learning rate
  failed: jax.Array  # [] int32, see `State`


class Steps(NamedTuple):
  """The two programs."""

  # (State, Batch, teacher's params, shared) -> State; the State is donated
  accumulate: Callable
  update: Callable  # (State) -> (State, Report); the State is donated


def start(params, optimiser):
  """Return the `State` before the first step.

  Args:
    params: float32; arrays that nothing else holds, since they are donated.
  """
  zero, none = jnp.int32(0), lambda: jnp.zeros((), jnp.float32)
  sums = lambda: objective.Sums(none(), none(), none())
  return State(
    step=zero,
    micro=jnp.copy(zero),
    params=params,
    moments=optimiser.init(params),
    gradient=jax.tree.map(jnp.zeros_like, params),
    sums=sums(),
    recent=sums(),
    failed=jnp.int32(-1),
  )


def learning_rate(peak, warmup, steps):
  """count -> rate: linear up to the peak, then half a cosine down to 0.

  Args:
    warmup: steps until the peak; the first one already moves.
  """

  def rate(count):
    up = (count + 1) / (warmup + 1)
    done = jnp.clip((count - warmup) / (steps - warmup), 0, 1)
    return peak * jnp.minimum(up, (1 + jnp.cos(jnp.pi * done)) / 2)

  return rate


def optimiser(how, steps):
  """Return AdamW behind a clip of the gradient's norm (optax).

  Norms' scales and biases are not decayed. (Loshchilov and Hutter 2019.)

  Args:
    how: a config's `optimiser`.
  """
  matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
  rate = learning_rate(how.learning_rate, round(how.warmup * steps), steps)
  return optax.chain(
    optax.clip_by_global_norm(how.clip),
    optax.adamw(
      rate,
      b1=how.beta1,
      b2=how.beta2,
      weight_decay=how.weight_decay,
      mask=matrices,
    ),
  )


def make(
  teacher,
  forward,
  join,
  optimiser,
  rate,
  *,
  schedule,
  steps,
  log_every,
  dtype=jnp.float32,
  answer=None,
  **how,
):
  """Return the `Steps` of a pair.

  Args:
    teacher: a `Target`, whose head has the draft's tokens alone where batches
      have a `normaliser`; forward: the draft's `Forward`.
    join: (shared, params) -> the draft's whole parameters.
    optimiser, rate: see `optimiser` and `learning_rate`.
    schedule: of `objective.phase`; steps: of the whole run.
    log_every: steps between two lines of the log.
    dtype: what the draft computes in; its parameters stay as they are.
    answer: no row supervises more positions than that, see `chunks.answers`;
      None: they are not known to be fewer than all.
    **how: more keywords of `objective.total`.
  """
  cast = lambda params: jax.tree.map(lambda x: x.astype(dtype), params)

  def accumulate(state, batch, teacher_params, shared):
    hidden, taps = _teacher(teacher, teacher_params, batch, forward, dtype)
    some = functools.partial(chunks.answers, jnp.asarray(batch.mask), answer)

    def loss(params):
      masters = join(shared, params)
      found = objective.total(
        schedule,
        state.step / steps,
        some(hidden),
        some(forward.hidden(cast(masters), batch, hidden, taps)),
        some(jnp.asarray(batch.mask, jnp.float32)),
        some(jnp.asarray(batch.labels)),
        known=jax.tree.map(some, batch.normaliser),
        teacher_unembed=functools.partial(teacher.unembed, teacher_params),
        student_unembed=functools.partial(_head, forward, dtype, masters),
        temperature=jnp.asarray(batch.temperature),
        **how,
      )
      return found.loss, found

    gradient, found = jax.grad(loss, has_aux=True)(state.params)
    add = functools.partial(jax.tree.map, jnp.add)
    return state._replace(
      micro=state.micro + 1,
      gradient=add(state.gradient, gradient),
      sums=add(state.sums, found),
    )

  def update(state):
    return _update(state, optimiser, rate, log_every)

  return Steps(
    jax.jit(accumulate, donate_argnums=0), jax.jit(update, donate_argnums=0)
  )


def _teacher(teacher, params, batch, forward, dtype):
  """The last hidden states [B, T, D] and taps [B, T, F, D], constants."""
  if batch.states is not None:
    states = jnp.asarray(batch.states, dtype)
    return states[:, :, 0], states[:, :, 1:]
  found = read(teacher, params, batch.tokens, forward.features)
  return jax.lax.stop_gradient(found)


def read(target, params, tokens, features):
  """Return what a `Target` makes of tokens [B, T] from place 0, uncached.

  Returns:
    The last hidden states [B, T, D] and the taps [B, T, F, D].
  """
  at = _positions(tokens)
  return target.apply(params, tokens, at, None, features=features)[:2]


def _head(forward, dtype, masters, hidden):
  """Logits of a head that is cast here, so that its gradient is float32's sum.

  Only what the head reads is cast: whatever else is would get a gradient too,
  in each chunk of positions.
  """
  leaves, tree = jax.tree.flatten(masters)
  of = lambda leaves, x: forward.unembed(tree.unflatten(leaves), x)
  program = jax.make_jaxpr(of)(leaves, hidden).jaxpr
  read = {id(x) for equation in program.eqns for x in equation.invars}
  pairs = zip(leaves, program.invars, strict=False)
  cast = [x.astype(dtype) if id(v) in read else x for x, v in pairs]
  return of(cast, hidden)


def _update(state, optimiser, rate, log_every):
  """A step's end: divide, clip, move; a step without a token fails, 0 / 0."""
  mean = jax.tree.map(lambda g: g / state.sums.weight, state.gradient)
  norm, now = optax.tree.norm(mean), state.sums.loss / state.sums.weight
  right = jnp.isfinite(norm) & jnp.isfinite(now)
  failed = jnp.where((state.failed < 0) & ~right, state.step, state.failed)
  moves, moments = optimiser.update(mean, state.moments, state.params)
  fresh = state.step % log_every == 0
  recent = jax.tree.map(
    lambda old, new: jnp.where(fresh, 0, old) + new, state.recent, state.sums
  )
  report = Report(
    loss=recent.loss / recent.weight,
    alpha=recent.alpha / recent.weight,
    tokens=recent.weight,
    now=now,
    norm=norm,
    rate=rate(state.step),
    failed=failed,
  )
  return State(
    step=state.step + 1,
    micro=jnp.zeros_like(state.micro),
    params=optax.apply_updates(state.params, moves),
    moments=moments,
    gradient=jax.tree.map(jnp.zeros_like, state.gradient),
    sums=jax.tree.map(jnp.zeros_like, state.sums),
    recent=recent,
    failed=failed,
  ), report


def _positions(tokens):
  return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
