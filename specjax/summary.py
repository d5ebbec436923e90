"""What a training run says of itself: a line while it runs, a table at its end.

Everything is read from the rows of metrics.jsonl.
"""

from specjax import memory, runtime, trajectories

KEY = "mix/S_block"  # of rows that hold an evaluation
TOKENS = "mix/E_N_block"  # a round, predicted


def line(rows):
  """Return 'loss 0.31, alpha 0.62, predicted 1.41 x' of the newest numbers."""
  found = {}
  for row in rows:
    found |= row
  parts = []
  if "loss" in found:
    parts += [f"loss {found['loss']:.3f}", f"alpha {found['alpha']:.3f}"]
  if KEY in found:
    parts.append(f"predicted {found[KEY]:.2f} x")
  return ", ".join(parts)


def rows(config, folder, logged, best, fed, costs):
  """Return (name, text) pairs for `terminal.table`.

  Args:
    logged: rows of metrics.jsonl; best: the step that was exported.
    fed: a `feed.Feed`; costs: `timing.Costs`.
  """
  steps = [row for row in logged if "loss" in row]
  judged = {row["step"]: row for row in logged if KEY in row}
  first, chosen = judged[min(judged)], judged[best]
  K = config.draft.num_tokens
  size = f"{config.batch_size} x {config.length}"
  if config.accumulate > 1:
    size = f"{config.accumulate} x {size}"
  device = runtime.device()
  found = trajectories.stats(fed.train)
  rates = sorted(row["tokens_per_second"] for row in steps)
  return [
    ("draft", f"{folder / 'draft'}, of step {best}"),
    (
      "trained on",
      f"{found.sequences:,} sequences, {found.supervised:,} tokens to learn"
      f" from; {len(fed.held_out.length):,} sequences held out",
    ),
    ("steps", f"{config.steps:,} of {size} tokens"),
    (
      "loss",
      f"{steps[0]['loss']:.3f}, {config.loss[0][0]}, to"
      f" {steps[-1]['loss']:.3f}, {config.loss[-1][0]}",
    ),
    *_worth(first, chosen, K),
    (
      "costs",
      f"{'given' if costs.modelled else 'measured'}: C"
      f" {costs.cost_ratio:.1f}, a call on {K + 1} tokens"
      f" {costs.call(K + 1) / costs.call(1):.2f}",
    ),
    (
      "speed",
      f"{rates[len(rates) // 2]:,.0f} tokens/s to learn from, median",
    ),
    ("memory", f"{memory.human(memory.peak() or 0)} at peak"),
    ("device", runtime.told(device, config.mesh)),
    (
      "try it",
      f"python decode.py --config={config.decode_with}"
      f" --config.draft.name={config.draft.name}"
      f" --config.draft.weights={folder / 'draft'}",
    ),
  ]


def _worth(first, chosen, K):
  """What held-out texts say, of the first evaluation and of the chosen one."""
  change = lambda key, form: f"{first[key]:{form}} to {chosen[key]:{form}}"
  low, high = (chosen[f"{TOKENS}_{end}"] for end in ("low", "high"))
  k, token = int(chosen["mix/k_block"]), chosen["mix/E_N_token"]
  return [
    ("alpha", f"{change('mix/alpha', '.2f')}, held out"),
    ("agreement", f"{change('mix/agreement', '.2f')} of greedy tokens"),
    (
      "predicted",
      f"{change(TOKENS, '.2f')} ({low:.2f} to {high:.2f}) tokens a round of"
      f" K = {K}, block; {token:.2f}, token",
    ),
    ("speed-up", f"{change(KEY, '.2f')} x, predicted at K = {k}"),
  ]
