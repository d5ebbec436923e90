"""One pass over a text says what decoding it step by step would have said."""

import dataclasses
import functools

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_test import IDS, LLAMA, PROMPTS, V, _model, _resized

from specjax import forced, generate, loop, request, types
from specjax.drafters import lm, ngram
from specjax.models import load, transformer

SLOTS, NEW = 128, [40, 5, 61]
OWN = dict(temperature=0.7)


def _plain(ask, target=None):
  """The `Text` of plain decoding, and the laws' log of its tokens [B, N]."""
  model, params = target or _model("gqa_untied")
  most = int(ask.max_new.max())
  out = generate.autoregressive(
    model, params, ask, max_new_tokens=most, slots=SLOTS, logprobs=True
  )
  return forced.text(ask, out, SLOTS), out.logprobs.law


def _ask(**options):
  options = dict(max_new=NEW, temperature=[0.8, 0.0, 1.3], seed=5) | options
  return request.make(PROMPTS, **options)


def _sampling(**values):
  return request.make(PROMPTS, max_new=1, **values).sampling


def _of_model(draft, text, samplings, *, rows=slice(None), **options):
  text = jax.tree.map(lambda x: x[rows], text)
  samplings = [jax.tree.map(lambda x: x[rows], ask) for ask in samplings]
  return forced.of_model(
    *_model("gqa_untied"), *draft, text, samplings, **options
  )


def _real(text):
  most = int((text.length - text.prompt_length).max())
  return np.arange(most) < (text.length - text.prompt_length)[:, None]


def _check_pass_is_replay(draft, text, ask, ids=None, K=3):
  """The pass against a drafter that is asked at every place."""
  _, ((log_q, _),) = _of_model(draft, text, [ask], ids=ids)
  real, own = _real(text), None
  if ids:
    own = np.zeros(V, int)
    own[list(ids)] = np.arange(len(ids))
  drafter = lm.make(draft[0], V, ids=ids)
  want = forced.of_drafter(drafter, draft[1], text, ask, num_draft=K, own=own)
  got = forced.windows(np.where(real, log_q, -np.inf), K)
  assert got.shape == want.shape == (*real.shape, K)
  # behind a token that the draft cannot draw nothing is ever accepted
  dead = lambda x: np.logical_or.accumulate(np.isneginf(x), -1)
  got, want = (np.where(dead(x), -np.inf, x) for x in (got, want))
  np.testing.assert_allclose(got[real], want[real], atol=2e-4)
  return got[real]


@pytest.mark.parametrize("own", [OWN, dict(temperature=1.0, top_p=0.6)])
def test_the_pass_is_the_replay(own):
  """T = 0 and others in one batch, prompts and answers of many lengths."""
  text, _ = _plain(_ask())
  found = _check_pass_is_replay(_model("head_dim"), text, _sampling(**own))
  assert np.isfinite(found).any()
  if "top_p" in own:  # what is cut off is -inf in both
    assert np.isneginf(found[:, 0]).any()


OPTIONS = dict(
  plain=dict(),
  truncated=dict(top_p=[0.5, 1.0, 0.9], top_k=[0, 0, 7], min_p=0.01),
  penalties=dict(repetition_penalty=[1.0, 2.0, 1.4], presence_penalty=0.8),
  counts=dict(frequency_penalty=[1.5, 0.0, 0.4]),
  bias=dict(bias=np.linspace(-3, 3, V), min_new_tokens=4, stop_ids=(7, 8)),
)


@pytest.mark.parametrize("name", OPTIONS)
def test_p_is_the_law_of_plain_decoding(name):
  ask = _ask(**OPTIONS[name])
  text, law = _plain(ask)
  log_p, _ = _of_model((None, None), text, [])
  real = _real(text)
  assert real.sum() > 20
  np.testing.assert_allclose(
    log_p[real], law[:, : real.shape[1]][real], atol=2e-4
  )


def test_penalties_do_not_touch_the_draft():
  """As in the loop: the draft sees temperature and truncation alone."""
  text, _ = _plain(_ask(**OPTIONS["penalties"]))
  some = _sampling(**OWN)
  more = _sampling(**OWN, presence_penalty=2.0, bias=np.linspace(-3, 3, V))
  (a, _), (b, _) = _of_model(_model("head_dim"), text, [some, more])[1]
  np.testing.assert_array_equal(a, b)


def test_trimmed_head():
  """A token that the head lacks has q = 0."""
  model, params = _model("head_dim")
  config = load.source(str(LLAMA / "head_dim")).config
  config = dataclasses.replace(config, tied=False, head_size=len(IDS))
  head = params["head"] if "head" in params else params["embed"].T
  draft = transformer.make(config), params | dict(head=head[:, np.array(IDS)])
  text, _ = _plain(_ask())
  _check_pass_is_replay(draft, text, _sampling(**OWN), ids=IDS)
  _, ((log_q, alpha),) = _of_model(draft, text, [_sampling(**OWN)], ids=IDS)
  real = _real(text)
  q = _laws("head_dim", text.tokens, [OWN["temperature"]] * 3)[..., list(IDS)]
  q /= q.sum(-1, keepdims=True)
  p = _laws("gqa_untied", text.tokens, [0.8, 0, 1.3])[..., list(IDS)]
  for row, n in enumerate(text.prompt_length):
    want = np.minimum(p, q)[row, n - 1 : text.length[row] - 1].sum(-1)
    np.testing.assert_allclose(alpha[row, : len(want)], want, atol=1e-4)
  answers = np.stack(
    [
      text.tokens[row, n : n + real.shape[1]]
      for row, n in enumerate(text.prompt_length)
    ]
  )
  known = np.isin(answers, IDS)[real]
  assert 0 < known.sum() < len(known)
  np.testing.assert_array_equal(np.isfinite(log_q[real]), known)


@pytest.mark.parametrize("vocab_size", [83, 104])
def test_padded_vocabularies(vocab_size):
  """Ids that only one of the two models has."""
  text, _ = _plain(_ask())
  found = _check_pass_is_replay(_resized(vocab_size), text, _sampling(**OWN))
  if vocab_size < V:
    assert np.isneginf(found[:, 0]).any()


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens):
  at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden, _, _ = model.apply(params, tokens, at, None)
  return model.unembed(params, hidden)


def _laws(name, tokens, temperature):
  """Softmax behind each token, in float64; one-hot at T = 0."""
  logits = np.asarray(_logits(*_model(name), tokens), np.float64)
  T = np.asarray(temperature, float)[:, None, None]
  law = np.exp((logits - logits.max(-1, keepdims=True)) / np.where(T, T, 1))
  law /= law.sum(-1, keepdims=True)
  return np.where(T, law, np.eye(V)[logits.argmax(-1)])


def test_alpha_and_q_by_definition():
  """sum min(p, q) behind every prefix, of several draft temperatures."""
  ask = _ask()
  text, _ = _plain(ask)
  temperatures = [0.0, 0.7, 1.0, 2.0]
  samplings = [_sampling(temperature=T) for T in temperatures]
  log_p, found = _of_model(_model("head_dim"), text, samplings)
  p = _laws("gqa_untied", text.tokens, ask.sampling.temperature)
  for T, (log_q, alpha) in zip(temperatures, found, strict=True):
    q = _laws("head_dim", text.tokens, [T] * 3)
    for row, (first, end) in enumerate(
      zip(text.prompt_length, text.length, strict=True)
    ):
      at = np.arange(first, end)
      x = text.tokens[row, at]
      want = np.minimum(p, q)[row, at - 1].sum(-1)
      np.testing.assert_allclose(alpha[row, : len(at)], want, atol=1e-4)
      want = q[row, at - 1, x]
      np.testing.assert_allclose(np.exp(log_q[row, : len(at)]), want, atol=1e-4)
      want = p[row, at - 1, x]
      np.testing.assert_allclose(np.exp(log_p[row, : len(at)]), want, atol=1e-4)


def test_a_sweep_is_each_of_its_members_alone():
  text, _ = _plain(_ask())
  some = [dict(temperature=0.5), dict(temperature=1.0, top_p=0.5)]
  some = [_sampling(**x) for x in [*some, dict(temperature=1.0, top_k=3)]]
  log_p, together = _of_model(_model("head_dim"), text, some)
  for ask, (log_q, alpha) in zip(some, together, strict=True):
    alone, ((q, a),) = _of_model(_model("head_dim"), text, [ask])
    real = _real(text)
    for x, y in ((log_p, alone), (log_q, q), (alpha, a)):
      np.testing.assert_allclose(x[real], y[real], atol=1e-5)
  assert not np.allclose(together[1][1][real], together[2][1][real])


def test_rows_do_not_see_their_neighbours():
  text, _ = _plain(_ask(**OPTIONS["penalties"]))
  some = [_sampling(**OWN)]
  log_p, ((log_q, alpha),) = _of_model(_model("head_dim"), text, some)
  for row, n in enumerate(text.length - text.prompt_length):
    one, ((q, a),) = _of_model(
      _model("head_dim"), text, some, rows=slice(row, row + 1)
    )
    for x, y in ((log_p, one), (log_q, q), (alpha, a)):
      np.testing.assert_allclose(x[row, :n], y[0, :n], atol=2e-4)


def test_a_draft_whose_logits_are_broken():
  """It is never accepted, as in the loop."""
  model, params = _model("head_dim")
  broken = params | {name: params[name] * np.nan for name in ("embed",)}
  text, _ = _plain(_ask())
  _, ((log_q, alpha),) = _of_model((model, broken), text, [_sampling(**OWN)])
  real = _real(text)
  assert np.isneginf(log_q[real]).all() and (alpha[real] == 0).all()


def test_a_look_up_is_asked_at_every_place():
  """By hand: q is 1 where the copy is right, and 0 elsewhere and behind."""
  tokens = np.zeros((1, 64), np.int32)
  tokens[0, :9] = [5, 6, 7, 8, 5, 6, 7, 9, 9]
  text = forced.Text(tokens, np.array([5]), np.array([9]), None)
  own = request.make([[5]], max_new=1).sampling
  log_q = forced.of_drafter(ngram.make(V), (), text, own, num_draft=3)
  # behind 5: 6 7 8 against 6 7 9; behind 5 6: 7 8 5; behind 7: 8 5 6; behind
  # 9 nothing is found, and what fills the place, a 9, does not count
  want = [[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
  np.testing.assert_array_equal(np.exp(log_q[0]), want)


def _head(**options):
  target, params = _model("gqa_untied")
  config = load.source(str(LLAMA / "gqa_untied")).config
  model = load.Model(target, params, None, config, config)
  head = heads.random(model, **options)
  return head, *heads.drafter(head, V)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _told_round(target, drafter, params, draft_params, state, draws, told):
  """A round that is told draws [B, K], uniforms and the next token."""
  accept, following = told
  noise = types.Noise(
    draft=lambda i, q: draws[:, i], accept=accept, next=lambda n, p: following
  )
  return generate.round(
    *(target, drafter, params, draft_params, state, noise),
    num_draft=draws.shape[1],
    verifier="token",
  )


def _with_its_laws(drafter, K):
  """The drafter, its state beside the laws [B, K, V] that it drew from."""
  nothing = lambda B: jnp.zeros((B, K, V))

  def init(params, prompt, *rest):
    return drafter.init(params, prompt, *rest), nothing(len(prompt))

  def propose(params, state, *rest):
    proposal, state = drafter.propose(params, state[0], *rest)
    return proposal, (state, proposal.probs)

  def commit(params, state, outcome):
    return drafter.commit(params, state[0], outcome), state[1]

  return drafter._replace(init=init, propose=propose, commit=commit)


@pytest.mark.parametrize(
  "options",
  [
    dict(features=(1,)),
    dict(features=(0, 1, 1), layers=2, ids=IDS),
  ],
)
def test_a_feature_head_sees_what_it_sees_in_rounds(options):
  """Rounds of the loop that are told to follow the text, to any length.

  q of the text's tokens is what the replay says, wherever a round starts and
  however it came there.
  """
  K, own = 3, _sampling(**OWN)
  head, drafter, params = _head(**options)
  ask = _ask(temperature=[0.8, 1.0, 1.3])
  text, _ = _plain(ask)
  target, target_params = _model("gqa_untied")
  index = np.zeros(V, int)
  index[list(head.ids or range(V))] = np.arange(len(head.ids or range(V)))
  known = np.isin(text.tokens, head.ids or range(V))
  taps = forced.features(target, target_params, text, drafter.features)
  log_q = forced.of_drafter(
    *(drafter, params, text, own), num_draft=K, own=index, taps=taps
  )
  spied, rows = _with_its_laws(drafter, K), np.arange(3)
  draft = types.Draft(spied, params, K, sampling=own)
  state = loop.start(
    *(target, target_params, ask), max_new_tokens=61, slots=SLOTS, draft=draft
  )
  rng, seen = np.random.default_rng(0), 0
  while (np.asarray(state.finish) == types.RUNNING).any():
    running = np.asarray(state.finish) == types.RUNNING
    length = np.asarray(state.length)
    at = np.minimum(length[:, None] + np.arange(K + 1), SLOTS - 1)
    ahead = text.tokens[rows[:, None], at]
    reach = np.cumprod(known[rows[:, None], at[:, :K]], 1).sum(1)
    n = np.minimum(rng.integers(0, K + 1, 3), reach)
    u = np.where(np.arange(K) < n[:, None], 0, np.inf).astype(np.float32)
    state = _told_round(
      *(target, spied, target_params, params, state),
      index[ahead[:, :K]],
      (u, ahead[rows, n]),
    )
    q = np.asarray(state.draft[1])
    for row in np.flatnonzero(running):
      left = min(K, reach[row] + 1, text.length[row] - length[row])
      i = np.arange(left)
      want = q[row, i, ahead[row, :left]]
      start = length[row] - text.prompt_length[row]
      got = np.exp(log_q[row, start, :left])
      np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-4)
      seen += left
  for row, n in enumerate(text.length):
    np.testing.assert_array_equal(state.tokens[row, :n], text.tokens[row, :n])
  assert seen > 100 and np.exp(log_q).max() > 0.05


def test_no_features_no_pass():
  text, _ = _plain(_ask())
  assert forced.features(None, None, text, ()) is None


def test_types_of_text():
  """What pads a row is no part of it."""
  ask = _ask(max_new=[3, 0, 2])
  text, law = _plain(ask)
  assert text.length.tolist() == [4, 2, 32]
  assert not text.tokens[0, 4:].any() and law.shape == (3, 3)
  assert isinstance(text.sampling, types.Sampling)
