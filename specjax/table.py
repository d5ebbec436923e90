"""A report's numbers for people, as (name, text) pairs."""

import collections

from specjax import memory, overlap, runtime

_BAR = 8  # characters of the histogram's longest bar
_SHOWN = 16  # positions, and bars that may be empty
_TRUNCATION = ("top_k", "top_p", "min_p")
_OFF = dict(  # a value that changes nothing
  top_k=0,
  top_p=1,
  min_p=0,
  repetition_penalty=1,
  presence_penalty=0,
  frequency_penalty=0,
  min_new_tokens=0,
  bias="",
  banned="",
)


def rows(report):
  """Return the rows of a dict that `report.build` returned."""
  plain, speculative = report["autoregressive"], report["speculative"]
  runs = [run for run in (plain, speculative) if run]
  outputs = runs[-1]["outputs"]  # those whose text was shown
  reasons = collections.Counter(o["finish_reason"] for o in outputs)
  prompt_tokens = sum(o["prompt_tokens"] for o in outputs)
  answers = f"{len(outputs)}, to {prompt_tokens} prompt tokens"
  found = [
    ("answers", answers + ", then interrupted" * report["interrupted"]),
    ("ended by", ", ".join(f"{k} {n}" for k, n in reasons.items()) or "-"),
  ]
  if plain:
    found.append(("plain", _rate(plain, "call")))
  if speculative:
    found.append(("speculative", _rate(speculative, "round")))
  if plain and speculative:
    found += _comparison(report)
  if speculative:
    found += _acceptance(report)
  if report["predicted"]:
    found += _prediction(report)
  return found + _machine(report, runs)


def _rate(run, call):
  if not run["tokens"]:
    return "no token"
  ms = run["seconds"] / run["target_calls"] * 1e3
  return (
    f"{run['tokens_per_second']:.1f} tokens/s, {ms:.1f} ms a {call}"
    f" ({run['tokens']} tokens in {run['target_calls']} {call}s,"
    f" {run['seconds']:.2f} s)"
  )


def _comparison(report):
  """Speed-up and exactness, of the turns that both decoders ended."""
  found, speedup = report["compared"], report["speedup"]
  said = f"{speedup:.2f} x" if speedup else "not measured"
  if speedup and report["draft"]["name"] == "replay":
    said += " (replay knows the answer: an instrument, not a method)"
  rows = [("speed-up", said)]
  if speedup and speedup < 1:
    rows.append(("slower", _why_slower(report)))
  if found:
    rows.append(("exact", _exactness(report)))
  return rows


def _why_slower(report):
  """speed-up = tokens a round, over its time, in units of a plain call."""
  plain, speculative = (
    report["compared"][name] for name in ("autoregressive", "speculative")
  )
  ratio = lambda key: (
    (speculative[key] / speculative["target_calls"])
    / (plain[key] / plain["target_calls"])
  )
  K = report["draft"]["K"]
  change = [
    *_better_length(report["predicted"], K),
    "another draft",
    "--config.decoder=autoregressive",
  ]
  return (
    f"a round takes {ratio('seconds'):.2f} x a plain call's time and emits"
    f" {ratio('tokens'):.2f} x its tokens; try {', '.join(change[:-1])} or"
    f" {change[-1]}"
  )


def _better_length(found, K):
  """The length that is predicted to pay, or a smaller one, if there is any."""
  if found and found["best_k"] is not None:
    paying = found["best_k"] and found["best_speedup"] > 1
    return [f"--config.draft.num_tokens={found['best_k']}"] if paying else []
  return [f"fewer --config.draft.num_tokens than {K}"] if K > 1 else []


def _exactness(report):
  found, exact = report["compared"], report["exact"]
  if exact is None:
    return (
      "in law; at temperature 0, or with --config.verifier=coupled, token for"
      " token"
    )
  if exact:
    return f"yes: all {found['equal_tokens']} tokens equal plain decoding"
  first, dtype = found["first_difference"], report["model"]["dtype"]
  turn = f" turn {first['turn'] + 1}" if first["turn"] else ""
  return (
    f"no: {found['different_answers']} of {found['turns']} answers differ,"
    f" {first['id']!r}{turn} from token {first['token'] + 1} on ({dtype}:"
    " logits that agree but for rounding can part)"
  )


def _acceptance(report):
  """What became of the draft, in `metrics.Acceptance`'s definitions."""
  if not report["tokens_per_call"]:
    return []
  K, counts = report["draft"]["K"], report["acceptance_histogram"]
  most = f"{report['tokens_per_call']:.2f} of at most {K + 1}"
  if not K:
    return [("tokens a call", most)]
  total, with_draft = sum(counts), report["rounds_tested"][0]
  if with_draft < total:
    most += f"; {total - with_draft} of {total} rounds had no draft"
  rows = [("tokens a call", most)]
  by_position = report["acceptance_by_position"]
  numbers = " ".join(map(_share, by_position[:_SHOWN]))
  shown = min(K, _SHOWN)
  positions = f"position{'s 1 to' * (K > 1)} {shown}"
  bars = [
    f"{n} {'█' * round(_BAR * count / max(counts))} {count}".replace("  ", " ")
    for n, count in enumerate(counts)
    if count or K <= _SHOWN
  ]
  alpha = report["alpha"]
  return rows + [
    ("accepted", f"{numbers} ({positions})"),
    ("histogram", f"{', '.join(bars)} (accepted, rounds)"),
    (
      "alpha",
      "nothing was drafted"
      if alpha is None
      else f"{alpha:.2f}, mean over the tested drafts",
    ),
  ]


def _prediction(report):
  """Predicted from the plain texts and the costs, beside what was measured."""
  found, costs, K = report["predicted"], report["costs"], report["draft"]["K"]
  ms = lambda name: f"{costs[name] * 1e3:.1f} ms"
  C = f"C {costs['C']:.1f}" if costs["C"] else "a free draft"
  rows = [
    (
      "costs",
      f"a drafted token {ms('drafted_token')}, a target call"
      f" {ms('target_call_1')} on 1 token, {ms(f'target_call_{K + 1}')} on"
      f" {K + 1} ({C}), the rest of a round {_rest(costs)}",
    )
  ]
  said = f"{found['tokens_per_call']:.2f} tokens a call"
  said += _interval(found, "tokens_per_call_interval")
  if not found["speedup"]:
    return [*rows, ("predicted", said)]
  said += f", {found['speedup']:.2f} x{_interval(found, 'speedup_interval')}; "
  best = f"best at K = {found['best_k']}: {found['best_speedup']:.2f} x"
  said += best if found["best_k"] else "no K up to this one pays"
  parts = dict(found["parts"])
  factors = [f"{parts.pop('textbook'):.2f} by E[N] / (1 + K / C)"]
  factors += [f"{factor:.2f} {name}" for name, factor in parts.items()]
  return [*rows, ("predicted", said), ("its parts", " x ".join(factors))]


def _rest(costs):
  if costs["rest_of_a_round"] < 0:
    return "less than nothing: the machine was busy, measure again"
  return f"{costs['rest_of_a_round'] * 1e3:.1f} ms"


def _interval(found, name):
  """One text has none."""
  low, high = found[name]
  return f" ({low:.2f} to {high:.2f})" if found["texts"] > 1 else ""


def _share(x):
  """.72: a share of one in three characters."""
  return f"{x:.2f}".removeprefix("0")


def _machine(report, runs):
  """What it took beside decoding, and what it ran on."""
  config, model = report["config"], report["model"]
  peak, shown = report["peak_memory_bytes"], ("specjax", "jax", "flax")
  versions = [f"{k} {report['versions'][k]}" for k in (*shown, "python")]
  names = ("plain ", "speculative ") if len(runs) == 2 else ("",)
  each = lambda key, digits: ", ".join(
    f"{name}{run[key]:.{digits}f} s"
    for name, run in zip(names, runs, strict=True)
  )
  return [
    ("prefill", each("prefill_seconds", 2)),
    ("compile", f"{each('compile_seconds', 1)} (not in the rates)"),
    ("load", f"{model['load_seconds']:.1f} s"),
    ("memory", f"{memory.human(peak)} at peak" if peak else "unknown"),
    ("model", f"{short_name(config['target'])}, {_size(model)}"),
    *([("draft", _draft(report))] if report["draft"] else []),
    *overlap.rows(report["overlap"]),
    *_schedule(report),
    (
      "program",
      f"{model['dtype']}, batch {config['batch_size']}, {model['slots']} slots",
    ),
    ("sampling", f"{_sampling(config['sampling'])}, seed {config['seed']}"),
    *_stops(config),
    ("device", runtime.told(report["device"], report["mesh"].values())),
    ("versions", ", ".join(versions)),
  ]


def _size(model):
  return f"{model['parameters'] / 1e6:.4g} M parameters"


def _draft(report):
  draft, asked = report["draft"], report["config"]["draft"]
  words = [draft["name"]]
  if asked["weights"]:
    words.append(short_name(asked["weights"]))
  if draft["layers"]:
    words.append(f"layers {','.join(map(str, draft['layers']))} of the target")
  if draft["parameters"]:
    words.append(_size(draft))
  if draft["head"]:
    words.append(f"a head of {draft['head']} ids")
  if draft["name"] == "replay":
    words.append(f"alpha {asked['alpha']:g}")
  if asked["temperature"] >= 0:
    words.append(f"temperature {asked['temperature']:g}")
  if asked["top_p"] >= 0:
    words.append(f"top-p {asked['top_p']:g}")
  words.append(f"{draft['K']} tokens a round, verifier {draft['verifier']}")
  return ", ".join(words)


def _schedule(report):
  """What a schedule chose; it was timed, and so are tokens that K decides."""
  chosen = report["draft"] and report["draft"]["chosen"]
  if not chosen:
    return []
  config = report["config"]
  if config["sampling"]["temperature"] > 0 and config["verifier"] != "coupled":
    chosen += "; at a temperature the tokens depend on it, never their law"
  return [("schedule", chosen)]


def _sampling(values):
  """The values that are in force; see configs/common.py for what is off."""
  greedy = values["temperature"] == 0
  words = ["greedy" if greedy else f"temperature {values['temperature']}"]
  for name, off in _OFF.items():
    value = values[name]
    if name == "banned":
      value = ",".join(map(str, value))
    on = value > 0 if name == "top_k" else value != off
    if on and not (greedy and name in _TRUNCATION):
      words.append(f"{name} {value}")
  return ", ".join(words)


def _stops(config):
  """What else than end tokens ends an answer, if anything."""
  words = [f"at {config['stop']!r}"] * (config["stop"] != "")
  words += ["not at end tokens"] * config["ignore_eos"]
  return [("stop", ", ".join(words))] if words else []


def short_name(target):
  """What a person calls a weight reference."""
  if target == "random":
    return "random weights"
  path = target.partition("#")[0].rstrip("/")
  if path.startswith("hf://"):
    return path.removeprefix("hf://")
  return path.rpartition("/")[2] or target
