"""Whether a merged checkpoint is what it should be: every bit read back, and the logits compared with the live model's.

The bits are compared with values computed afresh from the source.  That finds what a disk or a cache did to them, but a
mistake in the computation twice; the logits find that, and a configuration that says something else.
"""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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
FACTOR = 2.0  # times the measured noise that logits may be off; 0 to 0.9 are seen


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

    They differ by rounding: merged weights are rounded to the dtype written, and sums are rounded elsewhere.  How far
    that moves the logits of this very model is measured: the live model runs once more with each projection's output
    disturbed by noise of one such rounding.  Logits may be off by FACTOR times as much (root mean square).

    Codes of few bits move them much farther, and so there are two comparisons: of the live model with itself when each
    projection multiplies by its merged weight, and of the written model with the live one when each projection
    multiplies by the numbers of its codes.  How far the two are from each other is said.
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
        live = merged = expected = _logits(model, ids)
        with _noise(export):
            noise = _rms(_logits(model, ids) - live)
        if export.forms:
            with _multiplied(export, export.merged):
                merged = _logits(model, ids)
            with _multiplied(export, open_checkpoint(partial).dense):
                expected = _logits(model, ids)
    finally:
        model.train(training)
    if not live.isfinite().all():
        raise RuntimeError(
            "save_merged: the live model's logits are not finite (a run that diverged?); nothing is kept."
        )
    with contextlib.redirect_stderr(io.StringIO()):  # it says how quantised weights run on this machine
        written = _logits(load(partial, dtype=model.dtype, device=device), ids)
    another = any(isinstance(m.weight, Store) and name not in export.held for name, m in export.modules.items())
    if another or export.forms:
        share = _rms(written - live) / _rms(live)
        print(f"save_merged: logits differ from the live model's by {share:.2%}.", file=sys.stderr)
    pairs = [(written, expected)] if export.forms or not another else []
    pairs += [(merged, live)] if not another else []  # another base is another model
    error = max((_rms(a - b) for a, b in pairs), default=0.0)
    allowed = FACTOR * noise + torch.finfo(model.dtype).eps * _rms(live)
    if not error <= allowed:
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
def _hooked(
    export: Export, hook: Callable[[Any, Any, Tensor], Tensor], others: Container[Weighted] = ()
) -> Iterator[None]:
    """Let the output of each projection, and of the ``others``, go through ``hook``."""
    hooked = [m for m in export.model.modules() if isinstance(m, Linear) or (isinstance(m, Weighted) and m in others)]
    hooks = [m.register_forward_hook(hook) for m in hooked]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _noise(export: Export) -> contextlib.AbstractContextManager[None]:
    """Disturb each projection's output by one rounding, relative to its size: half a unit in the last place of the
    dtype computed in and, if its weight was written anew, of the dtype written (for codes, of the one that they are
    dequantised to), and what summing in fp32 adds."""
    generator = torch.Generator().manual_seed(1)
    anew = {*export.forms, *export.held, *filter(export.merges, export.modules)}
    dtypes = {n: export.model.dtype if n in export.forms else export.dtype_of(n) for n in anew}
    written = {export.modules[name]: torch.finfo(dtype).eps for name, dtype in dtypes.items()}

    def disturb(module: Weighted, inputs: Any, y: Tensor) -> Tensor:
        summing = torch.finfo(torch.float32).eps * math.sqrt(module.weight.shape[-1])
        size = (torch.finfo(y.dtype).eps + written.get(module, 0.0) + summing) / 2
        return y + y * (size * torch.randn(y.shape, generator=generator)).to(y)

    return _hooked(export, disturb, written)


def _multiplied(export: Export, weight: Callable[[str], Tensor]) -> contextlib.AbstractContextManager[None]:
    """Let each projection that is written in few bits or merged multiply by ``weight(name)``, computed when it runs."""
    names = {
        m: n for n, m in export.modules.items() if isinstance(m, Linear) and (n in export.forms or export.merges(n))
    }

    def replace(linear: Linear, inputs: Any, y: Tensor) -> Tensor:
        if linear not in names:
            return y
        name = names[linear]
        bias = f"{name.removesuffix('weight')}bias"
        b = weight(bias) if bias in export.biases else linear.bias
        w, b = weight(name).to(y.device, torch.float32), None if b is None else b.to(y.device, torch.float32)
        return F.linear(inputs[0].float(), w, b).to(y.dtype)

    return _hooked(export, replace)


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
