"""Make `.venv`, install trivium into it, and run one of its commands. Needs nothing but Python 3.11 or later.

    python bootstrap.py demo        train a GPT on Shakespeare for about 90 seconds; FAMILY=bert, t5 or all in the
                                    environment for the other demos
    python bootstrap.py check       format, lint and types
    python bootstrap.py test        check, then the default tests
    python bootstrap.py test-full   check, then every test with its full count
    python bootstrap.py install     only install

Your pip settings are honoured. If the Python that runs this has torch 2.11 or later (outside a virtual
environment), that one is used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOME = HERE / ".venv"
PYTHON = HOME / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = HOME / "trivium-stamp"
# the tests that Triton's kernels have, where there is no GPU; of the slow ones of decoding one for each kernel
_FUSED = "tests/generation/test_fused.py"
INTERPRETED = (
    "tests/kernels",
    "tests/fast",
    "tests/models/test_post_norm.py",
    "tests/optim/test_fused_adam.py",
    f"{_FUSED}::test_the_attention_kernel_is_the_plain_attention",
    f"{_FUSED}::test_products_with_all_that_goes_with_them",
    f"{_FUSED}::test_the_fused_step_has_the_scores_of_the_plain_one[llama-dtype0-2e-05-1-False]",
    f"{_FUSED}::test_prompts_are_read_into_slots_as_into_a_cache[llama-2048]",
)


def own_torch() -> str:
    """The version of torch that the calling Python already has, if it is recent enough and `.venv` can see it."""
    if sys.prefix != sys.base_prefix:  # called from a virtual environment: a new one sees nothing of it
        return ""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    return version if numbers >= (2, 11) else ""


def constraints(torch: str) -> Path:
    """The pins to install with: a torch that is there already is not replaced, nor the Triton that it needs."""
    pins = HERE / "constraints.txt"
    if not torch:
        return pins
    kept = [line for line in pins.read_text().splitlines() if not line.startswith(("torch==", "triton=="))]
    path = HOME / "constraints.txt"
    path.write_text("\n".join([*kept, f"torch=={torch}"]) + "\n")
    return path


def install(extra: str) -> None:
    """Bring `.venv` up to date; instant if nothing changed since the last call."""
    torch = own_torch()
    content = [(HERE / name).read_bytes() for name in ("pyproject.toml", "constraints.txt", "bootstrap.py")]
    wanted = hashlib.sha256(b"".join(content) + f"{sys.version}{torch}{HERE}".encode()).hexdigest()
    have = STAMP.read_text().split() if STAMP.is_file() else []
    if have[:1] == [wanted] and (not extra or extra in have[1:]):
        return
    if not has_pip():
        say(f"making {HOME.name}")
        venv.create(HOME, with_pip=True, clear=True, system_site_packages=bool(torch))
    target = f"{HERE}[{extra}]" if extra else str(HERE)
    say(f"installing trivium{' with what its tests need' if extra else ''} (torch alone is hundreds of MB)")
    run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints(torch)), "-e", target)
    extras = {extra, *(have[1:] if have[:1] == [wanted] else [])} - {""}
    STAMP.write_text(" ".join([wanted, *sorted(extras)]))


def has_pip() -> bool:
    """Whether `.venv` is whole: making it may have been interrupted."""
    command = [str(PYTHON), "-m", "pip", "--version"]
    return PYTHON.exists() and not subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run(*arguments: str, **environment: str) -> None:
    """Run the installed Python; its exit code is ours if it fails."""
    child = subprocess.Popen([str(PYTHON), *arguments], cwd=HERE, env={**os.environ, **environment})
    while True:
        try:
            code = child.wait()
            break
        except KeyboardInterrupt:  # the child has heard it too, and may need a moment to save its work
            continue
    if code:
        sys.exit(code if code > 0 else 128 - code)


def say(text: str) -> None:
    if text:
        print(f"bootstrap: {text}", file=sys.stderr, flush=True)


def activation(home: Path = HOME) -> str:
    """How a shell finds the installed `trivium`; empty if this one does already."""
    if os.environ.get("VIRTUAL_ENV") and Path(os.environ["VIRTUAL_ENV"]).resolve() == home.resolve():
        return ""
    folder = home.name if Path.cwd() == home.parent else str(home)
    if os.name == "nt":
        activate, direct = f"{folder}\\Scripts\\activate", f"{folder}\\Scripts\\trivium"
    else:
        suffix = {"fish": ".fish", "csh": ".csh", "tcsh": ".csh"}.get(Path(os.environ.get("SHELL", "")).name, "")
        activate, direct = f"source {folder}/bin/activate{suffix}", f"{folder}/bin/trivium"
    return f"to use `trivium` in this shell type `{activate}`; without that it is `{direct}`"


def check() -> None:
    run("-m", "ruff", "format", "--check", ".")
    run("-m", "ruff", "check", ".")
    run("-m", "mypy")


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever calls this may have an older one
        sys.exit(f"trivium needs Python 3.11 or later, and this is {sys.version.split()[0]}")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as the command line sets it: share the cores with others
    command = sys.argv[1] if len(sys.argv) == 2 else ""
    if command == "demo":
        install("")
        try:
            run("-m", "trivium", "demo", "--family", os.environ.get("FAMILY") or "gpt")
        finally:  # after an interruption too: its message names a command
            say(activation())
    elif command == "install":
        install("")
        say(activation())
    elif command in ("check", "test", "test-full"):
        install("dev")
        check()
        if command != "check":
            # tests keep to one thread each, so that every core can have some of them
            spread = ("-n", str(min(4, os.cpu_count() or 1)), "--dist", "worksteal")
            full = ["--full"] if command == "test-full" else []
            if sys.platform == "linux":  # before the rest: it says soonest whether a kernel is wrong
                say("the kernels, in Triton's interpreter")
                run("-m", "pytest", *spread, *full, *INTERPRETED, TRITON_INTERPRET="1")
            run("-m", "pytest", *spread, *full)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
