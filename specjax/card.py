"""The card of an exported draft: what it is, what it was measured to be."""

import specjax
from specjax.models import exported, weights


def text(name, draft, tensors, lacks, reference, card):
  """Return the text of an export's README.md.

  Args:
    name: of the folder; draft: a `Student`.
    tensors: {name: array} as they are stored.
    lacks: a `models.exported.Exported`, None if it is a model by itself.
    reference: of the target.
    card: {title: text, or {name: value}}, sections of their own.
  """
  config = draft.config
  size = sum(x.nbytes for x in tensors.values())
  dtype = next(iter(tensors.values())).dtype.name
  facts = {
    "target": reference,
    "layers": config.layers,
    "width": config.width,
    **_reads(draft),
    "parameters": f"{weights.num_parameters(config, draft.features):,}",
    "stored": f"{sum(x.size for x in tensors.values()):,} of them,"
    f" {size / 1e6:.1f} MB",
    "vocabulary": f"{len(draft.ids):,} of {config.vocab_size:,} ids"
    if draft.ids is not None
    else f"all {config.vocab_size:,} ids",
    "embedding": "the target's" if draft.shared else "its own",
    "weights": "float32, as trained"
    if dtype == "float32"
    else f"{dtype}, rounded from float32: lossy",
  }
  parts = [
    f"# {name}",
    "A draft model for speculative decoding, trained with specjax"
    f" {specjax.__version__}. Whatever it drafts, the output keeps the target's"
    " distribution.",
    "```\npython decode.py --config=configs/smollm2.py \\\n"
    f'    --config.target="{reference}" \\\n'
    f"    --config.draft.name={'feature' if draft.features else 'lm'}"
    " --config.draft.weights=THIS_FOLDER\n```",
    _table(facts),
  ]
  for title, value in card.items():
    parts += [f"## {title}", _table(value) if _is_table(value) else str(value)]
  parts += ["## In other programs", _elsewhere(lacks)]
  return "\n\n".join(parts) + "\n"


def _reads(draft):
  if not draft.features:
    return {}
  return {"reads": f"outputs of the target's layers {_list(draft.features)}"}


def _list(numbers):
  return ", ".join(map(str, numbers))


def _is_table(value):
  return hasattr(value, "items")


def _table(values):
  cell = lambda x: " ".join(_text(x).split()).replace("|", "\\|")
  rows = [f"| {cell(k)} | {cell(x)} |" for k, x in values.items()]
  return "\n".join(["| | |", "| --- | --- |", *rows])


def _text(x):
  return f"{x:.4g}" if isinstance(x, float) else str(x)


def _elsewhere(lacks):
  if lacks is None:
    return (
      "It is a model in Hugging Face layout. In transformers it is an"
      " `assistant_model` of its target:\n\n```python\n"
      "draft = AutoModelForCausalLM.from_pretrained(THIS_FOLDER)\n"
      "target.generate(**inputs, assistant_model=draft)\n```"
    )
  why = []
  if lacks.ids is not None:
    why.append(
      f"Its head knows {len(lacks.ids):,} ids: logit i is the token in place i"
      f" of `{exported.IDS}`. An `assistant_model` must have the target's"
      " vocabulary; read without that list, each logit would be taken for"
      " another token."
    )
  if lacks.embedding == "shared":
    why.append(
      "Its embedding is its target's, and is not in this folder. An"
      " `assistant_model` must have its own; read without one, it would get"
      " random numbers."
    )
  if lacks.features:
    why.append(
      "It reads the outputs of its target's layers"
      f" {_list(lacks.features)}, which no `assistant_model` is given."
    )
  return (
    f"It cannot be an `assistant_model` in transformers. {' '.join(why)} So its"
    f" model type, `{exported.MODEL_TYPE}`, and its weight file,"
    f" `{exported.WEIGHTS}`, are such that other programs stop."
  )
