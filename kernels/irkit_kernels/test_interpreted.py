"""Triton's interpreter runs the kernels for GPUs on any machine.

The interpreter replaces Triton's functions for good, so all files share one process of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from irkit_kernels._testing import interpreted, needs_no_gpu

PASSED = {
    "_products/test_products.py": 2,
    "gated_product/test_gated_product_triton.py": 2,
    "maxsim/test_maxsim_triton.py": 21,
    "ragged_pool/test_ragged_pool_triton.py": 10,
    "residual_maxsim/test_residual_maxsim_triton.py": 3,
    "rotary/test_rotary_triton.py": 1,
    "row_norm/test_row_norm_triton.py": 1,
    "splade_pool/test_splade_pool_triton.py": 10,
}


@needs_no_gpu
def test_kernels_agree_with_the_definition_in_the_interpreter():
    pytest.importorskip("triton")
    folder = Path(__file__).parent
    assert interpreted([str(folder / file) for file in PASSED]) == {
        Path(file).name: number for file, number in PASSED.items()
    }
