"""New tokens: ids, rows in the tables, and training those rows alone.

    add_lora(model)
    think, answer = add_tokens(model, ["<think>", "<answer>"])

The usual way enlarges the tables and then trains them whole, which for a few tokens is a copy of 128,256 rows with two
moments each.  Here an adapter trains the rows of the new tokens and nothing else of the tables, as PEFT does with its
``trainable_token_indices``, and in its format.  Rows that a table has stay what they are, bit by bit.

A checkpoint's table is often longer than its vocabulary, filled up with rows that no token has; new tokens take those
first, and only then do the tables grow, by as many rows as are needed.  Given up: padding the grown table to a size
that tensor cores like, since each such row would have a logit of its own.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor, nn

from lorarun.lora import Lora, check_not_merged, use_adapter
from lorarun.nn import Model
from lorarun.quant.store import stores
from lorarun.tokenizer import Tokenizer
from lorarun.trained import EMBEDDING, TABLES, add_rows, first_rows, is_tied


def add_tokens(model: Model, tokens: Sequence[str], special: bool = False) -> list[int]:
    """Make each of ``tokens`` a token of the model whose row the active adapter trains; returns their ids.

    A token that the tokenizer has already keeps its id and begins with its own row; a new one begins with the mean of
    all rows.  The embedding and, where it is not tied to it, the head each have rows for it.  The tokenizer is extended
    and is saved with the adapter and with a merged model; the tables grow where they must, and with them
    ``model.config.vocab_size``.  Without an active adapter, every ``add_lora`` from now on trains these rows.

    special: a control token, which decoding leaves out and which a message must not contain.

    Raises ValueError without a tokenizer, for what is no token, while an adapter is merged, and where an adapter has
    the tables whole: there, add tokens before ``add_lora``.
    """
    if model.tokenizer is None:
        raise ValueError("add_tokens: this model has no tokenizer that could be extended.")
    wrong = [token for token in tokens if not isinstance(token, str) or not token.strip()]
    if isinstance(tokens, str) or wrong:
        raise ValueError(f"add_tokens: got {wrong or tokens!r}; expected a list of texts that are not blank.")
    check_not_merged(model, "add_tokens")
    _check_tables(model, "add_tokens")
    before = model.tokenizer.vocab_size
    model.tokenizer = extended(model.tokenizer, tokens, special)
    ids = [model.tokenizer.id_of(token) for token in tokens]
    model.added |= {i: i >= before or model.added.get(i, False) for i in ids}
    grow(model, max(ids, default=0) + 1)
    if model.active is not None:
        lora: Lora = model.adapters[model.active]
        places = [EMBEDDING] if is_tied(model) else list(TABLES)
        for path in places:
            _more_rows(model, model.active, lora, path, ids)
        use_adapter(model, model.active)
    return ids


def _check_tables(model: Model, call: str) -> None:
    """Raise ValueError where an adapter has a copy or a low-rank update of a table, which would not grow with it."""
    whole = [name for name, lora in model.adapters.items() if lora.tables or set(lora.copies).intersection(TABLES)]
    if whole:
        raise ValueError(
            f"{call}: the adapter {whole[0]!r} has the embedding or the head whole or a low-rank update of it, whose "
            "sizes are fixed; add tokens before add_lora, which then trains their rows with the table."
        )


def _more_rows(model: Model, name: str, lora: Lora, path: str, ids: Sequence[int]) -> None:
    """Let an adapter train these rows of a table too, beside those that it trains already."""
    old = lora.tokens.get(path, [])
    new = [i for i in dict.fromkeys(ids) if i not in old]
    if not new:
        return
    rows, dtype = first_rows(model, path, new), None
    if old:
        _, held = model.get_submodule(path).rows_of(name)  # type: ignore[operator]
        rows, dtype = torch.cat((held.detach(), rows.to(held.dtype))), held.dtype
    lora.tokens = lora.tokens | {path: sorted([*old, *new])}
    add_rows(model, name, {path: [*sorted(old), *new]}, dtype, {path: rows})


def grow(model: Model, size: int, rows: Mapping[str, Tensor] | None = None) -> None:
    """Give the tables ``size`` rows where they have fewer: ``rows`` [new, hidden] by table, or the mean of the rows of
    tokens.  Tied tables stay tied."""
    table: Tensor = model.model.embed_tokens.weight
    missing = size - len(table)
    if missing <= 0:
        return
    tied = is_tied(model)
    fresh = [i for i, new in model.added.items() if new]
    known = min([len(table), *fresh])
    for path in [EMBEDDING] if tied else TABLES:
        module: Any = model.get_submodule(path)
        old: Tensor = module.weight.detach()
        wide = torch.promote_types(old.dtype, torch.float32)
        mean = old[:known].mean(0, dtype=wide).expand(missing, -1)
        more = mean if rows is None or path not in rows else rows[path][-missing:]
        module.weight = nn.Parameter(torch.cat((old, more.to(old))), requires_grad=module.weight.requires_grad)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.lm_head.out_features = model.config.vocab_size = size


def learns_row(model: Model, token: int) -> bool:
    """Whether a token's row of the embedding is trained."""
    if model.whole or model.active is None:
        return model.whole
    lora: Lora = model.adapters[model.active]
    return EMBEDDING in lora.copies or token in lora.tokens.get(EMBEDDING, [])


def check_added(model: Model, ids: Iterable[int]) -> None:
    """Warn of tokens among ``ids`` that were added here and whose rows nothing trains."""
    if fresh := [i for i in ids if i in model.added and not learns_row(model, i)]:
        warnings.warn(
            f"The data has tokens that were added and that are not trained: ids {', '.join(map(str, fresh[:20]))}. "
            "An adapter that add_lora attaches after add_tokens trains their rows.",
            stacklevel=4,
        )


def train_all(model: Model) -> Model:
    """Train every weight of the model itself, and switch it to training mode.

    ``fit`` trains and saves it then.  In a loop of one's own an optimizer is given ``model.parameters()``; weights of
    16 bits want one that steps fp32 copies, as ``fit`` has (:class:`lorarun.optim.Optimizer`), since a step is far
    below a rounding of theirs; and ``save_merged`` writes the result as a checkpoint.  Projections run one by one,
    since the kernels that join them are for frozen weights, and the report says so.

    Returns the model.  Raises ValueError for quantised weights, and for a model that has adapters.
    """
    if model.adapters:
        raise ValueError(
            f"train_all: the model has the adapters {', '.join(model.adapters)}, which would be trained for weights "
            "that move; load it afresh, or write it with save_merged and load that."
        )
    if stored := list(stores(model)):
        raise ValueError(
            f"train_all: {len(stored)} weights are quantised, and steps are far smaller than what separates their few "
            "values; load with bits=16, or train an adapter with add_lora."
        )
    new = [i for i, fresh in model.added.items() if fresh]
    for path in TABLES if new else ():
        table: Tensor = model.get_submodule(path).weight  # type: ignore[assignment]
        table.data[new] = first_rows(model, path, new).to(table.dtype)
    model.requires_grad_(True)
    model.whole = True
    return model.train()


# --- the tokenizer -------------------------------------------------------------------------------------------------


def extended(tokenizer: Tokenizer, tokens: Sequence[str], special: bool) -> Tokenizer:
    """A tokenizer that knows these tokens too, in a folder of its own that goes when it does."""
    folder = Path(tempfile.mkdtemp(prefix="lorarun-tokenizer-"))
    try:
        tokenizer.save(folder)
        if (config := tokenizer.folder / "config.json").is_file():
            shutil.copyfile(config, folder / "config.json")  # names end tokens
        core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        new = [token for token in dict.fromkeys(tokens) if core.token_to_id(token) is None]
        core.add_tokens([tokenizers.AddedToken(token, normalized=False, special=special) for token in new])
        core.save(str(folder / "tokenizer.json"))
        made = Tokenizer.load(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    assert made is not None
    made.added = (*tokenizer.added, *new)
    weakref.finalize(made, shutil.rmtree, folder, True)
    return made


def beyond_the_base(model: Model, folder: Path) -> list[tuple[str, bool]]:
    """The tokens, each with whether it is special, that the tokenizer saved with an adapter has beyond the model's."""
    path = folder / "tokenizer.json"
    if model.tokenizer is None or not path.is_file():
        return []
    own = model.tokenizer.folder / "tokenizer.json"
    if path.stat().st_size == own.stat().st_size and path.read_bytes() == own.read_bytes():
        return []  # parsing takes a second
    core = tokenizers.Tokenizer.from_file(str(path))
    more = sorted(core.get_added_tokens_decoder().items())
    return [(token.content, token.special) for i, token in more if i >= model.tokenizer.vocab_size]


def adopt(model: Model, more: Sequence[tuple[str, bool]], size: int, lora: Lora, frozen: Mapping[str, Tensor]) -> None:
    """Take over what an adapter that is being loaded brings: tokens beyond the model's, and tables of ``size`` rows,
    the new ones from its ``frozen`` tables where it has them."""
    if size > len(model.model.embed_tokens.weight):
        _check_tables(model, "load_adapter")
    known = len(model.model.embed_tokens.weight) if model.tokenizer is None else model.tokenizer.vocab_size
    trained = {i for ids in lora.tokens.values() for i in ids}
    if more and size >= known + len(more):
        for token, special in more:
            model.tokenizer = extended(model.tokenizer, [token], special)
        trained.update(range(known, known + len(more)))
    model.added |= {i: True for i in sorted(trained) if i >= known}
    grow(model, size, frozen)
