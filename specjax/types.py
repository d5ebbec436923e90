"""The seams: what a model, a request and an answer are.

Everything that decodes is written against these values and knows nothing of
weights, files or the network that computes the logits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Target(NamedTuple):
  """A language model as pure, batched functions of its parameters.

  Make it once: it is a static argument of the jitted programs and is hashed by
  the identity of its functions, so a second copy compiles a second time.
  """

  # (params, tokens [B, T], positions [B, T], cache, *, features=())
  #   -> (hidden [B, T, D], taps [B, T, F, D], cache)
  # taps are the outputs of the layers in `features`. With cache=None it is one
  # full causal pass. With a cache the token at position s is stored in slot s,
  # slots <= a query's position are visible to it, and a position outside
  # [0, S) is not stored.
  apply: Callable
  unembed: Callable  # (params, hidden [..., D]) -> logits [..., V]
  init_cache: Callable  # (batch, slots) -> cache
  vocab_size: int
  context: int  # most positions the model was made for
  # (tree of arrays [B, ...]) -> the same, laid over the devices of a mesh;
  # None: all is on one device. See `sharding.target`.
  place: Callable | None = None


class Sampling(NamedTuple):
  """How a row turns logits into its law; `sampling.probabilities` applies it.

  Each field is an array, so that changing a value never compiles anything.
  """

  temperature: jax.Array  # [] float32, 0 is greedy
  top_k: jax.Array  # [] int32, <= 0 is off
  top_p: jax.Array  # [] float32 in (0, 1], 1 is off
  min_p: jax.Array  # [] float32 in [0, 1], 0 is off
  # None where no row of a request uses it: a program of its own without it
  bias: jax.Array | None = None  # [V] float32 added to the logits, -inf bans
  penalties: "Penalties | None" = None
  minimum: "Minimum | None" = None


class Penalties(NamedTuple):
  """What tokens pay for having been there; see `sampling.probabilities`."""

  repetition: jax.Array  # [] float32 > 0, 1 is off
  presence: jax.Array  # [] float32, 0 is off
  frequency: jax.Array  # [] float32, 0 is off


class Minimum(NamedTuple):
  """No end before so many tokens."""

  tokens: jax.Array  # [] int32, 0 is off
  stop_ids: jax.Array  # [STOP_IDS] int32, banned until then


class History(NamedTuple):
  """What penalties and `Minimum` look at: the tokens before a position."""

  in_prompt: jax.Array  # [V] bool
  counts: jax.Array  # [V] int32, how often each was generated
  generated: jax.Array  # [] int32


class Logprobs(NamedTuple):
  """Of the emitted tokens."""

  raw: jax.Array  # [B, N] float32, log softmax of the logits
  law: jax.Array  # [B, N] float32, log of the law that was sampled


class Request(NamedTuple):
  """What to decode. Rows are independent of each other.

  `prompt` is padded on the right with anything; `length` says what is real.
  """

  prompt: jax.Array  # [B, T] int32
  length: jax.Array  # [B] int32, >= 1
  key: jax.Array  # [B] typed PRNG keys, one a row
  sampling: Sampling  # fields [B]
  stop_ids: jax.Array  # [STOP_IDS] int32, padded with -1
  max_new: jax.Array  # [B] int32, a row's own limit, may be 0


STOP_IDS = 8

# Output.finish_reason indexes this. "context" is the end of the model's
# context; "nonfinite" means that the target's logits held a NaN or +inf.
FINISH_REASONS = ("running", "stop", "length", "context", "nonfinite")
RUNNING, STOP, LENGTH, CONTEXT, NONFINITE = range(5)


class Stats(NamedTuple):
  """Counts of a whole call."""

  steps: jax.Array  # [] int32, target calls that the loop made


class Output(NamedTuple):
  """What was decoded. The stop token is part of the answer and is counted.

  Everything about acceptance is recomputed from `round`, `accepted` and
  `overlap` (see `metrics.py`), so that what was cut is not counted.
  """

  tokens: jax.Array  # [B, N] int32, -1 behind a row's length
  length: jax.Array  # [B] int32, tokens emitted
  finish_reason: jax.Array  # [B] int32, see FINISH_REASONS
  logprobs: Logprobs | None  # NaN behind the end; None: not asked for
  round: jax.Array  # [B, N] int32, which target call emitted it, -1 behind
  accepted: jax.Array  # [B, N] bool, the token is the draft's
  # [B, N] float32, sum min(p, q) of the laws that were compared for the token;
  # NaN where no draft was: the bonus token, plain decoding
  overlap: jax.Array
  stats: Stats


class Proposal(NamedTuple):
  """What a drafter proposes for one round."""

  tokens: jax.Array  # [B, K] int32
  probs: jax.Array  # [B, K, V] the very law each was drawn from
  length: jax.Array  # [B] int32 in 0..K, how many are real
  # [B, K] in [0, 1], how sure the draft was of each before it was drawn, 1 more
  # of a copy of earlier text, NaN where a row did not ask; None from a draft
  # that never stops early
  confidence: jax.Array | None = None


class Verdict(NamedTuple):
  """What a verifier makes of one row's draft."""

  num_accepted: jax.Array  # [] int32
  next_probs: jax.Array  # [V] the law of the token behind the accepted prefix


class Noise(NamedTuple):
  """All the randomness of a round: made from keys, or enumerated by a test."""

  draft: Callable  # (i, probs [B, Vq]) -> [B] tokens of the draft's vocabulary
  accept: jax.Array  # [B, K] uniforms on [0, 1)
  next: Callable  # (num_accepted [B], probs [B, V]) -> [B] tokens


class Context(NamedTuple):
  """What a drafter may know when it proposes."""

  tokens: jax.Array  # [B, S] int32, committed up to length
  length: jax.Array  # [B] int32
  sampling: Sampling  # fields [B], the draft's own
  num_draft: int  # K
  # (i, survival [B], confidence [B]) -> (whether to draft token i [B], the
  # survival that it brings); None: draft K
  more: Callable | None = None
  # (i, survival [B]) -> [B], is it worth the draft's work to know how sure it
  # is of token i; None: always
  ask: Callable | None = None


class Outcome(NamedTuple):
  """What became of a round."""

  tokens: jax.Array  # [B, K + 1] int32, the emitted ones first
  count: jax.Array  # [B] int32, how many were emitted
  length: jax.Array  # [B] int32, committed before the round
  taps: jax.Array  # [B, K + 1, F, D] of the fed tokens


class Drafter(NamedTuple):
  """A drafting method as pure, batched functions of its parameters.

  Make it once, as a `Target`: it is static in the jitted programs.
  """

  features: tuple  # target layers whose outputs it reads, () for none
  # (params, prompt [B, S], length [B], taps [B, S, F, D], slots) -> state: its
  # prefill; taps are of the tokens before each row's last one, None if F = 0
  init: Callable
  propose: Callable  # (params, state, context, noise) -> (Proposal, state)
  commit: Callable  # (params, state, outcome) -> state
  context: int | None = None  # most positions it was made for, None: any


VERIFIERS = ("block", "token", "coupled")  # functions of `verify.py`


class Draft(NamedTuple):
  """How to speculate: who drafts, how many tokens, and who judges them."""

  drafter: Drafter
  params: Any  # the drafter's
  num_draft: int  # K >= 0
  verifier: str = "block"  # one of VERIFIERS
  sampling: Sampling | None = None  # of the draft, fields [B]; None: the rows'
  policy: Any = None  # `adaptive.Policy` to draft fewer than K by; None: K
