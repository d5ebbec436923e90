"""Open the systems of benchmarks/peers.py and let them take turns."""

import contextlib
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import lookup, peer_files, peer_ours, peer_results, peer_systems
from specjax import terminal
from specjax.errors import UserError

WARM = 16  # tokens of the first, uncounted run of each system


class Open(NamedTuple):
  """What can be measured."""

  decode: dict  # {system: (ids, max_new) -> a run}
  logits: dict  # {system: (ids) -> [V] behind them}
  notes: dict  # {system: why it is not measured, or what there is to say}
  about: dict  # {system: versions, threads and how it was built}


class Case(NamedTuple):
  """All that is compared."""

  model: Any  # a `load.Model`
  opened: Any  # its `load.Opened`
  config: Any
  todo: tuple  # `Prompt`s
  dtype: str
  threads: int
  turns: int
  draft: str  # a folder, or ""
  python: str  # that has the other systems
  root: str  # where copies of the weights are kept, "": the cache


def device():
  """What the other systems call this device."""
  return "cuda" if jax.default_backend() == "gpu" else "cpu"


def prompts(case):
  """{id: token ids} of the first turns."""
  first = lambda p: lookup.first_turn(case.model, p, case.config)
  found = {prompt.id: first(prompt) for prompt in case.todo}
  if len(found) < len(case.todo):
    raise UserError("two prompts have one id; give each its own")
  return found


def open_all(out, stack, case, systems):
  """Return the `Open` of some `System`s.

  Args:
    stack: an ExitStack, which ends the processes.
  """
  found = Open({}, {}, {}, {})
  note = lambda line: terminal.note(out, line)
  lacking = [s for s in systems if s.drafts and not case.draft]
  found.notes.update((s.name, "needs --draft=FOLDER") for s in lacking)
  rest = [s for s in systems if s not in lacking]
  own = [s for s in rest if s.library == "ours"]
  options = (case.config, case.draft, case.todo)
  pairs, sizes = peer_ours.variants(
    *(out, case.model, case.opened, own), *options
  )
  law = peer_ours.logits(case.model, sizes.slots)
  for name, pair in pairs.items():
    found.decode[name] = peer_ours.decoder(case.model, pair, sizes, case.config)
    found.logits[name] = law
    if pair and pair.opened.chosen:
      found.notes[name] = pair.opened.chosen
  _foreign(stack, case, [s for s in rest if s not in own], sizes, found, note)
  return found


def _foreign(stack, case, systems, sizes, found, note):
  """Add to an `Open` the systems that have processes of their own."""
  paths = peer_files.needed(case.config.target, systems, case.root)
  left_out = peer_files.write(case.config.target, paths, note)
  peer_files.check(case.config.target, paths)
  helper, why = None, ""
  if any(s.how == "assistant" for s in systems):
    helper = paths["transformers"].with_name("assistant")
    try:
      peer_files.assistant(case.draft, case.model, helper)
    except UserError as e:
      helper, why = None, str(e)
  loaded = {}
  for system in systems:
    gguf = system.library == "llama.cpp"
    kind = system.precision("F32") if gguf else system.library
    # one process serves all ways of transformers; llama.cpp decides at load
    key = system.name if gguf else kind
    reason = left_out.get(kind) or (why if system.how == "assistant" else "")
    if not reason and key not in loaded:
      note(f"loading {key}")
      options = _load_options(case, system, sizes, paths[kind], helper)
      loaded[key] = _load(stack, case, options)
    if not reason:
      worker, about, reason = loaded[key]
    if reason:
      found.notes[system.name] = reason
      continue
    found.about[system.name] = about
    found.decode[system.name] = _decoder(worker, system, case)
    found.logits[system.name] = _logits(worker)


def _load_options(case, system, sizes, path, helper):
  return dict(
    library=system.library,
    folder=str(path),
    dtype=case.dtype,
    device=device(),
    threads=case.threads,
    slots=sizes.slots,
    # keys and values as its default, but where all is to be float32
    cache="F16" if system.how in ("F16", "Q8_0") else "F32",
    lookup=system.k if system.how == "lookup" else 0,
    assistant=helper and str(helper),
  )


def _load(stack, case, options):
  """(worker, what there is to say, why it is not measured)."""
  worker = peer_systems.start(case.python)
  answer = peer_systems.ask(worker, "load", **options)
  if reason := peer_systems.reason(answer):
    peer_systems.stop(worker)
    return None, None, reason
  stack.callback(peer_systems.stop, worker)
  return worker, answer["about"], ""


def _asked(worker, do, **what):
  """An answer that is no error."""
  answer = peer_systems.ask(worker, do, **what)
  if reason := peer_systems.reason(answer):
    raise UserError(reason)
  return answer


def _decoder(worker, system, case):
  stop = () if case.config.ignore_eos else case.model.tokenizer.stop_ids
  options = dict(stop=list(stop), how=system.how, k=system.k)

  def decode(ids, max_new):
    return _asked(worker, "decode", prompt=ids, max_new=max_new, **options)

  return decode


def _logits(worker):
  return lambda ids: _asked(worker, "logits", ids=ids)["logits"]


def warm_up(out, found, ids, max_new):
  """Run every system once on the longest prompt; say what cannot run.

  Returns:
    {system: seconds}, compilation and all.
  """
  spent = {}
  for name in terminal.track(out, "warming up")([*found.decode]):
    began = time.perf_counter()
    try:
      found.decode[name](max(ids.values(), key=len), min(WARM, max_new))
      spent[name] = time.perf_counter() - began
    except UserError as e:
      found.notes[name] = str(e)
      del found.decode[name]
  return spent


def measure(out, found, ids, max_new, turns):
  """{system: [turn][prompt] runs}; who begins moves on from turn to turn."""
  names = [*found.decode]
  runs = {name: [[None] * len(ids) for _ in range(turns)] for name in names}
  cases = [
    (turn, i, names[(j + turn) % len(names)])
    for turn in range(turns)
    for i in range(len(ids))
    for j in range(len(names))
  ]
  prompts = [*ids.values()]
  for turn, i, name in terminal.track(out, "measuring")(cases):
    try:
      runs[name][turn][i] = found.decode[name](prompts[i], max_new)
    except UserError as e:
      raise UserError(f"{name}: {e}") from e
  return runs


def same_law(found, ids, reference):
  """{system: the largest difference of a log-probability from the reference's}.

  Behind the first prompt.
  """
  text = next(iter(ids.values()))

  def law(name):
    x = np.asarray(found.logits[name](text), np.float64)
    return x - np.logaddexp.reduce(x)

  want = law(reference)
  return {
    name: float(np.abs(law(name) - want).max())
    for name in found.decode
    if name != reference
  }


def compare(out, case, systems):
  """Measure some systems at batch 1; return what goes into the record."""
  ids = prompts(case)
  with contextlib.ExitStack() as stack:
    found = open_all(out, stack, case, systems)
    new = case.config.max_new_tokens
    spent = warm_up(out, found, ids, new)
    if not found.decode:
      raise UserError("--systems: none of them can be measured here")
    reference = "transformers" if "transformers" in found.decode else None
    reference = reference or next(iter(found.decode))
    law = same_law(found, ids, reference)
    runs = measure(out, found, ids, new, case.turns)
    agreements = [
      peer_results.agreement(
        ids,
        runs,
        (s.name, reference),
        found.logits,
        case.dtype,
        same_weights=s.precision("") == "",
      )
      for s in systems
      if s.name in runs and s.name != reference
    ]
  return {
    "rows": peer_results.rows(systems, runs, found.notes, case.dtype),
    "agreement": agreements,
    "law_difference": law,
    "warm_up_seconds": spent,
    "about": found.about,
    "prompts": {key: len(x) for key, x in ids.items()},
    "runs": runs,
  }
