"""What selfcheck found, for people, as (name, text) pairs."""

_SHOWN = 5  # mismatches told one by one


def rows(result):
  """Return the rows of a dict that `selfcheck.check` saves."""
  found = _law_rows(result["law"])
  for name in ("greedy", "coupled"):
    part = result[name]
    found.append((name, _equality_text(part, result["K"])))
    told = part["mismatches"][:_SHOWN]
    found += [_mismatch_row(name, x, result) for x in told]
    if more := len(part["mismatches"]) - len(told):
      found.append(("", f"and {more} more (--json has all)"))
  return [*found, ("verdict", _verdict(result))]


def _law_rows(law):
  """What the tests say, what they could have seen, what they looked at."""
  tests = [x for x in law["tests"] if x["cells"] > 1]
  sides = (
    f"{law['samples']} texts of {law['tokens']} tokens each way, temperature"
    f" {law['temperature']:g}, verifier {law['verifier']}"
  )
  if not tests:
    return [("law", f"not tested: nearly all are one text ({sides})")]
  worst = min(tests, key=lambda x: x["p_value"])
  said = (
    f"p-value {worst['p_value']:.2g} ({worst['name']}, the smallest of"
    f" {len(tests)}), the limit is {worst['level']:.0e}: "
    + ("the laws differ" if law["fault"] else "no difference seen")
    + "; it is how often samples of one law differ this much"
  )
  bias = lambda x: (
    f"nothing of {x['name']}"
    if x["smallest_bias"] is None
    else f"{x['smallest_bias']:.1%} of {x['name']} ({x['cells']} cells)"
  )
  return [
    ("law", said),
    (
      "would see",
      f"with probability {law['power']:g}, a bias that moves"
      f" {', '.join(map(bias, tests))}; a larger --samples sees a smaller one",
    ),
    ("sampled", f"{sides}; {_drafted(law)}"),
  ]


def _drafted(law):
  """How much of a say the draft had: without one little is tested."""
  said = f"{law['accepted']} of {law['tested']} tested drafts accepted"
  if law["tested"] < law["samples"] / 10:
    said += ": hardly anything is drafted behind this prompt, try another"
  elif law["accepted"] < law["tested"] / 50:
    said += ": the draft agrees with hardly anything, little is tested"
  return said


def _equality_text(part, K):
  same = part["answers"] - len(part["mismatches"])
  more = f", temperature {part['temperature']:g}" if part["temperature"] else ""
  return (
    f"{same} of {part['answers']} answers equal plain decoding"
    f" ({part['tokens']} tokens, K = {K}, verifier {part['verifier']}{more})"
  )


def _mismatch_row(name, x, result):
  """A mismatch in words: what, where, how close, how large rounding is."""
  where = (
    f"prompt {x['prompt']!r}, token {x['place'] + 1} is {x['speculative']}"
    f" instead of {x['plain']}"
  )
  kind = "tie-flip" if x["tie_flip"] else "fault"
  if x["difference"] is None:
    return (kind, f"{name}, {where}: one of the two had ended")
  gap = "infinitely many" if x["gap"] is None else f"{x['gap']:.2g}"
  ulps = lambda value: f"{value / x['ulp']:.2g} units in the last place"
  text = (
    f"{name}, {where}: {gap} logits apart, while passes of 1 and"
    f" {result['K'] + 1} tokens differ by up to {x['difference']:.2g}"
    f" ({ulps(x['difference'])} of {result['dtype']}; rounding is at most"
    f" {x['most_ulps']})"
  )
  return (kind, text)


def _verdict(result):
  if result["faults"]:
    return (
      f"FAULT in {', '.join(result['faults'])}: speculation is not plain"
      " decoding here"
    )
  flips = sum(len(result[k]["mismatches"]) for k in ("greedy", "coupled"))
  if flips:
    return (
      f"no fault; {flips} answers part where two tokens are as close as"
      " rounding is (--config.dtype=float32 rounds less)"
    )
  return "no fault"
