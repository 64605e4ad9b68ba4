"""Whether a merged checkpoint is what it should be: every bit read back, and the logits compared with the live model's.

The bits are compared with values computed afresh from the source.  That finds what a disk or a cache did to them, but a
mistake in the computation twice; the logits find that, and a configuration that says something else.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lorarun.checkpoint import open_checkpoint
from lorarun.export_weights import Export
from lorarun.headers import abbreviate
from lorarun.linear import Linear
from lorarun.load import free_memory, load
from lorarun.nn import Model
from lorarun.quant.store import Store
from lorarun.weighted import Weighted

TOKENS = 64  # of the row on which logits are compared
FACTOR = 2.0  # times the measured noise that logits may be off; 0.2 to 1.1 are seen


def progress(what: str, export: Export) -> Any:
    """A bar on stderr over the source's bytes; a line where that is no terminal."""
    terminal = sys.stderr.isatty()
    size = sum(export.entries[name].nbytes for name in export.names)
    if not terminal:
        print(f"save_merged: {what} {size / 2**20:,.1f} MiB", file=sys.stderr)
    return tqdm(total=size, desc=what, unit="B", unit_scale=True, file=sys.stderr, disable=not terminal)


def check_written(export: Export, partial: Path) -> None:
    """Read every tensor back and compare its bits with what it should be, computed again from the source."""
    written, wrong, known = open_checkpoint(partial), [], set()
    with progress("reading back", export) as bar:
        for name in export.names:
            for part, expected in export.expected(name).items():
                known.add(part)
                if part not in written.entries:
                    wrong.append(part)
                    continue
                ((_, got),) = written.read([part])
                if got.dtype != expected.dtype or got.shape != expected.shape or not _same_bits(got, expected):
                    wrong.append(part)
            bar.update(export.entries[name].nbytes)
    wrong += sorted(written.entries.keys() - known)
    if export.unlike:  # seen while writing
        raise RuntimeError(
            f"save_merged: these have codes of other numbers: {abbreviate(export.unlike)}; nothing is kept. Please "
            "report this."
        )
    if wrong:
        raise RuntimeError(
            f"save_merged: what was read back is not what was to be written: {abbreviate(wrong)}; nothing is kept. Is "
            "the disk sound, and was the source left alone meanwhile?"
        )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that also holds for NaN, and not between 0 and -0."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def check_logits(export: Export, partial: Path) -> None:
    """Load what was written and compare its logits with the live model's, on one row of random ids.

    They differ by rounding: merged weights are rounded to the dtype or the codes written, and sums are rounded
    elsewhere.  How far that moves the logits of this very model is measured: the live model runs once more with each
    projection's output disturbed by noise of one such rounding.  The written model may be off by FACTOR times as much
    (root mean square).  With codes of four bits that is a lot, and so a weak check: a mistake in the update that is
    smaller than their rounding passes here, and only the share that was kept of it tells.
    """
    model = export.model
    device = _room(export)
    if device is None:
        print("save_merged: no memory for a second model, so logits were not compared.", file=sys.stderr)
        return
    ids = torch.randint(model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    training = model.training
    model.eval()
    try:
        live = _logits(model, ids)
        with _noise(export):
            noisy = _logits(model, ids)
    finally:
        model.train(training)
    if not live.isfinite().all():
        raise RuntimeError(
            "save_merged: the live model's logits are not finite (a run that diverged?); nothing is kept."
        )
    error = _rms(_logits(load(partial, dtype=model.dtype, device=device), ids) - live)
    allowed = FACTOR * _rms(noisy - live) + torch.finfo(model.dtype).eps * _rms(live)
    elsewhere = any(isinstance(m.weight, Store) and name not in export.held for name, m in export.modules.items())
    if elsewhere or export.forms:
        print(f"save_merged: logits differ from the live model's by {error / _rms(live):.2%}.", file=sys.stderr)
    if not elsewhere and not error <= allowed:
        raise RuntimeError(
            f"save_merged: the written model answers differently from the live one (logits are off by {error:.3g}, "
            f"rounding explains {allowed:.3g}); nothing is kept. Please report this."
        )


@torch.no_grad()
def _logits(model: Model, ids: Tensor) -> Tensor:
    with torch.autocast(model.device.type, enabled=False):
        logits: Tensor = model(ids.to(model.device))
        return logits.double().cpu()


@contextmanager
def _noise(export: Export) -> Iterator[None]:
    """Disturb each projection's output by one rounding.

    That is, relative to its size, half a unit in the last place of the dtype computed in and, if its weight was written
    anew, of the dtype written, and what summing in fp32 adds.  For codes: errors of the size that was measured on the
    weight, independent of each other, times the input: their root mean square × |x|.
    """
    generator = torch.Generator().manual_seed(1)
    eps: dict[Weighted, float] = {}
    codes: dict[Weighted, float] = {}
    for name, module in export.modules.items():
        if name in export.forms:
            codes[module] = export.noise.get(name, 0.0)
        elif name in export.held or export.merges(name):
            eps[module] = torch.finfo(export.dtype_of(name)).eps

    def disturb(module: Weighted, inputs: Any, y: Tensor) -> Tensor:
        summing = torch.finfo(torch.float32).eps * math.sqrt(module.weight.shape[-1])
        size = (torch.finfo(y.dtype).eps + eps.get(module, 0.0) + summing) / 2
        y = y + y * (size * torch.randn(y.shape, generator=generator)).to(y)
        if rms := codes.get(module):
            length = inputs[0].float().norm(dim=-1, keepdim=True)
            y = y + (rms * length * torch.randn(y.shape, generator=generator).to(length)).to(y)
        return y

    hooks = [
        m.register_forward_hook(disturb)
        for m in export.model.modules()
        if isinstance(m, Linear) or (isinstance(m, Weighted) and m in eps)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _room(export: Export) -> torch.device | None:
    """Where a second model can be had: beside the first, else on the host, else nowhere."""
    size = export.model.dtype.itemsize
    needed = sum(
        part.nbytes if name in export.forms else part.numel() * size
        for name in export.names
        for part in export.layout(name).values()
    )
    for device in (export.model.device, torch.device("cpu")):
        if 1.1 * needed < free_memory(device):
            return device
    return None
