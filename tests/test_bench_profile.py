"""Kernels by kind, and times of those that overlap."""

from attnops.bench.profile import Ran, shares


def test_names():
    names = {
        "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_splitK_TNT": "matmul", "void cublasLt::splitKreduce_kernel<32, 16, int>": "matmul",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>": "matmul", "triton_tem_fused_mm_3": "matmul",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::Main>>": "attention", "attend": "attention", "combine": "attention",
        "cudnn_generated_fort_native_sdpa_sm80_flash_fprop": "attention", "store": "glue",
        "triton_poi_fused__scaled_dot_product_cudnn_attention__to_copy": "glue", "triton_red_fused_add_mean_mul_pow_rsqrt_13": "glue",
    }  # fmt: skip
    assert all(shares([Ran(name, 0, 1)])[kind] == 1 for name, kind in names.items())


def test_overlaps_are_counted_once_and_gaps_are_found():
    """Stage two of a split attention is launched while stage one runs, and waits for it."""
    found = shares([Ran("combine", 12, 20), Ran("attend", 10, 18), Ran("nvjet", 25, 30), Ran("store", 31, 33)])
    assert found == {"matmul": 5, "attention": 10, "glue": 2, "gaps": 6}
    assert sum(found.values()) == 33 - 10
    assert sum(shares([]).values()) == 0
