"""The compiled top-K: built where there is a C compiler, left out where there is none."""

from setuptools import Extension, setup

FOLDER = "precompute/scoring/native"
HEADERS = ("exact", "state", "candidates", "passes", "block")

setup(
    ext_modules=[
        Extension(
            "precompute.scoring._topk",
            [f"{FOLDER}/topk.c"],
            depends=[f"{FOLDER}/{name}.h" for name in HEADERS],
            # No multiply-add may be fused: scores have the same bits with and without the kernel.
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off"],
            libraries=["m"],
            optional=True,
        )
    ]
)
