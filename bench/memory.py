"""What training takes of a CPU's memory, beside the estimate that runs are fitted by: one step in two parts.

Every row is a process of its own. The peak is the kernel's (VmHWM), less what the process had before the model was
made; the estimate is that of `trivium.training.fit`, and the ratio that of activations: peak less weights, gradients
and optimizer over the estimated activations. A run is let in with 1.25, and one layer more (`fit.temporary`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "trivium" / "assets" / "shakespeare-train.txt.gz"
OBJECTIVES = {"decoder": "causal", "encoder": "masked", "encoder-decoder": "denoise"}
CASES = (
    ("gpt2", "bf16", 2),
    ("gpt2", "fp32", 2),
    ("gpt2", "bf16", 2, "model.decoder.block.attention.dropout=0"),
    ("bert-base-uncased", "bf16", 4),
    ("bert-base-uncased", "fp32", 4),
    ("bert-large-uncased", "bf16", 2),
    ("smollm2-135m", "bf16", 1),
    ("t5-small", "bf16", 8),
    ("bart-base", "bf16", 2),
    ("transformer-base", "bf16", 8),
)


def measured(preset: str, precision: str, rows: int, *settings: str) -> dict[str, Any]:
    """The peak and the estimate of one case, found in a process of its own."""
    command = [sys.executable, "-m", "bench.memory", "--case", preset, precision, str(rows), *settings]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def take_steps(preset: str, precision: str, rows: int, settings: list[str]) -> dict[str, Any]:
    """One step in this process."""
    from trivium import config
    from trivium.models.presets import PRESETS
    from trivium.training import fit
    from trivium.training.build_job import build_job
    from trivium.training.loop import updates
    from trivium.training.recipe import Recipe
    from trivium.training.setup import create_run

    layer = config.assignments(
        [
            *(f"model={preset}", f"precision={precision}", f"batch.rows={2 * rows}", f"batch.micro={rows}"),
            *(f"objective={OBJECTIVES[PRESETS[preset]().family]}", f"data.paths={TEXT}", "tokenizer=bytes"),
            *("model.vocab=0", "budget.steps=1", "device=cpu", "memory=try", "name=memory"),
            *settings,
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        context = create_run(
            config.load(Recipe, layer), Path(folder), say=lambda text: None, tick=lambda what, at, of: None
        )
        before = status("VmRSS")
        job = build_job(context, 1)
        assert all(update.loss.isfinite() for update in updates(job, ahead=0))
    estimate = fit.memory_of(context.recipe, context.recipe.model, rows, context.longest)
    peak = status("VmHWM") - before
    return {
        "process": before,
        "peak": peak,
        "estimate": estimate.total,
        "ratio": (peak - estimate.fixed) / estimate.activations,
    }


def status(key: str) -> int:
    """A number of bytes that Linux knows of this process."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[key].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", help="preset, precision, rows and settings of a single case, as JSON")
    case = parser.parse_args().case
    if case:
        print(json.dumps(take_steps(case[0], case[1], int(case[2]), case[3:])))
        return
    print("| preset | precision | rows | settings | peak | estimate | of activations |\n|---|---|---|---|---|---|---|")
    for preset, precision, rows, *settings in CASES:
        found = measured(preset, precision, rows, *settings)
        sizes = f"{found['peak'] / 1e9:.2f} GB | {found['estimate'] / 1e9:.2f} GB | {found['ratio']:.2f}"
        print(f"| `{preset}` | {precision} | {rows} | {' '.join(settings)} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
