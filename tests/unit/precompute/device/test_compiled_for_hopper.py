"""The CUDA kernels compile for a Hopper GPU that this machine does not have, into what was meant."""

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="scoring on a device needs torch: make torch-env")
triton = pytest.importorskip("triton", reason="it brings the disassembler: make torch-env")
pytest.importorskip("cuda.bindings.nvrtc", reason="the compiler of CUDA: make torch-env")

from precompute.device import fused, hopper  # noqa: E402
from precompute.device.columns import BLOCK_GROUPS, SPLITS  # noqa: E402
from precompute.device.fused import SEGMENTS  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SPILLED_BYTES = 32
"""More than that a thread would fetch again and again from memory."""


def disassembled(name, constants, folder):
    """(assembly, bytes of a thread's stack) of a kernel."""
    path = folder / f"{name}.cubin"
    path.write_bytes(hopper.compile_kernel(name, constants))
    assembly, resources = (
        subprocess.run([str(CUOBJDUMP), option, str(path)], capture_output=True, text=True, check=True).stdout
        for option in ("--dump-sass", "--dump-resource-usage")
    )
    (stack_bytes,) = re.findall(r"STACK:(\d+)", resources)
    return assembly, int(stack_bytes)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_products_are_of_warpgroups_and_stay_in_registers(chunks, tmp_path):
    constants = hopper.ring_constants(chunks) | {"SPLITS": SPLITS, "LANES": BLOCK_GROUPS}

    assembly, stack_bytes = disassembled("above", constants, tmp_path)

    # Two halves of 64 users, and four steps of 16 numbers in each chunk
    assert assembly.count("HGMMA.64x128x16.F32") == 8 * chunks
    assert assembly.count("UTMALDG.2D") > 0 and stack_bytes == 0


def test_exact_sums_are_rounded_twice(tmp_path):
    assembly, stack_bytes = disassembled("exact", {}, tmp_path)

    # Only the division by the cosine's lengths, which is exact, has fused operations.
    product, division = assembly.partition("MUFU.RCP")[::2]
    assert "FFMA" not in product and "FMUL" in product and "FADD" in product and division
    assert stack_bytes <= SPILLED_BYTES


@pytest.mark.parametrize("capacity", [32, 64, 256])
def test_bounds_of_a_user_stay_in_registers(capacity, tmp_path):
    constants = {
        "CAPACITY": capacity, "SEGMENTS": SEGMENTS, "ROOM": hopper.KEEP_ROOM, "HALVINGS": fused.HALVINGS,
    }  # fmt: skip

    assert disassembled("keep", constants, tmp_path)[1] == 0


@pytest.mark.parametrize("numbers", [2, 4, 8])
def test_users_are_encoded_in_registers(numbers, tmp_path):
    constants = {"NUMBERS": numbers, "ROUND_UP": hopper.ROUND_UP, "LEAST": hopper.ROUND_UP_SUMMAND}

    assert disassembled("encode", constants, tmp_path)[1] <= SPILLED_BYTES


def test_a_failed_compilation_is_reported_with_the_compilers_words():
    with pytest.raises(RuntimeError, match="SEGMENTS"):
        hopper.compile_kernel("keep", {})
