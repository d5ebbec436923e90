"""Speculation on the real target: the same tokens, and what a block gains.

SmolLM2-135M-Instruct on configs/prompts.jsonl. Untrained slices of it that skip
much, such as layers 0, 1 and 29, agree with it on next to nothing, so what
needs a draft that is right at times skips three layers of thirty: alpha 0.56.
"""

import functools
from typing import NamedTuple

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import smollm2 as config
from specjax import forced, generate, metrics, prompts, request
from specjax.drafters import lm, ngram
from specjax.models import load, transformer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FILE = "configs/prompts.jsonl"
SKIPPED = (3, 4, 5)
DRAFTS = ("ngram", "layers 0, 1, 29", "all layers but 3, 4, 5")


def _prompts(model, limit):
  """Token ids of the first turns."""
  c = config.get_config()
  c.prompts.path, c.prompts.limit = FILE, limit
  talks = [
    [*p.history, {"role": "user", "content": p.turns[0]}]
    for p in prompts.read(c)
  ]
  encode = functools.partial(prompts.encode, model.tokenizer, as_chat=True)
  return [encode(talk) for talk in talks]


def _part(model):
  """A draft of most layers."""
  kept = tuple(i for i in range(model.config.layers) if i not in SKIPPED)
  return load.part(model, layers=kept)


def _draft(model, name):
  """(drafter, its parameters)."""
  V = model.target.vocab_size
  if name == "ngram":
    return ngram.make(V), ()
  part = _part(model)
  if "29" in name:
    part = load.part(model, layers=(0, 1, 29))
  return lm.make(part.target, V), part.params


def _speculate(model, name, ask, **options):
  drafter, params = _draft(model, name)
  return generate.speculative(
    model.target, drafter, model.params, params, ask, num_draft=4, **options
  )


@pytest.fixture(scope="module")
def plain(smollm2):
  """{sampling: (request, plain answers)} of eight prompts."""
  found = {}
  for T, top_k, top_p in ((0.3, 20, 1.0), (1.0, 0, 1.0), (1.7, 0, 0.8)):
    ask = request.make(
      _prompts(smollm2, 8),
      max_new=48,
      stop_ids=smollm2.tokenizer.stop_ids,
      temperature=T,
      top_k=top_k,
      top_p=top_p,
      seed=11,
    )
    found[T, top_k, top_p] = (
      ask,
      generate.autoregressive(
        smollm2.target, smollm2.params, ask, max_new_tokens=48
      ),
    )
  return found


@pytest.mark.parametrize("name", DRAFTS)
def test_coupled_tokens_are_those_of_plain_decoding(smollm2, plain, name):
  """Of eight prompts in one batch, K = 4."""
  accepted = 0
  for T, (ask, want) in plain.items():
    got = _speculate(smollm2, name, ask, max_new_tokens=48, verifier="coupled")
    parted = np.argwhere(got.tokens != want.tokens)
    assert not len(parted), f"T = {T}, first (row, token): {parted[0]}"
    np.testing.assert_array_equal(got.finish_reason, want.finish_reason)
    found, tested = metrics.acceptance(got, 4), ~np.isnan(got.overlap)
    alpha, rate = got.overlap[tested].astype(float), got.accepted[tested].mean()
    low = (alpha / (2 - alpha)).mean()  # of a draw of one level
    print(
      f"{name}, T = {T}: {found.tokens} tokens equal, {len(alpha)} tested,"
      f" match rate {rate:.3f} in [{low:.3f}, {alpha.mean():.3f}],"
      f" {found.tokens_per_call:.3f} a call"
    )
    assert rate <= alpha.mean() + 4 * 0.5 / np.sqrt(len(alpha))
    accepted += got.accepted.sum()
  assert accepted or name == DRAFTS[1]


def _fitted(model, features, asked, answered):
  """A feature head that has learnt some answers by heart.

  Its layer is the target's last, and `join` the least squares fit of that
  layer's input along the texts: fewer tokens than it has rows.
  """
  head = heads.made(model, features=features, ids=tuple(range(8192)), noise=0.0)
  text = forced.text(asked, answered, 512)
  fed = model.target, model.params, text
  taps = forced.features(*fed, features)
  want = forced.features(*fed, (model.config.layers - 2,))[:, :, 0]
  before = jnp.pad(taps.mean(2), ((0, 0), (1, 0), (0, 0)))[:, :-1]
  token = model.params["embed"][text.tokens]
  one, eps = jnp.ones(token.shape[-1]), model.config.norm_eps
  norm = lambda x: transformer.norm(one, x, eps)
  seen = jnp.concatenate([norm(token), norm(before)], -1)
  real = np.arange(512) < text.length[:, None] - 1
  x, y = (np.asarray(x)[real] for x in (seen, want))
  assert len(x) < x.shape[1]
  join = np.linalg.lstsq(x, y, rcond=1e-6)[0]
  return head._replace(
    params=head.params | {"join": {"kernel": jnp.asarray(join)}}
  )


@pytest.mark.parametrize("features", [(29,), (2, 15, 29)])
def test_a_feature_head_leaves_the_tokens_as_they_are(smollm2, features):
  """T = 0 by block verification, and coupled: eight prompts at once, K = 4."""
  for T, verifier in ((0.0, "block"), (0.7, "coupled")):
    ask = request.make(
      _prompts(smollm2, 8),
      max_new=32,
      stop_ids=smollm2.tokenizer.stop_ids,
      temperature=T,
      seed=11,
    )
    want = generate.autoregressive(
      smollm2.target, smollm2.params, ask, max_new_tokens=32
    )
    head = _fitted(smollm2, features, ask, want)
    drafter, params = heads.drafter(head, smollm2.target.vocab_size)
    got = generate.speculative(
      *(smollm2.target, drafter, smollm2.params, params, ask),
      num_draft=4,
      max_new_tokens=32,
      verifier=verifier,
    )
    parted = np.argwhere(got.tokens != want.tokens)
    assert not len(parted), f"T = {T}, first (row, token): {parted[0]}"
    np.testing.assert_array_equal(got.finish_reason, want.finish_reason)
    found = metrics.acceptance(got, 4)
    print(
      f"layers {features}, T = {T}: {found.tokens} tokens equal, alpha"
      f" {found.alpha:.3f}, {found.tokens_per_call:.3f} a call"
    )
    assert found.tokens_per_call > 1.5


# Block against token verification

ROWS, N, K = 24, 64, 4


class Pair(NamedTuple):
  """Three runs of the same prompts at T = 1."""

  plain: object
  token: object
  block: object
  rho: list  # of each plain answer [n], q / p of its tokens


@pytest.fixture(scope="module")
def pair(smollm2):
  ask = request.make(
    _prompts(smollm2, ROWS),
    max_new=N,
    stop_ids=smollm2.tokenizer.stop_ids,
    temperature=1.0,
    seed=5,
  )
  plain = generate.autoregressive(
    smollm2.target, smollm2.params, ask, max_new_tokens=N
  )
  run = functools.partial(_speculate, smollm2, DRAFTS[2], ask, max_new_tokens=N)
  part = _part(smollm2)
  rho = []
  for row, n in enumerate(plain.length):
    length = ask.length[row]
    text = np.zeros(320, np.int32)
    text[:length] = ask.prompt[row, :length]
    text[length : length + n] = plain.tokens[row, :n]
    p, q = (_chances(m.target, m.params, text, length) for m in (smollm2, part))
    rho.append(np.asarray(q[:n], float) / np.asarray(p[:n], float))
  return Pair(plain, run(verifier="token"), run(verifier="block"), rho)


@functools.partial(jax.jit, static_argnums=0)
def _chances(target, params, text, length):
  """What a model gives the N tokens behind the first `length`, at T = 1."""
  places = jnp.arange(len(text))[None]
  hidden, _, _ = target.apply(params, text[None], places, None)
  at = length + jnp.arange(N)
  logits = target.unembed(params, hidden[0, at - 1])
  return jax.nn.softmax(logits)[jnp.arange(N), text[at]]


def _survival(rho):
  """A [n, K + 1] by round start of token and block verification.

  algorithms.md 2.5, on text x ~ p: A_j = prod min(1, rho_i) over the next j
  tokens, and min over i <= j of prod rho. Behind the text rho is 1.
  """
  rho = np.append(rho, np.ones(K))
  ahead = np.lib.stride_tricks.sliding_window_view(rho, K)[:-1]  # [n, K]
  token = np.cumprod(np.minimum(1, ahead), 1)
  block = np.minimum.accumulate(np.minimum(1, np.cumprod(ahead, 1)), 1)
  one = np.ones((len(ahead), 1))
  return np.hstack([one, token]), np.hstack([one, block])


def _rounds(survival):
  """Expected rounds along a text: the renewal recursion of 2.5."""
  n = len(survival)
  starts = np.zeros(n + K + 1)
  starts[0] = 1
  law = np.hstack([-np.diff(survival, axis=1), survival[:, -1:]])  # N - 1 = j
  for s in range(n):
    starts[s + 1 : s + K + 2] += starts[s] * law[s]
  return starts[:n].sum()


def test_a_block_survives_wherever_single_tokens_do(pair):
  """At every start and depth, without a tolerance: rounding is monotone too."""
  token, block = zip(*map(_survival, pair.rho), strict=True)
  token, block = np.concatenate(token), np.concatenate(block)
  assert len(token) == pair.plain.length.sum()
  assert (block >= token).all()
  print(
    "mean survival, token",
    token.mean(0).round(4),
    "block",
    block.mean(0).round(4),
  )
  more = (block > token).mean(0)
  assert not more[:2].any() and more[2:].all()


def _per_call(tokens, rounds):
  """Tokens a call [10000]: the prompts drawn anew, the same ones each time."""
  rows = np.random.default_rng(0).integers(0, ROWS, (10_000, ROWS))
  return tokens[rows].sum(1) / rounds[rows].sum(1)


def _measured(out):
  return _per_call(out.length, out.round.max(1) + 1)


def test_block_is_not_worse_than_token(pair):
  """Tokens a call, by more than the bootstrap interval of their difference."""
  token, block = _measured(pair.token), _measured(pair.block)
  low, high = np.quantile(block - token, [0.025, 0.975])
  calls = {
    name: metrics.acceptance(out, K)
    for name, out in (("token", pair.token), ("block", pair.block))
  }
  for name, found in calls.items():
    print(
      f"{name}: alpha {found.alpha:.3f}, {found.tokens_per_call:.3f} a call"
    )
  print(f"block - token: 95 % in [{low:.3f}, {high:.3f}]")
  assert 0.4 < calls["token"].alpha < 0.8
  assert high >= 0


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_tokens_a_call_are_those_that_the_text_foretells(pair, verifier):
  """From plain text and both laws along it; within four standard errors."""
  at = ["token", "block"].index(verifier)
  rounds = np.array([_rounds(_survival(rho)[at]) for rho in pair.rho])
  told = _per_call(pair.plain.length, rounds)
  got = _measured(getattr(pair, verifier))
  error = (told - got).std()
  means = f"foretold {told.mean():.3f}, measured {got.mean():.3f}"
  print(f"{verifier}: {means}, error {error:.3f}")
  assert abs(told.mean() - got.mean()) < 4 * error
