"""Resources of the kernels compiled for an H100 or H200, on a machine that has none, as JSON lines."""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from precompute.device import fused
from precompute.device.kernels import above, keep, keys

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
HOPPER = GPUTarget("cuda", 90, 32)
HALF, FLOAT, INT, LONG = "*fp16", "*fp32", "*i32", "*i64"
TYPES = {
    above.above: [HALF, FLOAT, FLOAT, "", FLOAT, INT, INT, *["i32"] * 5, "fp32"],
    keep.keep: [INT, INT, INT, INT, FLOAT, FLOAT, "i32"],
    keys.exact: [FLOAT, FLOAT, FLOAT, FLOAT, INT, FLOAT, LONG, LONG, LONG, LONG, "i32", "i32"],
    keys.leading: [LONG, LONG, "i32", "i32"],
}


def compiled(kernel: Any, options: dict[str, Any], **constants: Any) -> dict[str, Any]:
    """Compile one kernel and return its relevant counts."""
    tile = f"tensordesc<fp16[{constants.get('tile')},{constants.get('depth')}]>"
    types = [argument_type or tile for argument_type in TYPES[kernel]] + ["constexpr"] * len(constants)
    source = ASTSource(
        fn=kernel,
        signature=dict(zip(kernel.arg_names, types, strict=True)),
        constexprs={(kernel.arg_names.index(constant_name),): value for constant_name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at, kind in enumerate(types) if kind[0] == "*"},
    )
    compiled_kernel = triton.compile(source, target=HOPPER, options=options)
    code = compiled_kernel.asm["ptx"]
    spilled, registers = used_by(code)
    return {
        "registers": registers,
        "spilled_bytes": spilled,
        "name": kernel.__name__,
        "shared_bytes": compiled_kernel.metadata.shared,
        "warpgroup_products": code.count("wgmma.mma_async"),
        "fused_multiply_adds": code.count("fma.rn"),
        "approximate_divisions": code.count("div.full") + code.count("div.approx"),
    }


def used_by(code: str) -> tuple[int, int]:
    """Return (bytes of spilled registers, registers per thread), by Triton's own assembler."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(code)
        command = [str(PTXAS), "-arch=sm_90a", "-v", str(path), "-o", str(path.with_suffix(".cubin"))]
        assembler_output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (spilled,), (registers,) = (
        re.findall(r"(\d+) bytes spill stores", assembler_output),
        re.findall(r"Used (\d+) registers", assembler_output),
    )
    return int(spilled), int(registers)


def main() -> None:
    """Compile the kernels for 1 M items, from 40 numbers to the widest vectors."""
    for width in (40, 128, 256, fused.WIDTH_MAX):
        depth = 1 << (width - 1).bit_length()
        tiles = fused.choose_triton_tiles(width)
        writing, constraints = above.entry_instructions(tiles.tile_columns // 16)
        shape = {
            "width": width, "depth": depth, "height": tiles.tile_users, "lanes": 64, "size": 4,
            "tile": tiles.tile_columns,
            "splits": 8, "room": 64, "stages": tiles.pipeline_stages, "skip": 3, "hole": 2, "near": depth <= 256,
            "writing": writing, "constraints": constraints,
        }  # fmt: skip
        options = {
            "num_warps": tiles.warp_count,
            "num_stages": tiles.pipeline_stages,
            "maxnreg": tiles.thread_registers_max,
        }
        print(json.dumps(compiled(above.above, options, **shape)), flush=True)
    shape = {"height": 1, "segments": 32, "room": 64, "capacity": 256, "halvings": 12}
    print(json.dumps(compiled(keep.keep, {"num_warps": 8}, **shape)), flush=True)
    for cosine in (False, True):
        shape = {"steps": 32, "unroll": 8, "size": 4, "capacity": 256, "part": 64}
        options = {"num_warps": 2, "enable_fp_fusion": False, "maxnreg": fused.EXACT_REGISTERS}
        print(json.dumps(compiled(keys.exact, options, **shape, cosine=cosine)), flush=True)
    shape = {"height": 1, "size": 4, "wide": 256, "padded_k": 128}
    print(json.dumps(compiled(keys.leading, {"num_warps": 1}, **shape)), flush=True)


if __name__ == "__main__":
    main()
