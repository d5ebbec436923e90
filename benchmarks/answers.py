r"""How fast training data is sampled, and where the time goes.

  python -m benchmarks.answers --config=configs/smollm2_train.py \
      --config.data.path=prompts.jsonl --groups=3

The first groups of `data.batch` prompts, as a run would answer them. A batch is
decoded until its last row ends, so that rows stand idle; `running` is the share
that did not. Run it on an idle machine.
"""

import time

import jax
from absl import flags

from specjax import (
  cli,
  data,
  generate,
  prompts,
  recipe,
  runtime,
  speak,
  terminal,
)
from specjax.models import load

_CONFIG = cli.define_config()
_GROUPS = flags.DEFINE_integer("groups", 3, "Batches to time.")


def _timed(model, rows, plan, steps):
  """{"prompt", "answer": tokens; "steps"; "prefill", "decode": seconds}."""
  ask, sizes = speak.request_of(
    model.target, rows, plan, model.tokenizer.stop_ids, plan.batch
  )
  began = time.perf_counter()
  state = generate.start(model.target, model.params, ask, **sizes)
  state = jax.block_until_ready(state)
  between = time.perf_counter()
  state = generate.advance(model.target, model.params, state, steps=steps)
  out = generate.output(state, plan.max_new)
  return {
    "prompt": sum(len(row.ids) for row in rows),
    "answer": int(out.length.sum()),
    "steps": int(out.stats.steps),
    "prefill": between - began,
    "decode": time.perf_counter() - between,
  }


def main(argv):
  del argv
  config, out = _CONFIG.value, terminal.console()
  recipe.check(config)
  dtype, plan = runtime.setup(config.dtype), recipe.plan(config)
  model = load.whole(load.model(terminal.open_target(out, config), dtype=dtype))
  count = plan.batch * _GROUPS.value
  todo = prompts.from_file(config.data.path, 2 * count)
  asks, _ = data.encode(model.tokenizer, todo, plan.max_prompt, as_chat=True)
  groups = speak.groups(speak.rows(asks[:count], plan), plan.batch, plan.seed)
  for rows in groups:
    _timed(model, rows, plan, steps=1)  # compiles
  found = [_timed(model, rows, plan, plan.max_new) for rows in groups]
  total = {key: sum(x[key] for x in found) for key in found[0]}
  decoded = plan.batch * total["steps"]
  spent = total["prefill"] + total["decode"]
  print(f"{total['answer'] / spent:,.0f} tokens/s, prefill and idle rows in it")
  print(f"prefill: {total['prompt'] / total['prefill']:,.0f} tokens/s")
  print(
    f"decoding: {1e3 * total['decode'] / total['steps']:.0f} ms a step of"
    f" {plan.batch} rows, {decoded / total['decode']:,.0f} rows/s, of them"
    f" {total['answer'] / decoded:.0%} running"
  )
  print(f"{runtime.device()['name']}, {dtype}, {_GROUPS.value} batches")


if __name__ == "__main__":
  cli.run(main)
