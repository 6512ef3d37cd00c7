"""What is compiled: built where there is a C compiler, left out where there is none, or with LARDER_PURE=1."""

import os

from setuptools import Extension, setup

TOPK, COLUMNS = "cache/topk/native", "cache/native"
HEADERS = {
    TOPK: ("exact", "state", "candidates", "passes", "block"),
    COLUMNS: (
        "announced",
        "taken",
        "products",
        "dots",
        "flights",
        "hashes",
        "parts",
        "requests",
        "replies",
        "rows",
        "lists",
        "answers",
        "streams",
    ),
}


def compiled(name: str, folder: str, *libraries: str) -> Extension:
    """An extension of one file and its headers."""
    return Extension(
        name,
        [f"{folder}/{name.rpartition('._')[2]}.c"],
        depends=[*(f"{folder}/{each}.h" for each in HEADERS[folder]), f"{COLUMNS}/products.h"],
        # No multiply-add may be fused: numbers have the same bits with and without what is compiled.
        extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off"],
        libraries=list(libraries),
        optional=True,
    )


# For a wheel of any platform; FAISS and numpy do what is compiled otherwise.
IS_PURE = os.environ.get("LARDER_PURE", "0") == "1"

setup(
    ext_modules=[] if IS_PURE else [compiled("cache.topk._topk", TOPK, "m"), compiled("cache.native._columns", COLUMNS)]
)
