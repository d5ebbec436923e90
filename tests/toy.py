"""A tiny language model whose every conditional is a row of a table.

Unlike a bigram it cannot do without its cache: the law after (a, b) is
softmax(table[a, b]) and a is read back from the slot before b's, so a wrong
write, mask or length shows in the tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Drafter, Proposal, Target


def trigram(vocab_size, *, context=4096):
  """Return the `Target`; its parameters are a table [V, V, V] of logits.

  The token before the first one counts as 0. Its only layer, whatever its
  number, has the logits as its output.
  """

  def apply(table, tokens, positions, cache, *, features=()):
    B, T = tokens.shape
    rows = jnp.arange(B)[:, None]
    if cache is None:
      cache, keep = jnp.full((B, T), -1), None
    else:
      keep = True
    cache = cache.at[rows, positions].set(
      tokens, mode="drop", wrap_negative_indices=False
    )
    before = cache[rows, jnp.maximum(positions - 1, 0)]
    before = jnp.where(positions > 0, before, 0)
    hidden = table[before, tokens]  # [B, T, V]
    taps = jnp.repeat(hidden[:, :, None], len(features), 2)
    return hidden, taps, cache if keep else None

  def unembed(table, hidden):
    del table
    return hidden

  def init_cache(batch, slots):
    return jnp.full((batch, slots), -1, jnp.int32)

  return Target(apply, unembed, init_cache, vocab_size, context)


def table(vocab_size, *, seed=0, scale=2.0):
  """A random [V, V, V] table of logits."""
  rng = np.random.default_rng(seed)
  shape = (vocab_size,) * 3
  return jnp.asarray(rng.normal(0, scale, shape), jnp.float32)


def bigram_drafter(vocab_size):
  """q(. | last token), its parameters a table [V, V] of laws; no state."""

  def propose(q, state, context, noise):
    K = context.num_draft
    rows = jnp.arange(len(context.tokens))
    last = context.tokens[rows, context.length - 1]
    tokens = jnp.zeros((len(rows), K), jnp.int32)
    probs = jnp.zeros((len(rows), K, vocab_size), q.dtype)
    for i in range(K):
      law = q[last]
      last = noise.draft(i, law)
      tokens, probs = tokens.at[:, i].set(last), probs.at[:, i].set(law)
    return Proposal(tokens, probs, jnp.full(len(rows), K)), state

  return _stateless(propose)


def fixed_drafter():
  """Proposes its parameters, a `Proposal`, whatever the text is."""
  return _stateless(lambda proposal, state, context, noise: (proposal, state))


def random_drafter(vocab_size):
  """Random laws and a random length at every place; its parameter is a key.

  They are functions of the row's length alone, so that a row proposes the same
  in any company. About half of each law is zero.
  """

  def law(key):
    x = jax.random.uniform(key, (vocab_size,), jnp.float32)
    x = jnp.maximum(2 * x - 1, 0).at[0].add(1e-3) ** 3
    return x / x.sum()

  def propose(key, state, context, noise):
    K = context.num_draft
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, context.length)
    place = jax.vmap(jax.random.fold_in, (0, None))
    probs = [jax.vmap(law)(place(keys, i)) for i in range(K)]
    tokens = [noise.draft(i, q) for i, q in enumerate(probs)]
    random_length = lambda key: jax.random.randint(key, (), 0, K + 1, jnp.int32)
    length = jax.vmap(random_length)(place(keys, K))
    B = len(context.tokens)
    if not K:
      tokens, probs = [jnp.zeros(B)], [jnp.zeros((B, vocab_size))]
    return Proposal(
      jnp.stack(tokens, 1)[:, :K].astype(jnp.int32),
      jnp.stack(probs, 1)[:, :K],
      length,
    ), state

  return _stateless(propose)


def _stateless(propose):
  return Drafter(
    features=(),
    init=lambda params, prompt, length, taps, slots: (),
    propose=propose,
    commit=lambda params, state, outcome: state,
  )
