"""The kernels of a decoding step without a GPU: compiled for one, and by Triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from leeway.actors import decode_kernels
from leeway.actors.decode_kernels import COLUMNS, MANY, NORMED, PLAIN, Tile

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
RULES = Path(__file__).with_name("decode_kernels_rules.py")
SMALL = {"HIDDEN": 256, "NUM_Q": 8, "NUM_KV": 4, "WIDTH": 32, "HALF": 16}
WIDE = {"HIDDEN": 576, "NUM_Q": 9, "NUM_KV": 3, "WIDTH": 64, "HALF": 32}
BARE = {"HAS_BIAS": False, "HAS_HEAD_NORMS": False}
BOTH = {"HAS_BIAS": True, "HAS_HEAD_NORMS": True}
PRODUCT = {"COLUMNS": COLUMNS, "NUM_OUT": 640, "NUM_IN": 256}
WITH_NORM = {"HAS_NORM": True, "HAS_BIAS": True, "IS_GATED": False, "IS_ADDED": False}
READ = {"GROUP": 3, "WIDTH": 64, "PADDED_GROUP": 16, "PADDED_WIDTH": 64, "BLOCK": 64}
READ_WIDE = {"GROUP": 8, "WIDTH": 128, "PADDED_GROUP": 16, "PADDED_WIDTH": 128, "BLOCK": 32}
TENSORS = (
    *("x", "norm", "weight", "bias", "q_norm", "k_norm", "rotary", "cache", "q_out", "q"),
    *("out", "logits", "uniform"),
)


def kind(name: str, constants: dict[str, int], dtype: str) -> str:
    """Type of a kernel's parameter, by its name."""
    if name in constants:
        return "constexpr"
    if name in ("slot", "position", "state"):
        return "*i64"
    if name in ("eps", "scale"):
        return "fp32"
    if name == "out" and "SIZE" in constants:
        return "*fp64"
    return f"*{dtype}" if name in TENSORS else "i32"


def test_the_kernels_under_the_interpreter():
    # Triton decides at its import whether it interprets: hence a process of their own.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(RULES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
    assert "25 passed" in ended.stdout


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "constants", "tile"),
    [
        ("_project", {**SMALL, **BARE}, NORMED),
        ("_project", {**WIDE, **BOTH}, NORMED),
        ("_project", {**SMALL, **BOTH}, MANY),
        ("_linear", {**PRODUCT, **WITH_NORM}, NORMED),
        ("_linear", {**PRODUCT, **WITH_NORM, "IS_GATED": True}, NORMED),
        ("_linear", {**PRODUCT, **WITH_NORM, "IS_GATED": True}, MANY),
        ("_linear", {**PRODUCT, **WITH_NORM, "HAS_NORM": False, "IS_ADDED": True}, PLAIN),
        ("_read_cache", READ, None),
        ("_read_cache", READ_WIDE, None),
        ("_sample", {"SIZE": 49_152, "BLOCK": decode_kernels.VOCABULARY}, None),
    ],
)
def test_each_kernel_compiles_for_a_gpu_without_spilling(
    name: str, constants: dict[str, int], tile: Tile | None, dtype: str, tmp_path: Path
):
    options: dict[str, int] | None = None
    if tile is not None:
        constants = {**constants, "ROWS": tile.rows, "DEPTH": tile.depth}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
    kernel = getattr(decode_kernels, name)
    types = {n: kind(n, constants, dtype) for n in kernel.arg_names}
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(kernel.arg_names.index(n),): value for n, value in constants.items()},
        # As for tensors that torch allocates.
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(kernel.arg_names)
            if types[n].startswith("*") and n not in ("slot", "position")
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= 99 * 1024  # bytes that a program may have of small cards
    (tmp_path / "k.cubin").write_bytes(compiled.asm["cubin"])
    used = subprocess.run(
        [CUOBJDUMP, "-res-usage", tmp_path / "k.cubin"], capture_output=True, text=True, check=True
    )
    # Bytes of a thread's variables that its registers do not hold.
    assert re.findall(r"STACK:(\d+)", used.stdout) == ["0"], used.stdout
